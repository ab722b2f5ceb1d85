"""Tensor parallelism: how traced functions split their arrays over the devices of a mesh.

A program for several devices is traced under a mesh with the axes `AXIS` (`jax.set_mesh`). Traced arrays are whole, and
XLA splits operations by the arguments' shardings and the constraints here. Without a mesh these functions have no
effect. XLA cannot split a kernel: under a mesh, call it through `apart`, in which arrays are one device's part and
`devices` is 1.

The devices form groups, usually one. Experts of a mixture are divided among the groups, and the devices of a group
split the width of each expert (`groups`, `of_experts`); other arrays are split over all devices. Worked example, 8
experts, 4 devices in 2 groups: devices 0 and 1 each have half the width of experts 0 to 3, devices 2 and 3 of experts 4
to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Int32

GROUPS, WITHIN = "expert", "tensor"
AXIS = (GROUPS, WITHIN)
"""The axes of a mesh: groups of devices, and devices of a group. Together they are all devices, in order."""
EXPERTS = "experts"
"""The logical axis of stacked experts."""


def devices() -> int:
    """The number of devices over which XLA splits the traced program; 1 also inside `apart`."""
    mesh = jax.sharding.get_abstract_mesh()
    if WITHIN not in mesh.axis_names or mesh.axis_types[mesh.axis_names.index(WITHIN)] is not AxisType.Auto:
        return 1
    return mesh.shape[GROUPS] * mesh.shape[WITHIN]


def groups() -> int:
    """The number of groups that these devices form, each with its own experts."""
    return 1 if devices() == 1 else jax.sharding.get_abstract_mesh().shape[GROUPS]


def parts(size: int) -> int:
    """The number of parts of a split axis: the number of devices, or 1 if it does not divide the size."""
    count = devices()
    return 1 if size % count else count


def spec(axes: Sequence[Any], shape: Sequence[int], count: int, groups: int = 1) -> PartitionSpec:
    """Splits the first axis that has a name (neither None nor `EXPERTS`) and a multiple of `count` devices. Several
    groups divide the experts, and the devices of a group split that axis of each expert."""
    spread = groups > 1 and EXPERTS in axes
    parts = count // groups if spread else count
    named = (i for i, axis in enumerate(axes) if axis and axis != EXPERTS and shape[i] and shape[i] % parts == 0)
    axis = next(named, -1)
    return of_experts(axis) if spread else on_axis(axis)


def on_axis(axis: int) -> PartitionSpec:
    """Splits this axis over all devices; -1: every device has the whole array."""
    return PartitionSpec() if axis < 0 else PartitionSpec(*[None] * axis, AXIS)


def of_experts(axis: int) -> PartitionSpec:
    """Divides stacked experts, the first axis, among the groups and splits the given axis over the devices of a group;
    -1: each device of a group has all of its group's experts."""
    return PartitionSpec(GROUPS) if axis < 0 else PartitionSpec(GROUPS, *[None] * (axis - 1), WITHIN)


def sharding(axes: Sequence[Any], shape: Sequence[int]) -> NamedSharding | None:
    """`spec` on the mesh that `jax.set_mesh` has set, or None without one. Not while tracing."""
    if devices() == 1:
        return None
    return NamedSharding(jax.sharding.get_mesh(), spec(axes, shape, devices()))


def whole(x: Array) -> Array:
    """x, whole on each device."""
    return x if devices() == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec())


def split(x: Array, axis: int) -> Array:
    """x, split over the devices along the given axis, if they divide it."""
    if parts(x.shape[axis]) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * axis, AXIS))


def apart(function: Callable[..., Any], axes: Any, result: int, *arguments: Any) -> Any:
    """Calls `function` on each device's part of the arguments.

    Args:
        axes: for each argument, a pytree prefix with the axis of its arrays that is split (-1: none), or their spec.
        result: the axis of the results that is split (-1: none).
    """
    if devices() == 1:
        return function(*arguments)

    specs = jax.tree.map(lambda axis: axis if isinstance(axis, PartitionSpec) else on_axis(axis), axes)
    return jax.shard_map(function, in_specs=specs, out_specs=on_axis(result), check_vma=False)(*arguments)


def rows(take: Callable[[Any, Array], Array], table: Any, axes: Any, ids: Int32[Array, "..."]) -> Array:
    """`take(table, ids)` [..., M] of a table whose rows are split over the devices, with `axes` as for `apart`. Each
    device takes its rows, and a sum combines them. (XLA:GPU would send the whole table for one row.)"""

    def take_local(table: Any, ids: Array) -> Array:
        count = jax.tree.leaves(table)[0].shape[0]
        index = ids - jax.lax.axis_index(AXIS).astype(jnp.int32) * jnp.int32(count)
        taken = take(table, jnp.clip(index, 0, count - 1))
        here = (index >= 0) & (index < count)
        return jax.lax.psum(jnp.where(here[..., None], taken, jnp.zeros_like(taken)), AXIS)

    return apart(take_local, (axes, -1), -1, table, ids)
