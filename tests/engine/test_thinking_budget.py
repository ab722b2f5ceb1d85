"""The budget of thoughts: at most so many tokens, then their end, and the text is the same under every drafter."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import oracle
import pytest
from draft_helpers import right_often
from engine_helpers import (
    DRAFTS,
    NEAR,
    SPECIAL,
    check_idle,
    drain,
    make_engine,
    outcome,
    shared_engine,
    spelled,
    wanted,
)
from harmony_helpers import SCRIPTS, harmony_engine, harmony_tokenizer
from toy_models import Toy

from specjax.checkpoint.prompts import END_THINK, THINK
from specjax.drafters import TreeShape
from specjax.engine import Completion, Engine, SamplingParams
from specjax.engine.grammar import Grammar
from specjax.engine.text import ANALYSIS, LEAD, ThinkingBudget
from specjax.limits import ParameterError

WORDS = [*SPECIAL, "Ġ", "Ċ", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO"]  # and two markers: 48 tokens
BEGIN, END = 46, 47


@functools.cache
def thinking_tokenizer() -> Any:
    tokenizer = spelled(WORDS)
    tokenizer.add_tokens([THINK, END_THINK], special_tokens=False)
    assert len(tokenizer) == 48 and tokenizer.convert_tokens_to_ids([THINK, END_THINK]) == [BEGIN, END]
    return tokenizer


@functools.cache
def engine_of(algorithm: str, **config: Any) -> Engine:
    """An engine over the pair model, for which all drafters are right often."""
    learned = algorithm == "EAGLE3"
    toy, params, make = right_often("eagle3" if learned else "eagle")
    drafter = make(TreeShape(3, 2, 6)) if learned else DRAFTS[algorithm]
    return make_engine(toy, drafter, tokens=thinking_tokenizer(), draft=params if learned else None, **config)


def expected(
    toy: Toy, prompt: list[int], params: SamplingParams, begun: bool | None, end: int = END
) -> tuple[list[int], list[float]]:
    """The output, one token at a time, and the gaps of its draws. `begun`: None: the model may begin the thoughts."""
    budget, out, gaps, thinks, thoughts = params.thinking_token_budget, [], [], bool(begun), 0
    one = dataclasses.replace(wanted(params), max_tokens=1)
    while len(out) < (params.max_new_tokens or 0):
        drawn = oracle.generate_plain(toy.logits, [*prompt, *out], one)
        (token,), gaps = drawn.tokens, [*gaps, *drawn.gaps]
        if thinks and token != end and token not in one.stop_ids and thoughts == budget:
            token = end
        thoughts += thinks and token != end
        thinks = (thinks and token != end) or (begun is None and not out and token == BEGIN)
        out.append(token)
        if token in one.stop_ids:
            break
    return out, gaps


def check(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], begun: list[bool | None]) -> int:
    """All outputs are the expected ones. Returns the number of thoughts that a budget ended."""
    toy, _, _ = right_often("eagle")
    for prompt, sampling in zip(prompts, params, strict=True):
        engine.add(prompt, sampling)
    completions, cuts = sorted(drain(engine).values(), key=lambda done: int(done.id.split("-")[-1])), 0
    for prompt, sampling, starts, done in zip(prompts, params, begun, completions, strict=True):
        tokens, gaps = expected(toy, prompt, sampling, starts)
        close = next((i for i, gap in enumerate(gaps) if gap < NEAR), len(tokens))
        assert done.output_ids[:close] == tokens[:close], (sampling.thinking_token_budget, close)
        plain, _ = expected(toy, prompt, dataclasses.replace(sampling, thinking_token_budget=None), starts)
        cuts += plain != tokens
        check_completion(done, sampling)
    check_idle(engine)
    return cuts


def check_completion(done: Completion, params: SamplingParams) -> None:
    """The parts of a completion agree with its tokens."""
    assert done.logprobs is not None and done.origins is not None
    for parts in (done.logprobs, done.origins):
        assert [part.token for part in parts] == done.output_ids
        assert "".join(part.text for part in parts) == done.text
    assert all(np.isfinite(one.logprob) and one.logprob <= 0 and one.top for one in done.logprobs)
    assert sum(origin.drafted for origin in done.origins) == sum(
        i * count for i, count in enumerate(done.spec_accept_histogram)
    )
    assert done.finish_reason["type"] == "stop" or len(done.output_ids) == params.max_new_tokens


PROMPTS: list[tuple[list[int], bool | None]] = [
    ([7, 9, BEGIN], True), ([7, 9, BEGIN, 4], True), ([7, 9, 8], None), ([5, BEGIN, END], False),
    ([8, 8, 11, 30, 12, 9, 20, 7, BEGIN], True), ([30, 31], None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        ("NGRAM", {"prefix_cache": False}),
        ("EAGLE3", {"overlap": False, "max_total_tokens": 96, "max_running_requests": 6, "context_length": 96}),
    ],
)  # fmt: skip
def test_text_under_a_budget_is_that_of_plain_decoding(algorithm, config):
    engine, cuts = engine_of(algorithm, **config), 0
    for budget in (0, 1, 2, 7, 40):
        prompts, begun = map(list, zip(*PROMPTS, strict=True))
        params = [
            SamplingParams(
                max_new_tokens=24, temperature=0.9 * (i % 3 > 0), seed=budget * 10 + i, logprobs=1, origins=True,
                thinking_token_budget=None if i == 5 else budget, logit_bias={BEGIN: 3.0},
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        cuts += check(engine, prompts, params, begun)
    assert cuts >= 10
    assert engine.scheduler.retractions or "max_total_tokens" not in config


def test_end_of_thoughts_at_the_limit_of_tokens():
    prompt, fields = [7, 9, BEGIN], {"thinking_token_budget": 3, "logit_bias": {END: -100.0}}
    engine = engine_of("EAGLE3")
    for limit in range(1, 7):
        done = engine.generate(prompt, {"max_new_tokens": limit, **fields})
        assert done.finish_reason == {"type": "length", "length": limit}
        assert (END in done.output_ids) == (limit > 3) and len(done.output_ids) == limit
        assert limit <= 3 or done.output_ids[3] == END
    check_idle(engine)


def test_stops_beside_a_forced_end():
    """Stop strings of the thoughts, of the forced end and of the answer; stop tokens, also the end itself."""
    engine, prompt = engine_of("EAGLE3"), [7, 9, BEGIN]
    fields = {"max_new_tokens": 20, "thinking_token_budget": 4, "logit_bias": {END: -100.0}}
    plain = engine.generate(prompt, fields)
    assert plain.output_ids[4] == END and plain.output_ids.count(END) == 1
    thoughts, answer = plain.text.split(END_THINK)
    for stop, text in (
        (thoughts[1:3], thoughts[:1]), (END_THINK, thoughts), (f"{END_THINK}{answer[:1]}", thoughts),
        (answer[2:5], f"{thoughts}{END_THINK}{answer[: answer.index(answer[2:5])]}"),
    ):  # fmt: skip
        done = engine.generate(prompt, {**fields, "stop": stop})
        assert (done.text, done.finish_reason) == (text, {"type": "stop", "matched": stop}), stop
    done = engine.generate(prompt, {**fields, "stop_token_ids": [END]})
    assert (done.text, done.finish_reason) == (thoughts, {"type": "stop", "matched": END})
    stop = plain.output_ids[2]
    done = engine.generate(prompt, {**fields, "stop_token_ids": [*range(200, 220), stop]})  # checked by the host
    assert done.output_ids == plain.output_ids[: plain.output_ids.index(stop) + 1]
    check_idle(engine)


def test_stream_under_a_budget():
    engine, prompts = engine_of("EAGLE3"), [[7, 9, BEGIN], [8, 11, BEGIN]]
    fields = {
        "max_new_tokens": 20,
        "thinking_token_budget": 4,
        "logprobs": 1,
        "origins": True,
        "logit_bias": {END: -9.0},
    }
    whole = engine.generate(prompts, fields)
    chunks = list(engine.generate(prompts, fields, stream=True))
    for index, done in enumerate(whole):
        own = [chunk for chunk in chunks if chunk.prompt_index == index]
        assert "".join(chunk.text for chunk in own) == done.text and outcome(own[-1].completion) == outcome(done)
        assert [token for chunk in own for token in chunk.output_ids] == done.output_ids
        assert [score for chunk in own for score in chunk.logprobs] == done.logprobs
        assert len(own) > 3 and END in done.output_ids[:5]


def test_grammar_begins_after_a_forced_end():
    engine = engine_of("NGRAM")
    fields = {"max_new_tokens": 30, "thinking_token_budget": 3, "grammar": Grammar("regex", "(ab|cd){2}")}
    for bias, prompt, count in ({END: -100.0}, [7, 9, BEGIN], 3), ({END: -100.0, BEGIN: 50.0}, [7, 9, 8], 4):
        done = engine.generate(prompt, {**fields, "logit_bias": bias})
        assert done.output_ids.index(END) == count
        assert done.text.partition(END_THINK)[2] in ("abab", "abcd", "cdab", "cdcd")
        assert done.finish_reason["type"] == "stop"
    check_idle(engine)


def test_model_without_markers_ignores_the_budget():
    plain = shared_engine("NGRAM").generate("<think>", {"max_new_tokens": 9})
    assert outcome(shared_engine("NGRAM").generate("<think>", {"max_new_tokens": 9, "thinking_token_budget": 1})) == (
        outcome(plain)
    )
    for value in (-1, -5):
        with pytest.raises(ParameterError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=value)


# Harmony.


@pytest.mark.parametrize(
    ("script", "budget", "expected"),
    [
        ("f", None, SCRIPTS["f"]), ("f", 2, SCRIPTS["f"]),
        ("f", 1, [*SCRIPTS["f"][:4], *SCRIPTS["f"][5:8]]),
        ("f", 0, [*SCRIPTS["f"][:3], *SCRIPTS["f"][5:11]]),
        ("a", 2, SCRIPTS["a"]), ("a", 1, [*SCRIPTS["a"][:4], *SCRIPTS["a"][5:8]]), ("c", 0, SCRIPTS["c"]),
        ("d", 0, SCRIPTS["d"]),
    ],
)  # fmt: skip
def test_budget_in_the_harmony_format(script, budget, expected):
    """A script is followed up to the forced end."""
    engine, tokenizer = harmony_engine(), harmony_tokenizer()
    prompt = [{"role": "user", "content": f"Say {script}"}]
    done = engine.generate(prompt, {"max_new_tokens": 60, "thinking_token_budget": budget})
    tokens = tokenizer.convert_tokens_to_ids(expected)
    assert done.output_ids[: len(tokens)] == tokens
    assert (len(done.output_ids) == len(tokens)) == (expected == SCRIPTS[script])


@pytest.mark.parametrize("budget", [0, 1])
def test_grammar_in_the_harmony_format_after_a_forced_end(budget):
    engine = harmony_engine()
    params = {"max_new_tokens": 60, "thinking_token_budget": budget, "grammar": Grammar("regex", "(ab|cd)+")}
    done = engine.generate([{"role": "user", "content": "Say f"}], params | {"skip_special_tokens": False})
    thoughts = done.text.partition("<|message|>")[2].partition("<|end|>")[0]
    assert thoughts == ("Stop" if budget else "") and done.text.startswith("<|channel|>analysis<|message|>")
    assert re.search(r"<\|channel\|>final<\|message\|>(ab|cd)+$", done.text), done.text
    assert done.finish_reason["type"] in ("stop", "length")


# The rule alone.

S, E, M = 1, 2, 3  # start, end, another marker


@pytest.mark.parametrize(
    ("budget", "begun", "tokens", "expected"),
    [
        (2, True, [7, 8, E, 9], [7, 8, E, 9]), (2, True, [7, 8, 9, E], [7, 8, E]), (0, True, [E, 9], [E, 9]),
        (0, True, [9], [E]), (2, False, [S, 7, 8, 9], [S, 7, 8, E]), (1, False, [0, 0, S, 7, 8], [0, 0, S, 7, E]),
        (1, False, [9, S, 7, 8], [9, S, 7, 8]), (1, True, [7, E, S, 8, 9, 9], [7, E, S, 8, 9, 9]),
        (1, True, [7, 5], [7, 5]), (1, True, [S, 7], [S, E]),
        (1, False, [0] * 9 + [S, 7, 8], [0] * 9 + [S, 7, 8]),
    ],
)  # fmt: skip
def test_tokens_beyond_the_budget(budget, begun, tokens, expected):
    """Token 5 ends the request, token 0 is a space. The rule does not depend on how the tokens are cut into steps."""

    def decode(ids: list[int]) -> str:
        return "".join(" " if id == 0 else f"<{id}>" for id in ids)

    for sizes in (1, 2, 3, len(tokens)):
        rule = ThinkingBudget(decode, budget, S, E, LEAD, begun=begun, stops=[5], forced=[E])
        output, rest = [], tokens
        while rest:
            step, rest = rest[:sizes], rest[sizes:]
            forced = rule.cut(step)
            output += step
            assert forced == (len(output) > 0 and output != tokens[: len(output)])
            if forced:
                break
        assert output == expected


def test_thoughts_that_begin_again_after_the_budget():
    rule = ThinkingBudget(str, 1, S, E, re.compile(".*"), begun=False, stops=[], forced=[E, M], again=[9])
    for emitted, output in (([S, 7, 8, 8], [S, 7, E, M]), ([4, S], [4, S]), ([7, 7], [E, M, 9]), ([7, 8], [7, 8])):
        rule.cut(emitted)
        assert emitted == output
    rule = ThinkingBudget(str, 1, S, E, LEAD, begun=True, stops=[E], forced=[E, M])
    assert (rule.cut(tokens := [7, 8]), tokens) == (1, [7, E])


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ("<|channel|>analysis", True), ("<|end|><|start|>assistant<|channel|>analysis ", True),
        ("<|channel|>analysis to=python code", False), ("<|channel|>final", False), ("<|channel|>commentary", False),
        (" to=functions.f<|channel|>commentary json", False), ("", False), ("<|channel|>analysis2", False),
        ("<|channel|>final<|message|>analysis", False),
    ],
)  # fmt: skip
def test_headers_of_thoughts_in_the_harmony_format(text, opens):
    assert bool(ANALYSIS.fullmatch(text)) is opens
