"""`benchmarks/gpu_check.py`, which is for machines with a GPU: every part of it, in a tiny form, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
PARTS = ("kernels", "lossless", "attention", "steps-1", "steps-8", "steps-64", "peer", "memory")
ABSENT = ("fastapi", "uvicorn", "pydantic", "openai", "gguf", "tokenizers", "beartype")
"""Packages that a lent machine with a GPU does not have."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # Its own folders only, as on a machine where nothing is installed. Compiling little is what makes it quick.
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "JAX_PLATFORMS": "cpu"}
    variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | variables | environment
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, dict]:
    """What a tiny run of all parts has printed, and its document."""
    folder = tmp_path_factory.mktemp("gpu_check")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = run(
        str(SCRIPT), "--tiny", "--implementation", "xla", "--minutes", "30", "--save", str(folder / "saved"),
        SPECJAX_CACHE=str(folder / "models"), **cache,
    )  # fmt: skip
    print(done.stdout)
    print(done.stderr[-4000:])
    assert done.returncode == 0, "something was wrong"
    document = json.loads(done.stdout.splitlines()[-1])
    saved = {file.stem for file in (folder / "saved").glob("*.json")}
    assert saved == {*PARTS, "machine"}
    return done.stdout, document


def test_every_part_runs_to_its_end(tiny):
    text, document = tiny
    assert document["right"] is True
    assert tuple(document["parts"]) == PARTS
    for name, report in document["parts"].items():
        assert report["done"], name
        assert report["wrong"] == [] and report["failed"] == [], name
        # torch and transformers are not in every environment; everything else is.
        assert report["rows"] or name == "peer", name
    assert "FAILED" not in text and "WRONG" not in text


def test_what_a_tiny_run_finds(tiny):
    parts = tiny[1]["parts"]
    errors = parts["kernels"]["rows"]
    assert {row["dtype"] for row in errors} == {"float32", "bfloat16", "float16"}
    assert {row["implementation"] for row in errors} == {"xla"}
    assert all(row["right"] and row["relative"] < 1e-2 for row in errors)
    texts = [row for row in parts["lossless"]["rows"] if row["dtype"] == "float32"]
    assert {row["algorithm"] for row in texts} == {"NONE", "NGRAM", "EAGLE3 tree"}
    assert all(row["equal"] + len(row["partings"]) == row["prompts"] for row in texts)
    assert max(row["accept_length"] for row in texts) > 1, "something is accepted, so there is something to compare"
    assert any("SmolLM2: not there" in line for line in parts["lossless"]["skipped"])
    for name, batch in (("steps-1", 1), ("steps-8", 2), ("steps-64", 2)):
        steps = [row for row in parts[name]["rows"] if row["kind"] == "step"]
        assert [row["tree"] for row in steps] == [None, [2, 2, 5]]
        assert all(row["batch"] == batch and row["milliseconds"] > 0 for row in steps)
        assert steps[0]["ratio_to_plain"] == 1
    assert {row["kind"] for row in parts["attention"]["rows"]} == {"ceiling", "attention"}
    copies = [row for row in parts["memory"]["rows"] if row["kind"] == "step memory"]
    assert all(row["alias_bytes"] >= row["state_bytes"] > 0 for row in copies)


def test_several_implementations():
    """Pallas runs in its interpreter here, so not all parts."""
    done = run(str(SCRIPT), "--tiny", "--part", "kernels", "--implementation", "pallas", "xla", "--minutes", "30")
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    (report,) = json.loads(done.stdout.splitlines()[-1])["parts"].values()
    assert {row["implementation"] for row in report["rows"]} == {"pallas", "xla"}


def test_without_a_gpu_it_says_what_it_needs():
    done = run(str(SCRIPT), "--part", "kernels")
    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr and "--tiny" in done.stderr
    assert "kernels" not in done.stdout


def test_an_unknown_implementation_is_wrong_and_not_passed_over():
    done = run(str(SCRIPT), "--tiny", "--part", "kernels", "--implementation", "nonesuch")
    assert done.returncode == 1
    assert "WRONG: nonesuch took none of the specs" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["right"] is False


def test_it_needs_no_web_framework_no_gguf_and_no_tokenizers():
    """Nor does the engine."""
    modules = ["specjax.engine", "specjax.checkpoint"]
    modules += ["gpu_check", "gpu_check_kernels", "gpu_check_lossless", "gpu_check_steps", "gpu_check_peer"]
    code = f"""
import sys
sys.modules |= dict.fromkeys({ABSENT!r})
sys.path.insert(0, {str(SCRIPT.parent)!r})
import importlib
for name in {modules!r}:
    importlib.import_module(name)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_part_that_crashes_is_wrong_except_the_peer(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    (tmp_path / "kernels.json").write_text('{"part": "kernels", "rows": [1], "wrong": [], "done": false}')
    found = gpu_check.collect(tmp_path, ["kernels", "memory", "peer"], {"kernels": -11, "memory": 124, "peer": 124})
    assert found["kernels"]["rows"] == [1], "what it had found is kept"
    assert found["kernels"]["wrong"] == ["kernels: the process ended with status -11"]
    assert found["memory"]["wrong"] == ["memory: the process took too long and was ended"]
    assert found["peer"]["wrong"] == [] and len(found["peer"]["skipped"]) == 1
