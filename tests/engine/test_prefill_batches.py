"""Several prompts in one forward: which programs are chosen, how fast running requests go on, and whose turn it is."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import DRAFTS, VOCABULARY, check_idle, check_plain, make_engine, toy
from toy_models import tiny_llama

from specjax.drafters import make_drafter
from specjax.engine import SamplingParams
from specjax.engine.buckets import Buckets, Key
from specjax.engine.sequence import Status
from specjax.models.blocks import Ragged


def buckets(platform: str = "cpu", algorithm: str = "NONE", **given: Any) -> Buckets:
    sizes: dict[str, Any] = {"rows": 48, "request_pages": 64} | given
    return Buckets.build(platform, make_drafter(algorithm), **sizes)


def shapes(found: Buckets) -> list[tuple[int, int]]:
    """(prompts, tokens of each) of all programs."""
    return sorted((key.rows, key.width) for key in found.all_keys() if key.kind == "prefill")


@pytest.mark.parametrize(
    ("platform", "sizes", "expected"),
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
def test_the_programs_keep_to_the_limits(platform, sizes, expected):
    assert shapes(buckets(platform, **sizes)) == expected


@pytest.mark.parametrize(
    ("left", "most", "expected"),
    [
        ([60], None, (1, 64)),
        ([500], None, (1, 256)),
        ([2000], None, (1, 256)),
        ([12], None, (1, 16)),
        ([60] * 8, None, (8, 64)),
        ([60] * 3, None, (1, 64)),  # less padding
        ([60, 5000], None, (1, 64)),
        ([5000] * 8, None, (8, 64)),
        ([5000, 60], 40, (1, 16)),
        ([60] * 8, 40, (1, 16)),
        ([60] * 8, 100, (1, 64)),
        ([5000], 5, (1, 64)),  # nothing is small enough: the smallest of one prompt
    ],
)
def test_the_program_of_which_most_is_used(left, most, expected):
    sizes = buckets()
    compiled = {key for key in sizes.all_keys() if key.width > 16 or most != 5}
    key = next(sizes.prefill_keys(left, [4] * len(left), most, compiled))
    assert (key.rows, key.width) == expected


def test_what_is_not_compiled():
    """One program is compiled where there is none, another where a chunk is long; several prompts wait for no
    compiler."""
    sizes = buckets()

    def first(left: list[int], *compiled: tuple[int, int]) -> tuple[int, int]:
        keys = {Key("prefill", width, 64, rows) for rows, width in compiled}
        key = next(sizes.prefill_keys(left, [4] * len(left), None, keys))
        return key.rows, key.width

    assert first([60] * 8) == (1, 64)
    assert first([60] * 8, (1, 64)) == (1, 64)
    assert first([5000], (1, 64)) == (1, 256)
    assert first([12], (1, 16)) == (1, 64), "the chunk that serves everybody"
    assert first([60] * 8, (8, 64)) == (8, 64), "better than what it would wait for"


def test_a_table_that_holds_the_longest_of_the_prompts():
    sizes = buckets(request_pages=2000)
    assert sizes.tables == (512, 2000)
    keys = {key for key in sizes.all_keys() if key.rows == 8}
    assert next(sizes.prefill_keys([60] * 8, [4] * 8, None, keys)).table == 512
    assert next(sizes.prefill_keys([60] * 8, [4] * 7 + [600], None, keys)).table == 2000


def test_the_width_beside_running_requests():
    """A stream waits for a fine chunk; for a small one where more prompts wait than requests run; in a burst the
    prompts come first."""
    sizes = buckets()
    assert sizes.most_prefilled(0, 5) is None
    assert sizes.most_prefilled(1, 1) == sizes.most_prefilled(1000, 1) == sizes.most_prefilled(17, 8) == 16
    assert sizes.most_prefilled(2, 7) == 64
    assert sizes.most_prefilled(16, 8) is sizes.most_prefilled(4, 40) is None
    assert buckets("gpu").most_prefilled(1, 1) == 256


def ragged(**sizes: Any) -> list[tuple[int, int, int]]:
    """(prompts, most tokens of each, of all) of the programs without padding."""
    found = buckets(ragged=True, **sizes)
    assert not any(key.tokens for key in buckets("gpu", ragged=True, **sizes).all_keys())
    assert not any(key.tokens for key in found.all_keys() if key.kind != "prefill")
    return [(key.rows, key.width, key.tokens) for key in found.all_keys() if key.kind == "prefill" and key.rows > 1]


def test_the_programs_without_padding_keep_to_the_limits():
    """They take the place of the others for several prompts, and there is none where nothing would be left out."""
    assert ragged() == [(8, 64, 256)]
    assert ragged(rows=1) == ragged(prefill=64) == []
    assert ragged(rows=3) == [(3, 64, 0)], "no padding to leave out"
    assert ragged(prefill=200) == [(8, 64, 200)]
    assert ragged(prefill=100) == [(8, 64, 100)]
    assert ragged(chunk=16) == [(8, 16, 64)]


@pytest.mark.parametrize(
    ("left", "expected"),
    [([40] * 8, [40] * 6 + [16]), ([300, 5, 300, 2, 90], [64, 5, 64, 2, 64]), ([0, 3], [0, 3]), ([1] * 20, [1] * 8)],
)
def test_the_first_prompts_take_the_tokens(left, expected):
    assert Key("prefill", 64, 64, 8, tokens=256).lengths(left) == expected
    assert Key("prefill", 64, 64, 8).lengths(left) == [min(tokens, 64) for tokens in left[:8]]


def test_prompts_of_different_lengths_share_a_forward():
    """Where they fill its tokens better than one prompt fills a chunk, and the limit allows it."""
    sizes = buckets(ragged=True)

    def chosen(left: list[int], most: int | None = None) -> tuple[int, int]:
        key = next(sizes.prefill_keys(left, [4] * len(left), most, {*sizes.all_keys()}))
        return key.rows, key.size

    assert chosen([40] * 12) == chosen([60] * 8) == (8, 256)
    assert chosen([40, 40, 40]) == chosen([40] * 12, 150) == (1, 64)
    assert chosen([500]) == (1, 256)


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_different_lengths_have_their_values_without_padding(seed):
    """Against a loop."""
    rng = np.random.default_rng(seed)
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


def watched(engine: Any) -> list[Key]:
    """Gets the key of each program that the engine runs."""
    used: list[Key] = []
    run = engine.device.run

    def noted(key: Key, program: Any, inputs: Any) -> Any:
        used.append(key)
        return run(key, program, inputs)

    engine.device.run = noted
    return used


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_texts_of_prompts_without_padding(algorithm):
    """Of all lengths, in forwards that up to eight of them share, beside running requests."""
    model = tiny_llama(vocab_size=VOCABULARY)
    engine = make_engine(
        model, DRAFTS[algorithm], max_running_requests=8, max_total_tokens=480, chunked_prefill_size=16,
        context_length=96,
    )  # fmt: skip
    engine.warm_up(progress=False)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 99, int(n)).tolist() for n in rng.choice([1, 2, 9, 15, 16, 17, 33, 60], 24)]
    params = [SamplingParams(max_new_tokens=8, temperature=float(i % 2), seed=i) for i in range(24)]
    used = watched(engine)
    for prompt, one, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(model, prompt, one, done)
    assert {key.tokens for key in used if key.kind == "prefill"} >= {64}
    check_idle(engine)


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_texts_of_prompts_that_share_forwards(algorithm):
    """Of all lengths, with and without running requests, some resumed; every chunk is one that was compiled."""
    engine = make_engine(
        toy(), DRAFTS[algorithm], max_running_requests=6, max_total_tokens=240, chunked_prefill_size=16,
        context_length=96,
    )  # fmt: skip
    engine.warm_up(progress=False)
    assert {(key.rows, key.width) for key in engine.programs.compiled() if key.kind == "prefill"} == {
        (1, 16),
        (6, 16),
    }
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 99, int(n)).tolist() for n in rng.choice([1, 2, 15, 16, 17, 33, 60], 20)]
    params = [SamplingParams(max_new_tokens=12, temperature=float(i % 2), seed=i) for i in range(20)]
    used = watched(engine)
    for prompt, one, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(toy(), prompt, one, done)
    assert {key.rows for key in used if key.kind == "prefill"} == {1, 6}
    check_idle(engine)


def test_a_short_request_does_not_wait_for_a_long_prompt():
    """It begins after one chunk of the long one, which goes on meanwhile; running streams get a token in each step."""
    engine = make_engine(toy(), max_running_requests=4, max_total_tokens=2048, context_length=600, page_size=16)
    rng = np.random.default_rng(5)
    stream = engine.add(rng.integers(3, 99, 5).tolist(), SamplingParams(max_new_tokens=200, ignore_eos=True))
    while not stream.output.tokens:
        engine.step()
    long = engine.add(rng.integers(3, 99, 500).tolist(), SamplingParams(max_new_tokens=3))
    for _ in range(10):
        engine.step()
    assert long.active_slot.prefilled > 0 and long.status is Status.PREFILLING
    short = engine.add(rng.integers(3, 99, 14).tolist(), SamplingParams(max_new_tokens=3))
    waited, before = 0, len(stream.output.tokens)
    while not short.output.tokens:
        engine.step()
        waited += 1
    assert waited <= 5 and len(stream.output.tokens) - before >= waited - 1
    assert long.status is Status.PREFILLING
    while engine.unfinished:
        engine.step()
    assert long.output.finish_reason is not None and len(long.output.tokens) == 3


def test_one_long_chunk_at_a_time_while_none_runs():
    """A request that comes waits for one chunk, not for two."""
    engine = make_engine(
        toy(), max_running_requests=2, max_total_tokens=2048, context_length=1200, page_size=16,
        chunked_prefill_size=256,
    )  # fmt: skip
    engine.add(np.random.default_rng(5).integers(3, 99, 1000).tolist(), SamplingParams(max_new_tokens=3))
    used = watched(engine)
    for _ in range(4):
        engine.step()
        assert len(engine.flights) <= 1
    assert {key.width for key in used if key.kind == "prefill"} == {256}
    while engine.unfinished:
        engine.step()
