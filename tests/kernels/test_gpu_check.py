"""`benchmarks/gpu_check.py` and `gpu_tune.py` in their tiny forms on a CPU."""

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
from specjax.drafters import DRAFTERS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "JAX_PLATFORMS": "cpu"}
    variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the time is compilation
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | variables | environment
    )


MODULES = ("gpu_check", "gpu_steps", "gpu_tune", "kernels", "model_shapes", "records", "timing")


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield importlib.import_module("gpu_check")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def gpu_tune(gpu_check):
    return importlib.import_module("gpu_tune")


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
        assert all(row["host_milliseconds"] <= max(row["samples_ms"]) for row in report["rows"] if "samples_ms" in row)
    if part == "a":
        cases = ["plain", "(7, 1, 8)", "(5, 8, 32)", *(["block head"] if "DFLASH" in DRAFTERS else [])]
        assert all([row["case"] for row in sections[name]["rows"]] == cases for name in ("llama", "qwen"))
    if part == "c":
        rows = sections["sizes"]["rows"]
        assert [row["nodes"] for row in rows] == [1, 2, 3, 4, 8] and sum(row["share"] for row in rows) == 1
    if part == "b":
        starts = [next(row for row in sections[name]["rows"] if row["kind"] == "ready") for name in ("cold", "warm")]
        assert [row["programs"] for row in starts] == [2, 2]
        assert starts[0]["cached"] == 0 < starts[1]["cached"], "programs come from the cache"


def test_xla_accepts_every_option(gpu_check):
    """Each version of jax has one of the modes of graph updates."""
    options = [option for change in gpu_check.OPTIONS.values() for option in change.items()]
    unknown = [option for option in options if not gpu.accepts(*option)]
    assert len(unknown) <= 1 and all(name == gpu_check.UPDATE_MODE for name, _ in unknown)


def test_without_a_gpu(tmp_path):
    done = run(str(SCRIPT), "--part", "a", "--save", str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert "gpu_check.py needs an NVIDIA GPU" in done.stderr and "--tiny" in done.stderr
    assert not [*tmp_path.glob("gpu-*.json")]


@pytest.mark.process
@pytest.mark.slow
def test_tuning_in_its_tiny_form(tmp_path):
    done = run(str(SCRIPT.parent / "gpu_tune.py"), "--tiny", "--save", str(tmp_path), TMPDIR=str(tmp_path))
    print(done.stdout, done.stderr[-4000:])
    assert done.returncode == 0
    (file,) = tmp_path.glob("gpu-tune-cpu-*.json")
    document = json.loads(file.read_text())
    assert document["done"] and not document["errors"] + document["skipped"] and document["machine"]["commit"]
    kinds = {row["kind"] for row in document["rows"]}
    assert kinds == {"product", "padding", "blocks", "option", "step"}
    assert all(row["share_of_copy"] > 0 for row in document["rows"] if row["kind"] in ("product", "blocks"))
    drafted = [row for row in document["rows"] if row["kind"] == "step" and row["tree"]]
    assert len(drafted) == 4 and all(row["estimated_ratio"] > 1 for row in drafted)


def test_rows_of_a_product_to_pad(gpu_tune):
    times = dict(zip(range(1, 9), (5.0, 5.0, 5.1, 5.2, 11.0, 11.1, 11.2, 5.3), strict=True))
    assert gpu_tune.better_padded(times) == {5: 8, 6: 8, 7: 8}
    assert gpu_tune.better_padded({1: 5.1, 2: 5.0}) == {}, "within the noise"


def test_table_of_block_sizes(gpu_tune, tmp_path):
    """Other entries stay; small gains and unknown devices are left out."""
    launch = gpu_tune.launch
    usual = launch.rule_of_thumb("bfloat16", 128, 32, "9.0")
    tried = gpu_tune.candidates(usual, 32)
    assert tried[0] == usual and len(set(tried)) == len(tried) > 10
    assert all(blocks.rows <= 32 for blocks in tried) and {blocks.stages for blocks in tried} >= {2, 3, 4}
    file = tmp_path / "table.json"
    file.write_text('{"8.0": {"a": 1}}')
    better = {**vars(usual), "tokens": 128}
    row = {"kind": "blocks", "generation": "9.0", "key": launch.key("bfloat16", 128, 32), "blocks": better, "gain": 0.1}
    rows = [row, row | {"key": "b", "gain": 0.01}, row | {"generation": ""}, {"kind": "product"}]
    assert gpu_tune.write_table(rows, file) == 1
    assert json.loads(file.read_text()) == {"8.0": {"a": 1}, "9.0": {row["key"]: better}}
