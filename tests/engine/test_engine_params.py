"""Parameters that are replaced in an engine: the steps read the new ones, and nothing that the old ones made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, tokenizer, toy

from specjax import Drafter, Params, SamplingParams, chain
from specjax.train import run
from specjax.train.options import MeasureSettings

MODEL = toy()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LENGTH, DEPTH = 24, 3
PARAMS = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)


def reciter() -> Drafter:
    """Proposes what its parameters, a text of int32 tokens, have at the next positions."""

    def propose(params, state, context):
        at = context.prefix_length[:, None] + 1 + jnp.arange(DEPTH, dtype=jnp.int32)[None, :]
        tokens = params.draft[jnp.minimum(at, len(params.draft) - 1)]
        length = jnp.full_like(context.root, DEPTH)
        return chain(context.root, tokens, length, jnp.zeros(tokens.shape, jnp.float32)), state

    return Drafter(
        "RECITER", features=None, width=DEPTH + 1, depth=DEPTH, explicit_width=True,
        init=lambda params, rows, pool: (), propose=propose, observe=lambda params, state, context, seen: state,
    )  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    """What the drafter recites: the text that the target writes, and another."""
    done = make_engine(MODEL).generate(PROMPT, PARAMS)
    right = np.array(PROMPT + done.output_ids + [0] * DEPTH, np.int32)
    return {"right": jnp.asarray(right), "wrong": jnp.asarray((right + 1) % MODEL.vocab)}


def accept_length(engine) -> float:
    return engine.generate(PROMPT, PARAMS).spec_accept_length


def test_the_steps_read_the_new_ones(texts):
    engine = make_engine(MODEL, reciter(), draft=texts["wrong"])
    first = accept_length(engine)
    for name, least, most in (("right", DEPTH, DEPTH + 1), ("wrong", 1, first)):
        engine.params = Params(MODEL.params, texts[name])
        assert engine.params.draft is texts[name]
        assert least <= accept_length(engine) <= most, name
    assert first < 1.5


def test_not_while_a_request_runs(texts):
    engine = make_engine(MODEL, reciter(), draft=texts["wrong"])
    engine.add(PROMPT, PARAMS)
    with pytest.raises(RuntimeError, match="while a request runs"):
        engine.params = Params(MODEL.params, texts["right"])
    assert engine.params.draft is texts["wrong"]


def test_other_shapes_are_refused(texts):
    engine = make_engine(MODEL, reciter(), draft=texts["wrong"])
    with pytest.raises(ValueError, match="other shapes"):
        engine.params = Params(MODEL.params, texts["right"][:-1])
    assert engine.params.draft is texts["wrong"]
    assert accept_length(engine) < 1.5


def test_each_measurement_is_of_its_own_head(texts, monkeypatch):
    """A training run's: one engine, another head each time."""
    monkeypatch.setattr(run, "make_target", lambda config: MODEL.target)
    source = SimpleNamespace(config=MODEL.target.config, tokenizer=tokenizer(), eos_ids=())
    inputs = Mock(spec=run.Inputs, source=source, draft=SimpleNamespace(drafter=lambda target, shape: reciter()))
    settings = MeasureSettings(measure_prompts=1, measure_tokens=LENGTH, measure_steps=DEPTH)
    measure = run.Measure(settings, inputs, MODEL.params, texts["wrong"], [PROMPT])
    found = [measure(texts[name]) for name in ("wrong", "right", "wrong")]
    assert found[0] == found[2] and found[0].accept_length < 1.5
    assert found[1].accept_length > DEPTH
