"""Sets of prompts.

mt_bench                a set that ships with specjax
spec_bench              the six categories of Spec-Bench, each a set
spec_bench/rag          one category of a set
my/prompts.jsonl        a file; each line has `turns` (a list of strings), `prompt` (a string) or `messages` (chat
                        messages), optionally `id` or `question_id`
qualitative             with --data FOLDER: a split of SPEED-Bench of NVIDIA's prepare.py; each category is a set
qualitative/coding      one category of a split
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parents[1] / "data" / "prompts"
"""Folder of SET.jsonl files; each line is an object with `id`, `category` and `turns`."""

ALL = "all"  # name of the table rows over all sets; no set may have it

SPEC_BENCH = {
    "mt_bench": ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}
"""Spec-Bench's six categories -> categories of the lines. The first, of several turns, is MT-bench."""


SPEED_BENCH = ("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32)))
"""SPEED-Bench's splits. Its files are not free to ship; source: huggingface.co/datasets/nvidia/SPEED-Bench."""
PLACEHOLDERS = ("FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE", "{article}")
"""Text in its prompts before prepare.py has fetched their sources."""


class Conversation(NamedTuple):
    id: str
    turns: tuple[str, ...]  # the user's messages


@dataclass(frozen=True)
class PromptSet:
    name: str
    conversations: tuple[Conversation, ...]

    @property
    def digest(self) -> str:
        """Digest of all ids and turns."""
        return hashlib.sha256(json.dumps(self.conversations).encode()).hexdigest()[:16]


def spread(rows: list[Any], count: int) -> list[Any]:
    """`count` rows, evenly spaced because sets are ordered by category; 0: all rows."""
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))] if count else rows


def set_names(data: Path = DATA) -> list[str]:
    """Names of the sets in a folder."""
    return sorted(file.stem for file in data.glob("*.jsonl"))


def read_sets(names: Iterable[str], *, data: Path = DATA, limit: int = 0, turns: int = 0) -> list[PromptSet]:
    """Reads sets by name.

    Args:
        data: folder of the named sets.
        limit: conversations of each set, evenly spaced; 0: all.
        turns: first turns of each conversation; 0: all.

    Raises:
        ValueError: a set, file or category does not exist, or a line is not a conversation.
    """
    sets: dict[str, PromptSet] = {}
    for name in names:
        for title, conversations in _read_set(name, data).items():
            if title == ALL or title in sets:
                title = name  # the path tells files with the same name apart
            if title in sets:
                raise ValueError(f"--sets names {title} twice")
            chosen = (Conversation(id, texts[: turns or None]) for id, texts in spread(conversations, limit))
            sets[title] = PromptSet(title, tuple(chosen))
    return list(sets.values())


def _read_set(name: str, data: Path) -> dict[str, list[Conversation]]:
    """The conversations of a set, or of each of its categories, by title."""
    if name.endswith((".jsonl", ".json")):
        if not Path(name).is_file():
            raise ValueError(f"--sets {name}: there is no such file")
        return {Path(name).stem: [conversation for conversation, _ in _read_lines(Path(name))]}
    base, _, part = name.partition("/")
    file = data / f"{base}.jsonl"
    if not file.is_file():
        names = ", ".join(set_names(data)) or "no sets"
        raise ValueError(f"--sets {name}: {data} has no {base}.jsonl; it has: {names}; or name a .jsonl file")
    lines = _read_lines(file)
    if base not in ("spec_bench", *SPEED_BENCH) and not part:
        return {base: [conversation for conversation, _ in lines]}
    categories = SPEC_BENCH if base == "spec_bench" else {category: (category,) for _, category in lines}
    if base in SPEED_BENCH and any(mark in turn for one, _ in lines for turn in one.turns for mark in PLACEHOLDERS):
        raise ValueError(f"--sets {name}: {file} has placeholders in place of prompts; run SPEED-Bench's prepare.py")
    if part and part not in categories:
        raise ValueError(f"--sets {name}: {base} has no category {part}; it has: {', '.join(categories)}")
    chosen = [part] if part else [*categories]
    parts = {title: [turns for turns, category in lines if category in categories[title]] for title in chosen}
    if empty := [title for title, conversations in parts.items() if not conversations]:
        raise ValueError(f"--sets {name}: {file} has no conversation of {', '.join(empty)}")
    return {f"{base}/{title}": conversations for title, conversations in parts.items()}


def _read_lines(file: Path) -> list[tuple[Conversation, str]]:
    """(conversation, category) of each line."""
    lines: list[tuple[Conversation, str]] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from None
        row = row if isinstance(row, dict) else {}
        turns: Any = row.get("turns", [row.get("prompt")])
        if isinstance(messages := row.get("messages"), list) and "turns" not in row and "prompt" not in row:
            turns = [message.get("content") for message in messages if isinstance(message, dict)]
            if any(not isinstance(message, dict) or message.get("role") != "user" for message in messages):
                turns = []  # answers and system messages are no turns of the user
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            wanted = "`turns`, a list of strings, `prompt`, a string, or `messages` of the user"
            start = line[:60].decode(errors="replace")
            raise ValueError(f"{file}, line {number} needs {wanted}; got {start!r}")
        id = next(
            (str(row[name]) for name in ("id", "question_id") if row.get(name) is not None), f"{file.stem}-{number}"
        )
        lines.append((Conversation(id, tuple(turns)), str(row.get("category", ""))))
    if not lines:
        raise ValueError(f"{file} holds no prompts")
    if len({conversation.id for conversation, _ in lines}) < len(lines):
        raise ValueError(f"{file}: two lines have the same id")
    return lines
