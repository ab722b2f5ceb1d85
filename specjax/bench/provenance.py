"""The head of every record: date, command, commit, versions and machine of a measurement."""

from __future__ import annotations

import datetime
import hashlib
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

ROOT = Path(__file__).parents[2]  # the checkout
VECTOR_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def machine(*packages: str) -> dict[str, Any]:
    """Head of a record, with the versions of jax and of `packages`."""
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
    """The checkout's commit; None for an installed package."""
    return _git("rev-parse", "HEAD") or None


def code_digest(modules: Iterable[str] = ()) -> str:
    """Digest of the source of specjax, its kernels and `modules`, committed or not."""
    digest = hashlib.sha256()
    for spec in map(importlib.util.find_spec, ("specjax", "specjax_kernels", *modules)):
        if spec is None or spec.origin is None:
            continue
        file, sources = Path(spec.origin), [Path(spec.origin)]
        if file.name == "__init__.py":
            sources = sorted(path for path in file.parent.rglob("*") if path.suffix in (".py", ".json"))
        for source in sources:
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def file_stamps(path: str) -> list[list[Any]]:
    """Name, size and modification time (ns) of each file of a local model; empty for a name on the hub."""
    root = Path(path).expanduser()
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    stamps = [(file.name, file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stamps]


def command() -> str:
    """The command line that started this program."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        program = ["python", "-m", module.name.removesuffix(".__main__")]
    else:
        program = ["specjax"] if Path(sys.argv[0]).stem == "specjax" else ["python", sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])


def processor() -> str:
    """Name and vector instructions of the CPU. Rented machines with the same name may differ in them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []

    def first(*names: str) -> str:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")

    vectors = [name for name in VECTOR_INSTRUCTIONS if name in first("flags", "Features").split()]
    return " ".join([first("model name") or platform.processor(), *vectors])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():  # an installed package may lie in another repository
        return ""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip()
