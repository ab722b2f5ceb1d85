"""`tree_attention` for NVIDIA GPUs, in Pallas: flash decoding over pages, the block in the same kernel.

One program computes a running softmax of a tile of query rows of one key/value head over one split of the committed
tokens; split 0 adds the block's own keys. Query row r is query n = r // G of head k * G + r % G, so the G heads that
share keys read them once. With several splits each writes its unfinished softmax (float32), and a second kernel
combines them.

    grid (B * K, tiles of N * G rows, splits)
    split    0: [block keys 0 .. C)[committed   0 .. 128)    a length of 300 in 4 splits, 64 tokens a trip. Shares are
             1:                    [committed 128 .. 256)    whole trips of the committed tokens, not of the page
             2:                    [committed 256 .. 300)    table; a split without a share writes an empty sum
             3:

Pallas's Triton backend is deprecated (jax 0.11); `triton` does not need it. A CPU interprets the kernel, for tests.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax_kernels.attention import FLOOR, MASKED, Call, Causal, Shape
from specjax_kernels.launch import Launch, launch_for, padded, too_wide
from specjax_kernels.platforms import by_platform, refuse_unless_ampere

LOG2_E = math.log2(math.e)  # the GPU's exponent has base 2: scores are kept in units of log 2


class Softmax(NamedTuple):
    """Over the keys seen so far, unfinished."""

    peak: Array  # f32 [R], the largest score (times log2 e), FLOOR at least
    total: Array  # f32 [R], sum of exp2(score - peak)
    mixed: Array  # f32 [R, Ev padded], sum of exp2(score - peak) * value


def tree_attention(call: Call) -> Array:
    """See `specjax_kernels.tree_attention`."""
    return _launched(call, call.shape, packed=False)


def tree_attention_packed(qkv: Array, call: Call) -> Array:
    """`tree_attention` of q, k_block and v_block in one array [B, C, K, G + 2, E]. `call` has their shapes; the last N
    tokens have queries."""
    return _launched(call._replace(q=qkv, k_block=qkv, v_block=qkv), call.shape, packed=True)


def _launched(call: Call, shape: Shape, *, packed: bool) -> Array:
    dtype = str(call.q.dtype)
    if problem := too_wide(dtype, shape.E, shape.Ev):
        raise NotImplementedError(f"implementation 'pallas' has {problem}")
    rows, heads = shape.N * shape.G, shape.B * shape.K
    launch = launch_for(dtype, max(shape.E, shape.Ev), rows, heads, shape.T * shape.S)
    bits = jnp.zeros((1, 1, 1), jnp.uint32) if isinstance(call.mask, Causal) else call.mask
    # Positions are read only with a window.
    nowhere = jnp.zeros((1, 1), jnp.int32)
    where = (nowhere, nowhere) if shape.window is None else (call.q_positions, call.block_positions)
    arguments = [call.prefix_length, call.page_table, *where, bits, call.q]
    arguments += [call.k_block, call.k_pages, *(() if shape.latent else (call.v_block, call.v_pages))]
    run = functools.partial(_call, shape=shape, packed=packed, launch=launch)
    return by_platform(
        *arguments, cpu=functools.partial(run, interpret=True), default=functools.partial(run, interpret=False)
    )


def refuse() -> None:
    """Raises NotImplementedError on an accelerator that Triton does not compile for. A CPU interprets the kernel."""
    if jax.default_backend() != "cpu":
        refuse_unless_ampere("pallas")


def _call(*arguments: Array, shape: Shape, packed: bool, launch: Launch, interpret: bool) -> Array:
    B, H, N, _, K, G, _, Ev = shape[:8]
    rows, splits, heads = launch.rows * launch.tiles, launch.splits, B * K
    out = jax.ShapeDtypeStruct((B, N, H, Ev), arguments[5].dtype)
    partial = jax.ShapeDtypeStruct((heads, splits, rows), jnp.float32)
    mixed = jax.ShapeDtypeStruct((heads, splits, rows, Ev), jnp.float32)
    attended = pl.pallas_call(
        functools.partial(_attend, shape=shape, packed=packed, launch=launch),
        grid=(heads, launch.tiles, splits),
        out_shape=(out,) if splits == 1 else (partial, partial, mixed),
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name="tree_attention",
    )(*arguments)
    if splits == 1:
        return attended[0]
    return pl.pallas_call(
        functools.partial(_combine, shape=shape, splits=splits),
        grid=(heads * N * G,),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(8, splits * padded(Ev) // 1024)), num_stages=1),
        interpret=interpret,
        name="tree_attention_combine",
    )(*attended)


def _attend(prefix_ref, table_ref, q_position_ref, block_position_ref, bits_ref, q_ref, k_block_ref, k_ref, *refs: Any,
            shape: Shape, packed: bool, launch: Launch) -> None:  # fmt: skip
    """One program: a tile of rows of one key/value head over one split. `refs`: v_block, v (unless latent), outputs."""
    N, C, K, G, E, Ev, P, S, T = shape[2:11]
    v_block_ref, v_ref = (k_block_ref, k_ref) if shape.latent else refs[:2]
    outputs = refs if shape.latent else refs[2:]
    b, k = pl.program_id(0) // K, pl.program_id(0) % K
    split = pl.program_id(2)
    length = prefix_ref[b]
    active = length >= 0

    row = pl.program_id(1) * launch.rows + _range(launch.rows)
    node, head = row // G, k * G + row % G
    is_row = (row < N * G) & active
    column, v_column = _range(padded(E)), _range(padded(Ev))

    def load(ref: Any, at: tuple[Any, ...], columns: Array, width: int, there: Array) -> Array:
        """A tile of the rows at these indices; absent rows are 0."""
        return plgpu.load(ref.at[(*at, columns[None, :])], mask=there[:, None] & (columns < width)[None, :], other=0)

    in_query = (k, (row % G)[:, None]) if packed else (head[:, None],)
    token = node + (C - N) if packed else node
    query = load(q_ref, (b, token[:, None], *in_query), column, E, is_row)
    position, oldest = None, jnp.int32(0)
    if shape.window is not None:
        position = plgpu.load(q_position_ref.at[b, node], mask=is_row, other=0)
        oldest = jnp.maximum(jnp.min(jnp.where(is_row, position, 2**30)) - shape.window + 1, 0)
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    def product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
        dims = (((contract[0],), (contract[1],)), ((), ()))
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def add(before: Softmax, keys: Array, values: Array, visible: Array) -> Softmax:
        """Adds keys [t, E padded] and values [t, Ev padded] to the softmax of rows. `visible`: [R, t]."""
        scores = product(query, keys, (1, 1))
        if shape.softcap is None:
            scores = scores * (shape.scale * LOG2_E)
        else:
            scores = _tanh(scores * (shape.scale / shape.softcap)) * (shape.softcap * LOG2_E)
        scores = jnp.where(visible, scores, MASKED)
        peak = jnp.maximum(before.peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - peak[:, None])
        decay = jnp.exp2(before.peak - peak)
        mixed = before.mixed * decay[:, None] + product(weights.astype(values.dtype), values, (1, 0))
        return Softmax(peak, before.total * decay + jnp.sum(weights, axis=1), mixed)

    def block_trip(trip: Array, before: Softmax) -> Softmax:
        key = trip * launch.tokens + _range(launch.tokens)
        is_key = key < C
        if shape.causal:
            visible = key[None, :] <= node[:, None]
        else:
            of_row = b if bits_ref.shape[0] > 1 else 0
            at_bits = bits_ref.at[of_row, node[:, None], (key // 32)[None, :]]
            bits = plgpu.load(at_bits, mask=is_row[:, None] & is_key[None, :], other=0)
            visible = ((bits >> (key % 32).astype(jnp.uint32)[None, :]) & jnp.uint32(1)) != 0
        visible = visible & is_row[:, None] & is_key[None, :]
        if position is not None and shape.window is not None:
            key_position = plgpu.load(block_position_ref.at[b, key], mask=is_key, other=0)
            visible = visible & (key_position[None, :] > position[:, None] - shape.window)
        # Keys that no row sees are not loaded: they may be NaN, and NaN times a weight of 0 is NaN.
        seen = jnp.max(visible.astype(jnp.int32), axis=0) > 0
        in_keys, in_values = ((k, G), (k, G + 1)) if packed else ((k,), (k,))
        keys = load(k_block_ref, (b, key[:, None], *in_keys), column, E, seen)
        return add(before, keys, load(v_block_ref, (b, key[:, None], *in_values), v_column, Ev, seen), visible)

    def page_trip(trip: Array, before: Softmax) -> Softmax:
        token = begin + trip * launch.tokens + _range(launch.tokens)
        page = plgpu.load(table_ref.at[b, token // S], mask=token < end, other=P)
        there = (token < end) & (page >= 0) & (page < P)
        at = (page[:, None], (token % S)[:, None], k)
        visible = is_row[:, None] & there[None, :]
        if position is not None and shape.window is not None:
            visible = visible & (token[None, :] > position[:, None] - shape.window)
        return add(before, load(k_ref, at, column, E, there), load(v_ref, at, v_column, Ev, there), visible)

    softmax = Softmax(
        jnp.full((launch.rows,), FLOOR, jnp.float32),
        jnp.zeros((launch.rows,), jnp.float32),
        jnp.zeros((launch.rows, padded(Ev)), jnp.float32),
    )
    block_trips = jnp.int32(pl.cdiv(C, launch.tokens))
    if shape.causal:
        last_key = (pl.program_id(1) * launch.rows + launch.rows - 1) // G
        block_trips = jnp.minimum(last_key // launch.tokens + 1, block_trips)
    block_trips = block_trips * ((split == 0) & active).astype(jnp.int32)
    softmax = jax.lax.fori_loop(jnp.int32(0), block_trips, block_trip, softmax)
    # The split's share of the committed tokens, in whole trips.
    length = jnp.minimum(length, T * S)
    trips = _cdiv(jnp.maximum(length - oldest, 0), launch.tokens)
    share = _cdiv(trips, launch.splits)
    begin = oldest + split * share * launch.tokens
    end = jnp.minimum(length, begin + share * launch.tokens)
    page_trips = _cdiv(jnp.maximum(end - begin, 0), launch.tokens)
    softmax = jax.lax.fori_loop(jnp.int32(0), page_trips, page_trip, softmax)

    if launch.splits == 1:
        out = _divide(softmax.mixed, softmax.total[:, None]).astype(query.dtype)
        at_out = outputs[0].at[b, node[:, None], head[:, None], v_column[None, :]]
        plgpu.store(at_out, out, mask=(row < N * G)[:, None] & (v_column < Ev)[None, :])
        return
    at_row = (pl.program_id(0), split, row)
    plgpu.store(outputs[0].at[at_row], softmax.peak)
    plgpu.store(outputs[1].at[at_row], softmax.total)
    # A row without a key in this split writes nothing: the combine does not read it.
    at_mixed = outputs[2].at[pl.program_id(0), split, row[:, None], v_column[None, :]]
    plgpu.store(at_mixed, softmax.mixed, mask=(softmax.total > 0)[:, None] & (v_column < Ev)[None, :])


def _combine(peak_ref, total_ref, mixed_ref, out_ref, *, shape: Shape, splits: int) -> None:
    """One program: the splits of one query row."""
    rows = shape.N * shape.G
    index, row = pl.program_id(0) // rows, pl.program_id(0) % rows
    split, v_column = _range(splits), _range(padded(shape.Ev))
    peak = plgpu.load(peak_ref.at[index, split, row])
    total = plgpu.load(total_ref.at[index, split, row])
    there = (total > 0)[:, None] & (v_column < shape.Ev)[None, :]
    mixed = plgpu.load(mixed_ref.at[index, split[:, None], row, v_column[None, :]], mask=there, other=0)
    weight = jnp.exp2(peak - jnp.max(peak))
    out = _divide(jnp.sum(mixed * weight[:, None], axis=0), jnp.sum(total * weight)).astype(out_ref.dtype)
    b, head = index // shape.K, index % shape.K * shape.G + row % shape.G
    plgpu.store(out_ref.at[b, row // shape.G, head, v_column], out, mask=v_column < shape.Ev)


def _range(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)


def _divide(mixed: Array, total: Array) -> Array:
    """mixed / total, or 0 if no key was seen."""
    return mixed / jnp.where(total > 0, total, 1.0)


def _cdiv(number: Array, by: int) -> Array:
    """number / by, rounded up. (`pl.cdiv` makes `by` a 64-bit integer where those are enabled.)"""
    return (number + (by - 1)) // by


def _tanh(x: Array) -> Array:
    """tanh within 2e-7: by the exponential, which needs no library on the device; near 0 by the series."""
    shrunk = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E))
    far = jnp.where(x < 0, -1.0, 1.0) * ((1 - shrunk) / (1 + shrunk))
    square = x * x
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return jnp.where(square < 0.09, x * series, far)
