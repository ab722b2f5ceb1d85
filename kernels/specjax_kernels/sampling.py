"""Choices among the numbers of a vocabulary: the largest, the `k` largest, and the tokens inside top-k and top-p.

`argmax`, `largest` and `top_k` run anywhere; under a mesh, rows may be split by their last axis. `in_prefix` is for an
NVIDIA GPU: it finds the thresholds without a sort and without a loop. The tokens inside are a prefix of the
order (logit descending, id ascending): tokens above a bound, and equal tokens up to an id. Each bound is the largest
one whose mass "at or above" reaches the need, found 4 bits a pass. The mass is a number of tokens for top-k, a sum of
weights for top-p, then a number of equal tokens:

    low = 0
    for shift in 28, 24 .. 0:                      one kernel each
        mass[j] = sum of weights where key >= low | j << shift, for j = 0 .. 15
        low    |= (the largest j with mass[j] >= need, else 0) << shift

A kernel has a grid of (rows, chunks of the vocabulary). Each program first adds the previous kernel's masses of all
chunks and computes the next digit from them, as do all programs of a row; then it sums its own chunk. So a pass is one
launch, and no result depends on the order of the programs. A CPU interprets the kernels, for tests.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from specjax_kernels import gpu_language
from specjax_kernels.gpu_language import Constants, at, device, loop, tl
from specjax_kernels.mesh import AXIS, apart, parts, split, whole

BITS = 4  # of a pass
DIGITS = 1 << BITS
TILE = 512  # tokens of one trip of a program
PROGRAMS = 512  # wanted over all rows
MOST_CHUNKS = 64  # a program adds all chunks' masses at once
LOWEST = -(1 << 31)
GROUP = 128  # numbers among which `argmax` looks for an index on a CPU
TINY = float(jnp.finfo(jnp.float32).tiny)


def argmax(x: Float[Array, "... V"]) -> Int32[Array, "..."]:
    """`jnp.argmax` of the last axis: the first of equal numbers, and NaN before any number.

    XLA:CPU reduces pairs of a number and its index one by one, but vectorises a maximum and then the lowest index of
    the maximum. It looks for that index in one of the groups of numbers: half of the time for eight rows of 49,152.
    """

    def at_once(x: Array) -> Array:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    def in_two_steps(x: Array) -> Array:
        size, places = x.shape[-1], jnp.arange(x.shape[-1], dtype=jnp.int32)
        highest = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), places, jnp.int32(size - 1))
        first = jnp.min(jnp.where(jnp.isnan(x), places - jnp.int32(size), highest), axis=-1)  # NaN: below all others
        return jnp.where(first < 0, first + jnp.int32(size), first)

    def in_groups(x: Array) -> Array:
        if x.shape[-1] % GROUP:
            return in_two_steps(x)
        groups = x.reshape(*x.shape[:-1], -1, GROUP)
        group = in_two_steps(jnp.max(groups, axis=-1))
        inside = jnp.take_along_axis(groups, group[..., None, None], axis=-2)[..., 0, :]
        return group * GROUP + in_two_steps(inside)

    return jax.lax.platform_dependent(x, cpu=in_groups, default=at_once)


def largest(x: Float[Array, "... V"]) -> tuple[Int32[Array, "..."], Float[Array, "..."]]:
    """`argmax` and that number. If the last axis is split, each device sends one pair."""
    count, size = parts(x.shape[-1]), x.shape[-1]
    if count == 1:
        place = argmax(x)
        return place, jnp.take_along_axis(x, place[..., None], axis=-1)[..., 0]
    local = split(x.reshape(*x.shape[:-1], count, size // count), x.ndim - 1)
    bits = jax.lax.bitcast_convert_type(jnp.max(local, axis=-1).astype(jnp.float32), jnp.int32)
    both = whole(jnp.stack([bits, argmax(local)], axis=-1))
    values, places = jax.lax.bitcast_convert_type(both[..., 0], jnp.float32), both[..., 1]
    device = argmax(values)[..., None]
    place = device * jnp.int32(size // count) + jnp.take_along_axis(places, device, axis=-1)
    return place[..., 0], jnp.take_along_axis(values, device, axis=-1)[..., 0].astype(x.dtype)


def top_k(x: Float32[Array, "... V"], k: int) -> tuple[Float32[Array, "... k"], Int32[Array, "... k"]]:
    """`jax.lax.top_k` of the last axis; ties go to the lower index. If that axis is split, each device sends its k
    largest numbers. Their order (by device, then by size, then by index) keeps that of equal numbers."""
    if parts(x.shape[-1]) == 1:
        best, places = jax.lax.top_k(x, k)
        return best, places.astype(jnp.int32)

    def on_each(x: Array) -> tuple[Array, Array]:
        best, places = jax.lax.top_k(x, min(k, x.shape[-1]))
        places = places.astype(jnp.int32) + jax.lax.axis_index(AXIS).astype(jnp.int32) * jnp.int32(x.shape[-1])
        both = jnp.stack([jax.lax.bitcast_convert_type(best, jnp.int32), places])
        best, places = jax.lax.all_gather(both, AXIS, axis=both.ndim - 1, tiled=True)
        best, index = jax.lax.top_k(jax.lax.bitcast_convert_type(best, jnp.float32), k)
        return best, jnp.take_along_axis(places, index, axis=-1)

    return apart(on_each, (x.ndim - 1,), -1, x)


class Bound(NamedTuple):
    """The bound of each row [R], and the mass above it."""

    low: Array  # int32, the bits of an unsigned bound
    above: Array  # float32, the mass above it
    need: Array  # float32


def in_prefix(logits: Array, top_k: Array, top_p: Array) -> Array:
    """The tokens inside top-k, and inside top-p of these. Ties go to the lower id.

    Args:
        logits: float32 [R, V], scaled by the temperature; V below 2^24.
        top_k: int32 [R]; 0 and less: off.
        top_p: float32 [R]; 1 and more: off.

    Returns:
        bool [R, V].
    """
    vocab = logits.shape[1]
    peak = jnp.max(logits, axis=1)
    wanted = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k).astype(jnp.float32)

    def weight(bound: Array) -> Array:
        return jnp.exp(_value(bound) - peak)

    # Any array replaces one that a search does not read: zeros would be another kernel.
    counted = _search("count", 32, logits, peak, top_k, peak, wanted)
    first, equal = counted.low ^ LOWEST, wanted - counted.above
    summed = _search("mass", 32, logits, peak, first, equal * weight(first), top_p.astype(jnp.float32))
    second = summed.low ^ LOWEST
    more = jnp.ceil((summed.need - summed.above) / jnp.maximum(weight(second), TINY))
    more = jnp.where(second == first, jnp.minimum(more, equal), more)
    limited = top_p < 1
    bound, equal = jnp.where(limited, second, first), jnp.where(limited, jnp.maximum(more, 1.0), equal)
    last = vocab - _search("equal", vocab.bit_length(), logits, peak, bound, peak, equal).low
    keys, ids = key_of(logits), jnp.arange(vocab, dtype=jnp.int32)[None, :]
    return (keys > bound[:, None]) | ((keys == bound[:, None]) & (ids <= last[:, None]))


def _search(kind: str, bits: int, logits: Array, peak: Array, bound: Array, extra: Array, need: Array) -> Bound:
    """The largest bound of `bits` bits whose mass reaches `need` ("mass": this share of the total), 0 if none does.

    Args:
        kind: the mass of a token. "count": 1, by logit; "mass": exp(logit - peak), by logit, for tokens above `bound`;
            "equal": 1, by V - id, for tokens equal to `bound`.
        extra: mass at `bound` itself ("mass").
    """
    rows, vocab = logits.shape
    most = max(4, min(MOST_CHUNKS, PROGRAMS // rows))
    chunks = min(1 << most.bit_length() - 1, 1 << (-(-vocab // TILE) - 1).bit_length())
    fixed = {"kind": kind, "chunks": chunks, "vocab": vocab, "trips": -(-vocab // (TILE * chunks))}
    fixed |= {"BITS": BITS, "DIGITS": DIGITS, "TILE": TILE, "LOWEST": LOWEST, "TINY": TINY}
    low, masses = Bound(bound, peak, need), peak  # the first pass reads `need` alone
    first = BITS * (-(-bits // BITS) - 1)
    for shift in range(first, -BITS - 1, -BITS):
        step = jnp.full(1, shift, jnp.int32)
        part = "first" if shift == first else "last" if shift < 0 else "next"
        s = Constants(**fixed, part=part)
        low, masses = _pass(*low, masses, step, peak, bound, extra, logits, s=s)
    return low


@functools.partial(jax.jit, static_argnames=("s",))
def _pass(*arguments: Array, s: Constants) -> tuple[Bound, Array]:
    """One kernel: the digit of the previous pass, except in the first one; then masses, except in the last one."""
    rows, last = arguments[0].shape[0], s.part == "last"
    names = ("low", "above", "need", "masses", "step", "peak", "bound", "extra", "logits")
    inputs: dict[str, Array] = dict(zip(names, arguments, strict=True))
    outputs = {f"next_{name}": jax.ShapeDtypeStruct((rows,), inputs[name].dtype) for name in Bound._fields}
    if last:
        inputs["next_masses"] = inputs["peak"]  # unused
    else:
        outputs["next_masses"] = jax.ShapeDtypeStruct((rows, s.chunks, DIGITS), jnp.float32)
    grid = (rows, 1 if last else s.chunks)
    results = gpu_language.run(truncation, inputs, outputs, grid=grid, warps=4, stages=1, s=s)
    return Bound(*(results[f"next_{name}"] for name in Bound._fields)), results.get("next_masses", arguments[3])


@device
@no_type_check
def key_of(logits):
    """Integers in the order of the floats; -0 is 0."""
    bits = tl.cast(tl.where(logits == 0, 0.0, logits), tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@device
@no_type_check
def add_tile(trip, sums, fixed, s: tl.constexpr):
    """Adds the masses of a tile of tokens at or above each candidate."""
    candidates, row, chunk, peak, bound, logits = fixed
    token = (chunk * s.trips + trip) * s.TILE + tl.arange(0, s.TILE)
    there = token < s.vocab
    logit = tl.load(at(logits, (s.vocab,), (row, token)), mask=there, other=0)
    key = key_of(logit)
    if s.kind == "count":
        weight = tl.where(there, 1.0, 0.0)
    elif s.kind == "mass":
        weight = tl.where(there & (key > bound), tl.exp(logit - peak), 0.0)
    else:
        weight = tl.where(there & (key == bound), 1.0, 0.0)
        key = s.vocab - token
    return sums + tl.where(key[None, :] >= candidates[:, None], weight[None, :], 0.0)


@device
@no_type_check
def truncation(
    low,  # int32 [R]
    above,  # f32 [R]
    need,  # f32 [R]
    masses,  # f32 [R, chunks, 16]: of the previous pass
    step,  # int32 [1]: shift of this pass's digit
    peak,  # f32 [R]
    bound,  # int32 [R]
    extra,  # f32 [R]
    logits,  # f32 [R, V]
    next_low,
    next_above,
    next_need,
    next_masses,
    s: tl.constexpr,
):
    """One program: a chunk of one row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    digit = tl.arange(0, s.DIGITS)
    shift = tl.load(at(step, (), (row * 0,)))
    low_bits, mass_above, needed = row * 0, tl.cast(row * 0, tl.float32), tl.load(at(need, (), (row,)))
    if s.part != "first":
        low_bits, mass_above = tl.load(at(low, (), (row,))), tl.load(at(above, (), (row,)))
        index = (row, tl.arange(0, s.chunks)[:, None], digit[None, :])
        mass = tl.sum(tl.load(at(masses, (s.chunks, s.DIGITS), index)), 0)
        before = shift + s.BITS
        if s.kind == "mass":  # the lowest candidate of the first pass is below all tokens
            total = tl.sum(tl.where(digit == 0, mass, 0.0), 0)
            needed = tl.where(before == 32 - s.BITS, tl.maximum(needed * total, s.TINY), needed)
        reaches = (mass >= needed) & (digit > 0)
        beyond = tl.max(tl.where(reaches | (digit == 0), -1.0, mass), 0)
        mass_above = tl.where(beyond >= 0, beyond, mass_above)
        low_bits = low_bits | (tl.sum(tl.cast(reaches, tl.int32), 0) << before)
    tl.store(at(next_low, (), (row,)), low_bits, mask=chunk == 0)
    tl.store(at(next_above, (), (row,)), mass_above, mask=chunk == 0)
    tl.store(at(next_need, (), (row,)), needed, mask=chunk == 0)
    if s.part != "last":
        candidates = low_bits | (digit << shift)
        if s.kind != "equal":
            candidates = candidates ^ s.LOWEST
        row_bound = tl.load(at(bound, (), (row,)))
        fixed = (candidates, row, chunk, tl.load(at(peak, (), (row,))), row_bound, logits)
        sums = tl.sum(loop(add_tile, 0, s.trips, 1, tl.zeros((s.DIGITS, s.TILE), tl.float32), fixed, s, False), 1)
        if s.kind == "mass":
            sums += tl.where((candidates <= row_bound) & (chunk == 0), tl.load(at(extra, (), (row,))), 0.0)
        tl.store(at(next_masses, (s.chunks, s.DIGITS), (row, chunk, digit)), sums)


def _value(key: Array) -> Array:
    """The float of a key."""
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)
