"""Weights with NaN or infinity are refused with the names of file and tensor."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_quantised_checkpoints import load, save_quantised
from tiny_checkpoints import save_llama, write_gguf
from tiny_heads import save_head

from specjax.checkpoint import CheckpointError, gguf, load_head, model_config
from specjax.checkpoint.weights import is_finite

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_each_type(dtype, value):
    limits = ml_dtypes.finfo(dtype)
    array = np.full((3, 200_001), limits.max, dtype)
    array[1], array[2, ::1000] = limits.min, 1
    assert is_finite(array)
    for place in ((0, 0), (1, 3), (2, 200_000)):
        changed = array.copy()
        changed[place] = value
        for view in (changed, changed[::-1], changed.T):
            assert not is_finite(view)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_model(tmp_path, dtype, quantization):
    save_llama(tmp_path, dtype=dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NAME][3, 4] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {NAME} in .*model.safetensors has NaN"):
        load(tmp_path, quantization)


@pytest.mark.parametrize("name", ["gptq v2", "awq"])
def test_scale_of_quantised_matrix(tmp_path, name):
    save_quantised(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.scales"][0, 0] = np.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model.layers.0.mlp.down_proj.scales in .* has NaN or infinity"):
        load(tmp_path, "auto")


def test_block_of_gguf(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "x.gguf"
    write_gguf(file, save_llama(tmp_path / "source", intermediate_size=64), quantize=True, intermediate_size=64)
    data = bytearray(file.read_bytes())
    at = data.index(gguf._read(file)[1]["blk.0.ffn_down.weight"].data[0].tobytes())
    data[at : at + 2] = b"\x00\x7c"  # the scale of the first block
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"matrix model.layers.0.mlp.down_proj in .*model.safetensors has NaN or infinity"
    ):
        load(file, "auto")


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_head(tmp_path, format):
    bias = np.full(16, np.inf, np.float16)
    save_head(tmp_path, "eagle", format=format, tensors={"fc.bias": bias})
    target = model_config({
        "architectures": ["LlamaForCausalLM"], "intermediate_size": 8, "hidden_size": 16, "vocab_size": 31,
        "num_hidden_layers": 8, "num_attention_heads": 4,
    })  # fmt: skip
    with pytest.raises(CheckpointError, match=r"tensor fc.bias in .* has NaN or infinity"):
        load_head(str(tmp_path), target, kind="eagle", progress=False)
