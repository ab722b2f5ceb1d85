"""Rows of `specjax train generate` under each family's chat template: training reads the ids that the target read.

The target's and the draft's logits of a training row equal those of `prefill_step` and `propose` at each position.
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
from specjax.train import generate, losses
from specjax.train.data import Example, Rows, load_examples, pack
from specjax.train.features import teach, training_target
from specjax.train.head import HeadDraft, with_dtype
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
    finish: str | None = None  # None: the end token; length; or a stop string


PLAIN = {"ended": Answer("It is 4."), "white space": Answer("  It is\n\n4 \n"), "cut": Answer("It is ", "length"),
         "stop string": Answer("It is 4. ", "Ask:")}  # fmt: skip
ANSWERS = {
    "no": PLAIN,
    "writes": {
        "ended": Answer("<think>\nhm\n</think>\n\nIt is 4."), "white space": Answer("<think>hm </think> It is 4. \n"),
        "cut inside thoughts": Answer("<think>\nhm ", "length"),
        "stop string": Answer("<think>\nhm\n</think>\n\nIt is ", "Ask:"),
    },
    "opened": {
        "ended": Answer("hm\n</think>\n\nIt is 4."), "white space": Answer(" hm</think>\n\n It is 4. \n"),
        "cut inside thoughts": Answer("hm ", "length"), "stop string": Answer("hm\n</think>\n\nIt is ", "Ask:"),
    },
}  # fmt: skip
"""By `Family.thinks`."""


def input_rows(name: str) -> Iterator[dict[str, Any]]:
    family = FAMILIES[name]
    extra = {"chat_template_kwargs": dict(family.variables)} if family.variables else {}
    yield {"prompt": "hello 12"} | extra
    yield {"messages": CHAT} | extra
    if family.tools:
        yield {"messages": CHAT[:1], "tools": TOOLS} | extra
        yield {"messages": CALLED, "tools": TOOLS} | extra


def completion(name: str, answer: Answer) -> Completion:
    """The engine's result for a target that writes this answer."""
    family = FAMILIES[name]
    text = family.lead + answer.text
    end, finish = ids(family.end or "<|endoftext|>"), {"type": "stop", "matched": 2}
    if answer.finish == "length":
        end, finish = [], {"type": "length", "length": 3}
    elif answer.finish:
        end, finish = ids(answer.finish), {"type": "stop", "matched": answer.finish}
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
    """The output row of `specjax train generate`. None: the tiny target answers."""
    args = argparse.Namespace(input="in.jsonl", seed=0, max_prompt_tokens=LONGEST, max_new_tokens=12)
    line = Line("in.jsonl", 1, 0, json.dumps(row).encode(), 0)
    (request,) = generate.requests(engine(name), [line], [0.8], args, [])
    assert isinstance(request, generate.Line), request
    if done is None:
        done = engine("chatml").generate(request.prompt, request.sampling)  # the only engine that is compiled
    output = generate.answer(request, done)
    assert output is not None
    return json.loads(json.dumps(output))


def served(name: str, row: dict[str, Any]) -> list[int]:
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


CASES = [(name, answer) for name, family in FAMILIES.items() for answer in ANSWERS[family.thinks]]


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_generated_rows_are_read_as_served(read, name, answer):
    """Without ids, special tokens in the answer and a stop string are lost, since texts do not contain them."""
    family, chosen = FAMILIES[name], ANSWERS[FAMILIES[name].thinks][answer]
    done = completion(name, chosen)
    inputs = list(input_rows(name))
    rows = [written(name, row, done) for row in inputs]
    texts = [{key: value for key, value in row.items() if key not in ("prompt_ids", "response_ids")} for row in rows]
    shown = ids(family.lead + chosen.text) + ids("" if chosen.finish else family.end)
    forms = [(rows, done.output_ids), *([] if family.skips else [(texts, shown)])]
    for form, answer_ids in forms:
        for row, example in zip(inputs, read(name, form), strict=True):
            prompt = served(name, row)
            assert example.tokens.tolist() == [*prompt, *answer_ids]
            assert example.loss.tolist() == [False] * len(prompt) + [True] * len(answer_ids)


@pytest.mark.parametrize("name", ["deepseek-r1", "deepseek-v3.1, thinking"])
def test_an_answer_without_thoughts_is_refused_after_think(read, name):
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "It is 4."}]}
    with pytest.raises(AssertionError, match="the prompt ends with <think>, and messages"):
        read(name, [row | {"chat_template_kwargs": dict(FAMILIES[name].variables)}])


HM = {"content": "", "reasoning_content": "hm"}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
FIELDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # The family, fields other than content "It is 4. ", the end of the prompt, and the answer.
    "mistral": ("mistral", {}, "[/INST]", " It is 4. </s>"),
    "gemma": ("gemma", {}, "model\n", "It is 4. <end_of_turn>"),
    "gpt-oss": ("gpt-oss", {}, "assistant", "<|channel|>final<|message|>It is 4. <|return|>"),
    "no thoughts, opened": ("qwen3-thinking", {}, "<think>\n\n</think>\n\n", "It is 4. <|im_end|>"),
    "no calls": ("qwen3", {"tool_calls": []}, "<think>\n\n</think>\n\n", "It is 4. <|im_end|>"),
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
    "cut inside thoughts, opened": ("qwen3-thinking", HM, "assistant\n<think>\n", "hm"),
    "cut inside thoughts that the template drops": ("deepseek-r1", HM, "<｜Assistant｜><think>\n", "hm"),
    "cut after thoughts": (
        "qwen3", {"reasoning_content": "hm"}, "assistant\n", "<think>\nhm\n</think>\n\nIt is 4. ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_need_the_template(read, case):
    """Empty blocks of thoughts are part of the prompt; nothing follows an answer that was cut inside its thoughts."""
    name, fields, prompt, answer = FIELDS[case]
    row: dict[str, Any] = {"messages": [CHAT[0], {"role": "assistant", "content": "It is 4. "} | fields]}
    (example,) = read(name, [row | ({"finish_reason": "length"} if case.startswith("cut") else {})])
    shown = functools.partial(family_tokenizer(name).decode, skip_special_tokens=False)
    assert shown(example.tokens[example.loss]) == answer
    assert shown(example.tokens[~example.loss]).endswith(prompt) and not example.loss[: -len(ids(answer))].any()


KINDS: dict[str, dict[str, Any]] = {
    "EAGLE3": {"aux_layers": ("1", "0", "2")}, "EAGLE": {}, "MTP": {},
}  # fmt: skip
ERROR = 2e-4
TOPK, ROWS = 4, 15


@functools.cache
def all_examples(folder: Path) -> dict[str, list[Example]]:
    return {name: read_rows(name, output_rows(name), folder / "rows.jsonl") for name in FAMILIES}


def output_rows(name: str) -> list[dict[str, Any]]:
    """Each answer to one of the prompts, and an answer of the tiny target."""
    answers = [completion(name, answer) for answer in ANSWERS[FAMILIES[name].thinks].values()]
    prompts = itertools.cycle(input_rows(name))
    return [written(name, next(prompts), done) for done in (*answers, None)]


class Trained(NamedTuple):
    examples: dict[str, list[Example]]  # by family
    places: dict[bytes, tuple[int, int]]  # row and first slot of an example, by its tokens
    target: np.ndarray  # [r, N, V] log-probabilities of the next token
    draft: np.ndarray  # [r, N, V] of the token after the next
    runner: Runner
    prefill: Any
    propose: Any


@functools.cache
def trained(kind: str, folder: Path) -> Trained:
    """Training's outputs for all families' rows, packed together, and steps that serve equal weights."""
    drafts: list[np.ndarray] = []

    def record(logits: Any, teacher: Any, labels: Any) -> Any:
        drafts.append(np.asarray(jax.nn.log_softmax(logits)))
        return jnp.zeros(labels.shape, jnp.float32)

    options = TrainOptions(
        draft=DraftSettings(draft=kind, **KINDS[kind]), run=RunSettings(compute_dtype="float32"),
        loss=LossSettings(loss="record", rounds=1),
    )  # fmt: skip
    draft = HeadDraft(options, target_source(toy(), family_tokenizer("chatml")))
    draft._objective = draft._objective._replace(noise=0.0)
    examples = all_examples(folder)
    rows = pack(list(itertools.chain(*examples.values())), LONGEST, 0)
    places = {}
    for row, (tokens, segments) in enumerate(zip(rows.tokens, rows.segments, strict=True)):
        for segment in range(1, segments.max() + 1):
            slots = np.flatnonzero(segments == segment)
            places[tokens[slots].tobytes()] = (row, int(slots[0]))
    target, batch = training_target(toy().target.config, "float32"), Rows(*map(jnp.asarray, rows))
    teacher = jax.jit(teach(target, draft.config.features))(toy().params, batch)
    weights, frozen = draft.first_weights(toy().params, rows, lambda: (teacher, rows))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(losses.LOSSES, "record", record)
        draft.loss(target, frozen)(weights, toy().params, batch, teacher, jax.random.key(0))
    of_target = np.asarray(jax.nn.log_softmax(target.unembed(toy().params, teacher.hidden)))
    drafter = draft.drafter(toy().target, TreeShape(1, TOPK, TOPK + 1))
    runner = Runner(
        toy(), drafter, rows=ROWS, page_size=16, pages_a_row=LONGEST // 16, chunk=LONGEST,
        draft=with_dtype(draft.exported(weights, frozen), "float32"),
    )  # fmt: skip
    prefill = make_steps(toy().target, drafter, config=StepConfig(prompt_logprobs=True)).prefill
    propose = jax.jit(functools.partial(draft_phase, drafter=drafter))
    return Trained(examples, places, of_target, drafts[0], runner, prefill, propose)


FEW = ("qwen3", "llama 3", "gpt-oss")


@pytest.mark.parametrize(
    ("kind", "name"), [*(("EAGLE3", name) for name in FAMILIES), *itertools.product(("EAGLE", "MTP"), FEW)]
)
def test_logits_equal_those_of_serving(tmp_path_factory, name, kind):
    """`prefill_step` commits prompts up to the answer's first token and up to its last ones."""
    run = trained(kind, tmp_path_factory.getbasetemp())
    cases = []
    for example in run.examples[name]:
        first, last = int(np.argmax(example.loss)), len(example.tokens) - 2
        cases += [(example, length) for length in (first, last, last + 1)]
    assert len(cases) == ROWS
    runner = run.runner
    tokens, length, root = np.zeros((ROWS + 1, LONGEST), np.int32), np.zeros(ROWS + 1, np.int32), [0] * (ROWS + 1)
    for slot, (example, count) in enumerate(cases):
        runner.admit(slot, example.tokens[:count].tolist(), Sampling(max_tokens=4))
        tokens[slot, :count], length[slot], root[slot] = example.tokens[:count], count, example.tokens[count]
    inputs = runner.inputs([True] * ROWS)
    prefill = PrefillInput(*inputs[:3], *map(jnp.asarray, (tokens, length, np.asarray(root, np.int32))))
    runner.state, output = run.prefill(runner.params, runner.state, prefill)
    tree, _ = run.propose(runner.params, runner.state, inputs)
    tree, prompt = jax.tree.map(np.asarray, (tree, output.prompt))
    for slot, (example, count) in enumerate(cases):
        row, start = run.places[example.tokens.tobytes()]
        target = run.target[row, start : start + count]
        drawn = target[np.arange(count), example.tokens[1 : count + 1]]
        np.testing.assert_allclose(prompt.drawn[slot, :count], drawn, atol=ERROR)
        top = np.take_along_axis(target, prompt.top_ids[slot, :count], axis=-1)
        np.testing.assert_allclose(prompt.top[slot, :count], top, atol=ERROR)
        if count + 1 < len(example.tokens):  # the token after the root belongs to the answer
            draft = run.draft[row, start + count - 1]
            drafts = tree.tokens[slot, 1:]
            assert tree.valid[slot].all() and len(set(drafts.tolist())) == TOPK
            np.testing.assert_allclose(tree.scores[slot, 1:], draft[drafts], atol=ERROR)
            assert np.sort(draft)[-TOPK] <= draft[drafts].min() + ERROR, "the most likely drafts"
