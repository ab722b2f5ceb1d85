"""docs/scale.md holds what its records say, and `benchmarks/scale.py` computes by hand's figures."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import scale
from full_table import END, put
from scale_models import models
from scale_tables import PAGE, fill, mark, sections

from specjax.costs import Decoding, machine, step_cost
from specjax.devices import DEVICES

ROOT = Path(__file__).parent.parent
MODELS = models()
H200, H100 = DEVICES["H200"], DEVICES["H100"]
ON = machine(H200, "bfloat16", "gpu")
RECORDS = sorted(set(re.findall(r"benchmarks/results/((?:scale|router-cache)-\d[\w-]+\.json)", PAGE.read_text())))


def read(record: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / record).read_text())


def test_the_page_names_its_records():
    assert [name for name in RECORDS if name.startswith("scale")] and len(RECORDS) == 4


@pytest.mark.parametrize("record", RECORDS)
def test_the_page_is_what_the_record_says(record):
    text, document = PAGE.read_text(encoding="utf-8"), read(record)
    for name, section in sections(record, document).items():
        assert put(text, section, mark(name)) == text, f"run the script with --page benchmarks/results/{record}"


def test_every_mark_is_filled_by_a_record():
    filled = {name for record in RECORDS for name in sections(record, read(record))}
    text = PAGE.read_text()
    assert {mark(name) for name in filled} == set(re.findall(r"<!-- scale: .* -->", text))
    assert text.count(END) == len(filled)


def test_a_page_is_filled(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# A\n{mark('x')}\nold\n{END}\nb\n{mark('y')}\n{END}\n")
    fill({"y": "new y", "x": "new x"}, page)
    assert page.read_text() == f"# A\n{mark('x')}\n\nnew x\n{END}\nb\n{mark('y')}\n\nnew y\n{END}\n"
    with pytest.raises(ValueError, match="scale: z"):
        fill({"z": ""}, page)


def test_requests_that_fit_by_hand():
    """8B on an H200: 0.85 * 141 GB less 16.93 GB, by 2,048 tokens of 131,072 bytes and 4,096 of the head's pages."""
    weights = scale.held_bytes(MODELS["8b"], 1)
    room = 0.85 * 141e9 - weights
    assert scale.requests_that_fit(MODELS["8b"], H200, 1, 2048) == int(room / (2048 * (131072 + 4096)))
    assert scale.requests_that_fit(MODELS["70b"], H200, 1, 2048) == -1
    assert scale.requests_that_fit(MODELS["deepseek-v3"], H100, 8, 2048) == -1
    assert scale.token_bytes(MODELS["deepseek-v3"], 8) == 62 * 576 * 2


@pytest.mark.parametrize(("batch", "replicas", "each"), [(1, 4, [1, 0, 0, 0]), (9, 2, [5, 4]), (8, 8, [1] * 8)])
def test_requests_divided_over_replicas(batch, replicas, each):
    assert scale.divided(batch, replicas) == each


def arguments(**given) -> argparse.Namespace:
    defaults = {"tp": [1, 2, 4, 8], "batches": [1, 64], "context": 2048, "price": 3.6}
    return argparse.Namespace(**defaults | given)


def test_cost_is_price_over_tokens():
    rows = {(row["tp"], row["batch"]): row for row in scale.cells(MODELS["70b"], H200, ON, arguments())}
    assert "plain" not in rows[1, 1] and rows[1, 1]["fits"] == -1, "does not fit: said, not computed"
    for (devices, batch), row in rows.items():
        if devices == 1:
            continue
        plain = step_cost(Decoding.of(MODELS["70b"].outline, devices), ON, batch=batch, context=2048)
        assert row["plain"]["milliseconds"] == pytest.approx(1e3 * plain.seconds, abs=1e-3)
        tokens_an_hour = 3600 * batch / plain.seconds
        assert row["plain"]["dollars_per_million"] == pytest.approx(1e6 * devices * 3.6 / tokens_an_hour, abs=1e-3)
        assert row["drafted"]["tokens_per_second"] >= row["plain"]["tokens_per_second"]
    few = [*scale.cells(MODELS["70b"], H200, ON, arguments(tp=[2], batches=[141]))]
    assert few[0]["fits"] == 140 and "plain" not in few[0]


def test_replicas_add_up():
    """Eight of one GPU have eight times the rate of one with an eighth of the requests; too large ones are left out."""
    row = next(scale.arrangements(MODELS["8b"], H200, ON, arguments(batches=[64]), gpus=8))
    one = scale.best_steps(MODELS["8b"], Decoding.of(MODELS["8b"].outline), ON, 8, 2048)[1]
    assert row["tokens_per_second"]["1"] == pytest.approx(8 * one.rate(MODELS["8b"].accept(one.tree)), rel=1e-4)
    found = next(scale.arrangements(MODELS["70b"], H200, ON, arguments(batches=[64]), gpus=8))
    seventy = found["tokens_per_second"]
    assert seventy["1"] is None and seventy["2"] > seventy["8"] > 0


def test_experts_that_a_step_reads():
    rows = {row["batch"]: row for row in scale.experts_read(MODELS["deepseek-v3"], [1, 10_000])}
    assert rows[1]["experts"] == 8 and rows[10_000]["experts"] == 256
    assert not [*scale.experts_read(MODELS["8b"], [1])]
    held = scale.held_bytes(MODELS["deepseek-v3"], 8) / 1e9
    assert rows[1]["weights_gb"] < 7 and held - 2 < rows[10_000]["weights_gb"] < held, "all but the draft and embedding"


def test_a_record_is_written_by_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(scale.finish.__globals__, "RESULTS", tmp_path)
    given = ["scale.py", "--models", "8b", "--devices", "H100", "--tp", "1", "16", "--batches", "1", "64",
             "--gpus", "16", "--price", "2", "--link", "1e11", "--record", "test"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", given)
    scale.main()
    document = json.loads(next(tmp_path.glob("scale-*-test.json")).read_text())
    assert document["fabric"]["link"] == 1e11 and document["prices"] == {"H100": 2.0}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document
    found = sections("scale-x-test.json", document)
    assert found["Llama-3.1-8B"].startswith("| tokens/s, batch | tp 1 | tp 16 |") and "16 x tp 1" in found["replicas"]
