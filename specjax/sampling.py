"""Sampling: parameters as arrays, processing of logits, and noise keyed by seed and position.

`noisy_logits` is the rule of a draw (docs/design.md):

    logits -> bias -> repetition -> frequency, presence -> min_tokens and grammar masks
           -> T = 0: argmax
           -> else / T -> top-k -> top-p of the rest -> min-p -> + Gumbel noise -> argmax

Ties go to the lower id. The noise depends only on the seed and the position of the drawn token, so a request draws the
same tokens with any drafter and in any batch. Functions are written for one request and vmapped once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32
from specjax_kernels.sampling import argmax, in_prefix, largest

STOP_IDS = 8  # stop ids per row on the device; the host checks further ones
BIAS_ENTRIES = 1024  # logit biases per row
MIN_TEMPERATURE = 1e-6
MIN_REPETITION_PENALTY = 1e-20  # a penalty of 0 would make logits infinite
NO_STOP = -1  # unused entry of `stop_ids`; equals no token id
_TINY = -1e30  # masked logit: below all others, but finite, so that a row with all tokens masked can draw


class SamplingRows(NamedTuple):
    """Sampling parameters, one row per request ([R] in the state, [B] in a step, no axis under vmap).

    Attributes:
        temperature: float32 [R]. 0 is greedy.
        top_k: int32 [R]. Off if at most 0.
        top_p: float32 [R]. Off if at least 1.
        min_p: float32 [R]. Off if 0.
        repetition_penalty: float32 [R]. Off if 1.
        frequency_penalty: float32 [R]. Off if 0.
        presence_penalty: float32 [R]. Off if 0.
        min_tokens: int32 [R]. Number of tokens before which stop ids are masked.
        stop_ids: int32 [R, 8]. Filled from the left; NO_STOP in unused entries.
        seed: uint32 [R, 2]. High and low word.
        bias_ids: int32 [R, 1024]. Filled from the left; V in unused entries.
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
    """Tokens that penalties count, read only in steps where some row has a penalty.

    Attributes:
        in_prompt: bool [R, V]. True for tokens of the prompt.
        counts: int32 [R, V]. Number of times that the token was emitted.
    """

    in_prompt: Bool[Array, "R V"]
    counts: Int32[Array, "R V"]


def seed_words(seed: int) -> np.ndarray:
    """Splits a 64-bit seed into two 32-bit words, high word first (`jax.random.key` would drop the high word)."""
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
    """Creates one request's parameters, numpy arrays without a leading axis; greedy by default.

    Arguments are the fields of `SamplingRows`; `logit_bias` maps token ids to biases. Raises ValueError for more than
    `STOP_IDS` stop ids or `BIAS_ENTRIES` biases.
    """
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
    return (rows.repetition_penalty != 1) | (rows.frequency_penalty != 0) | (rows.presence_penalty != 0)


def has_bias(rows: SamplingRows, vocab_size: int) -> Bool[Array, "B"]:
    return rows.bias_ids[..., 0] < vocab_size  # filled from the left; avoids the kernel of a reduction


def is_plain(rows: SamplingRows, emitted: Int32[Array, "B"], vocab_size: int) -> Bool[Array, "B"]:
    """True for rows whose draw is the argmax of the raw logits."""
    masks_stops = (emitted < rows.min_tokens) & (rows.stop_ids[..., 0] != NO_STOP)
    return (rows.temperature <= 0) & ~has_penalty(rows) & ~has_bias(rows, vocab_size) & ~masks_stops


def bias_of(rows: SamplingRows, vocab_size: int) -> Float32[Array, "B V"]:
    """The bias of each token. Unused entries get distinct indices: with equal indices, the scatter would sort."""
    unused = vocab_size + jnp.arange(BIAS_ENTRIES, dtype=jnp.int32)
    ids = jnp.where(rows.bias_ids < vocab_size, rows.bias_ids, unused[None, :])
    row = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    bias = jnp.zeros((len(ids), vocab_size), jnp.float32)
    return bias.at[row, ids].add(rows.bias_values, mode="drop", unique_indices=True)


def add_penalties(
    logits: Float32[Array, "V"], row: SamplingRows, in_prompt: Bool[Array, "V"], counts: Int32[Array, "V"]
) -> Float32[Array, "V"]:
    """Applies the repetition penalty (prompt and output), then frequency and presence penalties (output).

    `counts` includes the tokens of the draft path.
    """
    seen = in_prompt | (counts > 0)
    factor = row.repetition_penalty
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    times = counts.astype(jnp.float32)
    return logits - row.frequency_penalty * times - row.presence_penalty * (counts > 0).astype(jnp.float32)


def mask_stops(logits: Float32[Array, "V"], row: SamplingRows, emitted: Int32[Array, ""]) -> Float32[Array, "V"]:
    """Masks stop ids if fewer than `min_tokens` tokens were emitted."""
    ids = jnp.arange(logits.shape[0], dtype=jnp.int32)
    is_stop = jnp.any(row.stop_ids[:, None] == ids[None, :], axis=0)  # a scatter with duplicates would sort on a GPU
    return jnp.where(is_stop & (emitted < row.min_tokens), _TINY, logits)


def mask_forbidden(logits: Float32[Array, "V"], allowed: UInt32[Array, "W"]) -> Float32[Array, "V"]:
    """Masks tokens that a grammar excludes; bit ``v % 32`` of word ``v // 32`` allows token v."""
    ids = jnp.arange(logits.shape[0], dtype=jnp.uint32)
    bit = (allowed[ids // 32] >> (ids % 32)) & 1
    # An allowed token ranks above all excluded ones, even if it is a stop id that `min_tokens` masks.
    return jnp.where(bit == 1, jnp.maximum(logits, _TINY), 10 * _TINY)


@jax.jit  # traced once per shape
def threefry2x32(
    key: tuple[UInt32[Array, "*k"], UInt32[Array, "*k"]], counter: tuple[UInt32[Array, "*c"], UInt32[Array, "*c"]]
) -> tuple[UInt32[Array, "*c"], UInt32[Array, "*c"]]:
    """Threefry-2x32 with 20 rounds: 64 random bits per 64-bit counter. `key` broadcasts against `counter`.

    Used instead of `jax.random`, whose bits depend on flags. Source: Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3" (SC 2011).
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
    """Standard Gumbel noise of all tokens at `position`; see `token_noise`."""
    return token_noise(seed, position, jnp.arange(vocab_size, dtype=jnp.uint32))


def token_noise(seed: UInt32[Array, "2"], position: Int32[Array, ""], ids: UInt32[Array, "W"]) -> Float32[Array, "W"]:
    """Standard Gumbel noise of the tokens `ids` at `position`. The noise of a token does not depend on other tokens.

    A uniform number of 23 bits would bound the noise by 15.9, and tokens of probability 1e-8 would never be drawn. The
    exponential variate -log(1 - x) is computed from 48 bits. float32 is precise for x near 0 and for 1 - x near 0, so
    each half of the range uses the smaller of the two. The noise lies between -3.6 and 34.
    """
    zero = jnp.zeros((), jnp.uint32)
    key = threefry2x32((seed[0], seed[1]), (zero, position.astype(jnp.uint32)))
    high, low = threefry2x32(key, (jnp.zeros_like(ids), ids))
    upper = high >= jnp.uint32(1 << 31)  # x >= 1/2: invert the bits to get 1 - x
    high, low = jnp.where(upper, ~high, high), jnp.where(upper, ~low, low)
    # float32 holds 24 bits exactly, and a signed conversion is one instruction.
    coarse = (high >> 8).astype(jnp.int32).astype(jnp.float32)
    fine = ((high & 0xFF) << 16 | low >> 16).astype(jnp.int32).astype(jnp.float32)
    smaller = coarse * 2.0**-24 + (fine + 0.5) * 2.0**-48
    return -jnp.log(-jnp.where(upper, jnp.log(smaller), jnp.log1p(-smaller)))


def smallest_prefix(
    values: Float32[Array, "V"], weights: Float32[Array, "V"], need: Float32[Array, ""]
) -> Bool[Array, "V"]:
    """Selects the shortest prefix, by descending value and ascending id, whose weights sum to at least `need`.

    Selects everything if the weights do not reach `need`, which must be positive. Computed by bisection on the bits of
    the value, then of the id: 32 + log2(V) sums, several times faster than a sort on a CPU at V = 49152.

    Example:
        values [3, 5, 5, 1] with weights of 1: need 2 gives [F, T, T, F], need 1 gives [F, T, F, F].
    """
    # Map floats to integers of the same order. -0 must equal +0; XLA would remove `values + 0.0`.
    bits, sign = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32), jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)
    ids = jnp.arange(values.shape[0], dtype=jnp.int32)

    def sum_where(mask: Array) -> Array:
        return jnp.sum(jnp.where(mask, weights, 0.0))

    def value_bit(i: Array, low: Array) -> Array:
        bit = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(sum_where(keys >= bit) >= need, bit, low)

    # The largest bound for which the values at or above it reach `need`: all above it are selected, and some at it.
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
    """Applies top-k, then top-p, to temperature-scaled logits; -inf for removed tokens. See `in_prefix` for GPUs."""
    k = jnp.maximum(row.top_k.astype(jnp.float32), 1.0)
    inside = smallest_prefix(logits, jnp.ones_like(logits), k) | (row.top_k <= 0)
    weights = jnp.where(inside, jnp.exp(logits - jnp.max(logits)), 0.0)
    wanted = jnp.maximum(row.top_p * jnp.sum(weights), jnp.finfo(jnp.float32).tiny)
    inside &= smallest_prefix(logits, weights, wanted) | (row.top_p >= 1)
    return jnp.where(inside, logits, -jnp.inf)


def cut_min_p(logits: Float32[Array, "V"], row: SamplingRows, highest: Float32[Array, ""]) -> Float32[Array, "V"]:
    """Applies min-p; -inf for tokens less likely than `min_p` times the likeliest token, of the logit `highest`."""
    floor = highest + jnp.log(row.min_p)  # min_p = 0 gives -inf, which removes nothing
    return jnp.where(logits >= floor, logits, -jnp.inf)


def greedy_and_finite(logits: Float32[Array, "B N V"]) -> tuple[Int32[Array, "B N"], Bool[Array, "B N"]]:
    """Computes the argmax of logits (`DrawInputs.greedy`), and a mask of logits from which a token can be drawn.

    Such logits have no NaN and no +inf and are not all -inf. Checking the maximum is enough, because argmax prefers NaN
    to any number.
    """
    place, value = largest(logits)
    return place, jnp.isfinite(value)


class DrawInputs(NamedTuple):
    """Sampling parameters and history of the requests of a batch.

    Attributes:
        rows: sampling parameters [B].
        history: tokens that penalties count, all R rows.
        slots: int32 [B]. Rows of `history`.
        active: bool [B]. True for entries that take part in the step.
        greedy: int32 [B, N]. Argmax of the raw logits of each node; None if not computed.
    """

    rows: SamplingRows
    history: History
    slots: Int32[Array, "B"]
    active: Bool[Array, "B"]
    greedy: Int32[Array, "B N"] | None = None


@jax.jit  # traced once per shape
def draw(
    logits: Float32[Array, "B V"],
    inputs: DrawInputs,
    position: Int32[Array, "B"],
    emitted: Int32[Array, "B"],
    path: Int32[Array, "B J"],
    allowed: UInt32[Array, "B W"] | None = None,
) -> Int32[Array, "B"]:
    """Draws the token that the target emits after each request's path.

    Args:
        logits: float32 [B, V]. Raw logits.
        inputs: sampling parameters and history.
        position: int32 [B]. Position of the drawn token, which keys the noise.
        emitted: int32 [B]. Number of tokens before it, the path included.
        path: int32 [B, J]. Drafted tokens between the emitted tokens and the draw, for penalties; NO_TOKEN is ignored.
        allowed: uint32 [B, ceil(V / 32)]. A grammar's token bits, or None.
    """
    return draw_with_law(logits, inputs, position, emitted, path, allowed)[0]


@jax.jit
def draw_with_law(
    logits: Float32[Array, "B V"],
    inputs: DrawInputs,
    position: Int32[Array, "B"],
    emitted: Int32[Array, "B"],
    path: Int32[Array, "B J"],
    allowed: UInt32[Array, "B W"] | None = None,
) -> tuple[Int32[Array, "B"], Float32[Array, "B V"]]:
    """`draw`, and the logits of the probabilities that it draws from (undefined for greedy rows)."""
    given = jax.tree.map(lambda x: x[:, None], (logits, position, emitted, path, allowed))
    noisy, law = noisy_logits(given[0], inputs, *given[1:], straight=False)
    return argmax(noisy), law


@jax.jit
def draw_straight(
    logits: Float32[Array, "B N V"],
    inputs: DrawInputs,
    position: Int32[Array, "B N"],
    emitted: Int32[Array, "B N"],
    path: Int32[Array, "B N J"],
    allowed: UInt32[Array, "B N W"] | None = None,
) -> Int32[Array, "B N"]:
    """`draw` at N nodes of each request, without branches and loops, for GPUs. Kernels read the logits of a node at
    most once each."""
    noisy, _ = noisy_logits(logits, inputs, position, emitted, path, allowed, straight=True)
    return argmax(noisy).reshape(logits.shape[:2])


def noisy_logits(
    logits: Float32[Array, "B N V"],
    inputs: DrawInputs,
    position: Int32[Array, "B N"],
    emitted: Int32[Array, "B N"],
    path: Int32[Array, "B N J"],
    allowed: UInt32[Array, "B N W"] | None,
    *,
    straight: bool,
) -> tuple[Float32[Array, "BN V"], Float32[Array, "BN V"]]:
    """The rule of a draw at N nodes of each request. Arguments: see `draw`.

    With `straight` all parts of the rule run for all rows; parameters that are off leave a row unchanged. Otherwise a
    part runs only if an active row needs it.

    Returns:
        Logits whose argmax is the draw; and the logits of the probabilities that it draws from, -inf for removed tokens
        (undefined for greedy rows).
    """
    rows, history, slots, active, _ = inputs
    batch, nodes, vocab = logits.shape

    def per_node(x: Array) -> Array:
        """Repeats each row for its nodes; a broadcast, since a gather would be a kernel."""
        return jnp.broadcast_to(x[:, None], (batch, nodes, *x.shape[1:])).reshape(batch * nodes, *x.shape[1:])

    def when(
        needed: Array, change: Callable[[Array], Any], x: Array, otherwise: Callable[[Array], Any] = lambda x: x
    ) -> Any:
        return change(x) if straight else jax.lax.cond(jnp.any(needed), change, otherwise, x)

    row = jax.tree.map(per_node, rows._replace(bias_ids=rows.bias_ids[:, :0], bias_values=rows.bias_values[:, :0]))
    live, position, emitted = per_node(active), position.reshape(-1), emitted.reshape(-1)

    def penalise(x: Array) -> Array:
        index = jnp.minimum(slots, history.counts.shape[0] - 1)
        counts, token = per_node(history.counts[index]), jnp.arange(vocab, dtype=jnp.int32)
        for level in range(path.shape[2]):
            counts += (path[:, :, level].reshape(-1, 1) == token[None, :]).astype(jnp.int32)
        return jax.vmap(add_penalties)(x, row, per_node(history.in_prompt[index]), counts)

    x = logits.reshape(-1, vocab)
    x = when(has_bias(rows, vocab) & active, lambda x: x + per_node(bias_of(rows, vocab)), x)
    x = when(has_penalty(rows) & active, penalise, x)
    x = when((emitted < row.min_tokens) & live, lambda x: jax.vmap(mask_stops)(x, row, emitted), x)
    if allowed is not None:
        x = jax.vmap(mask_forbidden)(x, allowed.reshape(batch * nodes, -1))

    hot = row.temperature > 0
    cuts = ((row.top_k > 0) | (row.top_p < 1)) & hot & live

    def cut(scaled: Array) -> Array:
        if straight:
            return jnp.where(in_prefix(scaled, row.top_k, row.top_p), scaled, -jnp.inf)
        return jax.vmap(truncate)(scaled, row)

    def sample(x: Array) -> tuple[Array, Array]:
        # Below MIN_TEMPERATURE the draw is the argmax, and logits / T would overflow.
        scaled = x / jnp.where(hot, jnp.maximum(row.temperature, MIN_TEMPERATURE), 1.0)[:, None]
        highest = jnp.max(scaled, axis=1)  # top-k and top-p never remove the likeliest token
        law = jax.vmap(cut_min_p)(when(cuts, cut, scaled), row, highest)
        noise = jax.vmap(gumbel_noise, in_axes=(0, 0, None))(row.seed, position, vocab)
        return jnp.where(hot[:, None], law + noise, x), law

    return when(hot & live, sample, x, lambda x: (x, x))


def coin(seed: UInt32[Array, "2"], position: Int32[Array, ""]) -> Float32[Array, ""]:
    """Uniform number in (0, 1), independent of `token_noise` at `position`."""
    stream = jnp.ones((), jnp.uint32)  # `token_noise` uses stream 0
    high, _ = threefry2x32((seed[0], seed[1]), (stream, position.astype(jnp.uint32)))
    return ((high >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
