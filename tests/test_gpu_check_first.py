"""`benchmarks/gpu_check.py --plan first`: what it makes of traces and reports, and (slow) the whole plan, tiny."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path

import pytest
from test_gpu_check import ROOT, SCRIPT, run


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_the_plan_takes_half_an_hour_and_its_flags_are_known(benchmark):
    check = benchmark("gpu_check")
    minutes = sum(minutes for minutes, _ in check.FIRST.values())
    assert minutes <= 30 and next(iter(check.FIRST)) == "sampled", "the most valuable first"
    known = check.PARTS | check.FIRST_PARTS
    for name, (minutes, flags) in check.FIRST.items():
        given = check.flags().parse_args(["--part", name, "--minutes", str(minutes), *flags.split()])
        assert given.part == [name] and given.minutes == minutes
        module, function, _ = known[name]
        assert callable(getattr(benchmark(module), function))


def trace(folder: Path, process: str, thread: str) -> Path:
    other = {"ph": "X", "pid": 2, "tid": 1, "name": "python", "dur": 1e6}
    named = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": thread}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "M", "pid": 2, "tid": 1, "name": "thread_name", "args": {"name": "python"}},
    ]
    times = {"product": (300.0, 100.0, 200.0), "norm": (5.0, 5.0)}
    events = [{"ph": "X", "pid": 1, "tid": 7, "name": name, "dur": dur} for name in times for dur in times[name]]
    begun = {"ph": "B", "pid": 1, "tid": 7, "name": "product"}
    file = folder / "plugins" / "profile" / "machine.trace.json.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": [*named, *events, begun, other]}).encode()))
    return folder


@pytest.mark.parametrize(
    ("process", "thread"), [("/device:GPU:0", "Stream #13(Kernel)"), ("/host:CPU", "tf_XLAEigen/7")]
)
def test_a_trace_is_summed_by_kernel(benchmark, tmp_path, process, thread):
    first = benchmark("gpu_check_first")
    rows = first.by_kernel(first.Trace(trace(tmp_path, process, thread)).device(), steps=2)
    assert rows == [
        {"kernel": "product", "milliseconds": 0.3, "calls": 1.5},
        {"kernel": "norm", "milliseconds": 0.005, "calls": 1},
    ]


def test_the_table_shows_every_part_and_what_failed(benchmark):
    first = benchmark("gpu_check_first")
    step = {
        "kind": "step", "batch": 1, "context": 1024, "tree": [7, 1, 8], "milliseconds": 5.5, "ratio_to_plain": 1.21,
        "share_of_ceiling": 0.82,
    }  # fmt: skip
    kernel = {"kernel": "loop_fusion", "milliseconds": 1.25, "calls": 32.0}
    rows = {
        "steps-1": [step, step | {"tree": None, "ratio_to_plain": 1.0}],
        "profile": [{"kind": "profile", "tree": None, "milliseconds": 1.25, "kernels": [kernel]}],
        "products": [
            {
                "kind": "product",
                "shape": "qkv",
                "rows": 8,
                "microseconds": 12.5,
                "share_of_copy": 0.9,
            }
        ],
        "options": [{"kind": "option", "tree": None, "change": "no graphs", "milliseconds": 7.0, "ratio": 1.4}],
    }
    empty = {"rows": [], "wrong": [], "failed": [], "skipped": [], "done": True, "seconds": 1.0}
    parts = {name: empty | {"rows": found} for name, found in rows.items()}
    parts["sampled"] = empty | {"done": False, "wrong": ["sampled: the process ended with status -11"], "rows": []}
    text = first.table({"device": "NVIDIA H200", "date": "2026-01-02", "commit": "abc", "parts": parts})
    for expected in (
        "| sampled | **no** | 1 | sampled: the process ended with status -11 |",
        "| 1 | 1024 | 7,1,8 | 5.500 | 1.210 | 82.0% |",
        "| 1 | 1024 | plain | 5.500 | 1.000 | 82.0% |",
        "| plain | loop_fusion | 1.2500 | 32 |",
        "| qkv | 8 | 12.5 | 90.0% |",
        "| plain | no graphs | 7.000 | 1.400 |",
    ):
        assert expected in text.splitlines(), expected


@pytest.mark.process
@pytest.mark.slow
def test_the_whole_plan_runs_in_a_tiny_form(tmp_path):
    done = run(
        str(SCRIPT), "--plan", "first", "--tiny", "--implementation", "xla", "--minutes", "30", "--layers", "1",
        "--save", str(tmp_path / "saved"), SPECJAX_CACHE=str(tmp_path / "none"),
    )  # fmt: skip
    print(done.stdout[-4000:], done.stderr[-4000:])
    assert done.returncode == 0
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["right"] and document["complete"]
    parts = document["parts"]
    assert [*parts] == [
        "sampled",
        "kernels",
        "steps-1",
        "profile",
        "products",
        "options",
        "steps-64",
        "steps-48",
    ]
    assert all(report["done"] and not report["wrong"] + report["failed"] for report in parts.values())
    assert {row["algorithm"] for row in parts["sampled"]["rows"]} == {"NONE", "NGRAM", "EAGLE3"}
    assert all(not row["parted"] for row in parts["sampled"]["rows"]), "both are this CPU"
    assert len([*(tmp_path / "saved").glob("gpu-check-first-*.md")]) == 1
