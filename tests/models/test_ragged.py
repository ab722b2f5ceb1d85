"""Prompts of different lengths in one forward, without computing their padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_helpers import load_family, save_family
from specjax_kernels import CAUSAL

from specjax.cache import PoolShape, init_cache
from specjax.models.blocks import Ragged


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_rows_without_padding(name, tmp_path):
    """Hidden states, features and cache blocks equal the padded forward's, behind committed tokens and a window. Rows
    of one token and of none are among them."""
    toy = load_family(save_family(tmp_path, name, vocab_size=40), name).toy
    target, params = toy.target, toy.params
    rng = np.random.default_rng(0)
    lengths, width = np.array([3, 0, 7, 1], np.int32), 7
    tokens = jnp.asarray(rng.integers(0, 40, (4, width)), jnp.int32)
    committed = jnp.asarray([5, -1, 12, 0], jnp.int32)
    empty = init_cache(target.pages, PoolShape(16, 4))
    cache = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape), leaf.dtype), empty)
    table = jnp.asarray(rng.permutation(16).reshape(4, 4), jnp.int32)
    positions = jnp.maximum(committed, 0)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    arguments = target.embed(params, tokens), positions, CAUSAL, cache, table, committed
    padded = target.forward(params, *arguments, features=(0, 1))
    output = target.forward(params, *arguments, features=(0, 1), ragged=Ragged.of(jnp.asarray(lengths), width, 13))
    for leaf, expected in zip(jax.tree.leaves(output), jax.tree.leaves(padded), strict=True):
        assert leaf.shape == expected.shape
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(leaf[row, :length], expected[row, :length], rtol=0, atol=2e-5)
