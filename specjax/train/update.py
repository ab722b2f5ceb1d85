"""One optimiser step over a batch: gradients of the unrolled head in a low precision, float32 master weights.

A batch is split into A parts whose gradients are added up, so its size is not bounded by memory, and each part over the
devices of a mesh. Neither changes the sum: loss and gradient are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32

from specjax.models.eagle_head import EagleHead
from specjax.models.protocol import Target
from specjax.train.unroll import Batch, Objective, Sums, Teacher, unroll
from specjax.types import Weights

FROZEN = ("ids",)
"""Leaves of a head that are no weights."""


class TrainState(NamedTuple):
    """All that a run is resumed from, besides its settings: the data follow from the step."""

    step: Int32[Array, ""]  # updates done
    params: Weights  # float32 master weights
    optimizer: Any


class Metrics(NamedTuple):
    loss: Float32[Array, ""]  # the weighted sum of the rounds' losses, by slot of round 0
    sums: Sums
    gradient_norm: Float32[Array, ""]


Teach = Callable[[Weights, Batch], Teacher]
Update = Callable[..., tuple[TrainState, Metrics]]


def split_params(params: Weights) -> tuple[Weights, Weights]:
    """The weights, as float32 copies that may be donated, and the leaves that are none."""
    weights = {name: jnp.array(leaf, jnp.float32, copy=True) for name, leaf in params.items() if name not in FROZEN}
    return weights, {name: leaf for name, leaf in params.items() if name in FROZEN}


def make_update(
    head: EagleHead,
    target: Target,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    frozen: Weights,
    *,
    seed: int,
    teach: Teach | None,
    scale: Float32[Array, "F"] | None = None,
) -> Update:
    """(state, target parameters, batch [A, B, N], teacher [A, B, N, ...]) -> (state, metrics), jitted; donates state.

    Args:
        teach: the target's forward, run in the same step; None: `teacher` is given.
        seed: of the noise.
        scale: what the features are multiplied with before the head reads them.
    """
    dtype = jnp.dtype(head.config.dtype)

    def loss(
        weights: Weights, target_params: Weights, batch: Batch, teacher: Teacher, key: Array
    ) -> tuple[Array, Sums]:
        params = {name: leaf.astype(dtype) for name, leaf in weights.items()} | dict(frozen)
        return unroll(head, target, params, target_params, batch, teacher, objective, key)

    def part(weights: Weights, target_params: Weights, batch: Batch, teacher: Teacher | None, key: Array) -> Any:
        if teacher is None:
            assert teach is not None
            teacher = jax.lax.stop_gradient(teach(target_params, batch))
        if scale is not None:
            teacher = teacher._replace(features=teacher.features * scale.astype(dtype)[None, None])
        (total, sums), gradient = jax.value_and_grad(loss, has_aux=True)(weights, target_params, batch, teacher, key)
        return total, sums, gradient

    def update(
        state: TrainState, target_params: Weights, batch: Batch, teacher: Teacher | None
    ) -> tuple[TrainState, Metrics]:
        parts = batch.tokens.shape[0]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step), parts)

        def add(carry: Any, each: Any) -> tuple[Any, None]:
            found = part(state.params, target_params, *each)
            return jax.tree.map(jnp.add, carry, found), None

        # The first part outside of the scan: it gives the sums their shapes, and most batches have one part only.
        first = jax.tree.map(lambda x: x[0], (batch, teacher, keys))
        found = part(state.params, target_params, *first)
        if parts > 1:
            rest = jax.tree.map(lambda x: x[1:], (batch, teacher, keys))
            found, _ = jax.lax.scan(add, found, rest)
        total, sums, gradient = found
        slots = jnp.maximum(sums.counted[0], 1.0)
        gradient = jax.tree.map(lambda g: g / slots, gradient)
        change, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = cast(Weights, optax.apply_updates(dict(state.params), change))
        metrics = Metrics(total / slots, sums, optax.tree.norm(gradient))
        return TrainState(state.step + 1, params, optimizer_state), metrics

    def promoting(*arguments: Any) -> tuple[TrainState, Metrics]:
        with jax.numpy_dtype_promotion("standard"):  # optax counts in int32 and multiplies by floats
            return update(*arguments)

    return jax.jit(promoting, donate_argnums=0)


def data_mesh() -> Mesh:
    """All local devices, over which the rows of a batch are spread."""
    return Mesh(np.array(jax.local_devices()), ("data",))


def spread(mesh: Mesh, parts: Any) -> Any:
    """[A, B, ...] host arrays to devices: axis 1 over the mesh."""
    return jax.device_put(parts, NamedSharding(mesh, PartitionSpec(None, "data")))


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """A copy of each leaf on each device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
