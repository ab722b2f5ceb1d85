"""Rows of `specjax.train.generate` under every family's chat template: what training reads is what serving read.

The target's and the draft's logits of a training row are those of `prefill_step` and `propose` at the same positions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_templates import FAMILIES, VOCABULARY, family_tokenizer, ids
from oracle import Sampling
from toy_models import Runner, Toy, tiny_llama
from train_helpers import target_source

from specjax.checkpoint.prompts import Chat, encode
from specjax.cli.lines import Line
from specjax.drafters import Params, TreeShape, none_drafter
from specjax.engine import Completion, Engine, EngineConfig
from specjax.state import PrefillInput
from specjax.step import StepConfig, draft_phase, make_steps
from specjax.train import generate, unroll
from specjax.train.data import Example, Rows, load_examples, pack
from specjax.train.features import teach, training_target
from specjax.train.head import HeadDraft
from specjax.train.options import DraftSettings, LossSettings, RunSettings, TrainOptions

LONGEST = 256
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "user", "content": " hello "},
    {"role": "assistant", "content": "<think>\nno\n</think>\n\n the 12 \n"},
    {"role": "user", "content": "And 12?"},
]
CALLED = [
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "user", "content": "hell"},
]


class Answer(NamedTuple):
    text: str
    finish: str | None = None  # None: its end token; length; or the stop string behind it


PLAIN = {"ended": Answer("It is 4."), "white space": Answer("  It is\n\n4 \n"), "cut": Answer("It is ", "length"),
         "stop string": Answer("It is 4. ", "Ask:")}  # fmt: skip
ANSWERS = {
    "no": PLAIN,
    "writes": {
        "ended": Answer("<think>\nhm\n</think>\n\nIt is 4."), "trimmed": Answer("<think>hm </think> It is 4. \n"),
        "cut inside thoughts": Answer("<think>\nhm ", "length"),
        "stop string": Answer("<think>\nhm\n</think>\n\nIt is ", "Ask:"),
    },
    "opened": {
        "ended": Answer("hm\n</think>\n\nIt is 4."), "trimmed": Answer(" hm</think>\n\n It is 4. \n"),
        "cut inside thoughts": Answer("hm ", "length"), "stop string": Answer("hm\n</think>\n\nIt is ", "Ask:"),
    },
}  # fmt: skip
"""By `Family.thinks`."""


def asked(name: str) -> Iterator[dict[str, Any]]:
    """Rows of the input of generate."""
    family = FAMILIES[name]
    extra = {"chat_template_kwargs": dict(family.variables)} if family.variables else {}
    yield {"prompt": "hello 12"} | extra
    yield {"messages": CHAT} | extra
    if family.tools:
        yield {"messages": CHAT[:1], "tools": TOOLS} | extra
        yield {"messages": CALLED, "tools": TOOLS} | extra


def completion(name: str, given: Answer) -> Completion:
    """What the engine returns of a target that writes this."""
    family = FAMILIES[name]
    text = family.lead + given.text
    end, finish = ids(family.end or "<|endoftext|>"), {"type": "stop", "matched": 2}
    if given.finish == "length":
        end, finish = [], {"type": "length", "length": 3}
    elif given.finish:
        end, finish = ids(given.finish), {"type": "stop", "matched": given.finish}
    shown = family_tokenizer(name).decode(ids(text), skip_special_tokens=True)
    return Completion("", shown, [*ids(text), *end], 0, finish, 0, 1.0, [], 0)


@functools.cache
def toy() -> Toy:
    return tiny_llama(3, num_layers=3, vocab_size=VOCABULARY, max_positions=LONGEST)


@functools.cache
def engine(name: str) -> Engine:
    config = EngineConfig(max_running_requests=1, page_size=16, context_length=LONGEST, chunked_prefill_size=64)
    return Engine(toy().target, Params(toy().params), family_tokenizer(name), none_drafter(), config=config)


def written(name: str, row: dict[str, Any], done: Completion | None) -> dict[str, Any]:
    """The output row of generate. None: what the tiny target answers."""
    args = argparse.Namespace(input="in.jsonl", seed=0, max_prompt_tokens=LONGEST, max_new_tokens=12)
    line = Line("in.jsonl", 1, 0, json.dumps(row).encode(), 0)
    (request,) = generate.requests(engine(name), [line], {0.8: 1.0}, args, [])
    assert isinstance(request, generate.Line), request
    if done is None:
        done = engine("chatml").generate(request.prompt, request.sampling)  # it alone is compiled
    found = generate.answer(request, done)
    assert found is not None
    return json.loads(json.dumps(found))


def served(name: str, row: dict[str, Any]) -> list[int]:
    """The prompt as a server of the family renders it."""
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    for message in (messages := json.loads(json.dumps(messages))):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    variables = dict(FAMILIES[name].variables) | ({"tools": row["tools"]} if "tools" in row else {})
    return encode(Chat(messages, variables), family_tokenizer(name), VOCABULARY)


def read_rows(name: str, rows: list[dict[str, Any]], file: Path) -> list[Example]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_examples([str(file)], family_tokenizer(name), VOCABULARY, max_length=LONGEST)
    assert not loaded.skipped and not loaded.truncated, loaded.skipped
    return loaded.examples


@pytest.fixture
def read(tmp_path):
    """read(name, rows) -> examples."""
    return functools.partial(read_rows, file=tmp_path / "rows.jsonl")


def check(example: Example, prompt: list[int], answer: list[int]) -> None:
    assert example.tokens.tolist() == [*prompt, *answer]
    assert example.loss.tolist() == [False] * len(prompt) + [True] * len(answer)


CASES = [(name, answer) for name, family in FAMILIES.items() for answer in ANSWERS[family.thinks]]


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_a_row_holds_what_the_target_read_and_wrote(read, name, answer):
    done = completion(name, ANSWERS[FAMILIES[name].thinks][answer])
    rows = list(asked(name))
    examples = read(name, [written(name, row, done) for row in rows])
    for row, example in zip(rows, examples, strict=True):
        check(example, served(name, row), done.output_ids)


@pytest.mark.parametrize(("name", "answer"), CASES)
@pytest.mark.parametrize("left", [("response_ids",), ()], ids=["without prompt_ids", "without ids"])
def test_a_row_without_ids_is_the_same(read, name, answer, left):
    """Except for what a text does not hold: special tokens, and a stop string."""
    family, given = FAMILIES[name], ANSWERS[FAMILIES[name].thinks][answer]
    done = completion(name, given)
    rows = list(asked(name))
    without = {"prompt_ids", "response_ids"} - {*left}
    kept = [{key: value for key, value in written(name, row, done).items() if key not in without} for row in rows]
    wanted = done.output_ids
    if not left:
        if family.skips:
            pytest.skip("its answers hold special tokens")
        wanted = ids(family.lead + given.text) + ids("" if given.finish else family.end)
    for row, example in zip(rows, read(name, kept), strict=True):
        check(example, served(name, row), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_another_author(read, name):
    """An answer without thoughts follows a prompt without thoughts, or is refused where the prompt begins them."""
    family = FAMILIES[name]
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "It is 4."}]}
    row |= {"chat_template_kwargs": dict(family.variables)}
    if "opened" in family.thinks and "qwen3" not in name:
        with pytest.raises(AssertionError, match="the prompt ends with <think>, and messages"):
            read(name, [row])
        return
    (example,) = read(name, [row])
    text = family_tokenizer(name).decode(example.tokens[example.loss], skip_special_tokens=False)
    lead = "" if name.startswith("glm") else family.lead
    assert text == lead + "It is 4." + family.end
    shown = family_tokenizer(name).decode(example.tokens[~example.loss], skip_special_tokens=False)
    assert shown.rstrip().endswith("</think>") == (
        family.thinks != "no" or name in ("qwen3, thinking off", "deepseek-v3.1")
    )


HM = {"content": "", "reasoning_content": "hm"}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
FIELDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # The family, fields beside content "It is 4. ", the end of the prompt, and the answer.
    "no calls": ("qwen3", {"tool_calls": []}, "<think>\n\n</think>\n\n", "It is 4. <|im_end|>"),
    "no thoughts": ("qwen3", {"reasoning_content": ""}, "<think>\n\n</think>\n\n", "It is 4. <|im_end|>"),
    "no calls, trimmed": ("llama 3", {"tool_calls": []}, "<|end_header_id|>\n\n", "It is 4. <|eot_id|>"),
    "no thoughts, trimmed": ("llama 3", {"reasoning": ""}, "<|end_header_id|>\n\n", "It is 4. <|eot_id|>"),
    "a call": ("qwen3", {"content": None, "tool_calls": [CALL]}, "<think>\n\n</think>\n\n", CALL_TEXT),
    "a call, opened": ("qwen3-thinking", {"content": None, "tool_calls": [CALL]}, "</think>\n\n", CALL_TEXT),
    "a call, never thinking": ("qwen2.5", {"content": None, "tool_calls": [CALL]}, "assistant\n", CALL_TEXT),
    "a call after content": ("qwen3", {"tool_calls": [CALL]}, "</think>\n\n", "It is 4. " + CALL_TEXT),
    "a call after thoughts": (
        "qwen3", HM | {"tool_calls": [CALL]}, "assistant\n", "<think>\nhm\n</think>\n\n" + CALL_TEXT,
    ),
    "thoughts the template does not read": (
        "llama 3", {"thinking": "hm"}, "<|end_header_id|>\n\n", "It is 4. <|eot_id|>",
    ),
    "thoughts": ("qwen3", {"reasoning_content": "hm"}, "assistant\n", "<think>\nhm\n</think>\n\nIt is 4. <|im_end|>"),
    "cut inside thoughts": ("qwen3", HM, "assistant\n", "<think>\nhm"),
    "cut inside thoughts, null": ("qwen3", HM | {"content": None}, "assistant\n", "<think>\nhm"),
    "cut inside thoughts, a line end": ("qwen3", HM | {"reasoning_content": "hm\n"}, "assistant\n", "<think>\nhm\n"),
    "cut inside thoughts, opened": ("qwen3-thinking", HM, "assistant\n<think>\n", "hm"),
    "cut inside thoughts that the template drops": ("deepseek-r1", HM, "<｜Assistant｜><think>\n", "hm"),
    "cut after thoughts": (
        "qwen3", {"reasoning_content": "hm"}, "assistant\n", "<think>\nhm\n</think>\n\nIt is 4. ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_only_the_template_renders(read, case):
    """The target wrote no empty block of thoughts, and nothing after thoughts inside of which it was cut off."""
    name, fields, prompt, answer = FIELDS[case]
    row: dict[str, Any] = {"messages": [CHAT[0], {"role": "assistant", "content": "It is 4. "} | fields]}
    (example,) = read(name, [row | ({"finish_reason": "length"} if case.startswith("cut") else {})])
    shown = functools.partial(family_tokenizer(name).decode, skip_special_tokens=False)
    assert shown(example.tokens[example.loss]) == answer
    assert shown(example.tokens[~example.loss]).endswith(prompt) and not example.loss[: -len(ids(answer))].any()


# Logits.

KINDS: dict[str, dict[str, Any]] = {
    "EAGLE3": {"aux_layers": ("0", "1", "2")}, "EAGLE": {}, "MTP": {},
}  # fmt: skip
ERROR = 2e-4
TOPK, ROWS = 4, 15


def shown_rows(name: str) -> list[dict[str, Any]]:
    """Each answer after one of the prompts, and one that the tiny target writes."""
    answers = [completion(name, given) for given in ANSWERS[FAMILIES[name].thinks].values()]
    prompts = itertools.cycle(asked(name))
    return [written(name, next(prompts), done) for done in (*answers, None)]


class Trained(NamedTuple):
    examples: dict[str, list[Example]]  # by family
    places: dict[bytes, tuple[int, int]]  # row and first slot of each example, by its tokens
    target: np.ndarray  # [r, N, V] log-probabilities of the token after each
    draft: np.ndarray  # [r, N, V] and of the second token after each
    runner: Runner
    prefill: Any
    propose: Any


@functools.cache
def trained(kind: str, folder: Path) -> Trained:
    """What training computes of all families' rows, packed together, and what serves the same weights."""
    found: list[np.ndarray] = []

    def seen(logits: Any, wanted: Any, labels: Any) -> Any:
        found.append(np.asarray(jax.nn.log_softmax(logits)))
        return jnp.zeros(labels.shape, jnp.float32)

    options = TrainOptions(
        draft=DraftSettings(draft=kind, **KINDS[kind]), run=RunSettings(compute_dtype="float32"),
        loss=LossSettings(feature_noise=0.0, loss="seen", rounds=1),
    )  # fmt: skip
    draft = HeadDraft(options, target_source(toy(), family_tokenizer("chatml")))
    examples = {name: read_rows(name, shown_rows(name), folder / "rows.jsonl") for name in FAMILIES}
    rows = pack(list(itertools.chain(*examples.values())), LONGEST, 0)
    places = {}
    for row, (tokens, segments) in enumerate(zip(rows.tokens, rows.segments, strict=True)):
        for segment in range(1, segments.max() + 1):
            there = np.flatnonzero(segments == segment)
            places[tokens[there].tobytes()] = (row, int(there[0]))
    draft.choose_vocabulary(rows)
    target, batch = training_target(toy().target.config, "float32"), Rows(*map(jnp.asarray, rows))
    teacher = jax.jit(teach(target, draft.features))(toy().params, batch)
    weights, frozen = draft.split(draft.first_params(toy().params), lambda: (teacher, rows))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(unroll.LOSSES, "seen", seen)
        draft.loss(target)({**weights, **frozen}, toy().params, batch, teacher, jax.random.key(0))
    of_target = np.asarray(jax.nn.log_softmax(target.unembed(toy().params, teacher.hidden)))
    drafter = draft.drafter(toy().target, TreeShape(1, TOPK, TOPK + 1))
    runner = Runner(
        toy(), drafter, rows=ROWS, page_size=16, pages_a_row=LONGEST // 16, chunk=LONGEST,
        draft=draft.served(draft.exported(weights, frozen), "float32"),
    )  # fmt: skip
    prefill = make_steps(toy().target, drafter, config=StepConfig(prompt_logprobs=True)).prefill
    propose = jax.jit(functools.partial(draft_phase, drafter=drafter))
    return Trained(examples, places, of_target, found[0], runner, prefill, propose)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_training_row_are_those_of_serving(tmp_path_factory, name, kind):
    """Prompts are committed by `prefill_step` up to the answer's first token and its last ones."""
    found = trained(kind, tmp_path_factory.getbasetemp())
    cases = []
    for example in found.examples[name]:
        first, last = int(np.argmax(example.loss)), len(example.tokens) - 2
        cases += [(example, length) for length in (first, last, last + 1)]
    assert len(cases) == ROWS
    runner = found.runner
    tokens, length, root = np.zeros((ROWS + 1, LONGEST), np.int32), np.zeros(ROWS + 1, np.int32), [0] * (ROWS + 1)
    for slot, (example, count) in enumerate(cases):
        runner.admit(slot, example.tokens[:count].tolist(), Sampling(max_tokens=4))
        tokens[slot, :count], length[slot], root[slot] = example.tokens[:count], count, example.tokens[count]
    inputs = runner.inputs([True] * ROWS)
    given = PrefillInput(*inputs[:3], *map(jnp.asarray, (tokens, length, np.asarray(root, np.int32))))
    runner.state, output = found.prefill(runner.params, runner.state, given)
    tree, _ = found.propose(runner.params, runner.state, inputs)
    tree, prompt = jax.tree.map(np.asarray, (tree, output.prompt))
    for slot, (example, count) in enumerate(cases):
        row, start = found.places[example.tokens.tobytes()]
        target = found.target[row, start : start + count]
        drawn = target[np.arange(count), example.tokens[1 : count + 1]]
        np.testing.assert_allclose(prompt.drawn[slot, :count], drawn, atol=ERROR)
        top = np.take_along_axis(target, prompt.top_ids[slot, :count], axis=-1)
        np.testing.assert_allclose(prompt.top[slot, :count], top, atol=ERROR)
        if count + 1 < len(example.tokens):  # the token after the root belongs to the answer
            draft = found.draft[row, start + count - 1]
            drafts = tree.tokens[slot, 1:]
            assert tree.valid[slot].all() and len(set(drafts.tolist())) == TOPK
            np.testing.assert_allclose(tree.scores[slot, 1:], draft[drafts], atol=ERROR)
            assert np.sort(draft)[-TOPK] <= draft[drafts].min() + ERROR, "the likeliest"
