"""Several prompts in one forward: which programs are chosen, how fast running requests go on, and whose turn it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import DRAFTS, check_idle, check_plain, make_engine, toy

from specjax.drafters import make_drafter
from specjax.engine import SamplingParams
from specjax.engine.buckets import PACE, Buckets, Key
from specjax.engine.sequence import Status


def buckets(platform: str = "cpu", algorithm: str = "NONE", **sizes: Any) -> Buckets:
    return Buckets.build(platform, make_drafter(algorithm), **({"rows": 48, "request_pages": 64} | sizes))


def shapes(found: Buckets) -> list[tuple[int, int]]:
    """(prompts, tokens of each) of all programs."""
    return sorted((key.rows, key.width) for key in found.all_keys() if key.kind == "prefill")


@pytest.mark.parametrize(
    ("platform", "sizes", "expected"),
    [
        ("cpu", {}, [(1, 16), (1, 64), (1, 512), (8, 64)]),
        ("gpu", {}, [(1, 256), (1, 2048), (8, 256)]),
        ("cpu", {"rows": 1}, [(1, 16), (1, 64), (1, 512)]),
        ("cpu", {"rows": 3}, [(1, 16), (1, 64), (1, 512), (3, 64)]),
        ("cpu", {"chunk": 128}, [(1, 16), (1, 64), (1, 128), (8, 64)]),
        ("cpu", {"chunk": 8}, [(1, 8), (8, 8)]),
        ("cpu", {"prefill": 200}, [(1, 16), (1, 64), (1, 200), (3, 64)]),
        ("cpu", {"prefill": 20, "chunk": 300}, [(1, 16), (1, 20)]),
        ("gpu", {"prefill": 1024}, [(1, 256), (1, 1024), (4, 256)]),
    ],
)
def test_the_programs_keep_to_the_limits(platform, sizes, expected):
    assert shapes(buckets(platform, **sizes)) == expected


@pytest.mark.parametrize(
    ("left", "most", "expected"),
    [
        ([60], None, (1, 64)),
        ([500], None, (1, 512)),
        ([2000], None, (1, 512)),
        ([12], None, (1, 16)),
        ([60] * 8, None, (8, 64)),
        ([60] * 7, None, (8, 64)),
        ([60] * 6, None, (1, 64)),  # six forwards of 64 cost less than one of 512
        ([60, 60], None, (1, 64)),  # two of eight places would be used
        ([60, 5000], None, (1, 64)),
        ([3, 5000], None, (1, 16)),
        ([5000] * 8, None, (1, 512)),  # costs the same, and the first is ready earlier
        ([5000, 60], 40, (1, 16)),
        ([60] * 8, 40, (1, 16)),
        ([60] * 8, 100, (1, 64)),
        ([5000], 5, (1, 64)),  # nothing is small enough: the smallest of one prompt
    ],
)
def test_the_program_of_which_most_is_used(left, most, expected):
    found = buckets()
    compiled = {key for key in found.all_keys() if key.width != 16 or most != 5}
    key = next(found.prefill_keys(left, [4] * len(left), most, compiled))
    assert (key.rows, key.width) == expected


def test_what_is_not_compiled():
    """One program is compiled where there is none, another where a chunk is long; several prompts wait for no
    compiler."""
    found = buckets()

    def first(left: list[int], *compiled: tuple[int, int]) -> tuple[int, int]:
        keys = {Key("prefill", width, 64, rows) for rows, width in compiled}
        key = next(found.prefill_keys(left, [4] * len(left), None, keys))
        return key.rows, key.width

    assert first([60] * 8) == (1, 64)
    assert first([60] * 8, (1, 64)) == (1, 64)
    assert first([5000], (1, 64)) == (1, 512)
    assert first([12], (1, 16)) == (1, 64), "the chunk that serves everybody"
    assert first([60] * 8, (8, 64)) == (8, 64), "better than what it would wait for"


def test_a_table_that_holds_the_longest_of_the_prompts():
    found = buckets(request_pages=2000)
    assert found.tables == (512, 2000)
    keys = {key for key in found.all_keys() if key.rows == 8}
    assert next(found.prefill_keys([60] * 8, [4] * 8, None, keys)).table == 512
    assert next(found.prefill_keys([60] * 8, [4] * 7 + [600], None, keys)).table == 2000


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_room_beside_running_requests(platform):
    """A prefill takes as long as `PACE` steps, or as many as there are prompts for each running request."""
    found = buckets(platform)
    free = found.free_tokens
    assert found.room_beside(0, 5) is None
    assert found.room_beside(1, 1) == PACE * (free + 1) - free
    assert found.room_beside(4, 4) == PACE * (free + 4) - free
    assert found.room_beside(2, 7) == int(3.5 * PACE * (free + (4 if platform == "cpu" else 2))) - free
    assert found.room_beside(16, 8) is found.room_beside(4, 40) is None, "a whole pack waits"
    assert found.room_beside(17, 8) is not None
    assert found.room_beside(1000, 1) == PACE * (free + 48) - free
    trees = buckets(platform, "NGRAM")
    assert trees.room_beside(1, 1) == PACE * (free + trees.tree_widths(1)[-1]) - free


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_texts_of_prompts_that_share_forwards(algorithm):
    """Of all lengths, with and without running requests, some resumed; every chunk is one that was compiled."""
    engine = make_engine(
        toy(), DRAFTS[algorithm], max_running_requests=6, max_total_tokens=240, chunked_prefill_size=16,
        context_length=96,
    )  # fmt: skip
    engine.warm_up(progress=False)
    assert {(key.rows, key.width) for key in engine.executables.compiled() if key.kind == "prefill"} == {
        (1, 16),
        (6, 16),
    }
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 99, int(n)).tolist() for n in rng.choice([1, 2, 15, 16, 17, 33, 60], 20)]
    params = [SamplingParams(max_new_tokens=12, temperature=float(i % 2), seed=i) for i in range(20)]
    used: list[Key] = []
    run = engine.device.run

    def watched(key: Key, program: Any, inputs: Any) -> Any:
        used.append(key)
        return run(key, program, inputs)

    engine.device.run = watched
    for prompt, one, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(toy(), prompt, one, done)
    assert {key.rows for key in used if key.kind == "prefill"} == {1, 6}
    check_idle(engine)


def test_a_short_request_does_not_wait_for_a_long_prompt():
    """It begins after one chunk of the long one, which goes on meanwhile; running streams get a token in each step."""
    engine = make_engine(toy(), max_running_requests=4, max_total_tokens=2048, context_length=600, page_size=16)
    rng = np.random.default_rng(5)
    stream = engine.add(rng.integers(3, 99, 5).tolist(), SamplingParams(max_new_tokens=200, ignore_eos=True))
    while not stream.output:
        engine.step()
    long = engine.add(rng.integers(3, 99, 500).tolist(), SamplingParams(max_new_tokens=3))
    for _ in range(10):
        engine.step()
    assert long.prefilled > 0 and long.status is Status.PREFILLING
    short = engine.add(rng.integers(3, 99, 14).tolist(), SamplingParams(max_new_tokens=3))
    waited, before = 0, len(stream.output)
    while not short.output:
        engine.step()
        waited += 1
    assert waited <= 5 and len(stream.output) - before >= waited - 1
    assert long.status is Status.PREFILLING
    while engine.unfinished:
        engine.step()
    assert long.finish_reason is not None and len(long.output) == 3
