"""Rows of different lengths in one forward, without computing their padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_helpers import load_family, save_family
from oracle import Sampling, chain_tree
from specjax_kernels import CAUSAL
from toy_models import Runner, listed_drafter, random_tree

from specjax.cache import PoolShape, init_cache
from specjax.drafters.base import none_drafter
from specjax.models.blocks import Ragged
from specjax.step import StepConfig


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4_shared"])
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

    single = jax.tree.map(lambda leaf: leaf[2:3], (*arguments[:2], table, committed))
    ragged = Ragged.of(jnp.full(1, 5, jnp.int32), width)
    alone = target.forward(params, *single[:2], CAUSAL, cache, *single[2:], ragged=ragged).hidden[0]
    np.testing.assert_allclose(alone[:5], padded.hidden[2, :5], rtol=0, atol=2e-5)
    assert name == "gpt_oss" or not alone[5:].any(), "without biases of outputs the layers keep zeros"


def test_a_forward_computes_its_rotations_once(tmp_path):
    """XLA would compute them again in each layer, for every channel of every head."""
    toy = load_family(save_family(tmp_path, "llama", vocab_size=40), "llama").toy
    target, tokens = toy.target, jnp.zeros((1, 4), jnp.int32)

    def forward(params, positions):
        cache, table = init_cache(target.pages, PoolShape(4, 4)), jnp.zeros((1, 2), jnp.int32)
        embedded = target.embed(params, tokens)
        return target.forward(params, embedded, positions, CAUSAL, cache, table, jnp.zeros(1, jnp.int32)).hidden

    positions = jnp.arange(4, dtype=jnp.int32)[None, :]
    compiled = jax.jit(forward).lower(toy.params, positions).compile().as_text()
    assert target.config.num_layers > 1 and compiled.count(" cosine(") == 1


VOCABULARY = 40
# A third of the trees' tokens, and some of the chains', are outside of the vocabulary: their nodes are invalid.
TREES = [random_tree(0, 1 + 5 * (seed % 3 > 0), 60, np.random.default_rng(seed), 4) for seed in range(11)]
CHAINS = [chain_tree(0, [(7 * n + 19 * i) % 50 for i in range(n % 4)]) for n in range(11)]
STEPS = ([1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 0])
DRAFTERS = {
    "none": none_drafter(),
    "trees": listed_drafter(TREES, 6, 4),
    "chains": listed_drafter(CHAINS, 4, 3)._replace(topk=1),
}


def results(toy, drafter, *, ragged):
    """Outputs of prefills and steps, among them steps of one row, and the state after them."""
    runner = Runner(toy, DRAFTERS[drafter], chunk=6, config=StepConfig(ragged=ragged))
    prompts = [[(5 * i + row) % VOCABULARY for i in range(length)] for row, length in enumerate((8, 2, 15))]
    for row, prompt in enumerate(prompts):
        request = Sampling(max_tokens=40, temperature=0.4 * row, seed=row)
        runner.admit(row, prompt, request, logprobs=True)
    outputs = [runner.prefill(prompts), *(runner.step([bool(flag) for flag in active]) for active in STEPS)]
    for row in (0, 2):
        inputs = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], runner.inputs([True, True, True]))
        runner.state, output = runner.steps.speculate(runner.params, runner.state, inputs)
        outputs.append(output)
    return outputs, (runner.state.cache, runner.state.rows)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("llama", "none"), ("llama", "chains"), ("qwen2", "trees"), ("gemma3", "trees"), ("qwen3_5", "trees"),
        ("deepseek_v3", "trees"), ("qwen3_moe", "trees"), ("gpt_oss", "chains"),
        ("gemma4_shared", "trees"),
    ],
)  # fmt: skip
def test_steps_without_padding(name, drafter, tmp_path):
    """Prompts of different lengths, nodes that are not valid, and rows without a request change no result; where only
    this repository's kernels add, no bit."""
    toy = load_family(save_family(tmp_path, name, vocab_size=VOCABULARY), name).toy
    close = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    same = np.testing.assert_array_equal if name in ("llama", "qwen2") else close
    (outputs, state), (expected, expected_state) = (results(toy, drafter, ragged=ragged) for ragged in (True, False))
    for output, other in zip(outputs, expected, strict=True):
        counted = np.arange(other.tokens.shape[1]) < np.asarray(other.emitted)[:, None]
        for leaf, of_other in ((output.emitted, other.emitted), (output.finish, other.finish)):
            np.testing.assert_array_equal(leaf, of_other)
        pairs = zip((output.tokens, *output.logprobs), (other.tokens, *other.logprobs), strict=True)
        for leaf, of_other in pairs:
            same(np.asarray(leaf)[counted], np.asarray(of_other)[counted])
    jax.tree.map(same, state, expected_state)
