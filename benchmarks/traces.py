"""Reading the traces that `jax.profiler` writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Trace:
    """The newest trace in a folder: its complete events, in microseconds."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
        if not files:
            raise FileNotFoundError(f"there is no *.trace.json.gz in {folder}")
        self.file = files[-1]
        found = json.loads(gzip.decompress(self.file.read_bytes()))["traceEvents"]
        self._processes = {each["pid"]: each["args"]["name"] for each in found if each.get("name") == "process_name"}
        named = [each for each in found if each.get("name") == "thread_name"]
        self._threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in named}
        self.on_gpu = any("GPU" in name for name in self._processes.values())
        self.events: list[Event] = [each for each in found if each.get("ph") == "X"]

    def device(self) -> list[Event]:
        """Those of the device's streams; on a CPU of XLA's threads."""

        def of_device(event: Event) -> bool:
            process = self._processes.get(event["pid"], "")
            thread = self._threads.get((event["pid"], event["tid"]), "")
            return ("GPU" in process and "Stream" in thread) if self.on_gpu else ("XLA" in thread or "tf_" in thread)

        return [event for event in self.events if of_device(event)]
