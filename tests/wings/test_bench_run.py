"""`specjax bench` on a tiny model: its files, a second run, and errors."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from generate_helpers import saved_model, saved_prompts

from specjax.bench.__main__ import main

NGRAM = "NGRAM:nodes=4,max_match=4,capacity=4096,name=n-grams"
FILES = {"runs.jsonl", "results.json", "table.md"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture
def bench(model, tmp_path):
    prompts = saved_prompts(tmp_path, 3)

    def call(*flags, methods=("none", NGRAM)):
        shared = ["--model", model, "--sets", prompts, "--output", str(tmp_path / "out"), "--max-new-tokens", "8"]
        return main([*shared, "--no-progress", "--methods", *methods, *flags])

    return call


def test_a_comparison(bench, tmp_path, capsys):
    temperatures = ("--temperatures", "0", "1")
    assert bench(*temperatures, "--plots", "none", "--ignore-eos") == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["rows"] == 4
    folder = tmp_path / "out"
    assert out.startswith("set ") and max(map(len, out.splitlines()[:6])) <= 100
    assert f"All columns: {folder / 'table.md'}" in out
    assert {file.name for file in folder.iterdir()} == FILES
    document = json.loads((folder / "results.json").read_text())
    assert document["methods"] == ["none", NGRAM] and document["versions"]["jax"]
    rows = {(row["temperature"], row["method"]): row for row in document["results"]}
    assert rows.keys() == {(0, "NONE"), (0, "n-grams"), (1, "NONE"), (1, "n-grams")}
    for key, row in rows.items():
        assert row["tokens"] == 4 * 8, key  # four turns
        assert row["texts"]["equal"] + row["texts"]["near tie"] + row["texts"]["other prompt"] == 4, key
        assert row["tokens_per_second"]["value"] > 0 and row["conversations"] == 3
    assert rows[0, "n-grams"]["texts"]["equal"] == rows[1, "n-grams"]["texts"]["equal"] == 4
    assert rows[0, "NONE"]["accept_length"] == 1
    assert rows[0, "NONE"]["speed_up"] == {"value": 1, "low": 1, "high": 1}
    assert rows[0, "NONE"]["drafted_steps"] == 0 < rows[0, "n-grams"]["drafted_steps"]

    # A second run measures nothing.
    before = (folder / "runs.jsonl").read_text()
    assert bench(*temperatures, "--plots", "none", "--ignore-eos") == 0
    assert (folder / "runs.jsonl").read_text() == before
    capsys.readouterr()
    assert bench("--temperatures", "0.5", "--plots", "none", "--ignore-eos") == 2
    assert "holds runs with another temperatures" in capsys.readouterr().err


def test_errors_before_a_measurement(bench, tmp_path, capsys):
    for arguments, methods, problem in (
        (("--baseline", "EAGLE3"), ("none", NGRAM), "--baseline EAGLE3 is none of the methods: NONE, n-grams"),
        ((), ("none", "EAGLE3"), "EAGLE3"),
        (("--batch-sizes", "1", "4"), ("none",), "--batch-sizes 4: mine has 3 conversations"),
    ):
        assert bench(*arguments, "--plots", "none", methods=methods) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


DRAFTER = """
from specjax.drafters import Ngram, make_speculation

def make(target):
    return make_speculation(Ngram(nodes=4, capacity={}))
"""


@pytest.fixture
def own_drafter(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_own_drafter.py"
    file.write_text(DRAFTER.format(4096))
    yield file
    sys.modules.pop("my_own_drafter", None)


@pytest.mark.slow
def test_a_changed_drafter_or_model_is_another_comparison(bench, model, own_drafter, tmp_path, capsys):
    """Batches of two, twice: the third conversation has no partner."""
    flags = "--plots", "none", "--batch-sizes", "2", "--repeats", "2"
    methods = "none", "my_own_drafter:make"
    assert bench(*flags, methods=methods) == 0
    for row in json.loads((tmp_path / "out" / "results.json").read_text())["results"]:
        assert (row["conversations"], row["repeats"]) == (2, 2)
        assert row["texts"]["different"] == row["texts"]["other prompt"] == 0
    assert bench(*flags, methods=methods) == 0  # from the log
    own_drafter.write_text(DRAFTER.format(8192))
    assert bench(*flags, methods=methods) == 2
    assert "holds runs with another code" in capsys.readouterr().err

    own_drafter.write_text(DRAFTER.format(4096))
    other = tmp_path / "copy"
    shutil.copytree(model, other)
    shared = ["--model", str(other), "--output", str(tmp_path / "two"), *flags, "--max-new-tokens", "4"]
    command = [*shared, "--sets", str(tmp_path / "mine.jsonl"), "--no-progress", "--methods", "none"]
    assert main(command) == 0
    weights = next(other.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    assert main(command) == 2
    assert f"another files: {{'{other}'" in capsys.readouterr().err
