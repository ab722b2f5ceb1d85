"""Failures below the engine: compilation, device memory, a lost state, interrupts, several threads."""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import (
    GREEDY,
    byte_ids,
    check_idle,
    check_plain,
    check_texts,
    drain,
    make_engine,
    outcome,
    shared_engine,
    toy,
)
from server_helpers import running
from toy_models import random_table, table_model

from specjax.cli.flags import ServerSettings
from specjax.engine import Engine, SamplingParams, runtime
from specjax.engine.generation import EngineError, FairLock
from specjax.engine.plan import Key
from specjax.engine.sequence import TEXT_FAILED
from specjax.engine.text import TextStream
from specjax.serve.errors import NO_PROGRAM, State
from specjax.serve.runner import Runner
from specjax.verify import verify_tree

PROMPTS = [[70 + i, 71, 72] for i in range(4)]
PARAMS = SamplingParams(max_new_tokens=12)


def check_all(engine: Engine, prompts: Any = PROMPTS, params: SamplingParams = PARAMS) -> None:
    check_texts(engine, toy(), prompts, [params] * len(prompts))


@pytest.fixture
def engine():
    """Batches of 1 and 4, chunks of 8, no compiled program."""
    return make_engine(toy(), warm=False, chunked_prefill_size=8)


def failing(monkeypatch, engine: Engine, wanted: Any, error: type[Exception] = MemoryError) -> list[Key]:
    """Make compilation fail where `wanted(key)`; return the list of attempted keys."""
    compile_, tried = engine.programs._compile, []

    def attempt(key: Key) -> Any:
        tried.append(key)
        if wanted(key):
            raise error(f"no registers left for {key.width}")
        return compile_(key)

    monkeypatch.setattr(engine.programs, "_compile", attempt)
    return tried


@pytest.mark.parametrize("broken", [4, 1])
def test_bucket_without_memory_is_skipped(broken, monkeypatch, caplog, engine):
    """Requests run in another bucket. The failed one is compiled and logged once."""
    tried = failing(monkeypatch, engine, lambda key: key.kind == "step" and key.width == broken)
    prompts = PROMPTS if broken == 4 else PROMPTS[:1]
    with caplog.at_level(logging.ERROR, logger="specjax"):
        for _ in range(3):
            check_all(engine, prompts)
    assert sorted(key.width for key in tried if key.kind == "step") == [1, 4]
    assert len([r for r in caplog.records if "no registers left" in r.getMessage()]) == 1
    assert f"a step of {broken} requests" in caplog.text


def test_program_without_room_for_temporaries_fails_at_compilation(monkeypatch, caplog, engine):
    """Smaller batches serve where the temporaries exceed the bytes left beside weights and pool."""
    programs = {key: engine.programs._compile(key) for key in engine.buckets.all_keys()}
    sizes = {key: program.memory_analysis().temp_size_in_bytes for key, program in programs.items()}
    largest = max(sizes, key=sizes.__getitem__)
    assert any(key.kind == largest.kind and size < sizes[largest] for key, size in sizes.items()), "no other program"
    monkeypatch.setattr(engine.programs, "_room", sizes[largest] - 1)
    with caplog.at_level(logging.ERROR, logger="specjax"):
        check_all(engine, [[70 + i, *range(71, 80)] for i in range(4)])
        engine.warm_up(progress=False, strict=False)
    assert engine.programs.compiled() == {key for key, size in sizes.items() if size < sizes[largest]}
    logged = re.search(r"needs (0\.\d+) GB beside its arguments, and (0\.\d+) GB are left", caplog.text)
    assert logged is not None and float(logged[1]) >= float(logged[2]) and str(largest) in caplog.text


def test_no_program_fits_memory(monkeypatch, engine):
    failing(monkeypatch, engine, lambda key: key.kind == "step")
    for _ in range(2):
        with pytest.raises(EngineError, match=r"no size of batch can run .* no registers left") as caught:
            engine.generate(PROMPTS[0], PARAMS)
        assert isinstance(caught.value.__cause__, MemoryError)
        check_idle(engine)
    with pytest.raises(MemoryError, match="no registers left"):
        engine.warm_up(progress=False, strict=False)


def test_background_compilation_continues_after_a_failure(monkeypatch, engine):
    failing(monkeypatch, engine, lambda key: key == Key("step", 1, key.table))
    engine.warm_up_in_background()
    assert engine.programs.wait(60)
    assert engine.programs.compiled() == {k for k in engine.buckets.all_keys() if k != Key("step", 1, k.table)}
    engine.warm_up(progress=False, strict=False)
    with pytest.raises(MemoryError, match="no registers left for 1"):
        engine.warm_up(progress=False)


def broken_verifier(tree, logits, draws, prefix_length, generated, *, depth, allowed=None):
    if tree.width == 1 and tree.tokens.shape[0] == 4:
        raise NotImplementedError("no verdict for four")
    return verify_tree(tree, logits, draws, prefix_length, generated, depth=depth, allowed=allowed)


def test_bug_in_a_verifier_is_raised_with_its_traceback(caplog):
    """The background compiler logs it; requests that need the program raise it; others are served."""
    engine = make_engine(toy(), verify=broken_verifier, warm=False)
    with caplog.at_level(logging.ERROR, logger="specjax"):
        engine.warm_up_in_background()
    assert engine.programs.wait(60)
    broken = next(key for key in engine.buckets.all_keys() if key.kind == "step" and key.width == 4)
    assert broken in engine.programs.ready().compiled, "requests that need it get its error"
    (record,) = caplog.records
    assert record.exc_info is not None and "no verdict for four" in str(record.exc_info[1])
    assert broken not in engine.programs.ready().failed
    frames = []
    for _ in range(3):
        with pytest.raises(EngineError, match="NotImplementedError: no verdict for four") as caught:
            engine.generate(PROMPTS, PARAMS)
        assert type(caught.value.__cause__) is NotImplementedError
        frames.append([frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)])
        check_idle(engine)
    assert "broken_verifier" in frames[0] and len(frames[1]) == len(frames[2]), "the traceback grows"
    check_all(engine, PROMPTS[:1])
    with pytest.raises(NotImplementedError, match="no verdict for four"):
        engine.warm_up(progress=False, strict=False)


def test_broken_program_is_a_500():
    engine = make_engine(toy(), verify=broken_verifier, warm=False)
    with running(engine) as server, ThreadPoolExecutor(4) as clients:
        calls = [clients.submit(server.complete, f"{i} hello", max_tokens=60) for i in range(4)]
        answers = {answer.status_code: answer.text for answer in (call.result(120) for call in calls)}
        assert set(answers) <= {200, 500} and NO_PROGRAM in answers[500]
        assert server.complete(max_tokens=3).status_code == 200


def test_server_fails_with_its_first_program():
    def broken(*args, **options):
        raise NotImplementedError("no verdict at all")

    engine = make_engine(toy(), verify=broken, warm=False)
    runner = Runner(lambda: engine, ServerSettings())
    runner.start()
    runner.join(120)
    assert runner.state is State.FAILED and isinstance(runner.failure, NotImplementedError)
    assert "broken" in [frame.name for frame in traceback.extract_tb(runner.failure.__traceback__)]


def test_gpu_steps_and_compilation_take_turns(monkeypatch, engine):
    """XLA measures candidates on a GPU, so no step may run meanwhile."""
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
    engine.warm_up_in_background()
    check_all(engine, [PROMPTS[0]] * 2, SamplingParams(max_new_tokens=60))
    assert engine.programs.wait(60)
    assert any(name.startswith("specjax-compile") for name in compiled)
    assert engine.programs.compiled() == set(engine.buckets.all_keys())


def test_failed_allocation_is_raised_and_retried(monkeypatch):
    engine = make_engine(toy())
    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "_new_state", Mock(side_effect=MemoryError("no room for the pool")))
        with pytest.raises(MemoryError):
            engine.reset("gone")
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room for the pool"):
                engine.wait_until_allocated()
        with pytest.raises(EngineError, match="make a new engine"):
            engine.generate(PROMPTS[0], PARAMS)
    check_all(engine)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_lost_state(error, monkeypatch):
    """A failed step resets the engine. After an interrupt, the other requests start again and keep their texts."""
    engine = make_engine(toy(), "NONE")
    run, calls = engine.device.run, itertools.count(1)

    def fails(key: Key, program: Any, inputs: Any) -> Any:
        if next(calls) == 6:
            jax.tree.map(lambda leaf: leaf.delete(), engine.state)
            raise error("a bug")
        return run(key, program, inputs)

    monkeypatch.setattr(engine.device, "run", fails)
    if error is ValueError:
        with pytest.raises(EngineError, match="was reset; it can be used again: ValueError: a bug"):
            engine.generate(PROMPTS, PARAMS)
    else:
        other = engine.add(PROMPTS[1], PARAMS)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[0], PARAMS)
        check_plain(toy(), PROMPTS[1], PARAMS, drain(engine)[other.id])
    check_idle(engine)
    check_all(engine)


@pytest.mark.parametrize("place", ["while a step is read", "during admission", "after a launch"])
def test_interrupt_keeps_other_requests_intact(place, monkeypatch):
    engine, calls = make_engine(toy(), "NONE"), itertools.count(1)
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=4)
    expected = outcome(engine.generate(PROMPTS[1], params))

    def interrupt(owner: Any, name: str, call: int) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            last = next(calls) == call
            output = None if last and name != "run" else function(*args, **options)
            if last:
                raise KeyboardInterrupt
            return output

        monkeypatch.setattr(owner, name, run)

    owner, name, call = {
        "while a step is read": (runtime, "read_output", 6),
        "during admission": (engine.device, "update", 2),
        "after a launch": (engine.device, "run", 7),
    }[place]
    interrupt(owner, name, call)
    other = engine.add(PROMPTS[1], params)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=20))
    assert outcome(drain(engine)[other.id]) == expected
    check_idle(engine)


def test_interrupted_compilation_interrupts_no_other_thread(monkeypatch, engine):
    """Whoever waits for the program compiles it again."""
    keys, begun, interrupt = engine.buckets.ready_keys(), threading.Event(), threading.Event()
    compile_ = engine.programs._compile

    def interrupted(key: Key) -> Any:
        if threading.current_thread() is not main:
            return compile_(key)
        begun.set()
        assert interrupt.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.programs, "_compile", interrupted)
    with ThreadPoolExecutor(2) as threads:
        main = threads.submit(threading.current_thread).result()
        first = threads.submit(lambda: engine.warm_up(keys, progress=False))
        assert begun.wait(60)
        second = threads.submit(lambda: [engine.programs.get(key) for key in keys])
        time.sleep(0.05)
        interrupt.set()
        assert isinstance(first.exception(60), KeyboardInterrupt)
        assert second.result(60) == [engine.programs.get(key) for key in keys]


def test_generate_ends_only_its_own_requests():
    engine, params = shared_engine("NONE"), SamplingParams(max_new_tokens=40)
    number = next(engine.intake._numbers)
    other = engine.add(PROMPTS[0], params, id=f"request-{number + 2}")
    with pytest.raises(ValueError, match="is running"):
        engine.generate(PROMPTS[1], PARAMS)  # draws the number of the id above
    assert engine.runtime.sequences[other.id] is other
    assert not engine.end(engine.intake.sequence(PROMPTS[2], PARAMS, id=other.id))
    check_plain(toy(), PROMPTS[0], params, drain(engine)[other.id])
    check_idle(engine)


def test_threads_share_an_engine():
    engine, params = shared_engine("NGRAM"), SamplingParams(max_new_tokens=20)
    prompts = [[80 + i, 71, 72, 71, 72] for i in range(6)]

    def work(i: int) -> Any:
        if i % 2:
            return outcome(engine.generate(prompts[i], params))
        *_, last = engine.generate(prompts[i], params, stream=True)
        return outcome(last.completion)

    with ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(work, range(6)))
    assert outcomes == [outcome(engine.generate(prompt, params)) for prompt in prompts]
    check_idle(engine)


def test_logits_that_are_not_finite_abort_one_request():
    """The logits after token 11 hold a NaN. One request draws it by its bias, another has it in its prompt."""
    table = np.asarray(random_table(3, rows=265, vocab=265))
    table[11] = np.nan
    engine = make_engine(table_model(jnp.asarray(table), window=1), "NONE")
    healthy = SamplingParams(max_new_tokens=10, logit_bias={11: -100.0})
    completions = engine.generate(
        [[5, 6], [5, 6], [7, 11], [8]],
        [healthy, SamplingParams(max_new_tokens=10, logit_bias={11: 100.0}, logprobs=1), healthy, healthy],
    )
    assert [done.finish_reason["type"] for done in completions] == ["length", "abort", "abort", "length"]
    assert completions[1].output_ids == [11] and len(completions[1].logprobs) == 1
    assert (
        completions[1].finish_reason["message"]
        == "the model's logits are not finite (NaN or infinity) after 1 tokens of output"
    )
    assert completions[2].output_ids == [] and "after 0 tokens" in completions[2].finish_reason["message"]
    assert completions[0].output_ids == engine.generate([5, 6], healthy).output_ids
    check_idle(engine)


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


def test_arguments_of_the_wrong_type():
    """In a subprocess, because the checked annotations of the suite would refuse them first."""
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_prompts_of_the_wrong_type():
    for prompts in (None, 5, {"role": "user", "content": "hello"}, object()):
        with pytest.raises(TypeError, match="prompts must be a string, "):
            shared_engine("NONE").generate(prompts, GREEDY)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stop", [(), ("never",)], ids=["late", "with stop strings"])
def test_failing_detokenizer_aborts_one_request(stream, stop, monkeypatch):
    """Text is decoded in a step where there are stop strings, otherwise by the caller."""
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


def test_fair_lock_passes_to_the_waiting_thread():
    lock, order, asking = FairLock(), [], threading.Event()

    def other() -> None:
        asking.set()
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock, lock:
        thread.start()
        assert asking.wait(60)
        while not lock._door.locked():  # until the thread waits for the lock
            pass
        order.append("first")
    with lock:
        order.append("again")
    thread.join(60)
    assert order == ["first", "other", "again"]
