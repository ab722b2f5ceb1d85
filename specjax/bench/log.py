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
        self.identity = identity = dict(json.loads(json.dumps(identity)))
        file = folder / CONFIG
        if file.exists():
            self._compare(json.loads(file.read_text(encoding="utf-8")), identity)
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--output {folder} is not empty, and holds no {CONFIG}; name another folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(identity, indent=1) + "\n")
        self._read()

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"--output {self.folder} holds runs with another {name}: {before.get(name)!r:.200}, not "
                    f"{now.get(name)!r:.200}; name another folder, or remove this one"
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
        """Writes a part, which is there after a crash, too."""
        with (self.folder / RUNS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
            file.flush()
        self._found[_hashable(key)] = json.loads(json.dumps(value))


def _hashable(key: Any) -> Hashable:
    return tuple(map(_hashable, key)) if isinstance(key, list | tuple) else key
