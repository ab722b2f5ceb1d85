"""The cost model's bytes against programs compiled for a GPU that is not there (see test_gpu_compile.py)."""

from __future__ import annotations

import pytest
from test_gpu_compile import benchmarks, gpu  # noqa: F401 (benchmarks: a fixture)

from specjax import PoolShape, make_target
from specjax.compiling import NVIDIA_OPTIONS
from specjax.costs import PLAIN, Decoding, Tree, machine, step_cost
from specjax.devices import DEVICES
from specjax.drafters import Params
from specjax.drafters.base import none_drafter
from specjax.models.params import Bits
from specjax.outline import Outline

LAYERS, PAGE_SIZE, PAGES, TABLE = 2, 64, 4096, 1024

pytestmark = pytest.mark.gpu_compile

INT8 = Bits(8, ends=True)  # the default for a draft head on a GPU


@pytest.mark.parametrize(
    ("algorithm", "tree", "batch", "phase"),
    [
        ("NONE", PLAIN, 1, "step"),
        ("EAGLE3", Tree(7, 1, 8), 8, "draft"),
        ("EAGLE3", Tree(7, 1, 8), 8, "check"),
        pytest.param("EAGLE3", Tree(5, 8, 32), 1, "check", marks=pytest.mark.slow),
    ],
)
def test_bytes_of_a_program_are_within_5_percent(algorithm: str, tree: Tree, batch: int, phase: str) -> None:
    """Behind nothing: how much of the pages is read is not in a program's text."""
    from gpu_compile import Shapes, programs
    from hlo_bytes import bytes_accessed
    from llama_shapes import eagle3_head, llama_8b
    from ptx import described_device

    given = (7, 1, 8) if tree == PLAIN else tree
    shapes = Shapes(LAYERS, *given, batch, PAGE_SIZE, TABLE, PoolShape(PAGES, PAGE_SIZE), "pallas")
    program = programs(shapes, gpu("h200").place, algorithm=algorithm)[phase]
    with described_device(program.arguments):
        lowered = program.jitted.trace(*program.arguments).lower()
    executable = lowered.compile(compiler_options=dict(NVIDIA_OPTIONS))
    found = bytes_accessed(executable.as_text(), paged={(PAGES, PAGE_SIZE, 8, 128)})

    config = llama_8b(LAYERS)
    head = None if tree == PLAIN else eagle3_head(config)
    described = Outline(make_target(config), Params(None, None), none_drafter(), head, None, None, INT8, headers=False)
    cost = step_cost(
        Decoding.of(described), machine(DEVICES["H200"], "bfloat16", "gpu"), batch=batch, tree=tree, context=0,
        table=TABLE,
    )  # fmt: skip
    counted = cost.total if phase == "step" else cost.phase({"check": "verify"}.get(phase, phase))
    assert counted.bytes == pytest.approx(found, rel=0.05)
