"""Engines of a model with gated delta nets: prefixes that go on from snapshots, several rows, retraction, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import NGRAM, check_idle, check_plain, check_texts, drain, make_engine
from family_helpers import load_family, save_family
from toy_models import Toy

from specjax.drafters import TreeShape, standalone_drafter
from specjax.engine import Completion, Engine, SamplingParams
from specjax.serve.control import snapshot_state

# Engines with equal numbers of snapshots share their programs.
VOCABULARY = 40
RNG = np.random.default_rng(0)
BASE = [int(token) for token in RNG.integers(3, VOCABULARY, 45)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Toy:
    folder = save_family(tmp_path_factory.mktemp("recurrent"), "qwen3_5", vocab_size=VOCABULARY)
    return load_family(folder, "qwen3_5").toy


def ask(engine: Engine, model: Toy, prompt: list[int], **fields: Any) -> Completion:
    """One request alone; its text is that of plain decoding."""
    params = SamplingParams(max_new_tokens=10, **fields)
    engine.add(prompt, params)
    (done,) = drain(engine).values()
    check_plain(model, prompt, params, done)
    check_idle(engine)
    return done


def test_prefixes_go_on_from_snapshots(model):
    """Pages of 4 tokens and chunks of 8: snapshots lie at 8, 16, ..., 40 and at 44, the last full page."""
    engine = make_engine(model, NGRAM, state_snapshots=16)
    other = [*BASE[:30], *BASE[:9]]
    assert ask(engine, model, BASE).cached_tokens == 0
    assert ask(engine, model, BASE, temperature=1.0, seed=3).cached_tokens == 44
    assert ask(engine, model, [*BASE, 5, 6], temperature=0.7, seed=4).cached_tokens == 44
    assert ask(engine, model, BASE[:41]).cached_tokens == 40
    assert ask(engine, model, other).cached_tokens == 24, "28 tokens are in pages, and the last snapshot is at 24"
    assert ask(engine, model, [*BASE[:30], 3, 4, 5, 6]).cached_tokens == 28, "where two texts have parted is a snapshot"
    assert ask(engine, model, other, temperature=1.0, seed=5).cached_tokens == 36
    state = snapshot_state(engine)
    # At 8, 16, 24, 32, 40 and 44 of BASE, 28 and 36 of `other`, 32 of the text before it.
    assert state is not None and (state["total"], state["held"]) == (16, 9)
    row = 2 * 2 * 8 * 12 * 4 + 3 * 2 * (2 * 8 + 2 * 12) * 4  # S of 4 heads, and 3 inputs of the convolution
    assert state["bytes"] == 16 * row


def test_one_snapshot(model):
    engine = make_engine(model, NGRAM, state_snapshots=1)
    other = [*BASE[:30], *BASE[:9]]
    prompts = [BASE, BASE, [*BASE, 7], other, other]
    found = [
        ask(engine, model, prompt, temperature=float(i % 2), seed=i).cached_tokens for i, prompt in enumerate(prompts)
    ]
    assert found == [0, 44, 44, 0, 36]


def test_a_running_request_shares_its_snapshots(model):
    """The second request computes a common prefix again, whose state is there for the third before it ends."""
    engine = make_engine(model, NGRAM, state_snapshots=16)
    ask(engine, model, BASE)
    prompts = [[*BASE[:30], 3, 4, 5, 6, 7], [*BASE[:30], 9, 8, 7]]
    params = SamplingParams(max_new_tokens=40)
    first = engine.add(prompts[0], params)
    while not first.output.tokens:
        engine.step()
    second = engine.add(prompts[1], params)
    done = drain(engine)
    assert (first.output.cached, second.output.cached) == (24, 28)
    for prompt, sequence in zip(prompts, (first, second), strict=True):
        check_plain(model, prompt, params, done[sequence.id])
    check_idle(engine)


@pytest.mark.parametrize("snapshots", [1, 16])
def test_rows_retraction_and_common_prefixes(model, snapshots):
    """Four rows, each retracted now and then; a row's state is zero or a snapshot when its next request begins."""
    engine = make_engine(model, NGRAM, state_snapshots=snapshots, retract_every=3)
    prompts = [BASE[:20], BASE[:33], [*BASE[:13], *BASE[5:22]], BASE[3:9], [5], BASE, BASE[:33], [*BASE[:20], 8]]
    params = [SamplingParams(max_new_tokens=12, temperature=float(i % 2), seed=i) for i in range(len(prompts))]
    check_texts(engine, model, prompts, params)
    assert engine.scheduler.retractions > 3
    assert engine.counters.cached_tokens > 0


def test_standalone_draft_is_refused(model):
    with pytest.raises(ValueError, match="STANDALONE cannot draft with a model of the family qwen3_next"):
        standalone_drafter(model.target, model.target, TreeShape(2, 1, 3))
