"""`plan` over values: properties of random views, and the choice of programs. No model runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_helpers import NGRAM

from specjax.drafters import Speculation, make_speculation
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.plan import (
    BATCHES,
    BLOCK_TOKENS,
    HEAD_BLOCK_TOKENS,
    PROMPTS,
    Buckets,
    Drafting,
    Key,
    Prompt,
    Ready,
    Running,
    View,
    plan,
)

NGRAMS = make_speculation(NGRAM)._replace(explicit_width=False)


def with_facts(**facts: Any) -> Speculation:
    """A drafter that differs in these facts; trees are cut to their best nodes."""
    return NGRAMS._replace(drafter=NGRAMS.drafter._replace(**facts), resize=None)


def buckets(platform: str = "cpu", drafter: Any = NGRAMS, **changes: Any) -> Buckets:
    sizes: dict[str, Any] = {"rows": 48, "request_pages": 64} | changes
    return Buckets.build(platform, drafter, **sizes)


def every_key(sizes: Buckets) -> list[Key]:
    """All programs that requests may need."""
    keys = [key for table in sizes.tables for kind in ("prefill", "scoring") for key in sizes.prefills(kind, table)]
    for table in sizes.tables:
        for batch in sizes.batches:
            for nodes in sizes.sizes(batch):
                keys += [Key("step", batch, table, nodes=nodes)]
                keys += Key("constrained", batch, table, nodes=nodes).halves
    return keys


def policy_of(sizes: Buckets, ratio: float, guess: float = 0.5) -> DraftPolicy:
    """`ratio`: estimated duration of a step with drafts relative to one without."""
    nodes = {batch: sizes.sizes(batch) for batch in sizes.batches}
    return DraftPolicy(nodes, lambda batch, n: ratio if n > 1 else 1.0, guesses=(guess, guess))


# Properties


SITUATIONS = 600


def situations() -> Iterator[tuple[View, Ready, Buckets, Drafting]]:
    """Random views, the programs that are ready, their sizes, and who chooses N."""
    for seed in range(SITUATIONS):
        rng = np.random.default_rng(seed)

        def one(*choices: Any, rng: np.random.Generator = rng) -> Any:
            return choices[rng.integers(len(choices))]

        def below(most: int, rng: np.random.Generator = rng) -> int:
            return int(rng.integers(most))

        drafter = NGRAMS._replace(explicit_width=one(True, False), costly_observe=one(True, False))
        pages, adaptive = one(40, 700), one(True, False)
        sizes = buckets(one("cpu", "gpu"), drafter, rows=one(1, 3, 5, 20), request_pages=pages, adaptive=adaptive)
        ratio = one(0.5, 3.0)
        policy = policy_of(sizes, ratio) if sizes.chooses else None
        prompts = [Prompt(f"p{i}", 1 + below(3000), 1 + below(pages), scores=one(True, False)) for i in range(below(7))]
        running = [
            Running(f"r{i}", 1 + below(pages), one(True, False), unread=one(True, False)) for i in range(below(7))
        ]
        running = [one(r, r._replace(grammar=True, forced=tuple(range(below(9))))) for r in running]
        states = {key: one("compiled", "failed", "missing", "missing") for key in every_key(sizes)}
        ready = Ready(*(frozenset(k for k, state in states.items() if state == name) for name in Ready._fields))
        view = View(prompts, running, one(0, 0, sizes.small, sizes.chunks[-1]))
        yield view, ready, sizes, Drafting(policy, always=drafter.costly_observe)


def runs(key: Key, ready: Ready) -> bool:
    """All programs of a batch are compiled, or its drafter's is known to fail."""
    return key in ready.compiled and all(half in ready.compiled | ready.failed for half in key.halves)


def could_run(key: Key, request: Running, drafting: Drafting) -> bool:
    kind = "constrained" if request.grammar else "step"
    keeps = key.nodes > 1 or not (drafting.always and request.drafts)
    return key.kind == kind and key.table >= request.pages and keeps


def test_steps():
    """Every runnable request is in one batch, which has room for it, and no request waits for a compilation while a
    program that could run it is ready."""
    for situation in situations():
        view, ready, sizes, drafting = situation
        batches = [batch for batch in plan(*situation) if batch.key.verifies]
        assert plan(*situation) == plan(*situation), "a plan depends on its arguments alone"
        runnable = {r.id: r for r in view.running if not (r.grammar and r.unread)}
        planned = [id for batch in batches for id in batch.rows]
        assert sorted(planned) == sorted(runnable), "once each, and no grammar with unread tokens"
        for batch in batches:
            key, requests = batch.key, [runnable[id] for id in batch.rows]
            assert 0 < len(requests) <= key.width in sizes.batches and key.nodes in sizes.sizes(key.width)
            assert key.table >= max(r.pages for r in requests)
            assert key.kind == ("constrained" if any(r.grammar for r in requests) else "step")
            assert set(batch.drafted) <= set(batch.rows) and (not batch.drafted or key.nodes > 1)
            for id, tokens in batch.forced.items():
                assert 0 < len(tokens) <= sizes.depths[key.nodes] and tokens == runnable[id].forced[: len(tokens)]
            if key.nodes > 1:
                assert set(batch.drafted) == {r.id for r in requests if r.drafts or r.id in batch.forced}
            elif drafting.always and min(sizes.trees.values()) > 1:
                assert not any(r.drafts for r in requests), "a hole in the drafter's state"
            if batch.runs:
                assert runs(key, ready) or key in ready.failed
            else:
                assert set(key.halves) & set(batch.wanted) - ready.compiled
                if drafting.policy is not None and not drafting.always:
                    for other in filter(lambda other: runs(other, ready), every_key(sizes)):
                        assert not any(could_run(other, request, drafting) for request in requests)
            assert not any(key in ready.compiled and runs(key, ready) for key in batch.wanted if key.kind == "step")


def test_prefills():
    """At most one that runs; its tokens are those of the first prompts; limits hold where a ready program allows it."""
    for situation in situations():
        view, ready, sizes, _ = situation
        batches = [batch for batch in plan(*situation) if not batch.key.verifies]
        by_id = {prompt.id: prompt for prompt in view.prompts}
        assert sum(batch.runs for batch in batches) <= 1
        if not view.running and view.prefilling > sizes.small:
            assert not batches, "one long chunk at a time, for which a new request waits"
        elif view.prompts:
            assert batches[0].rows[0] == view.prompts[0].id, "the first prompt is not passed over"
        most = sizes.most_prefilled(len(view.running), len(view.prompts))
        for batch in batches:
            prompts, key = [by_id[id] for id in batch.rows], batch.key
            assert 0 < len(prompts) == len(batch.lengths) <= key.rows and sum(batch.lengths) <= key.size
            assert all(0 < n <= min(key.width, p.left) for n, p in zip(batch.lengths, prompts, strict=True))
            assert key.table >= max(prompt.pages for prompt in prompts)
            special = [prompt.scores or prompt.pages > sizes.tables[0] for prompt in prompts]
            assert not any(special) or len(prompts) == 1, "runs alone"
            assert key.kind == ("scoring" if prompts[0].scores else "prefill")
            fitting = [
                k for k in every_key(sizes) if k.kind == key.kind and k.table >= prompts[0].pages and runs(k, ready)
            ]
            if batch.runs:
                assert runs(key, ready) or key in ready.failed
                if most is not None and any(k.size <= most for k in fitting):
                    assert key.size <= most
            else:
                assert not fitting, "a ready program could run it"


def test_long_prompt_keeps_its_share():
    """Whichever prompt comes first gets the chunk, so the share is that of the order."""
    sizes = buckets()
    ready = Ready(frozenset(sizes.all_keys()))
    running = [Running("r", 4)]
    for order in (("long", "short"), ("short", "long")):
        left = {"long": 3000, "short": 20}
        view = View([Prompt(id, left[id], 4) for id in order], running)
        prefill, step = plan(view, ready, sizes, Drafting())
        assert prefill.rows[0] == order[0] and step.rows == ("r",)


# Sizes


@pytest.mark.parametrize(
    ("platform", "changes", "expected"),
    [
        ("cpu", {}, [(1, 16), (1, 64), (1, 256), (8, 64)]),
        ("gpu", {}, [(1, 256), (1, 2048), (8, 256)]),
        ("cpu", {"rows": 1}, [(1, 16), (1, 64), (1, 256)]),
        ("cpu", {"rows": 3}, [(1, 16), (1, 64), (1, 256), (3, 64)]),
        ("cpu", {"chunk": 128}, [(1, 16), (1, 64), (1, 128), (8, 64)]),
        ("cpu", {"chunk": 8}, [(1, 8), (8, 8)]),
        ("cpu", {"prefill": 200}, [(1, 16), (1, 64), (1, 200), (3, 64)]),
        ("cpu", {"prefill": 20, "chunk": 300}, [(1, 16), (1, 20)]),
        ("gpu", {"prefill": 1024}, [(1, 256), (1, 1024), (4, 256)]),
    ],
)
def test_prefill_programs(platform, changes, expected):
    sizes = buckets(platform, **changes)
    assert sorted((key.rows, key.width) for key in sizes.all_keys() if key.kind == "prefill") == expected


def prefill(sizes: Buckets, left: list[int], keys: Any, running: int = 0, waiting: int = 0, pages: Any = None) -> Any:
    """The prefill of prompts with so many tokens left beside `running` requests."""
    prompts = [Prompt(str(i), n, 4 if pages is None else pages[i]) for i, n in enumerate(left)]
    prompts += [Prompt(f"w{i}", 1, 10**6) for i in range(waiting)]
    view = View(prompts, [Running(f"r{i}", 4) for i in range(running)])
    return plan(view, Ready(frozenset(keys)), sizes, Drafting())[0]


@pytest.mark.parametrize(
    ("left", "running", "expected"),
    [
        ([60], 0, (1, 64)),
        ([500], 0, (1, 256)),
        ([2000], 0, (1, 256)),
        ([12], 0, (1, 16)),
        ([60] * 8, 0, (8, 64)),
        ([60] * 3, 0, (1, 64)),  # less padding
        ([60, 5000], 0, (1, 64)),
        ([5000] * 8, 0, (8, 64)),
        ([5000, 60], 9, (1, 16)),
        ([60] * 8, 40, (1, 16)),
        ([60] * 7, 6, (1, 64)),
    ],
)
def test_program_with_the_least_padding(left, running, expected):
    sizes = buckets()
    key = prefill(sizes, left, sizes.all_keys(), running).key
    assert (key.rows, key.width) == expected


def test_prefills_that_are_not_compiled():
    """A ready program runs; a longer chunk compiles meanwhile."""
    sizes = buckets()

    def first(left: list[int], *compiled: tuple[int, int]) -> tuple[Any, ...]:
        batch = prefill(sizes, left, {Key("prefill", width, 64, rows) for rows, width in compiled})
        return batch.key.rows, batch.key.width, batch.runs, [key.width for key in batch.wanted]

    assert first([60] * 8) == (1, 64, False, [64])
    assert first([60] * 8, (1, 64)) == (1, 64, True, [])
    assert first([5000], (1, 64)) == (1, 64, True, [256])
    assert first([12], (1, 16)) == (1, 16, True, [])
    assert first([60] * 8, (8, 64)) == (8, 64, True, [])


def test_tables():
    sizes = buckets(request_pages=2000)
    assert sizes.tables == (512, 2000)
    narrow = next(key for key in sizes.all_keys() if key.rows == 8)
    keys = {narrow, narrow._replace(table=2000)}
    assert prefill(sizes, [60] * 8, keys).key.table == 512
    wide = prefill(sizes, [60] * 8, keys, pages=[600] + [4] * 7)
    assert wide.key.table == 2000 and len(wide.rows) == 1, "a prompt with a wide table runs alone"


def test_chunk_limit_of_running_requests():
    """Running requests limit chunks, unless more prompts wait than requests run."""
    sizes = buckets()
    assert sizes.most_prefilled(0, 5) is None
    assert sizes.most_prefilled(1, 1) == sizes.most_prefilled(1000, 1) == sizes.most_prefilled(17, 8) == 16
    assert sizes.most_prefilled(2, 7) == 64
    assert sizes.most_prefilled(16, PROMPTS) is sizes.most_prefilled(4, 40) is None
    assert buckets("gpu").most_prefilled(1, 1) == 256


def test_ragged_programs():
    """They replace the programs of several prompts where some padding can be left out."""

    def programs(platform: str = "cpu", **changes: Any) -> list[tuple[int, int, int]]:
        keys = buckets(platform, ragged=True, **changes).all_keys()
        assert not any(key.tokens for key in keys if key.kind != "prefill")
        return [(key.rows, key.width, key.tokens) for key in keys if key.kind == "prefill" and key.rows > 1]

    assert programs() == [(8, 64, 256)]
    assert programs(rows=1) == programs(prefill=64) == []
    assert programs(rows=3) == [(3, 64, 0)], "no padding to leave out"
    assert programs(prefill=200) == [(8, 64, 200)]
    assert programs(chunk=16) == [(8, 16, 64)]
    assert not any(tokens for *_, tokens in programs("gpu"))

    sizes = buckets(ragged=True)

    def chosen(left: list[int]) -> tuple[int, int]:
        key = prefill(sizes, left, sizes.all_keys()).key
        return key.rows, key.size

    assert chosen([40] * 12) == chosen([60] * 8) == chosen([40, 40, 40]) == (8, 256)
    assert chosen([500]) == chosen([100]) == (1, 256) and chosen([60]) == (1, 64) and chosen([12]) == (1, 16)
    small = {key for key in sizes.all_keys() if key.width < 256 and key.rows == 1}
    assert prefill(sizes, [100], small).key.width == 64 == prefill(buckets(), [100], sizes.all_keys()).key.width
    for left, lengths in (([40] * 8, [40] * 6 + [16]), ([300, 5, 300, 2, 90], [64, 5, 64, 2, 64]), ([1] * 20, [1] * 8)):
        assert Key("prefill", 64, 64, 8, tokens=256).lengths(left) == lengths
        assert Key("prefill", 64, 64, 8).lengths(left) == [min(tokens, 64) for tokens in left[:8]]


@pytest.mark.parametrize("rows", [1, 3, 47, 100])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_buckets_cover_all_batches(rows, platform):
    def sizes(**facts: Any) -> Buckets:
        return buckets(platform, with_facts(width=60, **facts), rows=rows, request_pages=700)

    one, before_heads = sizes(), with_facts(width=60, features="final")
    heads = buckets(platform, before_heads._replace(lookup=1), rows=rows, request_pages=700)
    asked = buckets(platform, with_facts(width=60)._replace(explicit_width=True), rows=rows, request_pages=700)
    assert one.batches == tuple(sorted(set(one.batches))) and one.batches[-1] == rows
    assert len(one.batches) + len(one.chunks) < 16
    for count in range(1, rows + 1):
        assert one.batch(count) >= count and one.batch(one.batch(count)) == one.batch(count)
    for pages in (1, 512, 513, 700):
        assert one.tables_for(pages)[0] >= pages
    for limited, most in ((one, BLOCK_TOKENS), (heads, HEAD_BLOCK_TOKENS)):
        expected = {b: 60 if b == 1 else max(min(60, most[platform] // b), 1) for b in one.batches}
        assert limited.trees == expected, "a single request has the whole tree"
    found = buckets(platform, before_heads._replace(lookup=4), rows=rows, request_pages=700)
    for b in one.batches[1:]:
        nodes = min(4, BLOCK_TOKENS[platform] // b) if platform == "cpu" else found.trees[b]
        assert found.trees[b] == max(nodes, 1), "n-grams draft where a head is too slow"
    assert set(asked.trees.values()) == {60} and asked.most_drafting == rows, "an explicit width holds everywhere"
    if rows == 100:
        assert one.most_drafting == {"cpu": 16, "gpu": 100}[platform]


def test_batches_of_a_gpu():
    """Programs that are compiled before serving, and choices among compiled programs."""
    head = with_facts(width=8, depth=7, features="final")
    sizes = buckets("gpu", head, rows=64, request_pages=8)
    assert [key.width for key in sizes.all_keys() if key.kind == "step"] == [1, 64, 2, 4, 8, 16, 24, 32, 48]
    assert {key.width for key in sizes.first_keys(20) if key.kind == "step"} == {24}
    large = buckets("gpu", head, rows=256, request_pages=8)
    assert large.batches == BATCHES["gpu"]
    assert large.trees[256] == 1 and large.most_drafting == 128

    def first(count: int, *compiled: int) -> tuple[int, bool, list[int]]:
        keys = frozenset(sizes.step(batch) for batch in compiled)
        batch = plan(View([], [Running(str(i), 8) for i in range(count)]), Ready(keys), sizes, Drafting())[0]
        return batch.key.width, batch.runs, [key.width for key in batch.wanted]

    missing = [(count, first(count)) for count in (1, 2, 5, 20, 64)]
    assert missing == [(1, (1, False, [1])), (2, (4, False, [4])), (5, (16, False, [16])), (20, (48, False, [48])),
                       (64, (64, False, [64]))], "room for later requests"  # fmt: skip
    assert first(5, 1, 64) == (64, True, []), "no compilation for a smaller batch"
    assert first(5, 1, 8, 64) == (8, True, [])
    assert first(5, 1) == (1, True, [16]), "in parts while a program compiles"


@pytest.mark.parametrize("chosen", [1, 4])
def test_another_size_runs_while_the_chosen_one_compiles(chosen):
    """Unless its steps would leave a hole in the drafter's state."""
    sizes = buckets(rows=4, adaptive=True)
    policy = policy_of(sizes, 0.1 if chosen > 1 else 9.0)
    other = 5 - chosen
    ready = Ready(frozenset([sizes.step(1, other)]))
    for always in (False, True):
        (batch,) = plan(View([], [Running("a", 4)]), ready, sizes, Drafting(policy, always=always))
        if always:  # drafts, whatever the policy says
            assert (batch.key.nodes, batch.runs) == (4, other == 4)
        else:
            assert batch.key.nodes == other and batch.runs and [key.nodes for key in batch.wanted] == [chosen]


def test_forced_tokens_pay_for_the_whole_batch():
    """One forced token of a request makes all rows of its batch wide."""
    sizes = buckets(rows=4, adaptive=True)
    ready = Ready(frozenset(every_key(sizes)))
    rng = np.random.default_rng(0)
    for requests, ratio, expected in ((1, 1.4, True), (4, 3.0, False), (4, 1.2, True)):
        policy = policy_of(sizes, ratio, 0.05)
        running = [Running(str(i), 4, grammar=True) for i in range(requests)]
        running[int(rng.integers(requests))] = Running("x", 4, grammar=True, forced=(7, 8, 9))
        (batch,) = plan(View([], running), ready, sizes, Drafting(policy))
        assert (batch.forced == {"x": (7, 8, 9)}) == expected == (batch.key.nodes > 1)
