"""The log of a comparison: what was asked in `config.json`, and each measured part in a line of `runs.jsonl`.

A run that was cut off goes on where it stopped: parts that the log holds are not measured again. A folder belongs to
one configuration; another one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoint.files import write_text

CONFIG, RUNS = "config.json", "runs.jsonl"


class Log:
    """The folder of one comparison.

    Args:
        identity: all that the figures depend on; JSON values.

    Raises:
        ValueError: the folder holds the runs of another configuration, or something else.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self._found: dict[Hashable, Any] = {}
        self.identity = dict(json.loads(json.dumps(identity)))
        if not self._agree() and folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--output {folder} is not empty, and holds no {CONFIG}; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._read()

    def _agree(self) -> bool:
        """Whether the folder belongs to this configuration; False: to none. Raises ValueError: to another."""
        if not (file := self.folder / CONFIG).exists():
            return False
        self._compare(json.loads(file.read_text(encoding="utf-8")), self.identity)
        return True

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                old, new = _apart(before.get(name), now.get(name))
                raise ValueError(
                    f"--output {self.folder} holds runs with another {name}: {old!r:.200}, not {new!r:.200}; name "
                    "another folder, or remove this one"
                )

    def _read(self) -> None:
        file = self.folder / RUNS
        if not file.exists():
            return
        raw = file.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]  # a run that was killed may have left half a line
        if len(whole) < len(raw):
            file.write_bytes(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            self._found[_hashable(entry["key"])] = entry["value"]

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return _hashable(key) in self._found

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self._found[_hashable(key)]

    def add(self, key: tuple[Any, ...], value: Any) -> None:
        """Writes a part, which is there after a crash, too. The first one takes the folder: a comparison that fails
        before it leaves the folder free. Raises ValueError where another one has taken it meanwhile."""
        if not self._found and not self._agree():
            write_text(self.folder / CONFIG, json.dumps(self.identity, indent=1) + "\n")
        with (self.folder / RUNS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
            file.flush()
        self._found[_hashable(key)] = json.loads(json.dumps(value))


def _hashable(key: Any) -> Hashable:
    return tuple(map(_hashable, key)) if isinstance(key, list | tuple) else key


def _apart(old: Any, new: Any) -> tuple[Any, Any]:
    """Two values that differ, of two lists what only one of them has, of two mappings the entries that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
        first, second = ({key: each[key] for key in keys if key in each} for each in (old, new))
        return first, second
    if isinstance(old, list) and isinstance(new, list):
        left, right = [each for each in old if each not in new], [each for each in new if each not in old]
        return (left, right) if left or right else (old, new)
    return old, new
