"""Quantised products, cross-compiled for GPUs (see `test_gpu_compile.py`): weights are never dequantised to memory."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

import jax
import pytest
from quantised_leaves import shapes_of
from specjax_kernels import Quantised, linear
from test_gpu_compile import benchmarks, gpu, slow  # noqa: F401 - `benchmarks` is a fixture

pytestmark = pytest.mark.gpu_compile
OUT, DEPTH = (2, 14336), 4096
"""Gate and up of Llama-3.1-8B."""


FORMATS = (
    "Q4_0", "Q4_1", "Q4_K", "MXFP4", "GPTQ", "Q8_0", "int8 per output", "fp8 per output", "fp8 per tensor", "fp8 blocks"
)  # fmt: skip
CASES = [("h200", name, rows, "bfloat16") for name in FORMATS for rows in (1, 8)]
MORE = [("h200", name, rows, "bfloat16") for name in FORMATS for rows in (32, 64)]
MORE += [("h200", name, rows, "float32") for name in FORMATS for rows in (1, 32)]
MORE += [("a100_sxm_80", name, 8, "bfloat16") for name in FORMATS if "fp8" not in name]


def lowered(function, device: str, *shapes) -> jax.stages.Lowered:
    """A function of these shapes, on a GPU that is not there."""
    from ptx import described_device

    arguments = gpu(device).place(shapes)
    with described_device(arguments):
        return jax.jit(lambda *arguments: function(*arguments)).trace(*arguments).lower()


@pytest.mark.parametrize(
    ("device", "name", "rows", "dtype"), [*CASES, *(pytest.param(*case, marks=slow) for case in MORE)]
)
def test_only_codes_are_read(device: str, name: str, rows: int, dtype: str) -> None:
    from ptx import assembled, assembler

    leaf = shapes_of(name, OUT, DEPTH, rows=128 if name == "fp8 blocks" else None)
    x = jax.ShapeDtypeStruct((1, rows, DEPTH), dtype)
    with tempfile.TemporaryDirectory(prefix="specjax-ptx-") as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered(linear, device, x, leaf).compile(compiler_options=options)
        texts = [file.read_text() for file in Path(folder).glob("*.ptx")]
    memory = compiled.memory_analysis()
    bits = 8 * memory.argument_size_in_bytes / math.prod(leaf.shape)
    outputs = rows * math.prod(OUT) * 4 + rows * 4  # and a row's sum, for offsets
    print(f"{name}, {rows} rows of {dtype}: {bits:.2f} bits read a weight, {memory.temp_size_in_bytes} bytes written")
    assert bits < leaf.bits + 1.1 + (0.2 if rows > 8 else 0)
    assert memory.temp_size_in_bytes <= outputs, "at most the result once more"
    assert no_array_of_the_weights(compiled.as_text(), leaf)
    ptxas = assembler()
    assert ptxas is not None and texts
    for text in texts:
        for kernel, counts in assembled(text, gpu(device).architecture, ptxas).items() if ".entry" in text else ():
            assert counts["spilled_bytes"] == counts["stack_bytes"] == 0, kernel
    if leaf.scale.shape[-1] > 1:
        (kernel,) = [text for text in texts if re.search(r"\.entry quantised_rows\b", text)]
        assert bool(re.search(r"\b(mma\.sync|wgmma)", kernel)) == (dtype == "bfloat16") and "cp.async" in kernel


def no_array_of_the_weights(hlo: str, leaf: Quantised) -> bool:
    """True if no computation that writes its result makes an array of the weights' size. Arrays inside a fusion stay in
    registers."""
    fused = set(re.findall(r"calls=(%[\w.-]+)", hlo))
    for computation in re.split(r"\n(?=(?:ENTRY )?%)", hlo):
        name = re.match(r"(?:ENTRY )?(%[\w.-]+)", computation)
        if name is None or name[1] in fused:
            continue
        for shape, kind in re.findall(r"= \w+\[([\d,]+)\]\S* (\w[\w-]*)\(", computation):
            large = math.prod(map(int, shape.split(","))) >= math.prod(leaf.shape) // 2
            if large and kind not in ("parameter", "bitcast"):
                return False
    return True


@pytest.mark.parametrize("rows", [1, 8, 64, *(pytest.param(rows, marks=slow) for rows in (2, 4, 16, 32))])
def test_an_eagle3_head_is_never_dequantised_to_memory(rows: int) -> None:
    """In int8, the default on a GPU, for Llama-3.1-8B."""
    from model_shapes import eagle3_head, head_shapes, llama_8b

    config = llama_8b(4)
    params = head_shapes(eagle3_head(config), config, "int8")
    leaves = {name: leaf for name, leaf in params.items() if isinstance(leaf, Quantised)}
    assert set(leaves) == {"fc", "qkv", "output", "gate_up", "down", "head"}
    inputs = {name: jax.ShapeDtypeStruct((1, rows, leaf.depth), "bfloat16") for name, leaf in leaves.items()}

    def products(inputs, leaves):
        return {name: linear(inputs[name], leaf) for name, leaf in leaves.items()}

    compiled = lowered(products, "h200", inputs, leaves).compile()
    written = compiled.memory_analysis().temp_size_in_bytes
    print(f"{rows} rows: {written} bytes written")
    assert written < min(2 * math.prod(leaf.shape) for leaf in leaves.values()), "the smallest matrix in bfloat16"
    assert all(no_array_of_the_weights(compiled.as_text(), leaf) for leaf in leaves.values())


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("quantization", ["mxfp4", "none"])
def test_chosen_experts_are_read_in_place(quantization: str, rows: int) -> None:
    """Of gpt-oss-20b; a dot would copy them. 8 rows choose as many as the layer has."""
    from model_shapes import gpt_oss_20b, target_shapes

    from specjax.models.experts import mixture
    from specjax.models.families import GptOssLayer

    config = gpt_oss_20b(2)
    layer = target_shapes(config, quantization)["layers_0"]
    weights = {name: leaf for name, leaf in layer.items() if name.startswith(("router", "experts"))}
    x = jax.ShapeDtypeStruct((1, rows, config.hidden_size), "bfloat16")

    def mixed(x, weights):
        return mixture(x, weights, config.experts, activation=GptOssLayer.activation)

    compiled = lowered(mixed, "h200", x, weights).compile()
    text, written = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
    print(f"{rows} rows, {quantization}: {written} bytes written")
    assert written < 10 * 4 * rows * 4 * config.hidden_size, "ten float32 arrays of a hidden state for each choice"
    assert text.count("__gpu$xla.gpu.triton") == (2 if quantization == "mxfp4" else 0) and " while(" not in text


def test_many_rows_dequantise_to_memory() -> None:
    """Such an array is recognised."""
    leaf = shapes_of("Q4_1", OUT, DEPTH)
    compiled = lowered(linear, "h200", jax.ShapeDtypeStruct((1, 512, DEPTH), "bfloat16"), leaf).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 2 * math.prod(leaf.shape)
    assert not no_array_of_the_weights(compiled.as_text(), leaf)
