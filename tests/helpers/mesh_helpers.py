"""Runs programs of this folder on several devices, in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import train_helpers


def environment() -> dict[str, str]:
    """`train_helpers.environment`, with the modules of the tests on Python's path."""
    variables, folders = train_helpers.environment(), Path(__file__).parents[1].iterdir()
    paths = [variables["PYTHONPATH"], *(str(folder) for folder in folders if folder.is_dir())]
    return variables | {"PYTHONPATH": os.pathsep.join(paths)}


def run(*cases: list[Any], program: str = "mesh_program.py") -> list[dict[str, Any]]:
    """Runs all cases in one process; returns a result per case."""
    command = [sys.executable, "-W", "error:Some donated buffers", str(Path(__file__).with_name(program))]
    done = subprocess.run(
        [*command, *map(json.dumps, cases)], capture_output=True, text=True, env=environment(), timeout=900
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
