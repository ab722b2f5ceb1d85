"""The optimiser and a training step: gradients of the head in low precision, float32 weights.

A batch is split into A parts whose gradients are summed, so that a batch may exceed the memory; each part is spread
over the devices of a mesh. Loss and gradient equal those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32

from specjax.cache import Weights
from specjax.train.data import Rows
from specjax.train.options import OptimizerSettings
from specjax.train.unroll import Loss, Sums, Teacher


def schedule(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then down to `final_learning_rate` times the peak at `steps`."""
    peak, final, warmup = settings.learning_rate, settings.final_learning_rate, settings.warmup_steps
    rest = max(steps - warmup, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=final),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # The first update has rate / warm-up: a rate of 0 would change nothing.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def make_optimizer(settings: OptimizerSettings, rate: optax.Schedule) -> optax.GradientTransformation:
    """Adam after clipping by global norm (0: no clipping)."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    return optax.chain(clip, optax.adam(rate, b1=0.9, b2=0.95))


class TrainState(NamedTuple):
    """The state of a checkpoint; the step determines the data."""

    step: Int32[Array, ""]  # updates done
    params: Weights  # float32 master weights
    optimizer: Any


class Metrics(NamedTuple):
    loss: Float32[Array, ""]  # weighted sum of the rounds' losses, divided by the slots of round 0
    sums: Sums
    gradient_norm: Float32[Array, ""]


def make_update(
    compute: Loss, optimizer: optax.GradientTransformation, frozen: Weights, *, dtype: str, seed: int,
    teach: Callable[[Weights, Rows], Teacher] | None,
) -> Callable[..., tuple[TrainState, Metrics]]:  # fmt: skip
    """(state, target parameters, batch [A, B, N], teacher [A, B, N, ...]) -> (state, metrics), jitted; donates state.

    Args:
        compute: the head's loss; receives the weights in `dtype`, and the `frozen` leaves unchanged.
        seed: of the noise.
        teach: the target's forward, run in the same step; None: the caller passes `teacher`.
    """

    def part(weights: Weights, target_params: Weights, batch: Rows, teacher: Teacher | None, key: Array) -> Any:
        if teacher is None:
            assert teach is not None
            teacher = jax.lax.stop_gradient(teach(target_params, batch))

        def loss(weights: Weights) -> tuple[Array, Sums]:
            params = {**jax.tree.map(lambda leaf: leaf.astype(dtype), dict(weights)), **frozen}
            return compute(params, target_params, batch, teacher, key)

        (total, sums), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return total, sums, gradient

    @jax.numpy_dtype_promotion("standard")  # optax counts in int32 and multiplies by floats
    def update(
        state: TrainState, target_params: Weights, batch: Rows, teacher: Teacher | None
    ) -> tuple[TrainState, Metrics]:
        parts = batch.tokens.shape[0]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step), parts)

        def add(carry: Any, inputs: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, part(state.params, target_params, *inputs)), None

        # The first part is outside of the scan: it defines the shapes of the sums, and most batches have a single part.
        inputs = (batch, teacher, keys)
        result = part(state.params, target_params, *jax.tree.map(lambda x: x[0], inputs))
        if parts > 1:
            result, _ = jax.lax.scan(add, result, jax.tree.map(lambda x: x[1:], inputs))
        total, sums, gradient = result
        slots = jnp.maximum(sums.counted[0], 1.0)
        gradient = jax.tree.map(lambda g: g / slots, gradient)
        change, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = cast(Weights, optax.apply_updates(dict(state.params), change))
        metrics = Metrics(total / slots, sums, optax.tree.norm(gradient))
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return jax.jit(update, donate_argnums=0)


def spread(mesh: Mesh, parts: Any, shape: tuple[int, int]) -> Any:
    """Host arrays [A x B, ...] on devices as [A, B, ...], axis 1 over the mesh; `shape` is (A, B)."""
    parts = jax.tree.map(lambda part: part.reshape(*shape, *part.shape[1:]), parts)
    return jax.device_put(parts, NamedSharding(mesh, PartitionSpec(None, "data")))


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """Copy each leaf to each device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def split(mesh: Mesh, tree: Any) -> Any:
    """Split each leaf along its longest axis that is a multiple of the devices, or copy it.

    The compiler gathers weights where a product needs them.
    """

    def place(leaf: Array) -> Array:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0 and size]
        longest = max(axes, key=lambda axis: leaf.shape[axis], default=None)
        names = ["data" if axis == longest else None for axis in range(leaf.ndim)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*names)))

    return jax.tree.map(place, tree)
