"""The oracle against jax.random and figures computed by hand.

Its Llama equals the decoder in test_step.py, which equals transformers in tests/models.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.extend.random import threefry2x32_p
from oracle import Sampling
from toy_models import SEEDS


def jax_key(seed):
    words = np.array(oracle.key_words(seed), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [0, 4097, 2**31 - 1])
def test_generator_equals_jax_random(seed, position):
    """Uses the generator's primitive, whose bits depend on no flag of JAX."""
    words = oracle.fold_in(oracle.key_words(seed), position)
    key = jax.random.fold_in(jax_key(seed), position)
    assert words == tuple(int(word) for word in jax.random.key_data(key))
    ids = np.arange(33, dtype=np.uint32)
    theirs = threefry2x32_p.bind(*(jnp.full(33, word, jnp.uint32) for word in words), jnp.zeros(33, jnp.uint32), ids)
    for ours, expected in zip(oracle.threefry2x32(words, np.zeros(33), ids), theirs, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_logit_editing():
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    params = Sampling(bias={0: 1.0, 3: -1.0}, min_tokens=4, stop_ids=(4,), **penalties)
    edited = oracle.edited_logits(np.array([1, 2, -1, 3, 9, 5.0]), params, prompt=[0, 2], generated=[3, 3, 1])
    # 0: (1+1)/2; 1: 2/2 - .25 - .5; 2: -1*2; 3: (3-1)/2 - .5 - .5; 4: a stop id too early; 5: never seen.
    np.testing.assert_array_equal(edited, np.float32([1.0, 0.25, -2.0, 0.0, -np.inf, 5.0]))
    edited = oracle.edited_logits(np.zeros(6), params, prompt=[], generated=[5, 5, 5, 5])
    assert edited[4] == 0


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2]),  # 2 and 3 are equal: the lower id
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.56}, [0]),  # 0.4 of 0.7 is 0.571: top-p applies to the rest of top-k
        ({"min_p": 0.26}, [0, 1]),
        ({"min_p": 0.24}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5, "min_p": 0.24}, [0, 1]),  # ratios are squared
    ],
)
def test_truncation(change, kept):
    logits = np.log(np.array([0.4, 0.3, 0.1, 0.1, 0.1]))
    params = dataclasses.replace(Sampling(temperature=1.0), **change)
    scores, _ = oracle.truncated_logits(logits, params)
    assert np.flatnonzero(scores > -np.inf).tolist() == kept


def test_distribution_and_ties():
    logits = np.array([1.0, 3.0, 0.0, 3.0])
    assert oracle.draw(logits, Sampling(), [0], []).token == 1
    params = Sampling(temperature=0.7)
    law = oracle.distribution(logits, params, [0], [])
    draws = [oracle.draw(logits, dataclasses.replace(params, seed=s), [0], []).token for s in range(4000)]
    frequencies = np.bincount(draws, minlength=4) / 4000
    np.testing.assert_allclose(frequencies, law, atol=4 * 0.5 / math.sqrt(4000))
    np.testing.assert_allclose(law, np.exp(logits / 0.7) / np.exp(logits / 0.7).sum(), rtol=1e-6)
