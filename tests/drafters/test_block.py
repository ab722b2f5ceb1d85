"""Block drafts against the oracle: every published dialect, texts of any length, chunks, shared pages, any tree."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_oracle import best_paths, block_outputs, check_paths, log_softmax, paths_of, slot_logits, walker
from distil import pair_model
from driven import Driven
from eagle_oracle import ERROR
from family_helpers import load_family, save_family
from oracle import Sampling, noise
from tiny_blocks import BLOCK, DIALECTS, Saved, save_block
from toy_models import Runner, Toy, sampling_rows, tiny_llama

from specjax.checkpoint import load_head
from specjax.config import BlockConfig, RopeConfig
from specjax.drafters import Block, TreeShape, block_drafter, make_speculation
from specjax.drafters.block import best_prefixes
from specjax.models.block_head import BlockHead
from specjax.models.draft_head import init_head_params

WINDOW = 7
ROWS = 3


@functools.cache
def target() -> Toy:
    return tiny_llama(3, num_layers=6)


class Loaded:
    def __init__(self, folder, dialect: str, **options: Any):
        self.saved: Saved = save_block(folder, dialect, seed=len(dialect), **options)
        loaded = load_head(str(folder), target().target.config, kind="block", progress=False)
        assert isinstance(loaded[0], BlockConfig)
        self.config, self.params = loaded

    @property
    def drafts(self) -> int:
        return self.config.drafts_of(self.config.block)

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The embedding [V, M] and the output matrix [W, M] that the head uses."""
        own = self.saved.tensors.get("lm_head.weight")
        return np.asarray(target().params["embed"]), np.asarray(target().params["head"]).T if own is None else own


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """heads(dialect) -> `Loaded`."""
    folder = tmp_path_factory.mktemp("blocks")
    return functools.cache(lambda dialect: Loaded(folder / dialect, dialect))


class Head(Driven):
    """A block head, with the oracle's logits for the same texts."""

    def __init__(self, head: Loaded, seed: int = 0):
        self.head = head
        super().__init__(block_drafter, target(), head.config, head.params, seed=seed)

    def expected_outputs(self, row: int, width: int) -> np.ndarray:
        n, saved = self.done[row], self.head.saved
        features, anchor = self.features[row, :n], int(self.tokens[row, n])
        return block_outputs(saved.tensors, saved.spec, self.head.ends()[0], features, anchor, width)

    def log_probs(self, row: int, width: int):
        saved = self.head.saved
        outputs, logits = slot_logits(saved.spec, self.expected_outputs(row, width), self.head.ends()[1])
        return walker(saved.tensors, saved.spec, outputs, logits, int(self.tokens[row, self.done[row]]), saved.ids)


def check(
    driven: Head, shape: TreeShape, block: int | None = None, requests: Sequence[Sampling] = (Sampling(),) * (ROWS + 1)
) -> int:
    """Compares the trees with the oracle's, for greedy requests or with the target's noise. Returns the number of rows
    whose trees are not near a tie."""
    config, saved, compared = driven.head.config, driven.head.saved, 0
    context = driven.context()._replace(sampling=sampling_rows(requests, target().vocab))
    tree = driven.trees(shape, context, block=block)
    for row, request in enumerate(requests[:ROWS]):
        n, plain = int(driven.done[row]), driven.log_probs(row, block or shape.steps + (not config.from_anchor))

        def log_probs(path, plain=plain, request=request, n=n):
            if not request.temperature:
                return plain(path)
            drawn = noise(request.seed, n + len(path) + 1, target().vocab)[saved.ids]
            return log_softmax(plain(path) + request.temperature * drawn)

        root, grown = int(driven.tokens[row, n]), config.walk != "none" or shape.topk == 1
        compared += check_paths(tree, row, log_probs, root, shape, saved.ids, grown=grown)
    return compared


REPEATED = {
    "specforge", "specforge-dspark", "deepspec-vanilla", "speculators-sliding", "speculators-sliding-non-causal",
}  # fmt: skip
"""Dialects that differ from others in their files alone."""
CHAINS = {"dflash", "dflash2", "deepspec-rnn"}
"""Dialects whose chains are compared, too: one of each walk."""


@pytest.mark.parametrize(
    "dialect", [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in DIALECTS]
)
def test_trees(heads, dialect):
    """At the start of a text, below, at and above the window's width, and at the end of the pages."""
    driven = Head(heads(dialect), seed=1)
    drafts, compared = driven.head.drafts, 0
    shapes = [(drafts, 3, 14), *([(drafts, 1, drafts + 1)] if dialect in CHAINS else [])]
    for lengths in ([0, 1, 2], [3, 6, 5], [4, 0, 0], [20, 18, 17]):
        driven.feed(lengths)
        compared += sum(check(driven, TreeShape(*shape)) for shape in shapes)
    assert compared > 10 * len(shapes), "of 12 each"
    assert WINDOW in (7, *DIALECTS["dflash-sliding"].spec["windows"])
    if dialect == "dflash":
        assert check(driven, TreeShape(2, 1, 3), block=driven.head.config.block - 1)


@pytest.mark.parametrize(
    ("dialect", "shape"),
    [
        ("speculators-dflash", (4, 1, 5)), ("dflash", (4, 3, 12)), ("deepspec-gated", (4, 1, 5)),
        ("speculators-dflash2", (4, 2, 9)),
    ],
)  # fmt: skip
def test_drafts_with_the_targets_noise(heads, dialect, shape):
    """Slot d uses the noise of position n + d; a greedy row uses none."""
    driven = Head(heads(dialect), seed=5)
    driven.feed([2, 9, 17])
    requests = [Sampling(temperature=t, seed=seed) for t, seed in ((1.0, 3), (0.0, 4), (0.6, -5), (0.0, 0))]
    assert check(driven, TreeShape(*shape), requests=requests) > 1


def test_window_option(heads):
    """`window` limits all layers; layers with a smaller window keep it."""
    driven, option = Head(heads("dflash-sliding"), seed=4), 5
    driven.feed([3, 12, 21])
    drafter = make_speculation(Block(window=option), target=target().target, head=driven.head.config).drafter
    tree = drafter.propose(driven.params, driven.state, driven.context())[0]
    saved = driven.head.saved
    driven.head = copy.copy(driven.head)
    driven.head.saved = saved._replace(spec=replace(saved.spec, windows=(option, option)))
    for row in range(ROWS):
        log_probs, path = driven.log_probs(row, drafter.width), ()
        for _ in range(drafter.depth):
            path += (int(np.argmax(log_probs(path))),)
        assert tree.tokens[row, 1:].tolist() == [*path]


@pytest.mark.parametrize(("dialect", "scale"), [("dflash", 4), ("dflash-scaled", 2), ("speculators-dflash", 4)])
def test_embedding_of_a_gemma_target(tmp_path, dialect, scale):
    """The target's scale, the root of its width of 16, unless the file states one."""
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    changes = {"hidden_size": 16, "num_hidden_layers": 6, "vocab_size": 31, "layer_types": layers}
    toy = load_family(save_family(tmp_path / "model", "gemma4", **changes), "gemma4").toy
    saved = save_block(tmp_path / "head", dialect)
    config, params = load_head(str(tmp_path / "head"), toy.target.config, kind="block", progress=False)
    assert isinstance(config, BlockConfig)
    head, tokens = BlockHead(config, toy.target), jnp.asarray([[3, saved.spec.mask]], jnp.int32)
    rows = head.embed(toy.params, params, tokens)
    np.testing.assert_allclose(rows, np.asarray(toy.params["embed"])[np.asarray(tokens)] * scale, rtol=1e-6)


def test_chunks_of_any_size(heads):
    """The pages do not depend on the chunks in which a text is observed."""
    states = []
    for sizes in ([29], [1] * 29, [4, 16, 9], [13, 3, 13]):
        driven = Head(heads("dflash2"), seed=2)
        for size in sizes:
            driven.feed([size] * ROWS, width=32)
        states.append(jax.tree.map(lambda leaf, driven=driven: np.asarray(leaf)[driven.table[:-1]], driven.state))
    for state in states[1:]:
        jax.tree.map(lambda old, new: np.testing.assert_allclose(new, old, atol=1e-6), states[0], state)


@pytest.mark.parametrize("dialect", ["dflash-sliding", "deepspec-rnn"])
def test_shared_pages(heads, dialect):
    """A request that starts with another's full pages drafts as if it had observed their tokens."""
    driven = Head(heads(dialect), seed=3)
    driven.features[1:] = driven.features[0]
    driven.tokens[1:] = driven.tokens[0]
    driven.feed([14, 0, 14])
    driven.table[1, :3] = driven.table[0, :3]
    driven.done[1] = 12
    driven.feed([0, 2, 0])
    for shape in ((4, 1, 5), (4, 3, 12)):
        tree = driven.trees(TreeShape(*shape))
        for leaf in tree:
            np.testing.assert_allclose(leaf[1], leaf[2], atol=1e-5)
        check(driven, TreeShape(*shape))


@pytest.mark.parametrize(
    ("dialect", "features", "sizes"),
    [
        ("dflash", (2,), {"layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 2, "inner": 32}),
        ("speculators-dspark", (4, 0, 3, 1), {"layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 10, "inner": 8}),
    ],
)
def test_sizes_of_heads(dialect, features, sizes, tmp_path):
    driven = Head(Loaded(tmp_path, dialect, features=features, **sizes), seed=9)
    for lengths in ([5, 0, 12], [1, 9, 3]):
        driven.feed(lengths, width=16)
    check(driven, TreeShape(3, 2, 7))


SHAPES = [(1, 1, 2), (6, 1, 5), (6, 5, 41), (3, 4, 17), (2, 3, 13)]
"""Levels, best tokens of each, and nodes."""
prefixes = jax.jit(best_prefixes, static_argnums=3)


@pytest.mark.parametrize(("depth", "width", "nodes"), SHAPES)
def test_best_prefixes(depth, width, nodes):
    """The nodes are those of a heap, which appends the best prefix until the tree is full."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        logits = np.sort(rng.normal(0, 2, (2, depth, 9)), axis=2)[:, :, ::-1]
        log_probs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
        ids = rng.permuted(np.tile(np.arange(50), (2, depth, 1)), axis=2)[:, :, :9]
        chosen = jnp.asarray(np.int32(ids[:, :, :width])), jnp.asarray(np.float32(log_probs[:, :, :width]))
        tree = jax.tree.map(np.asarray, prefixes(jnp.asarray([3, 4], jnp.int32), *chosen, nodes))
        assert tree.tokens.shape == (2, nodes) and tree.valid.all()
        for row in range(2):

            def following(path, row=row, ids=ids, log_probs=log_probs):
                out = np.full(50, -np.inf)
                out[ids[row, len(path)]] = log_probs[row, len(path)]
                return out

            expected, gap = best_paths(following, depth, width, nodes - 1, list(range(50)))
            if gap > ERROR:
                assert paths_of(tree, row).keys() == {(), *expected}


def constant(token: int) -> Toy:
    """A target that always continues with `token`, and a head's embedding and output layer: after `token` alone they
    give token 5, after the mask `token`."""
    toy = pair_model()
    head = np.zeros((2 * toy.vocab, toy.vocab), np.float32)
    head[: toy.vocab, token], head[token, 5], head[toy.vocab :, token] = 1, 3, 9
    return Toy(toy.target, {"head": jnp.asarray(head)}, lambda tokens: head[tokens[-1]] + head[toy.vocab + tokens[-2]])


@pytest.mark.parametrize("from_anchor", [False, True])
def test_slot_conventions(from_anchor):
    """One head whose masks are right and whose anchor is wrong, read in both ways."""
    toy = constant(7)
    width = toy.target.config.hidden_size
    config = BlockConfig(
        hidden_size=width, feature_size=width, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
        norm_epsilon=1e-6, rope=RopeConfig(), vocab_size=toy.vocab, aux_layers=(0,), layers=1, block=BLOCK,
        mask_token=0, from_anchor=from_anchor, windows=(None,), causal=(False,),
    )  # fmt: skip
    params = jax.tree.map(jnp.asarray, dict(init_head_params(config, toy.target, jax.random.key(0))))
    params["layers_0"] = {
        name: leaf * (0 if name in ("output", "down") else 1) for name, leaf in params["layers_0"].items()
    }
    drafter = make_speculation(Block(), target=toy.target, head=config).drafter
    assert (drafter.width, drafter.depth) == ((BLOCK + 1, BLOCK) if from_anchor else (BLOCK, BLOCK - 1))
    done = Runner(toy, drafter, rows=1, draft=params).generate([([3, 7, 7], Sampling(max_tokens=21))])[0]
    assert done.tokens == [7] * 21
    assert set(done.emitted) == ({1} if from_anchor else {BLOCK})


def test_sizes(heads):
    config, model = heads("dflash").config, target().target
    speculation = make_speculation(Block(topk=4, nodes=16), target=model, head=config)
    drafter, smaller = speculation.drafter, speculation.within(4)
    assert (drafter.width, drafter.depth, drafter.topk, speculation.passes) == (16, 4, 4, 1)
    assert (smaller.width, smaller.depth) == (4, 3)
    assert make_speculation("dspark", target=model, head=config).drafter.width == 5
