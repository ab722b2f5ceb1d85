"""Arrays that are parts of larger ones, such as the keys of a projection that makes queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array

from specjax_kernels import choice


@partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["index"])
@dataclass(frozen=True)
class Slice:
    """``whole[:, :, :, index]``, not cut out: XLA would copy it before a kernel may read it."""

    whole: Any  # an array [B, N, K, Q, E], or what JAX has in its place, such as a shape
    index: int  # 0 .. Q-1

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.whole.shape[:3], self.whole.shape[4])

    @property
    def dtype(self) -> Any:
        return self.whole.dtype


def part_of(whole: Array, index: int) -> Array | Slice:
    """Part `index` of a [B, N, K, Q, E] array; a `Slice` where `take_rows` and `commit_all` are kernels."""
    return Slice(whole, index) if choice.pages_in_one_kernel() else whole[:, :, :, index]


def is_slice(leaf: Any) -> bool:
    return isinstance(leaf, Slice)


def arrays(tree: Any) -> Any:
    """A pytree whose slices are cut out."""
    return jax.tree.map(
        lambda leaf: leaf.whole[:, :, :, leaf.index] if is_slice(leaf) else leaf, tree, is_leaf=is_slice
    )
