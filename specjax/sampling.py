"""Sampling: per-request parameters as arrays, processed logits, noise keyed by position.

The rule (docs/design.md):

    logits -> bias -> repetition -> frequency, presence -> min_tokens and grammar masks
           -> T = 0: argmax
           -> else / T -> top-k -> top-p of the rest -> min-p -> + Gumbel noise -> argmax

Ties go to the lower id. The noise depends only on the seed and the position of the token being drawn, so a request
draws the same tokens with any drafter and in any batch. Written for one request and vmapped once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32
from specjax_kernels import argmax

STOP_IDS = 8  # stop ids of a row on the device; the host checks further ones
BIAS_ENTRIES = 1024  # logit biases of a row
MIN_TEMPERATURE = 1e-6
MIN_REPETITION_PENALTY = 1e-20  # a float32 0 would make logits infinite
NO_STOP = -1  # an unused stop id; equal to no token
_TINY = -1e30  # a masked logit: below every other, yet finite, so that a row with all tokens masked still draws one


class SamplingRows(NamedTuple):
    """Sampling parameters, one row a request ([R] as state, [B] in a step, no axis under vmap).

    Attributes:
        temperature: float32 [R]. 0: greedy.
        top_k: int32 [R]. 0 and below: off.
        top_p: float32 [R]. 1 and above: off.
        min_p: float32 [R]. 0: off.
        repetition_penalty: float32 [R]. 1: off.
        frequency_penalty: float32 [R]. 0: off.
        presence_penalty: float32 [R]. 0: off.
        min_tokens: int32 [R]. Stop ids are masked while fewer have been emitted.
        stop_ids: int32 [R, 8]. Filled from the left, NO_STOP where unused.
        seed: uint32 [R, 2]. High and low word.
        bias_ids: int32 [R, 1024]. Filled from the left, V where unused.
        bias_values: float32 [R, 1024]. Added to the logits of `bias_ids`.
    """

    temperature: Float32[Array, "R"]
    top_k: Int32[Array, "R"]
    top_p: Float32[Array, "R"]
    min_p: Float32[Array, "R"]
    repetition_penalty: Float32[Array, "R"]
    frequency_penalty: Float32[Array, "R"]
    presence_penalty: Float32[Array, "R"]
    min_tokens: Int32[Array, "R"]
    stop_ids: Int32[Array, "R 8"]
    seed: UInt32[Array, "R 2"]
    bias_ids: Int32[Array, "R 1024"]
    bias_values: Float32[Array, "R 1024"]


class History(NamedTuple):
    """Tokens that penalties count. The largest part of a row; read only in steps where some row has a penalty.

    Attributes:
        in_prompt: bool [R, V]. Whether the prompt has the token.
        counts: int32 [R, V]. How often the token was emitted.
    """

    in_prompt: Bool[Array, "R V"]
    counts: Int32[Array, "R V"]


def seed_words(seed: int) -> np.ndarray:
    """The two 32-bit words of a 64-bit seed, high first. (`jax.random.key(2**40 + 7)` would equal `key(7)`.)"""
    word = seed % 2**64
    return np.array([word >> 32, word & 0xFFFFFFFF], np.uint32)


def sampling_row(
    vocab_size: int,
    *,
    temperature: float = 0.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    min_tokens: int = 0,
    stop_ids: tuple[int, ...] = (),
    seed: int = 0,
    logit_bias: dict[int, float] | None = None,
) -> SamplingRows:
    """One request's parameters as numpy arrays without a leading axis. Greedy by default. ValueError: too many stop ids
    or biases."""
    bias = dict(sorted((logit_bias or {}).items()))
    if len(stop_ids) > STOP_IDS:
        raise ValueError(f"{len(stop_ids)} stop ids, but a row holds {STOP_IDS}: check the rest on the host")
    if len(bias) > BIAS_ENTRIES:
        raise ValueError(f"logit_bias has {len(bias)} entries; at most {BIAS_ENTRIES} are supported")

    def filled(values: Iterable[Any], size: int, fill: int, dtype: Any) -> np.ndarray:
        whole, values = np.full(size, fill, dtype), [*values]
        whole[: len(values)] = values
        return whole

    fields: dict[str, Any] = {
        "temperature": np.float32(temperature),
        "top_k": np.int32(top_k),
        "top_p": np.float32(top_p),
        "min_p": np.float32(min_p),
        "repetition_penalty": np.float32(max(repetition_penalty, MIN_REPETITION_PENALTY)),
        "frequency_penalty": np.float32(frequency_penalty),
        "presence_penalty": np.float32(presence_penalty),
        "min_tokens": np.int32(min_tokens),
        "stop_ids": filled(stop_ids, STOP_IDS, NO_STOP, np.int32),
        "seed": seed_words(seed),
        "bias_ids": filled(bias, BIAS_ENTRIES, vocab_size, np.int32),
        "bias_values": filled(bias.values(), BIAS_ENTRIES, 0, np.float32),
    }
    return SamplingRows(**fields)


def has_penalty(rows: SamplingRows) -> Bool[Array, "B"]:
    """Rows whose logits depend on the tokens so far."""
    return (rows.repetition_penalty != 1) | (rows.frequency_penalty != 0) | (rows.presence_penalty != 0)


def has_bias(rows: SamplingRows, vocab_size: int) -> Bool[Array, "B"]:
    return rows.bias_ids[..., 0] < vocab_size  # a row is filled from the left: no reduction, which would be a kernel


def is_plain(rows: SamplingRows, emitted: Int32[Array, "B"], vocab_size: int) -> Bool[Array, "B"]:
    """Rows whose draw is the argmax of the raw logits."""
    waits = (emitted < rows.min_tokens) & (rows.stop_ids[..., 0] != NO_STOP)
    return (rows.temperature <= 0) & ~has_penalty(rows) & ~has_bias(rows, vocab_size) & ~waits


def add_bias(logits: Float32[Array, "V"], row: SamplingRows) -> Float32[Array, "V"]:
    return logits.at[row.bias_ids].add(row.bias_values, mode="drop")


def add_penalties(
    logits: Float32[Array, "V"], row: SamplingRows, in_prompt: Bool[Array, "V"], counts: Int32[Array, "V"]
) -> Float32[Array, "V"]:
    """Repetition over prompt and output, then frequency and presence over the output (`counts`: path included)."""
    seen = in_prompt | (counts > 0)
    factor = row.repetition_penalty
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    times = counts.astype(jnp.float32)
    return logits - row.frequency_penalty * times - row.presence_penalty * (counts > 0).astype(jnp.float32)


def mask_stops(logits: Float32[Array, "V"], row: SamplingRows, emitted: Int32[Array, ""]) -> Float32[Array, "V"]:
    """Masks stop ids while fewer than `min_tokens` tokens have been emitted."""
    ids = jnp.arange(logits.shape[0], dtype=jnp.int32)
    is_stop = jnp.any(row.stop_ids[:, None] == ids[None, :], axis=0)  # not a scatter: duplicates make sorts on a GPU
    return jnp.where(is_stop & (emitted < row.min_tokens), _TINY, logits)


def mask_forbidden(logits: Float32[Array, "V"], allowed: UInt32[Array, "W"]) -> Float32[Array, "V"]:
    """A grammar's mask: bit ``v % 32`` of word ``v // 32`` says whether token v may come."""
    ids = jnp.arange(logits.shape[0], dtype=jnp.uint32)
    bit = (allowed[ids // 32] >> (ids % 32)) & 1
    # An allowed token comes before all others even if it is a stop id that `min_tokens` masks.
    return jnp.where(bit == 1, jnp.maximum(logits, _TINY), 10 * _TINY)


@jax.jit  # traced once for each shape; a program has many calls
def threefry2x32(
    key: tuple[UInt32[Array, "*k"], UInt32[Array, "*k"]], counter: tuple[UInt32[Array, "*c"], UInt32[Array, "*c"]]
) -> tuple[UInt32[Array, "*c"], UInt32[Array, "*c"]]:
    """Threefry-2x32 with 20 rounds: 64 random bits for each 64-bit counter. `key` broadcasts against `counter`.

    The bits of `jax.random` depend on flags that a user may set. Source: Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3" (SC 2011).
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for block in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = x + y
            y = (y << distance | y >> (32 - distance)) ^ x
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def gumbel_noise(seed: UInt32[Array, "2"], position: Int32[Array, ""], vocab_size: int) -> Float32[Array, "V"]:
    """Standard Gumbel noise for the token at `position`, from the seed's two words: `token_noise` of all tokens."""
    return token_noise(seed, position, jnp.arange(vocab_size, dtype=jnp.uint32))


def token_noise(seed: UInt32[Array, "2"], position: Int32[Array, ""], ids: UInt32[Array, "W"]) -> Float32[Array, "W"]:
    """The noise of some tokens at `position`, which does not depend on the others.

    A uniform number of 23 bits would bound the noise by 15.9, so tokens of probability 1e-8 would never be drawn. Here
    an exponential variate -log(1 - x) is made of an x of 48 bits. float32 is precise for x near 0 and for 1 - x near 0,
    so each half of the range uses the smaller of the two; the noise lies between -3.6 and 34.
    """
    zero = jnp.zeros((), jnp.uint32)
    key = threefry2x32((seed[0], seed[1]), (zero, position.astype(jnp.uint32)))
    high, low = threefry2x32(key, (jnp.zeros_like(ids), ids))
    upper = high >= jnp.uint32(1 << 31)  # x >= 1/2: its bits are inverted to those of 1 - x
    high, low = jnp.where(upper, ~high, high), jnp.where(upper, ~low, low)
    # 24 bits each: float32 holds them exactly, and a signed conversion is one instruction.
    coarse = (high >> 8).astype(jnp.int32).astype(jnp.float32)
    fine = ((high & 0xFF) << 16 | low >> 16).astype(jnp.int32).astype(jnp.float32)
    smaller = coarse * 2.0**-24 + (fine + 0.5) * 2.0**-48
    return -jnp.log(-jnp.where(upper, jnp.log(smaller), jnp.log1p(-smaller)))


def smallest_prefix(
    values: Float32[Array, "V"], weights: Float32[Array, "V"], need: Float32[Array, ""]
) -> Bool[Array, "V"]:
    """The shortest prefix of the order (value descending, id ascending) whose weights sum to `need`, which must be
    positive; everything if they do not.

    Bisection on the bits of the value, then of the id: 32 + log2(V) sums instead of a sort, which on a CPU is several
    times faster at V = 49152.

    Example: values [3, 5, 5, 1], weights all 1, need 2 -> [F, T, T, F]; need 1 -> [F, T, F, F].
    """
    # Integers in the order of the floats: negatives flipped whole, the rest moved above them. -0 = +0, for which XLA
    # would remove `values + 0.0`.
    bits, sign = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32), jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)
    ids = jnp.arange(values.shape[0], dtype=jnp.int32)

    def sum_where(mask: Array) -> Array:
        return jnp.sum(jnp.where(mask, weights, 0.0))

    def value_bit(i: Array, low: Array) -> Array:
        bit = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(sum_where(keys >= bit) >= need, bit, low)

    # The largest bound whose "at or above" still reaches `need`: everything above it is in, some at it are.
    bound = jax.lax.fori_loop(0, 32, value_bit, jnp.uint32(0))
    above, at = keys > bound, keys == bound
    base = sum_where(above)
    id_bits = values.shape[0].bit_length()

    def id_bit(i: Array, low: Array) -> Array:
        bit = low | (jnp.int32(1) << (id_bits - 1 - i))
        return jnp.where(base + sum_where(at & (ids < bit)) < need, bit, low)

    last = jax.lax.fori_loop(0, id_bits, id_bit, jnp.int32(0))
    return above | (at & (ids <= last))


def truncate(logits: Float32[Array, "V"], row: SamplingRows) -> Float32[Array, "V"]:
    """Top-k, then top-p of the rest, of temperature-scaled logits: -inf outside."""
    k = jnp.maximum(row.top_k.astype(jnp.float32), 1.0)
    inside = smallest_prefix(logits, jnp.ones_like(logits), k) | (row.top_k <= 0)
    weights = jnp.where(inside, jnp.exp(logits - jnp.max(logits)), 0.0)
    wanted = jnp.maximum(row.top_p * jnp.sum(weights), jnp.finfo(jnp.float32).tiny)
    inside &= smallest_prefix(logits, weights, wanted) | (row.top_p >= 1)
    return jnp.where(inside, logits, -jnp.inf)


def cut_min_p(logits: Float32[Array, "V"], row: SamplingRows) -> Float32[Array, "V"]:
    """-inf for tokens less likely than `min_p` times the likeliest."""
    floor = jnp.max(logits) + jnp.log(row.min_p)  # log(0) = -inf: nothing is dropped
    return jnp.where(logits >= floor, logits, -jnp.inf)


class DrawInputs(NamedTuple):
    """The requests of a batch.

    Attributes:
        rows: sampling parameters, [B].
        history: tokens that penalties count, of all R rows; those of the batch are read only where needed.
        slots: int32 [B]. Rows of `history`.
        active: bool [B]. Whether the entry takes part.
        greedy: int32 [B, N]. The argmax of the raw logits of each node; None: not known.
    """

    rows: SamplingRows
    history: History
    slots: Int32[Array, "B"]
    active: Bool[Array, "B"]
    greedy: Int32[Array, "B N"] | None = None


@jax.jit  # traced once for the prefill, each tree width and each program
def draw(
    logits: Float32[Array, "B V"],
    inputs: DrawInputs,
    position: Int32[Array, "B"],
    emitted: Int32[Array, "B"],
    path: Int32[Array, "B J"],
    allowed: UInt32[Array, "B W"] | None = None,
) -> Int32[Array, "B"]:
    """The token the target emits after each request's path, by the rule above.

    Args:
        logits: raw, float32.
        position: of the token being drawn; keys the noise.
        emitted: tokens emitted before it, the path's included.
        path: drafted tokens between the emitted ones and this draw, NO_TOKEN where there is none.
        allowed: a grammar's bits, or None.

    A part of the rule runs only if some active row needs it, and leaves the other rows as they are.
    """
    rows, active = inputs.rows, inputs.active
    logits = _edited(logits, inputs, emitted, path, allowed)

    def sample(x: Array) -> Array:
        noise = jax.vmap(gumbel_noise, in_axes=(0, 0, None))(rows.seed, position, x.shape[-1])
        return jnp.where((rows.temperature > 0)[:, None], _scaled(x, inputs) + noise, x)

    perturbed = _when((rows.temperature > 0) & active, sample, logits)
    return argmax(perturbed)


def _when(needed: Bool[Array, "B"], change: Callable[[Array], Array], logits: Array) -> Array:
    return jax.lax.cond(jnp.any(needed), change, lambda x: x, logits)


def _edited(
    logits: Float32[Array, "B V"],
    inputs: DrawInputs,
    emitted: Int32[Array, "B"],
    path: Int32[Array, "B J"],
    allowed: UInt32[Array, "B W"] | None,
) -> Float32[Array, "B V"]:
    """Logits after all of the rule that comes before the temperature. Arguments as those of `draw`."""
    rows, history, slots, active, _ = inputs
    vocab = logits.shape[-1]
    logits = _when(has_bias(rows, vocab) & active, lambda x: jax.vmap(add_bias)(x, rows), logits)

    def penalise(x: Array) -> Array:
        row = jnp.minimum(slots, history.counts.shape[0] - 1)
        ids = jnp.where(path >= 0, path, vocab)
        batch = jnp.arange(x.shape[0])[:, None]
        counts = history.counts[row].at[batch, ids].add(1, mode="drop")
        return jax.vmap(add_penalties)(x, rows, history.in_prompt[row], counts)

    logits = _when(has_penalty(rows) & active, penalise, logits)
    early = (emitted < rows.min_tokens) & active
    logits = _when(early, lambda x: jax.vmap(mask_stops)(x, rows, emitted), logits)
    return logits if allowed is None else jax.vmap(mask_forbidden)(logits, allowed)


def _scaled(logits: Float32[Array, "B V"], inputs: DrawInputs) -> Float32[Array, "B V"]:
    """Logits by temperature, -inf for the tokens that are cut off; meaningless in greedy rows."""
    rows = inputs.rows
    hot = rows.temperature > 0
    # Below the floor a draw is the argmax anyway, and logits / T would overflow.
    scaled = logits / jnp.where(hot, jnp.maximum(rows.temperature, MIN_TEMPERATURE), 1.0)[:, None]
    cuts = ((rows.top_k > 0) | (rows.top_p < 1)) & hot & inputs.active
    scaled = _when(cuts, lambda y: jax.vmap(truncate)(y, rows), scaled)
    return jax.vmap(cut_min_p)(scaled, rows)


@jax.jit
def draw_with_law(
    logits: Float32[Array, "B V"],
    inputs: DrawInputs,
    position: Int32[Array, "B"],
    emitted: Int32[Array, "B"],
    path: Int32[Array, "B J"],
    allowed: UInt32[Array, "B W"] | None = None,
) -> tuple[Int32[Array, "B"], Float32[Array, "B V"]]:
    """`draw`, and the probabilities that it draws from, float32 [B, V]; of greedy rows they are meaningless."""
    rows = inputs.rows
    edited = _edited(logits, inputs, emitted, path, allowed)
    scaled = _scaled(edited, inputs)
    noise = jax.vmap(gumbel_noise, in_axes=(0, 0, None))(rows.seed, position, logits.shape[-1])
    perturbed = jnp.where((rows.temperature > 0)[:, None], scaled + noise, edited)
    return argmax(perturbed), jax.nn.softmax(scaled, axis=-1)


def coin(seed: UInt32[Array, "2"], position: Int32[Array, ""]) -> Float32[Array, ""]:
    """A uniform number between 0 and 1, both excluded, that is independent of `token_noise` at `position`."""
    one = jnp.ones((), jnp.uint32)
    high, _ = threefry2x32((seed[0], seed[1]), (one, position.astype(jnp.uint32)))
    return ((high >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


@jax.jit
def draw_straight(
    logits: Float32[Array, "B N V"],
    inputs: DrawInputs,
    position: Int32[Array, "B N"],
    emitted: Int32[Array, "B N"],
    path: Int32[Array, "B N J"],
    allowed: UInt32[Array, "B N W"] | None = None,
) -> Int32[Array, "B N"]:
    """`draw` at N nodes of each request, for a GPU: all parts of the rule for all rows, without a branch or a loop.

    A row that does not use a part is left as it is by the part's own parameters. A kernel reads each node's vocabulary
    at most once, so that few nodes cost little more than one.
    """
    rows, history, slots, *_ = inputs
    batch, nodes, vocab = logits.shape
    # One kernel each: with equal indices, those of unused entries, a scatter would sort.
    unused = vocab + jnp.arange(BIAS_ENTRIES, dtype=jnp.int32)
    ids = jnp.where(rows.bias_ids < vocab, rows.bias_ids, unused[None, :])
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    bias = jnp.zeros((batch, vocab), jnp.float32)
    bias = bias.at[index, ids].add(rows.bias_values, mode="drop", unique_indices=True)

    def each(x: Array) -> Array:
        """Of each row what its nodes share. A broadcast, which needs no kernel of its own; a gather does."""
        return jnp.broadcast_to(x[:, None], (batch, nodes, *x.shape[1:])).reshape(batch * nodes, *x.shape[1:])

    flat = jax.tree.map(each, rows._replace(bias_ids=ids[:, :0], bias_values=rows.bias_values[:, :0]))
    row = jnp.minimum(slots, history.counts.shape[0] - 1)
    position, emitted = position.reshape(-1), emitted.reshape(-1)
    token = jnp.arange(vocab, dtype=jnp.int32)
    counts, path = each(history.counts[row]), path.reshape(batch * nodes, -1)
    for level in range(path.shape[1]):
        counts += (path[:, level, None] == token[None, :]).astype(jnp.int32)
    x = logits.reshape(-1, vocab) + each(bias)
    x = jax.vmap(add_penalties)(x, flat, each(history.in_prompt[row]), counts)
    x = jax.vmap(mask_stops)(x, flat, emitted)
    if allowed is not None:
        x = jax.vmap(mask_forbidden)(x, allowed.reshape(batch * nodes, -1))
    hot = flat.temperature > 0
    scaled = x / jnp.where(hot, jnp.maximum(flat.temperature, MIN_TEMPERATURE), 1.0)[:, None]
    # Imported here: a process without a GPU starts sooner.
    truncation = importlib.import_module("specjax_kernels.truncation")
    inside = truncation.in_prefix(scaled, flat.top_k, flat.top_p)
    # The likeliest token is inside, so min-p may look at all of them.
    likely = jnp.where(inside, jax.vmap(cut_min_p)(scaled, flat), -jnp.inf)
    noise = jax.vmap(gumbel_noise, in_axes=(0, 0, None))(flat.seed, position, vocab)
    perturbed = jnp.where(hot[:, None], likely + noise, x)
    return argmax(perturbed).reshape(batch, nodes)
