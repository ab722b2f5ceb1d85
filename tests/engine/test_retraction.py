"""48 requests in 16 slots with arrivals and aborts, in an ample pool and in one that is far too small."""

import functools

import numpy as np
import pytest
from engine_helpers import (
    DRAFTS,
    VOCABULARY,
    check_counts,
    check_idle,
    check_plain,
    make_engine,
    outcome,
    shared_engine,
    toy,
)
from integrity import check_integrity

from specjax.engine import Engine, SamplingParams
from specjax.engine.sequence import Status, completion

PAGES = {"ample": 512, "tiny": 40}
"""Pages of 2 tokens. The longest request uses 35, and 16 requests about 300."""


@functools.cache
def engine(pool: str) -> Engine:
    sizes = {"max_running_requests": 16, "page_size": 2, "max_total_tokens": 2 * PAGES[pool], "context_length": 96}
    made = make_engine(toy(), DRAFTS["NGRAM"], **sizes)
    made.warm_up(progress=False)  # the tests count steps, also those that wait for a program
    return made


def requests() -> list[tuple[list[int], SamplingParams]]:
    """A third greedy, a third greedy with penalties, a third sampled with penalties."""
    rng, batch = np.random.default_rng(3), []
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.3}
    sampled = penalties | {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.2}
    for i in range(48):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 31)).tolist()
        fields = [{}, penalties, sampled | {"seed": 1000 + i}][i % 3]
        batch.append((prompt, SamplingParams(max_new_tokens=int(rng.integers(5, 41)), **fields)))
    return batch


@functools.cache
def alone() -> list:
    """Outcomes of each request by itself, without speculation."""
    plain = shared_engine("NONE")
    return [outcome(plain.generate(prompt, params)) for prompt, params in requests()]


@pytest.mark.parametrize("pool", ["tiny", pytest.param("ample", marks=pytest.mark.slow)])
def test_texts_with_arrivals_aborts_and_retractions(pool):
    here, rng = engine(pool), np.random.default_rng(6)
    assert here.buckets.trees[16] == 4, "this batch drafts"
    before = here.scheduler.retractions
    arrivals, ids, done, aborted = list(enumerate(requests())), {}, {}, set()
    resumed: set[int] = set()  # retracted with output
    while arrivals or here.unfinished:
        for _ in range(min(int(rng.integers(0, 4)), len(arrivals))):
            i, request = arrivals.pop(0)
            ids[here.add(*request).id] = i
        for sequence in here.step():
            if sequence.status is Status.FINISHED:
                assert ids[sequence.id] not in done
                done[ids[sequence.id]] = completion(sequence)
        check_integrity(here)
        resumed |= {ids[s.id] for s in here.scheduler.waiting if s.output.tokens}
        if rng.random() < 0.06:
            queue = [*here.scheduler.active, *here.scheduler.waiting]
            if queue:
                victim = queue[int(rng.integers(len(queue)))]
                assert here.abort(victim.id)
                aborted.add(ids[victim.id])
        check_integrity(here)
    check_idle(here)
    assert set(done) == set(range(48)) - aborted
    assert 0 < len(aborted) < 24
    expected = alone()
    for i, completed in done.items():
        assert outcome(completed) == expected[i]
        check_counts(completed)
    if pool == "tiny":
        assert here.scheduler.retractions > before
        assert resumed & set(done), "no retracted request with output finished"
    else:
        assert here.scheduler.retractions == before


def test_youngest_is_retracted_and_resumes_first():
    here = engine("tiny")
    ids = [here.add([9 + i] * 10, SamplingParams(max_new_tokens=40)).id for i in range(5)]
    finished, lost = [], []
    while here.unfinished:
        before = {s.id for s in here.scheduler.active}
        news = here.step()
        finished += [s.id for s in news if s.status is Status.FINISHED]
        active = [s.id for s in here.scheduler.active]
        gone = before - set(active) - set(finished)
        lost += sorted(gone)
        assert all(ids.index(name) > max(map(ids.index, active)) for name in gone), "an older request was retracted"
        assert [s.id for s in here.scheduler.waiting] == [n for n in ids if n not in {*active, *finished}]
    assert lost
    assert ids[0] not in lost
    check_idle(here)


def test_request_as_large_as_the_pool():
    """The last token is never committed, so one more than the pool holds can be asked for."""
    here = engine("tiny")
    params = SamplingParams(max_new_tokens=31)
    with pytest.raises(ValueError, match=r"do not fit the KV pool of 80 tokens \(--max-total-tokens\)"):
        here.generate([5] * 51, params)
    check_plain(toy(), [5] * 50, params, here.generate([5] * 50, params))
    rest = here.generate([5] * 50, SamplingParams(max_new_tokens=None))
    assert rest.completion_tokens == 31, "all that fits"
    check_idle(here)
