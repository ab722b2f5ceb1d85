"""Gemma 4's checkpoints: both forms of config.json, published sizes, multimodal files, quantised ones and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_formats import FORMATS
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import SIZES, byte_level_metadata, save_model

from specjax.checkpoint import CheckpointError, load_params, model_config, resolve
from specjax.config import LayerKinds, RopeConfig
from specjax.models import make_target
from specjax.models.target import hidden_states
from specjax.parallel.sharding import page_bytes

SLIDING, FULL = "sliding_attention", "full_attention"
BASE: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 6, "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL] * 2, "final_logit_softcapping": 30.0,
}  # fmt: skip
SMALL = BASE | {
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "num_key_value_heads": 1,
    "vocab_size_per_layer_input": 300,
}  # fmt: skip
LARGE = BASE | {
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read(folder: Path, quantization: str = "auto"):
    files = resolve(str(folder), progress=False)
    config = model_config(files.config, dtype="float32")
    return config, load_params(files, config, quantization=quantization, progress=False)


def published(name: str, layers: int, hidden: int, width: int, heads: tuple[int, int, int | None], **more: Any) -> Any:
    text = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": width, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "num_global_key_value_heads": heads[2], "head_dim": 256,
        "global_head_dim": 512, "vocab_size": 262144, "rope_parameters": ROPES, "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": None, "attention_bias": False,
        "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    return {"architectures": [f"{name}ForConditionalGeneration"], "dtype": "bfloat16", "text_config": text | more}


INPUTS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
VALUES = {"attention_k_eq_v": True, "use_bidirectional_attention": "vision", "sliding_window": 1024}
EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
FIFTH = {"layer_types": ([SLIDING] * 4 + [FULL]) * 7, "use_double_wide_mlp": True, "num_kv_shared_layers": 20}
PUBLISHED: dict[str, tuple[Any, int]] = {
    "E2B": (published("Gemma4", 35, 1536, 6144, (8, 1, None), **INPUTS, **FIFTH), 9_216),
    "E4B": (published("Gemma4", 42, 2560, 10240, (8, 2, None), **INPUTS, num_kv_shared_layers=18), 28_672),
    "12B": (published("Gemma4Unified", 48, 3840, 15360, (16, 8, 1), **VALUES), 172_032),
    "26B-A4B": (published("Gemma4", 30, 2816, 2112, (16, 8, 2), **VALUES, **EXPERTS), 112_640),
    "31B": (published("Gemma4", 60, 5376, 21504, (32, 16, 4), **VALUES), 450_560),
}
"""config.json as published, and the numbers of a token's keys and values."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    described, numbers = PUBLISHED[name]
    config = model_config(described, dtype="bfloat16")
    assert page_bytes(make_target(config).pages) == 2 * numbers
    kinds = config.kinds
    assert isinstance(kinds, LayerKinds) and kinds.head_dim == 512 and config.logit_softcap == 30
    assert config.rope == RopeConfig(theta=1e6, scaling="proportional", partial=0.25)
    assert config.window_rope == RopeConfig(theta=1e4)
    assert config.tied_embeddings and config.window(config.num_layers - 1) is None
    if name == "E2B":
        assert {config.owner(layer) for layer in range(15, 35)} == {13, 14} and config.owner(14) == 14
        assert config.owner(34) == 14 and config.owner(15) == 13
    assert (config.experts is None) == (name != "26B-A4B")


def test_two_forms_of_a_config():
    """transformers writes the sizes of layers without a window in `per_layer_config`."""
    described, _ = PUBLISHED["12B"]
    text = dict(described["text_config"])
    del text["global_head_dim"], text["num_global_key_value_heads"]
    text["per_layer_config"] = {str(i): {"head_dim": 512, "num_key_value_heads": 1} for i in range(5, 48, 6)}
    saved = described | {"text_config": text}
    assert model_config(saved, dtype="float32") == model_config(described, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; supported: null or vision"),
        ({"per_layer_config": {"3": {"head_dim": 64}}}, r"per_layer_config of layer 3 is \{'head_dim': 64\}"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config of layer 11"),
        ({"per_layer_config": {"5": {"width": 512}}}, "per_layer_config of layer 5"),
        ({"num_kv_shared_layers": 44}, "num_kv_shared_layers is 44; a number that leaves a layer of each kind"),
        ({"num_global_key_value_heads": 3}, "num_key_value_heads is 3; a divisor of num_attention_heads"),
        ({"attention_bias": True}, "attention_bias is True; supported: false"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts is 5; at most 4"),
    ],
)
def test_refused_configs(changes, problem):
    described, _ = PUBLISHED["12B"]
    with pytest.raises(CheckpointError, match=problem):
        model_config(described | {"text_config": described["text_config"] | changes}, dtype="float32")


def test_float16_is_refused():
    with pytest.raises(CheckpointError, match="float16 is too small for the activations of Gemma4"):
        model_config(PUBLISHED["E2B"][0], dtype="float16")
    assert model_config(PUBLISHED["E2B"][0] | {"dtype": "float16"}, platform="gpu").dtype == "bfloat16"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_multimodal_checkpoint(tmp_path):
    """Published files have towers for images and sound, and keys and values of layers that share those of others."""
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    save_model(plain, "Gemma4ForCausalLM", **SMALL)
    tensors = tensors_of(plain)
    assert "model.layers.2.self_attn.k_proj.weight" not in tensors
    for layer, size in ((2, 16), (3, 32)):
        for name, shape in (("k_proj", (size, 32)), ("v_proj", (size, 32)), ("k_norm", (size,))):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = np.ones(shape, np.float32)
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    towers = ("model.vision_tower.x", "model.audio_tower.x", "model.embed_vision.x", "model.embed_audio.x")
    whole.mkdir()
    save_file(renamed | dict.fromkeys(towers, np.zeros(3, np.float32)), whole / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": True}
    (whole / "config.json").write_text(json.dumps(outer))
    (expected_config, expected), (config, params) = read(plain), read(whole)
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_tokens_without_own_embeddings(tmp_path):
    save_model(tmp_path, "Gemma4ForCausalLM", **SMALL | {"vocab_size_per_layer_input": 200})
    config, params = read(tmp_path)
    rows = np.asarray(make_target(config).embed(params, jnp.array([[0, 199, 200, 299]], jnp.int32)))[0]
    width = config.hidden_size
    assert rows.shape == (4, width + 4 * 8)
    np.testing.assert_array_equal(rows[2:, width:], rows[[0, 0], width:])
    assert (rows[1, width:] != rows[0, width:]).all() and (rows[2, :width] != rows[0, :width]).any()


# GGUF

GGUF_ENDS = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
GGUF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **{f"self_attn.{n}_proj.weight": f"attn_{n}.weight" for n in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{n}_proj.weight": f"ffn_{n}.weight" for n in ("gate", "up", "down")},
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}


def write_gguf(file: Path, tensors: dict[str, np.ndarray], sizes: dict[str, Any], kind: str | None = None) -> None:
    """As llama.cpp's converter writes Gemma 4. `kind`: type of matrices whose rows fit its blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    sizes = SIZES | sizes
    writer = GGUFWriter(file, "gemma4")
    pattern = [kind == SLIDING for kind in sizes["layer_types"]]
    shared, width = sizes.get("num_kv_shared_layers", 0), sizes["intermediate_size"]
    wide = shared if sizes.get("use_double_wide_mlp") else 0
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length([width] * (4 - wide) + [2 * width] * wide if wide else width)
    writer.add_block_count(4)
    writer.add_head_count(sizes["num_attention_heads"])
    kv_heads, full_heads = sizes["num_key_value_heads"], sizes.get("num_global_key_value_heads")
    writer.add_head_count_kv([kv_heads if slides else full_heads for slides in pattern] if full_heads else kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_float32("gemma4.rope.freq_base_swa", 1e4)
    writer.add_sliding_window(sizes["sliding_window"])
    writer.add_array("gemma4.attention.sliding_window_pattern", pattern)
    writer.add_uint32("gemma4.attention.shared_kv_layers", shared)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", sizes["hidden_size_per_layer_input"])
    writer.add_key_length(32)
    writer.add_uint32("gemma4.attention.key_length_swa", 16)
    writer.add_float32("gemma4.final_logit_softcapping", 30.0)
    if sizes.get("enable_moe_block"):
        writer.add_expert_count(sizes["num_experts"])
        writer.add_expert_used_count(sizes["top_k_experts"])
        writer.add_uint32("gemma4.expert_feed_forward_length", sizes["moe_intermediate_size"])
    metadata = byte_level_metadata()
    metadata["tokens"] = ["<pad>", "<eos>", "<bos>", "<unk>", "<|channel>", *(f"<0x{i:02X}>" for i in range(256))]
    metadata["tokens"] += ["\u2581", "h", "i", "hi", "\u2581hi", *(f"<unused{i}>" for i in range(34))]
    metadata |= {"model": "gemma4", "merges": ["h i", "\u2581 hi"], "bos_token_id": 2, "eos_token_id": 1}
    metadata |= {"token_type": [3, 3, 3, 2, 4] + [6] * 256 + [1] * 39, "unknown_token_id": 3, "padding_token_id": 0}
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        if key not in ("pre", "add_bos_token"):
            add(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, np.float32))
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        _, _, rest = name.partition(".")
        layer, _, rest = rest.partition(".")
        stored = GGUF_ENDS.get(name) or f"blk.{layer}.{GGUF_LAYER[rest]}"
        quant = kind and GGMLQuantizationType[kind]
        if quant and tensor.ndim > 1 and tensor.shape[-1] % GGML_QUANT_SIZES[quant][0] == 0:
            writer.add_tensor(stored, quantize(tensor, quant), raw_dtype=quant)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["shared", "experts"])
def test_gguf(tmp_path, sizes):
    save_model(tmp_path / "plain", "Gemma4ForCausalLM", **sizes)
    write_gguf(tmp_path / "model.gguf", tensors_of(tmp_path / "plain"), sizes)
    (expected_config, expected), (config, params) = read(tmp_path / "plain"), read(tmp_path / "model.gguf")
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["shared", "experts"])
def test_quantised_gguf(tmp_path, sizes):
    """Experts and the layers' own embeddings stay in blocks, and give nearly the same logits."""
    save_model(tmp_path / "plain", "Gemma4ForCausalLM", **sizes)
    write_gguf(tmp_path / "model.gguf", tensors_of(tmp_path / "plain"), sizes, "Q8_0")
    (config, exact), (_, params) = read(tmp_path / "plain"), read(tmp_path / "model.gguf")
    target, tokens = make_target(config), jnp.array([[5, 6, 7, 8, 9]], jnp.int32)
    name = "experts_gate_up" if config.experts else "qkv"
    assert params["layers_0"][name].codes.dtype == np.int8
    if config.experts is None:
        assert params["embed_layers"].codes.dtype == np.int8
    x, y = (np.asarray(hidden_states(target, weights, tokens)) for weights in (params, exact))
    assert np.corrcoef(x.ravel(), y.ravel())[0, 1] > 0.99


def test_gguf_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    save_model(tmp_path / "plain", "Gemma4ForCausalLM", **SMALL)
    write_gguf(tmp_path / "model.gguf", tensors_of(tmp_path / "plain"), SMALL)
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(tmp_path / "model.gguf"), progress=False).folder)
    ids = tokenizer("hi hi<|channel>\u00e9")["input_ids"]
    assert ids == [2, 264, 265, 4, 5 + 0xC3, 5 + 0xA9]
    assert tokenizer.decode(ids[1:]) == "hi hi<|channel>\u00e9"


@pytest.mark.parametrize(("name", "dtype"), [("fp8 channels", "float8_e4m3fn"), ("nvfp4", "int8")])
def test_quantised_experts(tmp_path, name, dtype):
    """Quantised checkpoints have each expert's matrices by themselves."""
    save_model(tmp_path / "plain", "Gemma4ForCausalLM", **LARGE)
    tensors, form, rng = tensors_of(tmp_path / "plain"), FORMATS[name], np.random.default_rng(0)
    for stem in [name.removesuffix("gate_up_proj") for name in tensors if name.endswith("experts.gate_up_proj")]:
        both, down = tensors.pop(f"{stem}gate_up_proj"), tensors.pop(f"{stem}down_proj")
        for e in range(4):
            gate, up = np.split(both[e], 2)
            tensors |= {f"{stem}{e}.{n}_proj.weight": w for n, w in (("gate", gate), ("up", up), ("down", down[e]))}
    stored: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if not key.endswith("_proj.weight"):
            stored[key] = tensor
            continue
        written = form.write(tensor, rng)
        stored |= {f"{key.removesuffix('weight')}{part}": array for part, array in written.tensors.items()}
        tensors[key] = written.value
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for folder, weights, extra in (("few", stored, {"quantization_config": form.config}), ("wide", tensors, {})):
        (tmp_path / folder).mkdir()
        save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config | extra))
    (described, exact), (_, params) = read(tmp_path / "wide"), read(tmp_path / "few", "none")
    assert described.experts is not None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, exact)
    _, kept = read(tmp_path / "few")
    assert str(kept["layers_0"]["experts_down"].codes.dtype) == dtype
