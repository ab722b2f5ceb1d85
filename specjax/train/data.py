"""Training examples from JSONL: token ids, and which of them the target wrote. Knows no models.

A row is read by the first of these groups of fields that it has in full:

    messages                        a chat in OpenAI's form; loss on what assistants say and on the token that ends it
    prompt, response                the same: a question (or the messages before the answer) and its answer
    text                            running text, loss on every token
    prompt_ids, response_ids        ids, loss on the second list; so are input_ids, output_ids
    tokens, or input_ids            ids, loss on every token or, given a loss_mask of their length, where that is true
    prompt                          as text

`finish_reason` "length" marks the last answer as cut off: it gets no end token, as the target did not stop there. In a
row without a finish_reason, `response_ids` that do not end in a special token mark it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from tokenizers import Encoding, Tokenizer, processors

from specjax.train.chats import Chats, Text, read_messages
from specjax.train.corpus import SkippedLine, check_ids, missing_fields, parse_sources, read_batches, read_text
from specjax.train.packing import Example

ROW_FIELDS = (
    ("messages",),
    ("prompt", "response"),
    ("text",),
    ("prompt_ids", "response_ids"),
    ("input_ids", "output_ids"),
    ("tokens",),
    ("input_ids",),
    ("prompt",),
)
"""Text precedes ids: ids belong to the tokenizer that made them."""

LOSS_ON = ("assistant", "all")


class ExampleSet(NamedTuple):
    examples: list[Example]
    skipped: list[SkippedLine]
    lines: int  # not blank, skipped ones included
    truncated: int  # examples cut to max_length
    turns_without_loss: int  # of assistants, in chats where the template renders a turn in two ways


class _Ids(NamedTuple):
    ids: list[int]
    loss: list[bool]
    lost: int = 0


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

    Raises:
        ValueError: an argument is wrong, or a file is given twice.
        OSError: a file cannot be read.
    """
    if loss_on not in LOSS_ON:
        raise ValueError(f"loss_on must be one of {', '.join(LOSS_ON)}, got {loss_on!r}")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}")
    everything = loss_on == "all"
    chats, encoder = Chats(tokenizer, everything=everything), _Encoder(tokenizer.backend_tokenizer, max_length)
    examples: list[Example] = []
    skipped: list[SkippedLine] = []
    lines = truncated = lost = 0
    for _, batch in read_batches(parse_sources(paths, "jsonl"), label="Reading", progress=progress):
        lines += len(batch)
        rows, bad = [], []
        for line in batch:
            try:
                rows.append((line, _read_row(line.row(), chats)))
            except (ValueError, RecursionError) as error:
                bad.append(line.skipped(error))
        for (line, row), (ids, loss) in zip(rows, encoder.encode([row for _, row in rows]), strict=True):
            try:
                example, is_cut = _example(ids, loss | everything, vocabulary, max_length)
            except ValueError as error:
                bad.append(line.skipped(error))
                continue
            examples.append(example)
            truncated += is_cut
            lost += row.lost
        skipped += sorted(bad)  # by number
    return ExampleSet(examples, skipped, lines, truncated, lost)


def _example(ids: list[int], loss: Bool[np.ndarray, "n"], vocabulary: int, max_length: int) -> tuple[Example, bool]:
    """The example of at most max_length tokens, and whether it was cut.

    Raises:
        ValueError: an id is not in the vocabulary, or no token with a loss follows another token.
    """
    if not ids:
        raise ValueError("the line is empty: it has no tokens")
    check_ids("the line", ids, vocabulary)
    # Tokens after the last one with a loss teach nothing.
    used = int(np.flatnonzero(loss)[-1]) + 1 if loss.any() else 0
    end = min(used, max_length)
    tokens, loss = np.asarray(ids[:end], np.int32), loss[:end]
    if not loss[1:].any():
        if loss.any():
            raise ValueError("only the first token is to be predicted, and nothing is before it")
        first = f"its first {max_length}" if len(ids) > max_length else f"its {len(ids)}"
        raise ValueError(f"none of {first} tokens is to be predicted")
    return Example(tokens, loss), used > max_length


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

    def encode(self, rows: list[Text | _Ids]) -> Iterator[tuple[list[int], Bool[np.ndarray, "n"]]]:
        """The ids of each row, and which of them carry loss."""
        texts = [(row.text[: self._most_characters], row.spans) for row in rows if isinstance(row, Text)]
        running = iter(self._plain.encode_batch_fast([text for text, spans in texts if spans is None]))
        chats = [(text, spans) for text, spans in texts if spans is not None]
        rendered = iter(self._exact.encode_batch([text for text, _ in chats], add_special_tokens=False))
        masked = (self._masked(text, spans, whole) for (text, spans), whole in zip(chats, rendered, strict=True))
        for row in rows:
            if isinstance(row, _Ids):
                yield row.ids, np.asarray(row.loss, bool)
            elif row.spans is None:
                ids = next(running).ids
                yield ids, np.ones(len(ids), bool)
            else:
                yield next(masked)

    def _masked(
        self, text: str, spans: list[tuple[int, int]], whole: Encoding
    ) -> tuple[list[int], Bool[np.ndarray, "n"]]:
        """The ids of a chat, and which of them lie in the spans.

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
        return ids, loss


# Rows.


def _read_row(row: dict[str, Any], chats: Chats) -> Text | _Ids:
    """The chat, text or ids of a row.

    Raises:
        ValueError: the row has no known group of fields, or a field has another form.
    """
    there = {name for name, value in row.items() if value is not None}
    match next(filter(there.issuperset, ROW_FIELDS), ()):
        case ():
            raise missing_fields(row, map(" and ".join, ROW_FIELDS))
        case ("messages",):
            return chats.render(read_messages("messages", row["messages"]), cut=_is_cut(row))
        case ("prompt", "response"):
            prompt, response = row["prompt"], read_text("response", row["response"])
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            messages = [*read_messages("prompt", messages), {"role": "assistant", "content": response}]
            return chats.render(messages, cut=_is_cut(row) or chats.shows_no_end(row, response))
        case ("text" | "prompt" as name,):
            return Text(read_text(name, row[name]), None)
        case (name,):
            ids = _read_ids(name, row[name])
            return _Ids(ids, _read_mask(row.get("loss_mask"), len(ids)))
        case names:
            prompt, response = (_read_ids(name, row[name]) for name in names)
            return _Ids([*prompt, *response], [False] * len(prompt) + [True] * len(response))


def _read_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} must be a list of ids, got {value!r:.60}")
    return value


def _read_mask(mask: Any, length: int) -> list[bool]:
    if mask is None:
        return [True] * length
    if not isinstance(mask, list) or len(mask) != length or any(each not in (0, 1) for each in mask):
        raise ValueError(f"loss_mask must be a list of {length} of 0 and 1, one a token, got {mask!r:.60}")
    return [bool(each) for each in mask]


def _is_cut(row: Mapping[str, Any]) -> bool:
    reason = row.get("finish_reason")
    return (reason.get("type") if isinstance(reason, dict) else reason) == "length"
