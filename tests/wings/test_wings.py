"""The trunk works without each of the wings: folders that use its public names, and that it does not import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_toy_drafter import WINGS

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
ROUTES = {"/v1/responses": "serve/dialects", "/v1/messages": "serve/dialects", "/v1/loads": "fleet"}
"""Routes of wings. `specjax.cli` adds them to the application."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Compiled programs, which all copies share."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.process
@pytest.mark.parametrize("wing", WINGS)
def test_trunk_without_wing(wing, tmp_path, cache):
    for package in ("specjax", "kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "heads"))
    shutil.rmtree(tmp_path / "specjax" / wing)
    paths = os.pathsep.join(map(str, (tmp_path, tmp_path / "kernels", HELPERS)))
    environment = os.environ | {
        "PYTHONPATH": paths,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(HELPERS / "wings_program.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    served = json.loads(done.stdout.splitlines()[-1])
    for path, owner in ROUTES.items():
        assert (path in served) == (wing not in (owner, "cli")), path
