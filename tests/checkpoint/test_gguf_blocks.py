"""GGUF's quantised types against the `gguf` package: any bytes, since every pattern of bits is a block."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from specjax.checkpoint.parameters import make_leaf
from specjax.checkpoint.quantised import BLOCK_TYPES, read_blocks
from specjax.models.params import Leaf, Scope, Tensor


def blocks(kind: str, rows: int, count: int, seed: int = 0) -> np.ndarray:
    """Random rows of blocks whose float16 scales are finite."""
    weights, size = BLOCK_TYPES[kind][:2]
    del weights
    made = np.random.default_rng(seed).integers(0, 256, (rows, count, size), np.uint8)
    halves = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2))
    for at in halves:
        made[..., at + 1] = made[..., at + 1] & 0xBF | 0x20  # the exponent is never all ones
    return made.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_weights_are_those_of_gguf(kind):
    rows = blocks(kind, 5, 3)
    expected = dequantize(rows, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(read_blocks(kind, rows).dequantised(), expected)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_leaves_keep_the_numbers(kind):
    """At most 3.5 bits more than the file's: scales of two levels stay so."""
    from specjax_kernels import dequantise

    rows = blocks(kind, 6, 1, seed=1)
    leaf = Leaf("down", "I -> M", (Tensor("down", "M I"),))
    found = make_leaf([read_blocks(kind, rows)], Scope((leaf,)), leaf, {"M": 6, "I": BLOCK_TYPES[kind].weights})
    assert found is not None
    np.testing.assert_allclose(dequantise(found), dequantize(rows, GGMLQuantizationType[kind]), rtol=1e-6)
    assert found.nbytes * 8 / (6 * BLOCK_TYPES[kind].weights) <= rows.size * 8 / (6 * BLOCK_TYPES[kind].weights) + 3.5
