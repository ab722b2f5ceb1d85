"""JSONL to training examples: token ids, and which of them the target wrote.

A line is an object, and the first of these that it has is used. Text comes before ids, because ids belong to the
tokenizer that made them:

    messages                        a chat in OpenAI's form; loss on what assistants say and on the token that ends it
    prompt, response                the same: a question (or the messages before the answer) and its answer
    text                            running text, loss on every token
    prompt_ids, response_ids        ids, loss on the second list; so are input_ids, output_ids
    tokens, or input_ids            ids, loss on every token or, given a loss_mask of their length, where that is true
    prompt                          as text

With the line, `finish_reason` "length" says that the last answer was broken off: then it gets no end, as the target did
not stop there. Without a finish_reason, `response_ids` beside a `response` say so, by not ending in a special token.

A line that cannot be used is named and the next one read. Knows no models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from tokenizers import Encoding, Tokenizer, processors

from specjax.progress import progress_bar
from specjax.train.chats import Chats, Text, read_json, read_messages, read_text
from specjax.train.corpus import parse_sources, read
from specjax.train.packing import Example, Rows, batch_rows, pack, split

__all__ = ["LOSS_ON", "BadLine", "Example", "Loaded", "Rows", "batch_rows", "load_examples", "pack", "report", "split"]

LOSS_ON = ("assistant", "all")
FIELDS = (
    ("messages",),
    ("prompt", "response"),
    ("text",),
    ("prompt_ids", "response_ids"),
    ("input_ids", "output_ids"),
    ("tokens",),
    ("input_ids",),
    ("prompt",),
)
SHOWN_BAD_LINES = 5

BATCH = 1 << 20
"""Characters, and ids, that are held until they are tokenised together, which uses all cores."""


class BadLine(NamedTuple):
    path: str  # or stdin
    number: int  # from 1
    reason: str


class Loaded(NamedTuple):
    examples: list[Example]
    bad: list[BadLine]
    lines: int  # that are not blank, with the bad ones
    truncated: int  # examples cut to max_length
    turns_without_loss: int  # of assistants, in chats where the template renders a turn in two ways


class _Ids(NamedTuple):
    ids: list[int]
    loss: list[bool]


def load_examples(
    paths: Sequence[str],
    tokenizer: Any,
    vocabulary: int,
    *,
    max_length: int,
    loss_on: str = "assistant",
    progress: bool = False,
) -> Loaded:
    """All examples of JSONL files, plain or gzipped, in their order; `-` is stdin.

    Args:
      tokenizer: a fast one of transformers; its chat template renders the chats.
      vocabulary: of the model: ids are 0 to vocabulary - 1.
      max_length: tokens, at least 2. What comes after is cut off.
      loss_on: assistant, or all for every token of every line.

    Raises:
      ValueError: an argument is wrong, or a file is given twice.
      OSError: a file is not there or cannot be read.
    """
    if loss_on not in LOSS_ON:
        raise ValueError(f"loss_on must be one of {', '.join(LOSS_ON)}, got {loss_on!r}")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}")
    loader = _Loader(tokenizer, vocabulary, max_length, everything=loss_on == "all")
    sources = parse_sources(list(paths), "jsonl")
    # What comes through a pipe has no length.
    total = None if any(source.path == "-" for source in sources) else sum(source.size for source in sources)
    with progress_bar("Reading", total, "B", shown=progress) as shown:
        for source in sources:
            before = shown.n
            for line in read(source):
                name = "stdin" if source.path == "-" else source.path
                loader.add(name, line.number, line.data, line.reason)
                shown.update(before + line.position - shown.n)
    loader.flush()
    return loader.loaded()


def report(bad: Sequence[BadLine]) -> None:
    """Names the first bad lines on stderr, and counts the others."""
    for path, number, reason in bad[:SHOWN_BAD_LINES]:
        print(f"{path}, line {number}: {reason}", file=sys.stderr)
    if len(bad) > SHOWN_BAD_LINES:
        print(f"and {len(bad) - SHOWN_BAD_LINES} more bad lines", file=sys.stderr)


class _Loader:
    """Lines in, examples out. What is added waits for a batch."""

    def __init__(self, tokenizer: Any, vocabulary: int, max_length: int, *, everything: bool) -> None:
        self._chats = Chats(tokenizer, everything=everything)
        self._plain, self._exact = (_copy(tokenizer.backend_tokenizer) for _ in range(2))
        # Offsets that leave out no spaces. It adds no tokens, and what it replaces would not have either.
        self._exact.post_processor = processors.ByteLevel(trim_offsets=False)
        self._vocabulary, self._max_length, self._everything = vocabulary, max_length, everything
        # No token is longer: a text's first max_length tokens do not depend on what is behind this.
        self._most_characters = (max_length + 64) * max(map(len, self._plain.get_vocab()), default=1)
        self._waiting: list[tuple[int, str, int, Text | _Ids]] = []
        self._held = 0
        self._examples: list[Example] = []
        self._bad: list[tuple[int, BadLine]] = []
        self._lines = self._truncated = self._lost = 0

    def add(self, path: str, number: int, data: bytes | None, reason: str) -> None:
        """A line, or the reason why there are no more."""
        if data is not None and not data.strip():
            return
        self._lines += 1
        try:
            if data is None:
                raise ValueError(reason)
            found = _read_row(read_json("the line", data.decode("utf-8-sig")), self._chats)
        except (ValueError, RecursionError) as error:
            self._bad.append((self._lines, _bad_line(path, number, error)))
            return
        if isinstance(found, Text):
            found = found._replace(text=found.text[: self._most_characters])
        self._held += len(found[0])
        self._waiting.append((self._lines, path, number, found))
        if self._held >= BATCH or len(self._waiting) >= BATCH:
            self.flush()

    def flush(self) -> None:
        texts = [found for *_, found in self._waiting if isinstance(found, Text)]
        running = iter(self._plain.encode_batch_fast([each.text for each in texts if each.spans is None]))
        chats = [each.text for each in texts if each.spans is not None]
        rendered = iter(self._exact.encode_batch(chats, add_special_tokens=False))
        for order, path, number, found in self._waiting:
            if isinstance(found, _Ids):
                ids, loss = found.ids, np.asarray(found.loss, bool)
            elif found.spans is None:
                ids = next(running).ids
                loss = np.ones(len(ids), bool)
            else:
                ids, loss = self._masked(found.text, found.spans, next(rendered))
            try:
                self._examples.append(self._example(ids, loss))
            except ValueError as error:
                self._bad.append((order, _bad_line(path, number, error)))
            else:
                self._lost += found.lost if isinstance(found, Text) else 0
        self._waiting, self._held = [], 0

    def loaded(self) -> Loaded:
        bad = [line for _, line in sorted(self._bad)]
        return Loaded(self._examples, bad, self._lines, self._truncated, self._lost)

    def _masked(
        self, text: str, spans: list[tuple[int, int]], whole: Encoding
    ) -> tuple[list[int], Bool[np.ndarray, "n"]]:
        """The ids of a chat, and which of them lie in the spans.

        The server's prompt ends where a span starts, so a token ends there too, even if the text as a whole would have
        one across: of "assistant\\n" and "\\nHi" the two line ends stay two tokens.
        """
        ids, offsets = whole.ids, whole.offsets
        lefts, rights = np.asarray(offsets, np.int64).reshape(-1, 2).T
        inside = {start for start, _ in spans if ((lefts < start) & (start < rights)).any()}
        if inside:
            cuts = [0, *sorted(inside), len(text)]
            ids, parts = [], []
            for left, right in pairwise(cuts):
                part = self._exact.encode(text[left:right], add_special_tokens=False)
                ids += part.ids
                parts += [left + start for start, _ in part.offsets]
            lefts = np.asarray(parts, np.int64)
        loss = np.zeros(len(ids), bool)
        for start, end in spans:
            loss |= (start <= lefts) & (lefts < end)
        return ids, loss

    def _example(self, ids: list[int], loss: Bool[np.ndarray, "n"]) -> Example:
        if not ids:
            raise ValueError("the line is empty: it has no tokens")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self._vocabulary)
            raise ValueError(f"the line holds the id {wrong!r:.20}; ids of this model are 0 to {self._vocabulary - 1}")
        tokens = np.asarray(ids, np.int32)
        loss = np.ones_like(loss) if self._everything else loss
        # Nothing is learnt from what comes after.
        used = int(np.flatnonzero(loss)[-1]) + 1 if loss.any() else 0
        tokens, loss = tokens[: min(used, self._max_length)], loss[: min(used, self._max_length)]
        if not loss[1:].any():
            if loss.any():
                raise ValueError("only the first token is to be predicted, and nothing is before it")
            first = f"its first {self._max_length}" if len(ids) > self._max_length else f"its {len(ids)}"
            raise ValueError(f"none of {first} tokens is to be predicted")
        self._truncated += used > self._max_length
        return Example(tokens, loss)


def _copy(core: Tokenizer) -> Tokenizer:
    """Without the lengths that a tokenizer.json may hold, which are those its model was trained with."""
    copied = Tokenizer.from_str(core.to_str())
    copied.no_truncation()
    copied.no_padding()
    return copied


def _bad_line(path: str, number: int, error: Exception) -> BadLine:
    """One line, short, that can be written anywhere, whatever of the input or of a template the error holds."""
    reason = " ".join(str(error).split())
    return BadLine(path, number, f"{reason:.400}".encode(errors="backslashreplace").decode())


# Rows.


def _read_row(row: Any, chats: Chats) -> Text | _Ids:
    """What a line holds.

    Raises:
      ValueError: nothing of what is known, or not in its form.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object, got {row!r:.60}")
    there = {name for name, value in row.items() if value is not None}
    chosen = next((group for group in FIELDS if there.issuperset(group)), None)
    if chosen is None:
        wanted = ", ".join(" and ".join(group) for group in FIELDS)
        raise ValueError(f"the line has none of the fields {wanted}; it has {', '.join(row) or 'none':.80}")
    if chosen == ("messages",):
        messages = read_messages("messages", row["messages"])
        return chats.render(messages, cut=_is_cut(row))
    if chosen == ("prompt", "response"):
        prompt, response = row["prompt"], read_text("response", row["response"])
        is_text = isinstance(prompt, str)
        before = [{"role": "user", "content": read_text("prompt", prompt, empty=True)}] if is_text else None
        messages = [*(before or read_messages("prompt", prompt)), {"role": "assistant", "content": response}]
        return chats.render(messages, cut=_is_cut(row) or chats.shows_no_end(row, response))
    if chosen in (("text",), ("prompt",)):
        return Text(read_text(chosen[0], row[chosen[0]]), None)
    lists = [_read_ids(name, row[name]) for name in chosen]
    if len(lists) == 2:
        return _Ids([*lists[0], *lists[1]], [False] * len(lists[0]) + [True] * len(lists[1]))
    return _Ids(lists[0], _read_mask(row.get("loss_mask"), len(lists[0])))


def _read_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} must be a list of ids, got {value!r:.60}")
    return value


def _read_mask(mask: Any, length: int) -> list[bool]:
    if mask is None:
        return [True] * length
    if not isinstance(mask, list) or len(mask) != length or any(each not in (0, 1) for each in mask):
        got = f"{len(mask)} of them: {mask!r:.60}" if isinstance(mask, list) else f"{mask!r:.60}"
        raise ValueError(f"loss_mask must be {length} of 0 and 1, one a token, got {got}")
    return [bool(each) for each in mask]


def _is_cut(row: Mapping[str, Any]) -> bool:
    reason = row.get("finish_reason")
    return (reason.get("type") if isinstance(reason, dict) else reason) == "length"
