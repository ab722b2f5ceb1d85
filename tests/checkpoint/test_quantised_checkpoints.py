"""Quantised checkpoints, written bit by bit, give the model of the dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from quantised_formats import FORMATS, in_mxfp4
from safetensors import torch as torch_files
from safetensors.numpy import load_file, save_file
from specjax_kernels import Quantised, dequantise, quantise
from test_parity import Reader
from tiny_checkpoints import save_model, write_gguf
from tqdm import tqdm

from specjax.checkpoint import CheckpointError, bits_per_weight, load_params, model_config, resolve
from specjax.checkpoint.parameters import make_leaf
from specjax.checkpoint.quantised import BLOCK_TYPES, read_blocks
from specjax.models import make_target
from specjax.models.params import Leaf, Scope, Tensor

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "tie_word_embeddings": False}


def save_quantised(folder: Path, name: str, *, head: bool = False, without: str = "") -> dict[str, np.ndarray]:
    """Write a tiny Llama whose layers (and output matrix) are quantised, and return its values."""
    save_model(folder, "LlamaForCausalLM", **SIZES)
    tensors, rng, form = load_file(folder / "model.safetensors"), np.random.default_rng(0), FORMATS[name]
    written, values = {}, {}
    for key, tensor in tensors.items():
        values[key] = tensor
        if key.endswith("proj.weight") or (head and key == "lm_head.weight"):
            stored = form.write(tensor, rng)
            values[key] = stored.value
            written |= {f"{key.removesuffix('weight')}{part}": array for part, array in stored.tensors.items()}
            written[f"{key.removesuffix('weight')}input_scale"] = np.float32([1])
        else:
            written[key] = tensor
    arrays = {key: np.ascontiguousarray(array) for key, array in written.items() if key != without}
    save_file(arrays, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": form.config}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def load(folder: Path, quantization: str = "none"):
    files = resolve(str(folder), progress=False)
    config = model_config(files.config, dtype="float32")
    return load_params(files, config, quantization=quantization, progress=False)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, name):
    """Dequantised, and kept in few bits."""
    head = name != "fp8 tensor"
    values = save_quantised(tmp_path / "quantised", name, head=head)
    save_model(tmp_path / "plain", "LlamaForCausalLM", **SIZES)
    original = np.asarray(load(tmp_path / "plain")["layers_0"]["down"])
    save_file(values, tmp_path / "plain" / "model.safetensors")
    plain, expected = load(tmp_path / "quantised"), load(tmp_path / "plain")
    assert jax.tree.structure(plain) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), plain, expected)
    change = np.abs(np.asarray(expected["layers_0"]["down"]) - original).max()
    assert change > 1e-4, "the quantisation changed nothing"

    params, sizes = load(tmp_path / "quantised", "auto"), {}
    for layer, leaf in (("layers_0", "qkv"), ("layers_1", "output"), ("layers_1", "gate_up"), ("layers_0", "down")):
        weight, dequantised = params[layer][leaf], np.asarray(plain[layer][leaf])
        assert isinstance(weight, Quantised)
        sizes[leaf] = weight.nbytes / dequantised.size
        kept = np.asarray(dequantise(weight))
        inputs = 1 if dequantised.shape[0] == kept.shape[-1] else 3
        flat = dequantised.reshape(kept.shape[-1], *dequantised.shape[inputs:])
        np.testing.assert_allclose(np.moveaxis(kept, -1, 0), flat, rtol=1e-6, atol=1e-7)
    assert isinstance(params["head"], Quantised) == head
    four_bits = name.endswith((" 4", "order", "v2")) or name.startswith(("int4", "awq"))  # nvfp4 is kept in 8
    assert max(sizes.values()) < (0.8 if four_bits else 1.4), sizes


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq 4", "float16", "gguf"])
def test_progress_line_has_bytes_read_and_held(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    folder, wide = tmp_path / "model", {"intermediate_size": 64}
    if name in FORMATS:
        save_quantised(folder, name)
    else:
        tensors = save_model(folder, "LlamaForCausalLM", dtype="float16" if name == "float16" else "float32", **wide)
        if name == "gguf":
            write_gguf(folder := tmp_path / "it.gguf", tensors, quantize=True, **wide)
    files = resolve(str(folder))
    params = load_params(files, model_config(files.config, dtype="float32"))
    read = sum(entry.size for key, entry in files.headers.items() if not key.endswith("input_scale"))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert held < 4 * sum(leaf.size for leaf in jax.tree.leaves(params)), "fewer bytes than in float32"
    read, held = (tqdm.format_sizeof(size, "B", 1000) for size in (read, held))
    pattern = rf"Loading {re.escape(str(folder))}: {read} in [\d.]+ s, bytes read; {held} held\n"
    printed = capsys.readouterr()
    assert re.search(pattern, printed.err) and printed.out == "", (pattern, printed)
    assert ("Converting" in printed.err) == (name == "gguf")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq 4", {"bits": 3}, "bits is 3; supported: 4, 8"),
        ("gptq 4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        ("awq", {"version": "gemv"}, "version of awq is 'gemv'; supported: gemm"),
        ("awq", {"quant_method": "bitsandbytes"}, "'bitsandbytes'; supported: fp8, gptq, awq, compressed-tensors"),
        ("nvfp4", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; supported: NVFP4, FP8"),
        ("int4 groups", {"format": "marlin-24"}, "format of compressed-tensors is 'marlin-24'"),
        ("int4 groups", {"config_groups": {}}, "no config_groups"),
        ("fp8 blocks", {"weight_block_size": 128}, "weight_block_size is 128; a list of two positive integers"),
        ("fp8 blocks", {"weight_block_size": [2**30, 2**30]}, "gate_proj in .* is \\[192, 64\\], and its codes and"),
        ("fp8 blocks", {"quant_method": "awq", "bits": 4}, "is awq, and no tensor is quantised that way"),
    ],
)
def test_refusals(tmp_path, name, change, message):
    save_quantised(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_missing_scale(tmp_path):
    save_quantised(tmp_path, "fp8 blocks", without="model.layers.0.mlp.down_proj.weight_scale_inv")
    with pytest.raises(CheckpointError, match=r"safetensors has no tensor model\.layers\.0\.mlp\.down_proj\."):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "part", "array"),
    [
        ("fp8 blocks", "weight_scale_inv", np.ones((3, 2), np.float32)),
        ("int8 channels", "weight_scale", np.ones((65, 1), np.float32)),
        ("int4 groups", "weight_shape", np.int64([2**40, 192])),
        ("gptq act order", "g_idx", np.full(192, 2**31 - 1, np.int32)),
        ("gptq 4", "qweight", np.zeros(8, np.int32)),
        ("awq", "scales", np.ones((2, 64), np.float16)),
        ("nvfp4", "weight_scale", np.ones((64, 6), np.float32)),
        ("nvfp4 compressed", "weight_global_scale", np.ones(64, np.float32)),
    ],
)
def test_wrong_part(tmp_path, name, part, array):
    save_quantised(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = torch_files.load_file(file)  # numpy has no float8
    assert f"model.layers.0.mlp.down_proj.{part}" in tensors
    tensors[f"model.layers.0.mlp.down_proj.{part}"] = torch.from_numpy(array)
    torch_files.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj"):
        load(tmp_path, "auto")


@pytest.mark.parametrize("size", ["x", 1.5, -2, 2**31, [1]])
def test_wrong_group_size(size):
    section = {"quant_method": "gptq", "bits": 4, "group_size": size}
    with pytest.raises(CheckpointError, match="group_size is"):
        bits_per_weight({"quantization_config": section})


def blocks(kind: str, rows: int, count: int, seed: int = 0) -> np.ndarray:
    """Random rows of blocks whose float16 scales are finite."""
    size = BLOCK_TYPES[kind].size
    array = np.random.default_rng(seed).integers(0, 256, (rows, count, size), np.uint8)
    for at in {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2)):
        array[..., at + 1] = array[..., at + 1] & 0xBF | 0x20  # the exponent is never all ones
    return array.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_gguf_blocks(kind):
    """Weights equal gguf's, and leaves have at most 3.5 bits more than the file."""
    rows = blocks(kind, 6, 2)
    expected = dequantize(rows, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(dequantise(read_blocks(kind, rows)).reshape(expected.shape), expected)
    leaf = Leaf("qkv", "I -> M", (Tensor("down", "M I"),))
    quantised = make_leaf([read_blocks(kind, rows)], Scope((leaf,)), leaf, {"M": 6, "I": expected.shape[1]})
    assert quantised is not None
    np.testing.assert_allclose(dequantise(quantised), expected, rtol=1e-6)
    assert quantised.nbytes <= rows.size + 3.5 / 8 * expected.size


GPT_OSS = SIZES | {"intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}


def save_gpt_oss(folder: Path) -> None:
    """Write a tiny gpt-oss in MXFP4, and its values by transformers to `plain`."""
    for place in (folder / "plain", folder):
        save_model(place, "GptOssForCausalLM", initializer_range=0.2, **GPT_OSS)
    save_file(in_mxfp4(folder), folder / "plain" / "model.safetensors", metadata={"format": "pt"})


def test_mxfp4_experts(tmp_path):
    """Weights equal those of transformers, dequantised and in four bits; and so do logits of few and many tokens."""
    import torch
    import transformers

    save_gpt_oss(tmp_path)
    params, plain, expected = load(tmp_path, "auto"), load(tmp_path), load(tmp_path / "plain")
    jax.tree.map(np.testing.assert_array_equal, plain, expected)
    for layer in ("layers_0", "layers_1"):
        for name, inputs in (("experts_gate_up", 1), ("experts_down", 1)):
            leaf = params[layer][name]
            assert leaf.is_mxfp4 and 8 * leaf.nbytes == 4.25 * expected[layer][name].size
            np.testing.assert_array_equal(np.moveaxis(dequantise(leaf), -1, inputs), expected[layer][name])
    oracle = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    files = resolve(str(tmp_path), progress=False)
    config, text = model_config(files.config, dtype="float32"), np.random.default_rng(0).integers(0, 320, 40)
    with torch.inference_mode():
        wanted = oracle(torch.tensor(text[None])).logits[0].numpy()
    for width in (1, 13, 40):
        (logits,) = Reader(config, make_target(config), params, rows=1).read([text], width)
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-4)
    assert wanted.std() > 0.5


def test_mxfp4_experts_of_another_shape(tmp_path):
    save_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    save_file(tensors | {name: tensors[name].reshape(4, 64, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has the shape \[4, 64, 48\]; \[experts, out, in / 32"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_stacked_experts_of_floats(tmp_path, kind):
    """One tensor has all experts: quantised at load, and kept in 16 bits."""
    save_model(tmp_path, "GptOssForCausalLM", dtype="bfloat16", initializer_range=0.2, **GPT_OSS)
    params, plain = load(tmp_path, "auto" if kind == "bfloat16" else kind), load(tmp_path)
    for name in ("experts_gate_up", "experts_down"):
        leaf, expected = params["layers_1"][name], np.asarray(plain["layers_1"][name])
        assert isinstance(leaf, Quantised)
        values = np.moveaxis(np.asarray(dequantise(leaf)), -1, 1)
        if kind == "bfloat16":
            np.testing.assert_array_equal(values, expected)
        else:
            rounded = np.asarray(dequantise(quantise(np.moveaxis(expected, 1, -1), kind)))
            np.testing.assert_allclose(values, np.moveaxis(rounded, -1, 1), rtol=0, atol=0.02)


@pytest.mark.parametrize(("family", "dtype"), [("Llama", "bfloat16"), ("Llama", "float16"), ("GptOss", "bfloat16")])
def test_half_precision_is_kept_on_a_cpu(tmp_path, family, dtype):
    """Beside float32 activations. Logits equal those of the weights in float32."""
    sizes = {"Llama": SIZES, "GptOss": GPT_OSS}[family]
    save_model(tmp_path, f"{family}ForCausalLM", dtype=dtype, initializer_range=0.2, **sizes)
    files = resolve(str(tmp_path), progress=False)
    config = model_config(files.config, dtype="float32")
    params, plain = load(tmp_path, "auto"), load(tmp_path)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(plain)} == {"float32"}
    codes = (params["layers_0"]["qkv"].codes, params["head"].codes, params["embed"].codes)
    assert {str(array.dtype) for array in codes} == {dtype}
    assert str(params["layers_0"]["mlp_norm"].dtype) == "float32"
    text = np.random.default_rng(0).integers(0, 320, 20)
    for width in (1, 13):
        logits, expected = (
            Reader(config, make_target(config), weights, rows=1).read([text], width)[0] for weights in (params, plain)
        )
        assert logits.dtype == np.float32 and logits.std() > 0.5
        np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_checkpoints_of_auto_gptq(tmp_path):
    """Without g_idx, and with biases of zeros."""
    values = save_quantised(tmp_path, "gptq 4")
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("g_idx")}
    stems = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    save_file(tensors | {f"{stem}.bias": np.zeros(8, np.float16) for stem in stems}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    section = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"look quantised, and config\.json has no quantization_config"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    down = np.asarray(load(tmp_path)["layers_1"]["down"])
    np.testing.assert_allclose(down, values["model.layers.1.mlp.down_proj.weight"].T, rtol=1e-6, atol=1e-7)
