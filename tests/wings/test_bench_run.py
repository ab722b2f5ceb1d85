"""`specjax bench` on a tiny model: its files, a second run, and errors."""

from __future__ import annotations

import importlib.util
import json

import pytest
from generate_helpers import saved_model, saved_prompts

from specjax.bench.__main__ import main
from specjax.viz.__main__ import main as draw

NGRAM = "NGRAM:nodes=4,max_match=4,capacity=4096,adaptive=off,name=n-grams"
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
        assert row["decode_tokens_per_second"]["value"] > 0 < row["decode_speed_up"]["value"]
        drafts = row["method"] == "n-grams"
        assert row["nodes"].keys() == {"4" if drafts else "1"}, "in every step"
        assert 0 <= sum(row["nodes"].values()) - row["verify_steps"] <= 4, "a step in flight at the end of each turn"
    assert rows[0, "n-grams"]["texts"]["equal"] == rows[1, "n-grams"]["texts"]["equal"] == 4
    assert rows[0, "NONE"]["accept_length"] == 1
    assert rows[0, "NONE"]["speed_up"] == rows[0, "NONE"]["decode_speed_up"] == {"value": 1, "low": 1, "high": 1}
    assert rows[0, "NONE"]["drafted_steps"] == 0 < rows[0, "n-grams"]["drafted_steps"]

    # A second run measures nothing.
    before = (folder / "runs.jsonl").read_text()
    assert bench(*temperatures, "--plots", "none", "--ignore-eos") == 0
    assert (folder / "runs.jsonl").read_text() == before
    capsys.readouterr()
    assert bench("--temperatures", "0.5", "--plots", "none", "--ignore-eos") == 2
    assert "holds runs with another temperatures" in capsys.readouterr().err


def test_trees_of_a_run(bench, tmp_path, capsys):
    """Kept trees are drawn without the model."""
    custom = "test_viz_drawing:repeated"
    assert bench("--trees", "--plots", "none", "--ignore-eos", methods=("none", custom)) == 0
    (file,) = (tmp_path / "out" / "trees").iterdir()
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(answer["method"], answer["turn"]) for answer in answers} == {
        (method, turn) for method in ("NONE", custom) for turn in (1, 2)
    }
    for answer in answers:
        emitted = [token for tree in answer["trees"] for token in tree["emitted"]]
        assert len(emitted) == 7, "all tokens after the first"
        assert {len(tree["tokens"]) for tree in answer["trees"]} == {1 if answer["method"] == "NONE" else 3}
    picture = tmp_path / "tree.svg"
    assert draw(["--trees", str(file), "--output", str(picture)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("wrote step ") and f": {custom}, " in line
    assert picture.read_text().count("<rect") in (3, 4)
    with pytest.raises(SystemExit):
        draw(["--trees", str(file), "--output", str(picture), "--answer", "99"])
    assert f"--answer 99 is not one of the {len(answers)} lines" in capsys.readouterr().err
    assert bench("--plots", "none", "--ignore-eos", methods=("none", custom)) == 2
    assert "holds runs with another trees" in capsys.readouterr().err, "a step that keeps its tree is slower"


def test_a_table_for_papers(bench, tmp_path, capsys):
    pytest.importorskip("pandas")
    assert bench("--latex", "--plots", "none", "--temperatures", "0", "1") == 0
    table = (tmp_path / "out" / "table.tex").read_text()
    assert table.startswith("\\begin{tabular}") and "\\toprule" in table and "n-grams & " in table


def test_a_table_without_pandas(bench, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pandas" else find(name))
    assert bench("--latex") == 2
    assert "--latex needs pandas, which is not installed: pip install -e '.[bench]'" in capsys.readouterr().err


def test_errors_before_a_measurement(bench, tmp_path, capsys):
    for arguments, methods, problem in (
        (("--baseline", "EAGLE3"), ("none", NGRAM), "--baseline EAGLE3 is none of the methods: NONE, n-grams"),
        ((), ("none", "EAGLE3"), "EAGLE3"),
        (("--batch-sizes", "1", "4"), ("none",), "--batch-sizes 4: mine has 3 conversations"),
    ):
        assert bench(*arguments, "--plots", "none", methods=methods) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
