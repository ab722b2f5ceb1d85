"""Figures of a comparison against slow definitions of them, and the forms in which they are written."""

from __future__ import annotations

import csv
import io
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specjax.bench import plots, provenance, results, tables
from specjax.bench.contenders import Answer
from specjax.bench.experiment import GroupRun, _verdicts
from specjax.bench.log import Log
from specjax.bench.results import Sample


def sample(method, group, seconds, tokens=100, repeat=0, histogram=(50,), texts=None, **more):
    return Sample(
        method, group, repeat, seconds, tokens, seconds / 2, tokens, [*histogram], 0, texts or {"equal": 1}, **more
    )


def test_rates_and_speed_ups_are_of_totals():
    ours = [sample("a", "1", 1.0), sample("a", "2", 3.0, tokens=50), sample("a", "1", 2.0, repeat=1)]
    theirs = [sample("b", "1", 2.0), sample("b", "2", 6.0, tokens=50), sample("b", "1", 4.0, repeat=1)]
    assert results.rate(ours).value == pytest.approx(250 / 6)
    assert results.rate(ours, "decode_tokens", "decode_seconds").value == pytest.approx(250 / 3)
    found = results.speed_up(ours, theirs)
    # Each pair has the same ratio, so each resample does.
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_the_interval_is_that_of_a_slow_bootstrap_over_groups():
    rng = np.random.default_rng(1)
    seconds = rng.uniform(1, 3, 12)
    samples = [sample("a", str(i), float(s)) for i, s in enumerate(seconds)]
    found = results.rate(samples)
    drawn = sorted(1200 / sum(rng.choice(seconds, 12)) for _ in range(4000))
    assert found.low == pytest.approx(drawn[100], rel=0.03)
    assert found.high == pytest.approx(drawn[3899], rel=0.03)
    twice = results.rate([*samples, *(sample("a", str(i), float(s), repeat=1) for i, s in enumerate(seconds))])
    assert (twice.low, twice.high) == pytest.approx((found.low, found.high)), "repeats of a prompt are no new prompts"
    assert results.rate(samples[:1]).low is None


def test_acceptance_by_depth():
    # 4 steps accepted nothing, 2 one draft, 0 two, 2 three.
    assert results.by_depth([4, 2, 0, 2]) == [0.5, 0.5, 1.0]
    assert results.accept_length([4, 2, 0, 2]) == (4 * 1 + 2 * 2 + 2 * 4) / 8
    assert results.by_depth([3]) == []
    assert results.accept_length([]) == 1.0
    assert results.add_histograms([[1], [0, 2, 0], []]) == [1, 2]


def test_a_curve_is_the_mean_over_turns():
    turns = [[1, 0.1], [3, 0.3], [1, 0.3], [3, 0.5], [5, 0.7]]  # of two turns; one ends after three tokens
    found = results.curve([sample("a", "1", 1.0, curve=turns)], [1, 3, 5, 7])
    assert [count for count, _ in found] == [1, 3, 5]
    assert [seconds for _, seconds in found] == pytest.approx([0.2, 0.4, 0.7])


def rows():
    made = []
    for temperature in (0.0, 1.0):
        base = [sample("NONE", str(i), 2.0) for i in range(3)]
        ours = [
            sample("my_m & 50%", str(i), 1.0 + i / 10, histogram=(4, 2), texts={"equal": 1, "near tie": 1})
            for i in range(3)
        ]
        for own in (base, ours):
            where = {"set": "mt_bench", "temperature": temperature, "batch": 1, "method": own[0].method}
            made.append(results.row(own, base, where=where, phases={"draft": 1.0, "verify": 2.0, "commit": 0.5}))
    return made


def test_tables_hold_the_same_figures():
    made = rows()
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(made))))
    assert [line["method"] for line in lines] == ["NONE", "my_m & 50%"] * 2
    assert float(lines[1]["speed_up"]) == made[1]["speed_up"]["value"] == pytest.approx(6 / 3.3, abs=1e-4)
    assert lines[1]["acceptance_by_depth"] == "0.3333"
    assert (lines[1]["phase_ms_draft"], lines[1]["texts_near_tie"]) == ("1.0", "3")
    markdown = tables.as_markdown(made)
    assert "| 3 of 6 + 3 near ties |" in markdown
    assert len({len(line) for line in markdown.splitlines()}) == 1, "aligned"
    latex = tables.as_latex(made)
    assert r"my\_m \& 50\% & \textbf{1.82$\times$} & 1.33 \\" in latex
    assert latex.count(r"\midrule") == 2
    assert {line.count(" & ") for line in latex.splitlines() if line.endswith(r"\\")} <= {2, 3}


METHODS = ["NONE", "EAGLE3", "EAGLE3:steps=5,topk=8,nodes=32,path=/a/folder/of/heads/one", "m" * 150]


@pytest.mark.parametrize("name", ["all", "spec_bench/multi_turn_conversation", "s" * 80])
def test_the_table_fits_a_terminal(name):
    where, made = {"set": name, "temperature": 0.75, "batch": 128}, []
    for method in METHODS:
        texts = {"equal": 100, "near tie": 20}
        own = [sample(method, str(i), 1e-3 * (1 + i % 3), tokens=12345, texts=texts) for i in range(9)]
        made.append(results.row(own, own, where=where | {"method": method}, phases=None))
    lines = tables.as_text(made).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 100
    assert lines[0].split() == ["set", "T", "batch", "method", "tokens/s", "speed-up", "accept", "drafted", "equal"]
    assert all(str(row["tokens_per_second"]["value"])[:6] in line for row, line in zip(made, lines[1:], strict=True))
    assert "EAGLE3" in lines[3] and "one" in lines[3] and lines[3].endswith("900/1080")


def test_steps_that_drafted_may_not_be_known():
    """Of transformers, which says nothing about it: no figure is better than a wrong one."""
    where = {"set": "s", "temperature": 0.0, "batch": 1, "method": "transformers"}
    base = [sample("NONE", "1", 1.0)]
    own = [replace(base[0], method="transformers", drafted_steps=count) for count in (6, None)]
    known, unknown = (results.row([one], base, where=where, phases=None) for one in own)
    assert known["drafted_steps"] == 6 and "%" in tables.cells(known)[8]
    assert unknown["drafted_steps"] is None and tables.cells(unknown)[8] == ""
    assert "drafted_steps" not in tables.as_csv([unknown])


def test_why_a_method_did_not_draft():
    row = {"method": "EAGLE3", "verify_steps": 4}
    rows = [row | {"batch": 1, "drafted_steps": 4}, row | {"batch": 2, "drafted_steps": 1}]
    rows += [
        row | {"method": "NONE", "batch": 2, "drafted_steps": 0},
        row | {"method": "t", "batch": 2} | {"drafted_steps": None},
    ]
    reasons = {("EAGLE3", 1): "unused", ("EAGLE3", 2): "large batches", ("NONE", 2): "", ("t", 2): "unused"}
    assert results.undrafted(reasons, rows) == ["EAGLE3, batch size 2: large batches"]


def test_short_titles_of_sets():
    assert tables.titles(["spec_bench/math_reasoning", "gsm8k"]) == ["math reasoning", "gsm8k"]
    both = ["spec_bench/mt_bench", "mt_bench", "all"]
    assert tables.titles(both) == ["spec bench/mt bench", "mt bench", "all"], "one name must not stand for two sets"


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    made = rows()
    samples = {
        " ".join(str(row[name]) for name in ("set", "temperature", "batch", "method")): [
            sample(row["method"], "1", 1.0, curve=[[1, 0.1], [9, 0.5]])
        ]
        for row in made
    }
    files = plots.draw(tmp_path, "svg", made, samples)
    assert len(files) == 6 and all(file.stat().st_size > 2000 for file in files)


def test_a_picture_of_many_methods_and_sets(tmp_path):
    """No wider than a page, every method once in the legend, with a look of its own."""
    pytest.importorskip("matplotlib")
    methods = [f"method {i}" for i in range(10)]
    assert len({*plots.styles(methods).values()}) == 10
    where = {"temperature": 0.0, "batch": 1}
    made, samples = [], {}
    for name in [f"set {i}" for i in range(9)]:
        for method in methods:
            own = [sample(method, group, 1.0, curve=[[1, 0.1], [9, 0.5]]) for group in "ab"]
            made.append(results.row(own, own, where={"set": name} | where | {"method": method}, phases=None))
            samples[f"{name} 0.0 1 {method}"] = own
    speed_ups, times = plots.draw(tmp_path, "svg", made, samples)
    text = speed_ups.read_text()
    width, height = (float(re.search(rf'{side}="([\d.]+)pt"', text)[1]) for side in ("width", "height"))
    assert width <= plots.WIDEST * 72 and height > 2 * 2.5 * 72, "sets in two rows"
    for file in (speed_ups, times):
        assert [file.read_text().count(f"<!-- {method} -->") for method in methods] == [1] * 10
    assert [text.count(f"<!-- set {i} -->") for i in range(9)] == [1] * 9


def test_without_matplotlib_it_says_how_to_install_it(monkeypatch, capsys):
    assert plots.kind_to_draw("none") is None and plots.kind_to_draw("pdf" if plots.available() else "none") != "svg"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--plots pdf needs .* pip install 'specjax\[bench\]'"):
        plots.kind_to_draw("pdf")
    assert plots.kind_to_draw("none") is None and capsys.readouterr().err == ""
    assert plots.kind_to_draw("auto") is None
    assert capsys.readouterr().err.startswith("There will be no pictures: matplotlib is not installed (pip install ")


def run_of(*turns):
    found = GroupRun("g")
    found.turns = [(prompt, Answer(tokens, [], [])) for prompt, tokens in turns]
    return found


def test_verdicts_on_texts():
    ours = run_of(([1], [5, 6]), ([2], [5, 6]), ([3], [5, 6]), ([4], [5]), ([5], [5]))
    theirs = run_of(([1], [5, 6]), ([2], [5, 7]), ([3], [8, 6]), ([4], [5, 6]), ([9], [5]))
    asked = []

    def gap(context, tokens):
        asked.append((context, tokens))
        return 1e-6 if context[0] == 2 else 1.0

    # Of the fourth turn one text is the start of the other, which is no tie.
    assert _verdicts(ours, theirs, gap) == {"equal": 1, "near tie": 1, "different": 2, "other prompt": 1}
    assert asked == [([2, 5], {6, 7}), ([3], {5, 8})]
    assert _verdicts(ours, theirs, None)["different"] == 3


def test_a_log_keeps_parts_and_refuses_another_configuration(tmp_path):
    folder = tmp_path / "runs"
    Log(folder, {"seed": 1, "list": (1, 2)}).add(("block", 1, 0.0), {"x": [1]})
    with (folder / "runs.jsonl").open("a") as file:
        file.write('{"key": ["block", 2')  # killed while it wrote
    again = Log(folder, {"seed": 1, "list": [1, 2]})
    assert ("block", 1, 0.0) in again and again[("block", 1, 0.0)] == {"x": [1]}
    assert ("block", 2, 0.0) not in again
    again.add(("block", 2, 0.0), 3)
    assert Log(folder, {"seed": 1, "list": [1, 2]})[("block", 2, 0.0)] == 3
    with pytest.raises(ValueError, match="another seed: 1, not 2"):
        Log(folder, {"seed": 2, "list": [1, 2]})
    with pytest.raises(ValueError, match=r"another list: \[2\], not \[3\]"):
        Log(folder, {"seed": 1, "list": [1, 3]})
    with pytest.raises(ValueError, match=r"another list: \[1, 2\], not \[2, 1\]"):
        Log(folder, {"seed": 1, "list": [2, 1]})
    first = Log(tmp_path / "failed", {"seed": 1})  # of it nothing is measured yet
    Log(tmp_path / "failed", {"seed": 2}).add(("block", 1, 0.0), 1)
    with pytest.raises(ValueError, match="another seed: 2, not 1"):
        Log(tmp_path / "failed", {"seed": 1})
    with pytest.raises(ValueError, match="another seed: 2, not 1"):
        first.add(("block", 1, 0.0), 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="holds runs with another model_type"):
        Log(tmp_path / "model", {"seed": 1})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match="name another folder"):
        Log(tmp_path / "mine", {})


@pytest.mark.parametrize(
    ("program", "module", "written"),
    [
        ("/env/bin/specjax", None, "specjax bench --quick"),
        ("/env/specjax/__main__.py", "specjax.__main__", "python -m specjax bench --quick"),
        ("benchmarks/batch.py", None, "python benchmarks/batch.py bench --quick"),
    ],
)
def test_a_record_says_how_the_program_was_started(program, module, written, monkeypatch):
    monkeypatch.setattr("sys.argv", [program, "bench", "--quick"])
    main = SimpleNamespace(__spec__=module and SimpleNamespace(name=module))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert provenance.command() == written
