"""Every family with every algorithm writes what transformers' model writes, greedily and with a seed.

Texts are longer than the families' windows, and trees deeper: paths cross a window's edge among committed tokens and
inside the tree. A draft that knows the target has such paths accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import NGRAM, check_idle, check_plain, make_engine
from family_helpers import FAMILIES, WINDOW, Family, load_family, save_family
from specjax_kernels import CAUSAL

from specjax.cache import PoolShape, init_cache
from specjax.config import HeadConfig
from specjax.drafters import Drafter, StandaloneParams, TreeShape, eagle_drafter
from specjax.drafters.standalone import standalone_drafter
from specjax.engine import Completion, SamplingParams
from specjax.models.blocks import Ragged
from specjax.models.draft_head import init_head_params
from specjax.train.head import head_config
from specjax.train.options import DraftSettings

VOCABULARY = 40  # small, so that random heads are right now and then
CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(5, 2, 19)  # the tree has all candidates: paths of all lengths

REQUESTS = [
    ([7, 30, 12, 5] * 6, {}),
    (list(range(3, 14)), {"temperature": 1.0, "seed": 3}),
    ([21], {}),
    ([9, 8, 7] * 5, {"temperature": 0.7, "seed": -1, "top_k": 9, "frequency_penalty": 0.3}),
]
SAMPLING = [SamplingParams(max_new_tokens=24, **fields) for _, fields in REQUESTS]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Callable[[str], Family]:
    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: load_family(save_family(root / name, name, vocab_size=VOCABULARY), name))


def random_head(family: Family, algorithm: str) -> tuple[HeadConfig, Any]:
    """As training would make it, with weights large enough for drafts that vary."""
    wanted = DraftSettings(draft=algorithm, aux_layers=("0", "1") if algorithm == "EAGLE3" else ())
    config = head_config(wanted, family.config)
    params = dict(init_head_params(config, family.toy.target, jax.random.key(1)))
    return config, {name: leaf * 5 if leaf.ndim > 1 else leaf for name, leaf in params.items()}


def with_head(algorithm: str, shape: TreeShape) -> Callable[..., tuple[Drafter, Any]]:
    def make(family: Family, families: Any) -> tuple[Drafter, Any]:
        config, params = random_head(family, algorithm)
        return eagle_drafter(family.toy.target, config, shape), params

    return make


def with_model(name: str | None) -> Callable[..., tuple[Drafter, Any]]:
    """Drafted by another family; None: by the target itself."""

    def make(family: Family, families: Any) -> tuple[Drafter, Any]:
        draft = family if name is None else families(name)
        drafter = standalone_drafter(family.toy.target, draft.toy.target, TREE)
        return drafter, StandaloneParams(draft.toy.params)

    return make


DRAFTS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "NONE": lambda family, families: ("NONE", None),
    "NGRAM": lambda family, families: (NGRAM, None),
    "EAGLE chain": with_head("EAGLE", CHAIN),
    "EAGLE tree": with_head("EAGLE", TREE),
    "EAGLE3 tree": with_head("EAGLE3", TREE),
    "STANDALONE itself": with_model(None),
    "STANDALONE gemma3": with_model("gemma3"),
    "STANDALONE deepseek_v3": with_model("deepseek_v3"),
}
QUICK = {
    *((family, "STANDALONE itself") for family in ("mistral", "gemma2", "deepseek_v3")),
    ("gemma3", "EAGLE3 tree"), ("qwen3_moe", "EAGLE tree"), ("phi3", "NGRAM"),
    ("qwen2", "STANDALONE gemma3"),
}  # fmt: skip
"""Each algorithm, and each part that only some families have, once."""


def run(family: Family, drafter: Any, params: Any) -> list[Completion]:
    engine = make_engine(family.toy, drafter, draft=params, context_length=64, max_total_tokens=256)
    found = engine.generate([prompt for prompt, _ in REQUESTS], SAMPLING)
    check_idle(engine)
    return found


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3_moe", "deepseek_v3"])
def test_rows_without_padding(families, name):
    """Hidden states, features and what is kept of each token are those of the padded block, rows of one token and of
    none among them, behind committed tokens and a window."""
    target, params = families(name).toy.target, families(name).toy.params
    rng = np.random.default_rng(0)
    lengths, width = np.array([3, 0, 7, 1], np.int32), 7
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (4, width)), jnp.int32)
    committed = jnp.asarray([5, -1, 12, 0], jnp.int32)
    empty = init_cache(target.pages, PoolShape(16, 4))
    cache = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape), leaf.dtype), empty)
    table = jnp.asarray(rng.permutation(16).reshape(4, 4), jnp.int32)
    positions = jnp.maximum(committed, 0)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    given = target.embed(params, tokens), positions, CAUSAL, cache, table, committed
    padded = target.forward(params, *given, features=(0, 1))
    found = target.forward(params, *given, features=(0, 1), ragged=Ragged.of(jnp.asarray(lengths), width, 13))
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(padded), strict=True):
        assert leaf.shape == expected.shape
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(leaf[row, :length], expected[row, :length], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        pytest.param(name, draft, marks=() if (name, draft) in QUICK else pytest.mark.slow)
        for name in FAMILIES
        for draft in DRAFTS
    ],
)
def test_no_text_changes(families, name, draft):
    family = families(name)
    found = run(family, *DRAFTS[draft](family, families))
    for (prompt, _), sampling, one in zip(REQUESTS, SAMPLING, found, strict=True):
        check_plain(family.toy, prompt, sampling, one)
    if draft == "STANDALONE itself":
        histogram = np.sum([done.spec_accept_histogram for done in found], axis=0)
        assert TREE.depth > WINDOW and histogram[TREE.depth] > 0, histogram
