"""`benchmarks/soak.py`: a few requests to a server in this process, and what each of its checks finds."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soak_program
from engine_helpers import END, LETTERS, NGRAM, make_engine
from server_helpers import Running, running
from tool_helpers import tool_tokenizer
from toy_models import table_model

from specjax.cli import serve
from specjax.engine.generation import DeltaReader

ROOT = Path(__file__).parents[2]
CORPUS = "one two three, 1 2 3; " * 50
COUNT = 60


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Over a table model that writes bytes."""
    table = np.random.default_rng(0).normal(0, 2, (61, len(tool_tokenizer())))
    table[:, tool_tokenizer().convert_tokens_to_ids(LETTERS)] += 6
    engine = make_engine(
        table_model(table.astype(np.float32)), NGRAM, tokens=tool_tokenizer(), eos=(END,), page_size=16,
        max_total_tokens=1536, context_length=1024, chunked_prefill_size=256, retract_every=5,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "extensions", soak_program.extensions)
        with running(engine) as served:
            yield served


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("soak")
        for name in ("soak", "mixed_requests", "records", "serving"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def expected(server, soak) -> list[str]:
    return asyncio.run(soak.texts_alone(server.base, 20, CORPUS))


@pytest.fixture
def run(server, soak, expected, monkeypatch) -> Any:
    """Soaks the server and returns the result. `more`: fields of `Soak`."""
    monkeypatch.setattr(soak, "MIN_REQUESTS", {"memory": 3_000})

    def soaked(**more: Any) -> dict[str, Any]:
        options = {"fail_every": 20, "concurrency": 8, "expected": expected} | more
        return asyncio.run(soak.soak(server.base, os.getpid(), CORPUS, COUNT, **options))

    return soaked


def test_requests_end_and_texts_are_equal(run, expected):
    result = run()
    assert result["checks"] == {"ended": True, "texts": True, "state": True, "memory": None, "forced": True}, result
    ends = {mode: sum(counts.values()) for mode, counts in result["ends"].items()}
    assert set(ends) == {"answer", "abort", "leave", "wrong", "sample"}
    assert result["requests"] == COUNT and ends["sample"] >= len(expected)
    assert result["retractions"] > 0 and result["state"]["after"]["sequences"] == 0
    json.dumps(result)


def test_kinds_of_requests(soak, expected):
    """The sample has all routes, streams and answers, and its texts are not empty."""
    requests = [soak.sample_request(place, CORPUS) for place in range(20)]
    assert {request.path for request in requests} == {
        "/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
    }  # fmt: skip
    assert {request.body["stream"] for request in requests} == {True, False}
    assert requests == [soak.sample_request(place, CORPUS) for place in range(20)]
    assert sum(not text for text in expected) < 5


def test_other_text_is_found(run, expected):
    result = run(expected=[*expected[:-1], "another"])
    assert result["checks"]["texts"] is False and len(result["different"]) == 1
    assert result["different"][0]["expected"] == "another"


def test_lost_page_is_found(run, server):
    pages, take = server.engine.scheduler.free_pages, iter([True])
    step, lost = server.engine.step, []

    def lose() -> Any:
        if pages and next(take, False):
            lost.append(pages.pop())
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine, "step", lose)
        result = run()
    pages.extend(lost)
    assert result["checks"]["state"] is False and "a page is lost" in result["state"]["after"]["problem"]


def test_error_that_was_not_injected_is_found(run, monkeypatch):
    take, left = DeltaReader.take, iter([True])

    def fail(reader: Any, *others: Any) -> Any:
        if next(left, False):
            raise RuntimeError("no text")
        return take(reader, *others)

    monkeypatch.setattr(DeltaReader, "take", fail)
    result = run()
    assert result["checks"]["ended"] is False and len(result["problems"]) == 1, result["problems"]


@pytest.mark.parametrize(("megabytes", "found"), [(0.5, False), (2.0, True)])
def test_growth_of_memory(soak, megabytes, found):
    samples = [(done, 500 + megabytes * done / 10_000 + 0.3 * (done % 3)) for done in range(0, 10_000, 50)]
    slope = soak.growth(samples)
    assert slope == pytest.approx(megabytes, abs=0.2) and (slope > soak.MAX_SLOPE) is found


@pytest.mark.process
@pytest.mark.slow
def test_servers_of_several_algorithms(tmp_path):
    argv = ["--requests", "160", "--algorithms", "EAGLE3", "DFLASH", "--fail-every", "30", "--sample", "30"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "SPECJAX_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *argv], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert list(document["servers"]) == ["EAGLE3", "DFLASH"]
    for result in document["servers"].values():
        assert result["accept_length"] > 1, "no draft was accepted"
        assert False not in result["checks"].values(), result
