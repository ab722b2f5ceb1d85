"""Several prompts in one forward: the choice of programs, and the latency of running and short requests."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import DRAFTS, VOCABULARY, check_texts, make_engine, toy
from toy_models import tiny_llama

from specjax.drafters import make_speculation
from specjax.engine import SamplingParams
from specjax.engine.buckets import Buckets, Key
from specjax.engine.sequence import Status
from specjax.models.blocks import Ragged


def buckets(platform: str = "cpu", algorithm: str = "NONE", **changes: Any) -> Buckets:
    sizes: dict[str, Any] = {"rows": 48, "request_pages": 64} | changes
    return Buckets.build(platform, make_speculation(algorithm), **sizes)


def shapes(sizes: Buckets) -> list[tuple[int, int]]:
    """(prompts, tokens of each) of all programs."""
    return sorted((key.rows, key.width) for key in sizes.all_keys() if key.kind == "prefill")


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
def test_prefill_programs(platform, sizes, expected):
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
        ([5000], 5, (1, 64)),  # none fits the limit: the smallest for one prompt
    ],
)
def test_program_with_the_least_padding(left, most, expected):
    sizes = buckets()
    compiled = {key for key in sizes.all_keys() if key.width > 16 or most != 5}
    key = next(sizes.prefill_keys(left, [4] * len(left), most, compiled))
    assert (key.rows, key.width) == expected


def test_programs_that_are_not_compiled():
    """A request waits for its first program or a longer chunk, but not for a program of several prompts."""
    sizes = buckets()

    def first(left: list[int], *compiled: tuple[int, int]) -> tuple[int, int]:
        keys = {Key("prefill", width, 64, rows) for rows, width in compiled}
        key = next(sizes.prefill_keys(left, [4] * len(left), None, keys))
        return key.rows, key.width

    assert first([60] * 8) == (1, 64)
    assert first([60] * 8, (1, 64)) == (1, 64)
    assert first([5000], (1, 64)) == (1, 256)
    assert first([12], (1, 16)) == (1, 64), "the chunk that every request can use"
    assert first([60] * 8, (8, 64)) == (8, 64), "a compiled program is better than waiting"


def test_table_fits_the_longest_prompt():
    sizes = buckets(request_pages=2000)
    assert sizes.tables == (512, 2000)
    narrow = next(key for key in sizes.all_keys() if key.rows == 8)
    keys = {narrow, narrow._replace(table=2000)}
    assert next(sizes.prefill_keys([60] * 8, [4] * 8, None, keys)).table == 512
    assert next(sizes.prefill_keys([60] * 8, [4] * 7 + [600], None, keys)).table == 2000


def test_chunk_limit_of_running_requests():
    """Running requests limit chunks, unless more prompts wait than requests run."""
    sizes = buckets()
    assert sizes.most_prefilled(0, 5) is None
    assert sizes.most_prefilled(1, 1) == sizes.most_prefilled(1000, 1) == sizes.most_prefilled(17, 8) == 16
    assert sizes.most_prefilled(2, 7) == 64
    assert sizes.most_prefilled(16, 8) is sizes.most_prefilled(4, 40) is None
    assert buckets("gpu").most_prefilled(1, 1) == 256


def test_ragged_programs():
    """They replace the programs of several prompts where some padding can be left out."""

    def programs(platform: str = "cpu", **sizes: Any) -> list[tuple[int, int, int]]:
        keys = buckets(platform, ragged=True, **sizes).all_keys()
        assert not any(key.tokens for key in keys if key.kind != "prefill")
        return [(key.rows, key.width, key.tokens) for key in keys if key.kind == "prefill" and key.rows > 1]

    assert programs() == [(8, 64, 256)]
    assert programs(rows=1) == programs(prefill=64) == []
    assert programs(rows=3) == [(3, 64, 0)], "no padding to leave out"
    assert programs(prefill=200) == [(8, 64, 200)]
    assert programs(chunk=16) == [(8, 16, 64)]
    assert not any(tokens for *_, tokens in programs("gpu"))

    sizes = buckets(ragged=True)

    def chosen(left: list[int], most: int | None = None) -> tuple[int, int]:
        key = next(sizes.prefill_keys(left, [4] * len(left), most, {*sizes.all_keys()}))
        return key.rows, key.size

    assert chosen([40] * 12) == chosen([60] * 8) == (8, 256)
    assert chosen([40, 40, 40]) == chosen([40] * 12, 150) == (1, 64)
    assert chosen([500]) == (1, 256)
    for left, lengths in (([40] * 8, [40] * 6 + [16]), ([300, 5, 300, 2, 90], [64, 5, 64, 2, 64]), ([1] * 20, [1] * 8)):
        assert Key("prefill", 64, 64, 8, tokens=256).lengths(left) == lengths
        assert Key("prefill", 64, 64, 8).lengths(left) == [min(tokens, 64) for tokens in left[:8]]


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


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("ragged", "NGRAM"), ("padded", "NONE"), pytest.param("padded", "NGRAM", marks=pytest.mark.slow)],
)
def test_texts_of_prompts_that_share_forwards(kind, algorithm):
    model = tiny_llama(vocab_size=VOCABULARY) if kind == "ragged" else toy()
    engine = make_engine(
        model, DRAFTS[algorithm], max_running_requests=8, max_total_tokens=480, chunked_prefill_size=16,
        context_length=96,
    )  # fmt: skip
    engine.warm_up(progress=False)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 99, int(n)).tolist() for n in rng.choice([1, 2, 9, 15, 16, 17, 33, 60], 24)]
    params = [SamplingParams(max_new_tokens=8, temperature=float(i % 2), seed=i) for i in range(24)]
    keys = recorded_keys(engine)
    check_texts(engine, model, prompts, params)
    used = {(key.rows, key.tokens) for key in keys if key.kind == "prefill"}
    assert used >= ({(8, 64)} if kind == "ragged" else {(1, 0), (8, 0)})


def test_short_request_beside_a_long_prompt():
    """It starts after one chunk of the long prompt; running requests emit a token a step."""
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


def test_one_long_chunk_at_a_time():
    """A new request waits for at most one chunk."""
    engine = make_engine(
        toy(), max_running_requests=2, max_total_tokens=2048, context_length=1200, page_size=16,
        chunked_prefill_size=256,
    )  # fmt: skip
    engine.add(np.random.default_rng(5).integers(3, 99, 1000).tolist(), SamplingParams(max_new_tokens=3))
    used = recorded_keys(engine)
    for _ in range(4):
        engine.step()
        assert len(engine.flights) <= 1
    assert {key.width for key in used if key.kind == "prefill"} == {256}
    while engine.unfinished:
        engine.step()
