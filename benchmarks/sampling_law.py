"""The law of the sampler's draws down to probabilities of 1e-8, with and without a noise whose tail is fine.

    python benchmarks/sampling_law.py [--draws 10000000] [--state FILE] [--record]

131,072 tokens whose probabilities fill the decades from 1 to 1e-8. A draw is the token of the largest log-probability
plus noise, as in `specjax.sampling.draw`; the noise is `gumbel_noise`, of consecutive positions. Only the decade of the
winner is kept.

The draws are made by a kernel of Numba's, which has the same bits (the 48 that `gumbel_noise` makes its numbers of) and
takes the logarithm of those alone that may win, which is several times as fast. The first 8,192 draws are also made
with `gumbel_noise`, and every winner must be in the same decade. `jax.random.gumbel` as it is by default serves 8,192
draws, for comparison. The last line is one JSON document. With `--state` a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jax import Array
from records import finish, machine
from tqdm import tqdm

from specjax.sampling import gumbel_noise, seed_words

VOCAB = 131_072
COUNTS = (2, 5, 30, 150, 600, 4_000, 20_000)
"""Tokens of each decade from [0.1, 1) on; the rest of the vocabulary has probabilities of 1e-8 to 1e-7."""

BATCH, ROWS, CHECKED = 2048, 4, 8192
SEED = 1


def law() -> tuple[np.ndarray, list[int]]:
    """Probabilities float64 [V], each decade's tokens side by side, and where the decades begin and end."""
    rng = np.random.default_rng(0)
    counts = [*COUNTS, VOCAB - sum(COUNTS)]
    parts = [10.0**-k * rng.uniform(1, 9.9, count) for k, count in enumerate(counts, start=1)]
    # The two likeliest get what the others leave; all below stay in their decades.
    parts[0] = np.array([0.6, 0.4]) * (1 - sum(part.sum() for part in parts[1:]))
    return np.concatenate(parts), [0, *np.cumsum(counts).tolist()]


def plain_noise(seed: Array, position: Array, size: int) -> Array:
    """JAX's default, whose lattice ends at 15.94."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32, mode="low")


@partial(jax.jit, static_argnums=(0, 1))
def winners(noise: Callable[..., Array], bounds: tuple[int, ...], logits: Array, start: Array) -> Array:
    """The decades of BATCH draws: int32 [BATCH]. A few at a time, which stay in the cache."""
    words = jnp.asarray(seed_words(SEED))

    def some(turn: Array) -> Array:
        position = start + turn * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        drawn = jax.vmap(noise, in_axes=(None, 0, None))(words, position, VOCAB)
        best = [jnp.max(drawn[:, a:b] + logits[a:b], axis=1) for a, b in itertools.pairwise(bounds)]
        return jnp.argmax(jnp.stack(best), axis=0).astype(jnp.int32)

    return jax.lax.map(some, jnp.arange(BATCH // ROWS, dtype=jnp.int32)).reshape(-1)


U = np.uint32


@numba.njit(inline="always")
def mix(x: U, y: U, distance: int) -> tuple[U, U]:
    x = U(x + y)
    return x, U(U(U(y << U(distance)) | U(y >> U(32 - distance))) ^ x)


@numba.njit(inline="always")
def threefry(k0: U, k1: U, x: U, y: U) -> tuple[U, U]:
    """`specjax.sampling.threefry2x32`, written out so that LLVM makes vector instructions of it."""
    k2 = U(U(k0 ^ k1) ^ U(0x1BD11BDA))
    x, y = U(x + k0), U(y + k1)
    x, y = mix(x, y, 13)
    x, y = mix(x, y, 15)
    x, y = mix(x, y, 26)
    x, y = mix(x, y, 6)
    x, y = U(x + k1), U(y + U(k2 + U(1)))
    x, y = mix(x, y, 17)
    x, y = mix(x, y, 29)
    x, y = mix(x, y, 16)
    x, y = mix(x, y, 24)
    x, y = U(x + k2), U(y + U(k0 + U(2)))
    x, y = mix(x, y, 13)
    x, y = mix(x, y, 15)
    x, y = mix(x, y, 26)
    x, y = mix(x, y, 6)
    x, y = U(x + k0), U(y + U(k1 + U(3)))
    x, y = mix(x, y, 17)
    x, y = mix(x, y, 29)
    x, y = mix(x, y, 16)
    x, y = mix(x, y, 24)
    x, y = U(x + k1), U(y + U(k2 + U(4)))
    x, y = mix(x, y, 13)
    x, y = mix(x, y, 15)
    x, y = mix(x, y, 26)
    x, y = mix(x, y, 6)
    return U(x + k2), U(y + U(k0 + U(5)))


@numba.njit
def bits_of(k0: U, k1: U, ids: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    for i in range(len(ids)):
        first[i], second[i] = threefry(k0, k1, U(0), ids[i])


@numba.njit(parallel=True)
def raced(high: int, low: int, start: int, law: np.ndarray, decades: np.ndarray, found: np.ndarray) -> None:
    """The same by an exponential race: the token of the least E / p wins, E of 48 bits in float64.

    The likeliest tokens come first, so that few of the others have an E that could still win.
    """
    block, threads, ids = 4096, numba.get_num_threads(), np.arange(len(law)).astype(np.uint32)
    for thread in numba.prange(threads):
        first, second = np.empty(block, np.uint32), np.empty(block, np.uint32)
        for d in range(thread, len(found), threads):
            k0, k1 = threefry(U(high), U(low), U(0), U(start + d))
            best, winner = np.inf, 0
            for begin in range(0, len(law), block):
                bits_of(k0, k1, ids[begin : begin + block], first, second)
                bound = min(best * law[begin : begin + block].max() * 2.0**32 + 1, 2.0**32 - 1)
                limit, near = U(bound), 0
                for i in range(block):
                    near += first[i] <= limit
                if near == 0:
                    continue
                for i in range(block):
                    if first[i] <= limit:
                        bits = (np.uint64(first[i]) << np.uint64(16)) + np.uint64(second[i] >> U(16))
                        score = -np.log1p(-(bits + 0.5) * 2.0**-48) / law[begin + i]
                        if score < best:
                            best, winner = score, begin + i
            found[d] = decades[winner]


def count(draws: int, state: Path | None) -> tuple[np.ndarray, int]:
    """Winners by decade, and the number of draws: `draws` rounded up to whole batches."""
    probabilities, bounds = law()
    decades = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    logits = jnp.asarray(np.log(probabilities), jnp.float32)
    words = seed_words(SEED)
    kept = json.loads(state.read_text()) if state is not None and state.exists() else {}
    total, done = np.array(kept.get("counts", [0] * (len(bounds) - 1)), np.int64), kept.get("draws", 0)
    found = np.empty(BATCH, np.int64)
    with tqdm(total=draws, initial=done, unit="draw", unit_scale=True, mininterval=10) as bar:
        while done < draws:
            raced(int(words[0]), int(words[1]), done, probabilities, decades, found)
            if done < CHECKED:
                same = np.asarray(winners(gumbel_noise, tuple(bounds), logits, jnp.int32(done))) == found
                assert same.all(), f"{(~same).sum()} winners differ from those of gumbel_noise"
            total += np.bincount(found, minlength=len(total))
            done += BATCH
            bar.update(BATCH)
            if state is not None:
                state.write_text(json.dumps({"counts": total.tolist(), "draws": done}))
    return total, done


def plain(draws: int) -> tuple[np.ndarray, int]:
    """The same with JAX's default noise."""
    probabilities, bounds = law()
    logits = jnp.asarray(np.log(probabilities), jnp.float32)
    starts = range(0, draws, BATCH)
    found = [np.asarray(winners(plain_noise, tuple(bounds), logits, jnp.int32(start))) for start in starts]
    return np.bincount(np.concatenate(found), minlength=len(bounds) - 1), len(starts) * BATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--draws", type=int, default=10_000_000)
    parser.add_argument("--state", type=Path, help="JSON file with what has been counted")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/sampling-law-DATE.json")
    args = parser.parse_args()

    probabilities, bounds = law()
    shares = [float(probabilities[a:b].sum()) for a, b in itertools.pairwise(bounds)]
    rows: dict[str, Any] = {}
    for noise, counted in ((gumbel_noise, count(args.draws, args.state)), (plain_noise, plain(CHECKED))):
        counts, drawn = counted
        rows[noise.__name__] = [
            {
                "decade": f"1e-{k}",
                "probability": share,
                "expected": share * drawn,
                "drawn": int(found),
                "ratio": found / (share * drawn),
                "standard_error": ((1 - share) / (share * drawn)) ** 0.5,
            }
            for k, (found, share) in enumerate(zip(counts, shares, strict=True), start=1)
        ]
        print(f"{noise.__name__}, {drawn:,} draws\ndecade  expected       drawn  ratio   standard error")
        for row in rows[noise.__name__]:
            print("{decade}  {expected:10.0f}  {drawn:10d}  {ratio:.4f}  {standard_error:.4f}".format(**row))
    worst = max(abs(row["ratio"] - 1) for row in rows["gumbel_noise"])
    print(f"largest deviation of gumbel_noise: {worst:.2%}")
    document = machine("jaxlib") | {"vocabulary": VOCAB, "seed": SEED, "laws": rows}
    finish("sampling-law", document | {"worst": worst}, record=args.record)


if __name__ == "__main__":
    main()
