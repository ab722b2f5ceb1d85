"""The law of the sampler's draws down to probabilities of 1e-8, with and without a noise whose tail is fine.

    python benchmarks/sampling_law.py [--draws 10000000] [--state FILE] [--record]

131,072 tokens whose probabilities fill the decades from 1 to 1e-8. A draw is the token of the largest log-probability
plus noise, as in `specjax.sampling.draw`; the noise is `gumbel_noise`, of consecutive positions. Only the decade of the
winner is kept, which is a maximum over each decade's tokens and needs no argmax. `jax.random.gumbel` as it is by
default serves a twentieth of the draws, for comparison. The last line is one JSON document. With `--state` a run that
was stopped goes on. 10,000,000 draws take about an hour on 2 cores.
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
import numpy as np
from jax import Array
from records import finish, machine
from tqdm import tqdm

from specjax.sampling import gumbel_noise, seed_words

VOCAB = 131_072
COUNTS = (2, 5, 30, 150, 600, 4_000, 20_000)
"""Tokens of each decade from [0.1, 1) on; the rest of the vocabulary has probabilities of 1e-8 to 1e-7."""

BATCH, ROWS = 2048, 4
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
    """How many of BATCH draws fell into each decade: int32 [decades]. A few at a time, which stay in the cache."""
    words = jnp.asarray(seed_words(SEED))

    def some(turn: Array, counts: Array) -> Array:
        position = start + turn * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        drawn = jax.vmap(noise, in_axes=(None, 0, None))(words, position, VOCAB)
        best = [jnp.max(drawn[:, a:b] + logits[a:b], axis=1) for a, b in itertools.pairwise(bounds)]
        return counts + jnp.bincount(jnp.argmax(jnp.stack(best), axis=0), length=len(best)).astype(jnp.int32)

    return jax.lax.fori_loop(0, BATCH // ROWS, some, jnp.zeros(len(bounds) - 1, jnp.int32))


def count(noise: Callable[..., Array], draws: int, state: Path | None) -> tuple[np.ndarray, int]:
    """Winners by decade, and the number of draws: `draws` rounded up to whole batches."""
    probabilities, bounds = law()
    logits = jnp.asarray(np.log(probabilities), jnp.float32)
    kept: dict[str, Any] = json.loads(state.read_text()) if state is not None and state.exists() else {}
    begun = kept.get(noise.__name__, {"counts": [0] * (len(bounds) - 1), "draws": 0})
    total, done = np.array(begun["counts"], np.int64), begun["draws"]
    with tqdm(total=draws, initial=done, desc=noise.__name__, unit="draw", unit_scale=True, mininterval=10) as bar:
        while done < draws:
            total += np.asarray(winners(noise, tuple(bounds), logits, jnp.int32(done)))
            done += BATCH
            bar.update(BATCH)
            if state is not None:
                kept[noise.__name__] = {"counts": total.tolist(), "draws": done}
                state.write_text(json.dumps(kept))
    return total, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--draws", type=int, default=10_000_000)
    parser.add_argument("--state", type=Path, help="JSON file with what has been counted")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/sampling-law-DATE.json")
    args = parser.parse_args()

    probabilities, bounds = law()
    shares = [float(probabilities[a:b].sum()) for a, b in itertools.pairwise(bounds)]
    rows: dict[str, Any] = {}
    for noise, draws in ((gumbel_noise, args.draws), (plain_noise, args.draws // 20)):
        counts, drawn = count(noise, draws, args.state)
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
