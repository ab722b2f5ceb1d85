"""The head of every record: when, where, with what and by which command a figure was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"

DATA = Path(__file__).parent / "data"
"""Evaluation prompts: SET.jsonl files, one object with `id`, `category` and `turns` a line."""


def machine(*packages: str) -> dict[str, Any]:
    """This machine, these versions (jax and `packages`), this commit and command."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent)
        except OSError:  # there is no git
            return ""
        return done.stdout.strip()

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
        "commit": git("rev-parse", "HEAD") or None,
        "modified": git("status", "--porcelain", "--", ":/specjax", ":/kernels").splitlines(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", *packages)},
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def command() -> str:
    """How this program was started."""
    return shlex.join(["python", *sys.argv])


def finish(name: str, document: dict[str, Any], *, record: bool | str | None) -> None:
    """Prints a document as one JSON line, the last of the output; with `record` also writes it under results/: a day's
    one of this name or, where `record` is a label, of this name and label."""
    if record is not None and record is not False:
        RESULTS.mkdir(exist_ok=True)
        label = f"-{record}" if isinstance(record, str) and record else ""
        file = RESULTS / f"{name}-{document['date'][:10]}{label}.json"
        file.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {file}")
    print(json.dumps(document))


VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def _processor() -> str:
    """The CPU's name, where Linux tells it, and its vector instructions: rented machines of one name differ in them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []

    def first(*names: str) -> str:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")

    vectors = [name for name in VECTORS if name in first("flags", "Features").split()]
    return " ".join([first("model name") or platform.processor(), *vectors])
