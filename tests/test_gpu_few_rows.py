"""What the GPU compiler makes of products of few rows and of the pages' kernel, for GPUs that are not there: see
`test_gpu_compile.py`."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from specjax_kernels import Norm, Slice, choice, commit_all, launch, linear, take_rows
from test_gpu_compile import (  # noqa: F401 - `benchmarks` is a fixture
    ALL,
    FEW,
    benchmarks,
    check,
    gpu,
    slow,
    step,
)

pytestmark = pytest.mark.gpu_compile

GENERATIONS = {"h200": "9.0", "b200": "10.0", "h100_sxm": "9.0", "a100_sxm_80": "8.0", "l40s": "8.9", "rtx_4090": "8.9"}
M, QKV, INNER = 4096, (8, 6, 128), 14336
"""A layer of Llama-3.1-8B."""
GELU = functools.partial(jax.nn.gelu, approximate=True)


def layers_products(x, weights, *, activation, offset):
    """Norm, qkv; output and sum; norm, gate, up; down and sum. Attention is left out."""
    norm = Norm(weights["norm"], 1e-5, offset)
    qkv = linear(x, weights["qkv"], norm=norm, bias=weights["bias"])
    x = linear(qkv[:, :, :, :4].reshape(*x.shape), weights["output"], residual=x)
    wide = linear(x, weights["gate_up"], norm=norm, gated=activation)
    return linear(wide, weights["down"], residual=x)


CASES = [(device, rows, "bfloat16", "llama") for device in GENERATIONS for rows in (1, 64)]
CASES.remove(("b200", 64, "bfloat16", "llama"))
SPILLS = pytest.mark.xfail(strict=True, reason="gate and up of 64 rows take 255 registers of a B200, and 72 bytes more")
MORE_CASES = [(device, rows, dtype, "llama") for device in GENERATIONS for rows in (8, 32) for dtype in ("bfloat16",)]
MORE_CASES += [(device, rows, dtype, "gemma") for device in GENERATIONS for rows in (1, 64)
               for dtype in ("float16", "float32")]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "rows", "dtype", "family"),
    [
        *CASES,
        pytest.param("b200", 64, "bfloat16", "llama", marks=(slow, SPILLS)),
        *(pytest.param(*case, marks=slow) for case in MORE_CASES),
    ],
)
def test_products_use_what_the_gpu_has(device: str, rows: int, dtype: str, family: str, monkeypatch) -> None:
    """Tensor cores for half precision, weights fetched ahead of their use, no value spilled to memory."""
    from ptx import assembled, assembler, described_device

    monkeypatch.setenv(choice.VARIABLE, "pallas")
    monkeypatch.setattr(launch, "generation", lambda: GENERATIONS[device])
    shapes = {"norm": (M,), "bias": QKV, "qkv": (M, *QKV), "output": (M, M), "gate_up": (M, 2, INNER),
              "down": (INNER, M)}  # fmt: skip
    weights = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    arguments = gpu(device).place((jax.ShapeDtypeStruct((1, rows, M), dtype), weights))
    activation, offset = (jax.nn.silu, 0.0) if family == "llama" else (GELU, 1.0)
    with tempfile.TemporaryDirectory(prefix="specjax-ptx-") as folder:
        with described_device(arguments):
            run = jax.jit(functools.partial(layers_products, activation=activation, offset=offset))
            lowered = run.trace(*arguments).lower()
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        texts = [file.read_text() for file in Path(folder).glob("*.ptx")]
    results = rows * INNER * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * results
    ptxas = assembler()
    assert ptxas is not None, "make gpu-compile installs the assembler beside the compiler"
    found = {}
    for text in texts:
        numbers = assembled(text, gpu(device).architecture, ptxas) if ".entry" in text else {}
        for name, body in re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", text, re.DOTALL):
            found[name] = numbers[name]
            if "few_rows" in name:
                assert bool(re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", body)) == (dtype != "float32"), (
                    name
                )
                assert re.search(r"\bcp\.async\.c[ag]", body), name
    print(f"{device}, {rows} rows of {dtype}:", {name: numbers["registers"] for name, numbers in found.items()})
    assert sum("few_rows" in name for name in found) == 4
    for name, numbers in found.items():
        assert numbers["spilled_bytes"] == numbers["stack_bytes"] == 0, name
        assert numbers["registers"] <= 255


@pytest.mark.parametrize("leaves", [64, pytest.param(160, marks=slow)])
def test_pages_are_written_where_they_lie(leaves: int, monkeypatch) -> None:
    """The leaves of 32 layers by one kernel, of 80 layers by two; another takes the rows of the path. Both read keys
    and values inside of the layers' products."""
    from gpu_compile import NVIDIA_OPTIONS, Program, compiled

    monkeypatch.setenv(choice.VARIABLE, "pallas")

    def run(pools, products, path, page, slot):
        # Some kernels more: XLA does not write down what it makes no graph of.
        rotated = [x + 1 for x in products[:6]] + products[6:]
        blocks = [Slice(x, 4 + i) for x in rotated for i in (0, 1)]
        return commit_all(pools, take_rows(blocks, path), page, slot)

    pool, rotated = ((4096, 64, 8, 128), (8, 32, 8, 6, 128))
    where = [jax.ShapeDtypeStruct((8, 6), jnp.int32)] * 3
    arrays = [
        [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * count for shape, count in ((pool, leaves), (rotated, leaves // 2))
    ]
    arguments = gpu("h200").place((*arrays, *where))
    record = compiled(Program(jax.jit(run, donate_argnums=0), arguments, None), dict(NVIDIA_OPTIONS))
    assert record["alias_bytes"] == leaves * 4096 * 64 * 8 * 128 * 2
    wholes, rows = 6 * 8 * 32 * 8 * 6 * 128 * 2, leaves * 8 * 6 * 8 * 128 * 2
    assert record["temp_bytes"] <= wholes + rows + 65536
    print(
        f"{leaves} leaves: {record['kernels_every_call']} kernels, {record['temp_bytes'] / 1e6:.1f} MB of temporaries"
    )
    assert record["kernels_every_call"] <= 6 + 2 * -(-leaves // 128) + 2, "and two that make indices"
    assert record["copies_every_call"] == 0


@pytest.mark.parametrize(
    ("shape", "layers"), [("short chain", FEW), *(pytest.param(shape, ALL, marks=slow) for shape in ("plain", "tree"))]
)
def test_a_step_is_one_graph_that_updates_the_pool_where_it_lies(shape: str, layers: int, monkeypatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "pallas")
    check(step.__wrapped__("h200", shape, 8, layers))
