"""The two kernels of `triton`, which says what they compute and launches them.

Arrays are pointers to rows of numbers in memory order; capitals are constants; R = ROWS, t = TOKENS.

Scores of keys that a row does not see are -1e30, and its peak starts at -1e20 and only grows: exp2 of the difference is
0, so what is not seen weighs nothing, and a row that sees nothing sums to 0.

Sizes of a pool, and of a batch of long blocks, pass 2**31: where a row starts is counted in 64 bits.
"""

from __future__ import annotations

from typing import no_type_check

from specjax_kernels.triton_packages import jit, tl


@jit
@no_type_check
def _add(
    peak,  # f32 [R], the largest score (times log2 e)
    total,  # f32 [R], sum of exp2(score - peak)
    mixed,  # f32 [R, VP], sum of exp2(score - peak) * value
    query,  # [R, EP]
    keys,  # [t, EP]
    values,  # [t, VP]; 0 where no row sees it
    visible,  # bool [R, t]
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,  # Triton's interpreter multiplies the bits of bfloat16, not the numbers
):
    """A softmax over the keys seen so far, and these keys."""
    if UPCAST:
        query, keys, values = query.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE
    if SOFTCAP > 0:
        # tanh by the exponent, which needs no library on the device, and by the series near 0, where that would cancel.
        # 2.885.. is 2 log2(e).
        shrunk = tl.exp2(tl.abs(scores) * -2.8853900817779268)
        far = (1 - shrunk) / (1 + shrunk)
        square = scores * scores
        series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        scores = tl.where(square < 0.09, scores * series, tl.where(scores < 0, -far, far)) * SOFTCAP
    scores = tl.where(visible, scores, -1e30)
    top = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    decay = tl.exp2(peak - top)
    mixed = tl.dot(weights.to(values.dtype), values, acc=mixed * decay[:, None], input_precision="ieee")
    return top, total * decay + tl.sum(weights, 1), mixed


@jit
@no_type_check
def attend(
    prefix_length,  # int32 [B]; below 0: an inactive row
    page_table,  # int32 [B, T]
    q_positions,  # int32 [B, N]
    block_positions,  # int32 [B, C]
    bits,  # uint32 [B, N, WORDS]
    q,  # [B, N, H, E]
    k_block,  # [B, C, K, E]
    v_block,  # [B, C, K, EV]
    k_pages,  # [P, S, K, E]
    v_pages,  # [P, S, K, EV]
    peaks,  # f32 [B * K, SPLITS, rows]
    totals,  # f32 [B * K, SPLITS, rows]
    mixed,  # f32 [B * K, SPLITS, rows, EV]; with one split the result, [B, N, H, EV]
    N: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    EV: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    LATENT: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    EP: tl.constexpr,  # E, padded
    VP: tl.constexpr,  # EV, padded
    UPCAST: tl.constexpr,
):
    """One program: a tile of rows of one key/value head over one split of the committed tokens."""
    index = tl.program_id(0)
    b, k = index // K, index % K
    tile, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(prefix_length + b)
    active = length >= 0
    length = tl.minimum(length, T * S)

    row = tile * ROWS + tl.arange(0, ROWS)
    node = row // G
    in_tile = row < N * G
    is_row = row < tl.where(active, N * G, 0)
    e = tl.arange(0, EP)
    v = tl.arange(0, VP)
    t = tl.arange(0, TOKENS)
    place = (b.to(tl.int64) * N + node) * (K * G) + k * G + row % G  # [R], in rows of q and of the result
    query = tl.load(q + place[:, None] * E + e[None, :], mask=is_row[:, None] & (e < E)[None, :], other=0.0)
    oldest = 0
    if WINDOW > 0:
        position = tl.load(q_positions + b * N + node, mask=is_row, other=2**30)
        oldest = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0)

    peak = tl.full((ROWS,), -1e20, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, VP), tl.float32)

    # The block's keys, in split 0. Of a causal block only those up to the tile's last query.
    block_end = C
    if CAUSAL:
        block_end = tl.minimum(C, (tile * ROWS + ROWS - 1) // G + 1)
    block_end = tl.where((split == 0) & active, block_end, 0)
    # One trip needs no pipeline, which takes registers; products in float32 have none to spare without it.
    PIPELINED: tl.constexpr = C > TOKENS or q.dtype.element_ty == tl.float32
    for start in tl.range(0, block_end, TOKENS, num_stages=None if PIPELINED else 1):
        j = start + t
        seen_by = is_row[:, None] & (j < C)[None, :]
        if CAUSAL:
            seen_by = seen_by & (j[None, :] <= node[:, None])
        else:
            at_word = (b * N + node)[:, None] * WORDS + (j // 32)[None, :]
            word = tl.load(bits + at_word, mask=seen_by, other=0)
            seen_by = seen_by & (((word >> (j % 32)[None, :].to(tl.uint32)) & 1) != 0)
        if WINDOW > 0:
            j_position = tl.load(block_positions + b * C + j, mask=j < C, other=0)
            seen_by = seen_by & (j_position[None, :] > position[:, None] - WINDOW)
        # What nobody sees may be NaN, and NaN times a weight of 0 is NaN: not loaded.
        seen = tl.max(seen_by.to(tl.int32), 0) > 0
        at_key = (b.to(tl.int64) * C + j) * K + k
        keys = tl.load(k_block + at_key[:, None] * E + e[None, :], mask=seen[:, None] & (e < E)[None, :], other=0.0)
        if LATENT and VP == EP:
            values = keys  # the columns past EV are not stored
        elif LATENT:
            values = tl.load(
                k_block + at_key[:, None] * E + v[None, :], mask=seen[:, None] & (v < EV)[None, :], other=0.0
            )
        else:
            values = tl.load(
                v_block + at_key[:, None] * EV + v[None, :], mask=seen[:, None] & (v < EV)[None, :], other=0.0
            )
        peak, total, mix = _add(peak, total, mix, query, keys, values, seen_by, SCALE, SOFTCAP, UPCAST)

    # The split's share of the committed tokens, in whole trips.
    trips = tl.cdiv(tl.maximum(length - oldest, 0), TOKENS)
    share = tl.cdiv(trips, SPLITS) * TOKENS
    begin = oldest + split * share
    end = tl.minimum(length, begin + share)
    for start in range(begin, end, TOKENS):
        token = start + t
        page = tl.load(page_table + b * T + token // S, mask=token < end, other=P)
        there = (token < end) & (page >= 0) & (page < P)
        at_key = (page.to(tl.int64) * S + token % S) * K + k
        keys = tl.load(k_pages + at_key[:, None] * E + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)
        if LATENT and VP == EP:
            values = keys
        elif LATENT:
            values = tl.load(
                k_pages + at_key[:, None] * E + v[None, :], mask=there[:, None] & (v < EV)[None, :], other=0.0
            )
        else:
            values = tl.load(
                v_pages + at_key[:, None] * EV + v[None, :], mask=there[:, None] & (v < EV)[None, :], other=0.0
            )
        seen_by = is_row[:, None] & there[None, :]
        if WINDOW > 0:
            seen_by = seen_by & (token[None, :] > position[:, None] - WINDOW)
        peak, total, mix = _add(peak, total, mix, query, keys, values, seen_by, SCALE, SOFTCAP, UPCAST)

    if SPLITS == 1:
        out = mix / tl.where(total > 0, total, 1.0)[:, None]
        at_out = mixed + place[:, None] * EV + v[None, :]
        tl.store(at_out, out.to(mixed.dtype.element_ty), mask=in_tile[:, None] & (v < EV)[None, :])
    else:
        at_row = (index.to(tl.int64) * SPLITS + split) * (tl.num_programs(1) * ROWS) + row
        tl.store(peaks + at_row, peak)
        tl.store(totals + at_row, total)
        # A row that has seen nothing here leaves its place unwritten: the combine does not read it.
        tl.store(mixed + at_row[:, None] * EV + v[None, :], mix, mask=(total > 0)[:, None] & (v < EV)[None, :])


@jit
@no_type_check
def combine(
    peaks,  # f32 [B * K, SPLITS, PADDED_ROWS]
    totals,  # f32 [B * K, SPLITS, PADDED_ROWS]
    mixed,  # f32 [B * K, SPLITS, PADDED_ROWS, EV]
    out,  # [B, N, H, EV]
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    EV: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,  # splits of one trip
    VP: tl.constexpr,
):
    """One program: the splits of one query row."""
    index, row = tl.program_id(0), tl.program_id(1)
    first = index.to(tl.int64) * SPLITS * PADDED_ROWS + row
    v = tl.arange(0, VP)
    peak = tl.load(peaks + first + tl.arange(0, SPLITS) * PADDED_ROWS)
    top = tl.max(peak, 0)
    mix = tl.zeros((VP,), tl.float32)
    sum_of_totals = tl.sum(tl.load(totals + first + tl.arange(0, SPLITS) * PADDED_ROWS) * tl.exp2(peak - top), 0)
    for start in range(0, SPLITS, PART):
        at = first + (start + tl.arange(0, PART)) * PADDED_ROWS
        there = tl.load(totals + at) > 0
        weight = tl.exp2(tl.load(peaks + at) - top)
        seen = tl.load(mixed + at[:, None] * EV + v[None, :], mask=there[:, None] & (v < EV)[None, :], other=0.0)
        mix += tl.sum(seen * weight[:, None], 0)
    result = mix / tl.where(sum_of_totals > 0, sum_of_totals, 1.0)
    b = index // K
    place = (b.to(tl.int64) * N + row // G) * (K * G) + index % K * G + row % G
    tl.store(out + place * EV + v, result.to(out.dtype.element_ty), mask=v < EV)
