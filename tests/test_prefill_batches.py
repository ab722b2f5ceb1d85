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
from specjax.engine.buckets import PACE, Buckets
from specjax.engine.keys import Key
from specjax.engine.pace import Pace
from specjax.engine.sequence import Status
from specjax.models.ragged import Ragged


def buckets(platform: str = "cpu", algorithm: str = "NONE", **given: Any) -> Buckets:
    sizes: dict[str, Any] = {"rows": 48, "request_pages": 64} | given
    return Buckets.build(platform, make_drafter(algorithm), **sizes)


def shapes(found: Buckets) -> list[tuple[int, int]]:
    """(prompts, tokens of each) of all programs."""
    return sorted((key.rows, key.width) for key in found.all_keys() if key.kind == "prefill")


@pytest.mark.parametrize(
    ("platform", "sizes", "expected"),
    [
        ("cpu", {}, [(1, 8), (1, 16), (1, 64), (1, 128), (1, 512), (2, 64), (8, 64), (16, 32)]),
        ("gpu", {}, [(1, 256), (1, 2048), (8, 256)]),
        ("cpu", {"rows": 1}, [(1, 8), (1, 16), (1, 64), (1, 128), (1, 512)]),
        ("cpu", {"rows": 3}, [(1, 8), (1, 16), (1, 64), (1, 128), (1, 512), (3, 64)]),
        ("cpu", {"rows": 15}, [(1, 8), (1, 16), (1, 64), (1, 128), (1, 512), (2, 64), (8, 64)]),
        ("cpu", {"chunk": 128}, [(1, 8), (1, 16), (1, 64), (1, 128), (2, 64), (8, 64), (16, 32)]),
        ("cpu", {"chunk": 8}, [(1, 8), (8, 8)]),
        ("cpu", {"prefill": 200}, [(1, 8), (1, 16), (1, 64), (1, 128), (1, 200), (3, 64)]),
        ("cpu", {"prefill": 20, "chunk": 300}, [(1, 8), (1, 16), (1, 20)]),
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
        ([7], None, (1, 8)),
        ([60] * 8, None, (8, 64)),
        ([60] * 7, None, (2, 64)),  # the first ones are ready earlier
        ([60, 60], None, (2, 64)),
        ([60, 5000], None, (1, 64)),
        ([3, 5000], None, (1, 8)),
        ([5000] * 8, None, (1, 512)),  # costs the same, and the first is ready earlier
        ([5000, 60], 40, (1, 16)),
        ([60] * 8, 40, (1, 16)),
        ([60] * 8, 100, (1, 64)),
        ([5000], 5, (1, 64)),  # nothing is small enough: the smallest of one prompt
    ],
)
def test_the_program_of_which_most_is_used(left, most, expected):
    found = buckets()
    compiled = {key for key in found.all_keys() if key.width > 16 or most != 5}
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
    assert found.steps_beside(0, 5) is None
    assert found.steps_beside(1, 1) == found.steps_beside(4, 4) == found.steps_beside(1000, 1) == PACE
    assert found.steps_beside(2, 7) == 3.5 * PACE
    assert found.steps_beside(16, 8) is found.steps_beside(4, 40) is None, "a whole pack waits"
    assert found.steps_beside(17, 8) == PACE
    assert found.step_cost(1) == free + 1 and found.step_cost(48) == free + 48
    trees = buckets(platform, "NGRAM")
    assert trees.step_cost(1) == free + trees.tree_widths(1)[-1]


@pytest.mark.parametrize("running", [1, 4, 48])
@pytest.mark.parametrize("context", [0, 700, 5000, 100_000])
def test_a_prefill_keeps_to_the_pace(running, context):
    """Before anything is measured: the largest program that takes no longer than `PACE` steps, by the cost model."""
    found = buckets()
    most, allowed = Pace(found).room(running, 1, context), PACE * found.step_cost(running)
    sizes = [rows * width for rows, width, _ in found.prefill_shapes()]
    costs = {tokens: found.prefill_cost(tokens, context) for tokens in sizes}
    assert most == max((tokens for tokens, cost in costs.items() if cost <= allowed), default=0)
    assert Pace(found).room(0, 1, context) is None


@pytest.mark.parametrize("unit", [1e-5, 1e-3, 0.1])
def test_measured_times_decide(unit):
    """Steps and chunks as a machine takes them, whatever its speed; a chunk gets narrower as they take longer."""
    found = buckets()
    pace = Pace(found)
    step, chunks = Key("step", 1, 64), {width: Key("prefill", width, 64) for width in (8, 16, 64)}

    def measure(key: Key, seconds: float, times: int = 40) -> None:
        for _ in range(times):
            pace.record(key, unit * seconds)

    pace.record(step, unit * 1000)  # the first run, which takes longer
    measure(step, 45)
    assert pace.room(1, 1) == 8, "what is not measured takes as much longer than the model says as what is"
    for width, seconds in ((8, 24), (16, 34), (64, 145)):
        measure(chunks[width], seconds)
    assert pace.room(1, 1) == 16 and pace.room(1, 2) == 64
    measure(chunks[16], 100)
    assert pace.room(1, 1) == 8
    measure(chunks[8], 100)
    assert pace.room(1, 1) == 0, "none keeps the pace"
    measure(step, 60)
    assert pace.room(1, 1) == 16
    before = pace.room(1, 1)
    measure(step, 1e6, times=1)
    assert before == 16 and pace.room(1, 1) in (16, 64), "one step that hung counts as a slow one"


def test_an_error_of_the_model_is_made_up_for():
    """A long prompt whose attention costs four times what the model says: each chunk keeps the pace of the machine, but
    for the few after which it is known."""
    found, late = buckets(), 0
    pace, context = Pace(found), 0
    for _ in range(3):
        pace.record(Key("step", 1, 512), 0.060)
    shapes = sorted(width for rows, width, _ in found.prefill_shapes() if rows == 1)
    width = shapes[0]
    while context < 6000:
        width = max((w for w in shapes if w <= (pace.room(1, 1, context) or 0)), default=shapes[0])
        seconds = 0.001 * (width * (1 + 4 * context / found.context) + found.free_tokens)
        late += seconds > 0.120 and width > shapes[0]
        pace.record(Key("prefill", width, 512), seconds, context)
        context += width
    assert late <= 6
    assert width == shapes[0]


@pytest.mark.parametrize(("running", "expected"), [(0, (2, 64)), (48, (8, 64))])
def test_the_step_that_follows_counts(running, expected):
    """Six prompts two by two cost less than a program of eight, but not with six steps of all between."""
    found = buckets()
    key = next(found.prefill_keys([60] * 6, [4] * 6, None, {*found.all_keys()}, running=running))
    assert (key.rows, key.width) == expected


def test_many_short_rests_share_a_forward():
    found = buckets()
    for count, tokens, expected in ((16, 20, (16, 32)), (16, 60, (8, 64)), (8, 60, (8, 64))):
        key = next(found.prefill_keys([tokens] * count, [4] * count, None, {*found.all_keys()}))
        assert (key.rows, key.width) == expected, (count, tokens)


def ragged(**sizes: Any) -> list[tuple[int, int, int]]:
    """(prompts, most tokens of each, of all) of the programs without padding."""
    found = buckets(ragged=True, **sizes)
    assert not any(key.tokens for key in buckets("gpu", ragged=True, **sizes).all_keys())
    assert not any(key.tokens for key in found.all_keys() if key.kind != "prefill")
    return [(key.rows, key.width, key.tokens) for key in found.all_keys() if key.kind == "prefill" and key.rows > 1]


def test_the_programs_without_padding_keep_to_the_limits():
    """They take the place of the others for several prompts, and there is none where nothing would be left out."""
    assert ragged() == [(8, 64, 256), (4, 64, 128)]
    assert ragged(rows=1) == ragged(prefill=64) == []
    assert ragged(rows=3) == [(3, 64, 128)]
    assert ragged(prefill=200) == [(8, 64, 200), (4, 64, 128)]
    assert ragged(prefill=100) == [(8, 64, 100), (4, 64, 100)]
    assert ragged(chunk=16) == [(8, 16, 64), (4, 16, 32)]


@pytest.mark.parametrize(
    ("left", "expected"),
    [([40] * 8, [40] * 6 + [16]), ([300, 5, 300, 2, 90], [64, 5, 64, 2, 64]), ([0, 3], [0, 3]), ([1] * 20, [1] * 8)],
)
def test_the_first_prompts_take_the_tokens(left, expected):
    assert Key("prefill", 64, 64, 8, tokens=256).lengths(left) == expected
    assert Key("prefill", 64, 64, 8).lengths(left) == [min(tokens, 64) for tokens in left[:8]]


def test_prompts_of_different_lengths_share_a_forward():
    """As many as fill the most tokens; beside running requests as many as the pace allows."""
    found = buckets(ragged=True)

    def chosen(left: list[int], most: int | None = None) -> int:
        return next(found.prefill_keys(left, [4] * len(left), most, {*found.all_keys()})).size

    assert chosen([40] * 12) == chosen([60] * 8) == 256
    assert chosen([40, 40, 40]) == chosen([40] * 12, 150) == 128
    assert chosen([40]) == chosen([40, 40], 100) == 64
    assert chosen([500]) == 512


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
    """Of all lengths, in forwards that two to four of them share, beside running requests."""
    model = tiny_llama(vocab_size=VOCABULARY)
    engine = make_engine(
        model, DRAFTS[algorithm], max_running_requests=4, max_total_tokens=240, chunked_prefill_size=16,
        context_length=96,
    )  # fmt: skip
    engine.warm_up(progress=False)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 99, int(n)).tolist() for n in rng.choice([1, 2, 9, 15, 16, 17, 33, 60], 12)]
    params = [SamplingParams(max_new_tokens=8, temperature=float(i % 2), seed=i) for i in range(12)]
    used = watched(engine)
    for prompt, one, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(model, prompt, one, done)
    assert {key.tokens for key in used if key.kind == "prefill"} >= {32}
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
        (1, 8),
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


def test_while_none_runs_a_request_that_comes_does_not_wait_long():
    """A chunk that is expected to take longer than `WAIT` gives way to a smaller one; nothing is known at first."""
    found = buckets()
    pace, large, small = Pace(found), Key("prefill", 512, 64), Key("prefill", 64, 64)
    assert pace.while_none_runs(1, 5000) is None
    for key, seconds in ((large, 0.15), (small, 0.018)):
        for _ in range(2):  # the first run does not count
            pace.record(key, seconds, 0)
    assert pace.while_none_runs(1, 0) is None and pace.is_brief(small, 0) and not pace.is_brief(large, 0)
    assert pace.while_none_runs(1, found.context) == 128, "each token takes twice as long"
    compiled = set(found.all_keys())
    for most, width in ((None, 512), (128, 128), (64, 64)):
        assert next(found.prefill_keys([5000], [64], most, compiled)).width == width
    assert not pace.is_brief(small, found.context)
    assert pace.while_none_runs(1, 1000 * found.context) == 64, "never less than the smaller chunk"
    together = max(rows * width for rows, width, _ in found.prefill_shapes() if rows > 1)
    assert pace.while_none_runs(2, 1000 * found.context) == together, "several prompts share theirs"
    assert buckets("gpu").chunks[0] <= (Pace(buckets("gpu")).while_none_runs(1, 10**6) or 10**6)
