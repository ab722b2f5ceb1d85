"""A mixture of experts: the router, and the sum of the chosen experts' MLPs.

On several devices, each device computes all tokens with its experts or with its part of every expert's width, and a sum
over the devices gives the result.

Sources: Qwen3-MoE (softmax over all experts), DeepSeek-V3 (sigmoid, a bias that only chooses, groups of experts),
Qwen3-Next (a gate of the shared expert), gpt-oss (biases; its softmax over the chosen experts is the normalised softmax
over all).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Float32, Int32
from specjax_kernels import mesh
from specjax_kernels.linear import products_of_rows
from specjax_kernels.platforms import by_platform
from specjax_kernels.quantised import expert_specs, split_axes

from specjax.cache import Hidden, Weights
from specjax.config import Experts
from specjax.models.blocks import Activation, gated_mlp, linear, swiglu
from specjax.models.params import GATE, UP, Leaf, Part, Tensor
from specjax.models.params import linear as linear_leaves


@cache
def expert_leaves(experts: Experts, prefix: str = "mlp.experts.", router: str = "mlp.gate.weight") -> tuple[Leaf, ...]:
    """Router, stacked experts and the shared MLP of a layer."""

    def stacked(projection: str, axes: str, *parts: Part) -> list[Tensor]:
        gguf = f"ffn_{projection.removesuffix('_proj')}_exps"
        return [
            Tensor(f"{prefix}{e}.{projection}.weight", axes, (Part("X", offset=e), *parts), f"{gguf}.{e}.weight")
            for e in range(experts.count)
        ]

    wide = (*stacked("gate_proj", "i M", GATE), *stacked("up_proj", "i M", UP))
    leaves = [
        Leaf("router", "M -> X", (Tensor(router, "X M", gguf="ffn_gate_inp.weight"),), replicated=True),
        Leaf("experts_gate_up", "X M -> 2 i", wide),
        Leaf("experts_down", "X i -> M", tuple(stacked("down_proj", "M i"))),
    ]
    if experts.scoring == "sigmoid":
        bias = Tensor("mlp.gate.e_score_correction_bias", "X")
        leaves.append(Leaf("router_bias", "X", (bias,), init="zeros", dtype="float32", replicated=True))
    if experts.shared_width:
        name = "mlp.shared_expert." if experts.shared_gate else "mlp.shared_experts."
        gate, up = Tensor(f"{name}gate_proj", "s M", (GATE,)), Tensor(f"{name}up_proj", "s M", (UP,))
        leaves += linear_leaves("shared_gate_up", "M -> 2 s", gate, up, bias=False)
        leaves += linear_leaves("shared_down", "s -> M", Tensor(f"{name}down_proj", "M s"), bias=False)
    if experts.shared_gate:
        gate = Tensor("mlp.shared_expert_gate.weight", "1 M")
        leaves.append(Leaf("shared_gate", "M -> 1", (gate,), replicated=True))
    return tuple(leaves)


def stacked_leaves() -> tuple[Leaf, ...]:
    """Router and experts with biases, where one tensor has all experts of a layer, and gate and up alternate."""
    e = "mlp.experts."
    return (
        Leaf("router", "M -> X", (Tensor("mlp.router.weight", "X M"),), replicated=True),
        Leaf("router_bias", "X", (Tensor("mlp.router.bias", "X"),), init="zeros", dtype="float32", replicated=True),
        Leaf("experts_gate_up", "X M -> 2 i", (Tensor(f"{e}gate_up_proj", "X M i2"),)),
        Leaf("experts_gate_up_bias", "X 2 i", (Tensor(f"{e}gate_up_proj_bias", "X i2"),), init="zeros"),
        Leaf("experts_down", "X i -> M", (Tensor(f"{e}down_proj", "X i M"),)),
        Leaf("experts_down_bias", "X M", (Tensor(f"{e}down_proj_bias", "X M"),), init="zeros", replicated=True),
    )


def mixture(
    x: Hidden, weights: Weights, experts: Experts, *, activation: Activation = swiglu, routed: Hidden | None = None
) -> Hidden:
    """The output of a layer's experts for a normalised x. `routed`: input of the router; None: x."""
    rows = x.reshape(-1, x.shape[-1])
    ids, gates = route(rows if routed is None else routed.reshape(rows.shape), weights, experts)
    names = ("gate_up", "gate_up_bias", "down", "down_bias")
    own = {name: weights[f"experts_{name}"] for name in names if f"experts_{name}" in weights}
    down_bias = own.pop("down_bias", None)
    groups = mesh.groups()
    few: Any = partial(_gathered, spread=groups > 1)
    mix = partial(few if ids.size <= experts.count else _grouped, experts.count // groups, activation=activation)
    if groups > 1:  # each device has a group of experts, or a part of their width
        places = {name: _place(name, leaf, expert_specs, mesh.of_experts) for name, leaf in own.items()}
        mix_group = _summed(partial(_of_group, experts.count // groups, mix))
        mixed = mesh.apart(mix_group, (-1, -1, -1, places), -1, rows, ids, gates, own)
    elif mesh.parts(experts.width) > 1:  # each device has a part of every expert's width
        places = {name: _place(name, leaf, split_axes, lambda axis: axis) for name, leaf in own.items()}
        mixed = mesh.apart(_summed(mix), (-1, -1, -1, places), -1, rows, ids, gates, own)
    else:
        mixed = mix(rows, ids, gates, own)
    if down_bias is not None:
        mixed = mixed + jnp.sum(down_bias[ids].astype(jnp.float32) * gates[:, :, None], axis=1)
    mixed = mixed.astype(x.dtype).reshape(x.shape)
    if not experts.shared_width:
        return mixed
    shared = gated_mlp(x, weights, activation=activation, prefix="shared_")
    return mixed + (jax.nn.sigmoid(linear(x, weights, "shared_gate")) * shared if experts.shared_gate else shared)


def _place(name: str, leaf: Any, quantised: Callable[[Any], Any], plain: Callable[[int], Any]) -> Any:
    """Where a leaf of stacked experts is split: along their width."""
    return quantised(leaf) if isinstance(leaf, kernels.Quantised) else plain(1 if name == "down" else leaf.ndim - 1)


def _summed(mix: Callable[..., Array]) -> Callable[..., Array]:
    def summed(*arguments: Any) -> Array:
        return jax.lax.psum(mix(*arguments), mesh.AXIS)

    return summed


def _of_group(count: int, mix: Callable[..., Array], rows: Array, ids: Array, gates: Array, own: Any) -> Array:
    """The sum over the `count` experts of this device's group. The id `count` stands for experts of other groups."""
    local = ids - jax.lax.axis_index(mesh.GROUPS).astype(ids.dtype) * jnp.asarray(count, ids.dtype)
    return mix(rows, jnp.where((local >= 0) & (local < count), local, count), gates, own)


def route(
    rows: Float[Array, "T M"], weights: Weights, experts: Experts
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
    """The experts of each row and their weights, computed in float32."""
    logits = kernels.unembed(rows.astype(jnp.float32), weights["router"])
    softmax = experts.scoring == "softmax"
    if softmax and "router_bias" in weights:
        logits = logits + weights["router_bias"][None]
    scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    priority = scores if softmax else scores + weights["router_bias"][None]
    if experts.groups > 1:
        grouped = priority.reshape(len(rows), experts.groups, -1)
        group_score = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        best = jax.lax.top_k(group_score, experts.top_groups)[1]
        allowed = jnp.any(best[:, :, None] == jnp.arange(experts.groups)[None, None], axis=1)
        priority = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    ids = jax.lax.top_k(priority, experts.per_token)[1]
    gates = jnp.take_along_axis(scores, ids, axis=1)
    if experts.normalised:
        gates = gates / (jnp.sum(gates, axis=1, keepdims=True) + 1e-20)
    if "router_scale" in weights:
        gates = gates * weights["router_scale"].astype(jnp.float32)[ids]
    return ids, gates * experts.scale


def _gathered(
    count: int, rows: Float[Array, "T M"], ids: Int32[Array, "T k"], gates: Float32[Array, "T k"], own: Weights, *,
    activation: Activation, spread: bool,
) -> Float32[Array, "T M"]:  # fmt: skip
    """For at most `count` choices of experts: reads only the chosen experts' weights. `spread`: the id `count` stands
    for an expert on other devices, whose output is zero here."""
    others = count if spread else None
    pairs = jnp.repeat(rows, ids.shape[1], axis=0), ids.reshape(-1)
    outputs = _on_each_platform(
        partial(_one_by_one, activation=activation, others=others),
        partial(_side_by_side, activation=activation, others=others), *pairs, own,
    )  # fmt: skip
    return jnp.einsum("tkm,tk->tm", outputs.reshape(*ids.shape, -1).astype(jnp.float32), gates)


def _on_each_platform(cpu: Any, elsewhere: Any, *arguments: Any) -> Array:
    """Call `cpu` on CPUs and `elsewhere` on other devices, with arrays and quantised leaves."""
    arrays, tree = jax.tree.flatten(arguments)

    def bound(function: Any) -> Any:
        return lambda *arrays: function(*jax.tree.unflatten(tree, arrays))

    return by_platform(*arrays, cpu=bound(cpu), default=bound(elsewhere))


def _one_by_one(
    rows: Float[Array, "R M"], experts: Int32[Array, "R"], own: Weights, *, activation: Activation, others: int | None
) -> Float[Array, "R M"]:
    """For CPUs, whose kernels read one expert's weights in place."""

    def apply(pair: tuple[Array, Array]) -> Array:
        row, expert = pair

        def mlp() -> Array:
            return gated_mlp(row[None, None], _of_expert(own, expert), activation=activation)[0, 0]

        return mlp() if others is None else jax.lax.cond(expert < others, mlp, lambda: jnp.zeros_like(row))

    return jax.lax.map(apply, (rows, experts))


def _of_expert(own: Weights, expert: Array) -> Weights:
    return {name: leaf[expert] for name, leaf in own.items()}


def _side_by_side(
    rows: Float[Array, "R M"], experts: Int32[Array, "R"], own: Weights, *, activation: Activation, others: int | None
) -> Float[Array, "R M"]:
    """For GPUs, where XLA fuses the choice of experts into the products, without temporaries or a loop: into sums, not
    into dots of more than 8 million weights. `ragged_dot` has temporaries, and a loop of products synchronises with
    the host in each iteration."""
    local = None if others is None else experts < others
    if local is not None:
        # Replace experts of other groups by a local expert that is read anyway, to read no more weights.
        experts = jnp.where(local, experts, jnp.max(jnp.where(local, experts, 0)))

    def product(x: Array, weight: Any) -> Array:
        if isinstance(weight, kernels.Quantised):
            return products_of_rows(x, weight, experts)
        wide = x.reshape(*x.shape, *(1,) * (weight.ndim - 2)).astype(jnp.float32)
        return jnp.sum(wide * weight[experts].astype(jnp.float32), axis=1).astype(x.dtype)

    wide = product(rows, own["gate_up"])
    if "gate_up_bias" in own:
        wide = wide + own["gate_up_bias"][experts]
    out = product(activation(wide[:, 0], wide[:, 1]), own["down"])
    return out if local is None else jnp.where(local[:, None], out, jnp.zeros_like(out))


TILE = 32  # rows of one expert in a product


def _grouped(
    count: int, rows: Float[Array, "T M"], ids: Int32[Array, "T k"], gates: Float32[Array, "T k"], own: Weights, *,
    activation: Activation,
) -> Float32[Array, "T M"]:  # fmt: skip
    """For many choices: rows are sorted by expert, so that each expert's weights are read once. Rows with the id
    `count`, an expert on other devices, come last and stay zero."""
    per_token = ids.shape[1]
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=count).astype(jnp.int32)
    sorted_outputs = _in_tiles(rows[order // per_token], sizes, own, activation=activation)
    outputs = jnp.zeros_like(sorted_outputs).at[order].set(sorted_outputs, unique_indices=True)
    return jnp.einsum("tkm,tk->tm", outputs.reshape(*ids.shape, -1).astype(jnp.float32), gates)


def _in_tiles(
    rows: Float[Array, "R M"], sizes: Int32[Array, "X"], own: Weights, *, activation: Activation
) -> Float[Array, "R M"]:
    """The MLP of sorted rows, computed in tiles of rows of the same expert. XLA's `ragged_dot` multiplies every row by
    every expert, with temporaries for all products."""
    tiles = -(-sizes // TILE)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(sizes)
    padded = jnp.pad(rows, ((0, TILE), (0, 0)))

    def tile(index: Array, out: Array) -> Array:
        expert = jnp.searchsorted(last_tile, index, side="right")
        first = last_row[expert] - sizes[expert] + (index - last_tile[expert] + tiles[expert]) * TILE
        x = jax.lax.dynamic_slice_in_dim(padded, first, TILE)
        y = gated_mlp(x[None], _of_expert(own, expert), activation=activation)[0]
        valid = first + jnp.arange(TILE, dtype=jnp.int32) < last_row[expert]
        updated = jnp.where(valid[:, None], y, jax.lax.dynamic_slice_in_dim(out, first, TILE))
        return jax.lax.dynamic_update_slice_in_dim(out, updated, first, 0)

    return jax.lax.fori_loop(0, last_tile[-1], tile, jnp.zeros_like(padded))[: len(rows)]
