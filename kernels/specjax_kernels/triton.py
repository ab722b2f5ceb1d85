"""`tree_attention` for NVIDIA GPUs, in Triton, called through jax-triton. Algorithm and grid: `pallas_triton`.

Without a GPU it can be lowered, which compiles the kernels to PTX, by `trace(...).lower(lowering_platforms=("cuda",))`
under an abstract mesh that names the GPU (see `refuse`). TRITON_INTERPRET=1 in the environment selects Triton's
interpreter at the start of a process, for tests.

In the kernels, arrays are pointers to numbers in memory order; capitals are constants; R = ROWS, t = TOKENS. Scores of
keys that a row does not see are -1e30, and its peak starts at -1e20 and only grows: exp2 of the difference is 0, so
unseen keys weigh nothing, and a row without keys sums to 0. Pools and batches of long blocks exceed 2**31 numbers:
offsets of rows have 64 bits.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import partial_eval

from specjax_kernels.attention import Call, Causal, words
from specjax_kernels.launch import launch_for, padded, too_wide
from specjax_kernels.platforms import refuse_unless_ampere

jax_triton: Any = None
tl: Any = None
UNMET: str | None = None
"""The reason why this process cannot make kernels."""
INTERPRETED = False
try:
    jax_triton = importlib.import_module("jax_triton")
    tl = importlib.import_module("triton.language")
    INTERPRETED = bool(importlib.import_module("triton").knobs.runtime.interpret)
except (ImportError, AttributeError, OSError) as error:
    UNMET = (
        "implementation 'triton' of tree_attention needs Python 3.12 or later and pip install 'specjax[triton]': "
        f"{type(error).__name__}: {error}"
    )
if UNMET is None and tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12):
    # jax-triton 0.4.1 registers a rule for dead code with the two arguments of jax 0.11; jax 0.12 passes three and
    # every trace ends in a TypeError. JAX's default rule drops a call whose results are unused, which is right here.
    partial_eval.dce_rules.pop(jax_triton.triton_lib.triton_kernel_call_p, None)


def jit(function: Any) -> Any:
    """`triton.jit`, if Triton is installed."""
    return function if UNMET is not None else importlib.import_module("triton").jit(function)


LOG2_E = math.log2(math.e)  # the GPU's exponent has base 2: scores are kept in units of log 2


def tree_attention(call: Call) -> Array:
    """See `specjax_kernels.tree_attention`."""
    refuse()
    shape, dtype = call.shape, call.q.dtype
    B, H, N, C, K, G, E, Ev, P, S, T = shape[:11]
    if problem := too_wide(str(dtype), E, Ev):
        raise NotImplementedError(f"implementation 'triton' has {problem}")
    launch = launch_for(str(dtype), max(E, Ev), N * G, B * K, T * S)
    rows, heads, splits = launch.rows * launch.tiles, B * K, launch.splits
    # A kernel needs a pointer for every array; any array replaces one that is never read.
    nothing = call.prefix_length
    inputs: dict[str, Any] = dict(zip(Call._fields[:9], call[:9], strict=True))
    inputs["bits"] = nothing
    if not isinstance(call.mask, Causal):
        inputs["bits"] = jnp.broadcast_to(call.mask, (B, *call.mask.shape[1:]))
    if shape.latent:
        inputs |= {"v_block": call.k_block, "v_pages": call.k_pages}
    # Triton's interpreter loses the carry into an odd exponent: it rounds 1.9999 to the bfloat16 1.0.
    out = jax.ShapeDtypeStruct((B, N, H, Ev), jnp.float32 if INTERPRETED else dtype)
    partial = jax.ShapeDtypeStruct((heads, splits, rows), jnp.float32)
    mixed = jax.ShapeDtypeStruct((heads, splits, rows, Ev), jnp.float32)
    shared = {"N": N, "K": K, "G": G, "EV": Ev, "SPLITS": splits, "VP": padded(Ev)}
    sizes = {"C": C, "E": E, "P": P, "S": S, "T": T, "EP": padded(E), "WORDS": words(C)}
    attended = _call(
        attend,
        inputs if splits > 1 else inputs | {"peaks": nothing, "totals": nothing},
        {"peaks": partial, "totals": partial, "mixed": mixed} if splits > 1 else {"mixed": out},
        grid=(heads, launch.tiles, splits),
        warps=launch.warps,
        stages=launch.stages,
        **shared,
        **sizes,
        LATENT=shape.latent,
        CAUSAL=shape.causal,
        SCALE=float(shape.scale * LOG2_E if shape.softcap is None else shape.scale / shape.softcap),
        WINDOW=shape.window or 0,
        SOFTCAP=float((shape.softcap or 0) * LOG2_E),
        ROWS=launch.rows,
        TOKENS=launch.tokens,
        UPCAST=INTERPRETED,
    )
    if splits == 1:
        return attended["mixed"].astype(dtype)
    part = max(1, min(splits, 8192 // padded(Ev)))
    warps = max(1, min(8, part * padded(Ev) // 1024))
    grid = (heads, N * G)
    combined = _call(
        combine, attended, {"out": out}, grid=grid, warps=warps, stages=2, **shared, PADDED_ROWS=rows, PART=part
    )
    return combined["out"].astype(dtype)


def refuse() -> None:
    """Raises NotImplementedError unless this process can run or lower the kernels."""
    if UNMET is not None:
        raise NotImplementedError(UNMET)
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if platform not in ("gpu", "cuda"):
        raise NotImplementedError(
            f"implementation 'triton' of tree_attention runs on NVIDIA GPUs, and the default backend is {platform!r}. "
            "Without one it can be lowered, under jax.sharding.use_abstract_mesh of a mesh with "
            'abstract_device=AbstractDevice("NVIDIA H200", None, "cuda"). Implementation \'xla\' runs everywhere'
        )
    if device is None:
        refuse_unless_ampere("triton")


def _call(
    kernel: Any,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    **constants: Any,
) -> dict[str, Array]:
    """Runs a kernel, whose parameters are named by `inputs`, `outputs` and `constants`. Returns the outputs."""
    capability = jax_triton.triton_lib.make_cuda_target(None, 1).arch
    # By default Triton writes the newest PTX that the assembler in its wheel reads (9.4 for Triton 3.9), but JAX's
    # assembler reads it: CUDA 12.6 or later takes 8.5, and a CUDA for Blackwell takes 8.8.
    ptx_version = 85 if capability < 100 else 88
    results = jax_triton.triton_call(
        kernel=kernel,
        name=kernel.fn.__name__,
        out_type=tuple(outputs.values()),
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=capability,
        # Triton's default is about to change, and warns; a fused multiply-add is no less exact.
        backend_options={"enable_fp_fusion": True, "ptx_version": ptx_version},
        **inputs,
        **constants,
    )
    return dict(zip(outputs, results, strict=True))


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
    UPCAST: tl.constexpr,  # Triton's interpreter multiplies the bits of bfloat16 instead of the numbers
):
    """Adds keys to a running softmax."""
    if UPCAST:
        query, keys, values = query.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE
    if SOFTCAP > 0:
        # tanh by the exponent, which needs no library on the device, and near 0 by the series. 2.885.. is 2 log2(e).
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
        # Keys that no row sees are not loaded: they may be NaN, and NaN times a weight of 0 is NaN.
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
        # A row without a key in this split writes nothing: the combine does not read it.
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
