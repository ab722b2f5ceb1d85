"""Training examples from JSONL: tokens and loss masks against hand-written chats, packing and order."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import END, VOCABULARY, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from specjax.checkpoint import BUILT_IN_MODEL, load_tokenizer, resolve
from specjax.train.data import Example, ExampleSet, batch_rows, load_examples, pack, split

SELFGEN = Path(__file__).parents[2] / "data" / "selfgen.jsonl.gz"
USER = {"role": "user", "content": "hello 12"}
REPLY = {"role": "assistant", "content": "hell the"}
# Trims contents, and drops the thoughts of earlier turns.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}(hm){% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPACED = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


def with_template(template: str | None):
    changed = copy.deepcopy(tokenizer())
    changed.chat_template = template
    return changed


def ids(text: str) -> list[int]:
    return tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids


def chat(*turns: str) -> str:
    """ChatML, from turns such as `u:hello`; ⟦ ⟧ enclose text with a loss."""
    names = {"u": "user", "a": "assistant", "s": "system"}
    text = ""
    for turn in turns:
        end = f"⟦{turn[2:]}<|im_end|>⟧" if turn[0] == "a" else f"{turn[2:]}<|im_end|>"
        text += f"<|im_start|>{names[turn[0]]}\n{end}\n"
    return text


def unmark(text: str) -> tuple[list[int], list[bool]]:
    """Ids and losses up to the last ⟧. Each part is tokenised alone, since a prompt ends where the target begins."""
    parts = [part for piece in text.split("⟦") for part in piece.split("⟧")]
    tokens: list[int] = []
    loss: list[bool] = []
    for number, part in enumerate(parts):
        tokens += ids(part)
        loss += [number % 2 == 1] * len(ids(part))
    last = max(np.flatnonzero(loss)) + 1
    return tokens[:last], loss[:last]


@pytest.fixture
def load(tmp_path):
    """load(rows, ...) -> ExampleSet. Rows may be lines as bytes."""

    def call(rows, *, like=None, **options) -> ExampleSet:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / "rows.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        options = {"max_length": 512} | options
        return load_examples([str(tmp_path / "rows.jsonl")], like or tokenizer(), VOCABULARY, **options)

    return call


def only(loaded: ExampleSet) -> tuple[list[int], list[bool]]:
    assert not loaded.skipped
    (example,) = loaded.examples
    assert example.tokens.dtype == np.int32 and example.loss.dtype == bool
    return example.tokens.tolist(), example.loss.tolist()


CHATS = [
    ([USER, REPLY], chat("u:hello 12", "a:hell the")),
    ([{"role": "developer", "content": "the"}, USER, REPLY], chat("s:the", "u:hello 12", "a:hell the")),
    ([USER, REPLY, {"role": "user", "content": "é🙂"}, {"role": "assistant", "content": " 12\n"}],
     chat("u:hello 12", "a:hell the", "u:é🙂", "a: 12\n")),
    ([USER, REPLY, USER], chat("u:hello 12", "a:hell the")),
    ([USER, REPLY, REPLY], chat("u:hello 12", "a:hell the", "a:hell the")),
    ([USER, {"role": "assistant", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "ll"}]}],
     chat("u:hello 12", "a:hell")),
    ([{"role": "user", "content": "hell the<|im_end|>\n"}, REPLY], chat("u:hell the<|im_end|>\n", "a:hell the")),
    ([USER, {"role": "assistant", "content": "assistant\nuser\n"}], chat("u:hello 12", "a:assistant\nuser\n")),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "text"), CHATS)
def test_assistant_turns_have_a_loss(load, messages, text):
    tokens, loss = only(load([{"messages": messages}]))
    assert (tokens, loss) == unmark(text)
    assert tokens[-1] == END and loss[-1], "the last token is the end token, not the line end after it"


EARLIER = [USER, {"role": "assistant", "content": "12"}, {"role": "user", "content": "é"}]
EARLIER_TEXT = chat("u:hello 12", "a:12", "u:é").replace("⟦", "").replace("⟧", "")
RESPONSES = [
    ({"prompt": "hello 12"}, chat("u:hello 12")),
    ({"prompt": EARLIER}, EARLIER_TEXT),
    ({"messages": [USER]}, chat("u:hello 12")),
    ({"messages": EARLIER}, EARLIER_TEXT),
    ({"messages": [*EARLIER, REPLY]}, EARLIER_TEXT),
    ({"messages": EARLIER, "prompt": "no"}, EARLIER_TEXT),
]


@pytest.mark.parametrize(("prompt", "text"), RESPONSES)
def test_only_the_response_has_a_loss(load, prompt, text):
    ended, cut = text + chat("a:hell the"), text + "<|im_start|>assistant\n⟦hell the⟧"
    row = {"response": "hell the"} | prompt
    assert only(load([row])) == only(load([row | {"prompt_ids": [7]}])) == unmark(ended), "ids need response_ids"
    assert only(load([row | {"finish_reason": "length"}])) == unmark(cut)


def test_tools_and_variables_reach_the_template(load):
    """Arguments of calls may be strings of JSON."""
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ mood }}{% for m in messages %}"
        "{{ m.role[0] }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 12}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"messages": messages, "tools": tools, "chat_template_kwargs": {"mood": "12"}}
    assert only(load([row], like=with_template(template))) == unmark("look12uhello 12<|im_end|>a⟦12<|im_end|>⟧")


CUT = [
    ({}, False),
    ({"finish_reason": "length"}, True),
    ({"finish_reason": {"type": "length", "length": 3}}, True),
    ({"finish_reason": {"type": "stop", "matched": END}}, False),
    ({"finish_reason": {"type": "stop", "matched": "Ask:"}}, True),
    ({"finish_reason": {"type": "abort", "message": "gone"}}, True),
]


@pytest.mark.parametrize(("fields", "is_cut"), CUT)
def test_a_cut_answer_has_no_end_token(load, fields, is_cut):
    text = chat("u:hello 12", "a:hell the")
    expected = unmark(text.replace("the<|im_end|>⟧", "the⟧") if is_cut else text)
    assert only(load([{"prompt": "hello 12", "response": "hell the"} | fields])) == expected


def test_only_the_last_answer_of_messages_is_cut(load):
    last = {"role": "assistant", "content": "the e "}
    example = only(load([{"messages": [USER, REPLY, USER, last], "finish_reason": "length"}]))
    assert example == unmark(chat("u:hello 12", "a:hell the", "u:hello 12") + "<|im_start|>assistant\n⟦the e ⟧")


IDS = [
    ({"prompt": "x", "messages": [USER], "response": "hello", "prompt_ids": [5, 6], "response_ids": ids("hello")},
     [5, 6, *ids("hello")], "00" + "1" * len(ids("hello"))),
    ({"prompt_ids": [5], "response_ids": ids("hello 12"), "response": "hello"},  # before a stop string
     [5, *ids("hello 12")], "0" + "1" * len(ids("hello 12"))),
    ({"prompt_ids": [5, 6], "response_ids": [END], "response": ""}, [5, 6, END], "001"),
    ({"prompt_ids": [], "response_ids": [7, 8]}, [7, 8], "11"),
    ({"text": "hello"}, ids("hello"), "1" * len(ids("hello"))),
]  # fmt: skip


@pytest.mark.parametrize(("row", "tokens", "loss"), IDS)
def test_ids_and_text(load, row, tokens, loss):
    assert only(load([row])) == (tokens, [digit == "1" for digit in loss])


def test_text_data_has_a_loss_on_every_token(load):
    loaded = load([{"prompt": "the 12", "response": None}, {"text": "hello"}, {"messages": [USER, REPLY]}], texts=True)
    assert [example.tokens.tolist() for example in loaded.examples] == [ids("the 12"), ids("hello")]
    assert all(example.loss.all() for example in loaded.examples)
    assert "--text-data reads text or prompt, not messages: give the line as --data" in loaded.skipped[0].reason


def test_text_begins_with_the_tokens_of_a_text_prompt(load):
    """A target that was trained with a first token computes useless features without it."""
    from tokenizers import processors

    like = copy.deepcopy(tokenizer())
    like.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert only(load([{"text": "the"}], like=like))[0] == [0, *ids("the")]
    assert only(load([{"messages": [USER, REPLY]}], like=like)) == unmark(chat("u:hello 12", "a:hell the"))


def test_a_token_ends_where_the_prompt_ends(load):
    """The server's prompt ends in a space, which the tokenizer would merge with the answer's first word."""
    messages = [USER, {"role": "assistant", "content": "the 12"}] * 2
    example = only(load([{"messages": messages}], like=with_template(SPACED)))
    assert example == unmark("u: hello 12<|im_end|>a: ⟦the 12<|im_end|>⟧" * 2)
    assert ids("a: the") != ids("a: ") + ids("the"), "the case must merge"


def test_offsets_of_spaces(load):
    """Byte-level tokenizers may report offsets without spaces."""
    from tokenizers import processors

    like = with_template("{% for m in messages %}{{ m.role[0] }}   {{ m.content }}<|im_end|>{% endfor %}"
                         "{% if add_generation_prompt %}a   {% endif %}")  # fmt: skip
    like.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    example = only(load([{"messages": [USER, {"role": "assistant", "content": "12"}]}], like=like))
    assert example == unmark("u   hello 12<|im_end|>a   ⟦12<|im_end|>⟧")


def test_a_turn_that_the_template_rewrites_has_no_loss(load):
    """Messages after the last answer are not rendered."""
    plain = chat("u:hello 12", "a:hell the", "u:hello 12").replace("⟦", "").replace("⟧", "")
    for after in ([], [USER]):
        loaded = load([{"messages": [USER, REPLY, USER, REPLY, *after]}], like=with_template(FORGETS))
        assert only(loaded) == unmark(plain + "<|im_start|>assistant\n⟦(hm)hell the<|im_end|>⟧")
        assert loaded.turns_without_loss == 1


TEMPLATES = [
    (None, "no chat template"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages | length }}{{ messages[-1].content }}", "differently than the prompt"),
]


@pytest.mark.parametrize(("template", "reason"), TEMPLATES)
def test_templates_that_do_not_locate_the_answer(load, template, reason):
    loaded = load([{"messages": [USER, REPLY]}, {"text": "the"}], like=with_template(template))
    assert len(loaded.examples) == 1 and len(loaded.skipped) == 1
    assert loaded.skipped[0].number == 1 and reason in loaded.skipped[0].reason


BAD = [
    (b"{", "the line is not JSON"),
    (b'{"text": "\xff"}', "utf-8"),
    (b'{"text": ' + b"[" * 10**5, "recursion"),
    ([1, 2], "must be a JSON object, got [1, 2]"),
    ({"question": "a", "answer": None}, "it has question, answer"),
    ({"response": "the"}, "its prompt (messages or prompt) is not there"),
    ({"messages": [USER], "response_ids": [5]}, "response_ids needs prompt_ids"),
    ({"prompt": "the"}, "the line has a prompt and no answer, such as `response`: "),
    ({"prompt": "a", "completion": "b"}, "completion is not read; give response after"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen is not read; give response after"),
    ({"text": "a", "output_ids": [5]}, "output_ids is not read; give response after"),
    ({"messages": [USER, REPLY | {"function_call": {"name": "f"}}]}, "messages[1].function_call is not read"),
    ({"input_ids": [5, 6], "labels": [-100, 6]}, "input_ids is not read; give response after"),
    ({"prompt_ids": [5], "response_ids": ids("the 12"), "response": "hello"},
     "response_ids decodes to 'the 12' and response is 'hello': the ids are of another tokenizer"),
    ({"messages": [USER, REPLY], "tools": {"name": "f"}}, "tools must be a JSON array, got {'name': 'f'}"),
    ({"messages": [USER, REPLY], "chat_template_kwargs": [1]}, "must be a JSON object, got [1]"),
    ({"messages": [USER, REPLY], "chat_template_kwargs": {"add_generation_prompt": False}}, "may not set 'add_gen"),
    (b'{"text": "\\ud800"}', "text holds '\\ud800': surrogates must come in pairs"),
    ({"prompt_ids": [VOCABULARY], "response_ids": [2]},
     f"prompt_ids holds the id {VOCABULARY}; ids of this model are 0 to {VOCABULARY - 1}"),
    ({"prompt_ids": [1], "response_ids": [2, -1]}, "response_ids holds the id -1"),
    ({"prompt_ids": [1, True], "response_ids": [2]}, "prompt_ids must be a list of ids"),
    ({"prompt_ids": [], "response_ids": [5]}, "none of its tokens 2 to 1"),
    ({"text": ""}, "text is empty"),
    ({"text": 5}, "text must be a text, got 5"),
    ({"prompt": "a", "response": ""}, "response is empty"),
    ({"prompt_ids": [5, 6], "response_ids": []}, "none of its tokens 2 to 2"),
    ({"messages": []}, "messages must be a list of messages"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content must be a text, got None"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, REPLY]}, "messages[0].content"),
    ({"messages": [USER]}, "no message has the role assistant; there are user"),
    ({"messages": [USER, REPLY | {"tool_calls": [{"function": {"arguments": "{"}}]}]},
     "messages[1].tool_calls: the arguments are not JSON"),
    ({"prompt": "l " * 600, "response": "the"}, "none of its tokens 2 to 512 is to be predicted"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_line_is_named_and_skipped(load, tmp_path, row, reason):
    loaded = load([{"text": "hello"}, b"", row, {"text": "the the"}])
    assert [example.tokens.tolist() for example in loaded.examples] == [ids("hello"), ids("the the")]
    ((path, number, message),) = loaded.skipped
    assert (path, number, loaded.lines) == (str(tmp_path / "rows.jsonl"), 3, 3)
    assert reason in message and "\n" not in message and len(message) <= 400 and message.encode()


def test_half_a_gzip_file_is_read_as_far_as_it_goes(tmp_path):
    rng = np.random.default_rng(0)
    rows = [json.dumps({"text": " ".join(map(str, rng.integers(0, VOCABULARY, 50)))}) for _ in range(200)]
    packed = gzip.compress("\n".join(rows).encode())
    (tmp_path / "half.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    loaded = load_examples([str(tmp_path / "half.jsonl.gz")], tokenizer(), VOCABULARY, max_length=64)
    assert 0 < len(loaded.examples) < 200 and "cannot be read on" in loaded.skipped[-1].reason


def test_long_examples_are_cut_and_counted(load):
    rows = [{"prompt_ids": [7] * 6, "response_ids": [8] * count} for count in (2, 6)] + [{"text": "l " * 10**5}]
    loaded = load(rows, max_length=8)
    assert [len(example.tokens) for example in loaded.examples] == [8] * 3
    assert loaded.examples[1].loss.tolist() == [False] * 6 + [True] * 2
    assert loaded.examples[2].tokens.tolist() == ids("l l l l ")[:8]
    assert loaded.truncated == 2


def test_saved_truncation_and_padding_are_ignored(load):
    like = copy.deepcopy(tokenizer())
    like.backend_tokenizer.enable_truncation(4)
    like.backend_tokenizer.enable_padding(length=100)
    assert only(load([{"messages": [USER, REPLY]}], like=like)) == unmark(chat("u:hello 12", "a:hell the"))
    assert only(load([{"text": "hello the 12 hello"}], like=like))[0] == ids("hello the 12 hello")
    assert like.backend_tokenizer.truncation and like.backend_tokenizer.padding, "the caller's tokenizer is unchanged"


LENGTH = 12


def numbered(sizes: list[int]) -> list[Example]:
    """Examples whose tokens are all different, with irregular losses."""
    parts = np.split(np.arange(1, sum(sizes) + 1, dtype=np.int32), np.cumsum(sizes)[:-1]) if sizes else []
    return [Example(tokens, tokens * 7 % 3 == 0) for tokens in parts]


SIZES = st.lists(st.integers(1, LENGTH), max_size=40)
SEEDS = st.integers(0, 2**64)


@given(SIZES, SEEDS)
def test_packing_keeps_every_example_whole(sizes, seed):
    examples = numbered(sizes)
    rows = pack(examples, LENGTH, seed)
    assert all(map(np.array_equal, rows, pack(examples, LENGTH, seed)))
    assert {field.shape for field in rows} == {(len(rows.tokens), LENGTH)}
    assert all(field.dtype == np.int32 for field in rows[:3]) and rows.loss.dtype == bool
    by_first = {int(example.tokens[0]): example for example in examples}
    for tokens, positions, segments, loss in zip(*rows, strict=True):
        used = int((segments > 0).sum())
        assert used and not any(field[used:].any() for field in (tokens, positions, segments, loss)), "padding is last"
        count = int(segments.max())
        assert segments[:used].tolist() == sorted(segments[:used].tolist())
        for segment in range(1, count + 1):
            here = segments == segment
            example = by_first.pop(int(tokens[here][0]))
            assert tokens[here].tolist() == example.tokens.tolist()
            assert loss[here].tolist() == example.loss.tolist()
            assert positions[here].tolist() == list(range(len(example.tokens)))
    assert not by_first, "nothing is lost"


@given(SIZES, SEEDS)
def test_packing_opens_a_row_only_when_needed(sizes, seed):
    """No two rows would fit into a single row."""
    rows = pack(numbered(sizes), LENGTH, seed)
    used = (rows.segments > 0).sum(1)
    assert all(used[i] + used[j] > LENGTH for j in range(len(used)) for i in range(j))


@given(st.integers(1, 30), SEEDS, st.data())
def test_split_keeps_order(count, seed, drawn):
    examples = numbered([1] * count)
    held_back = drawn.draw(st.integers(0, count - 1))
    parts = split(examples, held_back, seed)
    firsts = [[int(example.tokens[0]) for example in part] for part in parts]
    assert len(parts[1]) == held_back and sorted(firsts[0] + firsts[1]) == list(range(1, count + 1))
    assert firsts[0] == sorted(firsts[0]) and firsts[1] == sorted(firsts[1])
    assert [int(example.tokens[0]) for example in split(examples, held_back, seed)[1]] == firsts[1]


@given(st.integers(1, 20), st.integers(1, 50), SEEDS)
def test_every_epoch_is_a_permutation(count, batch, seed):
    steps = 3 * count  # whole epochs with any batch
    order = np.concatenate([batch_rows(step, count, batch, seed) for step in range(steps)])
    assert order.dtype == np.int64 and len(order) == steps * batch
    for epoch in order.reshape(-1, count):
        assert sorted(epoch.tolist()) == list(range(count))
    assert batch_rows(steps - 1, count, batch, seed).tolist() == order[-batch:].tolist()


@pytest.mark.real_model
def test_answers_of_the_built_in_model(tmp_path):
    """Recorded ids are used unchanged; without them, texts give almost the same ids."""
    like = load_tokenizer(resolve(BUILT_IN_MODEL))
    with gzip.open(SELFGEN) as file:
        rows = [json.loads(line) for line in file][:300]
    texts = [row | {"finish_reason": "stop" if row["response_ids"][-1] == 2 else "length"} for row in rows]
    texts = [{name: value for name, value in row.items() if not name.endswith("_ids")} for row in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, *texts)))
    loaded = load_examples([str(tmp_path / "rows.jsonl")], like, 49152, max_length=4096)
    assert not loaded.skipped
    for row, (tokens, loss) in zip(rows, loaded.examples, strict=False):
        assert tokens.tolist() == row["prompt_ids"] + row["response_ids"]
        assert loss.tolist() == [False] * len(row["prompt_ids"]) + [True] * len(row["response_ids"])
    parts = [(tokens[~loss].tolist(), like.decode(tokens[loss])) for tokens, loss in loaded.examples[len(rows) :]]
    assert [text for _, text in parts] == [like.decode(row["response_ids"]) for row in rows]
    same = sum(prompt == row["prompt_ids"] for (prompt, _), row in zip(parts, rows, strict=True))
    assert same > 0.97 * len(rows), "the other prompts have other tokens of the same text"
