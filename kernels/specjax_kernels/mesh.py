"""Tensor parallelism: what a function that is being traced knows of the devices that XLA partitions it over.

A program for several devices is traced under a mesh with the axes `AXIS` (`jax.set_mesh`). Arrays are whole while they
are traced, and XLA splits operations as the arguments and the constraints here say. Without such a mesh all of this
changes nothing. A kernel that XLA cannot split must not be called there (`devices`), unless by way of `apart`, inside
of which arrays are one device's part and `devices` is 1.

The devices form groups, mostly one. All arrays but the experts of a mixture are split over all devices alike, whatever
the groups. Each group has its own experts, and its devices share the width of each (`groups`, `of_experts`). Worked
example, 8 experts, 4 devices in 2 groups: devices 0 and 1 have half of the width of experts 0 to 3 each, devices 2 and
3 of experts 4 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float, Float32, Int32

from specjax_kernels.largest import argmax

GROUPS, WITHIN = "expert", "tensor"
AXIS = (GROUPS, WITHIN)
"""The axes of a mesh: its groups of devices, and the devices of a group. As one axis they are all devices, in order."""
EXPERTS = "experts"
"""The logical axis of stacked experts."""


def devices() -> int:
    """Over how many devices XLA splits what is being traced; 1: over none, or it is one device's part already."""
    mesh = jax.sharding.get_abstract_mesh()
    if WITHIN not in mesh.axis_names or mesh.axis_types[mesh.axis_names.index(WITHIN)] is not AxisType.Auto:
        return 1
    return mesh.shape[GROUPS] * mesh.shape[WITHIN]


def groups() -> int:
    """How many groups these devices form, each with experts of its own."""
    return 1 if devices() == 1 else jax.sharding.get_abstract_mesh().shape[GROUPS]


def parts(size: int) -> int:
    """In how many parts an axis of this size is split: as many as there are devices, or 1 if they do not divide it."""
    count = devices()
    return 1 if size % count else count


def spec(axes: Sequence[Any], shape: Sequence[int], count: int, groups: int = 1) -> PartitionSpec:
    """The first of an array's axes that has a name (not None, nor `EXPERTS`) and is a multiple of `count` devices goes
    to `AXIS`. With several groups of devices, each has some of the experts, and its devices share that axis of them."""
    spread = groups > 1 and EXPERTS in axes
    parts = count // groups if spread else count
    named = (i for i, axis in enumerate(axes) if axis and axis != EXPERTS and shape[i] and shape[i] % parts == 0)
    found = next(named, -1)
    return of_experts(found) if spread else on_axis(found)


def on_axis(axis: int) -> PartitionSpec:
    """That of an array of which each device has a part of this axis; -1: all of it."""
    return PartitionSpec() if axis < 0 else PartitionSpec(*[None] * axis, AXIS)


def of_experts(axis: int) -> PartitionSpec:
    """That of an array of stacked experts, its first axis: each group has some, and each of its devices a part of the
    given axis of these; -1: all of them."""
    return PartitionSpec(GROUPS) if axis < 0 else PartitionSpec(GROUPS, *[None] * (axis - 1), WITHIN)


def sharding(axes: Sequence[Any], shape: Sequence[int]) -> NamedSharding | None:
    """`spec` on the devices of the mesh that `jax.set_mesh` has set; None: there is none. Not while tracing."""
    if devices() == 1:
        return None
    return NamedSharding(jax.sharding.get_mesh(), spec(axes, shape, devices()))


def whole(x: Array) -> Array:
    """x, of which each device has all."""
    return x if devices() == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec())


def split(x: Array, axis: int) -> Array:
    """x, of which each device has a part of the given axis, if they divide it."""
    if parts(x.shape[axis]) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * axis, AXIS))


def apart(function: Callable[..., Any], axes: Any, result: int, *arguments: Any) -> Any:
    """`function` of the arguments, by each device for its part.

    Args:
        axes: for each argument, a pytree prefix of it: which axis of its arrays is split, -1: none; or their spec.
        result: which axis of the results is split, in the same words.
    """
    if devices() == 1:
        return function(*arguments)

    specs = jax.tree.map(lambda axis: axis if isinstance(axis, PartitionSpec) else on_axis(axis), axes)
    return jax.shard_map(function, in_specs=specs, out_specs=on_axis(result), check_vma=False)(*arguments)


def rows(take: Callable[[Any, Array], Array], table: Any, axes: Any, ids: Int32[Array, "..."]) -> Array:
    """`take(table, ids)` [..., M] of a table whose rows devices share, `axes` as for `apart`: each takes those that it
    has, and one sum makes them whole. (XLA would send the whole table for the row of one id, on a GPU.)"""

    def own(table: Any, ids: Array) -> Array:
        count = jax.tree.leaves(table)[0].shape[0]
        places = ids - jax.lax.axis_index(AXIS).astype(jnp.int32) * jnp.int32(count)
        found = take(table, jnp.clip(places, 0, count - 1))
        here = (places >= 0) & (places < count)
        return jax.lax.psum(jnp.where(here[..., None], found, jnp.zeros_like(found)), AXIS)

    return apart(own, (axes, -1), -1, table, ids)


def largest(x: Float[Array, "... V"]) -> tuple[Int32[Array, "..."], Float[Array, "..."]]:
    """The place of a row's largest number, as `argmax` has it, and that number. Of numbers that are split by their last
    axis each device sends one pair: of equal numbers the first is still found, and NaN before any number."""
    count, size = parts(x.shape[-1]), x.shape[-1]
    if count == 1:
        place = argmax(x)
        return place, jnp.take_along_axis(x, place[..., None], axis=-1)[..., 0]
    own = split(x.reshape(*x.shape[:-1], count, size // count), x.ndim - 1)
    bits = jax.lax.bitcast_convert_type(jnp.max(own, axis=-1).astype(jnp.float32), jnp.int32)
    both = whole(jnp.stack([bits, argmax(own)], axis=-1))
    values, places = jax.lax.bitcast_convert_type(both[..., 0], jnp.float32), both[..., 1]
    device = argmax(values)[..., None]
    place = device * jnp.int32(size // count) + jnp.take_along_axis(places, device, axis=-1)
    return place[..., 0], jnp.take_along_axis(values, device, axis=-1)[..., 0].astype(x.dtype)


def top_k(x: Float32[Array, "... V"], k: int) -> tuple[Float32[Array, "... k"], Int32[Array, "... k"]]:
    """`jax.lax.top_k` of the last axis, ties to the lower place. Where that axis is split, each device sends its own k
    largest numbers, in whose order (by device, then by size, then by place) equal ones keep theirs."""
    if parts(x.shape[-1]) == 1:
        best, places = jax.lax.top_k(x, k)
        return best, places.astype(jnp.int32)

    def own(x: Array) -> tuple[Array, Array]:
        best, places = jax.lax.top_k(x, min(k, x.shape[-1]))
        places = places.astype(jnp.int32) + jax.lax.axis_index(AXIS).astype(jnp.int32) * jnp.int32(x.shape[-1])
        both = jnp.stack([jax.lax.bitcast_convert_type(best, jnp.int32), places])
        best, places = jax.lax.all_gather(both, AXIS, axis=both.ndim - 1, tiled=True)
        best, index = jax.lax.top_k(jax.lax.bitcast_convert_type(best, jnp.float32), k)
        return best, jnp.take_along_axis(places, index, axis=-1)

    return apart(own, (x.ndim - 1,), -1, x)
