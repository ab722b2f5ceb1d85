"""Training examples from JSONL, packed into rows of equal length: token ids, and a mask of the tokens with a loss.

The first of these fields that a row contains decides how it is read (`row_fields`):

    response_ids    the answer, after prompt_ids: the ids are unchanged, with loss on the answer
    response        the answer, as text, after messages or prompt: loss on the response only
    messages        a chat in OpenAI's form: loss on every assistant turn and its end token
    text, prompt    running text, loss on every token; a prompt only in --text-data

The row's `tools` and `chat_template_kwargs` are passed to the chat template. Ids get no end token. Text gets the
template's end token, unless a limit or a stop string ended the answer (`finish_reason`). Earlier assistant turns that
the template rewrites, for example by dropping thoughts, have no loss.

Random choices depend on the seed only, so a resumed run continues with the same data.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64
from tokenizers import Tokenizer, processors

from specjax.checkpoint.prompts import END_THINK, THINK, Chat, Prompt, render_chat
from specjax.cli.lines import SkippedLine, check_encodes, line_files, read_batches, report
from specjax.config import ModelConfig

# Purposes of permutations: a seed gives a different permutation for each.
PACK, SPLIT, EPOCHS = range(3)


class Example(NamedTuple):
    """A token sequence from position 0."""

    tokens: Int32[np.ndarray, "n"]
    loss: Bool[np.ndarray, "n"]  # tokens that the target wrote and the head learns to predict


class Rows(NamedTuple):
    """Examples side by side in rows of N tokens.

    Two examples, abc and de with the answers bc and e, in rows of 6:

        tokens     a b c d e 0
        positions  0 1 2 0 1 0
        segments   1 1 1 2 2 0
        loss       F T T F T F

    Segments do not attend to each other. Padding has segment 0. Arrays are numpy's, or jax's in a batch.
    """

    tokens: Int32[Any, "r N"]
    positions: Int32[Any, "r N"]  # in the example
    segments: Int32[Any, "r N"]  # 1, 2, .. from left to right
    loss: Bool[Any, "r N"]

    def at(self, numbers: np.ndarray) -> Rows:
        return Rows(*(part[numbers] for part in self))


def pack(examples: Sequence[Example], length: int, seed: int) -> Rows:
    """Pack examples of 1 to `length` tokens into rows by best fit, in an order drawn from the seed."""
    order = _permutation(seed, PACK, 0, len(examples))
    rows = _best_fit([len(examples[i].tokens) for i in order], length)
    shape = (max(rows, default=-1) + 1, length)
    packed = Rows(*(np.zeros(shape, kind) for kind in (np.int32, np.int32, np.int32, bool)))
    used, segments = [0] * shape[0], [0] * shape[0]
    for i, row in zip(order, rows, strict=True):
        tokens, loss = examples[i]
        slots = row, slice(used[row], used[row] + len(tokens))
        used[row] += len(tokens)
        segments[row] += 1
        for field, value in zip(packed, (tokens, np.arange(len(tokens)), segments[row], loss), strict=True):
            field[slots] = value
    return packed


def _best_fit(sizes: Sequence[int], length: int) -> list[int]:
    """The row of each size: the fullest row that has room for it, or a new one."""
    rows_by_room: list[list[int]] = [[] for _ in range(length + 1)]
    placed, count = [], 0
    for size in sizes:
        room = next((room for room in range(size, length) if rows_by_room[room]), length)
        if room == length:
            row, count = count, count + 1
        else:
            row = rows_by_room[room].pop()
        rows_by_room[room - size].append(row)
        placed.append(row)
    return placed


def split(examples: Sequence[Example], held_back: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and `held_back` others drawn by the seed, both in their order."""
    drawn = set(_permutation(seed, SPLIT, 0, len(examples))[:held_back].tolist())
    train = [example for i, example in enumerate(examples) if i not in drawn]
    return train, [examples[i] for i in sorted(drawn)]


def batch_rows(step: int, count: int, batch: int, seed: int) -> Int64[np.ndarray, "b"]:
    """Indices of a batch's rows, from 0 to count - 1. Each epoch has every row once, in a new order.

    With 3 rows in batches of 2, step 1 has the last row of epoch 0 and the first row of epoch 1.
    """
    first, end = step * batch, (step + 1) * batch
    epochs = range(first // count, (end - 1) // count + 1)
    rows = np.concatenate([_permutation(seed, EPOCHS, epoch, count) for epoch in epochs])
    return rows[first - epochs[0] * count :][:batch]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, purpose: int, number: int, count: int) -> Int64[np.ndarray, "n"]:
    """Sorts raw draws, which are stable across numpy versions (NEP 19)."""
    draws = np.random.PCG64(np.random.SeedSequence([seed, purpose, number])).random_raw(count)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False  # cached
    return order


MASKS = ("attention_mask", "loss_mask", "labels", "assistant_masks")
NOT_READ = ("output_ids", "input_ids", "tokens", "loss_mask", "completion", "chosen")
NO_ANSWER = (
    "the line has a prompt and no answer, such as `response`: `specjax train generate` writes answers, and --text-data "
    "takes prompts"
)
CUT = ("length", "max_tokens", "abort", "content_filter", "stop_sequence")  # finish reasons without an end token
ROLES = {"developer": "system"}  # roles that chat templates name differently, as in the server


class ExampleSet(NamedTuple):
    examples: list[Example]
    skipped: list[SkippedLine]
    lines: int  # not blank, including skipped ones
    truncated: int  # examples cut to max_length
    turns_without_loss: int  # assistant turns that the template rewrites


class Tokens(NamedTuple):
    ids: list[int]
    loss: Bool[np.ndarray, "n"]
    lost: int = 0  # assistant turns that the template rewrites


def load_data(settings: Any, tokenizer: Any, target: ModelConfig, *, max_length: int) -> tuple[ExampleSet, ExampleSet]:
    """The examples of `--data` and of `--text-data`, at most `max_length` tokens each; reports the lines left out.

    `settings` has the fields `data` and `text_data`. Raises ValueError or OSError if there is no example.
    """
    if not (settings.data or settings.text_data):
        raise ValueError("nothing to learn from: give --data or --text-data")
    load = functools.partial(
        load_examples, tokenizer=tokenizer, vocabulary=target.vocab_size, progress=True,
        max_length=min(max_length, target.max_positions),
    )  # fmt: skip
    answers = load(line_files(settings.data, "--data"))
    texts = load(line_files(settings.text_data, "--text-data"), texts=True)
    for flag, files, loaded in (("--data", settings.data, answers), ("--text-data", settings.text_data, texts)):
        if files and not loaded.examples:
            first = "".join(f"; {path}, line {number}: {reason}" for path, number, reason in loaded.skipped[:1])
            raise ValueError(f"{flag}: none of the {loaded.lines} lines is usable{first}")
    report([*answers.skipped, *texts.skipped])
    return answers, texts


def load_examples(
    paths: Sequence[str], tokenizer: Any, vocabulary: int, *, max_length: int, texts: bool = False,
    progress: bool = False,
) -> ExampleSet:  # fmt: skip
    """All examples of JSONL files, plain or gzipped, in order; `-` is stdin.

    Args:
        tokenizer: a fast tokenizer of transformers; its chat template renders the chats.
        vocabulary: ids are 0 to vocabulary - 1.
        max_length: tokens of an example, at least 2; the rest is cut off.
        texts: lines are running text, not chats.

    Raises OSError if a file cannot be read.
    """
    reader = RowReader(tokenizer, vocabulary, max_length, texts=texts)
    examples: list[Example] = []
    skipped: list[SkippedLine] = []
    lines = truncated = lost = 0
    for line in chain.from_iterable(read_batches(paths, label="Reading", progress=progress)):
        lines += 1
        try:
            tokens = reader.read(line.row())
            example, is_cut = _example(tokens.ids, tokens.loss, vocabulary, max_length)
        except (ValueError, RecursionError) as error:
            skipped.append(line.skipped(error))
            continue
        examples.append(example)
        truncated += is_cut
        lost += tokens.lost
    return ExampleSet(examples, skipped, lines, truncated, lost)


def _example(ids: list[int], loss: Bool[np.ndarray, "n"], vocabulary: int, max_length: int) -> tuple[Example, bool]:
    """The example of at most max_length tokens; True if it was cut."""
    if not ids:
        raise ValueError("the line is empty: it has no tokens")
    check_ids("the line", ids, vocabulary)
    used = len(np.trim_zeros(loss, "b"))  # drop tokens after the last token with a loss
    end = min(used, max_length)
    if not loss[1:end].any():  # nothing is before the first token
        raise ValueError(f"none of its tokens 2 to {min(len(ids), max_length)} is to be predicted")
    return Example(np.asarray(ids[:end], np.int32), loss[:end]), used > max_length


THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # templates of transformers read the first
TEMPLATE_FIELDS = frozenset({"tool_calls", *THOUGHTS})
"""Fields of a message that only the template can render. Empty fields are removed."""
PROBE = "specjax-probe"
NO_THOUGHTS = re.compile(rf"\s*({THINK})?\s*{END_THINK}\s*")


class RowReader:
    """Reads rows with a tokenizer and its chat template. `texts`: rows are running text."""

    def __init__(self, tokenizer: Any, vocabulary: int, max_length: int, *, texts: bool) -> None:
        self.tokenizer, self.vocabulary, self.texts = tokenizer, vocabulary, texts
        core = tokenizer.backend_tokenizer
        special = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
        special = (special | {tokenizer.eos_token or ""}) - {""}
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        self._close = re.compile(rf"(\s*)({names})")  # templates may add text after the end token of a turn
        self._ends = re.compile(rf"({names})(\s|{names})*\Z")
        self._plain, self._exact = (Tokenizer.from_str(core.to_str()) for _ in range(2))
        for copied in (self._plain, self._exact):  # a tokenizer.json may set the lengths of the model's training
            copied.no_truncation()
            copied.no_padding()
        # Offsets include spaces. Neither this processor nor the replaced processor adds tokens here.
        self._exact.post_processor = processors.ByteLevel(trim_offsets=False)
        # Text beyond this many characters cannot change the first max_length tokens.
        self._most_characters = (max_length + 64) * max(map(len, core.get_vocab()), default=1)

    def read(self, row: dict[str, Any]) -> Tokens:
        """The row's tokens. Raises ValueError if the row cannot be used."""
        names = row_fields(row)
        if self.texts and names not in (("text",), ("prompt",)):
            raise ValueError(f"--text-data reads text or prompt, not {' and '.join(names)}: give the line as --data")
        match names:
            case ("prompt_ids", "response_ids"):
                prompt, answer = (read_ids(name, row[name], self.vocabulary) for name in names)
                check_written(self.tokenizer, row)
                return Tokens([*prompt, *answer], np.arange(len(prompt) + len(answer)) >= len(prompt))
            case ("messages",):
                return self._chat(read_messages("messages", row["messages"]), _template(row), cut=_is_cut(row))
            case (name, "response"):
                chat = read_prompt(row, name, self.tokenizer)
                reply = {"role": "assistant", "content": read_text("response", row["response"])}
                messages: list[Any] = [*(chat if isinstance(chat, Chat) else ()), reply]
                return self._chat(messages, _template(row), cut=_is_cut(row), last_only=True)
            case ("prompt",) if not self.texts:
                raise ValueError(NO_ANSWER)
        text = read_text(names[0], row[names[0]])
        ids = self._plain.encode(text[: self._most_characters]).ids
        return Tokens(ids, np.ones(len(ids), bool))

    def _chat(
        self, messages: list[dict[str, Any]], template: Mapping[str, Any], *, cut: bool, last_only: bool = False
    ) -> Tokens:
        """The chat up to its last answer, with loss on the answers.

        Args:
            template: arguments of the template.
            cut: the last answer has no end token.
            last_only: only the last answer has a loss.

        Raises ValueError if the last answer cannot be located.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise ValueError(f"no message has the role assistant; there are {roles:.60}; {NO_ANSWER}")
        messages = messages[: turns[-1] + 1]
        last = len(messages) - 1
        learnt: dict[int, tuple[str, int]] = {}  # by turn: the text up to its end, and its start
        for index in turns[-1:] if last_only else turns:
            try:
                prompt, turn = self._turn(messages[: index + 1], template, cut=cut and index == last)
            except ValueError:
                if index == last:
                    raise
            else:
                learnt[index] = prompt + turn, len(prompt)
        text = learnt[last][0]
        spans = [(start, len(part)) for part, start in learnt.values() if text.startswith(part)]
        lost = 0 if last_only else len(turns) - len(spans)
        return self._masked(text[: self._most_characters], spans)._replace(lost=lost)

    def _masked(self, text: str, spans: list[tuple[int, int]]) -> Tokens:
        """The tokens of a chat, with loss in the spans.

        Tokens end where a span starts, as in the server, even if the tokenizer would merge across: the line ends of
        "assistant\\n" and "\\nHi" stay two tokens.
        """
        whole = self._exact.encode(text, add_special_tokens=False)
        ids = whole.ids
        lefts, rights = np.asarray(whole.offsets, np.int64).reshape(-1, 2).T
        inside = {start for start, _ in spans if ((lefts < start) & (start < rights)).any()}
        if inside:
            starts = [0, *sorted(inside)]
            parts = [self._exact.encode(text[a:b], add_special_tokens=False) for a, b in pairwise([*starts, len(text)])]
            ids = [token for part in parts for token in part.ids]
            offsets = [left + start for left, part in zip(starts, parts, strict=True) for start, _ in part.offsets]
            lefts = np.asarray(offsets, np.int64)
        loss = np.zeros(len(ids), bool)
        for start, end in spans:
            loss |= (start <= lefts) & (lefts < end)
        return Tokens(ids, loss)

    def _turn(self, messages: list[dict[str, Any]], template: Mapping[str, Any], *, cut: bool) -> tuple[str, str]:
        """The prompt before the last message, and the text that the target writes.

        The content is copied unchanged, since a template may trim it, or drop or invent thoughts; only the text around
        it comes from the template. An empty block of thoughts belongs to the prompt if the answer has no thoughts, and
        is omitted otherwise.
        """
        *before, message = messages
        prompt, content = self._rendered(before, template, answer=True), message["content"]
        refusal = f"the chat template renders messages[{len(before)}], or text before it, differently than the prompt"
        opened = prompt.rstrip().endswith(THINK)
        thoughts = next((name for name in THOUGHTS if isinstance(message.get(name), str)), None)
        if cut and thoughts and not content.strip() and "tool_calls" not in message:  # cut inside the thoughts
            start = self._rendered([*before, message | {thoughts: PROBE}], template).rpartition(PROBE)[0]
            if not (opened or start.startswith(prompt)):
                raise ValueError(refusal)
            return prompt, ("" if opened else start[len(prompt) :]) + message[thoughts]
        plain = {name: value for name, value in message.items() if name not in THOUGHTS}
        if thoughts and self._rendered(messages, template) == self._rendered([*before, plain], template):
            message = plain  # the template ignores the thoughts
        if not TEMPLATE_FIELDS.isdisjoint(message):
            turn = self._rendered(messages, template)
            if not turn.startswith(prompt):
                raise ValueError(refusal)
            if END_THINK not in content and NO_THOUGHTS.match(turn, len(prompt)):
                start = self._rendered([*before, message | {"content": PROBE}], template).rpartition(PROBE)[0]
                prompt = start if NO_THOUGHTS.fullmatch(start, len(prompt)) and turn.startswith(start) else prompt
            turn = turn[len(prompt) :]
            close = self._ends.search(turn)
            return prompt, turn[: close.start() if cut else close.end(1)] if close else turn
        start, probe, after = self._rendered([*before, message | {"content": PROBE}], template).rpartition(PROBE)
        agrees = start.startswith(prompt)
        if not probe or not (agrees or opened):
            raise ValueError(refusal)
        lead = start[len(prompt) :] if agrees else ""
        if opened or NO_THOUGHTS.fullmatch(lead):
            if END_THINK in content or content.lstrip().startswith(THINK) or (opened and cut):
                lead = ""
            elif not NO_THOUGHTS.fullmatch(lead):
                raise ValueError(f"the prompt ends with {THINK}, and messages[{len(before)}] has no {END_THINK}")
            else:
                prompt, lead = start, ""
        lead = "" if content.startswith(lead) else lead
        if cut:
            return prompt, lead + content
        close = self._close.match(after)
        space, end = close.groups() if close else ("", after)
        return prompt, lead + content + ("" if content.endswith(space) else space) + end

    def _rendered(self, messages: list[dict[str, Any]], template: Mapping[str, Any], *, answer: bool = False) -> str:
        return render_chat(messages, self.tokenizer, {"add_generation_prompt": answer, **template})


def row_fields(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields from which a row is read: prompt and answer, or a single field. Ids take precedence over their text.

    Raises ValueError if there is no such field, or an answer in another field would be lost.
    """
    present = [name for name, value in row.items() if value is not None]
    if "response_ids" in present:
        if "prompt_ids" not in present:
            raise ValueError("response_ids needs prompt_ids; without both, the texts are used")
        if other := [name for name in MASKS if name in present]:
            raise ValueError(f"{other[0]} is not read: every id of response_ids has a loss, and ids have no padding")
        return "prompt_ids", "response_ids"
    if other := [name for name in NOT_READ if name in present and "response" not in present]:
        raise ValueError(f"{other[0]} is not read; give response after messages or prompt, or prompt_ids, response_ids")
    names = ("messages", "prompt") if "response" in present else ("messages", "text", "prompt")
    if first := next((name for name in names if name in present), None):
        return (first, "response") if "response" in present else (first,)
    if "response" in present:
        raise ValueError("response is an answer, and its prompt (messages or prompt) is not there")
    fields = "response_ids, response, messages, text, prompt"
    raise ValueError(f"the line has none of the fields {fields}; it has {', '.join(row) or 'none':.80}")


def check_written(tokenizer: Any, row: Mapping[str, Any]) -> None:
    """Raises ValueError if the text of `response_ids` does not contain the response: another tokenizer wrote them.

    The response may end earlier, before a stop string. White space and incomplete characters are not compared.
    """
    core, response = tokenizer.backend_tokenizer, row.get("response")
    expected = re.sub(r"[\s\ufffd]", "", response) if isinstance(response, str) else ""
    decoded = [core.decode(row["response_ids"], skip_special_tokens=skip) for skip in (False, True)]
    if not any(expected in re.sub(r"[\s\ufffd]", "", text) for text in decoded):
        raise ValueError(
            f"response_ids decodes to {decoded[1]!r:.60} and response is {response!r:.60}: the ids are of another "
            "tokenizer; without the ids, the text is used"
        )


def read_prompt(row: Mapping[str, Any], name: str, tokenizer: Any) -> Prompt:
    """The prompt of a row, from `messages` or `prompt`; a text is a user's message if there is a chat template.

    A last message that repeats the row's `response` is dropped.
    """
    prompt = row[name]
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    *before, last = messages = read_messages(name, prompt)
    response = row.get("response") if last["role"] == "assistant" else None
    repeated = isinstance(response, str) and last["content"].strip() == response.strip()
    return Chat(before if repeated else messages, _template(row))


def read_ids(name: str, value: Any, vocabulary: int) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} must be a list of ids, got {value!r:.60}")
    check_ids(name, value, vocabulary)
    return value


def check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """Raises ValueError if an id is outside of 0 to vocabulary - 1."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} holds the id {token!r:.20}; ids of this model are 0 to {vocabulary - 1}")


def read_text(name: str, value: Any, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r:.60}")
    if not value and not empty:
        raise ValueError(f"{name} is empty")
    return value


def _template(row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template."""
    tools, variables = row.get("tools"), row.get("chat_template_kwargs")
    for name, value, kind in (("tools", tools, list), ("chat_template_kwargs", variables, dict)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a JSON {'array' if kind is list else 'object'}, got {value!r:.60}")
    if "add_generation_prompt" in (variables or {}):
        raise ValueError("chat_template_kwargs may not set 'add_generation_prompt', which training sets for each turn")
    return {**(variables or {}), **({"tools": tools} if tools else {})}


def _is_cut(row: Mapping[str, Any]) -> bool:
    """True if a length limit or a stop string ended the answer."""
    reason = row.get("finish_reason")
    details = reason if isinstance(reason, dict) else {"type": reason}
    return details.get("type") in CUT or isinstance(details.get("matched"), str)


def read_messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of messages, got {value!r:.60}")
    return [_read_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _read_message(where: str, message: Any) -> dict[str, Any]:
    """The message, with its content as a text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} must be an object with role and content, got {message!r:.60}")
    fields = {
        key: value for key, value in message.items() if value or (value is not None and key not in TEMPLATE_FIELDS)
    }
    if fields.get("function_call"):
        raise ValueError(f"{where}.function_call is not read; give tool_calls")
    content, calls = fields.get("content"), fields.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(read_text(f"{where}.content", part.get("text"), empty=True) for part in content)
    if calls is not None:
        fields["tool_calls"] = _read_calls(f"{where}.tool_calls", calls)
    content = "" if content is None and not TEMPLATE_FIELDS.isdisjoint(fields) else content
    text = read_text(f"{where}.content", content, empty=True)
    return fields | {"role": ROLES.get(message["role"], message["role"]), "content": text}


def _read_calls(where: str, calls: Any) -> list[Any]:
    """Tool calls with their arguments as an object, as templates expect; OpenAI's form is a string of JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} must be a list of objects, got {calls!r:.60}")
    parsed = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: the arguments are not JSON: {error.msg} at {error.pos + 1}") from None
            check_encodes(where, arguments)
            call = call | {"function": function | {"arguments": arguments}}
        parsed.append(call)
    return parsed
