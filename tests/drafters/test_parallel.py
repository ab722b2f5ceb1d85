"""Parallel drafts against the oracle: P-EAGLE in every published dialect, and PARD draft models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from block_oracle import best_paths, check_paths, paths_of
from driven import Driven
from eagle_oracle import ERROR, TRACED, log_softmax, start
from oracle import Sampling, noise
from parallel_oracle import Head, Spec
from tiny_heads import PARALLEL, save_head
from toy_models import Runner, sampling_rows, tiny_llama

from specjax.checkpoint import CheckpointError, describe_head, load_head, model_config
from specjax.config import HeadConfig
from specjax.drafters import (
    Eagle3,
    Standalone,
    StandaloneParams,
    TreeShape,
    eagle_drafter,
    make_speculation,
    standalone_drafter,
)
from specjax.drafters.parallel import ParallelState
from specjax.limits import ParameterError
from specjax.models.draft_head import draft_head
from specjax.step import StepConfig

ROWS, SLOTS = 3, 5
MASKS = {
    "peagle-speculators": 28, "peagle-speculators-deep": 28, "peagle-amazon": 30, "peagle-specforge": 29,
    "peagle-automodel": 27,
}  # fmt: skip


@functools.cache
def target():
    return tiny_llama(3, num_layers=7)


class Loaded:
    def __init__(self, folder, dialect: str):
        self.raw = save_head(folder, "eagle3", dialect=dialect, dtype="float32", seed=len(dialect))
        self.config, self.params = load_head(str(folder), target().target.config, kind="eagle3", progress=False)
        assert describe_head(str(folder), target().target.config, kind="eagle3") == self.config
        theta = 500000.0 if "speculators" in dialect else 10000.0
        self.spec = Spec(
            PARALLEL[dialect], MASKS[dialect], theta, norm_before_residual=dialect == "peagle-speculators",
            windows=(4, None, 4) if dialect.endswith("deep") else (None,) * 4,
        )  # fmt: skip
        self.oracle = Head(self.raw, self.spec, self.raw["embed_tokens.weight"])
        words = len(self.raw["lm_head.weight"])
        self.ids = np.arange(words) + self.raw.get("d2t", np.zeros(words, int))


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """heads(dialect) -> `Loaded`."""
    folder = tmp_path_factory.mktemp("parallel")
    return functools.cache(lambda dialect: Loaded(folder / dialect, dialect))


make = partial(eagle_drafter, slots=SLOTS)


class Drafts(Driven):
    """A P-EAGLE head, with the oracle's outputs for the same texts."""

    def __init__(self, head: Loaded, seed: int = 0):
        self.head = head
        super().__init__(make, target(), head.config, head.params, seed=seed)

    @functools.cached_property
    def model(self):
        return draft_head(self.head.config, target().target)

    def block(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        n = self.done[row]
        return self.head.oracle.block(self.features[row, :n], self.tokens[row, 1 : n + 1].tolist(), SLOTS)


def check(driven: Drafts, shape: TreeShape, requests: Sequence[Sampling] = (Sampling(),) * (ROWS + 1)) -> int:
    """Compares the trees with the oracle's. Returns the number of rows whose trees are not near a tie."""
    context, compared = driven.context()._replace(sampling=sampling_rows(requests, target().vocab)), 0
    tree = driven.trees(shape, context)
    for row, request in enumerate(requests[:ROWS]):
        if not (n := int(driven.done[row])):
            continue
        ids, logits = driven.head.ids, driven.block(row)[1]

        def log_probs(path, request=request, n=n, ids=ids, logits=logits):
            drawn = noise(request.seed, n + len(path) + 1, target().vocab)[ids] if request.temperature else 0.0
            return log_softmax(log_softmax(logits[len(path)]) + request.temperature * drawn)

        root = int(driven.tokens[row, n])
        compared += check_paths(tree, row, log_probs, root, shape, ids, grown=shape.topk == 1)
    return compared


@pytest.mark.parametrize("dialect", PARALLEL)
def test_trees(heads, dialect):
    """Chains and best prefixes, of texts below, at and above the window, observed in pieces, to the pages' end."""
    driven, compared = Drafts(heads(dialect), seed=1), 0
    config = driven.head.config
    assert (config.layers, config.mask_token) == (PARALLEL[dialect], MASKS[dialect])
    for lengths in ([1, 2, 3], [3, 1, 2], [4, 0, 1], [20, 18, 17]):
        driven.feed(lengths)
        compared += check(driven, TreeShape(SLOTS, 1, SLOTS + 1)) + check(driven, TreeShape(4, 3, 12))
    assert compared > 18, "of 24"
    requests = [Sampling(temperature=t, seed=seed) for t, seed in ((1.0, 3), (0.0, 4), (0.6, -5), (0.0, 0))]
    assert sum(check(driven, TreeShape(*shape), requests) for shape in ((4, 1, 5), (3, 4, 10))) > 3


@pytest.mark.parametrize("dialect", ["peagle-speculators-deep", "peagle-specforge"])
def test_outputs_and_logits(heads, dialect):
    """One forward of all slots, after observations of several sizes, equals the oracle's slots one after another."""
    driven = Drafts(heads(dialect), seed=4)
    for lengths in ([9, 4, 1], [1, 6, 2]):
        driven.feed(lengths, width=12)
    assert isinstance(driven.state, ParallelState)
    for row in range(ROWS):
        outputs, logits = driven.block(row)
        kept = driven.state.outputs[ROWS - 1 - row][None]
        normed = driven.model._norm(driven.params.draft, "final_norm", kept)
        np.testing.assert_allclose(normed[0], outputs, atol=2e-4)
        own = driven.model.unembed(driven.params.target, driven.params.draft, kept)
        np.testing.assert_allclose(own[0], logits, atol=2e-4)


def test_chunks_of_any_size(heads):
    states = []
    for sizes in ([29], [1] * 29, [4, 16, 9], [13, 3, 13]):
        driven = Drafts(heads("peagle-amazon"), seed=2)
        for size in sizes:
            driven.feed([size] * ROWS, width=32)
        pages = jax.tree.map(lambda leaf, driven=driven: np.asarray(leaf)[driven.table[:-1]], driven.state.cache)
        states.append((pages, np.asarray(driven.state.outputs)[:ROWS]))
    for state in states[1:]:
        jax.tree.map(lambda old, new: np.testing.assert_allclose(new, old, atol=1e-5), states[0], state)


def test_mask_token_option(tmp_path):
    """SpecForge's files have no mask token."""
    nothing = {"dflash_config": None}
    save_head(tmp_path, "eagle3", dialect="peagle-specforge", config=nothing)
    read = partial(load_head, str(tmp_path), target().target.config, kind="eagle3", progress=False)
    with pytest.raises(
        ParameterError, match=r"mask_token is needed for a P-EAGLE head whose config.json has none of: "
    ):
        read()
    with pytest.raises(ParameterError, match="mask_token is 31; it must be a token of the target, from 0 to 30"):
        read(mask_token=31)
    assert read(mask_token=7)[0].mask_token == 7
    save_head(tmp_path, "eagle3", dialect="peagle-specforge", config=nothing | {"pard_token": 4, "ptd_token_id": 5})
    assert read()[0].mask_token == 4, "vLLM's order"
    save_head(tmp_path, "eagle3", dialect="peagle-specforge", tensors={"mask_hidden": None})
    with pytest.raises(CheckpointError, match="it has 4 decoder layers; heads of 1 layer are supported, and P-EAGLE"):
        read()


# PARD


@functools.cache
def pard():
    """A draft model that reads token 9 in the slots after the root, and its logits after a text."""
    toy = tiny_llama(8, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=40)
    on_host, config = jax.tree.map(np.asarray, toy.params), replace(toy.target.config, mask_token=9)
    logits = functools.cache(lambda tokens: oracle.llama_logits(on_host, toy.target.config, tokens))
    return toy.target._replace(config=config), StandaloneParams(toy.params), logits


@pytest.mark.parametrize("shape", [TreeShape(4, 1, 5), TreeShape(4, 3, 10)], ids=str)
def test_pard_trees_of_steps(shape):
    """Each tree from the text and masks alone, greedy and with the target's noise, until texts leave its positions."""
    draft, params, logits = pard()
    drafter = standalone_drafter(target().target, draft, shape, slots=6)
    runner = Runner(target(), drafter, rows=2, draft=params, config=StepConfig(drafter.width, trace=True), page_size=3)
    texts, compared, beyond = start(runner), 0, 0
    for _ in range(18):
        output = runner.step([True, True])
        for row, text in texts.items():
            n, request, tree = len(text) - 1, TRACED[row][1], output.trace.tree
            if n + shape.steps > draft.config.max_positions:
                beyond += tree.valid[row].sum() == 1
            elif output.emitted[row]:
                slots = logits((*text, *[9] * (shape.steps - 1)))[n:]

                def log_probs(path, slots=slots, request=request, n=n):
                    drawn = noise(request.seed, n + len(path) + 1, target().vocab)
                    return log_softmax(slots[len(path)] + request.temperature * drawn)

                chosen, gap = best_paths(
                    log_probs, shape.steps, shape.topk, shape.nodes - 1, list(range(target().vocab))
                )
                if gap > ERROR:
                    drafted = paths_of(tree, row)
                    assert drafted.keys() == {(), *chosen}
                    np.testing.assert_allclose([drafted[path] for path in chosen], [*chosen.values()], atol=ERROR)
                    compared += 1
            text += output.tokens[row, : output.emitted[row]].tolist()
    assert compared > 15


def test_pard_options():
    draft, _, _ = pard()
    made = make_speculation("PARD", target=target().target, model=draft)
    assert (made.drafter.width, made.passes, made.costly_observe) == (13, 1, True) and made.note.endswith("one forward")
    assert make_speculation(Standalone(nodes=6, topk=2), target=target().target, model=draft).drafter.width == 6
    plain = make_speculation(Standalone(parallel=False), target=target().target, model=draft)
    assert (plain.drafter.width, plain.passes, plain.costly_observe) == (4, None, True)


def test_pard_config():
    llama = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2,
    }  # fmt: skip
    assert model_config(llama | {"spd_type": "pard", "pard_token": 39}).mask_token == 39
    assert model_config(llama | {"pard_token": None}).mask_token is None
    for token in (40, -1, "39", True):
        with pytest.raises(CheckpointError, match=r"pard_token is .*; a token id from 0 to 39 is needed"):
            model_config(llama | {"pard_token": token})
    for keys in ({"spd_type": "pard2"}, {"pard2": True}):
        with pytest.raises(CheckpointError, match=r"spd_type is 'pard2'; supported: pard .PARD-2 models read"):
            model_config(llama | {"pard_token": 1, **keys})


def test_speculation(heads, caplog):
    def speculation(dialect: str, **options: Any):
        head: HeadConfig = heads(dialect).config
        return make_speculation(Eagle3(**options), target=target().target, head=head)

    shallow, deep = speculation("peagle-speculators"), speculation("peagle-specforge")
    assert (shallow.drafter.width, deep.drafter.width) == (7, 8), "6 tokens of training; 7 if the file states none"
    assert (shallow.costly_observe, deep.costly_observe) == (False, True)
    assert shallow.passes == deep.passes == 1
    tree = speculation("peagle-automodel", topk=3, nodes=12)
    assert (tree.drafter.width, tree.drafter.depth, tree.within(4).width) == (12, 5, 4)
    assert not caplog.records
    speculation("peagle-automodel", steps=6)
    assert "6 drafts in one forward, of a head that was trained on 5" in caplog.text
