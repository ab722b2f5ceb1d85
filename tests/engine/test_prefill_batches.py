"""Several prompts in one forward, and the latency of running and short requests."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import DRAFTS, VOCABULARY, check_texts, make_engine, toy
from toy_models import tiny_llama

from specjax.engine import SamplingParams
from specjax.engine.plan import Key
from specjax.models.blocks import Ragged


def test_ragged_rows():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, 6)
    total = int(lengths.sum())
    where = Ragged.of(jnp.asarray(lengths, jnp.int32), 4, total + 3)
    block = rng.integers(1, 1000, (6, 4, 2))
    joined = np.asarray(where.joined(jnp.asarray(block)))[0]
    expected = [block[i, j] for i, length in enumerate(lengths) for j in range(length)]
    np.testing.assert_array_equal(joined[:total], expected)
    parted = np.asarray(where.parted(jnp.asarray(joined)[None]))
    for i, length in enumerate(lengths):
        np.testing.assert_array_equal(parted[i, :length], block[i, :length])


def recorded_keys(engine: Any) -> list[Key]:
    """The keys of the programs that the engine runs."""
    used: list[Key] = []
    run = engine.device.run

    def noted(key: Key, program: Any, inputs: Any) -> Any:
        used.append(key)
        return run(key, program, inputs)

    engine.device.run = noted
    return used


@pytest.mark.parametrize(("kind", "algorithm"), [("ragged", "NGRAM"), ("padded", "NONE")])
def test_texts_of_prompts_that_share_forwards(kind, algorithm):
    model = tiny_llama(vocab_size=VOCABULARY) if kind == "ragged" else toy()
    engine = make_engine(
        model, DRAFTS[algorithm], max_running_requests=8, max_total_tokens=480, chunked_prefill_size=16,
        context_length=96,
    )  # fmt: skip
    engine.warm_up([key for key in engine.buckets.all_keys() if key.kind == "prefill"], progress=False)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 99, int(n)).tolist() for n in rng.choice([1, 2, 9, 15, 16, 17, 33, 60], 24)]
    params = [SamplingParams(max_new_tokens=8, temperature=float(i % 2), seed=i) for i in range(24)]
    keys = recorded_keys(engine)
    check_texts(engine, model, prompts, params)
    used = {(key.rows, key.tokens) for key in keys if key.kind == "prefill"}
    assert used >= ({(8, 64)} if kind == "ragged" else {(1, 0), (8, 0)})
