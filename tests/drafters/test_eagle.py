"""The EAGLE drafter against the oracle: every dialect, any events, any tree; golden trees; the whole step."""

import functools
import json
from dataclasses import replace

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distil import pair_model, zero_head
from eagle_oracle import ERROR, HeadSpec, check_steps, check_tree, draft_tree, llama_features, start
from tiny_heads import DIALECTS, save_head
from toy_models import Runner, tiny_llama

from specjax.cache import PoolShape
from specjax.checkpoint import load_head
from specjax.config import HeadConfig, RopeConfig
from specjax.drafters import Context, Observation, Params, TreeShape, eagle_drafter
from specjax.models.draft_head import with_token_map
from specjax.sampling import sampling_row
from specjax.step import StepConfig

SHAPES = [(1, 1, 2), (4, 1, 5), (1, 5, 6), (3, 2, 6), (3, 4, 37), (5, 8, 32), (2, 16, 9)]
"""Steps, top-k, draft tokens; the last is wider than the draft vocabularies of 11 tokens."""


@functools.cache
def target():
    """Seven layers, so that there are three auxiliary layers; the features' values make no difference here."""
    return tiny_llama(3, num_layers=7)


@functools.cache
def saved(dialect: str, folder):
    """The dialect's raw tensors, its head as loaded, and its configuration for the oracle."""
    raw = save_head(folder / dialect, DIALECTS[dialect], dialect=dialect, seed=len(dialect))
    config, params = load_head(str(folder / dialect), target().target.config, kind=DIALECTS[dialect], progress=False)
    described = json.loads((folder / dialect / "config.json").read_text())
    layer = described.get("transformer_layer_config", described)
    spec = HeadSpec(
        DIALECTS[dialect],
        num_heads=layer["num_attention_heads"],
        head_dim=8,
        eps=layer["rms_norm_eps"],
        rope_theta=layer.get("rope_theta", 10000.0),
        norm_before_residual=described.get("norm_before_residual", False),
    )
    return raw, config, params, spec


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """heads(dialect) -> see `saved`."""
    return functools.partial(saved, folder=tmp_path_factory.mktemp("heads"))


@functools.cache
def compiled(target, config: HeadConfig, shape: TreeShape):
    """The drafter, and its `propose` compiled once for all heads of one configuration."""
    drafter = eagle_drafter(target, config, shape)
    return drafter, jax.jit(drafter.propose)


@functools.cache
def compiled_observe(target, config: HeadConfig):
    """`observe` does not depend on the tree."""
    return jax.jit(eagle_drafter(target, config, TreeShape(1, 1, 2)).observe)


class Driven:
    """A drafter without a target: random tokens and features, observed in pieces of any length."""

    def __init__(self, toy, config, params, shape, *, rows=3, page_size=4, pages_a_row=8, seed=0):
        self.toy, self.rows, self.rng = toy, rows, np.random.default_rng(seed)
        self.drafter, self.propose = compiled(toy.target, config, TreeShape(*shape))
        self.observe = compiled_observe(toy.target, config)
        self.params = Params(toy.params, params)
        pool = PoolShape(rows * pages_a_row + 2, page_size)
        self.state = self.drafter.init(self.params, rows + 1, pool)
        pages = self.rng.permutation(pool.pages)[: rows * pages_a_row].reshape(rows, pages_a_row)
        self.table = np.concatenate([pages, np.full((1, pages_a_row), pool.pages)]).astype(np.int32)
        length = page_size * pages_a_row
        self.tokens = self.rng.integers(0, toy.vocab, (rows, length + 1))
        self.features = self.rng.normal(0, 1, (rows, length, config.feature_size)).astype(np.float32)
        self.done = np.zeros(rows, int)

    def context(self, active) -> Context:
        """The batch is the rows in reverse, and an empty entry."""
        row = sampling_row(self.toy.vocab)
        sampling = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (self.rows + 1, *leaf.shape)), row)
        n = np.where(active, self.done, 0)[::-1]
        roots = self.tokens[np.arange(self.rows), self.done][::-1]
        return Context(
            slots=jnp.asarray([*range(self.rows)[::-1], self.rows + 5], jnp.int32),
            prefix_length=jnp.asarray([*n, 0], jnp.int32),
            page_table=jnp.asarray(np.concatenate([self.table[:-1][::-1], self.table[-1:]])),
            root=jnp.asarray([*roots, 0], jnp.int32),
            active=jnp.asarray([*active[::-1], False]),
            salt=jnp.zeros(self.rows + 1, jnp.uint32),
            sampling=sampling,
        )

    def feed(self, lengths, width: int) -> None:
        """Observes `lengths[r]` more tokens of each row. The rest of the block is random."""
        lengths = np.asarray(lengths)
        tokens, following = self.rng.integers(-1, self.toy.vocab, (2, self.rows + 1, width))
        features = self.rng.normal(0, 9, (self.rows + 1, width, self.features.shape[2])).astype(np.float32)
        for entry, row in enumerate(reversed(range(self.rows))):
            new = slice(self.done[row], self.done[row] + lengths[row])
            tokens[entry, : lengths[row]] = self.tokens[row, new]
            following[entry, : lengths[row]] = self.tokens[row, new.start + 1 : new.stop + 1]
            features[entry, : lengths[row]] = self.features[row, new]
        seen = Observation(
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(following, jnp.int32),
            jnp.asarray(features),
            jnp.asarray([*lengths[::-1], 0], jnp.int32),
        )
        self.state = self.observe(self.params, self.state, self.context(lengths > 0), seen)
        self.done += lengths

    def trees(self):
        tree, state = self.propose(self.params, self.state, self.context(np.ones(self.rows, bool)))
        assert jax.tree.all(jax.tree.map(lambda old, new: bool(jnp.all(old == new)), self.state, state))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: self.rows][::-1], tree)


def expected_tree(driven: Driven, row: int, raw, spec, shape, token_map=None) -> eagle_oracle.DraftTree:
    n = driven.done[row]
    params = driven.toy.params
    steps, topk, width = shape
    embedding = (
        raw["embed_tokens.weight"] if spec.kind == "eagle3" and "embed_tokens.weight" in raw else params["embed"]
    )
    return draft_tree(
        raw,
        spec,
        driven.tokens[row, :n].tolist(),
        int(driven.tokens[row, n]),
        driven.features[row, :n],
        embedding=np.asarray(embedding),
        head=np.asarray(params["head"]).T,
        steps=steps,
        topk=topk,
        width=width,
        token_map=token_map,
    )


def compare(driven: Driven, raw, spec, shape, token_map=None) -> int:
    """The number of rows whose trees were compared."""
    trees = driven.trees()
    return sum(
        check_tree(trees, row, expected_tree(driven, row, raw, spec, shape, token_map)) for row in range(driven.rows)
    )


EVENTS = [((7, 1, 4), 8), ((1, 0, 3), 8), ((3, 2, 0), 8), ((2, 8, 6), 8)]
"""Tokens to observe of each row, and the width of the block."""

REPEATED = {"eagle-nobias", "eagle3-norm-before-residual", "eagle3-speculators", "mtp-nobias"}
"""Dialects whose differences other cases cover."""


@pytest.mark.parametrize(
    "dialect", [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in DIALECTS]
)
def test_dialects(heads, dialect):
    raw, config, params, spec = heads(dialect)
    shape = (3, 4, 9)
    driven, clear = Driven(target(), config, params, shape), 0
    for lengths, width in EVENTS:
        driven.feed(lengths, width)
        clear += compare(driven, raw, spec, shape)
    assert clear >= 8, "of 12"


# Every shape, dialect and page size, but not all combinations.
@pytest.mark.parametrize(
    ("dialect", "page_size", "shape"),
    [
        pytest.param(*head, shape, id=f"{head[0]}-{head[1]}-{shape}", marks=() if (i + j) % 2 else pytest.mark.slow)
        for j, head in enumerate([("eagle", 1), ("eagle3-norm-before-residual", 16)])
        for i, shape in enumerate(SHAPES)
    ],
)
def test_tree_shapes(heads, dialect, page_size, shape):
    raw, config, params, spec = heads(dialect)
    driven = Driven(target(), config, params, shape, page_size=page_size, pages_a_row=24 // page_size + 1)
    driven.feed((6, 1, 5), 8)
    driven.feed((1, 2, 0), 3)
    assert compare(driven, raw, spec, shape) >= 1


@pytest.mark.parametrize("size", [3, 17])
def test_token_map(heads, size):
    """FR-Spec: the target's output layer has these rows only, in this order."""
    raw, config, params, spec = heads("eagle")
    ids = np.random.default_rng(size).permutation(31)[:size].astype(np.int32)
    config, params = with_token_map(config, params, target().target, target().params, ids)
    shape = (3, 4, 9)
    driven = Driven(target(), config, params, shape)
    driven.feed((6, 1, 5), 8)
    assert compare(driven, raw, spec, shape, token_map=ids.tolist()) == 3
    assert set(driven.trees().tokens[:, 1:].ravel().tolist()) <= {*ids.tolist(), -1}
    assert params["head"].shape == (16, size) and params["head"].dtype == jnp.float32


# Golden trees.


def table_head(log_probs: np.ndarray, ids) -> tuple[HeadConfig, dict, object]:
    """A head whose logits are the table's row of the last token: its output is the embedding's one-hot."""
    if ids is None and log_probs.shape[0] > 3:  # one vocabulary, so that these heads share what they compile
        more = MOST - log_probs.shape[0]
        log_probs = np.pad(log_probs, ((0, more), (0, more)), constant_values=IMPOSSIBLE)
    vocab, draft = log_probs.shape
    toy = pair_model(vocab=vocab)
    width = toy.target.config.hidden_size
    config = HeadConfig(
        "eagle", width, width, 8, 2, 2, 8, 1e-5, RopeConfig(), draft, own_head=True, mapped=ids is not None
    )
    params = zero_head(config, toy.target)
    fc, head = np.zeros((2 * width, width), np.float32), np.zeros((width, draft), np.float32)
    fc[:vocab, :vocab] = np.eye(vocab)
    head[:vocab] = np.maximum(log_probs, IMPOSSIBLE)
    params |= {"fc": jnp.asarray(fc), "head": jnp.asarray(head)}
    if ids is not None:
        params["ids"] = jnp.asarray(ids, jnp.int32)
    return config, params, toy


CASES = [case for case in eagle_oracle.table_cases() if case.width > 1]
IMPOSSIBLE = -1e30
"""Stands for -inf, which times 0 would be NaN. The oracle has no such nodes; the drafter ranks them last."""
MOST = max(case.log_probs.shape[0] for case in CASES)
ALIKE = {"short chain", "even odds", "certain children", "3 2 6", "5 4 8", "mapped"}
"""Cases that resemble others; slow."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in ALIKE else ()) for case in CASES],
)
def test_trees_of_tables(case):
    expected = case.grow()
    config, params, toy = table_head(case.log_probs, case.target_ids)
    driven = Driven(toy, config, params, (case.steps, case.topk, case.width), rows=2, page_size=2)
    driven.tokens[:, 3] = case.root
    driven.feed((3, 3), 4)
    trees = driven.trees()
    for row in range(2):
        live = [node for node in range(case.width) if trees.scores[row, node] > IMPOSSIBLE / 2]
        place = {node: i for i, node in enumerate(live)} | {-1: -1}
        count = expected.size
        assert len(live) == count
        assert trees.tokens[row, live].tolist() == expected.tokens[:count]
        assert [place[node] for node in trees.parents[row, live].tolist()] == expected.parents[:count]
        assert trees.depth[row, live].tolist() == expected.depth[:count]
        np.testing.assert_allclose(trees.scores[row, live], expected.scores[:count], atol=ERROR)


# The whole step: what the head sees of a real target.


@pytest.mark.parametrize(
    ("dialect", "shape"), [("eagle-qwen2", (3, 1, 4)), ("eagle3-speculators", (3, 3, 8)), ("mtp", (3, 3, 8))]
)
def test_trees_of_steps_equal_the_oracle(heads, dialect, shape):
    """Features, shift, positions and commits: each step's trees equal those computed from the text alone."""
    raw, config, params, spec = heads(dialect)
    toy = target() if spec.kind == "eagle3" else tiny_llama(3)  # the features of one layer need no more layers
    # Without coupled noise, which tests/drafters/test_standalone_draft.py compares with an oracle.
    drafter = eagle_drafter(toy.target, config, TreeShape(*shape), coupling="none")
    step = StepConfig(widths=(drafter.width,), trace=True)
    runner = Runner(toy, drafter, rows=2, draft=params, config=step, page_size=3)
    on_host = jax.tree.map(np.asarray, toy.params)

    def expected(row: int, text: list[int]) -> eagle_oracle.DraftTree:
        aux_layers = config.aux_layers if spec.kind == "eagle3" else None
        features = llama_features(on_host, toy.target.config, text[:-1], aux_layers)
        embedding = raw["embed_tokens.weight"] if config.own_embedding else on_host["embed"]
        return draft_tree(
            raw, spec, text[:-1], text[-1], features, embedding=embedding, head=on_host["head"].T,
            steps=shape[0], topk=shape[1], width=shape[2],
        )  # fmt: skip

    assert check_steps(runner, start(runner), expected)[0] >= 6, "of 10"


# Refused heads.


def test_heads_of_other_targets(heads):
    _, config, _, _ = heads("eagle3")
    model, shape = target().target, TreeShape(1, 1, 2)
    for changes, message in {
        "feature_size=32": "features of width 32, the target gives 48",
        "aux_layers=(1, 2, 7)": "output of layer 7, the target has 7 layers",
        "hidden_size=24": "hidden size is 24, the target's, whose embedding or head it uses, is 16",
        "own_head=False": "needs an output matrix of its own",
        "own_head=False, mapped=False": "vocabulary has 11 tokens, the target's 31",
    }.items():
        with pytest.raises(ValueError, match=message):
            eagle_drafter(model, replace(config, **eval(f"dict({changes})")), shape)
