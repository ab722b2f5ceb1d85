"""After any sequence of events a draft's cache equals one built from scratch; and the memory that it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draft_helpers import LONGEST, cached, drafting, from_scratch
from engine_helpers import NEAR, check_idle, force_drafts, largest_step, make_engine
from integrity import check_integrity
from oracle import Sampling
from toy_models import Runner

from specjax.cache import bytes_per_token
from specjax.drafters import Drafter, Params, make_speculation
from specjax.engine import SamplingParams
from specjax.engine.sequence import Status
from specjax.step import StepConfig

ERROR = 2e-5


@pytest.mark.parametrize("kind", ["eagle3", "standalone"])
def test_cache_after_chunks_retractions_and_aborts(kind):
    """Requests with and without drafts, greedy and sampled, in a pool that is too small. Steps of a head draft or not,
    which must leave no hole."""
    rng, (toy, drafter, params) = np.random.default_rng(7), drafting(kind)
    engine = make_engine(
        toy, drafter, draft=params, max_total_tokens=100, overlap=False, context_length=LONGEST, max_running_requests=3,
        adaptive=kind == "eagle3", warm=False,
    )  # fmt: skip
    step = largest_step(engine)
    sizes = [step._replace(nodes=nodes) for nodes in engine.buckets.sizes(step.width)]
    engine.warm_up([engine.buckets.ready_keys()[0], *sizes], progress=False)
    if engine.policy is not None:
        choices = np.random.default_rng(8)
        force_drafts(engine, lambda: choices.random() < 0.5)
    alive, starts, checked, aborted = {}, {}, 0, 0
    for turn in range(70):
        if turn < 50 and len(alive) < 5 and rng.random() < 0.5:
            prompt = rng.integers(0, 31, int(rng.integers(1, 30))).tolist()
            sampling = SamplingParams(
                max_new_tokens=int(rng.integers(5, 60)), temperature=float(rng.random() < 0.5), seed=turn,
                speculate=bool(rng.random() < 0.7),
            )  # fmt: skip
            sequence = engine.add(prompt, sampling)
            alive[sequence.id] = sequence
        if alive and rng.random() < 0.05:
            aborted += engine.abort(str(rng.choice(list(alive))))
        engine.step()
        for sequence in engine.scheduler.active:
            slot = sequence.active_slot
            prefilling = sequence.status is Status.PREFILLING
            n = slot.length if prefilling else int(engine.state.rows.prefix_length[slot.index])
            if starts.setdefault(slot, n) == n and prefilling:
                continue  # the row is another request's until the first prefill
            if n and rng.random() < 0.3:
                text = [*sequence.prompt, *sequence.output.tokens]
                assert n < len(text), "the root is known"
                contents = cached(engine.state.draft, slot.pages, slot.index, n)
                for leaf, expected in zip(contents, from_scratch(kind, text[: n + 1]), strict=True):
                    np.testing.assert_allclose(leaf, expected, atol=ERROR)
                checked += 1
        alive = {id: sequence for id, sequence in alive.items() if sequence.status is not Status.FINISHED}
        check_integrity(engine)
    while engine.unfinished:
        engine.step()
    assert engine.scheduler.retractions and aborted and checked > 20, (engine.scheduler.retractions, aborted, checked)
    check_idle(engine)


@pytest.mark.parametrize(
    ("kind", "same_next"),
    [
        ("eagle3", True),
        ("eagle3", False),
        ("standalone", False),
    ],
)
def test_reused_pages(kind, same_next):
    """Row 1 begins with two pages of row 0. A head's slot at their end is stale if another token follows there; a
    draft model's pages are exact."""
    toy, drafter, params = drafting(kind)
    shared = [3, 1, 4, 1, 5, 9, 2, 6]
    first, second = [*shared, 5, 3, 5], [*shared, 5 if same_next else 8, 8, 9, 7]
    runner = Runner(toy, drafter, rows=2, page_size=4, chunk=3, draft=params, config=StepConfig(drafter.width))
    runner.admit(0, first, Sampling(max_tokens=20))
    runner.prefill([first])
    before, _ = cached(runner.state.draft, runner.table[0], 0, 8)
    runner.table[1, :2] = runner.table[0, :2]
    runner.admit(1, second, Sampling(max_tokens=20), prefix_length=len(shared))
    start = runner.prefill([[], second[len(shared) :]])
    text = [*second, int(start.tokens[0, 0])]

    def step() -> None:
        output = runner.step([False, True])
        text.extend(output.tokens[1, : output.emitted[1]].tolist())
        alone = oracle.generate_plain(toy.logits, second, Sampling(max_tokens=len(text) - len(second)))
        assert min(alone.gaps) > NEAR and alone.tokens == text[len(second) :]

    for _ in range(4):
        step()
    n, stale = len(text) - 1, len(shared) - 1
    (slots, row), (expected, expected_row) = cached(runner.state.draft, runner.table[1], 1, n), from_scratch(kind, text)
    others = [slot for slot in range(n) if slot != stale]
    np.testing.assert_array_equal(slots[:8], before)
    np.testing.assert_allclose(slots[others], expected[others], atol=ERROR)
    exact = same_next or kind == "standalone"
    assert np.allclose(slots[stale], expected[stale], atol=ERROR) == exact
    if exact:
        np.testing.assert_allclose(row, expected_row, atol=ERROR)
    if kind == "standalone":  # a broken draft leaves the pages, which other requests get later, as they were
        runner.params = Params(toy.params, jax.tree.map(lambda leaf: leaf * np.nan, params))
        step()
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(runner.state.draft.cache))


@pytest.mark.parametrize(("kind", "page_size", "layers"), [("eagle", 1, 1), ("eagle3", 16, 1), ("standalone", 4, 2)])
def test_bytes_per_token(kind, page_size, layers):
    """Keys and values of 2 heads of 8 a layer, float32. N-grams keep 6 numbers for each page."""
    toy, drafter, draft = drafting(kind)
    params = Params(toy.params, draft)

    def taken(drafter: Drafter) -> int:
        return bytes_per_token(lambda pool: drafter.init(params, 1, pool), page_size)

    assert taken(drafter) == layers * 2 * 2 * 8 * 4
    assert taken(make_speculation("NGRAM").drafter) == 6 * 4 // page_size
    assert taken(make_speculation("NONE").drafter) == 0
