"""Runs programs of this folder on several devices, in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax


def environment() -> dict[str, str]:
    """Environment of a CPU process with both packages, the modules of the tests and the compilation cache."""
    root = Path(__file__).parents[2]
    paths = [root, root / "kernels", *(folder for folder in (root / "tests").iterdir() if folder.is_dir())]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    variables |= {"JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"])}
    return variables | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def run(*cases: list[Any], program: str = "mesh_program.py") -> list[dict[str, Any]]:
    """Runs all cases in one process; returns a result per case."""
    command = [sys.executable, "-W", "error:Some donated buffers", str(Path(__file__).with_name(program))]
    done = subprocess.run(
        [*command, *map(json.dumps, cases)], capture_output=True, text=True, env=environment(), timeout=900
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
