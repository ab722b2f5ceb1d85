"""What a part of `gpu_check.py` hands back: figures, what was wrong, what failed, what there was no time for.

A measurement that there was no time for is skipped, a check of correctness is not: without it nothing is shown to be
right. Checks of the first implementation are those; other implementations are there to be compared with.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 300
"""Characters of an error that are kept; a compiler's can have a million."""


class Plan(NamedTuple):
    """What a run is asked for: flags, and the sizes that --tiny changes."""

    tiny: bool
    implementations: tuple[str, ...]
    model: str | None
    seed: int
    minutes: float  # a part begins nothing new that would end after them
    layers: int
    page_size: int
    contexts: tuple[int, ...]
    trees: tuple[tuple[int, int, int], ...]
    several_widths: bool


@dataclass
class Report:
    """Of one part. It is on disk after each entry, so that what a crash leaves is not lost."""

    part: str
    plan: Plan
    file: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # checks of correctness that failed, or could not be made
    failed: list[str] = field(default_factory=list)  # measurements that raised
    unchecked: list[str] = field(default_factory=list)  # checks that there was no time for
    skipped: list[str] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._write()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def add(self, kind: str, **row: Any) -> None:
        self.rows.append({"kind": kind, **row})
        self._write()

    def note(self, text: str) -> None:
        """Something that is not there, and why: never an error."""
        say(text)
        self.skipped.append(text)
        self._write()

    def check(self, good: bool, what: str) -> bool:
        """Writes down a check of correctness that failed."""
        if not good:
            self.wrong.append(what)
            self._write()
        return good

    @contextlib.contextmanager
    def attempt(self, name: str, *, check: bool = False) -> Iterator[None]:
        """Whatever is raised inside becomes a line, and the run goes on. `check`: without it a result is unproven."""
        try:
            yield
        except Exception as error:  # compilers, drivers and libraries raise whatever they like
            text = " ".join(str(error).split())[:LONGEST]
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{name}: {type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"
            say(f"FAILED {line}")
            (self.wrong if check else self.failed).append(line)
            self._write()

    def in_time(self, name: str, needs: float = 0, *, check: bool = False) -> bool:
        """Whether there are `needs` more seconds. If not, it is written down, as skipped or (`check`) as unchecked."""
        if self.seconds + needs <= 60 * self.plan.minutes:
            return True
        if check:
            say(f"NOT CHECKED: {name}")
            self.unchecked.append(name)
            self._write()
        else:
            self.note(f"{name}: skipped, the part's {self.plan.minutes:g} minutes are used")
        return False

    def finish(self) -> None:
        self.done = True
        self._write()

    def _write(self) -> None:
        names = ("part", "rows", "wrong", "failed", "unchecked", "skipped", "done")
        document = {name: getattr(self, name) for name in names} | {"seconds": round(self.seconds, 1)}
        whole = self.file.with_suffix(".part")
        whole.write_text(json.dumps(document) + "\n")
        whole.replace(self.file)


def say(text: str) -> None:
    print(text, flush=True)
