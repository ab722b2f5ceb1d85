"""Traces of a server's steps, and what `benchmarks/idle.py` reads out of them."""

from __future__ import annotations

import gzip
import importlib
import json
import time
from pathlib import Path

import pytest
from engine_helpers import shared_engine
from server_helpers import running, wait_until

from specjax.cli import serve as command
from specjax.cli.flags import ServerSettings
from specjax.serve.server_settings import MOST_TRACED

ROOT = Path(__file__).parents[2]


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("idle")


def written(folder: Path) -> set[Path]:
    """Traces, each in a form for `idle` and for Perfetto."""
    both = set(folder.rglob("*.trace.json.gz"))
    assert {file.parent for file in both} == {file.parent for file in folder.rglob("perfetto_trace.json.gz")}
    return both


def test_a_server_traces_its_first_steps_and_others_on_request(tmp_path, idle):
    settings = ServerSettings(profile=str(tmp_path / "traces"), profile_steps=6)
    with running(shared_engine("NGRAM"), settings) as server:
        server.complete(max_tokens=30, ignore_eos=True)
        wait_until(lambda: written(tmp_path))
        found = idle.idle(idle.Trace(tmp_path))
        assert found["steps"] + found["left_out"] == 5, "six begin, and the last has no end"
        assert 0 <= found["idle"] <= found["step"] and found["engine"] > 0 and 0 <= found["idle_share"] <= 1
        first = written(tmp_path)
        server.complete(max_tokens=30, ignore_eos=True)
        assert written(tmp_path) == first, "one trace, unless another is asked for"

        for body, said in (
            ({"num_steps": 0}, f"from 1 to {MOST_TRACED}"),
            ({"num_steps": "x"}, "num_steps"),
            ({"output_dir": "/tmp"}, "output_dir is not supported"),
        ):
            refused = server.post("/start_profile", body)
            assert refused.status_code == 400 and said in refused.json()["error"]["message"]
        (stamp,) = (file.parent.name for file in first)
        wait_until(lambda: time.strftime("%Y_%m_%d_%H_%M_%S") > stamp)  # the name of a trace's folder
        with server.client() as client:
            assert client.post("/start_profile").json()["success"], "as SGLang's users send it: without a body"
        refused = server.post("/start_profile", {"num_steps": 2})
        assert refused.status_code == 400 and "runs already" in refused.json()["error"]["message"]
        server.complete(max_tokens=3, ignore_eos=True)
        assert server.post("/stop_profile", {}).json()["message"] == "The trace is written."
        assert len(written(tmp_path)) == 2
        assert server.post("/stop_profile", {}).json()["message"] == "No trace was running."


def test_without_a_folder_nothing_is_traced():
    with running(shared_engine("NGRAM")) as server:
        refused = server.post("/start_profile", {})
        assert refused.status_code == 400 and "--profile FOLDER" in refused.json()["error"]["message"]
        assert server.post("/stop_profile", {}).status_code == 200


def test_requests_go_on_where_no_trace_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with running(shared_engine("NGRAM"), ServerSettings(profile=str(tmp_path / "file"))) as server:
        assert server.complete(max_tokens=3).status_code == 200
        assert server.post("/start_profile", {}).status_code == 400


@pytest.mark.parametrize(("process", "thread"), [("/device:GPU:0", "Stream #13"), ("/host:CPU", "tf_XLAEigen/7")])
def test_idle_time_of_a_trace(tmp_path, idle, process, thread):
    """Four steps of 10 ms, begun every 12 ms, in which kernels run from 1 to 5 and, in part twice, from 6 to 9; then
    one that waited for a request."""
    named = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": thread}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "M", "pid": 2, "tid": 1, "name": "thread_name", "args": {"name": "specjax-engine"}},
    ]
    events = []
    for begin in (0.0, 12e3, 24e3, 36e3, 48e3, 200e3):
        host = {"ph": "X", "pid": 2, "tid": 1}
        events += [host | {"name": "step", "ts": begin, "dur": 10e3}]
        events += [host | {"name": "wait", "ts": begin + 3e3, "dur": 6e3}]
        kernel = {"ph": "X", "pid": 1, "tid": 7, "name": "kernel"}
        times = ((1e3, 4e3), (6e3, 2e3), (7e3, 2e3))
        events += [kernel | {"ts": begin + at, "dur": duration} for at, duration in times]
    (tmp_path / "x.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [*named, *events]}).encode()))
    assert idle.idle(idle.Trace(tmp_path)) == {
        "steps": 4, "left_out": 1, "step": 12.0, "device": 7.0, "idle": 5.0, "engine": 4.0, "server": 2.0, "wait": 6.0,
        "idle_share": round(5 / 12, 4),
    }  # fmt: skip


@pytest.mark.parametrize("below", ["", "/traces"])
def test_a_folder_that_cannot_be_made(tmp_path, capsys, below):
    """Is refused before anything is loaded."""
    (tmp_path / "file").write_text("")
    folder = f"{tmp_path}/file{below}"
    assert command.main(["--port", "0", "--profile", folder]) == 2
    assert capsys.readouterr().err.startswith(f"specjax serve: --profile {folder} cannot hold traces: ")
