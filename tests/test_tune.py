"""An engine that measures itself: choice, budget, record, use. Times are injected, kernels interpreted on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import VOCABULARY, tokenizer
from specjax_kernels import choice, launch
from specjax_kernels.choice import ProductBlocks
from specjax_kernels.launch import Blocks
from specjax_kernels.product_tuning import ProductBench, Shape, around

from specjax import ModelConfig, RopeConfig
from specjax.cli import tune as command
from specjax.compiling import SCHEDULING
from specjax.costs import PLAIN, Decoding, Machine, Tree, expected_accept
from specjax.drafters import Ngram, Params, make_drafter
from specjax.engine import Engine, EngineConfig, autotune, program_store, tuning, tuning_tasks
from specjax.engine.autotune import DEFAULT_SCHEDULE, STEP_TIMES, Schedule, StepBench
from specjax.engine.buckets import Buckets
from specjax.engine.step_times import StepTimes, tree_of
from specjax.engine.tuning import Stuck, Task, Trial, Tuning, measure, read, write
from specjax.models import init_params, make_target

OF = {"device": "toy", "versions": {"jax": "1"}, "shapes": ["a", "b"]}
BLOCKS = ProductBlocks(32, 64, 4, 3)


class Clock:
    """Time that passes only where a candidate takes it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def task(clock, name="one", stage="products", *, times=None, fails=None, asked=None, seconds=1.0, **fields) -> Task:
    """Candidates 0 .. 5, each next to the one before it; `times` are their scores. Each takes `seconds` to measure."""
    times, fails = times or {}, fails or {}

    def score(candidate: int) -> float:
        clock.now += seconds
        if asked is not None:
            asked.append((name, candidate))
        if candidate in fails:
            raise fails[candidate]
        return times.get(candidate, 2.0)

    def begin(say) -> Trial:
        return Trial(0, lambda one: [one + 1] if one < 5 else [], score, lambda: 1e-3)

    return Task(stage, name, begin, **fields)


def run(tasks, clock, before=None, *, seconds=1000.0, **options) -> Tuning:
    kept = []
    found = measure(tasks, before or Tuning(OF), seconds=seconds, clock=clock, keep=kept.append, **options)
    assert kept[-1] == found
    return found


# The choice.


def test_the_fastest_right_candidate_is_chosen():
    clock = Clock()
    found = run([task(clock, times={1: 0.9, 2: 0.5, 3: 0.6})], clock)
    (result,) = found.results
    assert (result.choice, result.score, result.seconds, result.finished) == (2, 0.5, 1e-3, True)
    assert result.tried == [[0, 1.0], [1, 0.9], [2, 0.5], [3, 0.6]]
    assert found.complete and found.ended and not found.trying and found.seconds == 3.0


def test_without_anything_faster_the_start_stays():
    clock = Clock()
    (result,) = run([task(clock, times={1: 0.99})], clock).results
    assert (result.choice, result.score) == (0, 1.0)


@pytest.mark.parametrize(
    ("failure", "said"),
    [(RuntimeError("no\nroom"), "RuntimeError: no room"), (MemoryError("x"), "MemoryError: x")],
)
def test_a_candidate_that_crashes_is_left_out_and_the_others_are_not(failure, said):
    clock, asked = Clock(), []
    tasks = [task(clock, times={1: 0.5, 2: 0.1}, fails={2: failure}, asked=asked), task(clock, "two", asked=asked)]
    found = run(tasks, clock)
    assert {result.name: result.choice for result in found.results} == {"one": 1, "two": 0}
    assert found.left_out == {"one: 2": said}
    assert found.named("products")["one"].tried[2] == [2, None]
    asked.clear()
    assert run(tasks, clock, dataclasses.replace(found, results=())).named("products")["one"].choice == 1
    assert ("one", 2) not in asked, "it is not tried again"


def test_a_candidate_that_is_wrong_is_left_out():
    clock = Clock()
    found = run([task(clock, times={1: math.inf})], clock)
    assert found.results[0].choice == 0 and list(found.left_out) == ["one: 1"]
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_a_candidate_that_hangs_ends_the_measurement():
    clock, kept, release = Clock(), [], threading.Event()
    stuck = task(clock, times={1: 0.5})
    trial = dataclasses.replace(stuck.begin(print), score=lambda candidate: float(release.wait(30)))
    hanging = dataclasses.replace(stuck, begin=lambda say: trial, limit=0.05)
    with pytest.raises(Stuck, match=r"did not end in 0\.05 s"):
        measure([hanging], Tuning(OF), seconds=9.0, clock=clock, keep=kept.append)
    release.set()
    assert list(kept[-1].left_out) == ["one: 1"] and not kept[-1].ended and not kept[-1].trying


def test_a_task_that_cannot_begin_is_reported():
    clock = Clock()

    def begin(say) -> Trial:
        raise ValueError("no shape")

    found = run([Task("products", "one", begin), task(clock, "two")], clock)
    assert found.left_out == {"one: the start": "ValueError: no shape"}
    assert [result.name for result in found.results] == ["two"] and not found.complete


def test_the_most_valuable_is_measured_first():
    clock, asked = Clock(), []
    make = functools.partial(task, clock, asked=asked)
    run([make("a", value=1.0), make("s", stage="steps", value=9.0), make("b", value=2.0)], clock)
    assert [name for name, _ in asked] == ["b", "a", "s"]


# The budget.


def test_the_budget_ends_between_candidates_and_keeps_what_was_measured():
    clock, times = Clock(), {1: 0.9, 2: 0.8, 3: 0.7}
    tasks = [task(clock, "one", times=times, value=2.0), task(clock, "two", times=times)]
    found = run(tasks, clock, seconds=5.0)  # products have two seconds of them
    assert [(result.name, result.choice, result.finished) for result in found.results] == [("one", 2, False)]
    assert found.ended and not found.complete and found.tasks == 2
    more = run(tasks, clock, found)
    assert [(result.name, result.choice) for result in more.results] == [("one", 3), ("two", 3)] and more.complete
    assert more.seconds == 2.0 + 4.0 + 4.0


def test_no_candidate_begins_that_would_not_end_in_time():
    clock = Clock()
    found = run([task(clock, stage="steps", times={1: 0.9, 2: 0.8}, seconds=4.0)], clock, seconds=10.0)
    assert found.seconds == 8.0 and not found.complete
    (result,) = run([task(clock, stage="steps", times={1: 0.9}, seconds=4.0)], clock, seconds=8.5).results
    assert result.finished and result.choice == 1, "the search ended by itself"


def test_stages_share_the_budget_and_leave_what_they_do_not_need():
    clock, asked = Clock(), []
    make = functools.partial(task, clock, asked=asked, seconds=10.0)
    begun = []
    run(
        [make(f"{stage} {i}", stage) for stage in tuning.SHARES for i in range(9)],
        clock, seconds=100.0, begin_stage=lambda stage, now: begun.append(stage),
    )  # fmt: skip
    assert [len([name for name, _ in asked if name.startswith(stage)]) for stage in tuning.SHARES] == [4, 2, 4]
    assert begun == list(tuning.SHARES)
    asked.clear()
    clock = Clock()
    run([task(clock, f"{i}", "steps", asked=asked, seconds=10.0) for i in range(20)], clock, seconds=100.0)
    assert len(asked) == 10


def test_progress_is_shown(capsys):
    clock = Clock()
    run([task(clock)], clock, seconds=50.0, progress=True)
    assert "Measuring on this device, at most 50 s: 1 choice in " in capsys.readouterr().err
    run([task(clock), task(clock, "two")], clock, seconds=3.0, progress=True)
    assert "at most 3 s: 1 choice (50%) in " in capsys.readouterr().err
    run([task(clock)], clock, seconds=50.0)
    assert not capsys.readouterr().err


# The record.


@pytest.fixture
def measured() -> Tuning:
    clock = Clock()
    tasks = [task(clock, times={1: 0.5}), task(clock, "two", fails={1: ValueError("x")}, bytes=3)]
    return run(tasks, clock, Tuning(OF, copy_speed=1e9, product_speed=1e12))


def test_a_record_is_found_again(measured, tmp_path):
    assert read(OF, tmp_path) is None
    write(measured, tmp_path)
    assert read(OF, tmp_path) == measured
    asked = []
    again = run([task(Clock(), asked=asked), task(Clock(), "two", asked=asked)], Clock(), read(OF, tmp_path))
    assert again.results == measured.results and not asked


@pytest.mark.parametrize("change", [{"device": "b"}, {"versions": {"jax": "2"}}, {"shapes": ["a"]}, {"more": 1}])
def test_a_record_of_something_else_is_not(measured, tmp_path, change):
    write(measured, tmp_path)
    assert read({**OF, **change}, tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"of": {}, "results": [{"name": "one"}]}', '{"results": 3}'])
def test_a_damaged_record_is_measured_anew(measured, tmp_path, text, caplog):
    write(measured, tmp_path)
    tuning.file_for(OF, tmp_path).write_text(text)
    assert read(OF, tmp_path) is None
    assert "are not used" in caplog.text


def test_what_ended_the_process_is_left_out_by_the_next_one(tmp_path):
    """As a crash of the compiler does it: nothing runs after it."""
    clock, keep = Clock(), functools.partial(write, folder=tmp_path)

    class Crash(BaseException):
        pass

    states = itertools.count()

    def crash(now: Tuning) -> None:
        if now.trying == "one: 2" or next(states) < 0:
            keep(now)
            raise Crash

    with pytest.raises(Crash):
        measure([task(clock, times={1: 0.5})], Tuning(OF), seconds=9.0, clock=clock, keep=crash)
    found = read(OF, tmp_path)
    assert found is not None and not found.ended and found.left_out == {"one: 2": "an earlier process ended in it"}
    asked = []
    assert run([task(clock, times={1: 0.5}, asked=asked)], clock, found).results[0].choice == 1
    assert ("one", 2) not in asked


def test_an_interrupt_blames_no_candidate():
    clock, kept = Clock(), []
    tasks = [task(clock, times={1: 0.5}, fails={2: KeyboardInterrupt()})]
    with pytest.raises(KeyboardInterrupt):
        measure(tasks, Tuning(OF), seconds=9.0, clock=clock, keep=kept.append)
    assert not kept[-1].trying and not kept[-1].left_out and not kept[-1].ended


# An engine.


@functools.cache
def model():
    config = ModelConfig("llama", VOCABULARY, 32, 64, 1, 4, 2, 16, 1e-5, RopeConfig(), 256, tied_embeddings=True)
    return make_target(config), Params(init_params(config, jax.random.key(0)))


def make_engine(**changes) -> Engine:
    target, params = model()
    sizes = {"max_running_requests": 2, "page_size": 4, "max_total_tokens": 512, "context_length": 128}
    config = EngineConfig(**{**sizes, "chunked_prefill_size": 8, **changes})
    return Engine(target, params, tokenizer(), make_drafter(Ngram(capacity=4096)), config=config)


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """A cache of its own, and no entries left behind."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    launch.use({})
    choice.use({})


def identity(engine: Engine, **changes):
    parts = dict(zip(("params", "target", "drafter", "buckets"), (engine.params, engine.target, engine.drafter,
                                                                  engine.buckets), strict=True))  # fmt: skip
    return tuning_tasks.identity(**{**parts, "page_size": engine.pool.page_size, **changes})


def test_every_part_of_the_identity_counts(monkeypatch):
    engine = make_engine()
    first = identity(engine)
    wider = Params({**engine.params.target, "more": jnp.zeros((3, 5))})
    others = [identity(engine, params=wider), identity(engine, page_size=8)]
    others.append(identity(engine, drafter=make_drafter(Ngram(capacity=4096, nodes=4))))
    others.append(identity(engine, buckets=make_engine(max_running_requests=4).buckets))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        others.append(identity(engine))
    device = jax.devices()[0]
    client = SimpleNamespace(platform_version="another driver")
    for kind, driver in (("another card", device.client), (device.device_kind, client)):
        other = SimpleNamespace(device_kind=kind, client=driver, platform="cpu")
        with monkeypatch.context() as patch:
            patch.setattr(tuning_tasks.jax, "devices", lambda other=other: [other])
            others.append(identity(engine))
    for name in ("jax", "jaxlib"):
        with monkeypatch.context() as patch:
            patch.setattr(tuning_tasks, "version", lambda asked, name=name: "0" if asked == name else "1")
            others.append(identity(engine))
    with monkeypatch.context() as patch:
        patch.setattr(tuning_tasks.specjax, "__version__", "0")
        others.append(identity(engine))
    with monkeypatch.context() as patch:
        patch.setattr(tuning_tasks, "_kernels", lambda: "other sources")
        others.append(identity(engine))
    assert len({tuning.file_for(of) for of in (first, *others)}) == 1 + len(others)
    assert identity(make_engine()) == first


def gpu_buckets(drafter, rows: int) -> Buckets:
    return Buckets.build("gpu", drafter, rows=rows, request_pages=32)


def test_products_are_those_of_the_layers_and_keyed_by_rows():
    params, drafter = model()[1], make_drafter(Ngram(capacity=4096, nodes=8))
    on = tuning_tasks.machine(Tuning(OF, copy_speed=4e12, product_speed=6e14))
    drafter = drafter._replace(explicit_width=False)
    tasks = list(tuning_tasks.product_tasks(params, "float32", drafter, gpu_buckets(drafter, 4), on))
    shapes = ["32 x 128", "64 x 32", "32 x 2 x 64", "64 x 32"]  # qkv, output, gate and up, down: two are alike
    rows = [1, 2, 4, 8, 16, 32]
    assert {each.name for each in tasks} == {f"float32 {one} rows {n}" for one in shapes for n in rows}
    best = max(tasks, key=lambda each: each.value)
    assert best.name.endswith("rows 8") or best.name.endswith("rows 1"), "one request's steps first"
    assert not list(tuning_tasks.product_tasks(params, "bfloat16", drafter, gpu_buckets(drafter, 4), on))


def test_a_product_is_measured_and_checked_with_interpreted_kernels(monkeypatch):
    shape = Shape("float32", (32, 2, 24), 2, norm=True)
    matrix, said = jax.random.normal(jax.random.key(0), shape.weight), []
    bench = ProductBench(shape, [matrix], runs=1, seconds=1e-4, say=said.append)
    first = next(iter(around(shape, "xla")))
    assert 0 < bench.score(first) < math.inf and not said and bench.start_seconds
    from specjax_kernels import product_tuning

    right = product_tuning.linear_by
    wrong = lambda blocks, *given, **options: right(blocks, *given, **options) * (1.1 if blocks else 1)  # noqa: E731
    monkeypatch.setattr(product_tuning, "linear_by", wrong)
    assert bench.score(first) == math.inf
    assert "is wrong by 1.0" in said[-1]

    def crash(blocks, *given, **options):
        raise MemoryError("no shared memory")

    monkeypatch.setattr(product_tuning, "linear_by", crash)
    assert bench.score(first) == math.inf
    assert said[-1].endswith("does not run: MemoryError: no shared memory")


RESULTS = {
    "products": {choice.key("float32", (32, 128), 2): BLOCKS, choice.key("float32", (64, 32), 2): "xla"},
    "attention": {launch.key("float32", 16, 2): Blocks(16, 32, 2, 2, 8)},
}


def record(of) -> Tuning:
    def result(stage, name, found, **more):
        return tuning.Result(stage, name, tuning.plain(found), 0.5, 1e-3, more.pop("tried", []), **more)

    results = [result(stage, name, found) for stage, named in RESULTS.items() for name, found in named.items()]
    results.append(result("steps", tuning_tasks.SCHEDULE, Schedule("SERIALIZE", "pallas")))
    tried = [[PLAIN, 1.0], [Tree(3, 1, 4), 1.5], [Tree(7, 1, 8), None]]
    results.append(result("steps", f"{STEP_TIMES}2", PLAIN, tried=tried))
    return Tuning(of, tuple(results), tasks=len(results), ended=True, copy_speed=1e9, product_speed=1e12)


def test_a_start_uses_what_was_measured(clean, monkeypatch):
    engine = make_engine()
    names = [program_store._key("x")]
    tuning.write(record(identity(engine)))
    monkeypatch.setattr(autotune, "measure", lambda *given, **options: pytest.fail("it is known"))
    monkeypatch.setattr(launch, "on_nvidia", lambda: True)
    monkeypatch.setattr(launch, "generation", lambda: None)
    found = autotune.tune_at_start(engine)
    monkeypatch.undo()
    assert found is not None and found.results[0] == record(OF).results[0] and len(found.results) == 5
    assert choice.product_blocks("float32", (32, 128), 2) == BLOCKS
    assert choice.product_blocks("float32", (64, 32), 2) is None and choice.pages_in_one_kernel()
    assert launch.launch_for("float32", 16, 2, 2, 128).programs == 8
    assert engine.executables.options == {SCHEDULING: "SERIALIZE"}
    names.append(program_store._key("x"))
    assert names[0] != names[1], "a program of another choice is not loaded"


def test_the_first_start_measures_and_off_is_off(clean, monkeypatch):
    seen = []

    def measured(engine, *, seconds, before, progress):
        seen.append((seconds, before))
        return record(identity(engine))

    monkeypatch.setattr(autotune, "measure", measured)
    assert autotune.tune_at_start(make_engine()) is None and not seen, "a CPU is not measured at a start"
    monkeypatch.setattr(launch, "on_nvidia", lambda: True)
    monkeypatch.setattr(launch, "generation", lambda: None)
    assert autotune.tune_at_start(make_engine(autotune_seconds=0.0)) is None and not seen
    assert autotune.tune_at_start(make_engine(autotune_seconds=7.0)) is not None
    assert seen == [(7.0, None)]
    cut = dataclasses.replace(record(identity(make_engine())), ended=False, results=(), tasks=9)
    tuning.write(cut)
    autotune.tune_at_start(make_engine())
    assert seen[1:] == [(60.0, cut)], "a measurement that was cut off goes on"


def test_a_record_with_an_entry_that_is_none_is_not_used(clean, caplog):
    engine = make_engine()
    good = record(identity(engine))
    wrong = dataclasses.replace(good.results[0], choice={"columns": 24})
    tuning.write(dataclasses.replace(good, results=(wrong, *good.results[1:])))
    assert autotune.tune_at_start(engine) is None
    assert "are not used" in caplog.text and not choice.in_use()


def test_an_engine_measures_all_with_interpreted_kernels(clean, monkeypatch):
    """Everything runs once; a clock that ends each stage soon keeps it short."""
    engine, clock = make_engine(), Clock()
    kinds = tuning_tasks.product_tasks, tuning_tasks.attention_tasks

    def few(which):
        return lambda *given: itertools.islice((_timed(each, clock) for each in which(*given)), 1)

    specs = tuning_tasks._specs
    monkeypatch.setattr(tuning_tasks, "_specs", lambda *given: itertools.islice(specs(*given), 1, 2))
    monkeypatch.setattr(tuning_tasks, "CONTEXT", 8)
    monkeypatch.setattr(tuning_tasks, "product_tasks", few(kinds[0]))
    monkeypatch.setattr(tuning_tasks, "attention_tasks", few(kinds[1]))
    monkeypatch.setattr(autotune, "step_tasks", lambda engine: [_timed(each, clock) for each in steps(engine)])
    steps = lambda engine: [Task("steps", f"{STEP_TIMES}1", functools.partial(autotune._begin_times, engine, 1))]  # noqa: E731
    text = engine.generate("hello", {"max_new_tokens": 6}).output_ids
    before = Tuning(identity(engine), copy_speed=1e9, product_speed=1e12)
    found = autotune.measure(engine, seconds=10.0, before=before, kernels=True, clock=clock)
    assert {result.stage for result in found.results} == set(tuning.SHARES), found.left_out
    assert read(identity(engine)) == read(found.of)
    product, attention, times = found.results
    assert product.tried[0] == ["xla", 1.0] and len(product.tried) > 1 and product.bytes > 0 < product.flops
    assert attention.tried[0][0]["rows"] >= 16
    assert times.seconds is not None and times.seconds > 0
    autotune.apply(engine, found)
    assert engine.generate("hello", {"max_new_tokens": 6}).output_ids == text
    engine.check_integrity()


def _timed(task: Task, clock: Clock) -> Task:
    """Each candidate takes four seconds of the clock: all of them run, and a stage ends after one."""

    def begin(say) -> Trial:
        trial = task.begin(say)

        def score(candidate) -> float:
            clock.now += 4.0
            return trial.score(candidate)

        return dataclasses.replace(trial, score=score)

    return dataclasses.replace(task, begin=begin)


# Step times.


def test_step_times_are_read_by_bucket_and_tree(clean):
    times = StepTimes.of(record(OF))
    assert times.measured == {2: {PLAIN: 1.0, Tree(3, 1, 4): 1.5}}
    assert times.milliseconds(2, Tree(3, 1, 4)) == 1.5 and times.milliseconds(1) is None
    assert StepTimes.of(None).milliseconds(1) is None
    tuning.write(record(OF))
    assert StepTimes.of(read(OF)) == times
    trees = [Tree(3, 1, 4), Tree(7, 1, 8)]
    assert times.best(2, trees, lambda tree: 1.6) == trees[0], "the other one's time is not known"
    assert times.best(2, trees, lambda tree: 1.4) == PLAIN
    assert times.best(1, trees, lambda tree: 9.0) == PLAIN


def test_what_was_not_measured_is_predicted(monkeypatch):
    def predicted(model, on, *, batch, tree, context):
        return SimpleNamespace(seconds=1e-3 * (batch + tree.nodes))

    monkeypatch.setattr("specjax.engine.step_times.step_cost", predicted)
    model = Decoding((), (), ()), Machine("toy", 1e12, 1e12)
    nothing = StepTimes(predicted=model)
    assert nothing.milliseconds(4, Tree(3, 1, 4)) == pytest.approx(8.0)
    assert nothing.best(4, [Tree(3, 1, 4)], expected_accept([0.8])) == Tree(3, 1, 4)
    some = StepTimes({4: {PLAIN: 10.0}, 1: {PLAIN: 1.0}}, model)  # twice and half the prediction
    assert some.milliseconds(4, Tree(3, 1, 4)) == pytest.approx(16.0)
    assert some.milliseconds(2, PLAIN) == pytest.approx(3.0), "the mean of both ratios"


def test_trees_of_drafters():
    drafter = make_drafter(Ngram(capacity=4096, nodes=8))
    assert tree_of(make_drafter("NONE")) == PLAIN
    assert tree_of(drafter).nodes == 8 and tree_of(drafter.within(4)).nodes == 4


def test_schedules_are_compared_with_the_default(monkeypatch):
    """One request's steps: the option, then who writes the pages; the other's choice is in force meanwhile."""
    seen = []
    monkeypatch.setattr(autotune, "compiler_options", lambda: {SCHEDULING: "CONCURRENT"})

    class Bench:
        key = None

        def __init__(self, *given) -> None:
            pass

        def begin(self, compiled) -> None:
            compiled()

        def score(self, name, compiled) -> float:
            compiled()
            return {"SERIALIZE, pages by xla": 0.9}.get(name, 1.0 if "pallas" in name else 0.95)

        def seconds(self) -> float:
            return 1e-3

    def variant(key, width, options):
        seen.append((options[SCHEDULING], choice.in_use().get("pages")))

    engine = make_engine()
    monkeypatch.setattr(engine.executables, "variant", variant)
    monkeypatch.setattr(autotune, "StepBench", Bench)
    (schedule, *_) = autotune.step_tasks(engine)
    clock = Clock()
    (result,) = run([schedule], clock).results
    assert result.choice == {"scheduling": "SERIALIZE", "pages": "xla"}
    assert seen[0] == (DEFAULT_SCHEDULE.scheduling, DEFAULT_SCHEDULE.pages)
    assert set(seen) == set(itertools.product(("CONCURRENT", "SERIALIZE"), ("xla", "pallas")))
    assert not choice.in_use()


def test_a_step_that_draws_other_tokens_or_fails_is_left_out(monkeypatch):
    said, renewed = [], []
    device = SimpleNamespace(poisoned=True, renew=lambda: renewed.append(1), update=lambda change: None)
    bench = object.__new__(StepBench)
    bench._engine, bench._say, bench._turns = SimpleNamespace(device=device), said.append, 1
    bench.key, bench._start, bench._expected = "a step", "start", np.array([3, 4, 5, 6])
    monkeypatch.setattr(StepBench, "_first_tokens", lambda self, program: np.array(program))
    monkeypatch.setattr(StepBench, "_region", lambda self, program: 2.0 if program == "start" else 1.0)
    for tokens in ([3, 4, 5, 6], [3, 4, 5, 7]):  # the second has a near-tie
        assert bench.score("another", lambda tokens=tokens: tokens) == 0.5
    assert not said and bench.seconds() == 2.0
    assert bench.score("wrong", lambda: [3, 4, -1, -1]) == math.inf
    assert said.pop().endswith("a step, wrong: draws other tokens in 50% of the rows") and not renewed
    assert bench.score("failing", lambda: 1 / 0) == math.inf
    assert said.pop().endswith("failing does not run: ZeroDivisionError: division by zero") and renewed


# The command.


def test_the_tables_have_the_form_that_the_package_reads(tmp_path, monkeypatch, clean):
    with pytest.raises(ValueError, match="tables are of NVIDIA GPUs"):
        command.check_folder(tmp_path)
    monkeypatch.setattr(launch, "generation", lambda: "9.0")
    with pytest.raises(ValueError, match="is no folder"):
        command.check_folder(tmp_path / "none")
    command.write_tables(record(OF), tmp_path)
    for module, stage in ((launch, "attention"), (choice, "products")):
        monkeypatch.setattr(module, "TABLE", tmp_path / module.TABLE.name)
        module.table.cache_clear()
        more = {"pages": "pallas"} if stage == "products" else {}
        assert module.table() == {"9.0": {**RESULTS[stage], **more}}
    monkeypatch.undo()
    launch.table.cache_clear()
    choice.table.cache_clear()


def test_the_command_measures_steps_on_a_cpu(clean, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(command.build, "make_engine", lambda chosen, **options: asked.append(options) or make_engine())
    monkeypatch.setattr(autotune, "StepBench", FakeSteps)
    monkeypatch.setattr(tuning_tasks, "copy_bandwidth", lambda size: 1e10)
    monkeypatch.setattr(tuning_tasks, "product_speed", lambda dtype: 1e12)
    assert command.main([]) == 0
    out, err = capsys.readouterr()
    assert "Measuring on this device, at most 60 s: 2 choices in" in err
    assert asked == [{"progress": True, "autotune_seconds": 0.0}]
    assert "a copy moves 10.0 GB/s, a large product has 1.00 TFLOP/s" in out and "only steps are timed" in out
    (plain, tree) = (line for line in out.splitlines() if (line.startswith("step times, batch 1 ") and "(" not in line)
                     or (line.startswith("step times, batch 1 ") and "tree (3, 1, 4)" in line))  # fmt: skip
    assert plain.split()[-1] == "plain" and plain.split()[4:6] == ["1000.0", "1.000"]
    assert tree.split()[4:6] == ["1250.0", "1.250"]
    document = json.loads(out.splitlines()[-1])
    assert document["choices"] == document["measured"] == 2 and document["copy_gigabytes_per_second"] == 10.0
    assert read(identity(make_engine())) is not None
    monkeypatch.setattr(autotune, "measure", lambda *given, **options: pytest.fail("it is known"))
    assert command.main(["--no-progress"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document


class FakeSteps:
    """Steps whose time follows their nodes."""

    def __init__(self, engine, batch, say) -> None:
        self.key = None

    def begin(self, compiled) -> None:
        pass

    def score(self, name, compiled) -> float:
        return {"Tree(steps=3, topk=1, nodes=4)": 1.25}.get(name, 1.75)

    def seconds(self) -> float:
        return 1e-3


def test_the_command_refuses_what_it_cannot_do(clean, capsys):
    assert command.main(["--autotune-seconds", "0"]) == 2
    assert "--autotune-seconds 0 leaves no time" in capsys.readouterr().err
    assert command.main(["--write-tables", "."]) == 2
    assert "tables are of NVIDIA GPUs" in capsys.readouterr().err
