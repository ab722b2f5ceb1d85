"""The optimiser, and one step of it over a batch: gradients of the unrolled head in low precision, float32 weights.

A batch is split into A parts whose gradients are summed, so memory does not bound its size, and each part over the
devices of a mesh. Loss and gradient are those of the whole batch.
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
from optax.contrib import MuonDimensionNumbers, muon

from specjax.models.params import Table
from specjax.train import options
from specjax.train.data import Rows
from specjax.train.options import OptimizerSettings
from specjax.train.unroll import Loss, Sums, Teacher
from specjax.types import Weights

MUON_RMS = 0.2
"""Muon's updates are scaled to this root mean square, which is about Adam's: one learning rate then suits both
(Moonlight, arXiv 2502.16982)."""


def schedule(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then down to `final_learning_rate` times the peak at `steps`."""
    peak, final, warmup = settings.learning_rate, settings.final_learning_rate, settings.warmup_steps
    rest = max(steps - warmup, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=final),
        "linear": optax.linear_schedule(peak, peak * final, rest),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # The first update has rate / warm-up and not 0, which would be a step for nothing.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def make_optimizer(settings: OptimizerSettings, rate: optax.Schedule, table: Table) -> optax.GradientTransformation:
    """Clips by global norm, then by value (0: not at all).

    Matrices and the embedding decay, norms and biases do not. Muon orthogonalises matrices, and only these decay;
    norms, biases, embedding and output layer get Adam, as Muon's authors advise. `table` declares the parameters.
    """
    leaves = {f"{scope.name}/{leaf.name}".lstrip("/"): leaf for scope in table for leaf in scope.leaves}

    def decays(params: Weights) -> dict[str, bool]:
        return {name: leaves[name].init == "normal" for name in params}

    def axes(params: Any) -> Any:  # pytrees, of which optax has types of its own
        matrices = {name: leaf.matrix for name, leaf in leaves.items() if "vocab" not in leaf.axes}
        return {name: MuonDimensionNumbers(*found) if (found := matrices.get(name)) else None for name in params}

    beta1, beta2, decay = settings.beta1, settings.beta2, settings.weight_decay
    if settings.optimizer == "adamw":
        core = optax.adamw(rate, b1=beta1, b2=beta2, weight_decay=decay, mask=decays)
    else:
        core = muon(
            rate, beta=0.95, weight_decay=decay, adam_b1=beta1, adam_b2=beta2,
            muon_weight_dimension_numbers=axes, consistent_rms=MUON_RMS,
        )  # fmt: skip
    clips = [optax.clip_by_global_norm(settings.clip_norm)] if settings.clip_norm else []
    clips += [optax.clip(settings.clip_value)] if settings.clip_value else []
    return optax.chain(*clips, core)


class TrainState(NamedTuple):
    """The state a run resumes from, besides its settings; the step determines the data."""

    step: Int32[Array, ""]  # updates done
    params: Weights  # float32 master weights
    optimizer: Any


class Metrics(NamedTuple):
    loss: Float32[Array, ""]  # the weighted sum of the rounds' losses, by slot of round 0
    sums: Sums
    gradient_norm: Float32[Array, ""]


def make_update(
    compute: Loss, optimizer: optax.GradientTransformation, frozen: Weights, *, dtype: str, seed: int,
    teach: Callable[[Weights, Rows], Teacher] | None,
) -> Callable[..., tuple[TrainState, Metrics]]:  # fmt: skip
    """(state, target parameters, batch [A, B, N], teacher [A, B, N, ...]) -> (state, metrics), jitted; donates state.

    Args:
        compute: the loss of the draft, whose weights it gets in `dtype`, together with the `frozen` ones as they are.
        seed: of the noise.
        teach: the target's forward, run in the same step; None: the caller passes `teacher`.
    """

    def part(weights: Weights, target_params: Weights, batch: Rows, teacher: Teacher | None, key: Array) -> Any:
        """Loss, sums and gradient of one part."""
        if teacher is None:
            assert teach is not None
            teacher = jax.lax.stop_gradient(teach(target_params, batch))

        def loss(weights: Weights) -> tuple[Array, Sums]:
            params = {name: leaf.astype(dtype) for name, leaf in weights.items()} | dict(frozen)
            return compute(params, target_params, batch, teacher, key)

        (total, sums), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return total, sums, gradient

    @jax.numpy_dtype_promotion("standard")  # optax counts in int32 and multiplies by floats
    def update(
        state: TrainState, target_params: Weights, batch: Rows, teacher: Teacher | None
    ) -> tuple[TrainState, Metrics]:
        parts = batch.tokens.shape[0]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step), parts)

        def add(carry: Any, each: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, part(state.params, target_params, *each)), None

        # The first part is outside of the scan: it gives the sums their shapes, and most batches have only one part.
        inputs = (batch, teacher, keys)
        found = part(state.params, target_params, *jax.tree.map(lambda x: x[0], inputs))
        if parts > 1:
            found, _ = jax.lax.scan(add, found, jax.tree.map(lambda x: x[1:], inputs))
        total, sums, gradient = found
        slots = jnp.maximum(sums.counted[0], 1.0)
        gradient = jax.tree.map(lambda g: g / slots, gradient)
        change, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = cast(Weights, optax.apply_updates(dict(state.params), change))
        metrics = Metrics(total / slots, sums, optax.tree.norm(gradient))
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return jax.jit(update, donate_argnums=0)


def spread(mesh: Mesh, parts: Any, shape: tuple[int, int]) -> Any:
    """[A x B, ...] host arrays to devices as [A, B, ...], of the given A and B: axis 1 over the mesh."""
    parts = jax.tree.map(lambda part: part.reshape(*shape, *part.shape[1:]), parts)
    return jax.device_put(parts, NamedSharding(mesh, PartitionSpec(None, "data")))


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """A copy of each leaf on each device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def split(mesh: Mesh, tree: Any) -> Any:
    """Each leaf cut along its longest axis that the devices divide; one without such an axis is copied to each.

    Every device then holds about its share of the weights, and the compiler gathers them where a product needs them.
    """

    def place(leaf: Array) -> Array:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0 and size]
        longest = max(axes, key=lambda axis: leaf.shape[axis], default=None)
        names = ["data" if axis == longest else None for axis in range(leaf.ndim)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*names)))

    return jax.tree.map(place, tree)


PLACEMENTS: dict[str, Callable[[Mesh, Any], Any]] = dict(zip(options.PLACEMENTS, (everywhere, split), strict=True))
"""Of the target's weights, by --target-placement."""
