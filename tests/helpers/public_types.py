"""Types of public functions for pyright, which `make check` runs over this file.

The code is not executed. Comments that ignore an error mark required errors.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Iterator
from typing import assert_type

import jax.numpy as jnp

from specjax import (
    Completion,
    DecodeState,
    Engine,
    Params,
    PrefillInput,
    Row,
    SamplingParams,
    StepInput,
    StepOutput,
    Steps,
    StreamChunk,
)
from specjax.checkpoint.prompts import Chat
from specjax.engine.sequence import TokenLogprob


def one_prompt(engine: Engine, messages: list[dict[str, str]], ids: list[int], chat: Chat) -> None:
    assert_type(engine.generate("once"), Completion)
    assert_type(engine.generate([1, 2]), Completion)
    assert_type(engine.generate((1, 2)), Completion)
    assert_type(engine.generate(range(7)), Completion)
    assert_type(engine.generate(ids, SamplingParams(seed=1)), Completion)
    assert_type(engine.generate([{"role": "user", "content": "hello"}]), Completion)
    assert_type(engine.generate(messages, {"temperature": 1.0}, stream=False), Completion)
    assert_type(engine.generate(chat, [None]), Completion)
    assert_type(engine.generate("once").logprobs, list[TokenLogprob] | None)


def several_prompts(
    engine: Engine,
    texts: list[str],
    ids: list[list[int]],
    chats: list[list[dict[str, str]]],
    pairs: tuple[str, str],
    lines: Iterator[str],
) -> None:
    assert_type(engine.generate([]), list[Completion])
    assert_type(engine.generate(["once", "twice"]), list[Completion])
    assert_type(engine.generate(texts, [SamplingParams(), {"seed": 1}, None]), list[Completion])
    assert_type(engine.generate(pairs), list[Completion])
    assert_type(engine.generate(lines), list[Completion])
    assert_type(engine.generate(line.strip() for line in lines), list[Completion])
    assert_type(engine.generate([[1, 2], [3]]), list[Completion])
    assert_type(engine.generate(ids), list[Completion])
    assert_type(
        engine.generate([[{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]]),
        list[Completion],
    )
    assert_type(engine.generate(chats), list[Completion])
    assert_type(engine.generate([Chat(messages) for messages in chats]), list[Completion])
    assert_type(engine.generate(["once", [1, 2], [{"role": "user", "content": "hello"}]]), list[Completion])


def streams(engine: Engine, texts: list[str], either: str | list[str], whether: bool) -> None:
    assert_type(engine.generate("once", stream=True), Iterator[StreamChunk])
    assert_type(engine.generate(texts, stream=True), Iterator[StreamChunk])
    assert_type(engine.generate(either, stream=True), Iterator[StreamChunk])
    assert_type(engine.generate("once", stream=whether), Completion | Iterator[StreamChunk])
    assert_type(engine.generate(either), Completion | list[Completion])


def no_prompts(engine: Engine) -> None:
    engine.generate(3)  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.generate({"role": "user", "content": "hello"})  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.generate([1.5])  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.generate("once", 0.5)  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.generate("once", stream="yes")  # pyright: ignore[reportCallIssue, reportArgumentType]


def steps(fns: Steps, params: Params, state: DecodeState, row: Row, chunk: PrefillInput, inputs: StepInput) -> None:
    assert_type(fns.admit(state, jnp.int32(0), row), DecodeState)
    assert_type(fns.admit(state, 0, row), DecodeState)
    assert_type(fns.prefill(params, state, chunk), tuple[DecodeState, StepOutput])
    assert_type(fns.speculate(params, state, inputs), tuple[DecodeState, StepOutput])
    fns.speculate(state, params, inputs)  # pyright: ignore[reportArgumentType]
    fns.prefill(params, state, inputs)  # pyright: ignore[reportArgumentType]
