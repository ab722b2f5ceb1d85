"""Rows on their way to the pages of all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import commit_all, take_rows

P, S = 6, 4
LEAVES = (((2, 24), "bfloat16"), ((2, 24), "bfloat16"), ((1, 40), "float32"), ((7,), "float16"), ((), "int32"),
          ((3, 2), "int8"))  # fmt: skip
"""What layers keep of a token: heads, a latent, an odd width, a number, and heads that are no power of two."""


def filled(*leading: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.array(jnp.asarray(rng.integers(-100, 100, (*leading, *shape)), dtype)) for shape, dtype in LEAVES]


def equal(found, wanted) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_rows_land_in_their_pages() -> None:
    """Pages past the end, however far, are not written; nor are neighbours of what is."""
    pools, blocks = filled(P, S, seed=0), filled(2, 3, seed=1)
    page = np.array([[5, 5, 0], [P, P + 1, 2**30]], np.int32)
    slot = np.array([[2, 3, 0], [0, 1, 3]], np.int32)
    found = jax.jit(lambda *args: commit_all(*args), donate_argnums=0)(pools, blocks, page, slot)
    for pool, rows in zip(pools, blocks, strict=True):
        pool[page[0], slot[0]] = rows[0]
    equal(found, pools)


def test_no_row_is_written() -> None:
    pools, page = filled(P, S, seed=0), np.full((2, 3), P, np.int32) + np.arange(6, dtype=np.int32).reshape(2, 3)
    equal(jax.jit(lambda *args: commit_all(*args))(pools, filled(2, 3, seed=1), page, 0 * page), pools)


@pytest.mark.parametrize("width", [1, 4])
def test_rows_of_a_path(width: int) -> None:
    blocks = filled(3, 5, seed=2)
    path = np.array([[0, 1, 4, 0], [0, 0, 0, 0], [0, 3, 2, 4]], np.int32)[:, :width]
    found = jax.jit(lambda *args: take_rows(*args))(blocks, path)
    equal(found, [leaf[np.arange(3)[:, None], path] for leaf in blocks])
