"""The prefix cache: pages against a plain model of their contents, then whole engines with and without it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    DRAFTS,
    NGRAM,
    check_idle,
    check_plain,
    drain,
    idle_sequence,
    make_engine,
    outcome,
    shared_engine,
    toy,
)

from specjax.engine import SamplingParams
from specjax.engine.pages import PageAllocator, PrefixCache
from specjax.engine.scheduler import OVERTAKEN, PATIENCE, Scheduler
from specjax.engine.sequence import Sequence, Status

SIZE = 2


class World:
    """A scheduler, and what each page of its pool holds: the tokens are written as the device would write them."""

    def __init__(self, rng: random.Random, pages: int, rows: int, policy: Any) -> None:
        self.rng, self.policy = rng, policy
        self.scheduler = Scheduler(rows=rows, pages=pages, page_size=SIZE, lookahead=3, policy=policy)
        self.contents: dict[int, list[int]] = {page: [-1] * SIZE for page in range(pages)}
        self.made = self.reused = 0

    def new(self) -> Sequence:
        start = [7, 7, 8, 8, 7, 8, 7][: self.rng.randrange(8)]
        prompt = [*start, *(self.rng.randrange(2) for _ in range(self.rng.randrange(1, 7)))]
        self.made += 1
        return idle_sequence(
            SamplingParams(cache_salt=self.rng.choice([None, None, "a"])),
            id=str(self.made), prompt=prompt, limit=self.rng.randrange(1, 25), arrival=self.made,
        )  # fmt: skip

    def write(self, sequence: Sequence, start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            page = sequence.active_slot.pages[position // SIZE]
            assert page in sequence.active_slot.own, "a page that others may read is written"
            self.contents[page][position % SIZE] = token

    def read(self, sequence: Sequence, count: int) -> list[int]:
        return [self.contents[sequence.active_slot.pages[i // SIZE]][i % SIZE] for i in range(count)]

    def admit(self) -> None:
        for sequence in self.scheduler.admit():
            assert sequence.active_slot.prefilled % SIZE == 0 and sequence.active_slot.prefilled < len(sequence.context)
            assert (
                self.read(sequence, sequence.active_slot.prefilled)
                == sequence.context[: sequence.active_slot.prefilled]
            )
            self.reused += sequence.active_slot.prefilled

    def prefill(self) -> None:
        for sequence in self.scheduler.prefilling()[: self.rng.randrange(1, 3)]:
            count = min(self.rng.randrange(1, 4), len(sequence.context) - sequence.active_slot.prefilled)
            self.write(
                sequence, sequence.active_slot.prefilled, sequence.context[sequence.active_slot.prefilled :][:count]
            )
            sequence.active_slot.prefilled += count
            if sequence.active_slot.prefilled == len(sequence.context):
                sequence.status, sequence.active_slot.committed = Status.RUNNING, sequence.active_slot.prefilled
            if self.rng.random() < 0.9:  # else it is aborted before it is read
                sequence.active_slot.certain = sequence.active_slot.prefilled
                self.scheduler.store(sequence)
            else:
                self.scheduler.finish(sequence)
                continue
            if sequence.status is Status.RUNNING and not sequence.output.tokens:
                sequence.output.tokens.append(self.rng.randrange(2))

    def decode(self) -> None:
        running = self.scheduler.running()
        while running and not self.scheduler.reserve(running):
            self.scheduler.retract_youngest()
            running = self.scheduler.running()
        for sequence in running:
            room = sequence.request.limit - len(sequence.output.tokens)
            tokens = [self.rng.randrange(2) for _ in range(min(self.rng.randrange(1, 4), room))]
            self.write(sequence, sequence.active_slot.committed, [sequence.output.tokens[-1], *tokens][: len(tokens)])
            sequence.output.tokens += tokens
            sequence.active_slot.committed += len(tokens)
            sequence.active_slot.certain = sequence.active_slot.committed
            whole = sequence.prompt + sequence.output.tokens
            assert self.read(sequence, sequence.active_slot.committed) == whole[: sequence.active_slot.committed]
            if len(sequence.output.tokens) == sequence.request.limit:
                self.scheduler.finish(sequence)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("seed", range(6))
def test_pages_hold_what_their_readers_expect(seed, policy):
    """Random requests with common starts in a pool that is too small for them: what a request starts with was written
    for the same tokens, no shared page is written, and nothing is lost."""
    rng = random.Random(seed)
    world = World(rng, pages=20 + 2 * (seed % 3), rows=4, policy=policy)
    scheduler = world.scheduler
    for _ in range(700):
        if len(scheduler.waiting) < 5 and rng.random() < 0.5:
            scheduler.add(world.new())
        world.admit()
        if rng.random() < 0.8:
            world.prefill()
        scheduler.check_integrity()
        world.decode()
        if rng.random() < 0.02 and (everyone := [*scheduler.active, *scheduler.waiting]):
            scheduler.finish(rng.choice(everyone))
        if rng.random() < 0.005:
            scheduler.start_over()
            world.contents = {page: [-1] * SIZE for page in world.contents}
        scheduler.check_integrity()
    for _ in range(300):
        world.admit()
        world.prefill()
        world.decode()
    assert not scheduler.unfinished and scheduler.retractions > 10 and world.reused > 250
    assert scheduler.allocator.free + scheduler.prefix.evictable == len(world.contents)
    scheduler.prefix.clear()
    assert scheduler.allocator.free == len(world.contents)


def test_the_page_that_was_used_least_recently_goes_first():
    allocator = PageAllocator(6)
    cache = PrefixCache(allocator, 1)

    def put(*texts: int) -> Any:
        node = None
        for text in texts:
            (page,) = allocator.allocate(1) or [-1]
            node, taken = cache.insert("salt", node, (text,), page)
            if not taken:
                allocator.release([page])
        return node

    def known(*texts: int) -> int:
        return len(cache.match("salt", [(text,) for text in texts]))

    for path in ((1, 2), (1, 3), (4,), (5,)):
        cache.unlock(put(*path))
    cache.lock(cache.match("salt", [(1,), (2,)])[-1])
    used = cache.match("salt", [(4,)])[-1]
    cache.lock(used), cache.unlock(used)
    assert cache.evictable == 3 and cache.match("pepper", [(1,)]) == []
    assert cache.evict(1) == 1 and known(1, 3) == 1, "used before all others"
    assert cache.evict(1) == 1 and known(5) == 0 and known(4) == 1
    assert cache.evict(9) == 1 and known(4) == 0
    assert known(1, 2) == 2 and cache.evictable == 0, "locked"
    cache.unlock(cache.match("salt", [(1,), (2,)])[-1])
    assert cache.evict(9) == 2 and allocator.free == 6, "a parent after its child"


def test_the_memory_of_what_was_used_stays_small():
    allocator = PageAllocator(2)
    cache = PrefixCache(allocator, 1)
    (page,) = allocator.allocate(1) or [-1]
    node, _ = cache.insert(None, None, (1,), page)
    cache.unlock(node)
    for _ in range(1000):
        cache.lock(node), cache.unlock(node)
    assert len(cache._leaves) < 100
    assert cache.evict(1) == 1


# Prompts in turn


def prompts_of(*lengths: int, waits: int = 0) -> Scheduler:
    scheduler = Scheduler(rows=8, pages=1000, page_size=4, lookahead=2)
    rng = np.random.default_rng(0)
    for i, length in enumerate(lengths):
        scheduler.add(idle_sequence(id=str(i), prompt=rng.integers(3, 99, length).tolist(), arrival=i))
    scheduler.admit()
    return scheduler


def test_a_short_prompt_waits_for_one_chunk_and_a_long_one_gets_its_share():
    scheduler = prompts_of(1000, 40, 30, 20)
    firsts = []
    while (order := scheduler.prefilling())[1:]:
        firsts.append(order[0].id)
        order[0].active_slot.prefilled += 10
        if order[0].active_slot.prefilled >= len(order[0].prompt):
            order[0].status = Status.RUNNING
    assert firsts[:3] == ["3", "3", "2"] and firsts[3] == "0"
    assert firsts.count("0") == len(firsts) // PATIENCE


def test_lpm_takes_the_longest_known_start_but_nobody_waits_for_ever():
    scheduler = Scheduler(rows=1, pages=64, page_size=2, lookahead=1, policy="lpm")

    def run(sequence: Sequence) -> None:
        sequence.active_slot.prefilled = sequence.active_slot.certain = len(sequence.prompt)
        sequence.status, sequence.output.tokens = Status.RUNNING, [1]
        scheduler.finish(sequence)

    scheduler.add(idle_sequence(id="first", prompt=[5, 5, 5, 5, 5], arrival=0))
    run(scheduler.admit()[0])
    scheduler.add(idle_sequence(id="other", prompt=[6, 6, 6], arrival=1))
    for i in range(OVERTAKEN + 1):
        scheduler.add(idle_sequence(id=f"same-{i}", prompt=[5, 5, 5, 5, i + 9], arrival=2 + i))
        (found,) = scheduler.admit()
        if i < OVERTAKEN:
            assert found.id == f"same-{i}" and found.output.cached == 4
        else:
            assert found.id == "other" and found.output.cached == 0
        run(found)


# Engines


def conversation(engine: Any, turns: int, seed: int, **sampling: Any) -> list[Any]:
    """Each turn has all that was said before it, and some more."""
    rng, text, found = np.random.default_rng(seed), [], []
    for turn in range(turns):
        text += rng.integers(3, 99, int(rng.integers(3, 9))).tolist()
        params = SamplingParams(max_new_tokens=int(rng.integers(4, 12)), seed=turn, **sampling)
        found.append((list(text), params, engine.generate([text], [params])[0]))
        text += found[-1][2].output_ids
    return found


@pytest.mark.parametrize("algorithm", DRAFTS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "repetition_penalty": 1.3}], ids=["greedy", "sampled"])
def test_a_conversation_computes_each_token_once(algorithm, sampling):
    """All but the last token and what does not fill a page is known; the text is that of plain decoding."""
    engine = shared_engine(algorithm)
    engine.flush_cache()
    before = engine.counters.prefilled_tokens
    found, known, ideal = conversation(engine, 6, seed=1, **sampling), 0, 0
    for prompt, params, done in found:
        check_plain(toy(), prompt, params, done)
        assert done.cached_tokens == min(known, len(prompt) - 1) // 4 * 4
        ideal += len(prompt) - done.cached_tokens
        known = len(prompt) + len(done.output_ids) - 1  # the last token is never committed
    assert engine.counters.prefilled_tokens - before == ideal
    assert engine.counters.cached_tokens > 0
    check_idle(engine)


def test_speculation_loses_no_hit():
    hits = []
    for algorithm in DRAFTS:
        engine = shared_engine(algorithm)
        engine.flush_cache()
        hits.append([done.cached_tokens for _, _, done in conversation(engine, 8, seed=3)])
    assert hits[0] == hits[1] and sum(hits[0]) > 100


def test_choices_share_their_prompt():
    engine = shared_engine("NGRAM")
    engine.flush_cache()
    before = engine.counters.prefilled_tokens
    prompt = np.random.default_rng(5).integers(3, 99, 41).tolist()
    params = [SamplingParams(max_new_tokens=9, temperature=1.0, seed=i) for i in range(9)]
    for one, done in zip(params, engine.generate([prompt] * 9, params), strict=True):
        check_plain(toy(), prompt, one, done)
    assert engine.counters.prefilled_tokens - before == 41 + 8 * 1
    check_idle(engine)


@pytest.mark.parametrize("salts", [("a", "b"), (None, "a"), ("a", None)])
def test_texts_with_different_salts_share_nothing(salts):
    engine = shared_engine("NGRAM")
    engine.flush_cache()
    prompt = list(range(5, 30))
    params = [SamplingParams(max_new_tokens=5, cache_salt=salt) for salt in salts]
    first, again, other = (engine.generate([prompt], [one])[0] for one in (params[0], params[0], params[1]))
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 24, 0)
    assert outcome(first) == outcome(again) == outcome(other)


def test_isolated_requests_share_only_by_their_salt():
    engine = make_engine(toy(), NGRAM, isolate_ngrams=True)
    prompt = list(range(5, 30))
    plain, salted = SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=3, cache_salt="mine")
    found = [engine.generate([prompt], [params])[0].cached_tokens for params in (plain, plain, salted, salted)]
    assert found == [0, 0, 0, 24]


def test_without_the_cache_nothing_is_kept():
    engine = make_engine(toy(), prefix_cache=False)
    for _ in range(2):
        assert engine.generate([list(range(5, 30))], SamplingParams(max_new_tokens=5))[0].cached_tokens == 0
        assert engine.scheduler.allocator.free == engine.pool.pages


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_pages_are_given_up_before_requests_are_retracted(algorithm):
    """The pool holds one text and a half: earlier texts make room, and all texts stay right."""
    engine = make_engine(toy(), DRAFTS[algorithm], max_total_tokens=72, context_length=48, max_running_requests=3)
    rng = np.random.default_rng(7)
    start = rng.integers(3, 99, 14).tolist()
    prompts = [[*start, *rng.integers(3, 99, int(rng.integers(1, 12))).tolist()] for _ in range(12)]
    params = [SamplingParams(max_new_tokens=20, temperature=float(i % 2), seed=i) for i in range(12)]
    for prompt, one in zip(prompts, params, strict=True):
        check_plain(toy(), prompt, one, engine.generate([prompt], [one])[0])
    assert engine.scheduler.retractions == 0 and engine.scheduler.prefix.pages
    for prompt, one, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(toy(), prompt, one, done)
    assert engine.scheduler.retractions > 0
    check_idle(engine)


@pytest.mark.parametrize("algorithm", DRAFTS)
@pytest.mark.parametrize("overlap", [True, False])
def test_forced_retractions_change_no_text(algorithm, overlap):
    """Every third step the youngest goes back to the queue, and takes up its own pages again."""
    engine = make_engine(toy(), DRAFTS[algorithm], retract_every=3, overlap=overlap)
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, 99, int(n)).tolist() for n in rng.integers(1, 30, 8)]
    params = [SamplingParams(max_new_tokens=25, temperature=float(i % 2), seed=i) for i in range(8)]
    for prompt, one, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(toy(), prompt, one, done)
    assert engine.scheduler.retractions > 10
    assert engine.counters.cached_tokens > 10 * 4, "what had been computed was not computed again"
    check_idle(engine)


def test_what_an_aborted_prompt_had_computed_is_kept():
    engine = shared_engine("NONE")
    engine.flush_cache()
    prompt = list(range(5, 45))
    sequence = engine.add(prompt, SamplingParams(max_new_tokens=5))
    for _ in range(3):  # two chunks of 8 are dispatched and read, one is not read
        engine.step()
    engine.abort(sequence.id)
    drain(engine)
    found = engine.generate([prompt], SamplingParams(max_new_tokens=5))[0]
    assert found.cached_tokens == 16
    check_plain(toy(), prompt, SamplingParams(max_new_tokens=5), found)


def test_a_lost_state_loses_the_cache(monkeypatch):
    engine = make_engine(toy())
    prompt = list(range(5, 45))
    engine.generate([prompt], SamplingParams(max_new_tokens=5))
    engine.reset("tried")
    assert engine.scheduler.allocator.free == engine.pool.pages
    found = engine.generate([prompt], SamplingParams(max_new_tokens=5))[0]
    assert found.cached_tokens == 0
    check_plain(toy(), prompt, SamplingParams(max_new_tokens=5), found)
