"""Figures of a comparison against slow definitions, tables, pictures and the log."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specjax.bench import provenance, results
from specjax.bench.results import Sample
from specjax.bench.run import Log, compare_texts


def sample(method, group, seconds, tokens=100, repeat=0, histogram=(50,), texts=None, **more):
    fields = {"decode_seconds": seconds / 2, "decoded": tokens - 1, "drafted_steps": 0, "nodes": {"1": 50}} | more
    return Sample(
        method=method, group=group, repeat=repeat, seconds=seconds, tokens=tokens, histogram=[*histogram],
        texts=texts or {"equal": 1}, **fields,
    )  # fmt: skip


def test_rates_and_speed_ups_are_of_totals():
    ours = [sample("a", "1", 1.0), sample("a", "2", 3.0, tokens=50), sample("a", "1", 2.0, repeat=1)]
    theirs = [sample("b", "1", 2.0), sample("b", "2", 6.0, tokens=50), sample("b", "1", 4.0, repeat=1)]
    assert results.rate(ours)["value"] == pytest.approx(250 / 6, abs=1e-4)
    # Each pair has the same ratio, so each resample does.
    assert results.speed_up(ours, theirs) == {"value": 2, "low": 2, "high": 2}
    faster = [replace(run, decode_seconds=run.decode_seconds / 3) for run in ours]
    assert results.rate(faster, decode=True)["value"] == pytest.approx(247 / 1, abs=1e-4)
    assert results.speed_up(faster, theirs, decode=True) == {"value": 6, "low": 6, "high": 6}
    single = [replace(run, decoded=0, decode_seconds=0.0) for run in ours]  # one token each
    assert results.speed_up(single, single, decode=True) == {"value": 0, "low": 0, "high": 0}


def test_intervals_against_a_slow_bootstrap():
    rng = np.random.default_rng(1)
    seconds = rng.uniform(1, 3, 12)
    samples = [sample("a", str(i), float(s)) for i, s in enumerate(seconds)]
    rate = results.rate(samples)
    drawn = sorted(1200 / sum(rng.choice(seconds, 12)) for _ in range(4000))
    assert rate["low"] == pytest.approx(drawn[100], rel=0.03)
    assert rate["high"] == pytest.approx(drawn[3899], rel=0.03)
    twice = results.rate([*samples, *(sample("a", str(i), float(s), repeat=1) for i, s in enumerate(seconds))])
    assert twice == rate, "repeats of a prompt are no new prompts"
    assert results.rate(samples[:1])["low"] is None


def test_acceptance_by_depth():
    # 4 steps accepted nothing, 2 one draft, 0 two, 2 three.
    assert results.by_depth([4, 2, 0, 2]) == [0.5, 0.5, 1.0]
    assert results.accept_length([4, 2, 0, 2]) == (4 * 1 + 2 * 2 + 2 * 4) / 8
    assert results.by_depth([3]) == []
    assert results.accept_length([]) == 1.0
    assert results.add_histograms([[1], [0, 2, 0], []]) == [1, 2]


def row(samples, base, **where):
    where = {"set": "s", "temperature": 0.0, "batch": 1, "method": samples[0].method} | where
    return results.row(samples, base, where=where)


def test_a_row_and_its_table():
    base = [sample("NONE", str(i), 2.0) for i in range(3)]
    texts = {"equal": 1, "near tie": 1}
    ours = [
        sample("my_m & 50%", str(i), 1.0 + i / 10, histogram=(4, 2), texts=texts, decode_seconds=0.4) for i in range(3)
    ]
    ours[0] = replace(ours[0], drafted_steps=9, nodes={"1": 2, "4": 10, "32": 38})
    rows = [row(samples, base) for samples in (base, ours)]
    cells = dict(zip(results.HEADER, results.cells(rows[1]), strict=True))
    assert rows[1]["drafted_steps"] == 9 and rows[1]["nodes"] == {"1": 102, "4": 10, "32": 38}
    assert cells["nodes"] == "1 68%, 4 7%, 32 25%" and cells["decode speed-up"] == "2.50 (2.50 to 2.50)"
    assert rows[1]["speed_up"]["value"] == pytest.approx(6 / 3.3, abs=1e-4)
    assert rows[1]["decode_tokens_per_second"]["value"] == pytest.approx(99 / 0.4, abs=1e-3)
    assert rows[1]["acceptance_by_depth"] == [0.3333] and rows[1]["texts"]["near tie"] == 3
    markdown = results.as_markdown(rows)
    assert "| 3 of 6 + 3 near ties |" in markdown and "| my_m & 50% |" in markdown and "| 1.33 " in markdown
    assert "| decode tokens/s " in markdown and markdown.splitlines()[1].count("|") == 13
    assert len({len(line) for line in markdown.splitlines()}) == 1, "aligned"


METHODS = ["NONE", "EAGLE3", "EAGLE3:steps=5,topk=8,nodes=32,path=/a/folder/of/heads/one", "m" * 150]


def test_the_table_fits_a_terminal():
    rows, name = [], "s" * 80
    for method in METHODS:
        texts = {"equal": 100, "near tie": 20}
        nodes = {"2": 1, "64": 3}  # 48.5 on average
        samples = [sample(method, str(i), 1e-3 * (1 + i % 3), tokens=12345, texts=texts, nodes=nodes) for i in range(9)]
        rows.append(row(samples, samples, set=name, temperature=0.75, batch=128))
    lines = results.as_text(rows).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 100
    header = ["set", "T", "batch", "method", "tokens/s", "decode", "speed-up", "accept", "nodes", "equal"]
    assert lines[0].split() == header
    assert all(
        str(cells["tokens_per_second"]["value"])[:6] in line for cells, line in zip(rows, lines[1:], strict=True)
    )
    assert "EAGL…one" in lines[3] and lines[3].endswith("48.5   900/1080")


def test_short_titles_of_sets():
    assert results.titles(["spec_bench/math_reasoning", "gsm8k"]) == ["math reasoning", "gsm8k"]
    both = ["spec_bench/mt_bench", "mt_bench", "all"]
    assert results.titles(both) == ["spec bench/mt bench", "mt bench", "all"]


def test_pictures(tmp_path):
    """No wider than a page, every method once in the legend."""
    pytest.importorskip("matplotlib")
    methods, rows = [f"method {i}" for i in range(4)], []
    for temperature in (0.0, 1.0):
        for name in [*(f"set {i}" for i in range(3)), "all"]:
            for method in methods:
                samples = [sample(method, group, 1.0, histogram=(4, 2)) for group in "ab"[: 1 + (name != "set 0")]]
                rows.append(row(samples, samples, set=name, temperature=temperature))
    files = results.draw(tmp_path, "svg", rows)
    assert [file.name for file in files] == ["picture-T0-batch1.svg", "picture-T1-batch1.svg"]
    text = files[0].read_text()
    assert float(re.search(r'width="([\d.]+)pt"', text)[1]) <= 9 * 72
    assert [text.count(f"<!--  {method} -->") for method in methods] == [1] * 4
    assert [text.count(f"<!-- set {i} -->") for i in range(3)] == [1] * 3


def test_without_matplotlib(monkeypatch, capsys):
    assert results.picture_format("none") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--plots pdf needs .* pip install -e '\.\[bench\]'"):
        results.picture_format("pdf")
    assert results.picture_format("none") is None and capsys.readouterr().err == ""
    assert results.picture_format("auto") is None
    assert capsys.readouterr().err.startswith("There will be no pictures: matplotlib is not installed (pip install ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert (results.picture_format("auto"), results.picture_format("pdf")) == ("svg", "pdf")


def test_verdicts_on_texts():
    ours = [([1], [5, 6]), ([2], [5, 6]), ([3], [5, 6]), ([4], [5]), ([5], [5])]
    theirs = [([1], [5, 6]), ([2], [5, 7]), ([3], [8, 6]), ([4], [5, 6]), ([9], [5])]
    asked = []

    def gap(context, tokens):
        asked.append((context, tokens))
        return 1e-6 if context[0] == 2 else 1.0

    # One text of the fourth turn is the start of the other: no tie.
    assert compare_texts(ours, theirs, gap) == {"equal": 1, "near tie": 1, "different": 2, "other prompt": 1}
    assert asked == [([2, 5], {6, 7}), ([3], {5, 8})]
    assert compare_texts(ours, theirs, None)["different"] == 3


def test_a_log(tmp_path):
    folder = tmp_path / "runs"
    Log(folder, {"seed": 0})
    assert not folder.exists(), "before its first part"
    Log(folder, {"seed": 1, "list": (1, 2), "tune": {"limit": 8, "seed": 0}})["block", 1, 0.0] = {"x": [1]}
    with (folder / "runs.jsonl").open("a") as file:
        file.write('[["block", 2')  # the process was killed
    identity = {"seed": 1, "list": [1, 2], "tune": {"limit": 8, "seed": 0}}
    again = Log(folder, identity)
    assert ("block", 1, 0.0) in again and again["block", 1, 0.0] == {"x": [1]}
    assert ("block", 2, 0.0) not in again
    again["block", 2, 0.0] = 3
    assert Log(folder, identity)["block", 2, 0.0] == 3
    for change, problem in (
        ({"seed": 2}, "another seed: 1, not 2"),
        ({"list": [1, 3]}, r"another list: \[1, 2\], not \[1, 3\]"),
        ({"tune": {"limit": 16, "seed": 0}}, r"another tune: \{'limit': 8\}, not \{'limit': 16\};"),
    ):
        with pytest.raises(ValueError, match=problem):
            Log(folder, identity | change)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match="name another folder"):
        Log(tmp_path / "mine", {})


def test_command_line_of_a_record(monkeypatch):
    for program, module, written in (
        ("/env/bin/specjax", None, "specjax bench --quick"),
        ("/env/specjax/__main__.py", "specjax.__main__", "python -m specjax bench --quick"),
        ("benchmarks/batch.py", None, "python benchmarks/batch.py bench --quick"),
    ):
        monkeypatch.setattr("sys.argv", [program, "bench", "--quick"])
        main = SimpleNamespace(__spec__=module and SimpleNamespace(name=module))
        monkeypatch.setitem(sys.modules, "__main__", main)
        assert provenance.command() == written
