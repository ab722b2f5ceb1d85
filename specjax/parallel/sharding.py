"""Splits a model over the devices of one or several processes: the mesh, the placement of parameters and state, and
bytes on each device.

A leaf is split along its first logical axis (`specjax.models.params`) whose size the devices divide; leaves without
such an axis are copied to all devices. The experts of a mixture may be distributed over groups of devices, and each
group splits the width of its experts (`group_count`). `specjax_kernels.mesh` holds the part for traced functions. A
mesh of one device places the model on a device other than JAX's first.

If a model has fewer key/value heads than devices, each head is copied to a group of devices, which split its query
heads (`fitted`, `regrouped`). Example: 2 key/value heads with 4 query heads each on 4 devices become 4 key/value heads
with 2 query heads each; the first two are copies, and each device has one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from specjax_kernels import Quantised, dequantise
from specjax_kernels.mesh import AXIS, EXPERTS, GROUPS, on_axis, spec
from specjax_kernels.quantised import expert_specs, shared, split_axes

from specjax.cache import PageSpec, RowSpec
from specjax.config import Experts, HeadConfig, ModelConfig, MtpConfig
from specjax.limits import ParameterError
from specjax.models.declared import Declared
from specjax.models.params import (
    AXES,
    Bits,
    Leaf,
    Sizes,
    input_letters,
    leaf_bytes,
    map_leaves,
    output_major,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyConfig = TypeVar("AnyConfig", bound=ModelConfig | HeadConfig | MtpConfig)


def make_mesh(count: int, first: int = 0, *, groups: int = 1, hosts: bool = False) -> Mesh | None:
    """Makes a mesh of `count` devices of this process from number `first` on, or with `hosts` of all devices of all
    processes. Experts are distributed over `groups` of devices. Returns None for JAX's first device alone.

    Raises ParameterError if JAX has fewer devices.
    """
    shape, types = (groups, count // groups), (AxisType.Auto,) * len(AXIS)
    if hosts:
        if (total := jax.device_count()) != count:
            problem = (
                f"{count} must be the number of devices of all {jax.process_count()} processes together, which is "
                f"{total}; this one has {jax.local_device_count()}"
            )
            raise ParameterError("tensor_parallel", problem, "EngineConfig")
        return jax.make_mesh(shape, AXIS, axis_types=types, devices=jax.devices())
    if problem := missing_devices(first + count):
        problem = f"{count}{f' from device {first} on' if first else ''} {problem}"
        raise ParameterError("tensor_parallel", problem, "EngineConfig")
    if (first, count) == (0, 1):
        return None
    chosen = jax.local_devices()[first : first + count]
    return jax.make_mesh(shape, AXIS, axis_types=types, devices=chosen)


def missing_devices(needed: int, advice: str = "") -> str | None:
    """Describes the problem if this process has fewer than `needed` devices; None if it has enough."""
    devices = jax.local_devices()
    if needed <= len(devices):
        return None
    if devices[0].platform == "cpu":
        advice += "; XLA_FLAGS=--xla_force_host_platform_device_count=N in the environment makes N of a CPU, for tests"
    return f"needs {needed} devices, and JAX has {len(devices)}: {devices[0].device_kind}{advice}"


@contextlib.contextmanager
def under(mesh: Mesh | None) -> Iterator[None]:
    """Within the context, programs are traced for the mesh, pools are split over it, and other arrays are made on its
    first device."""
    if mesh is None:
        yield
        return
    with on_first(mesh), contextlib.nullcontext() if mesh.size == 1 else jax.set_mesh(mesh):
        yield


def on_first(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Within the context, arrays are made on this process's first device of the mesh."""
    return contextlib.nullcontext() if mesh is None else jax.default_device(mesh.local_devices[0])


def several(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh if it splits a model, None for a mesh of one device."""
    return None if mesh is None or mesh.size == 1 else mesh


def first_device(mesh: Mesh | None) -> Any:
    """Returns this process's first device of the mesh, by default of JAX."""
    return jax.local_devices()[0] if mesh is None else mesh.local_devices[0]


def everywhere(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is copied to all devices."""
    return NamedSharding(mesh, PartitionSpec())


def group_count(mesh: Mesh | None) -> int:
    """Returns the number of groups over which experts are distributed (`EngineConfig.expert_parallel`)."""
    return 1 if mesh is None else mesh.shape[GROUPS]


def check_experts(config: ModelConfig, groups: int) -> None:
    """Raises ValueError for groups of devices if the model has no experts."""
    if groups > 1 and config.experts is None:
        problem = (
            f"{groups} spreads the experts of a mixture over devices, and the model ({config.family}) has none: leave "
            "it at 1; tensor_parallel splits all matrices"
        )
        raise ParameterError("expert_parallel", problem, "EngineConfig")


def fitted(config: AnyConfig, count: int, what: str = "the model", groups: int = 1) -> AnyConfig:
    """Returns a config that `count` devices in `groups` can split, with copies of key/value heads if needed.

    Raises:
        ParameterError: heads or experts cannot be split; the message calls the model `what`.
    """
    if isinstance(config, MtpConfig):
        return cast(AnyConfig, replace(config, layer=fitted(config.layer, count, what, groups)))
    if isinstance(config, ModelConfig) and config.experts is not None and not _spread(config.experts, count, groups):
        experts, others = config.experts, [n for n in range(1, count + 1) if _spread(config.experts, count, n)]
        problem = (
            f"{groups} cannot spread the {experts.count} experts of {what}, each {experts.width} wide, evenly over "
            f"{count} devices; these can: {', '.join(map(str, others))}"
        )
        raise ParameterError("expert_parallel", problem, "EngineConfig")
    latent = isinstance(config, ModelConfig) and config.latent is not None
    copies = copies_of(config, count)
    if copies == 0 or (latent and config.num_heads % count):
        heads = "query heads" if latent else f"query heads on {config.num_kv_heads} key/value heads"
        problem = f"{count} cannot split the {config.num_heads} {heads} of {what} evenly"
        raise ParameterError("tensor_parallel", problem, "EngineConfig")
    kinds = config.kinds if isinstance(config, ModelConfig) else None
    if kinds is not None and (config.num_kv_heads % count or kinds.kv_heads % count):
        numbers = f"{config.num_kv_heads} key/value heads of layers with a window, and the {kinds.kv_heads} of others"
        raise ParameterError("tensor_parallel", f"{count} cannot split the {numbers}, of {what}", "EngineConfig")
    return config if copies == 1 else cast(AnyConfig, replace(config, num_kv_heads=config.num_kv_heads * copies))


def check_fitted(config: ModelConfig | HeadConfig | MtpConfig, count: int, what: str, groups: int = 1) -> None:
    """Raises ParameterError unless `fitted` returns this config."""
    if fitted(config, count, what, groups) != config:
        problem = (
            f"{count}: {what} has fewer key/value heads; load it by Engine.from_pretrained, which makes "
            f"{copies_of(config, count)} copies of each"
        )
        raise ParameterError("tensor_parallel", problem, "EngineConfig")


def _spread(experts: Experts, count: int, groups: int) -> bool:
    """True if groups get equally many experts, and devices equal parts of their width. A single group may copy."""
    return groups == 1 or not (count % groups or experts.count % groups or experts.width % (count // groups))


def copies_of(config: ModelConfig | HeadConfig | MtpConfig, count: int) -> int:
    """Returns the number of copies of each key/value head, whose devices share its query heads; 0 if `count` devices
    cannot split the heads evenly."""
    layer = config.layer if isinstance(config, MtpConfig) else config
    heads = layer.num_kv_heads
    if heads % count == 0 or (isinstance(layer, ModelConfig) and layer.latent is not None):
        return 1
    return 0 if count % heads or layer.num_heads % count else count // heads


def regrouped(value: np.ndarray, leaf: Leaf, copies: int) -> np.ndarray:
    """Rearranges a leaf of the original config for the config of `fitted`."""
    dims = leaf.dims
    if copies == 1 or "K" not in dims:
        return value
    axis = dims.index("K")
    before, heads, after = value.shape[:axis], value.shape[axis] * copies, value.shape[axis + 2 :]
    if dims[axis + 1] == "G":
        return value.reshape(*before, heads, -1, *after)
    assert dims[axis + 1] == "Q", dims
    group = value.shape[axis + 1] - 2
    queries, keys = np.split(value, [group], axis=axis + 1)
    queries = queries.reshape(*before, heads, group // copies, *after)
    return np.concatenate([queries, np.repeat(keys, copies, axis=axis)], axis=axis + 1)


def placed(value: Any, where: NamedSharding) -> jax.Array:
    """Places an array. Over several processes each copies its part of the same host array; `jax.device_put` would first
    compare the arrays of all processes."""
    if where.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, where)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def put(mesh: Mesh, value: Any, leaf: Leaf | None) -> Any:
    """Places a leaf of floats on the mesh. Undeclared leaves (None) are copied to all devices."""
    return placed(value, place_of(mesh, () if leaf is None else leaf.axes, value.shape))


def place_of(mesh: Mesh, axes: Sequence[Any], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(axes, shape, mesh.size, group_count(mesh)))


class Widened(list[str]):
    """Names of quantised leaves that were dequantised because their codes cannot be split."""

    def tell(self, what: str) -> None:
        """Logs the names in one line, if there are any."""
        if self:
            names = ", ".join(sorted(set(self)))
            why = "their codes cannot be split along the inputs over so many devices"
            logger.warning("%s: %d matrices are dequantised, %s: %s", what, len(self), why, names)


def put_quantised(
    mesh: Mesh, value: Quantised, leaf: Leaf, shaped: Callable[[np.ndarray], np.ndarray], dtype: str, widened: Widened
) -> Any:  # fmt: skip
    """Places a quantised leaf on the mesh, split like its floats. If its blocks of inputs cannot be split, places the
    floats in `dtype`, with the declared axes from `shaped`, and adds the name to `widened`."""
    split = split_quantised(value, leaf, mesh.size, group_count(mesh))
    if split is not None:
        return jax.tree.map(placed, split, places_of(mesh, split, leaf))
    widened.append(leaf.name)
    axis = leaf.dims.index("X") + 1 if "X" in leaf.dims else 0
    return put(mesh, shaped(np.moveaxis(np.asarray(dequantise(value, np.dtype(dtype))), -1, axis)), leaf)


def place_params(mesh: Mesh, params: Any, models: Any, what: str = "the model") -> Any:
    """Places parameters on the mesh by their declarations. Undeclared leaves are on every device.

    Args:
        params: parameters of a model, or a NamedTuple with those of several.
        models: `Declared`, or the same NamedTuple of them; None: nothing is declared.

    Raises:
        ParameterError: the devices cannot split heads or experts; the message calls the first model `what`.
    """
    if mesh.size > 1 and isinstance(models, Declared):
        return _place_model(mesh, params, models, what)
    if mesh.size > 1 and isinstance(models, tuple) and isinstance(params, type(models)):
        names = (what, *["the draft"] * (len(models) - 1))
        return type(models)(*(place_params(mesh, *each) for each in zip(params, models, names, strict=True)))
    return jax.tree.map(lambda leaf: placed(leaf, everywhere(mesh)), params)


def _place_model(mesh: Mesh, params: Any, model: Declared, what: str) -> Any:
    check_fitted(model.config, mesh.size, what, group_count(mesh))
    sizes, dtype, widened = model.sizes, model.config.dtype, Widened()

    def place(value: Any, leaf: Any) -> Any:
        if isinstance(value, Mapping):
            inner = leaf if isinstance(leaf, dict) else {}
            return {name: place(part, inner.get(name)) for name, part in value.items()}
        if isinstance(value, Quantised) and leaf is not None:
            shape = leaf.shape(sizes)
            return put_quantised(mesh, value, leaf, lambda floats: floats.reshape(shape), dtype, widened)
        return put(mesh, value, leaf)

    whole = place(params, map_leaves(model.table, lambda leaf: leaf))
    widened.tell(what)
    return whole


def places_of(mesh: Mesh, value: Quantised, leaf: Leaf) -> Quantised:
    """Returns the shardings of the arrays of a leaf from `split_quantised`."""
    if group_count(mesh) > 1 and EXPERTS in leaf.axes:
        return jax.tree.map(lambda at: NamedSharding(mesh, at), expert_specs(value))
    return jax.tree.map(lambda axis: NamedSharding(mesh, on_axis(axis)), split_axes(value))


def split_quantised(value: Quantised, leaf: Leaf, count: int, groups: int = 1) -> Quantised | None:
    """Chooses the axis along which `count` devices, or the devices of an expert group, split a quantised leaf: the
    first named output axis that the devices divide, else a named input axis. None if the inputs' blocks prevent it."""
    if spread := groups > 1 and EXPERTS in leaf.axes:
        axis, parts = -value.codes.ndim, groups  # with the scales of their outputs
    else:
        outputs = [
            i - value.codes.ndim
            for i, axis in enumerate(output_major(leaf).axes)
            if axis and axis != EXPERTS and value.codes.shape[i] % count == 0
        ]
        named = not leaf.replicated and any(letter in AXES for letter in input_letters(leaf))
        if not outputs and (not named or value.depth % count):
            return replace(value, split=None)  # the floats would not be split either
        axis, parts = outputs[0] if outputs else -1, count
    divided = shared(value, axis, parts)
    if not spread:
        return divided
    assert divided is not None, "see `fitted`"
    return replace(divided, split=None) if groups == count else split_quantised(divided, leaf, count // groups)


def made(
    mesh: Mesh, leaf: Leaf, shape: tuple[int, ...], make: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:  # fmt: skip
    """Makes a leaf on the mesh, one device's part at a time. `make` receives the part's slices."""
    where = place_of(mesh, leaf.axes, shape)
    if where.is_fully_replicated:
        return placed(make((slice(None),) * len(shape)), where)
    return jax.make_array_from_callback(shape, where, cast(Any, make))  # the index of these arrays is never None


def empty_state(mesh: Mesh, make: Callable[[], T]) -> T:
    """Allocates state on the mesh: pools are split (`specjax.cache.init_cache`), other arrays are copied."""

    def spread(leaf: jax.Array) -> jax.Array:
        split = isinstance(leaf.sharding, NamedSharding) and AXIS in leaf.sharding.spec
        return leaf if split else placed(leaf, everywhere(mesh))

    with under(mesh):
        return jax.tree.map(spread, make())


def described(shapes: T, like: T) -> T:
    """Returns `shapes` with the shardings of `like`."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at.sharding), shapes, like)


def local_bytes(tree: Any) -> int:
    """Computes the bytes of arrays, or of their shapes, on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        where = getattr(leaf, "sharding", None)
        total += prod(leaf.shape if where is None else where.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


# Bytes on each device, computed without arrays from the declarations of a config from `fitted`.


def _parts(axes: Sequence[str | None], shape: Sequence[int], devices: int) -> int:
    """Returns the number of parts of an array: `devices` if they divide a named axis, else 1."""
    named = (size for axis, size in zip(axes, shape, strict=True) if axis and axis != EXPERTS)
    return devices if any(size % devices == 0 for size in named) else 1


def leaf_share(leaf: Leaf, sizes: Sizes, devices: int, groups: int = 1) -> float:
    """Computes the share of a leaf's elements on each device. `groups`: groups of devices with separate experts."""
    if groups > 1 and EXPERTS in leaf.axes:
        return 1 / devices
    return 1 / _parts(leaf.axes, leaf.shape(sizes), devices)


def held_bytes(
    leaves: Iterable[Leaf], sizes: Sizes, dtype: str, devices: int = 1, bits: Bits | None = None, groups: int = 1
) -> int:
    """Computes the bytes of leaves on each device. `bits`: sizes of quantised weights."""
    return sum(
        round(leaf_bytes(leaf, sizes, dtype, bits) * leaf_share(leaf, sizes, devices, groups)) for leaf in leaves
    )


def held_outputs(leaf: Leaf, sizes: Sizes, devices: int) -> int:
    """Computes the number of outputs of a linear map on each device: all, as sums over devices, if its inputs are
    split."""
    inputs, outputs = leaf.matrix or ((1,), (0,))
    shape, share = leaf.shape(sizes), leaf_share(leaf, sizes, devices)
    named = (leaf.axes[axis] for axis in inputs if leaf.axes[axis] != EXPERTS)
    return round(prod(shape[axis] for axis in outputs) * (1 if any(named) else share))


def page_bytes(specs: Any, devices: int = 1) -> int:
    """Computes the bytes of a token in pages of these `PageSpec`s on each device."""
    return _spec_bytes(specs, PageSpec, devices)


def row_bytes(specs: Any, devices: int = 1) -> int:
    """Computes the bytes of a row in row leaves of these `RowSpec`s on each device."""
    return _spec_bytes(specs, RowSpec, devices)


def _spec_bytes(specs: Any, kind: type[PageSpec | RowSpec], devices: int) -> int:
    return sum(_spec_size(leaf, devices) for leaf in jax.tree.leaves(specs) if isinstance(leaf, kind))


@lru_cache(256)
def _spec_size(leaf: PageSpec | RowSpec, devices: int) -> int:
    return prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // _parts(leaf.axes, leaf.shape, devices)
