"""`tree_attention` for NVIDIA GPUs: flash decoding over pages, the block in the same kernel (see `gpu_language`).

One program computes a running softmax of a tile of query rows of one key/value head over one split of the committed
tokens; split 0 adds the block's own keys. Query row r is query n = r // G of head k * G + r % G, so the G heads that
share keys read them once. With several splits each writes its unfinished softmax (float32), and a second kernel
combines them.

    grid (B * K, tiles of N * G rows, splits)
    split    0: [block keys 0 .. C)[committed   0 .. 128)    a length of 300 in 4 splits, 64 tokens a trip. Shares are
             1:                    [committed 128 .. 256)    whole trips of the committed tokens, not of the page
             2:                    [committed 256 .. 300)    table; a split without a share writes an empty sum
             3:

Scores are in units of log 2, because the GPU's exponent has base 2. Scores of keys that a row does not see are -1e30,
and its peak starts at -1e20 and only grows: exp2 of the difference is 0, so unseen keys weigh nothing, and a row
without keys sums to 0. In comments R = rows of the tile, t = tokens of a trip, EP and VP = padded widths.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels import gpu_language
from specjax_kernels.call import Call, Causal, mask_words
from specjax_kernels.gpu_language import Constants, at, device, dot, loop, tl
from specjax_kernels.launch import launch_for, padded, too_wide

LOG2_E = math.log2(math.e)


def attend(call: Call, *, dialect: str, qkv: Array | None = None) -> Array:
    """`tree_attention` by a compiler (see `gpu_language`). `qkv` [B, C, K, G + 2, E] replaces q, k_block and v_block,
    whose shapes are in `call`; its last N tokens have queries."""
    run = gpu_language.compiler(dialect).run
    shape, dtype = call.shape, call.q.dtype
    B, H, N, C, K, G, E, Ev, P, S, T = shape[:11]
    if problem := too_wide(str(dtype), E, Ev):
        raise NotImplementedError(f"implementation {dialect!r} has {problem}")
    launch = launch_for(str(dtype), max(E, Ev), N * G, B * K, T * S)
    rows, heads, splits, packed = launch.rows * launch.tiles, B * K, launch.splits, qkv is not None
    softcap = shape.softcap or 0.0
    constants = Constants(
        N=N, C=C, K=K, G=G, E=E, Ev=Ev, P=P, S=S, T=T, EP=padded(E), VP=padded(Ev), words=mask_words(C),
        first=C - N if packed else 0,  # block token of the first query
        in_q=G + 2 if packed else G,  # queries and, if packed, key and value of a head in q; then in k_block
        in_block=G + 2 if packed else 1, key_at=G if packed else 0, value_at=G + 1 if packed else 0,
        value_width=E if shape.latent else Ev,
        own_mask=int(not isinstance(call.mask, Causal) and call.mask.shape[0] > 1),  # 0: all rows share one
        causal=shape.causal, sinks=call.sinks is not None, log2_e=LOG2_E,
        scale=float(shape.scale / softcap if softcap else shape.scale * LOG2_E), softcap=float(softcap * LOG2_E),
        window=shape.window or 0, rows=launch.rows, tokens=launch.tokens, splits=splits, padded_rows=rows,
    )  # fmt: skip
    # A kernel needs an array for every parameter; any array replaces one that it does not use.
    nothing = call.prefix_length
    inputs: dict[str, Any] = dict(zip(Call._fields[:9], call[:9], strict=True))
    inputs["bits"] = nothing if isinstance(call.mask, Causal) else call.mask
    inputs["sinks"] = nothing if call.sinks is None else call.sinks
    if qkv is None:
        values = call.k_block if call.v_block is None else call.v_block
        inputs |= {"q": call.q.reshape(B, N, K, G, E), "k_block": call.k_block[:, :, :, None]}
        inputs["v_block"] = values[:, :, :, None]
    else:
        inputs |= {"q": qkv, "k_block": qkv, "v_block": qkv}
    if shape.latent:
        inputs["v_pages"] = call.k_pages
    if shape.window is None:  # positions that nothing reads would be computed
        inputs |= {"q_positions": nothing, "block_positions": nothing}
    out = jax.ShapeDtypeStruct((B, N, K, G, Ev), dtype)
    partial = jax.ShapeDtypeStruct((heads, splits, rows), jnp.float32)
    mixed = jax.ShapeDtypeStruct((heads, splits, rows, Ev), jnp.float32)
    attended = run(
        tree_attention,
        inputs if splits > 1 else inputs | {"peaks": nothing, "totals": nothing},
        {"peaks": partial, "totals": partial, "mixed": mixed} if splits > 1 else {"mixed": out},
        grid=(heads, launch.tiles, splits), warps=launch.warps, stages=launch.stages, s=constants,
    )  # fmt: skip
    if splits > 1:
        warps = max(1, min(8, splits * padded(Ev) // 1024))
        grid = (heads, N * G)
        attended = run(tree_attention_combine, attended, {"out": out}, grid=grid, warps=warps, stages=1, s=constants)
    return attended["mixed" if splits == 1 else "out"].reshape(B, N, H, Ev)


@device
@no_type_check
def add(softmax, query, keys, values, visible, s: tl.constexpr):
    """Adds keys [t, EP] and values [t, VP] to the softmax of rows. `visible`: bool [R, t].

    softmax: f32 [R], the largest score; f32 [R], sum of exp2(score - peak); f32 [R, VP], the same sum times values.
    """
    peak, total, mixed = softmax
    scores = dot(query, keys, True) * s.scale
    if s.softcap > 0:
        # tanh by the exponent, which needs no library on the device, and near 0 by the series. 2.885.. is 2 log2(e).
        shrunk = tl.exp2(tl.abs(scores) * -2.8853900817779268)
        far = (1 - shrunk) / (1 + shrunk)
        square = scores * scores
        series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        scores = tl.where(square < 0.09, scores * series, tl.where(scores < 0, -1.0, 1.0) * far) * s.softcap
    scores = tl.where(visible, scores, -1e30)
    top = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    decay = tl.exp2(peak - top)
    mixed = mixed * decay[:, None] + dot(weights, values, False)
    return top, total * decay + tl.sum(weights, 1), mixed


@device
@no_type_check
def add_block(start, softmax, fixed, s: tl.constexpr):
    """A trip over the block's keys."""
    query, node, is_row, position, b, k, block_positions, bits, k_block, v_block = fixed
    e, v = tl.arange(0, s.EP), tl.arange(0, s.VP)
    key = start + tl.arange(0, s.tokens)
    is_key = key < s.C
    visible = is_row[:, None] & is_key[None, :]
    if s.causal:
        visible = visible & (key[None, :] <= node[:, None])
    else:
        place = (b * s.own_mask, node[:, None], (key // 32)[None, :])
        word = tl.load(at(bits, (s.N, s.words), place), mask=visible, other=0)
        visible = visible & (((word >> tl.cast(key % 32, tl.uint32)[None, :]) & 1) != 0)
    if s.window > 0:
        key_position = tl.load(at(block_positions, (s.C,), (b, key)), mask=is_key, other=0)
        visible = visible & (key_position[None, :] > position[:, None] - s.window)
    # Keys that no row sees are not loaded: they may be NaN, and NaN times a weight of 0 is NaN.
    seen = (tl.max(tl.cast(visible, tl.int32), 0) > 0)[:, None]
    at_keys = at(k_block, (s.C, s.K, s.in_block, s.E), (b, key[:, None], k, s.key_at, e[None, :]))
    at_values = at(v_block, (s.C, s.K, s.in_block, s.value_width), (b, key[:, None], k, s.value_at, v[None, :]))
    keys = tl.load(at_keys, mask=seen & (e < s.E)[None, :], other=0)
    values = tl.load(at_values, mask=seen & (v < s.Ev)[None, :], other=0)
    return add(softmax, query, keys, values, visible, s)


@device
@no_type_check
def add_pages(start, softmax, fixed, s: tl.constexpr):
    """A trip over committed tokens, up to `end`."""
    query, is_row, position, end, b, k, page_table, k_pages, v_pages = fixed
    e, v = tl.arange(0, s.EP), tl.arange(0, s.VP)
    token = start + tl.arange(0, s.tokens)
    page = tl.load(at(page_table, (s.T,), (b, token // s.S)), mask=token < end, other=s.P)
    there = (token < end) & (page >= 0) & (page < s.P)
    visible = is_row[:, None] & there[None, :]
    if s.window > 0:
        visible = visible & (token[None, :] > position[:, None] - s.window)
    slot = (token % s.S)[:, None]
    at_keys = at(k_pages, (s.S, s.K, s.E), (page[:, None], slot, k, e[None, :]))
    at_values = at(v_pages, (s.S, s.K, s.value_width), (page[:, None], slot, k, v[None, :]))
    keys = tl.load(at_keys, mask=there[:, None] & (e < s.E)[None, :], other=0)
    values = tl.load(at_values, mask=there[:, None] & (v < s.Ev)[None, :], other=0)
    return add(softmax, query, keys, values, visible, s)


@device
@no_type_check
def tree_attention(
    q,  # [B, N, K, G, E]; packed, as the block: [B, C, K, G + 2, E]
    k_block,  # [B, C, K, 1, E]
    v_block,  # [B, C, K, 1, Ev]
    k_pages,  # [P, S, K, E]
    v_pages,  # [P, S, K, Ev]
    page_table,  # int32 [B, T]
    prefix_length,  # int32 [B]; below 0: an inactive row
    q_positions,  # int32 [B, N]
    block_positions,  # int32 [B, C]
    bits,  # uint32 [B or 1, N, words]
    sinks,  # [K * G]
    peaks,  # f32 [B * K, splits, padded rows]
    totals,  # f32 [B * K, splits, padded rows]
    mixed,  # f32 [B * K, splits, padded rows, Ev]; with one split the result, [B, N, K, G, Ev]
    s: tl.constexpr,
):
    """One program: a tile of rows of one key/value head over one split of the committed tokens."""
    index, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, k = index // s.K, index % s.K
    length = tl.load(at(prefix_length, (), (b,)))
    active = length >= 0
    row = tile * s.rows + tl.arange(0, s.rows)
    node, group = row // s.G, row % s.G
    is_row = row < tl.cast(active, tl.int32) * (s.N * s.G)
    e, v = tl.arange(0, s.EP), tl.arange(0, s.VP)
    first = s.first + node[:, None]
    at_query = at(q, (s.C if s.in_q > s.G else s.N, s.K, s.in_q, s.E), (b, first, k, group[:, None], e[None, :]))
    query = tl.load(at_query, mask=is_row[:, None] & (e < s.E)[None, :], other=0)
    position, oldest = node, b * 0
    if s.window > 0:
        position = tl.load(at(q_positions, (s.N,), (b, node)), mask=is_row, other=1 << 30)
        oldest = tl.maximum(tl.min(position, 0) - s.window + 1, 0)
    peak, total = tl.full((s.rows,), -1e20, tl.float32), tl.zeros((s.rows,), tl.float32)
    if s.sinks:  # in split 0: a key that every query sees, with the value 0
        has_sink = is_row & (row < tl.cast(split == 0, tl.int32) * (s.N * s.G))
        sink = tl.load(at(sinks, (), (k * s.G + group,)), mask=has_sink, other=0)
        peak = tl.where(has_sink, tl.cast(sink, tl.float32) * s.log2_e, peak)
        total = tl.where(has_sink, 1.0, total)
    softmax = (peak, total, tl.zeros((s.rows, s.VP), tl.float32))

    # The block's keys, in split 0. Of a causal block only those up to the tile's last query.
    block_end = tl.cast((split == 0) & active, tl.int32) * s.C
    if s.causal:
        block_end = tl.minimum((tile * s.rows + s.rows - 1) // s.G + 1, block_end)
    fixed = (query, node, is_row, position, b, k, block_positions, bits, k_block, v_block)
    # One trip needs no pipeline, which takes registers; products in float32 have none to spare without it.
    softmax = loop(add_block, 0, block_end, s.tokens, softmax, fixed, s, s.tokens < s.C or query.dtype == tl.float32)

    # The split's share of the committed tokens, in whole trips.
    length = tl.minimum(length, s.T * s.S)
    share = tl.cdiv(tl.cdiv(tl.maximum(length - oldest, 0), s.tokens), s.splits) * s.tokens
    begin = oldest + split * share
    end = tl.minimum(length, begin + share)
    fixed = (query, is_row, position, end, b, k, page_table, k_pages, v_pages)
    peak, total, mix = loop(add_pages, begin, end, s.tokens, softmax, fixed, s, True)

    if s.splits == 1:
        out = mix / tl.where(total > 0, total, 1.0)[:, None]
        at_out = at(mixed, (s.N, s.K, s.G, s.Ev), (b, node[:, None], k, group[:, None], v[None, :]))
        tl.store(at_out, out, mask=(row < s.N * s.G)[:, None] & (v < s.Ev)[None, :])
    else:
        place = (index, split, row)
        tl.store(at(peaks, (s.splits, s.padded_rows), place), peak)
        tl.store(at(totals, (s.splits, s.padded_rows), place), total)
        # A row without a key in this split writes nothing: the combine does not read it.
        at_mixed = at(mixed, (s.splits, s.padded_rows, s.Ev), (index, split, row[:, None], v[None, :]))
        tl.store(at_mixed, mix, mask=(total > 0)[:, None] & (v < s.Ev)[None, :])


@device
@no_type_check
def tree_attention_combine(peaks, totals, mixed, out, s: tl.constexpr):
    """One program: the splits of one query row. Arguments: see `tree_attention`; out is [B, N, K, G, Ev]."""
    index, row = tl.program_id(0), tl.program_id(1)
    split, v = tl.arange(0, s.splits), tl.arange(0, s.VP)
    peak = tl.load(at(peaks, (s.splits, s.padded_rows), (index, split, row)))
    total = tl.load(at(totals, (s.splits, s.padded_rows), (index, split, row)))
    there = (total > 0)[:, None] & (v < s.Ev)[None, :]
    at_mixed = at(mixed, (s.splits, s.padded_rows, s.Ev), (index, split[:, None], row, v[None, :]))
    mix = tl.load(at_mixed, mask=there, other=0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    whole = tl.sum(total * weight, 0)
    result = tl.sum(mix * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    at_out = at(out, (s.N, s.K, s.G, s.Ev), (index // s.K, row // s.G, index % s.K, row % s.G, v))
    tl.store(at_out, result, mask=v < s.Ev)
