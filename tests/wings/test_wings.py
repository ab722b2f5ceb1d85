"""The trunk works without each of the wings: folders that use its public names, and that it does not import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_helpers import environment
from test_toy_drafter import WINGS

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
ROUTES = {"/v1/responses": "serve/dialects", "/v1/messages": "serve/dialects", "/v1/loads": "fleet"}
"""Routes of wings. `specjax.cli` adds them to the application."""


@pytest.mark.process
@pytest.mark.parametrize("wing", WINGS)
def test_trunk_without_wing(wing, tmp_path):
    for package in ("specjax", "kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "heads"))
    shutil.rmtree(tmp_path / "specjax" / wing)
    paths = os.pathsep.join(map(str, (tmp_path, tmp_path / "kernels", HELPERS)))
    command = [sys.executable, str(HELPERS / "wings_program.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment() | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    served = json.loads(done.stdout.splitlines()[-1])
    for path, owner in ROUTES.items():
        assert (path in served) == (wing not in (owner, "cli")), path
