"""Packing of examples into rows of one length, and the order in which training reads the rows.

Random choices depend on the seed alone, not on the machine, numpy's version or earlier draws, so that a run resumed
anywhere continues with the same data. Knows neither tokenizers nor models.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

PACK, SPLIT, EPOCHS = range(3)
"""Purposes of permutations: one seed gives a different permutation for each."""


class Example(NamedTuple):
    """A token sequence from position 0."""

    tokens: Int32[np.ndarray, "n"]
    loss: Bool[np.ndarray, "n"]  # tokens to predict: the target wrote them


class Rows(NamedTuple):
    """Examples side by side in rows of N tokens.

    Two examples, abc and de of which the answers are bc and e, in rows of 6:

        tokens     a b c d e 0
        positions  0 1 2 0 1 0
        segments   1 1 1 2 2 0
        loss       F T T F T F

    A token may look at, and be predicted from, tokens of its own segment alone. Padding has segment 0.
    """

    tokens: Int32[np.ndarray, "r N"]
    positions: Int32[np.ndarray, "r N"]  # in its own example
    segments: Int32[np.ndarray, "r N"]  # 1, 2, .. from left to right
    loss: Bool[np.ndarray, "r N"]


def pack(examples: Sequence[Example], length: int, seed: int) -> Rows:
    """Put every example, of 1 to `length` tokens, whole into a row by first-fit, in an order drawn from the seed."""
    for number, example in enumerate(examples):
        if not 1 <= len(example.tokens) <= length:
            raise ValueError(f"example {number} has {len(example.tokens)} tokens; a row holds 1 to {length}")
    order = _permutation(seed, PACK, 0, len(examples))
    rows = _first_fit([len(examples[i].tokens) for i in order], length)
    shape = (max(rows, default=-1) + 1, length)
    packed = Rows(*(np.zeros(shape, kind) for kind in (np.int32, np.int32, np.int32, bool)))
    used, parts = [0] * shape[0], [0] * shape[0]
    for i, row in zip(order, rows, strict=True):
        tokens, loss = examples[i]
        there = row, slice(used[row], used[row] + len(tokens))
        used[row] += len(tokens)
        parts[row] += 1
        for field, value in zip(packed, (tokens, np.arange(len(tokens)), parts[row], loss), strict=True):
            field[there] = value
    return packed


def _first_fit(sizes: Sequence[int], length: int) -> list[int]:
    """For each size the first row, from 0, that still has room for it.

    A binary tree over the rows holds at each node the largest room below it, so the search starts at the root.
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [length] * (2 * leaves)  # the root is 1, the children of i are 2i and 2i + 1, row j is leaves + j
    rows = []
    for size in sizes:
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < size)
        rows.append(node - leaves)
        room[node] -= size
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def split(examples: Sequence[Example], held_back: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to train on, at least one, and `held_back` others drawn by the seed. Both keep their order."""
    most = max(len(examples) - 1, 0)
    if not 0 <= held_back <= most:
        raise ValueError(f"of {len(examples)} examples, 0 to {most} can be held back, got {held_back}")
    kept_out = set(_permutation(seed, SPLIT, 0, len(examples))[:held_back].tolist())
    train = [example for i, example in enumerate(examples) if i not in kept_out]
    return train, [examples[i] for i in sorted(kept_out)]


def batch_rows(step: int, count: int, batch: int, seed: int) -> Int64[np.ndarray, "b"]:
    """The rows of a batch, from 0 to count - 1. Each epoch has all of them, in a new order.

    With 3 rows in batches of 2, step 1 (they count from 0) is the last row of epoch 0 and the first of epoch 1.
    """
    if step < 0 or count < 1 or batch < 1:
        raise ValueError(f"a batch needs a step from 0, a row and a size, got step {step}, {count} rows, size {batch}")
    first, end = step * batch, (step + 1) * batch
    epochs = range(first // count, (end - 1) // count + 1)
    rows = np.concatenate([_permutation(seed, EPOCHS, epoch, count) for epoch in epochs])
    return rows[first - epochs[0] * count :][:batch]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, purpose: int, number: int, count: int) -> Int64[np.ndarray, "n"]:
    """A permutation of 0 to count - 1. Sorts raw draws: only those are stable across numpy versions (NEP 19)."""
    if seed < 0:
        raise ValueError(f"a seed must be at least 0, got {seed}")
    draws = np.random.PCG64(np.random.SeedSequence([seed, purpose, number])).random_raw(count)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False  # it is cached
    return order
