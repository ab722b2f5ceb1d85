"""Quantised checkpoints, written bit by bit: they are the model of the dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from quantised_formats import FORMATS
from safetensors.numpy import load_file, save_file
from specjax_kernels import Quantised, dequantise
from test_parity import Reader
from tiny_checkpoints import save_model, write_gguf
from tqdm import tqdm

from specjax.checkpoint import CheckpointError, load_params, model_config, resolve
from specjax.models import make_target

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "tie_word_embeddings": False}


def save_quantised(folder: Path, name: str, *, head: bool = False, without: str = "") -> dict[str, np.ndarray]:
    """A tiny Llama whose layers (and output matrix) are quantised; its values."""
    save_model(folder, "LlamaForCausalLM", **SIZES)
    tensors, rng, form = load_file(folder / "model.safetensors"), np.random.default_rng(0), FORMATS[name]
    written, values = {}, {}
    for key, tensor in tensors.items():
        values[key] = tensor
        if key.endswith("proj.weight") or (head and key == "lm_head.weight"):
            done = form.write(tensor, rng)
            values[key] = done.value
            written |= {f"{key.removesuffix('weight')}{part}": array for part, array in done.tensors.items()}
            written[f"{key.removesuffix('weight')}input_scale"] = np.float32([1])
        else:
            written[key] = tensor
    save_file(
        {key: np.ascontiguousarray(array) for key, array in written.items() if key != without},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": form.config}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def load(folder: Path):
    files = resolve(str(folder), progress=False)
    return load_params(files, model_config(files.config, dtype="float32"), quantization="none", progress=False)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_dequantised_ones(tmp_path, name):
    values = save_quantised(tmp_path / "quantised", name, head=name != "fp8 tensor")
    plain = tmp_path / "plain"
    save_model(plain, "LlamaForCausalLM", **SIZES)
    save_file(values, plain / "model.safetensors")
    found, wanted = load(tmp_path / "quantised"), load(plain)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    moved = np.abs(np.asarray(wanted["layers_0"]["down"]) - load_original(tmp_path)).max()
    assert moved > 1e-4, "the quantisation changed nothing"


@pytest.mark.parametrize("name", [*FORMATS, "float16", "gguf"])
def test_the_loading_line_gives_bytes_read_and_bytes_held(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    folder, wide = tmp_path / "model", {"intermediate_size": 64}
    if name in FORMATS:
        save_quantised(folder, name)
    else:
        tensors = save_model(folder, "LlamaForCausalLM", dtype="float16" if name == "float16" else "float32", **wide)
        if name == "gguf":
            write_gguf(folder := tmp_path / "it.gguf", tensors, quantize=True, **wide)
    files = resolve(str(folder), progress=False)
    params = load_params(files, model_config(files.config, dtype="float32"))
    read = sum(entry.size for key, entry in files.headers.items() if not key.endswith("input_scale"))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert held < 4 * sum(leaf.size for leaf in jax.tree.leaves(params)), "fewer than in float32"
    read, held = (tqdm.format_sizeof(size, "B", 1000) for size in (read, held))
    pattern = rf"Loading {re.escape(str(folder))}: {read} in [\d.]+ s, bytes read; {held} held\n"
    assert re.search(pattern, said := capsys.readouterr().err), (pattern, said)


def load_original(folder: Path) -> np.ndarray:
    save_model(folder / "original", "LlamaForCausalLM", **SIZES)
    return np.asarray(load(folder / "original")["layers_0"]["down"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq 4", {"bits": 3}, "bits is 3; supported: 4, 8"),
        ("gptq 4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        ("awq", {"version": "gemv"}, "version of awq is 'gemv'; supported: gemm"),
        ("awq", {"quant_method": "bitsandbytes"}, "'bitsandbytes'; supported: fp8, gptq, awq, compressed-tensors"),
        ("int4 groups", {"format": "marlin-24"}, "format of compressed-tensors is 'marlin-24'"),
        ("int4 groups", {"config_groups": {}}, "no config_groups"),
        ("fp8 blocks", {"weight_block_size": 128}, "weight_block_size is 128; a list of two positive integers"),
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


def test_a_scale_is_missing(tmp_path):
    save_quantised(tmp_path, "fp8 blocks", without="model.layers.0.mlp.down_proj.weight_scale_inv")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.mlp\.down_proj\.weight_scale"):
        load(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_quantised(tmp_path, name):
    """The leaves are those of the format, smaller than float16, and their weights the dequantised ones."""
    save_quantised(tmp_path, name, head=True)
    files = resolve(str(tmp_path), progress=False)
    config = model_config(files.config, dtype="float32")
    kept = load_params(files, config, progress=False)
    plain = load_params(files, config, quantization="none", progress=False)
    found = {}
    for layer, leaf in (("layers_0", "qkv"), ("layers_1", "output"), ("layers_1", "gate_up"), ("layers_0", "down")):
        weight, wanted = kept[layer][leaf], np.asarray(plain[layer][leaf])
        assert isinstance(weight, Quantised)
        found[leaf] = weight.nbytes / wanted.size
        values = np.asarray(dequantise(weight))
        inputs = 1 if wanted.shape[0] == values.shape[-1] else 3
        flat = wanted.reshape(values.shape[-1], *wanted.shape[inputs:])
        np.testing.assert_allclose(np.moveaxis(values, -1, 0), flat, rtol=1e-6, atol=1e-7)
    assert isinstance(kept["head"], Quantised)
    assert max(found.values()) < (0.8 if "4" in name or name in ("awq", "gptq act order", "gptq v2") else 1.4), found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_so_beside_float32_activations(tmp_path, dtype):
    """On a CPU; the logits are those of the same weights in float32."""
    save_model(tmp_path, "LlamaForCausalLM", dtype=dtype, initializer_range=0.2, **SIZES)
    files = resolve(str(tmp_path), progress=False)
    config = model_config(files.config, dtype="float32")
    kept = load_params(files, config, progress=False)
    plain = load_params(files, config, quantization="none", progress=False)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(plain)} == {"float32"}
    assert {
        str(kept["layers_0"]["qkv"].codes.dtype),
        str(kept["head"].codes.dtype),
        str(kept["embed"].codes.dtype),
    } == {dtype}
    assert str(kept["layers_0"]["mlp_norm"].dtype) == "float32"
    text = np.random.default_rng(0).integers(0, 320, 20)
    for width in (1, 13):
        one, other = (
            Reader(config, make_target(config), params, rows=1).read([text], width)[0] for params in (kept, plain)
        )
        assert one.dtype == np.float32 and one.std() > 0.5
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_older_gptq_checkpoints(tmp_path):
    """No g_idx, biases of zeros that no matrix has, and the description in a file of its own."""
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
    (tmp_path / "quantize_config.json").write_text(json.dumps(section))
    down = np.asarray(load(tmp_path)["layers_1"]["down"])
    np.testing.assert_allclose(down, values["model.layers.1.mlp.down_proj.weight"].T, rtol=1e-6, atol=1e-7)
