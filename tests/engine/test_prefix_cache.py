"""The prefix cache: pages against a model of their contents, scheduling, engines with and without it, salts."""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    NGRAM,
    check_idle,
    check_plain,
    check_texts,
    drain,
    idle_sequence,
    make_engine,
    outcome,
    shared_engine,
    toy,
)
from integrity import check_scheduler

from specjax.cli import build, flags
from specjax.drafters import Ngram
from specjax.engine import SamplingParams
from specjax.engine.intake import Salts
from specjax.engine.pages import PrefixCache
from specjax.engine.scheduler import PATIENCE, Scheduler
from specjax.engine.sequence import Sequence, Status
from specjax.limits import ParameterError
from specjax.settings import add_flags, read

SIZE = 2


class World:
    """A scheduler and the tokens in each page of its pool."""

    def __init__(self, rng: random.Random, pages: int, rows: int, policy: Any, snapshots: int | None = None) -> None:
        self.rng, self.policy = rng, policy
        sizes = {"rows": rows, "pages": pages, "page_size": SIZE, "snapshots": snapshots}
        self.scheduler = Scheduler(**sizes, lookahead=3, policy=policy)
        self.states: dict[int, list[int]] = {row: [-1] for row in range(rows + (snapshots or 0))}  # tokens before each
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
            assert sequence.active_slot.length % SIZE == 0 and sequence.active_slot.length < len(sequence.context)
            assert self.read(sequence, sequence.active_slot.length) == sequence.context[: sequence.active_slot.length]
            self.reused += sequence.active_slot.length

    def prefill(self) -> None:
        for sequence in self.scheduler.prefilling()[: self.rng.randrange(1, 3)]:
            count = min(self.rng.randrange(1, 4), sequence.next_left)
            self.advance(sequence, count)
            self.write(sequence, sequence.active_slot.length, sequence.context[sequence.active_slot.length :][:count])
            sequence.active_slot.length += count
            sequence.active_slot.source = sequence.active_slot.index
            if sequence.active_slot.length == len(sequence.context):
                sequence.status = Status.RUNNING
            if self.rng.random() < 0.9:  # otherwise an abort before the chunk is read
                sequence.active_slot.certain = sequence.active_slot.length
                self.scheduler.store(sequence)
            else:
                self.scheduler.finish(sequence)
                continue
            if sequence.status is Status.RUNNING and not sequence.output.tokens:
                sequence.output.tokens.append(self.rng.randrange(2))

    def advance(self, sequence: Sequence, count: int) -> None:
        """Computes the states of a prefill as a recurrent model does."""
        start = sequence.active_slot.length
        source, row, length = self.scheduler.snapshot(sequence, count)
        if start and self.scheduler.prefix.snapshots is not None:
            assert self.states[source] == sequence.context[:start], "a prefill continues another text's state"
        self.states[sequence.active_slot.index] = sequence.context[: start + count]
        if row >= 0:
            assert (start + length) % SIZE == 0 and length <= count
            self.states[row] = sequence.context[: start + length]

    def decode(self) -> None:
        running = self.scheduler.running()
        while running and not self.scheduler.reserve(running):
            self.scheduler.retract_youngest()
            running = self.scheduler.running()
        for sequence in running:
            room = sequence.limit - len(sequence.output.tokens)
            tokens = [self.rng.randrange(2) for _ in range(min(self.rng.randrange(1, 4), room))]
            self.write(sequence, sequence.active_slot.length, [sequence.output.tokens[-1], *tokens][: len(tokens)])
            sequence.output.tokens += tokens
            sequence.active_slot.length += len(tokens)
            sequence.active_slot.certain = sequence.active_slot.length
            whole = sequence.prompt + sequence.output.tokens
            assert self.read(sequence, sequence.active_slot.length) == whole[: sequence.active_slot.length]
            if len(sequence.output.tokens) == sequence.limit:
                self.scheduler.finish(sequence)


@pytest.mark.parametrize("snapshots", [None, 1, 6])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("seed", range(2))
def test_shared_pages_hold_the_expected_tokens(seed, policy, snapshots):
    """Random requests with common prefixes in a pool that is too small for them."""
    rng = random.Random(seed)
    world = World(rng, pages=20 + 2 * (seed % 3), rows=4, policy=policy, snapshots=snapshots)
    scheduler = world.scheduler
    for _ in range(700):
        if len(scheduler.waiting) < 5 and rng.random() < 0.5:
            scheduler.add(world.new())
        world.admit()
        if rng.random() < 0.8:
            world.prefill()
        check_scheduler(scheduler, len(world.contents))
        world.decode()
        if rng.random() < 0.02 and (everyone := [*scheduler.active, *scheduler.waiting]):
            scheduler.finish(rng.choice(everyone))
        if rng.random() < 0.005:
            scheduler.start_over()
            world.contents = {page: [-1] * SIZE for page in world.contents}
        check_scheduler(scheduler, len(world.contents))
    for _ in range(300):
        world.admit()
        world.prefill()
        world.decode()
    assert not scheduler.unfinished and scheduler.retractions > 10 and world.reused > (20 if snapshots == 1 else 250)
    assert len(scheduler.free_pages) + scheduler.prefix.evictable == len(world.contents)
    scheduler.prefix.clear()
    assert len(scheduler.free_pages) == len(world.contents)


def test_least_recently_used_page_is_evicted_first():
    free = [*range(6)]
    cache = PrefixCache(free, 1)

    def put(*texts: int) -> Any:
        node = None
        for text in texts:
            node, taken = cache.insert("salt", node, (text,), free[-1])
            if taken:
                free.pop()
        return node

    def cached(*texts: int) -> int:
        return len(cache.match("salt", [(text,) for text in texts]))

    for path in ((1, 2), (1, 3), (4,), (5,)):
        cache.unlock(put(*path))
    cache.lock(cache.match("salt", [(1,), (2,)])[-1])
    used = cache.match("salt", [(4,)])[-1]
    cache.lock(used), cache.unlock(used)
    assert cache.evictable == 3 and cache.match("pepper", [(1,)]) == []
    assert cache.evict(1) == 1 and cached(1, 3) == 1, "used before all others"
    assert cache.evict(1) == 1 and cached(5) == 0 and cached(4) == 1
    assert cache.evict(9) == 1 and cached(4) == 0
    assert cached(1, 2) == 2 and cache.evictable == 0, "locked"
    cache.unlock(cache.match("salt", [(1,), (2,)])[-1])
    assert cache.evict(9) == 2 and len(free) == 6, "a parent after its child"


def prompts_of(*lengths: int, waits: int = 0) -> Scheduler:
    scheduler = Scheduler(rows=8, pages=1000, page_size=4, lookahead=2)
    rng = np.random.default_rng(0)
    for i, length in enumerate(lengths):
        scheduler.add(idle_sequence(id=str(i), prompt=rng.integers(3, 99, length).tolist(), arrival=i))
    scheduler.admit()
    return scheduler


def test_short_prompts_go_first_and_long_ones_get_a_share():
    scheduler = prompts_of(1000, 40, 30, 20)
    firsts = []
    while (order := scheduler.prefilling())[1:]:
        firsts.append(order[0].id)
        order[0].active_slot.length += 10
        if order[0].active_slot.length >= len(order[0].prompt):
            order[0].status = Status.RUNNING
    assert firsts[:3] == ["3", "3", "2"] and firsts[3] == "0"
    assert firsts.count("0") == len(firsts) // PATIENCE


def test_lpm_prefers_cached_prompts():
    scheduler = Scheduler(rows=1, pages=64, page_size=2, lookahead=1, policy="lpm")

    def run(sequence: Sequence) -> None:
        sequence.active_slot.length = sequence.active_slot.certain = len(sequence.prompt)
        sequence.status, sequence.output.tokens = Status.RUNNING, [1]
        scheduler.finish(sequence)

    scheduler.add(idle_sequence(id="first", prompt=[5, 5, 5, 5, 5], arrival=0))
    run(scheduler.admit()[0])
    scheduler.add(idle_sequence(id="other", prompt=[6, 6, 6], arrival=1))
    scheduler.add(idle_sequence(id="same", prompt=[5, 5, 5, 5, 9], arrival=2))
    for id, cached in (("same", 4), ("other", 0)):
        (sequence,) = scheduler.admit()
        assert (sequence.id, sequence.output.cached) == (id, cached)
        run(sequence)


def conversation(engine: Any, turns: int, seed: int, **sampling: Any) -> list[Any]:
    """Each turn repeats all text before it and adds some tokens."""
    rng, text, completions = np.random.default_rng(seed), [], []
    for turn in range(turns):
        text += rng.integers(3, 99, int(rng.integers(3, 9))).tolist()
        params = SamplingParams(max_new_tokens=int(rng.integers(4, 12)), seed=turn, **sampling)
        completions.append((list(text), params, engine.generate([text], [params])[0]))
        text += completions[-1][2].output_ids
    return completions


@pytest.mark.parametrize(
    ("algorithm", "sampling"), [("NONE", {}), ("NGRAM", {"temperature": 0.9, "repetition_penalty": 1.3})]
)
def test_conversation_computes_each_token_once(algorithm, sampling):
    """All full pages are cached, except for the last token of the text."""
    engine = shared_engine(algorithm)
    engine.flush_cache()
    before = engine.counters.prefilled_tokens
    turns, cached, expected = conversation(engine, 6, seed=1, **sampling), 0, 0
    for prompt, params, done in turns:
        check_plain(toy(), prompt, params, done)
        assert done.cached_tokens == min(cached, len(prompt) - 1) // 4 * 4
        expected += len(prompt) - done.cached_tokens
        cached = len(prompt) + len(done.output_ids) - 1  # the last token is never committed
    assert engine.counters.prefilled_tokens - before == expected
    assert engine.counters.cached_tokens > 0
    check_idle(engine)


def test_choices_share_prompt_pages():
    engine = shared_engine("NGRAM")
    engine.flush_cache()
    before = engine.counters.prefilled_tokens
    prompt = np.random.default_rng(5).integers(3, 99, 41).tolist()
    params = [SamplingParams(max_new_tokens=9, temperature=1.0, seed=i) for i in range(9)]
    check_texts(engine, toy(), [prompt] * 9, params)
    assert engine.counters.prefilled_tokens - before == 41 + 8 * 1


@pytest.mark.parametrize("isolate", [False, True])
def test_salts(isolate):
    """Requests share pages and n-grams only with the same salt. Isolated requests without a salt share nothing."""
    engine = make_engine(toy(), NGRAM, isolate_ngrams=isolate)
    engine.intake.salts._key = bytes(16)  # a random key would change collisions in the table of n-grams
    prompt, outcomes = [80, 81, 82, 80, 83, *range(5, 30)], []
    for salt, shared in (("a", False), ("a", True), ("b", False), (None, False), (None, not isolate)):
        done = engine.generate(prompt, SamplingParams(max_new_tokens=40, cache_salt=salt))
        drain(engine)
        assert done.cached_tokens == (28 if shared else 0)
        outcomes.append((outcome(done), shared, done.spec_accept_length))
    assert all(text == outcomes[0][0] for text, _, _ in outcomes)
    cold = outcomes[0][2]
    assert all(length > cold if shared else length == cold for _, shared, length in outcomes)


def test_words_of_salts():
    shared, isolated = Salts(isolate=False), Salts(isolate=True)
    assert shared(None) == shared(None) == 0
    assert shared("a") == shared("a") != shared("b")
    assert len({isolated(None) for _ in range(100)} | {isolated("0")}) == 101
    assert all(0 < salts(text) < 2**32 for salts in (shared, isolated) for text in ("", "0", "ä\ud800"))
    assert Salts(isolate=False)("a") != shared("a"), "engines share a key"
    for salt in ("", "x" * 257):
        with pytest.raises(ParameterError, match="cache_salt must be a string of 1 to 256 characters"):
            SamplingParams(cache_salt=salt)


@pytest.mark.parametrize("isolated", [False, True])
def test_flag_that_isolates_ngrams(isolated):
    parser = argparse.ArgumentParser()
    add_flags(parser, flags.Settings())
    argv = ["--speculative-algorithm", "NGRAM", *["--speculative-ngram-isolate"] * isolated]
    arguments = build.engine_arguments(read(parser.parse_args(argv), flags.Settings()))
    assert arguments["config"].isolate_ngrams is isolated
    assert arguments["draft"] == Ngram()


def test_disabled_cache_keeps_no_page():
    engine = make_engine(toy(), prefix_cache=False)
    for _ in range(2):
        assert engine.generate([*range(5, 30)], SamplingParams(max_new_tokens=5)).cached_tokens == 0
        assert len(engine.scheduler.free_pages) == engine.pool.pages


def test_cached_pages_are_evicted_before_requests_are_retracted():
    """The pool holds one and a half texts."""
    engine = make_engine(toy(), NGRAM, max_total_tokens=72, context_length=48, max_running_requests=3)
    rng = np.random.default_rng(7)
    start = rng.integers(3, 99, 14).tolist()
    prompts = [[*start, *rng.integers(3, 99, int(rng.integers(1, 12))).tolist()] for _ in range(12)]
    params = [SamplingParams(max_new_tokens=20, temperature=float(i % 2), seed=i) for i in range(12)]
    for prompt, sampling in zip(prompts, params, strict=True):
        check_texts(engine, toy(), [prompt], [sampling])
    assert engine.scheduler.retractions == 0 and engine.scheduler.prefix.pages
    check_texts(engine, toy(), prompts, params)
    assert engine.scheduler.retractions > 0


def test_aborted_prompt_leaves_its_pages_in_the_cache():
    engine = shared_engine("NONE")
    engine.flush_cache()
    prompt = list(range(5, 45))
    sequence = engine.add(prompt, SamplingParams(max_new_tokens=5))
    for _ in range(3):  # two chunks of 8 are dispatched and read, one is not read
        engine.step()
    engine.abort(sequence.id)
    drain(engine)
    done = engine.generate(prompt, SamplingParams(max_new_tokens=5))
    assert done.cached_tokens == 16
    check_plain(toy(), prompt, SamplingParams(max_new_tokens=5), done)
