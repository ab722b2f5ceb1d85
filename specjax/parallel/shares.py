"""Bytes of a model on each of several devices, computed from its declared leaves.

An axis with a logical name is split if the devices divide its size. With fewer key/value heads than devices, each
device has one head and its part of the query heads (`specjax.parallel.sharding.fitted`). Latents and routers are copied
to all devices; experts are split by their width, or distributed over groups of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from specjax_kernels.mesh import EXPERTS

from specjax.cache import PageSpec
from specjax.models.params import Bits, Leaf, Sizes, head_copies, leaf_bytes


def _parts(axes: Sequence[str | None], shape: Sequence[int], devices: int) -> int:
    """Returns the number of parts of an array: `devices` if they divide a named axis, else 1."""
    named = (size for axis, size in zip(axes, shape, strict=True) if axis and axis != EXPERTS)
    return devices if any(size % devices == 0 for size in named) else 1


def leaf_share(leaf: Leaf, sizes: Sizes, devices: int, groups: int = 1) -> float:
    """Computes the share of a leaf's elements on each device. `groups`: groups of devices with separate experts.

    Example: Llama-3.1-8B has 32 query and 8 key/value heads; each of 16 devices has 2 + 1 + 1 of the 48 heads in `qkv`.
    """
    if groups > 1 and EXPERTS in leaf.axes:
        return 1 / devices
    parts = _parts(leaf.axes, leaf.shape(sizes), devices)
    if parts == 1 and "K" in leaf.dims and head_copies(sizes["H"], sizes["K"], devices) > 1 and not leaf.replicated:
        if "Q" in leaf.dims:
            return (sizes["H"] // devices + 2) / (sizes["K"] * sizes["Q"])
        return 1 / devices if "G" in leaf.dims else 1 / sizes["K"]
    return 1 / parts


def held_bytes(
    leaves: Iterable[Leaf], sizes: Sizes, dtype: str, devices: int = 1, bits: Bits | None = None, groups: int = 1
) -> int:
    """Computes the bytes of leaves on each device. `bits`: sizes of quantised weights."""
    return sum(
        round(leaf_bytes(leaf, sizes, dtype, bits) * leaf_share(leaf, sizes, devices, groups)) for leaf in leaves
    )


def splits_input(leaf: Leaf, sizes: Sizes, devices: int) -> bool:
    """Returns True if a linear map's inputs are split, so that its outputs are sums over devices."""
    inputs, _ = leaf.matrix or ((1,), ())
    named = [leaf.axes[axis] for axis in inputs if leaf.axes[axis] != EXPERTS]
    return any(named) and leaf_share(leaf, sizes, devices) < 1


def page_share(spec: PageSpec, devices: int) -> float:
    """Computes the share of a page leaf on each device, at least one head."""
    parts = _parts(spec.axes, spec.shape, devices)
    if parts == 1 and (heads := [n for axis, n in zip(spec.axes, spec.shape, strict=True) if axis == "kv_heads"]):
        parts = heads[0] if devices > heads[0] and devices % heads[0] == 0 else 1
    return 1 / parts


def page_bytes(specs: Any, devices: int = 1) -> int:
    """Computes the bytes of a token in pages of these `PageSpec`s on each device."""
    leaves: list[PageSpec] = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PageSpec))
    sizes = (prod(leaf.shape) * np.dtype(leaf.dtype).itemsize * page_share(leaf, devices) for leaf in leaves)
    return sum(map(round, sizes))
