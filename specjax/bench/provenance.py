"""The head of every record: when, where, with what and by which command a figure was measured."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from specjax.fleet.agreement import hash_of, source_files

ROOT = Path(__file__).parents[2]  # of a checkout


def machine(*packages: str) -> dict[str, Any]:
    """This machine, these versions (jax and `packages`), this commit and command."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
        "commit": commit(),
        "modified": _git("status", "--porcelain", "--", ":/specjax", ":/kernels").splitlines(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("jax", *packages)},
        "device": jax.devices()[0].device_kind,
        "processor": processor(),
        "cpus": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def commit() -> str | None:
    """The checkout's commit; None: this is an installed package."""
    return _git("rev-parse", "HEAD") or None


def code_digest(modules: Iterable[str] = ()) -> str:
    """Of the source of specjax, of its kernels and of these modules, whether committed or not."""
    origins = [Path(spec.origin) for name in modules if (spec := importlib.util.find_spec(name)) and spec.origin]
    theirs = [
        file
        for origin in origins
        for file in (sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin])
    ]
    return hash_of([*source_files(), *theirs])[:16]


def file_stamps(path: str) -> list[list[Any]]:
    """Name, size and time of change (ns) of each file of a local model; none for a name of the hub."""
    place = Path(path).expanduser()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    stamps = [(file.name, file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stamps]


def command() -> str:
    """How this program was started."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        started = ["python", "-m", module.name.removesuffix(".__main__")]
    else:
        started = ["specjax"] if Path(sys.argv[0]).stem == "specjax" else ["python", sys.argv[0]]
    return shlex.join([*started, *sys.argv[1:]])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():  # an installed package may lie in someone else's repository
        return ""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()


VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def processor() -> str:
    """The CPU's name, where Linux tells it, and its vector instructions: rented machines of one name differ in them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []

    def first(*names: str) -> str:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")

    vectors = [name for name in VECTORS if name in first("flags", "Features").split()]
    return " ".join([first("model name") or platform.processor(), *vectors])
