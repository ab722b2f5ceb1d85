"""Training examples from JSONL, packed into rows of one length: token ids, and which of them the target wrote.

A row is read by the first of these groups of fields that it has (`row_fields`):

    response_ids or output_ids      the answer, after prompt_ids, input_ids, messages or prompt: exactly these ids, with
                                    loss on the answer. A prompt without ids is rendered as the server renders it
    loss_mask                       with tokens or input_ids, of their length: loss where it is true
    response                        the answer, as text, after messages or prompt: loss on the response alone
    messages                        a chat in OpenAI's form: loss on every assistant turn and its end token
    text                            running text, loss on every token
    tokens or input_ids             ids, loss on every token
    prompt                          running text; only where every token is learnt

A chat template gets the row's `tools` and `chat_template_kwargs`. No end token is added to ids. Text gets the
template's end token, unless `finish_reason` says that the answer was cut off (`CUT`), or a stop string in `matched`,
`matched_stop` or `stop_reason` ended it. Earlier assistant turns that the template rewrites, such as turns whose
thoughts it drops, have no loss.

Random choices depend on the seed alone, so that a run resumed anywhere continues with the same data.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64
from tokenizers import Encoding, Tokenizer, processors

from specjax.checkpoint.prompts import END_THINK, THINK, Chat, Prompt, encode
from specjax.train import corpus

# Purposes of permutations: one seed gives a different permutation for each.
PACK, SPLIT, EPOCHS = range(3)


class Example(NamedTuple):
    """A token sequence from position 0."""

    tokens: Int32[np.ndarray, "n"]
    loss: Bool[np.ndarray, "n"]  # tokens to predict: the target wrote them


class Rows(NamedTuple):
    """Examples side by side in rows of N tokens.

    Two examples, abc and de of which the answers are bc and e, in rows of 6:

        tokens     a b c d e 0
        positions  0 1 2 0 1 0
        segments   1 1 1 2 2 0
        loss       F T T F T F

    A token may look at, and be predicted from, tokens of its own segment alone. Padding has segment 0. The
    arrays are numpy's, or jax's where the rows are a batch.
    """

    tokens: Int32[Any, "r N"]
    positions: Int32[Any, "r N"]  # in its own example
    segments: Int32[Any, "r N"]  # 1, 2, .. from left to right
    loss: Bool[Any, "r N"]


def pack(examples: Sequence[Example], length: int, seed: int) -> Rows:
    """Put every example, of 1 to `length` tokens, whole into a row by first-fit, in an order drawn from the seed."""
    for number, example in enumerate(examples):
        if not 1 <= len(example.tokens) <= length:
            raise ValueError(f"example {number} has {len(example.tokens)} tokens; a row holds 1 to {length}")
    order = _permutation(seed, PACK, 0, len(examples))
    rows = _first_fit([len(examples[i].tokens) for i in order], length)
    shape = (max(rows, default=-1) + 1, length)
    packed = Rows(*(np.zeros(shape, kind) for kind in (np.int32, np.int32, np.int32, bool)))
    used, parts = [0] * shape[0], [0] * shape[0]
    for i, row in zip(order, rows, strict=True):
        tokens, loss = examples[i]
        there = row, slice(used[row], used[row] + len(tokens))
        used[row] += len(tokens)
        parts[row] += 1
        for field, value in zip(packed, (tokens, np.arange(len(tokens)), parts[row], loss), strict=True):
            field[there] = value
    return packed


def _first_fit(sizes: Sequence[int], length: int) -> list[int]:
    """For each size the first row, from 0, that still has room for it.

    A binary tree over the rows holds at each node the largest room below it, so the search starts at the root.
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [length] * (2 * leaves)  # the root is 1, the children of i are 2i and 2i + 1, row j is leaves + j
    rows = []
    for size in sizes:
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < size)
        rows.append(node - leaves)
        room[node] -= size
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def split(examples: Sequence[Example], held_back: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to train on, at least one, and `held_back` others drawn by the seed. Both keep their order."""
    most = max(len(examples) - 1, 0)
    if not 0 <= held_back <= most:
        raise ValueError(f"of {len(examples)} examples, 0 to {most} can be held back, got {held_back}")
    kept_out = set(_permutation(seed, SPLIT, 0, len(examples))[:held_back].tolist())
    train = [example for i, example in enumerate(examples) if i not in kept_out]
    return train, [examples[i] for i in sorted(kept_out)]


def batch_rows(step: int, count: int, batch: int, seed: int) -> Int64[np.ndarray, "b"]:
    """The rows of a batch, from 0 to count - 1. Each epoch has all of them, in a new order.

    With 3 rows in batches of 2, step 1 (they count from 0) is the last row of epoch 0 and the first of epoch 1.
    """
    if step < 0 or count < 1 or batch < 1:
        raise ValueError(f"a batch needs a step from 0, a row and a size, got step {step}, {count} rows, size {batch}")
    first, end = step * batch, (step + 1) * batch
    epochs = range(first // count, (end - 1) // count + 1)
    rows = np.concatenate([_permutation(seed, EPOCHS, epoch, count) for epoch in epochs])
    return rows[first - epochs[0] * count :][:batch]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, purpose: int, number: int, count: int) -> Int64[np.ndarray, "n"]:
    """A permutation of 0 to count - 1. Sorts raw draws: only those are stable across numpy versions (NEP 19)."""
    if seed < 0:
        raise ValueError(f"a seed must be at least 0, got {seed}")
    draws = np.random.PCG64(np.random.SeedSequence([seed, purpose, number])).random_raw(count)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False  # it is cached
    return order


PROMPT_IDS, PROMPT_TEXTS = ("prompt_ids", "input_ids"), ("messages", "prompt")
ANSWER_IDS = ("response_ids", "output_ids")
ALONE = ("messages", "text", "tokens", "input_ids", "prompt")
NO_ANSWER = (
    "the line has a prompt and no answer, such as `response`: `specjax train generate` writes answers, and --text-data "
    "takes prompts"
)
OTHER_MASKS = ("labels", "assistant_masks", "assistant_mask", "completion_mask")
CUT = ("length", "max_tokens", "abort", "content_filter", "stop_sequence")
"""Values of `finish_reason` after which there is no end token."""
ENDED = ("stop", "end_turn", "tool_use", "tool_calls", "eos", "eos_token")
"""Values of `stop_reason` that are no stop strings: some servers write the finish reason there."""
LOSS_ON = ("assistant", "all")
ROLES = {"developer": "system"}  # new role names -> the ones that templates know, as in the server


class ExampleSet(NamedTuple):
    examples: list[Example]
    skipped: list[corpus.SkippedLine]
    lines: int  # not blank, skipped ones included
    truncated: int  # examples cut to max_length
    turns_without_loss: int  # assistant turns that the template rewrites once more messages follow


class Text(NamedTuple):
    """A chat, or running text."""

    text: str
    spans: list[tuple[int, int]] | None  # characters that the target wrote; None: running text
    lost: int = 0  # assistant turns without a place in the text


class Tokens(NamedTuple):
    ids: list[int]
    loss: Bool[np.ndarray, "n"]


def load_examples(
    paths: Sequence[str], tokenizer: Any, vocabulary: int, *, max_length: int, loss_on: str = "assistant",
    progress: bool = False,
) -> ExampleSet:  # fmt: skip
    """All examples of JSONL files, plain or gzipped, in their order; `-` is stdin.

    Args:
        tokenizer: a fast one of transformers; its chat template renders the chats.
        vocabulary: of the model: ids are 0 to vocabulary - 1.
        max_length: tokens of an example, at least 2; the rest is cut off.
        loss_on: assistant, or all for every token of every line.

    Raises ValueError: an argument is wrong, or a file is given twice. OSError: a file cannot be read.
    """
    if loss_on not in LOSS_ON:
        raise ValueError(f"loss_on must be one of {', '.join(LOSS_ON)}, got {loss_on!r}")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}")
    everything = loss_on == "all"
    chats, encoder = Chats(tokenizer, everything=everything), _Encoder(tokenizer.backend_tokenizer, max_length)
    examples: list[Example] = []
    skipped: list[corpus.SkippedLine] = []
    lines = truncated = lost = 0
    for _, batch in corpus.read_batches(corpus.parse_sources(paths, "jsonl"), label="Reading", progress=progress):
        lines += len(batch)
        rows, bad = [], []
        for line in batch:
            try:
                rows.append((line, _read_row(line.row(), chats, vocabulary)))
            except (ValueError, RecursionError) as error:
                bad.append(line.skipped(error))
        for (line, row), tokens in zip(rows, encoder.encode([row for _, row in rows]), strict=True):
            try:
                example, is_cut = _example(tokens.ids, tokens.loss | everything, vocabulary, max_length)
            except ValueError as error:
                bad.append(line.skipped(error))
                continue
            examples.append(example)
            truncated += is_cut
            lost += row.lost if isinstance(row, Text) else 0
        skipped += sorted(bad)  # by number
    return ExampleSet(examples, skipped, lines, truncated, lost)


def _example(ids: list[int], loss: Bool[np.ndarray, "n"], vocabulary: int, max_length: int) -> tuple[Example, bool]:
    """The example of at most max_length tokens, and whether it was cut."""
    if not ids:
        raise ValueError("the line is empty: it has no tokens")
    corpus.check_ids("the line", ids, vocabulary)
    used = len(np.trim_zeros(loss, "b"))  # tokens after the last one with a loss teach nothing
    end = min(used, max_length)
    if not loss[1:end].any():
        if loss[:end].any():
            raise ValueError("only the first token is to be predicted, and nothing is before it")
        first = f"its first {max_length}" if len(ids) > max_length else f"its {len(ids)}"
        raise ValueError(f"none of {first} tokens is to be predicted")
    return Example(np.asarray(ids[:end], np.int32), loss[:end]), used > max_length


class _Encoder:
    """Tokenises rows, many at once."""

    def __init__(self, core: Tokenizer, max_length: int) -> None:
        self._plain, self._exact = (Tokenizer.from_str(core.to_str()) for _ in range(2))
        for copied in (self._plain, self._exact):  # a tokenizer.json may hold the lengths of the model's training
            copied.no_truncation()
            copied.no_padding()
        # Offsets that leave out no spaces; this processor adds no tokens, and the replaced one would not have either.
        self._exact.post_processor = processors.ByteLevel(trim_offsets=False)
        # No token is longer than the longest name: the first max_length tokens do not depend on text after this.
        self._most_characters = (max_length + 64) * max(map(len, core.get_vocab()), default=1)

    def encode(self, rows: list[Text | Tokens]) -> Iterator[Tokens]:
        texts = [row._replace(text=row.text[: self._most_characters]) for row in rows if isinstance(row, Text)]
        chats = [(row.text, row.spans) for row in texts if row.spans is not None]
        running = iter(self._plain.encode_batch_fast([row.text for row in texts if row.spans is None]))
        rendered = self._exact.encode_batch([text for text, _ in chats], add_special_tokens=False)
        masked = (self._masked(*chat, whole) for chat, whole in zip(chats, rendered, strict=True))
        for row in rows:
            if isinstance(row, Tokens):
                yield row
            elif row.spans is None:
                ids = next(running).ids
                yield Tokens(ids, np.ones(len(ids), bool))
            else:
                yield next(masked)

    def _masked(self, text: str, spans: list[tuple[int, int]], whole: Encoding) -> Tokens:
        """The tokens of a chat, with loss in the spans.

        The server's prompt ends where a span starts, so a token ends there too, even if the text as a whole would have
        one across: of "assistant\\n" and "\\nHi" the two line ends stay two tokens.
        """
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


THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # transformers passes the first one to templates
TEMPLATE_FIELDS = frozenset({"tool_calls", *THOUGHTS})
"""Fields of a message that only the template can render. An empty one is removed."""
PROBE = "specjax-probe"
NO_THOUGHTS = re.compile(rf"\s*({THINK})?\s*{END_THINK}\s*")


class Chats:
    """Renders chats with the template of a tokenizer. `everything`: every token of a chat is learnt."""

    def __init__(self, tokenizer: Any, *, everything: bool) -> None:
        self.tokenizer, self.everything = tokenizer, everything
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {each.content for each in added.values() if each.special} | {tokenizer.eos_token or ""} - {""}
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        self._close = re.compile(rf"(\s*)({names})")  # templates may put more behind the end token of a turn
        self._ends = re.compile(rf"({names})(\s|{names})*\Z")

    def render(
        self, messages: list[dict[str, Any]], template: Mapping[str, Any], *, cut: bool, last_only: bool = False
    ) -> Text:
        """The chat up to its last answer, with loss on the answers. Raises ValueError: the last cannot be located.

        Args:
            template: arguments of the template.
            cut: the last answer has no end token.
            last_only: the target wrote the last answer alone.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not self.everything:
            if not turns:
                roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
                raise ValueError(f"no message has the role assistant; there are {roles:.60}; {NO_ANSWER}")
            messages = messages[: turns[-1] + 1]
        last = len(messages) - 1
        learnt: dict[int, tuple[str, int]] = {}  # the text up to the end of a turn, and where the turn starts
        for index in turns[-1:] if last_only else turns:
            try:
                prompt, turn = self._turn(messages[: index + 1], template, cut=cut and index == last)
            except ValueError:
                if index == last and not self.everything:
                    raise
            else:
                learnt[index] = prompt + turn, len(prompt)
        text = learnt[last][0] if last in learnt else self._rendered(messages, template)
        spans = [(start, len(part)) for part, start in learnt.values() if text.startswith(part)]
        lost = 0 if self.everything or last_only else len(turns) - len(spans)
        return Text(text, spans, lost)

    def _turn(self, messages: list[dict[str, Any]], template: Mapping[str, Any], *, cut: bool) -> tuple[str, str]:
        """The prompt that the target reads before the last message, and the text that it writes.

        The content is used as it is, since a template may trim it, or drop or invent thoughts; only the text around it
        is the template's. An empty block of thoughts is part of the prompt if the answer has no thoughts, and is left
        out if it has.
        """
        *before, message = messages
        prompt, content = self._rendered(before, template, answer=True), message["content"]
        refusal = (
            f"the chat template writes messages[{len(before)}], or what is before it, in another way than a prompt"
        )
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
        start, found, after = self._rendered([*before, message | {"content": PROBE}], template).rpartition(PROBE)
        agrees = start.startswith(prompt)
        if not found or not (agrees or opened):
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
        if not self.tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template: give text or token ids instead of messages")
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=answer, tokenize=False, **template
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(f"the chat template refused these messages: {error}") from error


def row_fields(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields from which a row is read: of its prompt and its answer, or one.

    Ids take precedence over their text. An answer without a prompt is returned alone.

    Raises ValueError: it has none, its ids hold padding, or an answer in another field would be ignored.
    """
    names, mask = _row_fields(row), row.get("attention_mask")
    if mask is None or {"tokens", *PROMPT_IDS, *ANSWER_IDS}.isdisjoint(names):
        return names
    if not isinstance(mask, list) or not all(each == 1 for each in mask):
        raise ValueError(f"attention_mask must be 1 for every token, got {mask!r:.60}: leave out the padding")
    return names


def _row_fields(row: Mapping[str, Any]) -> tuple[str, ...]:
    def first(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if row.get(name) is not None)[:1]

    answer, masked = first((*ANSWER_IDS, "response")), first(("tokens", "input_ids"))
    if masked and row.get("loss_mask") is not None and answer in ((), ("response",)):
        return masked
    others = ("completion",) if row.get("messages") is not None else ("completion", "chosen")
    if not answer and (other := first(others)):
        raise ValueError(f"{other[0]} is not read; give the answer as response, after messages or prompt")
    prompt = first(PROMPT_TEXTS + PROMPT_IDS if answer == ("response",) else PROMPT_IDS + PROMPT_TEXTS)
    if answer and (prompt or row.get("text") is None):
        return prompt + answer
    if answer and answer != ("output_ids",):  # `specjax generate` writes text and output_ids: both are the answer
        raise ValueError(f"text is running text, and {answer[0]} an answer: give the prompt as messages or prompt")
    if alone := first(ALONE):
        return alone
    raise corpus.missing_fields(row, dict.fromkeys((*ANSWER_IDS, "response", *ALONE)))


def check_written(tokenizer: Any, row: Mapping[str, Any], name: str) -> None:
    """Raises ValueError if the answer's ids are another tokenizer's: the decoded text does not contain the response.

    The response may lack the end of the text, from a stop string on. White space and incomplete characters, which
    decoders treat differently, are not compared.
    """
    response = row.get("response")
    if isinstance(response, str) and not _holds(tokenizer, row[name], response):
        text = tokenizer.backend_tokenizer.decode(row[name])
        raise ValueError(
            f"{name} decodes to {text!r:.60} and response is {response!r:.60}: the ids are of another tokenizer; "
            "without the ids, the text is used"
        )


def _holds(tokenizer: Any, ids: list[int], text: str) -> bool:
    """True if the decoded ids contain the text, apart from white space and incomplete characters."""
    core, wanted = tokenizer.backend_tokenizer, re.sub(r"[\s\ufffd]", "", text)
    decoded = (core.decode(ids, skip_special_tokens=skip) for skip in (True, False))
    return any(wanted in re.sub(r"[\s\ufffd]", "", each) for each in decoded)


def read_prompt(row: Mapping[str, Any], name: str, tokenizer: Any, answer: list[int] | None = None) -> Prompt:
    """The prompt of a row, from `messages` or `prompt`, without its `response`, or without an answer of these ids. A
    `prompt` is plain text if there is no chat template."""
    prompt = row[name]
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    *before, last = messages = _read_messages(name, prompt)
    if last["role"] == "assistant":  # some data sets hold the answer as a message too
        response, said = row.get("response"), last["content"]
        if isinstance(response, str):
            repeated = said.strip() == response.strip()
        else:
            repeated = answer is not None and _holds(tokenizer, answer, said)
        messages = before if repeated else messages
    return Chat(messages, _template(row))


def _read_row(row: dict[str, Any], chats: Chats, vocabulary: int) -> Text | Tokens:
    names = row_fields(row)
    match names:
        case ("messages",):
            return chats.render(_read_messages("messages", row["messages"]), _template(row), cut=_is_cut(row))
        case (("messages" | "prompt") as name, "response"):
            response = corpus.read_text("response", row["response"])
            prompt = read_prompt(row, name, chats.tokenizer)
            messages: list[Any] = [
                *(prompt if isinstance(prompt, Chat) else ()),
                {"role": "assistant", "content": response},
            ]
            return chats.render(messages, _template(row), cut=_is_cut(row), last_only=True)
        case ("prompt",) if not chats.everything:
            raise ValueError(NO_ANSWER)
        case ("text" | "prompt" as name,):
            return Text(corpus.read_text(name, row[name]), None)
        case ("tokens" | "input_ids" as name,):
            prompt, answer = [], _read_ids(name, row[name], vocabulary)
        case (name, "response_ids" | "output_ids" as last):
            answer = _read_ids(last, row[last], vocabulary)
            check_written(chats.tokenizer, row, last)
            if name in ("messages", "prompt"):
                prompt = encode(read_prompt(row, name, chats.tokenizer, answer), chats.tokenizer, vocabulary)
            else:
                prompt = _read_ids(name, row[name], vocabulary)
        case _:
            needed = " or ".join(PROMPT_TEXTS if names[-1] == "response" else PROMPT_IDS + PROMPT_TEXTS)
            raise ValueError(f"{names[-1]} is an answer, and its prompt ({needed}) is not there")
    ids, mask = [*prompt, *answer], row.get("loss_mask")
    if mask is None:
        other = [name for name in OTHER_MASKS if row.get(name) not in (None, ids)]  # labels may equal the ids
        if other and not chats.everything and names[-1] not in ANSWER_IDS:
            raise ValueError(f"{other[0]} is not read; give loss_mask: a list of {len(ids)} of 0 and 1, one a token")
        return Tokens(ids, np.arange(len(ids)) >= len(prompt))
    if not isinstance(mask, list) or len(mask) != len(ids) or any(each not in (0, 1) for each in mask):
        raise ValueError(f"loss_mask must be a list of {len(ids)} of 0 and 1, one a token, got {mask!r:.60}")
    return Tokens(ids, np.asarray(mask, bool))


def _read_ids(name: str, value: Any, vocabulary: int) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} must be a list of ids, got {value!r:.60}")
    corpus.check_ids(name, value, vocabulary)
    return value


def _template(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's arguments of the chat template."""
    tools, variables = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):  # as some data sets store them
        tools = corpus.read_json("tools", tools)
    for name, value, kind in (("tools", tools, list), ("chat_template_kwargs", variables, dict)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a JSON {'array' if kind is list else 'object'}, got {value!r:.60}")
        corpus.check_encodes(name, value)
    return {**(variables or {}), **({"tools": tools} if tools else {})}


def _is_cut(row: Mapping[str, Any]) -> bool:
    """True if a limit or a stop string ended the answer, not the target."""
    reason = row.get("finish_reason")
    details = reason if isinstance(reason, dict) else {"type": reason}
    if details.get("type") in CUT:
        return True
    stop = None if row.get("stop_reason") in ENDED else row.get("stop_reason")
    return any(isinstance(each, str) for each in (details.get("matched"), row.get("matched_stop"), stop))


def _read_messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of messages, got {value!r:.60}")
    return [_read_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _read_message(where: str, message: Any) -> dict[str, Any]:
    """The message with its content as one text; other fields stay for the template."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} must be an object with role and content, got {message!r:.60}")
    kept = {key: value for key, value in message.items() if value or (value is not None and key not in TEMPLATE_FIELDS)}
    if kept.get("function_call"):
        raise ValueError(f"{where}.function_call is not read; give tool_calls")
    for name, value in kept.items():
        corpus.check_encodes(f"{where}.{name}", value)
    content, calls = kept.get("content"), kept.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(corpus.read_text(f"{where}.content", part.get("text"), empty=True) for part in content)
    if calls is not None:
        kept["tool_calls"] = _read_calls(f"{where}.tool_calls", calls)
    content = "" if content is None and not TEMPLATE_FIELDS.isdisjoint(kept) else content
    text = corpus.read_text(f"{where}.content", content, empty=True)
    return kept | {"role": ROLES.get(message["role"], message["role"]), "content": text}


def _read_calls(where: str, calls: Any) -> list[Any]:
    """Templates want the arguments as an object; OpenAI writes them as a string of JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} must be a list of objects, got {calls!r:.60}")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = corpus.read_json(f"{where}: the arguments", function["arguments"], "are")
            call = call | {"function": function | {"arguments": arguments}}
        found.append(call)
    return found
