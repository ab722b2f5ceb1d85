"""Choices among the numbers of a vocabulary: the largest, the `k` largest, and the tokens inside top-k and top-p.

`argmax`, `largest` and `top_k` run anywhere; under a mesh, rows may be split by their last axis. `in_prefix` is for an
NVIDIA GPU, in Pallas: it finds the thresholds without a sort and without a loop. The tokens inside are a prefix of the
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
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from specjax_kernels.mesh import AXIS, apart, parts, split, whole

BITS = 4  # of a pass
DIGITS = 1 << BITS
TILE = 512  # tokens of one trip of a program
PROGRAMS = 512  # wanted over all rows
MOST_CHUNKS = 64  # a program adds all chunks' masses at once
LOWEST = -(1 << 31)
TINY = float(jnp.finfo(jnp.float32).tiny)


def argmax(x: Float[Array, "... V"]) -> Int32[Array, "..."]:
    """`jnp.argmax` of the last axis: the first of equal numbers, and NaN before any number.

    XLA:CPU reduces pairs of a number and its index one by one, but vectorises a maximum and then the lowest index of
    the maximum: a quarter of the time for eight rows of 49,152 numbers.
    """

    def at_once(x: Array) -> Array:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    def in_two_steps(x: Array) -> Array:
        size, places = x.shape[-1], jnp.arange(x.shape[-1], dtype=jnp.int32)
        highest = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), places, jnp.int32(size - 1))
        first = jnp.min(jnp.where(jnp.isnan(x), places - jnp.int32(size), highest), axis=-1)  # NaN: below all others
        return jnp.where(first < 0, first + jnp.int32(size), first)

    return jax.lax.platform_dependent(x, cpu=in_two_steps, default=at_once)


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
    keys, ids = _key(logits), jnp.arange(vocab, dtype=jnp.int32)[None, :]
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
    low, masses = Bound(bound, peak, need), peak  # the first pass reads `need` alone
    first = BITS * (-(-bits // BITS) - 1)
    for shift in range(first, -BITS - 1, -BITS):
        step = jnp.full(1, shift, jnp.int32)
        part = "first" if shift == first else "last" if shift < 0 else "next"
        low, masses = _pass(step, *low, masses, peak, bound, extra, logits, kind=kind, part=part, chunks=chunks)
    return low


@functools.partial(jax.jit, static_argnames=("kind", "part", "chunks"))
def _pass(*arguments: Array, kind: str, part: str, chunks: int) -> tuple[Bound, Array]:
    """One kernel: the digit of the previous pass, except in the first one; then masses, except in the last one."""
    call = functools.partial(_launch, kind=kind, part=part, chunks=chunks)
    outputs, masses = jax.lax.platform_dependent(
        *arguments, cpu=functools.partial(call, interpret=True), default=functools.partial(call, interpret=False)
    )
    return Bound(*outputs), masses


def _pallas() -> tuple[Any, Any]:
    """Pallas and its Triton backend, imported late: a process without a GPU starts sooner."""
    pallas = importlib.import_module("jax.experimental.pallas")
    return pallas, importlib.import_module("jax.experimental.pallas.triton")


def _launch(*arguments: Array, kind: str, part: str, chunks: int, interpret: bool) -> tuple[list[Array], Array]:
    pl, plgpu = _pallas()
    low, above, need, masses = arguments[1:5]
    rows = len(low)
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (low, above, need)]
    out.append(jax.ShapeDtypeStruct((rows, chunks, DIGITS), jnp.float32))
    outputs = pl.pallas_call(
        functools.partial(_kernel, kind=kind, part=part, chunks=chunks),
        grid=(rows, chunks if part != "last" else 1),
        out_shape=out if part != "last" else out[:3],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=f"truncation_{kind}",
    )(*arguments)
    return list(outputs[:3]), masses if part == "last" else outputs[3]


def _kernel(shift_ref, low_ref, above_ref, need_ref, masses_ref, peak_ref, bound_ref, extra_ref, logits_ref,
            *outputs: Any, kind: str, part: str, chunks: int) -> None:  # fmt: skip
    """One program: a chunk of one row."""
    pl, plgpu = _pallas()
    row, chunk = pl.program_id(0), pl.program_id(1)
    vocab = logits_ref.shape[1]
    shift, digit = shift_ref[0], jnp.arange(DIGITS, dtype=jnp.int32)
    low, above, need = jnp.int32(0), jnp.float32(0), need_ref[row]
    if part != "first":
        low, above = low_ref[row], above_ref[row]
        mass = jnp.sum(plgpu.load(masses_ref.at[row]), axis=0)
        before = shift + BITS
        if kind == "mass":  # the lowest candidate of the first pass is below all tokens
            total = jnp.sum(jnp.where(digit == 0, mass, 0.0))
            need = jnp.where(before == 32 - BITS, jnp.maximum(need * total, TINY), need)
        reaches = (mass >= need) & (digit > 0)
        beyond = jnp.max(jnp.where(reaches | (digit == 0), -1.0, mass))
        above = jnp.where(beyond >= 0, beyond, above)
        low = low | (jnp.sum(reaches.astype(jnp.int32)) << before)
    low_out, above_out, need_out = outputs[:3]

    @pl.when(chunk == 0)
    def _() -> None:
        low_out[row], above_out[row], need_out[row] = low, above, need

    if part == "last":
        return
    candidates = low | (digit << shift)
    if kind != "equal":
        candidates = candidates ^ LOWEST
    peak, bound = peak_ref[row], bound_ref[row]
    trips = -(-vocab // (TILE * chunks))

    def tile(trip: Array, sums: Array) -> Array:
        token = (chunk * trips + trip) * TILE + jnp.arange(TILE, dtype=jnp.int32)
        there = token < vocab
        logit = plgpu.load(logits_ref.at[row, token], mask=there, other=0.0)
        key = _key(logit)
        if kind == "count":
            weight = jnp.where(there, 1.0, 0.0)
        elif kind == "mass":
            weight = jnp.where(there & (key > bound), jnp.exp(logit - peak), 0.0)
        else:
            weight = jnp.where(there & (key == bound), 1.0, 0.0)
            key = vocab - token
        return sums + jnp.where(key[None, :] >= candidates[:, None], weight[None, :], 0.0)

    sums = jnp.sum(jax.lax.fori_loop(0, trips, tile, jnp.zeros((DIGITS, TILE), jnp.float32)), axis=1)
    if kind == "mass":
        sums += jnp.where((candidates <= bound) & (chunk == 0), extra_ref[row], 0.0)
    plgpu.store(outputs[3].at[row, chunk], sums)


def _key(logits: Array) -> Array:
    """Integers in the order of the floats; -0 is 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(key: Array) -> Array:
    """The float of a key."""
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)
