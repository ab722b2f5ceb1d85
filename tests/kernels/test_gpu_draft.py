"""What the GPU compiler makes of drafting, for GPUs that are not there: see `test_gpu_compile.py`. Each kernel of a
level is launched once a level, and a batch bucket with small trees launches fewer."""

from __future__ import annotations

import functools

import jax
import pytest
from test_gpu_compile import FEW, PAGE_SIZE, PAGES, benchmarks, gpu  # noqa: F401 - `benchmarks` is a fixture

from specjax.compiling import NVIDIA_OPTIONS

pytestmark = pytest.mark.gpu_compile

LEVEL = 18
"""Most kernels of a chain's further level: embedding, norms, qkv, rotation with the keys so far, attention,
combine, output, add, norm, gate and up, their product, down, add, norm, logits, the noise of rows that sample, argmax
in two. Mask, positions, keys and scores have none of their own."""


@functools.cache
def draft(tree: tuple[int, int, int], batch: int, nodes: int | None = None) -> int:
    """Kernels of the drafts for a step, whose scores nobody reads."""
    from gpu_compile import Program, Shapes, compiled, programs

    from specjax import PoolShape

    shapes = Shapes(FEW, *tree, batch, PAGE_SIZE, 8192, PoolShape(PAGES, PAGE_SIZE), "pallas")
    whole = programs(shapes, gpu("h200").place, algorithm="EAGLE3", nodes=nodes)["draft"]

    def without_scores(*arguments):
        tree, _ = whole.jitted(*arguments)
        return tree.tokens, tree.parents, tree.depth, tree.valid

    record = compiled(Program(jax.jit(without_scores), whole.arguments, None), dict(NVIDIA_OPTIONS))
    assert record["one_graph"] and not record["copies_every_call"]
    return record["kernels_every_call"]


@pytest.mark.parametrize("batch", [1, 8])
def test_kernels_of_a_level(batch: int) -> None:
    level = draft((3, 1, 4), batch) - draft((2, 1, 3), batch)
    print(f"batch {batch}: {level} kernels a level, {draft((3, 1, 4), batch)} for three")
    assert level <= LEVEL


def test_a_narrow_bucket_runs_fewer_levels() -> None:
    """Of a chain of 7 levels with room for 4 nodes three are run, not seven cut to the best four nodes."""
    assert draft((7, 1, 8), 1, nodes=4) == draft((3, 1, 4), 1)
