"""Speculation never changes a text: drafters x families x sampling x batch sizes x grammars, against plain decoding.

A case is a drafter and a family; batch sizes, grammars and overlapped steps alternate between cases, so that each
combination of their values occurs. The table model has pages of one token, the others of four.
Every case runs all kinds of sampling. The oracle decodes without drafts, from transformers' logits or from a formula.
Texts are longer than the families' windows, so that paths cross the edge of a window.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import engine_helpers
import jax
import numpy as np
import pytest
from distil import distilled, pair_model
from draft_helpers import right_often
from engine_helpers import (
    END,
    NGRAM,
    VOCABULARY,
    byte_ids,
    check_counts,
    check_idle,
    check_plain,
    make_engine,
    warm_grammars,
)
from family_helpers import FAMILIES, MTP_STYLES, RECURRENT, WINDOW, load_family, save_family
from grammar_helpers import GRAMMARS, check_masked, follows
from test_toy_drafter import absurd_trees, random_trees
from tiny_assistants import save_assistant
from tiny_blocks import save_block
from toy_models import Toy

from specjax.checkpoint import load_head, load_mtp, model_config, mtp_config, resolve
from specjax.config import AssistantConfig, BlockConfig
from specjax.drafters import (
    Drafter,
    DraftOptions,
    Speculation,
    StandaloneParams,
    TreeShape,
    assistant_drafter,
    block_drafter,
    eagle_drafter,
    mtp_drafter,
    standalone_drafter,
)
from specjax.engine import SamplingParams
from specjax.models.draft_head import init_head_params
from specjax.train.head import head_config
from specjax.train.options import DraftSettings

FEW = 40  # tokens of a vocabulary that is small enough for random heads to be right now and then
CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(3, 2, 11)  # the tree holds all candidates: paths of all lengths
DEEP = TreeShape(5, 2, 19)  # paths are longer than a window
GEMMA_4 = ("gemma4", "gemma4_shared", "gemma4_experts")
LETTERS = byte_ids(b"aeinorst")  # tokens that the table model often writes
JSON = byte_ids(b'{"ok": true, "n": 1, "color": "red"}abcdex(,)12')

SAMPLING: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([7, 30, 12, 5] * 6, {}),
    "temperature": (list(range(3, 14)), {"temperature": 1.0, "seed": 3}),
    "top-k": ([21], {"temperature": 0.7, "seed": -1, "top_k": 9}),
    "top-p, min-p": ([11], {"temperature": 1.3, "seed": 2**63 - 1, "top_p": 0.8, "min_p": 0.02}),
    "penalties": ([9, 8, 7] * 5, {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}),
    "logit bias, sampled penalties": (
        [7] * 20, {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.3, "logit_bias": {"5": 2.0, "9": -4.0}},
    ),
    "stop tokens": ([30, 31, 30, 31], {"stop_token_ids": [17, 23], "min_new_tokens": 8}),
    "no drafts": ([3, 3], {"speculate": False}),
    "draft limit": ([12, 13] * 4, {"draft_limit": 1}),
}  # fmt: skip
WITH_GRAMMARS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2},
    {"speculate": False},
]
REQUESTS = [(prompt, SamplingParams(max_new_tokens=24, **fields)) for prompt, fields in SAMPLING.values()]
CONSTRAINED = [
    ([20 + i], SamplingParams(max_new_tokens=32, grammar=grammar, **fields))
    for i, (grammar, fields) in enumerate(zip(GRAMMARS.values(), WITH_GRAMMARS, strict=True))
]


class Model(NamedTuple):
    family: str
    toy: Toy
    folder: str = ""


Drafting = tuple[Drafter | Speculation | DraftOptions | str, Any]
"""A drafter, and its parameters."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str, int], Model]:
    """(family, vocabulary) -> a model, saved and loaded once."""
    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def load(family: str, vocabulary: int) -> Model:
        if family not in FAMILIES:
            return Model(family, pair_model() if family == "pairs" else engine_helpers.toy())
        folder, mtp_layers = root / f"{family}-{vocabulary}", 2 if family in MTP_STYLES else 0
        save_family(folder, family, vocab_size=vocabulary, mtp_layers=mtp_layers)
        return Model(family, load_family(folder, family).toy, str(folder))

    return load


def with_head(algorithm: str, shape: TreeShape) -> Callable[..., Drafting]:
    def make(model: Model, models: Any) -> Drafting:
        target = model.toy.target
        if model.family == "pairs":
            config, params = distilled(algorithm.lower())
        else:  # as training would make it, with weights large enough for drafts that vary
            layers = ("1", "0") if algorithm == "EAGLE3" else ()  # layer 0 must not be first
            config = head_config(DraftSettings(draft=algorithm, aux_layers=layers), target.config)
            params = dict(init_head_params(config, target, jax.random.key(1)))
            params = {name: leaf * 5 if leaf.ndim > 1 else leaf for name, leaf in params.items()}
        return eagle_drafter(target, config, shape), params

    return make


def with_peagle(layers: int, shape: TreeShape) -> Callable[..., Drafting]:
    """A P-EAGLE head that reads the target's first layer; token 1 is in the slots after the root."""

    def make(model: Model, models: Any) -> Drafting:
        target = model.toy.target
        config = head_config(DraftSettings(draft="EAGLE3", aux_layers=("1", "0")), target.config)
        config = replace(config, layers=layers, windows=(None, 7, None)[:layers], mask_token=1)
        params = dict(init_head_params(config, target, jax.random.key(1)))
        params = jax.tree.map(lambda leaf: leaf * 5 if leaf.ndim > 1 else leaf, params)
        return Speculation(eagle_drafter(target, config, shape), costly_observe=layers > 1), params

    return make


def with_block(dialect: str, shape: TreeShape) -> Callable[..., Drafting]:
    """A block head in files of a dialect, with the target's first layer as feature."""

    def make(model: Model, models: Any) -> Drafting:
        target, folder = model.toy.target, Path(tempfile.mkdtemp())
        width, vocab = target.config.hidden_size, target.config.vocab_size
        depth = {"num_target_layers": target.config.num_layers, "sliding_window": WINDOW}
        save_block(folder, dialect, width=width, vocab=vocab, features=(0,), config=depth, scale=2.0)
        config, params = load_head(str(folder), target.config, kind="block", progress=False)
        shutil.rmtree(folder)
        assert isinstance(config, BlockConfig)
        return block_drafter(target, config, shape), params

    return make


def with_assistant(shape: TreeShape, best: int = 0) -> Callable[..., Drafting]:
    """An assistant of the model, saved by transformers; with `best`, of some clusters of tokens."""

    def make(model: Model, models: Any) -> Drafting:
        target, folder, vocab = model.toy.target, Path(tempfile.mkdtemp()), model.toy.vocab
        clusters = max(count for count in range(1, 11) if vocab % count == 0) if best else 0
        save_assistant(folder, Path(model.folder), centroids=clusters, best=best)
        config, params = load_head(str(folder), target.config, kind="assistant", progress=False)
        shutil.rmtree(folder)
        assert isinstance(config, AssistantConfig)
        return assistant_drafter(target, config, shape), params

    return make


def with_layers(model: Model, models: Any) -> Drafting:
    """The MTP layers of the model's own checkpoint."""
    files = resolve(model.folder, progress=False)
    config = model_config(files.config, dtype="float32")
    layers = mtp_config(files, config)
    return mtp_drafter(model.toy.target, layers, TREE), load_mtp(files, config, layers, progress=False)


def with_model(family: str | None) -> Callable[..., Drafting]:
    """A draft model of another family; None: the target itself."""

    def make(model: Model, models: Any) -> Drafting:
        draft, shape = (models(family, model.toy.vocab).toy, TREE) if family else (model.toy, DEEP)
        drafter = standalone_drafter(model.toy.target, draft.target, shape)
        return Speculation(drafter, costly_observe=True), StandaloneParams(draft.params)

    return make


def with_pard(model: Model, models: Any) -> Drafting:
    """A draft model that reads token 1 in the slots after the root."""
    draft = models("qwen2", model.toy.vocab).toy
    masked = draft.target._replace(config=replace(draft.target.config, mask_token=1))
    drafter = standalone_drafter(model.toy.target, masked, TreeShape(5, 2, 12))
    return Speculation(drafter, costly_observe=True), StandaloneParams(draft.params)


def absurd(topk: int | None) -> Callable[..., Drafting]:
    def make(model: Model, models: Any) -> Drafting:
        likely = LETTERS if model.family == "table" else []
        return absurd_trees(model.toy.vocab, likely, topk=topk), jax.numpy.uint32(7)

    return make


def mapped(model: Model, models: Any) -> Drafting:
    """A head that proposes tokens of a map."""
    _, params, make = right_often("eagle map")
    return make(TREE), params


DRAFTERS: dict[str, tuple[Callable[..., Drafting], tuple[str, ...]]] = {
    "NONE": (lambda model, models: ("NONE", None), ("table", *FAMILIES)),
    "random trees": (lambda model, models: (random_trees(JSON), None), ("table",)),
    "absurd trees": (absurd(None), ("table", *FAMILIES)),
    "NGRAM": (lambda model, models: (NGRAM, None), ("table", *FAMILIES)),
    "EAGLE chain": (with_head("EAGLE", CHAIN), ("pairs", *FAMILIES)),
    "EAGLE tree": (with_head("EAGLE", TREE), ("pairs", *FAMILIES)),
    "EAGLE3 tree": (with_head("EAGLE3", TREE), ("pairs", *FAMILIES)),
    "P-EAGLE chain": (with_peagle(1, CHAIN), tuple(FAMILIES)),
    "P-EAGLE tree": (with_peagle(3, TreeShape(4, 3, 16)), tuple(FAMILIES)),
    "MTP head": (with_head("MTP", TREE), ("pairs",)),
    "MTP layers": (with_layers, tuple(MTP_STYLES)),
    "DFLASH chain": (with_block("dflash-sliding", TreeShape(4, 1, 5)), tuple(FAMILIES)),
    "DFLASH tree": (with_block("speculators-dflash", TreeShape(4, 3, 16)), tuple(FAMILIES)),
    "DSPARK tree": (with_block("deepspec-rnn", TreeShape(5, 2, 15)), tuple(FAMILIES)),
    "DFLASH2 tree": (with_block("dflash2", TreeShape(4, 2, 12)), tuple(FAMILIES)),
    "STANDALONE itself": (with_model(None), tuple(family for family in FAMILIES if family not in RECURRENT)),
    "STANDALONE gemma3": (with_model("gemma3"), tuple(FAMILIES)),
    "PARD tree": (with_pard, tuple(FAMILIES)),
    "absurd chains": (absurd(1), ("table",)),
    "EAGLE token map": (mapped, ("pairs",)),
    "ASSISTANT chain": (with_assistant(CHAIN), GEMMA_4),
    "ASSISTANT tree": (with_assistant(TREE, best=1), GEMMA_4),
}
"""How each drafter is made, and the families that it drafts for."""


class Case(NamedTuple):
    drafter: str
    family: str
    batch: int
    grammar: bool
    overlap: bool


def cases() -> list[Case]:
    families = ("table", "pairs", *FAMILIES)
    return [
        Case(drafter, family, (1, 4)[(i + j) % 2], family != "pairs" and (i + j) % 4 < 2, (i + 2 * j) % 3 > 0)
        for i, (drafter, (_, served)) in enumerate(DRAFTERS.items())
        for j, family in enumerate(families)
        if family in served
    ]


def gemma_4_cases() -> list[Case]:
    """Each algorithm with each kind of Gemma 4 in batches of 4, with grammars and overlapped steps."""
    algorithms = ("NONE", "NGRAM", "ASSISTANT tree", "EAGLE3 tree", "DFLASH tree", "STANDALONE itself")
    every = {Case(drafter, family, 4, True, True) for drafter in algorithms for family in GEMMA_4}
    return sorted(every.difference(cases()))


QUICK = {
    ("NONE", "qwen3_moe"), ("random trees", "table"), ("absurd trees", "qwen2"), ("absurd trees", "deepseek_v3"),
    ("NGRAM", "phi3"), ("EAGLE chain", "gemma2"), ("EAGLE tree", "qwen3_next"), ("EAGLE3 tree", "gemma4_shared"),
    ("MTP head", "pairs"), ("MTP layers", "qwen3"), ("DFLASH chain", "gpt_oss"), ("DFLASH tree", "gemma3"),
    ("DSPARK tree", "llama"), ("DFLASH2 tree", "mimo"), ("STANDALONE itself", "mistral"),
    ("STANDALONE gemma3", "qwen3_5"), ("absurd chains", "table"), ("EAGLE token map", "pairs"),
    ("DFLASH tree", "gemma4"), ("P-EAGLE chain", "qwen3"), ("P-EAGLE tree", "llama"),
    ("PARD tree", "llama"), ("ASSISTANT chain", "gemma4_experts"), ("ASSISTANT tree", "gemma4"),
}  # fmt: skip
"""Each drafter and each family at least once. The other cases are slow tests."""


def test_quick_cases_cover_all_values():
    quick = [case for case in cases() if case[:2] in QUICK]
    assert len(quick) == len(QUICK) <= 24
    assert {case.drafter for case in quick} == {*DRAFTERS}
    assert {case.family for case in quick} == {"table", "pairs", *FAMILIES}
    assert {case[2:] for case in quick} == {*itertools.product((1, 4), (False, True), (False, True))}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case)), marks=() if case[:2] in QUICK else pytest.mark.slow)
        for case in cases()
    ]
    + [pytest.param(case, id="-".join(map(str, case)), marks=pytest.mark.slow) for case in gemma_4_cases()],
)
def test_text_equals_plain_decoding(models, case):
    model = models(case.family, VOCABULARY if case.grammar else FEW)
    drafter, params = DRAFTERS[case.drafter][0](model, models)
    eos = (END,) if case.grammar else ()
    engine = make_engine(
        model.toy, drafter, draft=params, eos=eos, warm=not case.grammar, max_running_requests=case.batch,
        context_length=64, max_total_tokens=64 * case.batch, retract_every=9 if case.batch > 1 else None,
        overlap=case.overlap, page_size=1 if case.family == "table" else 4,
    )  # fmt: skip
    if case.grammar:
        warm_grammars(engine)
    requests = REQUESTS + CONSTRAINED * case.grammar
    completions = engine.generate([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
    for (prompt, sampling), done in zip(requests, completions, strict=True):
        if sampling.grammar is None:
            check_plain(model.toy, prompt, sampling, done, eos)
            check_counts(done)
        else:
            check_masked(model.toy, prompt, sampling, done)
            assert follows(sampling.grammar, done.output_ids, whole=done.finish_reason["type"] == "stop")
        if case.drafter == "NONE" or sampling.speculate is False:
            assert done.spec_accept_length == 1
        assert sampling.draft_limit is None or not any(done.spec_accept_histogram[sampling.draft_limit + 1 :])
    assert case.batch == 1 or engine.scheduler.retractions
    assert engine.counters.cached_tokens or case.batch == 1 or case.family != "table", "retracted requests reuse pages"
    check_idle(engine)
    histogram = np.sum([done.spec_accept_histogram for done in completions], axis=0)
    if case.grammar and case.drafter != "NONE":
        assert any(done.spec_accept_length > 1 for done in completions[len(REQUESTS) :]), "forced tokens are drafted"
    if case.drafter == "STANDALONE itself":
        assert DEEP.depth > WINDOW and histogram[DEEP.depth] > 0
    if case.drafter.startswith("absurd") and case.family == "table":
        assert sum(histogram[1:]) > 0, "some of their nodes are right"
    if case.family == "pairs":
        assert all(histogram > 0), "paths of all lengths are accepted"
