"""Replacing the parameters of an engine."""

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
    """A drafter that proposes the next tokens of its parameters, an array of int32 tokens."""

    def propose(params, state, context):
        at = context.prefix_length[:, None] + 1 + jnp.arange(DEPTH, dtype=jnp.int32)[None, :]
        tokens = params.draft[jnp.minimum(at, len(params.draft) - 1)]
        length = jnp.full_like(context.root, DEPTH)
        return chain(context.root, tokens, length, jnp.zeros(tokens.shape, jnp.float32)), state

    return Drafter(
        "RECITER", features=None, width=DEPTH + 1, depth=DEPTH,
        init=lambda params, rows, pool: (), propose=propose, observe=lambda params, state, context, seen: state,
    )  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    """The text of the target, and another one."""
    done = make_engine(MODEL).generate(PROMPT, PARAMS)
    right = np.array(PROMPT + done.output_ids + [0] * DEPTH, np.int32)
    return {"right": jnp.asarray(right), "wrong": jnp.asarray((right + 1) % MODEL.vocab)}


def accept_length(engine) -> float:
    return engine.generate(PROMPT, PARAMS).spec_accept_length


def test_steps_read_replaced_parameters(texts):
    engine = make_engine(MODEL, reciter(), draft=texts["wrong"])
    assert accept_length(engine) < 1.5
    for name, low, high in (("right", DEPTH, DEPTH + 1), ("wrong", 1, 1.5)):
        engine.params = Params(MODEL.params, texts[name])
        assert engine.params.draft is texts[name]
        assert low <= accept_length(engine) <= high, name
    with pytest.raises(ValueError, match="other shapes"):
        engine.params = Params(MODEL.params, texts["right"][:-1])
    engine.add(PROMPT, PARAMS)
    with pytest.raises(RuntimeError, match="while a request runs"):
        engine.params = Params(MODEL.params, texts["right"])
    assert engine.params.draft is texts["wrong"]


def test_training_measures_each_head(texts, monkeypatch):
    """A training run replaces the head of one engine."""
    monkeypatch.setattr(run, "make_target", lambda config: MODEL.target)
    source = SimpleNamespace(config=MODEL.target.config, tokenizer=tokenizer(), eos_ids=())
    inputs = Mock(spec=run.Inputs, source=source, draft=SimpleNamespace(drafter=lambda target, shape: reciter()))
    settings = MeasureSettings(measure_prompts=1, measure_tokens=LENGTH, measure_steps=DEPTH)
    measure = run.Measure(settings, inputs, MODEL.params, texts["wrong"], [PROMPT])
    results = [measure(texts[name]) for name in ("wrong", "right", "wrong")]
    assert results[0] == results[2] and results[0]["accept_length"] < 1.5
    assert results[1]["accept_length"] > DEPTH
