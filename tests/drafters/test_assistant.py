"""Gemma 4's assistants: hidden vectors and logits against the oracle and transformers, trees of steps, interfaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assistant_oracle import FULL, SLIDING, Assistant, Given, given_by
from eagle_oracle import DraftTree, check_steps, grow_tree, log_softmax, start
from family_helpers import WINDOW, Family, load_family, save_family
from oracle import Sampling
from specjax_kernels import CAUSAL
from tiny_assistants import load_assistant_oracle, save_assistant
from toy_models import Runner, tiny_llama

from specjax.cache import PoolShape, commit, init_cache
from specjax.checkpoint import load_head
from specjax.config import AssistantConfig
from specjax.drafters import TreeShape, assistant_drafter
from specjax.drafters.base import Params
from specjax.drafters.check import DrafterError, check_declared, check_drafter
from specjax.models.assistant import AssistantHead
from specjax.models.target import Target
from specjax.step import StepConfig

VOCABULARY, TOLERANCE = 40, 2e-4
LENGTH = 13  # tokens of a text, more than three windows


class Pair(NamedTuple):
    family: Family  # the target
    folder: Path  # of the assistant
    config: AssistantConfig
    draft: Any  # its parameters

    @property
    def oracle(self) -> Assistant:
        return Assistant(self.folder, np.asarray(self.family.toy.params["embed"]), self.config.position)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Callable[..., Pair]:
    """(family, with centroids) -> a target and its assistant, saved and loaded once."""
    root = tmp_path_factory.mktemp("assistants")

    @functools.cache
    def target(family: str) -> Family:
        return load_family(save_family(root / family, family, vocab_size=VOCABULARY), family)

    @functools.cache
    def make(family: str, centroids: bool = False) -> Pair:
        folder = root / f"{family}-{centroids}"
        save_assistant(folder, root / family if target(family) else root, centroids=8 * centroids, best=3)
        config, params = load_head(str(folder), target(family).config, kind="assistant", progress=False)
        assert isinstance(config, AssistantConfig) and bool(config.centroids) == centroids
        return Pair(target(family), folder, config, params)

    return make


def committed(pair: Pair, tokens: list[int]) -> tuple[Any, Any, jax.Array]:
    """The target's cache of these tokens, its page table, and the state after the final norm at the last one."""
    table = jnp.asarray([[7, 2, 5, 0, 9]], jnp.int32)  # 9 is a hole
    text = jnp.asarray([[*tokens, *[0] * (LENGTH - len(tokens))]], jnp.int32)
    length = jnp.asarray([len(tokens)], jnp.int32)
    cache, hidden = read(pair.family.toy.target)(pair.family.toy.params, text, table, length)
    return cache, table, hidden[:, len(tokens) - 1, None]


@functools.cache
def read(target: Target) -> Callable[..., Any]:
    @jax.jit
    def run(params: Any, text: jax.Array, table: jax.Array, length: jax.Array) -> Any:
        cache = jax.tree.map(lambda leaf: leaf - 7, init_cache(target.pages, PoolShape(9, 4)))
        at, none = jnp.arange(LENGTH, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
        output = target.forward(params, target.embed(params, text), at, CAUSAL, cache, table, none)
        return commit(cache, output.block, table, none, length, after=output.hidden), output.hidden

    return run


class Nodes:
    """An assistant over a committed text, level by level."""

    def __init__(self, pair: Pair, tokens: list[int]) -> None:
        self.model, self.pair = AssistantHead(pair.config, pair.family.toy.target), pair
        self.cache, self.table, self.hidden = committed(pair, tokens)
        self.n = jnp.asarray([len(tokens)], jnp.int32)

    def level(self, tokens: list[int], features: jax.Array) -> tuple[jax.Array, np.ndarray]:
        """Features [1, k, M] of the children, and logits [k, V], -inf where none are computed."""
        pages = {layer: self.cache[layer] for layer in self.model.reads}
        params = Params(self.pair.family.toy.params, self.pair.draft)
        nodes = jnp.asarray([tokens], jnp.int32), features
        children, logits, ids = level(self.pair.config, self.model.target)(params, nodes, pages, self.table, self.n)
        if ids is None:
            return children, np.asarray(logits)[0]
        scattered = np.full((len(tokens), VOCABULARY), -np.inf, np.float32)
        np.put_along_axis(scattered, np.asarray(ids)[0], np.asarray(logits)[0], axis=1)
        return children, scattered


@functools.cache
def level(config: AssistantConfig, target: Target) -> Callable[..., Any]:
    model = AssistantHead(config, target)

    @jax.jit
    def run(params: Params, nodes: Any, pages: Any, table: jax.Array, n: jax.Array) -> Any:
        out = model.forward(params.draft, model.embed(params.target, nodes[0]), nodes[1], pages, table, n, n)
        return model.feature(params.draft, out), *model.unembed(params.draft, out)

    return run


CASES = [("gemma4", False, 0), ("gemma4_shared", True, 0), ("gemma4_experts", True, -1), ("gemma4_shared", False, -1)]


@pytest.mark.parametrize(("family", "centroids", "position"), CASES)
def test_nodes_equal_the_oracle(pairs, family, centroids, position):
    """A chain of three, then four nodes of one level at once, against single nodes; with few and with many tokens."""
    pair = pairs(family, centroids)
    pair = pair._replace(config=replace(pair.config, position=position))
    rng = np.random.default_rng(3)
    for length in (1, WINDOW, LENGTH):
        tokens = rng.integers(0, VOCABULARY, length).tolist()
        nodes, given, oracle = Nodes(pair, tokens), given_by(pair.family.oracle, tokens), pair.oracle
        np.testing.assert_allclose(nodes.hidden[0, 0], given.hidden, rtol=TOLERANCE, atol=TOLERANCE)
        features, expected = nodes.hidden, given.hidden
        for token in rng.integers(0, VOCABULARY, 3).tolist():
            features, logits = nodes.level([token], features)
            expected, wanted = oracle.node(given, token, expected)
            np.testing.assert_allclose(features[0, 0], expected, rtol=TOLERANCE, atol=TOLERANCE)
            np.testing.assert_allclose(logits[0], wanted, rtol=TOLERANCE, atol=TOLERANCE)
        four = rng.integers(0, VOCABULARY, 4).tolist()
        parents = jnp.concatenate([features, nodes.hidden, features, nodes.hidden], axis=1)
        features, logits = nodes.level(four, parents)
        for i, token in enumerate(four):
            feature, wanted = oracle.node(given, token, np.float64(parents[0, i]))
            np.testing.assert_allclose(features[0, i], feature, rtol=TOLERANCE, atol=TOLERANCE)
            np.testing.assert_allclose(logits[i], wanted, rtol=TOLERANCE, atol=TOLERANCE)
            alone, its_logits = nodes.level([token], parents[:, i : i + 1])
            np.testing.assert_allclose(alone[0, 0], features[0, i], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(its_logits[0], logits[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "centroids", "position"), CASES)
def test_nodes_equal_transformers(pairs, family, centroids, position):
    """transformers' windows have two keys more than a window at the position n, one more than at n - 1."""
    import torch

    pair = pairs(family, centroids)
    pair = pair._replace(config=replace(pair.config, position=position))
    theirs = load_assistant_oracle(pair.folder, WINDOW - 2 - position)
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, LENGTH).tolist()
    nodes, given = Nodes(pair, tokens), given_by(pair.family.oracle, tokens)
    shared = {
        kind: tuple(torch.tensor(leaf).float().transpose(0, 1)[None] for leaf in given.shared[kind])
        for kind in (SLIDING, FULL)
    }
    embedding = pair.family.oracle.get_input_embeddings()
    features, expected = nodes.hidden, torch.tensor(given.hidden).float()[None, None]
    for token in (5, 31, 8):
        features, logits = nodes.level([token], features)
        with torch.inference_mode():
            inputs = torch.cat([embedding(torch.tensor([[token]])), expected], dim=-1)
            at = torch.tensor([[LENGTH + position]])
            out = theirs(inputs_embeds=inputs, position_ids=at, shared_kv_states=shared)
        expected, wanted = out.last_hidden_state, out.logits[0, 0].numpy()
        np.testing.assert_allclose(features[0, 0], expected[0, 0], rtol=TOLERANCE, atol=TOLERANCE)
        known = np.isfinite(logits[0])
        assert known.all() == (not centroids)
        np.testing.assert_allclose(logits[0][known], wanted[known], rtol=TOLERANCE, atol=TOLERANCE)
        assert np.all(wanted[~known] < wanted[known].min())


# Steps.


def runner(pair: Pair, shape: tuple[int, int, int]) -> Runner:
    drafter = assistant_drafter(pair.family.toy.target, pair.config, TreeShape(*shape), coupling="none")
    config = StepConfig(nodes=drafter.width, trace=True)
    return Runner(pair.family.toy, drafter, rows=2, draft=pair.draft, config=config, page_size=3)


def oracle_trees(pair: Pair, shape: tuple[int, int, int]) -> Callable[[int, list[int]], DraftTree]:
    oracle = pair.oracle

    def tree(row: int, text: list[int]) -> DraftTree:
        """The text's last token is the root, which has no keys yet."""
        given: Given = given_by(pair.family.oracle, text[:-1])

        @functools.cache
        def log_probs(path: tuple[int, ...]) -> np.ndarray:
            return log_softmax(oracle.path(given, [text[-1], *path])[1])

        return grow_tree(log_probs, text[-1], *shape)

    return tree


@pytest.mark.parametrize(
    ("family", "centroids", "shape"),
    [("gemma4", True, (3, 1, 4)), ("gemma4_shared", False, (4, 2, 9)), ("gemma4_experts", True, (3, 3, 8))],
)
def test_trees_of_steps_equal_the_oracle(pairs, family, centroids, shape):
    """The first step after a prefill in chunks, and steps after some accepted drafts: the feature of the root is the
    target's state at the node that drew it."""
    pair = pairs(family, centroids)
    run = runner(pair, shape)
    texts = start(run)
    compared, undrafted = check_steps(run, texts, oracle_trees(pair, shape), steps=4)
    assert compared >= 5 and not undrafted, "of 8"
    for row, text in texts.items():
        wanted = given_by(pair.family.oracle, text[:-1]).hidden
        np.testing.assert_allclose(run.state.draft.hidden[row], wanted, rtol=1e-3, atol=1e-3)


def test_a_start_after_another_requests_pages(pairs):
    """The state of the last token is computed by the request itself, so nothing is kept in pages."""
    pair, shape, shared = pairs("gemma4_shared", True), (3, 2, 6), [4, 8, 15, 16, 23, 35]
    run = runner(pair, shape)
    run.admit(0, [*shared, 5, 9], Sampling(max_tokens=12))
    run.prefill([[*shared, 5, 9]], chunk=4)
    run.table[1, :2] = run.table[0, :2]
    second = [*shared, 31]
    run.admit(1, second, Sampling(max_tokens=12), prefix_length=len(shared))
    output = run.prefill([[], second[len(shared) :]], chunk=2)
    texts = {1: [*second, int(output.tokens[0, 0])]}
    assert check_steps(run, texts, oracle_trees(pair, shape), steps=3)[0] >= 2, "of 3"


def test_interface(pairs):
    pair = pairs("gemma4_shared", True)
    target = pair.family.toy.target
    drafter = assistant_drafter(target, pair.config, TreeShape(3, 2, 6))
    assert (drafter.name, drafter.features, drafter.reads_layers) == ("ASSISTANT", "final", (0, 1))
    check_drafter(drafter, target, Params(pair.family.toy.params, pair.draft), values=True)
    with pytest.raises(DrafterError, match=r"layer 3 of the target has no pages: it reads those of layer 1$"):
        check_declared(drafter._replace(reads_layers=(0, 3)), target)
    assert jax.tree.map(jnp.shape, drafter.init(None, 5, PoolShape(9, 4))) == ((5, 32),), "no pages"


def test_another_target_is_refused(pairs):
    with pytest.raises(ValueError, match=r"^an assistant drafts for a gemma4 model, and the target is a llama model$"):
        assistant_drafter(tiny_llama().target, pairs("gemma4").config, TreeShape(2, 1, 3))
    with pytest.raises(ValueError, match=r"^num_key_value_heads is 2, and the target's is 1; it is the assistant of"):
        assistant_drafter(pairs("gemma4_shared").family.toy.target, pairs("gemma4").config, TreeShape(2, 1, 3))
