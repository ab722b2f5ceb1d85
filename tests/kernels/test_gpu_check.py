"""`benchmarks/gpu_check.py` in its tiny form on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_helpers import with_kernels

from specjax import gpu

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "JAX_PLATFORMS": "cpu"}
    variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the time is compilation
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | variables | environment
    )


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield importlib.import_module("gpu_check")
    for name in ("gpu_check", "model_shapes", "records", "timing"):
        sys.modules.pop(name, None)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("part", ["a", "b", "c"])
def test_a_part_in_its_tiny_form(gpu_check, tmp_path, part):
    done = run(
        str(SCRIPT), "--part", part, "--tiny", "--minutes", "30", "--save", str(tmp_path / "results"),
        SPECJAX_CACHE=str(with_kernels(tmp_path / "cache")), TMPDIR=str(tmp_path),
    )  # fmt: skip
    print(done.stdout, done.stderr[-4000:])
    assert done.returncode == 0
    (file,) = (tmp_path / "results").iterdir()
    assert file.name.startswith(f"gpu-check-{part}-cpu-")
    document = json.loads(file.read_text())
    assert document["right"] and document["commit"] and document["versions"]["jax"]
    assert f"--part {part}" in document["command"] and "--section" not in document["command"]
    sections = document["sections"]
    assert [*sections] == [*gpu_check.PARTS[part]] and sum(gpu_check.PARTS[part].values()) == 9
    for name, report in sections.items():
        assert report["done"] and report["rows"] and not report["errors"] + report["skipped"], name
        assert not any(row.get("different") for row in report["rows"]), "both are this CPU"
        assert all(row.get("milliseconds", 1) > 0 and row.get("kernels", 1) > 0 for row in report["rows"])
    if part == "b":
        starts = [next(row for row in sections[name]["rows"] if row["kind"] == "ready") for name in ("cold", "warm")]
        assert starts[0]["seconds"] > starts[1]["seconds"], "programs come from the cache"


def test_xla_accepts_every_option(gpu_check):
    """Each version of jax has one of the modes of graph updates."""
    options = [option for change in gpu_check.OPTIONS.values() for option in change.items()]
    unknown = [option for option in options if not gpu.accepts(*option)]
    assert len(unknown) <= 1 and all(name == gpu_check.UPDATE_MODE for name, _ in unknown)


def test_without_a_gpu(tmp_path):
    done = run(str(SCRIPT), "--part", "a", "--save", str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr and "--tiny" in done.stderr
    assert not [*tmp_path.glob("gpu-check-*.json")]
