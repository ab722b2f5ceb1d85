"""What fails below the engine: programs that do not compile or have no room, a state that is lost, several threads."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import GREEDY, byte_ids, check_idle, check_plain, drain, make_engine, outcome, shared_engine, toy
from server_helpers import running
from toy_models import random_table, table_model

from specjax.cli.flags import ServerSettings
from specjax.engine import Engine, SamplingParams
from specjax.engine import batch as collecting
from specjax.engine.device import OutOfMemory
from specjax.engine.generation import EngineError, FairLock
from specjax.engine.programs import Key, Unavailable
from specjax.engine.sequence import TEXT_FAILED, completion
from specjax.engine.text import TextStream
from specjax.serve.errors import NO_PROGRAM, State
from specjax.serve.runner import Runner
from specjax.verify import verify_tree

PROMPTS = [[70 + i, 71, 72] for i in range(4)]
PARAMS = SamplingParams(max_new_tokens=12)


def check_all(engine: Engine, prompts: Any = PROMPTS, params: SamplingParams = PARAMS) -> None:
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        check_plain(toy(), prompt, params, done)
    check_idle(engine)


@pytest.fixture
def engine():
    """Batches of 1 and 4, chunks of 4 and 8, nothing compiled."""
    return make_engine(toy(), warm=False, chunked_prefill_size=8)


def failing(monkeypatch, engine: Engine, wanted: Any, error: type[Exception] = MemoryError) -> list[Key]:
    """Makes compiling fail where `wanted(key)`; lists what was tried."""
    compile_, tried = engine.programs._compile, []

    def attempt(key: Key) -> Any:
        tried.append(key)
        if wanted(key):
            raise error(f"no registers left for {key.width}")
        return compile_(key)

    monkeypatch.setattr(engine.programs, "_compile", attempt)
    return tried


@pytest.mark.parametrize("broken", [4, 1])
def test_a_bucket_without_memory_is_left_out(broken, monkeypatch, caplog, engine):
    """Its requests run in a smaller one, one after the other, or in a larger one; it is tried and logged once."""
    tried = failing(monkeypatch, engine, lambda key: key.kind == "step" and key.width == broken)
    prompts = PROMPTS if broken == 4 else PROMPTS[:1]
    with caplog.at_level(logging.ERROR, logger="specjax"):
        for _ in range(3):
            check_all(engine, prompts)
    assert sorted(key.width for key in tried if key.kind == "step") == [1, 4]
    assert len([r for r in caplog.records if "no registers left" in r.getMessage()]) == 1
    assert f"a step of {broken} requests" in caplog.text


def test_a_chunk_without_memory_is_left_out(monkeypatch):
    engine = make_engine(toy(), warm=False, chunked_prefill_size=256, context_length=1024)
    assert engine.buckets.chunks == (16, 64, 256)
    tried = failing(monkeypatch, engine, lambda key: key == Key("prefill", 256, key.table))
    prompt = [70 + i % 9 for i in range(500)]
    check_all(engine, [prompt])
    assert [key.width for key in tried if key.kind == "prefill"] == [256, 64]


def test_a_program_without_room_for_its_temporaries_fails_when_it_is_compiled(monkeypatch, caplog, engine):
    """As on a GPU, where weights and pool leave so many bytes: smaller batches serve, and none fails while it runs."""
    programs = {key: engine.programs._compile(key) for key in engine.buckets.all_keys()}
    held = {key: program.memory_analysis().temp_size_in_bytes for key, program in programs.items()}
    largest = max(held, key=held.__getitem__)
    assert any(key.kind == largest.kind and size < held[largest] for key, size in held.items()), "another one can serve"
    monkeypatch.setattr(engine.programs, "_room", held[largest] - 1)
    with caplog.at_level(logging.ERROR, logger="specjax"):
        check_all(engine, [[70 + i, *range(71, 80)] for i in range(4)])
        engine.warm_up(progress=False, strict=False)
    assert engine.programs.compiled() == {key for key, size in held.items() if size < held[largest]}
    logged = re.search(r"needs (0\.\d+) GB beside its arguments, and (0\.\d+) GB are left", caplog.text)
    assert logged is not None and float(logged[1]) >= float(logged[2]) and str(largest) in caplog.text


def test_where_no_program_has_memory_the_request_is_told_why(monkeypatch, engine):
    failing(monkeypatch, engine, lambda key: key.kind == "step")
    for _ in range(2):
        with pytest.raises(EngineError, match=r"no size of batch can run .* no registers left") as caught:
            engine.generate(PROMPTS[0], PARAMS)
        assert isinstance(caught.value.__cause__, Unavailable)
        check_idle(engine)


def test_compiling_behind_goes_on_after_a_failure(monkeypatch, engine):
    failing(monkeypatch, engine, lambda key: key == Key("step", 1, key.table))
    engine.warm_up_in_background(progress=False).join(60)
    assert not engine.programs.pending
    assert engine.programs.compiled() == {k for k in engine.buckets.all_keys() if k != Key("step", 1, k.table)}
    engine.warm_up(progress=False, strict=False)
    with pytest.raises(MemoryError, match="no registers left for 1"):
        engine.warm_up(progress=False)


def broken_verifier(tree, logits, draws, prefix_length, generated, *, depth, allowed=None):
    if tree.width == 1 and tree.tokens.shape[0] == 4:
        raise NotImplementedError("no verdict for four")
    return verify_tree(tree, logits, draws, prefix_length, generated, depth=depth, allowed=allowed)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError])
def test_a_bug_in_a_program_is_raised_and_no_other_size_is_used(error, monkeypatch, engine):
    """Each time, with a traceback that does not grow; programs that compile still serve."""
    tried = failing(monkeypatch, engine, lambda key: key == Key("step", 4, key.table), error)
    lengths = []
    for _ in range(3):
        with pytest.raises(
            EngineError, match=f"cannot be compiled: {error.__name__}: no registers left for 4"
        ) as caught:
            engine.generate(PROMPTS, PARAMS)
        assert type(caught.value.__cause__) is error
        lengths.append(len(traceback.extract_tb(caught.value.__cause__.__traceback__)))
        check_idle(engine)
    assert len(set(lengths[1:])) == 1
    assert [key.width for key in tried if key.kind == "step"].count(4) == 1, "compiled once, raised three times"
    check_all(engine, PROMPTS[:1])


def test_a_bug_of_a_verifier_is_raised_with_its_traceback():
    engine = make_engine(toy(), verify=broken_verifier, warm=False)
    check_all(engine, PROMPTS[:1])
    with pytest.raises(EngineError, match="no verdict for four") as caught:
        engine.generate(PROMPTS, PARAMS)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert "broken_verifier" in names
    with pytest.raises(NotImplementedError, match="no verdict for four"):
        engine.warm_up(progress=False, strict=False)


def test_a_bug_in_the_background_is_logged_and_raised_when_it_is_used(caplog):
    engine = make_engine(toy(), verify=broken_verifier, warm=False)
    with caplog.at_level(logging.ERROR, logger="specjax"):
        engine.warm_up_in_background(progress=False).join(60)
        assert not engine.programs.pending
        broken = next(key for key in engine.buckets.all_keys() if key.kind == "step" and key.width == 4)
        assert engine.programs.compile_ahead(broken), "it is known to fail"
    (record,) = caplog.records
    assert record.exc_info is not None and "no verdict for four" in str(record.exc_info[1])
    assert not engine.programs.has_failed(broken)
    with pytest.raises(EngineError, match="no verdict for four"):
        engine.generate(PROMPTS, PARAMS)
    check_all(engine, PROMPTS[:1])


def test_requests_that_need_a_broken_program_get_a_500(monkeypatch):
    """Sending them again would not help. Others are served."""
    engine = make_engine(toy(), verify=broken_verifier, warm=False)
    with running(engine) as server, ThreadPoolExecutor(4) as clients:
        assert server.complete(max_tokens=3).status_code == 200
        both = [clients.submit(server.complete, f"{i} hello", max_tokens=60) for i in range(4)]
        answers = {answer.status_code: answer.text for answer in (each.result(120) for each in both)}
        assert set(answers) <= {200, 500} and NO_PROGRAM in answers[500]
        assert server.complete(max_tokens=3).status_code == 200


def test_a_server_does_not_start_with_a_bug_in_its_first_program():
    def broken(*args, **options):
        raise NotImplementedError("no verdict at all")

    engine = make_engine(toy(), verify=broken, warm=False)
    runner = Runner(lambda: engine, ServerSettings())
    runner.start()
    runner.join(120)
    assert runner.state is State.FAILED and isinstance(runner.failure, NotImplementedError)
    assert "broken" in [frame.name for frame in traceback.extract_tb(runner.failure.__traceback__)]


def test_warming_up_fails_where_nothing_is_left_to_run(monkeypatch, engine):
    failing(monkeypatch, engine, lambda key: key.kind == "step")
    with pytest.raises(Unavailable, match="no registers left"):
        engine.warm_up(progress=False, strict=False)


def no_room(program: Any, spoil: Any) -> Any:
    def run(params: Any, state: Any, inputs: Any) -> Any:
        spoil(state)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 GiB")

    return run


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("kind", ["step", "prefill"])
def test_a_batch_that_runs_out_of_memory_is_split(kind, lost, monkeypatch, caplog, engine):
    """Whether or not the state was lost with it, every request has its text, and the size is not tried again."""
    engine.warm_up(progress=False)
    largest = 4 if kind == "step" else engine.buckets.chunks[-1]
    programs = engine.programs.get
    tries = []

    def get(key: Key) -> Any:
        program = programs(key)
        if (key.kind, key.width) != (kind, largest):
            return program
        tries.append(key)
        return no_room(program, lambda state: jax.tree.map(lambda leaf: leaf.delete(), state) if lost else None)

    monkeypatch.setattr(engine.programs, "get", get)
    prompts = [[70 + i, *range(71, 90)] for i in range(4)] if kind == "prefill" else PROMPTS
    if kind == "prefill" and engine.buckets.chunks[0] == largest:
        with pytest.raises(EngineError):
            engine.generate(prompts, PARAMS)
        return
    with caplog.at_level(logging.ERROR, logger="specjax"):
        check_all(engine, prompts)
        check_all(engine, prompts)
    assert len(tries) == 1
    assert sum("RESOURCE_EXHAUSTED" in r.getMessage() for r in caplog.records) == 1


def test_running_out_of_memory_in_the_middle_keeps_the_text(monkeypatch):
    """With sampling, steps in flight, and tokens that were read before."""
    engine = make_engine(toy(), "NONE")
    engine.warm_up(progress=False)
    params = [SamplingParams(max_new_tokens=30, temperature=0.9, seed=i, frequency_penalty=0.2) for i in range(3)]
    expected = [outcome(done) for done in engine.generate(PROMPTS[:3], params)]
    run, calls = engine.device.run, 0

    def sometimes(key: Key, program: Any, inputs: Any) -> Any:
        nonlocal calls
        large = key.kind == "step" and key.width == 4
        calls += large
        return run(key, no_room(program, lambda state: None) if large and calls == 7 else program, inputs)

    monkeypatch.setattr(engine.device, "run", sometimes)
    assert [outcome(done) for done in engine.generate(PROMPTS[:3], params)] == expected
    assert calls == 7 and engine.programs.has_failed(Key("step", 4, engine.buckets.tables[-1]))
    check_idle(engine)


def test_what_ended_in_the_iteration_that_ran_out_of_memory_is_reported(monkeypatch):
    """The step in flight is read after the launch of the next; here its reading fails after another's has ended."""
    engine = make_engine(toy(), "NONE")
    first = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=2))
    second = engine.add(PROMPTS[1], SamplingParams(max_new_tokens=9))
    collect, reported = collecting.collect, []

    def fails(run: Any, flight: Any) -> None:
        if (
            first.output.finish_reason is not None
            and second.output.finish_reason is None
            and not engine.programs.has_failed(key)
        ):
            raise OutOfMemory(key, MemoryError("late"))
        collect(run, flight)

    key = Key("step", 4, engine.buckets.tables[-1])
    monkeypatch.setattr(collecting, "collect", fails)
    while engine.unfinished:
        reported += engine.step()
    assert {s.id for s in reported if s.output.finish_reason is not None} == {first.id, second.id}
    assert engine.programs.has_failed(key)
    check_plain(toy(), PROMPTS[1], SamplingParams(max_new_tokens=9), completion(second))


def test_requests_that_are_split_advance_together(monkeypatch, engine):
    failing(monkeypatch, engine, lambda key: key == Key("step", 4, key.table))
    sequences = [engine.add(prompt, SamplingParams(max_new_tokens=40)) for prompt in PROMPTS]
    while any(len(sequence.output.tokens) < 5 for sequence in sequences):
        engine.step()
        engine.check_integrity()
    lengths = [len(sequence.output.tokens) for sequence in sequences]
    assert max(lengths) - min(lengths) <= 8, "the oldest does not run to its end first"
    assert len(drain(engine)) == 4


def test_on_a_gpu_nothing_runs_while_xla_compiles(monkeypatch, engine):
    """XLA times candidates on the device there: compiling behind and steps take turns."""
    monkeypatch.setattr(engine.programs, "_exclusive", True)
    compile_, programs = jax.stages.Lowered.compile, engine.programs.get
    compiling, compiled = threading.Event(), []

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        compiling.set()
        try:
            return compile_(self, *args, **options)
        finally:
            compiled.append(threading.current_thread().name)
            compiling.clear()

    def get(key: Key) -> Any:
        program = programs(key)

        def run(*args: Any) -> Any:
            assert not compiling.is_set()
            return program(*args)

        return run

    engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=2))
    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    monkeypatch.setattr(engine.programs, "get", get)
    behind = engine.warm_up_in_background(progress=False)
    check_all(engine, [PROMPTS[0]] * 2, SamplingParams(max_new_tokens=60))
    behind.join(60)
    assert "specjax-compile" in compiled
    assert engine.programs.compiled() == set(engine.buckets.all_keys())


# The state.


def test_the_pool_is_waited_for(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    new_state = Engine._new_state

    def slow(self: Engine) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(60)
        return new_state(self)

    monkeypatch.setattr(Engine, "_new_state", slow)
    engine = make_engine(toy(), warm=False)
    assert begun.wait(60)
    waiter = threading.Thread(target=engine.wait_until_allocated)
    waiter.start()
    assert waiter.is_alive()
    go_on.set()
    waiter.join(60)
    assert not waiter.is_alive()
    check_all(engine)


def test_an_allocation_that_fails_is_told_and_tried_again(monkeypatch):
    def fails(self: Engine) -> Any:
        raise MemoryError("no room for the pool")

    engine = make_engine(toy(), warm=True)
    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "_new_state", lambda: fails(engine))
        with pytest.raises(MemoryError):
            engine.reset("gone")
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room for the pool"):
                engine.wait_until_allocated()  # an error at once, not a wait for ever
        with pytest.raises(EngineError, match="make a new engine"):
            engine.generate(PROMPTS[0], PARAMS)
    check_all(engine)


def test_after_a_failed_step_generate_works_again(monkeypatch):
    engine = make_engine(toy(), "NONE")
    run, calls = engine.device.run, 0

    def breaks(key: Key, program: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            jax.tree.map(lambda leaf: leaf.delete(), engine.state)
            raise ValueError("a bug")
        return run(key, program, inputs)

    monkeypatch.setattr(engine.device, "run", breaks)
    with pytest.raises(EngineError, match="was reset; it can be used again: ValueError: a bug"):
        engine.generate(PROMPTS, PARAMS)
    check_idle(engine)
    check_all(engine)


def test_an_interrupt_between_two_donations_loses_nothing(monkeypatch):
    """The state is gone with the step that was interrupted: what runs begins again, with the same text."""
    engine = make_engine(toy(), "NONE")
    run, calls = engine.device.run, 0

    def interrupted(key: Key, program: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            jax.tree.map(lambda leaf: leaf.delete(), engine.state)
            raise KeyboardInterrupt
        return run(key, program, inputs)

    monkeypatch.setattr(engine.device, "run", interrupted)
    other = engine.add(PROMPTS[1], PARAMS)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[0], PARAMS)
    done = drain(engine)
    check_plain(toy(), PROMPTS[1], PARAMS, done[other.id])
    check_all(engine)


@pytest.mark.parametrize("where", ["reading", "admitting", "launched"])
def test_an_interrupt_anywhere_corrupts_no_other_request(where, monkeypatch):
    """While a step is read, between slot and row, and between launch and note: the others' texts stay whole."""
    engine = make_engine(toy(), "NONE")
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=4)
    expected = outcome(engine.generate(PROMPTS[1], params))
    calls = 0

    def interrupted(function: Any, count: int, *, after: bool = False) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                if after:
                    function(*args, **options)
                raise KeyboardInterrupt
            return function(*args, **options)

        return run

    if where == "reading":
        monkeypatch.setattr(collecting, "read_output", interrupted(collecting.read_output, 6))
    elif where == "admitting":
        monkeypatch.setattr(engine.device, "update", interrupted(engine.device.update, 2))
    else:
        monkeypatch.setattr(engine.device, "run", interrupted(engine.device.run, 7, after=True))
    other = engine.add(PROMPTS[1], params)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=20))
    assert outcome(drain(engine)[other.id]) == expected
    check_idle(engine)


def test_memory_that_comes_back_is_used_again(monkeypatch):
    """One failure of the smallest program is not remembered: nothing could run ever after."""
    engine = make_engine(toy(), "NONE")
    run = engine.device.run
    monkeypatch.setattr(engine.device, "run", lambda key, program, inputs: run(key, no_room(program, str), inputs))
    with pytest.raises(EngineError, match=r"no memory for a prefill of 8 tokens .* nothing smaller"):
        engine.generate(PROMPTS[0], PARAMS)
    monkeypatch.undo()
    check_all(engine)


def test_what_failed_keeps_nothing_alive(monkeypatch, engine):
    """Each step asks for the larger batch first, and is told again that it failed."""
    failing(monkeypatch, engine, lambda key: key == Key("step", 4, key.table))
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=3))
    key = Key("step", 4, engine.buckets.tables[-1])
    lengths = []
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            engine.programs.get(key)
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1, "an exception that is raised again grows by a frame each time"


def test_an_interrupted_compilation_is_no_interrupt_of_others(monkeypatch, engine):
    key, begun, go_on = engine.single_request_keys()[0], threading.Event(), threading.Event()
    compile_ = engine.programs._compile

    def interrupted(key: Key) -> Any:
        if begun.is_set():
            return compile_(key)
        begun.set()
        assert go_on.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.programs, "_compile", interrupted)
    found: list[Any] = []

    def compile_first() -> None:
        try:
            found.append(engine.programs.get(key))
        except BaseException as error:
            found.append(error)

    first = threading.Thread(target=compile_first)
    first.start()
    assert begun.wait(60)
    waiting = threading.Thread(target=compile_first)
    waiting.start()
    while not engine.programs.is_waiting(waiting.ident):
        pass
    go_on.set()
    first.join(60), waiting.join(60)
    assert isinstance(found[0], KeyboardInterrupt) and found[1] is engine.programs.get(key)


# Several callers.


def test_generate_ends_only_its_own_requests():
    engine = shared_engine("NONE")
    number = next(engine.intake._numbers)
    mine = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=40), id=f"request-{number + 2}")
    with pytest.raises(ValueError, match="is running"):
        engine.generate(PROMPTS[1], PARAMS)  # draws the number that the id above has
    assert engine.find(mine.id) is mine
    assert not engine.end(engine.intake.sequence(PROMPTS[2], PARAMS, id=mine.id))
    done = drain(engine)
    check_plain(toy(), PROMPTS[0], SamplingParams(max_new_tokens=40), done[mine.id])
    check_idle(engine)


def test_threads_share_an_engine():
    engine = shared_engine("NGRAM")
    prompts = [[80 + i, 71, 72, 71, 72] for i in range(6)]
    params = SamplingParams(max_new_tokens=20)
    expected = {i: outcome(engine.generate(prompt, params)) for i, prompt in enumerate(prompts)}
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        if i % 2:
            found[i] = outcome(engine.generate(prompts[i], params))
        else:
            *_, last = engine.generate(prompts[i], params, stream=True)
            found[i] = outcome(last.completion)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == expected
    check_idle(engine)


def test_a_fair_lock_is_handed_over():
    lock, order, asking = FairLock(), [], threading.Event()

    def other() -> None:
        asking.set()
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock, lock:
        thread.start()
        assert asking.wait(60)
        while not lock._door.locked():  # it stands in the door
            pass
        order.append("first")
    with lock:
        order.append("again")
    thread.join(60)
    assert order == ["first", "other", "again"]


# Logits that are not finite.


def test_a_request_whose_logits_are_not_finite_ends_alone():
    """The row of logits after an 11 holds a NaN; the token 11 is drawn by bias, or comes in a prompt."""
    table = np.asarray(random_table(3, rows=265, vocab=265))
    table[11] = np.nan
    engine = make_engine(table_model(jnp.asarray(table), window=1), "NONE")
    healthy = SamplingParams(max_new_tokens=10, logit_bias={11: -100.0})
    found = engine.generate(
        [[5, 6], [5, 6], [7, 11], [8]],
        [healthy, SamplingParams(max_new_tokens=10, logit_bias={11: 100.0}, logprobs=1), healthy, healthy],
    )
    assert [done.finish_reason["type"] for done in found] == ["length", "abort", "abort", "length"]
    assert found[1].output_ids == [11] and len(found[1].logprobs) == 1
    assert (
        found[1].finish_reason["message"]
        == "the model's logits are not finite (NaN or infinity) after 1 tokens of output"
    )
    assert found[2].output_ids == [] and "after 0 tokens" in found[2].finish_reason["message"]
    assert found[0].output_ids == engine.generate([5, 6], healthy).output_ids
    check_idle(engine)


# Arguments of the wrong type.

WRONG_TYPES = """
import numpy as np
from specjax import Auto, Eagle, Engine, EngineConfig
from specjax.engine.intake import with_sampling

def refused(call, *words):
    try:
        call()
    except TypeError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)

load = lambda **arguments: lambda: Engine.from_pretrained("no such model", **arguments)
refused(load(config={"page_size": 8}), "config must be an EngineConfig, got dict; write EngineConfig(**config)")
refused(load(config=None), "config must be an EngineConfig, got NoneType")
refused(load(draft={"topk": 8}), "draft must be options such as Eagle(steps=5) or an algorithm's name, got {'topk': 8}")
refused(lambda: Eagle(topk="8"), "Eagle.topk must be an integer from 1 to 64, got '8'")
refused(lambda: Auto(topk="8"), "topk must be an integer from 1 to 64, got '8'")
refused(lambda: Auto(top_k=8), "Auto has no option 'top_k'; it has: ")
for name in ("max_running_requests", "page_size", "max_total_tokens", "context_length", "chunked_prefill_size"):
    for value in ("16", 16.0, True):
        refused(lambda: EngineConfig(**{name: value}), f"{name} must be an integer", f"got {value!r}")
for sampling in (5, "greedy", [5], ["temperature"]):
    refused(lambda: with_sampling(["hello"], sampling), "sampling must be a SamplingParams, a dict of its fields")
assert with_sampling(np.array([1, 2]), None)[0] and not with_sampling((text for text in "ab"), None)[0]
refused(lambda: EngineConfig(mem_fraction="0.5"), "mem_fraction must be a number above 0 and at most 1, got '0.5'")
refused(lambda: EngineConfig(overlap="no"), "overlap must be true or false, got 'no'")
refused(lambda: EngineConfig(random_seed="1"), "random_seed must be an integer, got '1'")
"""


def test_arguments_of_the_wrong_type_are_named_as_in_python():
    """In a process of its own: here the checked annotations would refuse them first."""
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("prompts", [None, 5, 2.5, {"role": "user", "content": "hello"}, object()])
def test_what_is_no_prompt_is_refused(prompts):
    with pytest.raises(TypeError, match="prompts must be a string, "):
        shared_engine("NONE").generate(prompts, GREEDY)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stop", [(), ("never",)], ids=["late", "with stop strings"])
def test_text_that_fails_ends_its_request_alone(stream, stop, monkeypatch):
    """Whether its text is made in a step or by the caller."""
    engine, decode_ = shared_engine("NGRAM"), TextStream._decode
    (rare,) = byte_ids(b"\x01")

    def fail(self, tokens):
        if rare in tokens:
            raise RuntimeError("no such text")
        return decode_(self, tokens)

    monkeypatch.setattr(TextStream, "_decode", fail)
    good = SamplingParams(max_new_tokens=20, stop=stop)
    bad = SamplingParams(max_new_tokens=20, stop=stop, logit_bias={str(rare): 100.0})
    if stream:
        chunks = engine.generate(PROMPTS[:2], [bad, good], stream=True)
        done = {chunk.prompt_index: chunk.completion for chunk in chunks if chunk.completion}
    else:
        done = dict(enumerate(engine.generate(PROMPTS[:2], [bad, good])))
    assert done[0].finish_reason == {"type": "abort", "message": TEXT_FAILED}
    check_plain(toy(), PROMPTS[1], good, done[1])
    check_idle(engine)
