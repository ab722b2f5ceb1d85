"""The simulation of routers and caches: against plain caches, a list in place of the router's tree, and by hand."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from router_cache import traced, turns
from routing import CacheAware, Request, Tree, Worker, at_random, most_reuse, round_robin, simulate

SIZE = 4


def request(arrival: float, tokens: str, prompt: int | None = None, page_size: int = SIZE) -> Request:
    """Of characters as tokens, of which `prompt` are the prompt and the others the output."""
    length = len(tokens) if prompt is None else prompt
    ids = [ord(c) for c in tokens]
    texts = [tuple(ids[i : i + page_size]) for i in range(0, len(ids) // page_size * page_size, page_size)]
    return Request(arrival, tokens[:length], length, len(tokens) - length, texts, page_size)


def workers(number: int, pages: int = 10_000, **given: float) -> list[Worker]:
    return [Worker(pages, SIZE, **{"prefill": 100.0, "step": 0.01} | given) for _ in range(number)]


def check(group: list[Worker]) -> None:
    """Nothing is held but by the caches, and no request waits."""
    for worker in group:
        worker.cache.check_integrity([])
        worker.allocator.check_integrity([worker.cache.pages])
        assert not worker.queue and worker.filling is None and worker.load == 0


def some_log(seed: int, number: int = 60) -> list[Request]:
    """Texts that share beginnings, with some output."""
    draw, texts, found = random.Random(seed), ["abcdefgh" * 2], []
    for i in range(number):
        start = draw.choice(texts)
        tokens = start[: draw.randint(0, len(start))] + "".join(draw.choices("abc", k=draw.randint(2, 30)))
        texts.append(tokens)
        found.append(request(100.0 * i, tokens, draw.randint(1, len(tokens))))
    return found


def plain_cache(log: list[Request]) -> list[int]:
    """Cached tokens of each request, of a set of all beginnings that were stored."""
    stored: set[tuple[tuple[int, ...], ...]] = set()
    found = []
    for each in log:
        known = 0
        while known < each.reusable and tuple(each.texts[: known + 1]) in stored:
            known += 1
        found.append(known * SIZE)
        stored |= {tuple(each.texts[: i + 1]) for i in range(len(each.texts))}
    return found


@pytest.mark.parametrize("seed", range(3))
def test_one_worker_is_the_plain_cache(seed):
    """Whatever the policy, if requests do not overlap."""
    log = some_log(seed)
    for policy in (round_robin(1), at_random(1), CacheAware(1)):
        group = workers(1, prefill=1e6)
        result = simulate(log, group, policy)
        assert [job.cached for job in result.jobs] == plain_cache(log)
        check(group)
    total = sum(each.prompt for each in log)
    assert most_reuse(log) == pytest.approx(sum(plain_cache(log)) / total)
    assert result.summary()["cached_share"] == pytest.approx(most_reuse(log), abs=1e-4)


def least_recently_used(log: list[Request], pages: int) -> list[int]:
    """The same with a cache of so many pages: a list of beginnings, the one used last at the end, leaves out first."""
    kept: list[tuple[tuple[int, ...], ...]] = []
    found = []
    for each in log:
        ways = [tuple(each.texts[: i + 1]) for i in range(len(each.texts))]
        known = 0
        while known < each.reusable and ways[known] in kept:
            known += 1
        found.append(known * SIZE)
        in_use = set(ways[:known])
        while len(kept) + each.pages - known > pages:
            idle = [
                way for way in kept if way not in in_use and not any(o[: len(way)] == way for o in kept if o != way)
            ]
            kept.remove(idle[0])
        kept = [way for way in kept if way not in set(ways)] + ways[::-1]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_small_pool_gives_up_what_was_used_least_recently(seed):
    log = some_log(seed)
    group = workers(1, pages=40, prefill=1e6)
    result = simulate(log, group, round_robin(1))
    assert [job.cached for job in result.jobs] == least_recently_used(log, 40)
    check(group)
    assert sum(job.cached for job in result.jobs) < sum(plain_cache(log))


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("pages", [40, 10_000])
def test_overlapping_requests_leave_nothing_behind(number, pages):
    log = [each._replace(arrival=0.05 * i) for i, each in enumerate(some_log(5))]
    for policy in (round_robin(number), at_random(number), CacheAware(number, balance_abs=2)):
        group = workers(number, pages)
        result = simulate(log, group, policy, speed=2.0)
        check(group)
        assert len(result.jobs) == len(log)
        assert all(job.arrival == each.arrival / 2 <= job.started < job.first_token
                   for job, each in zip(result.jobs, log, strict=True))  # fmt: skip
        assert sum(worker.computed for worker in group) == result.summary()["computed_tokens"]


def test_two_workers_by_hand():
    """Two conversations of three turns: round robin sends every second turn elsewhere, the router never does."""
    first, second = "aaaabbbbccccddddeeee", "zzzzyyyyxxxxwwwwvvvv"
    log = [request(float(i), text[:end], end) for i, (text, end) in enumerate(
        [(first, 12), (second, 12), (second, 16), (first, 16), (first, 20), (second, 20)])]  # fmt: skip
    cached = {name: [job.cached for job in simulate(log, workers(2), policy).jobs]
              for name, policy in (("turns", round_robin(2)), ("aware", CacheAware(2)))}  # fmt: skip
    assert cached["aware"] == [0, 0, 12, 12, 16, 16]
    assert cached["turns"] == [0, 0, 0, 0, 12, 12], "the third turn meets the first one's pages"


def test_times_by_hand():
    """A prompt of 100 tokens takes a second, its 50 tokens of output half of one; prompts are filled in order."""
    log = [request(0.0, "a" * 150, 100), request(0.0, "b" * 150, 100)]
    result = simulate(log, workers(1), round_robin(1))
    assert [job.first_token for job in result.jobs] == pytest.approx([1.0, 2.0])
    result = simulate(log, workers(1, pages=40), round_robin(1))
    assert [job.started for job in result.jobs] == pytest.approx([0.0, 1.5]), "waits for the pages of the first"
    with pytest.raises(ValueError, match="needs 38 pages, but a worker has 37"):
        simulate(log, workers(1, pages=37), round_robin(1))


# The policy.


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_against_a_list(seed):
    """A list of (text, worker) in order of use, without eviction."""
    draw, tree, sent = random.Random(seed), Tree(3), []
    for _ in range(200):
        text = "".join(draw.choices("ab", k=draw.randint(1, 8)))
        length, worker = tree.match(text)
        shared = [next((i for i, (a, b) in enumerate(zip(text, old, strict=False)) if a != b), min(len(text), len(old)))
                  for old, _ in sent]  # fmt: skip
        assert length == max(shared, default=0)
        if length:
            assert worker in {who for (_, who), same in zip(sent, shared, strict=True) if same == length}
        else:
            assert worker is None
        chosen = draw.randrange(3)
        tree.insert(text, chosen)
        sent.append((text, chosen))
        assert [tree.size(w) for w in range(3)] == [
            len({old[:i] for old, who in sent if who == w for i in range(1, len(old) + 1)}) for w in range(3)
        ]
    tree.evict(5)
    assert all(tree.size(w) <= 5 for w in range(3))
    tree.evict(0)
    assert tree.match("ab") == (0, None)


def test_the_tree_forgets_the_least_recently_used():
    tree = Tree(2)
    for text in ("abcd", "abxy", "qr"):
        tree.insert(text, 0)
    tree.insert("abcd", 1)
    tree.match("abcd")  # of worker 1, which was sent it last
    tree.evict(6)
    assert tree.match("abxy") == (4, 0), "the end of abcd of worker 0 went first"
    assert tree.match("abcd") == (4, 1) and (tree.size(0), tree.size(1)) == (6, 4)


def test_rules_of_the_policy():
    policy = CacheAware(3, threshold=0.5, balance_abs=4, balance_rel=2.0)
    assert policy(request(0, "abcdefgh"), [1, 0, 0], 0.0) == 1, "unknown: the first of the shortest queues"
    assert policy(request(0, "abcdexyz"), [0, 4, 0], 0.0) == 1, "5 of 8 are known there"
    assert policy(request(0, "abcd1234"), [0, 4, 1], 0.0) == 0, "4 of 8 are not more than half"
    assert policy(request(0, "abcdexyz"), [5, 10, 5], 0.0) == 1, "10 is not more than twice 5"
    assert policy(request(0, "abcdexyz"), [4, 8, 4], 0.0) == 1, "a difference of 4 is not more than 4"
    assert policy.imbalanced == 0
    assert policy(request(0, "abcdexyz"), [4, 9, 3], 0.0) == 2 and policy.imbalanced == 1
    assert policy(request(0, "abcdexyz"), [0, 0, 0], 0.0) == 2, "noted when the load decided"
    policy.most = 0
    assert policy(request(0, "abcdexyz"), [0, 0, 0], 60.0) == 0, "forgotten after a minute"


# Logs.


def test_a_trace(tmp_path):
    """Of two requests that share a block and a half, one block of 512 tokens is reused."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 27482, "input_length": 1024, "output_length": 52, "hash_ids": [7, 8]}\n'
    )
    log = traced(file)
    assert [each.arrival for each in log] == [0, 27.482]
    assert [(len(each.texts), each.reusable, each.pages) for each in log] == [(2, 2, 3), (2, 1, 3)]
    result = simulate(log, [Worker(10, 512, 1e4, 0.01)], round_robin(1))
    assert [job.cached for job in result.jobs] == [0, 512], "the last token is always computed"
    assert most_reuse(log) == 512 / 2124 and traced(file, 1) == log[:1]


def test_turns_hold_what_was_said_before():
    log = turns()
    assert len(log) == 80 and [each.arrival for each in log] == sorted(each.arrival for each in log)
    assert all(len(each.texts) == (each.prompt + each.output) // 16 for each in log)
    first = {tuple(each.symbols) for each in log}
    again = [each for each in log if any(each.symbols[:i] and tuple(each.symbols[:i]) in first
                                         for i in range(len(each.symbols)))]  # fmt: skip
    assert len(again) == 40 and 0.4 < most_reuse(log) < 0.8
