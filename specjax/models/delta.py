"""Qwen3.5 and Qwen3-Next: gated attention in every fourth layer, gated delta nets in the others.

A delta net keeps a matrix S [k, u] for each value head in place of keys and values. With a token's key and query
(normalised), value, step size beta and log decay g:

    S <- exp(g) S;   w = beta (value - S^T key);   S <- S + key w^T;   output = S^T query

A forward computes all nodes of a tree in one pass and leaves S as it is. Let G_i be the sum of g from the committed
tokens to node i, and j run over the ancestors of i:

    w_i = beta_i (value_i - exp(G_i) S^T key_i - sum_j exp(G_i - G_j) (key_j . key_i) w_j)
    output_i = exp(G_i) S^T query_i + sum_j and i exp(G_i - G_j) (key_j . query_i) w_j

Parents come before children, so the w are the solution of a unit lower triangular system. The block keeps key, w and G
of each node; after a path that ends in i the state is exp(G_i) S + sum_j and i exp(G_i - G_j) key_j w_j^T. Queries,
keys and values pass through a convolution over each token and its `taps` - 1 predecessors, of which the state keeps the
last ones. A chain is the tree whose mask is causal; long chunks are computed in parts of `CHUNK` tokens. In training a
row packs several texts: each is a chain of its own, which begins with S = 0.

Sources: Yang et al., "Gated Delta Networks" (arXiv:2412.06464); transformers' `qwen3_5` and `qwen3_next`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Float32
from specjax_kernels import Causal, mesh, rms_norm, unpack_bits

from specjax.cache import Hidden, PerRequest, Positions, RowSpec, RowState
from specjax.config import DeltaNet, ModelConfig
from specjax.models.blocks import Past, Scores, attention, key_value_spec, linear
from specjax.models.decoder import Family, Layer, decoder_table, feed_leaves
from specjax.models.params import (
    ATTENTION_NORM,
    HEAD_NORMS,
    KEY,
    MLP_NORM,
    QUERIES,
    VALUE,
    Leaf,
    Part,
    Table,
    Tensor,
    dimensions,
    norm,
)
from specjax.models.params import linear as linear_leaves
from specjax.models.rope import Rotation

CHUNK = 64  # tokens of a prompt in one system of equations; S passes from one to the next


class Recurrent(NamedTuple):
    """Row leaves of a delta net: S, and the last inputs of the convolution."""

    state: Float32[Array, "B h j k u"]
    window: Float[Array, "B t1 h y"]


class Updates(NamedTuple):
    """What a block changes: key, w and G of each node, and its input of the convolution."""

    key: Float32[Array, "B N h k"]
    update: Float32[Array, "B N h j u"]
    decay: Float32[Array, "B N h j"]
    input: Float[Array, "B N h y"]


def _attention_leaves() -> tuple[Leaf, ...]:
    """Attention with a gate for each query head. The rows of a head in `q_proj` are its query's, then its gate's."""
    a = "self_attn."
    queries = Tensor(f"{a}q_proj", "KGd M", (QUERIES,), cut=("d", "E", ""))
    keys, values = Tensor(f"{a}k_proj", "KE M", (KEY,)), Tensor(f"{a}v_proj", "KE M", (VALUE,))
    return (
        *linear_leaves("qkv", "M -> K Q E", queries, keys, values, bias=False),
        *linear_leaves("gate", "M -> K G E", replace(queries, parts=(), cut=("d", "E", "E")), bias=False),
        *linear_leaves("output", "K G E -> M", Tensor(f"{a}o_proj", "M KGE"), bias=False),
        *HEAD_NORMS,
    )


def _delta_leaves(delta: DeltaNet) -> tuple[Leaf, ...]:
    n = "linear_attn."
    rows, parts = ("hk", "hk", "he"), (("k", ""), ("k", "k"), ("e", "A"))

    def stacked(name: str, more: str, axis: str = "Z") -> tuple[Tensor, ...]:
        """The tensor's rows are all heads' queries, then all keys, then all values."""
        return tuple(
            Tensor(name, f"{rows[i]} {more}", (Part(axis, part, after=after),), fused=(rows, i))
            for i, (part, after) in enumerate(parts)
        )

    if delta.fused:
        mixed, rates = (Tensor(f"{n}in_proj_qkvz", "hZ M"),), (Tensor(f"{n}in_proj_ba.weight", "hb M"),)
    else:
        mixed = (*stacked(f"{n}in_proj_qkv", "M"), Tensor(f"{n}in_proj_z", "he M", (Part("Z", "e", after="y"),)))
        rates = (
            Tensor(f"{n}in_proj_b.weight", "hj M", (Part("b", "j"),)),
            Tensor(f"{n}in_proj_a.weight", "hj M", (Part("b", "j", after="j"),)),
        )
    return (
        *linear_leaves("mixed", "M -> h Z", *mixed, bias=False),
        Leaf("rates", "M -> h b", rates, replicated=True),
        Leaf("taps", "h y 1 t", stacked(f"{n}conv1d.weight", "1 t", "y")),
        Leaf("decay", "h j", (Tensor(f"{n}A_log", "hj"),), init="zeros", dtype="float32"),
        Leaf("decay_bias", "h j", (Tensor(f"{n}dt_bias", "hj"),), init="ones", dtype="float32"),
        norm("delta_norm", f"{n}norm.weight", letters="u"),
        *linear_leaves("output", "h e -> M", Tensor(f"{n}out_proj", "M he"), bias=False),
    )


def table(config: ModelConfig) -> Table:
    def layer(i: int) -> tuple[Leaf, ...]:
        delta = config.delta
        own = _delta_leaves(delta) if delta is not None and i in delta.layers else _attention_leaves()
        return (*own, ATTENTION_NORM, MLP_NORM, *feed_leaves(config, i))

    return decoder_table(config, layer)


class DeltaLayer(Layer):
    """Gated attention, or a gated delta net where the leaves have its `taps`."""

    norm_offset: ClassVar[float] = 1.0

    @staticmethod
    def page_spec(config: ModelConfig, layer: int = 0) -> Any:
        delta = config.delta
        if delta is None or layer not in delta.layers:
            return key_value_spec(config)
        sizes = dimensions(config)
        h, j, k, u, y = (sizes[letter] for letter in "hjkuy")
        state = RowSpec((h, j, k, u), "float32", ("heads", None, None, None))
        window = RowSpec((delta.taps - 1, h, y), config.dtype, (None, "heads", None))
        entry = h * (4 * (k + j * u + j) + y * np.dtype(config.dtype).itemsize)
        return RowState(Recurrent(*cast(Any, (state, window))), advance, entry)

    def attend(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past, *,
        residual: Hidden | None = None,
    ) -> tuple[Hidden, Any]:  # fmt: skip
        w, pre_norm = self.weights, self.norm_of("attention_norm")
        # Or XLA:GPU would multiply both matrices by x at once, after it has copied them side by side in each step.
        other = jax.lax.optimization_barrier(x)
        if "taps" not in w:
            gate = linear(other, w, "gate", norm=pre_norm)
            return attention(
                x, w, rotation, positions, mask, past, backend=self.backend, scores=Scores(window=self.window),
                head_norm=self._head_norm, norm=pre_norm, residual=residual, gate=gate,
            )  # fmt: skip
        mixed, rates = mesh.split(linear(x, w, "mixed", norm=pre_norm), 2), linear(other, w, "rates", norm=pre_norm)
        mixed, gate = jnp.split(mixed, (w["taps"].shape[1],), axis=3)
        if past.ragged is not None:
            mixed, rates = past.ragged.parted(mixed), past.ragged.parted(rates)
        mixed_out, block = delta_net(mixed, rates, w, mask, past.pages.leaves)
        if past.ragged is not None:
            mixed_out = past.ragged.joined(past.ragged.cleared(mixed_out))
        normed = rms_norm(mixed_out, w["delta_norm"].astype(jnp.float32), self.config.norm_epsilon)
        gated = normed * jax.nn.silu(gate.astype(jnp.float32)).reshape(normed.shape)
        flat = gated.astype(x.dtype).reshape(*x.shape[:2], -1)
        return mesh.whole(linear(flat, w, "output", residual=residual)), block


def delta_net(
    mixed: Float[Array, "B N h y"], rates: Float[Array, "B N h b"], weights: Any, mask: Any, rows: Recurrent
) -> tuple[Float32[Array, "B N h j u"], Updates]:
    """Outputs of all nodes before their norm, and what the block changes.

    Args:
        mixed: queries, keys and values before the convolution.
        rates: step sizes and decays before their activations.
        mask: `CAUSAL`, or the ancestors of each node and itself: packed bits [B, N, W], or Bool [B, N, N] for rows of
            several texts one after another.
        rows: the state after the committed tokens; zeros for rows of several texts.
    """
    j, size_k, width = weights["decay"].shape[1], rows.state.shape[3], mixed.shape[1]
    ancestors, is_packed = None, False
    if not isinstance(mask, Causal):
        is_packed = mask.dtype == bool
        whole = mask if is_packed else unpack_bits(mask, width)
        ancestors = jnp.broadcast_to(whole, (mixed.shape[0], width, width))
    inputs = jnp.concatenate([rows.window, mixed], axis=1)
    convolved = jax.nn.silu(convolve(inputs, weights["taps"][:, :, 0], ancestors))
    query, key, value = jnp.split(convolved, (size_k, 2 * size_k), axis=-1)
    query, key = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (query, key))
    value = value.reshape(*value.shape[:3], j, -1)
    beta = jax.nn.sigmoid(rates[..., :j].astype(jnp.float32))
    step = jax.nn.softplus(rates[..., j:].astype(jnp.float32) + weights["decay_bias"][None, None])
    decay = -jnp.exp(weights["decay"])[None, None] * step
    nodes = _Nodes(query * size_k**-0.5, key, value, beta, decay)
    if width > CHUNK and (ancestors is None or is_packed):
        output, update, total = _in_chunks(rows.state, nodes, ancestors)
    else:
        if ancestors is None:
            ancestors = jnp.broadcast_to(jnp.tri(width, dtype=bool)[None], (mixed.shape[0], width, width))
        system = _System.of(nodes, ancestors)
        (output, update), total = system.solve(rows.state), system.total
    return output, Updates(key, update, total, mixed)


def convolve(
    inputs: Float[Array, "B X h y"], taps: Float[Array, "h y t"], ancestors: Bool[Array, "B N N"] | None
) -> Float32[Array, "B N h y"]:
    """The convolution of the last N = X - t + 1 inputs: each with those before it, or in a tree with its nearest
    ancestors, and above the root with the first t - 1 inputs."""
    kernel, above = taps.astype(jnp.float32), taps.shape[2] - 1
    width = inputs.shape[1] - above
    index = jnp.broadcast_to(jnp.arange(above, above + width, dtype=jnp.int32)[None], (inputs.shape[0], width))
    parent = index
    if ancestors is not None:
        # The root's parent is the last input above. A node's parent is its last ancestor.
        strict = ancestors & ~jnp.eye(width, dtype=bool)[None]
        parent = jnp.max(jnp.where(strict, index[:, None], above - 1), axis=2)
        first = jnp.broadcast_to(jnp.arange(-1, above - 1, dtype=jnp.int32)[None], (inputs.shape[0], above))
        parent = jnp.concatenate([first, parent], axis=1)
    total = jnp.zeros((), jnp.float32)
    for distance in range(above + 1):
        if ancestors is None:
            taken = inputs[:, above - distance : above - distance + width]
        else:
            taken = jnp.take_along_axis(inputs, index[:, :, None, None], axis=1)
            index = jnp.take_along_axis(parent, index, axis=1)
        total = total + taken.astype(jnp.float32) * kernel[None, None, :, :, above - distance]
    return total


class _Nodes(NamedTuple):
    """Inputs of the rule, float32; `beta` and `decay` (g) are [B, N, h, j]."""

    query: Float32[Array, "B N h k"]
    key: Float32[Array, "B N h k"]
    value: Float32[Array, "B N h j u"]
    beta: Float32[Array, "B N h j"]
    decay: Float32[Array, "B N h j"]


_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class _System(NamedTuple):
    """What w and the outputs depend on besides S: w = value - key^T S, output = query^T S + shares w."""

    value: Float32[Array, "B N h j u"]
    key: Float32[Array, "B N h j k"]
    query: Float32[Array, "B N h j k"]
    shares: Float32[Array, "B h j N N"]
    total: Float32[Array, "B N h j"]  # G

    @classmethod
    def of(
        cls, nodes: _Nodes, ancestors: Bool[Array, "B N N"], carried: Bool[Array, "B N"] | None = None
    ) -> _System:  # fmt: skip
        """Row i of `ancestors` marks node i and its ancestors. `carried`: nodes that read S; None: all."""
        query, key, value, beta, decay = nodes
        total = _einsum("bnm,bmhj->bnhj", ancestors.astype(jnp.float32), decay)
        span = jnp.moveaxis(total, 1, 3)  # [B, h, j, N]
        share = jnp.exp(jnp.where(ancestors[:, None, None], span[..., None] - span[..., None, :], -jnp.inf))
        both = jnp.stack([key, query], axis=1)
        products = share[:, None] * _einsum("bqnhk,bmhk->bqhnm", both, key)[:, :, :, None]  # [B, 2, h, j, N, N]
        decayed = jnp.exp(total)[..., None]
        if carried is not None:
            decayed = jnp.where(carried[..., None, None, None], decayed, 0.0)
        wanted = jnp.concatenate([value, decayed * key[:, :, :, None]], axis=-1) * beta[..., None]
        if key.shape[1] > 1:
            before = jnp.tri(key.shape[1], k=-1, dtype=bool)[None, None, None]
            strict = jnp.where(before, jnp.moveaxis(beta, 1, 3)[..., None] * products[:, 0], 0.0)
            wanted = _einsum("bhjnm,bmhju->bnhju", inverse(strict), wanted)
        value, key = jnp.split(wanted, (value.shape[-1],), axis=-1)
        return cls(value, key, decayed * query[:, :, :, None], products[:, 1], total)

    def solve(self, state: Float32[Array, "B h j k u"]) -> tuple[Array, Array]:
        """Outputs and w."""
        seen = _einsum("bqnhjk,bhjku->bqnhju", jnp.stack([self.key, self.query], axis=1), state)
        update = self.value - seen[:, 0]
        return seen[:, 1] + _einsum("bhjnm,bmhju->bnhju", self.shares, update), update


def inverse(strict: Float32[Array, "*b N N"]) -> Float32[Array, "*b N N"]:
    """The inverse of I + a strictly lower triangular matrix, by blocks of 1, 2, 4, ... rows:

    [A 0; C B]^-1 = [A^-1 0; -B^-1 C A^-1 B^-1]
    """
    size = strict.shape[-1]
    row, column = np.indices((size, size))
    found = jnp.broadcast_to(jnp.eye(size, dtype=strict.dtype), strict.shape)
    block = 1
    while block < size:
        below = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        corner = jnp.where(jnp.asarray(below), strict, 0.0)
        found = found - _einsum("...ab,...bc,...cd->...ad", found, corner, found)
        block *= 2
    return found


def _in_chunks(
    state: Float32[Array, "B h j k u"], nodes: _Nodes, packed: Bool[Array, "B N N"] | None = None
) -> tuple[Array, Array, Array]:
    """Outputs, w and G of a long chain. Only S passes from chunk to chunk.

    `packed`: the mask of rows of several texts. A chunk's S is then that of the text in which the chunk before ends:
    the chunk's later texts do not read it, and the S that passes on is that of the text in which the chunk ends.
    """
    batch, width = nodes.key.shape[:2]
    count = -(-width // CHUNK)
    causal, carried = jnp.broadcast_to(jnp.tri(CHUNK, dtype=bool)[None], (batch * count, CHUNK, CHUNK)), None
    if packed is not None:
        fill = count * CHUNK - width
        blocks = jnp.pad(packed, ((0, 0), (0, fill), (0, fill))).reshape(batch, count, CHUNK, count, CHUNK)
        number = np.arange(count)
        causal = jnp.moveaxis(blocks[:, number, :, number], 0, 1).reshape(-1, CHUNK, CHUNK)
        before = jnp.moveaxis(blocks[:, number[1:], :, number[:-1], -1], 0, 1)  # of the chunk before: its last token
        carried = jnp.pad(before, ((0, 0), (1, 0), (0, 0))).reshape(-1, CHUNK)

    def split(x: Array) -> Array:
        """[B, N, ...] -> [B * count, CHUNK, ...]. Padding has a step size and a decay of 0, so it changes nothing."""
        padded = jnp.pad(x, ((0, 0), (0, count * CHUNK - width), *[(0, 0)] * (x.ndim - 2)))
        return padded.reshape(-1, CHUNK, *x.shape[2:])

    def chunks(x: Array) -> Array:
        """[B * count, ...] -> [count, B, ...]."""
        return jnp.moveaxis(x.reshape(batch, count, *x.shape[1:]), 1, 0)

    def step(state: Array, chunk: tuple[_System, Array, Any]) -> tuple[Array, tuple[Array, Array]]:
        system, key, last = chunk
        output, update = system.solve(state)
        full = jnp.full(batch, CHUNK, jnp.int32)
        return _advanced(state, key, update, system.total, full, *last), (output, update)

    parts = jax.tree.map(split, nodes)
    systems = jax.tree.map(chunks, _System.of(parts, causal, carried))
    ends_of_texts = () if carried is None else (chunks(causal[:, -1]), chunks(carried[:, -1]))
    _, (output, update) = jax.lax.scan(step, state, (systems, chunks(parts.key), ends_of_texts))
    ends = jnp.cumsum(systems.total[:, :, -1], axis=0)
    total = systems.total + jnp.pad(ends[:-1], ((1, 0), *[(0, 0)] * 3))[:, :, None]
    joint = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :width] for x in (output, update, total))
    return cast(Any, tuple(joint))


def _advanced(
    state: Array, key: Array, update: Array, total: Array, length: PerRequest,
    own: Bool[Array, "B N"] | None = None, carried: Bool[Array, "B"] | None = None,
) -> Array:  # fmt: skip
    """S after the first `length` nodes of a path. `own`: the nodes of the last one's text; `carried`: it reads S."""
    last = jnp.take_along_axis(total, jnp.maximum(length - 1, 0)[:, None, None, None], axis=1)
    last = jnp.where((length > 0)[:, None, None, None], last, 0.0)
    inside = (jnp.arange(key.shape[1], dtype=jnp.int32)[None] < length[:, None])[:, :, None, None]
    if own is not None:
        inside = inside & own[..., None, None]
    weighted = jnp.where(inside, jnp.exp(jnp.where(inside, last - total, 0.0)), 0.0)[..., None] * update
    weighted = jnp.where(inside[..., None], weighted, 0.0)  # 0 times NaN is NaN
    added = _einsum("bnhk,bnhju->bhjku", jnp.where(inside, key, 0.0), weighted)
    kept = jnp.exp(last[:, 0])
    if carried is not None:
        kept = jnp.where(carried[:, None, None], kept, 0.0)
    return kept[..., None, None] * state + added


def advance(rows: Recurrent, block: Updates, length: PerRequest) -> Recurrent:
    """`RowState.advance`."""
    inputs = jnp.concatenate([rows.window, block.input], axis=1)
    index = length[:, None] + jnp.arange(rows.window.shape[1], dtype=jnp.int32)[None]
    window = jnp.take_along_axis(inputs, index[:, :, None, None], axis=1)
    return Recurrent(_advanced(rows.state, block.key, block.update, block.decay, length), window)


FAMILY = Family(table, DeltaLayer)
