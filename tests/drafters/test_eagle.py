"""The EAGLE drafter against the oracle: every dialect, any events, any tree; the whole step."""

import functools
import json
from typing import Any

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driven import Driven
from eagle_oracle import HeadSpec, check_steps, draft_tree, llama_features, start
from family_helpers import load_family, save_family
from tiny_heads import DIALECTS, OF_DEEPSPEC, save_head
from toy_models import Runner, Toy, tiny_llama

from specjax.checkpoint import describe_head, load_head
from specjax.drafters import TreeShape, eagle_drafter
from specjax.models.draft_head import with_token_map
from specjax.step import StepConfig

SHAPES = [(1, 1, 2), (4, 1, 5), (3, 2, 6), (5, 8, 32), (2, 16, 9)]
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
        norm_output=config.norm_output,
        window=described.get("sliding_window"),
    )
    return raw, config, params, spec


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """heads(dialect) -> see `saved`."""
    return functools.partial(saved, folder=tmp_path_factory.mktemp("heads"))


class Head(Driven):
    """A saved head, with the oracle's trees for the same texts."""

    def __init__(self, toy, saved, token_map=None, **options):
        self.raw, config, params, self.spec = saved
        self.token_map, self.ends, self.cap = token_map, None, None
        super().__init__(eagle_drafter, toy, config, params, **options)

    def check(self, shape) -> int:
        return self.compare(TreeShape(*shape), functools.partial(self.expected, shape))

    def expected(self, shape, row: int) -> eagle_oracle.DraftTree:
        n, params = self.done[row], self.toy.params
        own = self.spec.kind == "eagle3" and "embed_tokens.weight" in self.raw
        steps, topk, width = shape
        embedding = np.asarray(self.raw["embed_tokens.weight"] if own else params["embed"])
        embedding, head = self.ends or (embedding, np.asarray(params["head"]).T)
        return draft_tree(
            self.raw,
            self.spec,
            self.tokens[row, :n].tolist(),
            int(self.tokens[row, n]),
            self.features[row, :n],
            embedding=embedding,
            head=head,
            cap=self.cap,
            steps=steps,
            topk=topk,
            width=width,
            token_map=self.token_map,
        )


EVENTS = [((7, 1, 4), 8), ((1, 0, 3), 8), ((3, 2, 0), 8), ((2, 8, 6), 8)]
"""Tokens to observe of each row, and the width of the block."""

REPEATED = {
    "eagle-nobias", "eagle-qwen2", "eagle-speculators", "eagle3-model-prefix", "eagle3-norm-before-residual",
    "eagle3-speculators", "eagle3.1-automodel", "eagle3.1-tensorrt", "mtp", "mtp-nobias",
}  # fmt: skip
"""Dialects whose differences other cases cover."""


@pytest.mark.parametrize(
    "dialect", [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in DIALECTS]
)
def test_dialects(heads, dialect):
    driven, clear = Head(target(), heads(dialect)), 0
    for lengths, width in EVENTS:
        driven.feed(lengths, width)
        clear += driven.check((3, 4, 9))
    assert clear >= 8, "of 12"


@functools.cache
def gemma(folder) -> Toy:
    """A Gemma 4 of seven layers, whose embedding is scaled by 4, and whose logits have a cap of 8."""
    changes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 7, "vocab_size": 31}
    changes["layer_types"] = ["sliding_attention"] * 6 + ["full_attention"]
    save_family(folder / "gemma", "gemma4", **changes)
    return load_family(folder / "gemma", "gemma4").toy


@pytest.mark.parametrize("dialect", OF_DEEPSPEC)
def test_deepspec_heads(tmp_path, dialect):
    """For a Gemma target with its scaled embedding and capped logits. Copies of its ends are not read."""
    toy = gemma(tmp_path)
    copies = {name: np.full((31, 16), np.nan, np.float32) for name in ("embed_tokens.weight", "lm_head.weight")}
    raw = save_head(tmp_path / "head", "eagle3", dialect=dialect, tensors=copies, dtype="float32")
    config, params = load_head(str(tmp_path / "head"), toy.target.config, kind="eagle3", progress=False)
    assert describe_head(str(tmp_path / "head"), toy.target.config, kind="eagle3") == config
    assert (config.aux_layers, config.own_head, config.own_embedding, config.input_scale) == (
        (1, 3, 4),
        False,
        False,
        4,
    )
    raw = {name: tensor for name, tensor in raw.items() if name not in copies}
    spec = HeadSpec("eagle3", 4, 8, 1e-5, 10000.0, gemma="gemma" in dialect)
    driven, clear = Head(toy, (raw, config, params, spec)), 0
    embedding = np.asarray(toy.params["embed"])
    driven.ends, driven.cap = (embedding * 4, embedding), 8.0
    for lengths, width in EVENTS:
        driven.feed(lengths, width)
        clear += driven.check((3, 4, 9))
    assert clear >= 7, "of 12"
    (tmp_path / "head" / "config.json").write_text(
        (tmp_path / "head" / "config.json").read_text().replace('"target_layer_ids": [1,', '"target_layer_ids": [0,')
    )
    assert describe_head(str(tmp_path / "head"), toy.target.config, kind="eagle3").aux_layers == (0, 3, 4)


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
    driven = Head(target(), heads(dialect), page_size=page_size, pages=24 // page_size + 1)
    driven.feed((6, 1, 5), 8)
    driven.feed((1, 2, 0), 3)
    assert driven.check(shape) >= 1


@pytest.mark.parametrize("size", [3, 17])
def test_token_map(heads, size):
    """FR-Spec: the target's output layer has these rows only, in this order."""
    raw, config, params, spec = heads("eagle")
    ids = np.random.default_rng(size).permutation(31)[:size].astype(np.int32)
    config, params = with_token_map(config, params, target().target, target().params, ids)
    driven, shape = Head(target(), (raw, config, params, spec), ids.tolist()), (3, 4, 9)
    driven.feed((6, 1, 5), 8)
    assert driven.check(shape) == 3
    assert set(driven.trees(TreeShape(*shape)).tokens[:, 1:].ravel().tolist()) <= {*ids.tolist(), -1}
    assert params["head"].shape == (16, size) and params["head"].dtype == jnp.float32


# Golden trees.


# The whole step: what the head sees of a real target.


@pytest.mark.parametrize(
    ("dialect", "shape"), [("eagle-qwen2", (3, 1, 4)), ("eagle3.1-sliding", (3, 3, 8)), ("mtp", (3, 3, 8))]
)
def test_trees_of_steps_equal_the_oracle(heads, dialect, shape):
    """Features, shift, positions and commits: each step's trees equal those computed from the text alone."""
    raw, config, params, spec = heads(dialect)
    toy = target() if spec.kind == "eagle3" else tiny_llama(3)  # the features of one layer need no more layers
    # Without coupled noise, which tests/drafters/test_standalone_draft.py compares with an oracle.
    drafter = eagle_drafter(toy.target, config, TreeShape(*shape), coupling="none")
    step = StepConfig(nodes=drafter.width, trace=True)
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
