"""Block drafts against the oracle: every published dialect, texts of any length, chunks, shared pages, any tree."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_oracle import best_paths, block_outputs, log_softmax, slot_logits, walker
from distil import pair_model
from eagle_oracle import ERROR, check_tree, grow_tree
from hypothesis import given, settings
from oracle import Sampling, noise
from tiny_blocks import BLOCK, DIALECTS, Saved, save_block
from toy_models import Runner, Toy, sampling_rows, tiny_llama

from specjax.cache import PoolShape
from specjax.checkpoint import load_head
from specjax.config import BlockConfig, RopeConfig
from specjax.drafters import Block, Context, Observation, Params, TreeShape, block_drafter, make_drafter
from specjax.drafters.block import best_prefixes
from specjax.limits import ParameterError
from specjax.models.block_head import BlockHead
from specjax.models.draft_head import init_head_params
from specjax.sampling import sampling_row
from specjax.tree import DraftTree

WINDOW = 7
ROWS, PAGE, PAGES = 3, 4, 8


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


@functools.cache
def compiled(config: BlockConfig, shape: TreeShape, block: int | None = None):
    drafter = block_drafter(target().target, config, shape, block=block)
    return drafter, jax.jit(drafter.propose)


@functools.cache
def compiled_observe(config: BlockConfig):
    return jax.jit(block_drafter(target().target, config, TreeShape(1, 1, 2)).observe)


@functools.cache
def compiled_block(config: BlockConfig, width: int):
    """The outputs of blocks of this width."""
    model = BlockHead(config, target().target)

    def outputs(params: Params, state: Any, context: Context):
        where = context.page_table, context.prefix_length, context.attended
        return model.block(params.target, params.draft, context.root, width, state, *where)

    return jax.jit(outputs)


class Driven:
    """A head without a target: random texts and features, observed in pieces of any length."""

    def __init__(self, head: Loaded, seed: int = 0):
        self.head, self.rng = head, np.random.default_rng(seed)
        self.params = Params(target().params, head.params)
        pool = PoolShape(ROWS * PAGES + 2, PAGE)
        self.state = compiled(head.config, TreeShape(1, 1, 2))[0].init(self.params, ROWS + 1, pool)
        pages = self.rng.permutation(pool.pages)[: ROWS * PAGES].reshape(ROWS, PAGES)
        self.table = np.concatenate([pages, np.full((1, PAGES), pool.pages)]).astype(np.int32)
        self.tokens = self.rng.integers(0, target().vocab, (ROWS, PAGE * PAGES + 1))
        size = (ROWS, PAGE * PAGES, head.config.feature_size)
        self.features = self.rng.normal(0, 1, size).astype(np.float32)
        self.done = np.zeros(ROWS, int)

    def context(self, active) -> Context:
        """The rows and an empty entry."""
        row = sampling_row(target().vocab)
        sampling = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (ROWS + 1, *leaf.shape)), row)
        return Context(
            slots=jnp.asarray([*range(ROWS), ROWS + 5], jnp.int32),
            prefix_length=jnp.asarray([*np.where(active, self.done, 0), 0], jnp.int32),
            page_table=jnp.asarray(self.table),
            root=jnp.asarray([*self.tokens[np.arange(ROWS), self.done], 0], jnp.int32),
            active=jnp.asarray([*active, False]),
            salt=jnp.zeros(ROWS + 1, jnp.uint32),
            sampling=sampling,
        )

    def feed(self, lengths, width: int | None = None) -> None:
        """Observes `lengths[r]` more tokens of each row. The rest of the block is random, some of it not finite."""
        lengths = np.asarray(lengths)
        width = width or max(1, int(lengths.max()))
        tokens = self.rng.integers(-1, target().vocab, (ROWS + 1, width))
        features = self.rng.normal(0, 9, (ROWS + 1, width, self.features.shape[2])).astype(np.float32)
        features[:, -1] = np.where(np.arange(ROWS + 1)[:, None] % 2, np.nan, features[:, -1])
        for row, length in enumerate(lengths):
            features[row, :length] = self.features[row, self.done[row] : self.done[row] + length]
        seen = Observation(*map(jnp.asarray, (np.int32(tokens), np.int32(tokens), features, np.int32([*lengths, 0]))))
        self.state = compiled_observe(self.head.config)(self.params, self.state, self.context(lengths > 0), seen)
        self.done += lengths

    def trees(self, shape: TreeShape, block: int | None = None) -> DraftTree:
        propose = compiled(self.head.config, shape, block)[1]
        tree, state = propose(self.params, self.state, self.context(np.ones(ROWS, bool)))
        assert jax.tree.all(jax.tree.map(lambda old, new: bool(jnp.all(old == new)), self.state, state))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:ROWS], tree)

    def expected_outputs(self, row: int, width: int) -> np.ndarray:
        n, saved = self.done[row], self.head.saved
        features, anchor = self.features[row, :n], int(self.tokens[row, n])
        return block_outputs(saved.tensors, saved.spec, self.head.ends()[0], features, anchor, width)

    def log_probs(self, row: int, width: int):
        saved = self.head.saved
        outputs, logits = slot_logits(saved.spec, self.expected_outputs(row, width), self.head.ends()[1])
        return walker(saved.tensors, saved.spec, outputs, logits, int(self.tokens[row, self.done[row]]), saved.ids)


def paths_of(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """The paths below the root of the valid nodes, with their scores."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.valid[row].sum())):
        paths.append((*paths[tree.parents[row, node]], int(tree.tokens[row, node])))
        assert tree.depth[row, node] == len(paths[node])
    assert len({*paths}) == len(paths)
    return dict(zip(paths, tree.scores[row].tolist(), strict=False))


def check(driven: Driven, shape: TreeShape, block: int | None = None) -> int:
    """Compares the trees with the oracle's. Returns the number of rows whose trees are not near a tie."""
    tree, config, saved = driven.trees(shape, block), driven.head.config, driven.head.saved
    width = block or shape.steps + (not config.from_anchor)
    compared = 0
    for row in range(ROWS):
        log_probs = driven.log_probs(row, width)
        if config.walk != "none" or shape.topk == 1:
            root = int(driven.tokens[row, driven.done[row]])
            expected = grow_tree(log_probs, root, shape.steps, shape.topk, shape.nodes, target_ids=saved.ids)
            compared += check_tree(tree, row, expected)
            continue
        chosen, gap = best_paths(log_probs, shape.steps, shape.topk, shape.nodes - 1, saved.ids)
        if gap > ERROR:
            drafted = paths_of(tree, row)
            assert drafted.keys() == {(), *chosen}
            np.testing.assert_allclose([drafted[path] for path in chosen], [*chosen.values()], atol=ERROR)
            compared += 1
    return compared


@pytest.mark.parametrize("dialect", DIALECTS)
def test_outputs(heads, dialect):
    """Blocks at the start of a text, below, at and above the window's width, and at the end of the pages."""
    driven = Driven(heads(dialect))
    width = driven.head.config.block
    for lengths in ([0, 1, 2], [3, 5, 0], [4, 0, 6], [1, 1, 1], [20, 2, 15], [0, 18, 3]):
        driven.feed(lengths)
        outputs = compiled_block(driven.head.config, width)(driven.params, driven.state, driven.context([True] * ROWS))
        for row in range(ROWS):
            np.testing.assert_allclose(outputs[row], driven.expected_outputs(row, width), atol=1e-5, rtol=1e-5)
    assert driven.done.tolist() == [28, 27, 27] and WINDOW in (7, *DIALECTS["dflash-sliding"].spec["windows"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_trees(heads, dialect):
    driven = Driven(heads(dialect), seed=1)
    drafts, compared = driven.head.drafts, 0
    shapes = [(drafts, 1, drafts + 1), (drafts, 3, 14), (2, 5, 6)]
    for lengths in ([0, 4, 7], [2, 3, 9], [0, 11, 0]):
        driven.feed(lengths)
        compared += sum(check(driven, TreeShape(*shape)) for shape in shapes)
    assert compared > 24
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
    driven, saved = Driven(heads(dialect), seed=5), heads(dialect).saved
    driven.feed([2, 9, 17])
    requests = [Sampling(temperature=t, seed=seed) for t, seed in ((1.0, 3), (0.0, 4), (0.6, -5), (0.0, 0))]
    context = driven.context([True] * ROWS)._replace(sampling=sampling_rows(requests, target().vocab))
    drafter, propose = compiled(driven.head.config, TreeShape(*shape))
    tree = jax.tree.map(np.asarray, propose(driven.params, driven.state, context)[0])
    compared = 0
    for row, request in enumerate(requests[:ROWS]):
        n = int(driven.done[row])
        plain = driven.log_probs(row, drafter.depth + (not saved.spec.from_anchor))

        def noisy(path, plain=plain, request=request, n=n):
            drawn = noise(request.seed, n + len(path) + 1, target().vocab)[saved.ids]
            return log_softmax(plain(path) + request.temperature * drawn)

        if driven.head.config.walk == "none" and shape[1] > 1:
            chosen, gap = best_paths(noisy, shape[0], shape[1], shape[2] - 1, saved.ids)
            if gap > ERROR:
                assert paths_of(tree, row).keys() == {(), *chosen}
                compared += 1
        else:
            root = int(driven.tokens[row, n])
            compared += check_tree(tree, row, grow_tree(noisy, root, *shape, target_ids=saved.ids))
    assert compared > 1


def test_window_option(heads):
    """`window` limits all layers; layers with a smaller window keep it."""
    driven, option = Driven(heads("dflash-sliding"), seed=4), 5
    driven.feed([3, 12, 21])
    drafter = make_drafter(Block(window=option), target=target().target, head=driven.head.config)
    tree = drafter.propose(driven.params, driven.state, driven.context([True] * ROWS))[0]
    saved = driven.head.saved
    driven.head = copy.copy(driven.head)
    driven.head.saved = saved._replace(spec=replace(saved.spec, windows=(option, option)))
    for row in range(ROWS):
        log_probs, path = driven.log_probs(row, drafter.width), ()
        for _ in range(drafter.depth):
            path += (int(np.argmax(log_probs(path))),)
        assert tree.tokens[row, 1:].tolist() == [*path]


def test_chunks_of_any_size(heads):
    """The pages do not depend on the chunks in which a text is observed."""
    states = []
    for sizes in ([29], [1] * 29, [4, 16, 9], [13, 3, 13]):
        driven = Driven(heads("dflash2"), seed=2)
        for size in sizes:
            driven.feed([size] * ROWS, width=32)
        states.append(jax.tree.map(lambda leaf, driven=driven: np.asarray(leaf)[driven.table[:-1]], driven.state))
    for state in states[1:]:
        jax.tree.map(lambda old, new: np.testing.assert_allclose(new, old, atol=1e-6), states[0], state)


@pytest.mark.parametrize("dialect", ["dflash-sliding", "deepspec-rnn"])
def test_shared_pages(heads, dialect):
    """A request that starts with another's full pages drafts as if it had observed their tokens."""
    driven = Driven(heads(dialect), seed=3)
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


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_shape(tmp_path_factory, data):
    """Sizes of heads, texts and trees."""
    dialect = data.draw(st.sampled_from([*DIALECTS]))
    groups, kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    sizes = {"layers": data.draw(st.integers(1, 3)), "kv_heads": kv_heads, "heads": groups * kv_heads}
    if "windows" in DIALECTS[dialect].spec or "causal" in DIALECTS[dialect].spec:
        sizes["layers"] = 2
    features = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)))
    sizes |= {"head_dim": 2 * data.draw(st.integers(1, 5)), "inner": 8 * data.draw(st.integers(1, 4))}
    head = Loaded.__new__(Loaded)
    folder = tmp_path_factory.mktemp("shapes")
    head.saved = save_block(folder, dialect, features=features, seed=data.draw(st.integers(0, 99)), **sizes)
    spec = head.saved.spec
    if len(spec.windows) != spec.layers:
        every = {"windows": (None,) * spec.layers, "causal": (False,) * spec.layers}
        head.saved = head.saved._replace(spec=replace(spec, **every))
    head.config, head.params = load_head(str(folder), target().target.config, kind="block", progress=False)
    driven = Driven(head, seed=data.draw(st.integers(0, 99)))
    driven.feed(data.draw(st.lists(st.integers(0, 12), min_size=ROWS, max_size=ROWS)), width=16)
    driven.feed(data.draw(st.lists(st.integers(0, 12), min_size=ROWS, max_size=ROWS)), width=16)
    steps, topk = data.draw(st.integers(1, head.drafts)), data.draw(st.integers(1, 4))
    most = topk + (steps - 1) * topk**2
    check(driven, TreeShape(steps, topk, steps + 1 if topk == 1 else data.draw(st.integers(2, 1 + min(most, 30)))))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1), st.data())
def test_best_prefixes(depth, width, seed, data):
    """The nodes are those of a heap, which appends the best prefix until the tree is full."""
    width, rng = min(width, 9), np.random.default_rng(seed)
    nodes = data.draw(st.integers(2, 1 + min(sum(width**d for d in range(1, depth + 1)), 40)))
    logits = np.sort(rng.normal(0, 2, (2, depth, 9)), axis=2)[:, :, ::-1]
    log_probs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    ids = rng.permuted(np.tile(np.arange(50), (2, depth, 1)), axis=2)[:, :, :9]
    chosen = jnp.asarray(np.int32(ids[:, :, :width])), jnp.asarray(np.float32(log_probs[:, :, :width]))
    tree = jax.tree.map(np.asarray, best_prefixes(jnp.asarray([3, 4], jnp.int32), *chosen, nodes))
    assert tree.tokens.shape == (2, nodes) and tree.valid.all()
    for row in range(2):

        def following(path, row=row):
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
    drafter = make_drafter(Block(), target=toy.target, head=config)
    assert (drafter.width, drafter.depth) == ((BLOCK + 1, BLOCK) if from_anchor else (BLOCK, BLOCK - 1))
    done = Runner(toy, drafter, rows=1, draft=params).generate([([3, 7, 7], Sampling(max_tokens=21))])[0]
    assert done.tokens == [7] * 21
    assert set(done.emitted) == ({1} if from_anchor else {BLOCK})


def test_sizes_are_refused(heads):
    config, model = heads("dflash").config, target().target
    with pytest.raises(ParameterError, match="block is 6, and the head was trained on blocks of 5 slots"):
        make_drafter(Block(block=6), target=model, head=config)
    with pytest.raises(ParameterError, match="which draft 4 tokens; give at most 4 steps, or 5 draft tokens"):
        make_drafter(Block(nodes=6), target=model, head=config)
    with pytest.raises(ParameterError, match="a block has 3 slots, which draft 2 tokens"):
        make_drafter(Block(nodes=5, block=3), target=model, head=config)
    with pytest.raises(ValueError, match="got a head of kind 'block'"):
        make_drafter("EAGLE3", target=model, head=config)
    drafter = make_drafter(Block(topk=4, nodes=16), target=model, head=config)
    assert (drafter.width, drafter.depth, drafter.topk, drafter.passes) == (16, 4, 4, 1)
    smaller = drafter.within(4)
    assert (smaller.width, smaller.depth) == (4, 3)
    assert make_drafter("dspark", target=model, head=config).width == 5
