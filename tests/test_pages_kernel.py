"""Rows on their way to the pages of all layers: one kernel, and the operations that define it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import Slice, choice, commit_all, pallas_pages, take_rows

P, S = 6, 4
LEAVES = (((2, 24), "bfloat16"), ((2, 24), "bfloat16"), ((1, 40), "float32"), ((7,), "float16"), ((), "int32"),
          ((3, 2), "int8"))  # fmt: skip
"""What layers keep of a token: heads, a latent, an odd width, a number, and heads that are no power of two."""


@pytest.fixture(params=["pallas", "xla"])
def implementation(request, monkeypatch) -> str:
    monkeypatch.setenv(choice.VARIABLE, request.param)
    return request.param


def filled(*leading: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.array(jnp.asarray(rng.integers(-100, 100, (*leading, *shape)), dtype)) for shape, dtype in LEAVES]


def equal(found, wanted) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("of_one_kernel", [128, 4])
def test_rows_land_in_their_pages(implementation, of_one_kernel, monkeypatch) -> None:
    """Pages past the end, however far, are not written; nor are neighbours of what is."""
    monkeypatch.setattr(pallas_pages, "LEAVES", of_one_kernel)
    pools, blocks = filled(P, S, seed=0), filled(2, 3, seed=1)
    page = np.array([[5, 5, 0], [P, P + 1, 2**30]], np.int32)
    slot = np.array([[2, 3, 0], [0, 1, 3]], np.int32)
    found = jax.jit(lambda *args: commit_all(*args), donate_argnums=0)(pools, blocks, page, slot)
    for pool, rows in zip(pools, blocks, strict=True):
        pool[page[0], slot[0]] = rows[0]
    equal(found, pools)


def test_no_row_is_written(implementation) -> None:
    pools, page = filled(P, S, seed=0), np.full((2, 3), P, np.int32) + np.arange(6, dtype=np.int32).reshape(2, 3)
    equal(jax.jit(lambda *args: commit_all(*args))(pools, filled(2, 3, seed=1), page, 0 * page), pools)


@pytest.mark.parametrize("width", [1, 4])
def test_rows_of_a_path(implementation, width: int) -> None:
    blocks = filled(3, 5, seed=2)
    path = np.array([[0, 1, 4, 0], [0, 0, 0, 0], [0, 3, 2, 4]], np.int32)[:, :width]
    found = jax.jit(lambda *args: take_rows(*args))(blocks, path)
    equal(found, [leaf[np.arange(3)[:, None], path] for leaf in blocks])


@pytest.mark.parametrize("width", [24, 16])
def test_slices_are_read_where_they_lie(implementation, width: int) -> None:
    """Keys and values of two layers, beside a leaf that is an array of its own and has fewer heads."""
    rng = np.random.default_rng(3)
    wholes = [rng.normal(size=(2, 5, 3, 4, width)).astype(np.float32) for _ in range(2)]
    own = rng.normal(size=(2, 5, 2, 8)).astype(np.float32)
    blocks = [Slice(jnp.asarray(whole), index) for whole in wholes for index in (2, 3)] + [own]
    leaves = [whole[:, :, :, index] for whole in wholes for index in (2, 3)] + [own]
    path = np.array([[0, 4, 1], [0, 2, 0]], np.int32)
    taken = [leaf[np.arange(2)[:, None], path] for leaf in leaves]
    equal(jax.jit(lambda *args: take_rows(*args))(blocks, path), taken)

    pools = [rng.normal(size=(P, S, *leaf.shape[2:])).astype(np.float32) for leaf in leaves]
    page, slot = np.array([[5, 0, P, 1, 2], [P, 3, 3, 3, P + 1]], np.int32), np.array([[0, 1, 2, 3, 0]] * 2, np.int32)
    found = jax.jit(lambda *args: commit_all(*args), donate_argnums=0)(pools, blocks, page, slot)
    for pool, leaf in zip(pools, leaves, strict=True):
        pool[page[page < P], slot[page < P]] = leaf[page < P]
    equal(found, pools)


def test_one_kernel_for_a_gpu(implementation) -> None:
    """And no scatter beside it."""
    pools, blocks, where = filled(P, S, seed=0), filled(2, 3, seed=1), np.zeros((2, 3), np.int32)
    run = jax.jit(lambda *args: commit_all(*args), donate_argnums=0)
    text = run.trace(pools, blocks, where, where).lower(lowering_platforms=("cuda",)).as_text()
    kernels, scatters = text.count("__gpu$xla.gpu.triton"), text.count('"stablehlo.scatter"(')
    assert (kernels, scatters) == ((1, 0) if implementation == "pallas" else (0, len(LEAVES)))
