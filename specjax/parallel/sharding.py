"""A model over several devices, of one process or more: its mesh, and where each leaf of parameters and state lies.

A leaf is split along its first logical axis that the devices divide (`specjax.models.params`), and every device has
the whole of the others. The experts of a mixture may be spread over groups of devices instead, which then share each
expert's width (`group_count`). `specjax_kernels.mesh` has what traced functions know of it.

Replicas of a model in one process have a mesh each. A mesh of one device says where a model lies, if that is not JAX's
first device; its programs are traced, and its kernels chosen, as without a mesh.

Where a model has fewer key/value heads than there are devices, each is copied to a group of them, which share its query
heads (`fitted`, `regrouped`). Worked example, 2 heads of 4 query heads each, 4 devices: 4 heads of 2 query heads, of
which the first two are copies of one, and every device has one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from specjax_kernels import Quantised, dequantise
from specjax_kernels.mesh import AXIS, EXPERTS, GROUPS, on_axis, spec
from specjax_kernels.quantised import expert_specs, shared, split_axes

from specjax.config import Experts, HeadConfig, ModelConfig, MtpConfig
from specjax.limits import ParameterError
from specjax.models.params import AXES, Leaf, head_copies, input_letters, output_major

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyConfig = TypeVar("AnyConfig", bound=ModelConfig | HeadConfig | MtpConfig)


def make_mesh(count: int, first: int = 0, *, groups: int = 1, hosts: bool = False) -> Mesh | None:
    """A mesh of `count` of this process's devices, from number `first` on; with `hosts` of all devices of the processes
    that share the model. None: JAX's first device alone, which needs none. The devices form `groups` over which
    experts are spread. Raises ValueError: there are fewer devices."""
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
    """The problem if this process has fewer than the `needed` devices; None: it has enough."""
    devices = jax.local_devices()
    if needed <= len(devices):
        return None
    if devices[0].platform == "cpu":
        advice += "; XLA_FLAGS=--xla_force_host_platform_device_count=N in the environment makes N of a CPU, for tests"
    return f"needs {needed} devices, and JAX has {len(devices)}: {devices[0].device_kind}{advice}"


@contextlib.contextmanager
def under(mesh: Mesh | None) -> Iterator[None]:
    """Within the context, programs are traced for the mesh, and arrays are made on it: pools are split over its
    devices, and others lie on its first."""
    if mesh is None:
        yield
        return
    with on_first(mesh), contextlib.nullcontext() if mesh.size == 1 else jax.set_mesh(mesh):
        yield


def on_first(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Within the context, arrays are made on the mesh's first device of this process."""
    return contextlib.nullcontext() if mesh is None else jax.default_device(mesh.local_devices[0])


def several(mesh: Mesh | None) -> Mesh | None:
    """The mesh, if a model is split over its devices; None: it is whole on one."""
    return None if mesh is None or mesh.size == 1 else mesh


def first_device(mesh: Mesh | None) -> Any:
    """The mesh's first device of this process, or JAX's."""
    return jax.local_devices()[0] if mesh is None else mesh.local_devices[0]


def everywhere(mesh: Mesh) -> NamedSharding:
    """Where an array lies that each device has."""
    return NamedSharding(mesh, PartitionSpec())


def group_count(mesh: Mesh | None) -> int:
    """Groups of devices over which the experts of a mixture are spread (`EngineConfig.expert_parallel`)."""
    return 1 if mesh is None else mesh.shape[GROUPS]


def check_experts(config: ModelConfig, groups: int) -> None:
    """Raises ValueError if experts are to be spread over groups of devices, and the model has none."""
    if groups > 1 and config.experts is None:
        problem = (
            f"{groups} spreads the experts of a mixture over devices, and the model ({config.family}) has none: leave "
            "it at 1; tensor_parallel splits all matrices"
        )
        raise ParameterError("expert_parallel", problem, "EngineConfig")


def fitted(config: AnyConfig, count: int, what: str = "the model", groups: int = 1) -> AnyConfig:
    """The description of a model or draft head whose heads and experts so many devices, in so many groups, can share:
    its own, or one with copies of key/value heads. Raises ValueError if there is none. `what`: its name in messages."""
    if isinstance(config, MtpConfig):
        return cast(AnyConfig, replace(config, layer=fitted(config.layer, count, what, groups)))
    if isinstance(config, ModelConfig) and config.experts is not None and not _spread(config.experts, count, groups):
        experts, others = config.experts, [n for n in range(1, count + 1) if _spread(config.experts, count, n)]
        problem = (
            f"{groups} cannot spread the {experts.count} experts of {what}, each {experts.width} wide, evenly over "
            f"{count} devices; these can: {', '.join(map(str, others))}"
        )
        raise ParameterError("expert_parallel", problem, "EngineConfig")
    if isinstance(config, ModelConfig) and config.latent is not None:
        if config.num_heads % count:
            raise _unfit(count, config.num_heads, "query heads", what)
        return config
    copies = copies_of(config, count)
    if copies == 0:
        heads = f"query heads on {config.num_kv_heads} key/value heads"
        raise _unfit(count, config.num_heads, heads, what)
    return config if copies == 1 else cast(AnyConfig, replace(config, num_kv_heads=config.num_kv_heads * copies))


def _spread(experts: Experts, count: int, groups: int) -> bool:
    """Whether so many groups can have the same number of experts, and the devices of each an equal part of their
    width. Of one group each device has the whole of a width that does not divide."""
    return groups == 1 or not (count % groups or experts.count % groups or experts.width % (count // groups))


def _unfit(count: int, heads: int, name: str, what: str) -> ValueError:
    problem = f"{count} cannot split the {heads} {name} of {what} evenly"
    return ParameterError("tensor_parallel", problem, "EngineConfig")


def copies_of(config: ModelConfig | HeadConfig | MtpConfig, count: int) -> int:
    """How many devices have a copy of each key/value head; 0: so many devices cannot share them."""
    layer = config.layer if isinstance(config, MtpConfig) else config
    if isinstance(layer, ModelConfig) and layer.latent is not None:
        return 1
    return head_copies(layer.num_heads, layer.num_kv_heads, count)


def regrouped(value: np.ndarray, leaf: Leaf, copies: int) -> np.ndarray:
    """A leaf of the original description as that of `fitted` has it."""
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
    """An array where the sharding says. Where that is over several processes, each has the same whole array, and copies
    its part of it: `jax.device_put` would have them compare it first."""
    if where.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, where)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def put(mesh: Mesh, value: Any, leaf: Leaf | None) -> Any:
    """A leaf of floats on the mesh; None: it is not declared, so every device has it."""
    return placed(value, place_of(mesh, () if leaf is None else leaf.axes, value.shape))


def place_of(mesh: Mesh, axes: Sequence[Any], shape: Sequence[int]) -> NamedSharding:
    """Where an array with these logical axes lies."""
    return NamedSharding(mesh, spec(axes, shape, mesh.size, group_count(mesh)))


class Widened(list[str]):
    """Names of the quantised leaves that were dequantised, since devices cannot share their codes."""

    def tell(self, what: str) -> None:
        """One line in the log, if there are any."""
        if self:
            names = ", ".join(sorted(set(self)))
            logger.warning(
                "%s: %d matrices are dequantised, whose codes so many devices cannot share along their inputs: %s",
                what, len(self), names,
            )  # fmt: skip


def put_quantised(
    mesh: Mesh, value: Quantised, leaf: Leaf, shaped: Callable[[np.ndarray], np.ndarray], dtype: str, widened: Widened
) -> Any:  # fmt: skip
    """A quantised leaf on the mesh, split as `put` would split its floats. Where its blocks of inputs do not allow
    that, those floats in `dtype`, to which `shaped` gives their declared axes, and its name in `widened`."""
    found = split_quantised(value, leaf, mesh.size, group_count(mesh))
    if found is not None:
        return jax.tree.map(placed, found, places_of(mesh, found, leaf))
    widened.append(leaf.name)
    axis = leaf.dims.index("X") + 1 if "X" in leaf.dims else 0
    return put(mesh, shaped(np.moveaxis(np.asarray(dequantise(value, np.dtype(dtype))), -1, axis)), leaf)


def places_of(mesh: Mesh, value: Quantised, leaf: Leaf) -> Quantised:
    """Where the arrays of a leaf of `split_quantised` lie, each in its place."""
    if group_count(mesh) > 1 and EXPERTS in leaf.axes:
        return jax.tree.map(lambda at: NamedSharding(mesh, at), expert_specs(value))
    return jax.tree.map(lambda axis: NamedSharding(mesh, on_axis(axis)), split_axes(value))


def split_quantised(value: Quantised, leaf: Leaf, count: int, groups: int = 1) -> Quantised | None:
    """A quantised leaf with the axis that so many devices share, or those of a group that has some of the experts: of
    its outputs the first that has a name and divides, else its inputs, if they have one. None: their blocks do not
    allow that."""
    if groups > 1 and EXPERTS in leaf.axes:
        own = shared(value, -value.codes.ndim, groups)  # scales for each output, which lie with their expert
        assert own is not None, "see `fitted`"
        return replace(own, split=None) if groups == count else split_quantised(own, leaf, count // groups)
    whole = replace(value, split=None)
    outputs = [
        i - value.codes.ndim
        for i, axis in enumerate(output_major(leaf).axes)
        if axis and axis != EXPERTS and value.codes.shape[i] % count == 0
    ]
    named = not leaf.replicated and any(letter in AXES for letter in input_letters(leaf))
    if not outputs and (not named or value.depth % count):
        return whole  # its floats would not be split either
    return shared(value, outputs[0] if outputs else -1, count)


def made(
    mesh: Mesh, leaf: Leaf, shape: tuple[int, ...], make: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:  # fmt: skip
    """A leaf on the mesh of which each device's part is made by itself: `make` gets the part's indices of each axis."""
    where = place_of(mesh, leaf.axes, shape)
    if where.is_fully_replicated:
        return placed(make((slice(None),) * len(shape)), where)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "None is for opaque types such as keys of jax.random"
        return make(index)

    return jax.make_array_from_callback(shape, where, part)


def empty_state(mesh: Mesh, make: Callable[[], T]) -> T:
    """What `make` allocates, with pools split over the mesh (`specjax.cache.init_cache`), and the rest everywhere."""

    def spread(leaf: jax.Array) -> jax.Array:
        split = isinstance(leaf.sharding, NamedSharding) and AXIS in leaf.sharding.spec
        return leaf if split else placed(leaf, everywhere(mesh))

    with under(mesh):
        return jax.tree.map(spread, make())


def described(shapes: T, like: T) -> T:
    """Shapes, with the shardings of arrays in a tree of the same structure."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at.sharding), shapes, like)


def local_bytes(tree: Any) -> int:
    """Bytes of arrays, or of their shapes, on one device."""

    def size(leaf: Any) -> int:
        where = getattr(leaf, "sharding", None)
        shape = leaf.shape if where is None else where.shard_shape(leaf.shape)
        return prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))
