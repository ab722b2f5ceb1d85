"""Sets of prompts: those that come with specjax, parts of them, and JSONL files of the user's own.

    mt_bench                all of a set
    spec_bench              Spec-Bench by its six categories, each a set of its own
    spec_bench/rag          one of its categories
    my/prompts.jsonl        a file: a line has `turns` (a list of strings) or `prompt` (a string), and may have `id`

A conversation of several turns is held: the answer to a turn is in the prompt of the next one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specjax.bench.results import ALL

DATA = Path(__file__).parents[1] / "data" / "prompts"
"""SET.jsonl files, one object with `id`, `category` and `turns` a line."""

SPEC_BENCH = {
    "mt_bench": ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}
"""Spec-Bench's six categories, by those of its lines; the first, of several turns, are the eight of MT-bench."""


class Conversation(NamedTuple):
    id: str
    turns: tuple[str, ...]  # of the user


@dataclass(frozen=True)
class PromptSet:
    name: str
    conversations: tuple[Conversation, ...]

    @property
    def digest(self) -> str:
        """Of all that is asked."""
        return hashlib.sha256(json.dumps(self.conversations).encode()).hexdigest()[:16]


def read_prompts(file: Path, count: int | None) -> list[tuple[str, str]]:
    """(id, first turn) of the first `count` lines."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(row["id"], row["turns"][0]) for row in rows[:count]]


def spread(rows: list[Any], count: int) -> list[Any]:
    """`count` of the rows from all of them, 0 = all: sets are ordered by category."""
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))] if count else rows


def known(data: Path = DATA) -> list[str]:
    """Names of the sets in a folder."""
    return sorted(file.stem for file in data.glob("*.jsonl"))


def read_sets(names: Iterable[str], *, data: Path = DATA, limit: int = 0, turns: int = 0) -> list[PromptSet]:
    """The sets of these names, in their order.

    Args:
        data: the folder of the named ones.
        limit: conversations of each, spread over it; 0: all.
        turns: of each conversation, the first; 0: all.

    Raises:
        ValueError: there is no such set or file, or a line of it is no conversation.
    """
    found: list[PromptSet] = []
    for name in names:
        for each, conversations in _read_set(name, data):
            if each == ALL or any(each == other.name for other in found):
                each = name  # two files of one name are told apart by their paths
            if any(each == other.name for other in found):
                raise ValueError(f"--sets names {each} twice")
            chosen = [one._replace(turns=one.turns[: turns or None]) for one in spread(conversations, limit)]
            found.append(PromptSet(each, tuple(chosen)))
    return found


def _read_set(name: str, data: Path) -> list[tuple[str, list[Conversation]]]:
    if name.endswith((".jsonl", ".json")):
        if not Path(name).is_file():
            raise ValueError(f"--sets {name}: there is no such file")
        return [(Path(name).stem, [one for one, _ in _lines(Path(name))])]
    base, _, part = name.partition("/")
    file = data / f"{base}.jsonl"
    if not file.is_file():
        there = ", ".join(known(data)) or "no sets"
        raise ValueError(
            f"--sets {name}: {data} has no {base}.jsonl; it has: {there}; or name a file that ends in .jsonl"
        )
    rows = _lines(file)
    if base == "spec_bench":
        groups = SPEC_BENCH
    elif part:
        groups = {category: (category,) for category in dict.fromkeys(category for _, category in rows)}
    else:
        return [(base, [one for one, _ in rows])]
    if part and part not in groups:
        raise ValueError(f"--sets {name}: {base} has no category {part}; it has: {', '.join(groups)}")
    wanted = [part] if part else [*groups]
    found = {one: [row for row, category in rows if category in groups[one]] for one in wanted}
    if empty := [one for one, own in found.items() if not own]:
        raise ValueError(f"--sets {name}: {file} has no conversation of {', '.join(empty)}")
    return [(f"{base}/{one}", own) for one, own in found.items()]


def _lines(file: Path) -> list[tuple[Conversation, str]]:
    """Conversations and their categories."""
    found: list[tuple[Conversation, str]] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        turns = row.get("turns", [row["prompt"]] if "prompt" in row else None) if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            start = line[:60].decode(errors="replace")
            raise ValueError(f"{where} needs `turns`, a list of strings, or `prompt`, a string; got {start!r}")
        id = f"{file.stem}-{number}" if row.get("id") is None else str(row["id"])
        found.append((Conversation(id, tuple(turns)), str(row.get("category", ""))))
    if not found:
        raise ValueError(f"{file} holds no prompts")
    if len({one.id for one, _ in found}) < len(found):
        raise ValueError(f"{file}: two lines have one id")
    return found
