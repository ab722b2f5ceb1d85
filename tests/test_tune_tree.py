"""`specjax bench tune-tree`: its grid, its predictions against tables of costs, its file, and whole runs."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter

import numpy as np
import pytest
from generate_helpers import saved_model
from safetensors.numpy import load_file, save_file

from specjax import settings
from specjax.bench import plots, tune_tree
from specjax.bench.__main__ import main
from specjax.bench.contenders import Answer
from specjax.bench.experiment import full_window
from specjax.bench.grid import make_grid
from specjax.bench.log import Log
from specjax.bench.prediction import Texts, predict, step_widths
from specjax.bench.replay import Candidates, Recording
from specjax.bench.search import distinct
from specjax.bench.step_costs import StepCosts
from specjax.bench.tune_tree import TuneSettings, as_toml, axes_of
from specjax.cli import build, flags
from specjax.drafters import Eagle, Eagle3, Ngram, NoDraft, Standalone
from specjax.drafters.ngram import ngram_drafter
from specjax.drafters.tree_shape import candidates

HEAD = Eagle3(steps=2, topk=2, nodes=4)
WORDS = Ngram(nodes=8, weak_nodes=1)


@pytest.mark.parametrize("current", [HEAD, WORDS, Ngram(nodes=12)])
def test_the_default_grid(current):
    grid = make_grid(current, axes_of(TuneSettings()))
    assert len(grid.points) >= 80 and len(set(grid.points)) == len(grid.points)
    assert grid.current in grid.points and grid.current.draft == current
    assert {point.variant for point in grid.points} == {one.name for one in grid.variants}
    assert len({point.name for point in grid.points}) == len(grid.points)
    assert set(grid.widths) == {1, *(point.nodes for point in grid.points)}


def test_trees_that_can_be_no_different_are_left_out():
    axes = axes_of(TuneSettings(steps=("1", "3"), topks=("1", "2"), draft_tokens=("2", "3", "8")))
    grid = make_grid(Eagle3(steps=3, topk=2, nodes=8), axes)
    shapes = {(one.draft.steps, one.draft.topk, one.draft.nodes) for one in grid.points}
    assert shapes == {(1, 1, 2), (3, 1, 4), (1, 2, 2), (1, 2, 3), (3, 2, 8)}
    whole = {one.name: one.draft for one in grid.variants}
    assert whole["top-k 2"].nodes == candidates(3, 2) + 1


def test_a_refused_folder_says_which_setting_differs(tmp_path):
    before = Log(tmp_path, {"tune": {"limit": 8, "seed": 0}})
    before.add(("costs", 1), {})
    with pytest.raises(ValueError, match=r"another tune: \{'limit': 8\}, not \{'limit': 16\};"):
        Log(tmp_path, {"tune": {"limit": 16, "seed": 0}})


WRONG = {
    "--draft-tokens must be at least 2, got 1": {"draft_tokens": ("1",)},
    "--steps must be numbers, got 'x'": {"steps": ("x",)},
    "--topks must be at most 64, got 65": {"topks": ("65",)},
    "--match-types must be BFS, PROB or both, got DFS": {"match_types": ("DFS",)},
}


@pytest.mark.parametrize("problem", WRONG)
def test_wrong_values_of_the_grid(problem):
    with pytest.raises(ValueError, match=problem):
        axes_of(TuneSettings(**WRONG[problem]))


def test_a_grid_that_is_too_large_to_record_and_one_without_a_tree():
    with pytest.raises(ValueError, match=r"--topks 16 with 5 steps has 1041 candidates .* more than 512"):
        make_grid(HEAD, axes_of(TuneSettings(topks=("16",))))
    with pytest.raises(ValueError, match="NONE has no tree to tune"):
        make_grid(NoDraft(), axes_of(TuneSettings()))


# Predictions


def chain_of(tokens):
    """Candidates of a chain."""
    count = len(tokens)
    scores = -np.arange(count + 1, dtype=np.float32)
    index = np.arange(count + 1, dtype=np.int32)
    return Candidates(np.array([0, *tokens], np.int32), index - 1, index, scores)


TEXT = [9, 1, 2, 3, 4, 5, 6]
RIGHT, HALF, WRONG_DRAFTS = lambda i: TEXT[i + 1 : i + 3], lambda i: [TEXT[i + 1], 0], lambda i: [0, 0]


def recorded(kinds, lengths):
    """A text with a chain of drafts at each position."""
    trees = [chain_of([*kind(i), 0, 0][:length]) for i, (kind, length) in enumerate(zip(kinds, lengths, strict=True))]
    return Recording(TEXT, [trees])


GRID = make_grid(
    Eagle3(steps=2, topk=1, nodes=3),
    axes_of(TuneSettings(steps=("1", "2"), topks=("1",), draft_tokens=("2", "3"))),
)
COSTS = StepCosts(1, {"top-k 1": {1: 1.0, 2: 3.0}}, {1: 10.0, 2: 11.0, 3: 14.0}, {0: 0.0, 1: 0.5, 2: 1.0}, rest=2.0)


def point(steps):
    return next(one for one in GRID.points if one.draft.steps == steps)


def test_a_prediction_by_hand():
    """Two drafts right: three tokens from 0 to 3; then one right: 3 to 5; then none: 5 to 6, the last token."""
    kinds = [RIGHT, WRONG_DRAFTS, WRONG_DRAFTS, HALF, WRONG_DRAFTS, WRONG_DRAFTS]
    texts = Texts({"top-k 1": [(recorded(kinds, [2] * 6), 0)]})
    steps = texts.steps(point(2), [[0]], (3,))
    assert steps.widths == Counter({3: 3}) and steps.tokens == 6 and steps.histogram == [1, 1, 1]
    found = predict(point(2), steps, COSTS)
    step = 3.0 + 14.0 + 1.0 + 2.0  # draft, verify, commit, rest
    assert found.step == step and found.accept_length == 2
    assert found.tokens_per_second == pytest.approx(6 / (3 * step))
    # One draft: 0 -> 2, where nothing is right -> 3 -> 5 -> 6.
    one = texts.steps(point(1), [[0]], (2,))
    assert predict(point(1), one, COSTS).tokens_per_second == pytest.approx(6 / (4 * (1.0 + 11.0 + 0.5 + 2.0)))


def test_trees_of_several_sizes_cost_the_narrowest_width():
    """At 0 both drafts are right; at 3 one draft, which is right; at 5 none."""
    kinds = [RIGHT, WRONG_DRAFTS, WRONG_DRAFTS, HALF, WRONG_DRAFTS, WRONG_DRAFTS]
    texts = Texts({"top-k 1": [(recorded(kinds, [2, 0, 0, 1, 0, 0]), 0)]})
    steps = texts.steps(point(2), [[0]], (1, 2, 3))
    assert steps.widths == Counter({3: 1, 2: 1, 1: 1})
    seconds = 14 + 11 + 10 + 3 * (3 + 1 + 2)
    assert predict(point(2), steps, COSTS).tokens_per_second == pytest.approx(6 / seconds)
    assert texts.steps(point(2), [[0]], (1, 3)).widths == Counter({3: 2, 1: 1}), "without the width of 2"


def test_a_batch_takes_the_largest_tree_and_ends_with_its_first_text():
    fast, slow = recorded([RIGHT] * 6, [2] * 6), recorded([WRONG_DRAFTS] * 6, [0] * 6)
    texts = Texts({"top-k 1": [(fast, 0), (slow, 0)]})
    steps = texts.steps(point(2), [[0, 1]], (1, 2, 3))
    assert steps.widths == Counter({3: 2}) and steps.tokens == 6 + 2
    costs = StepCosts(2, COSTS.draft, COSTS.verify, COSTS.commit, COSTS.rest)
    assert predict(point(2), steps, costs).tokens_per_second == pytest.approx(8 / (2 * 20.0))


def test_costs_between_shapes_and_their_record():
    costs = StepCosts(4, {"a": {1: 1.0, 2: 2.0, 5: 8.0}}, {1: 10.0, 3: 14.0}, {0: 0.0, 4: 2.0}, rest=0.5, scale=2.0)
    assert costs.seconds("a", 3, 2, 1) == 2 * (4.0 + 12.0 + 0.5) + 0.5
    assert costs.seconds("a", 9, 9, 9) == 2 * (8.0 + 14.0 + 2.0) + 0.5
    assert StepCosts.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs


@pytest.mark.parametrize("slower", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("beyond", [0.0, 0.25])
def test_parts_timed_on_a_busy_machine_predict_what_those_of_an_idle_one_do(slower, beyond):
    """The parts of each shape took `slower` times what they take in a run, which adds `beyond` to a step."""
    draft, verify, commit = {1: 0.125, 2: 0.25}, {1: 2.0, 4: 3.0}, {0: 0.5}

    def times(found):
        return {shape: slower * seconds for shape, seconds in found.items()}

    timed = StepCosts(1, {"a": times(draft)}, times(verify), times(commit))
    wanted = 0.25 + 3.0 + 0.5 + beyond
    fitted = timed.fitted(wanted, timed.seconds("a", 2, 4, 0))
    assert fitted.rest >= 0 and fitted.seconds("a", 2, 4, 0) == pytest.approx(wanted)
    smaller = 0.125 + 2.0 + 0.5 + beyond
    assert fitted.seconds("a", 1, 1, 0) == pytest.approx(smaller, rel=0.05)


def test_a_negative_rest_is_refused():
    with pytest.raises(ValueError, match=r"rest is -0\.5 s; a step cannot take less than its parts"):
        StepCosts(1, {}, {}, {}, rest=-0.5)


def test_widths_are_those_of_the_engine():
    assert step_widths(ngram_drafter(WORDS), 1, "cpu") == (1, 4, 8)
    explicit = ngram_drafter(WORDS)._replace(explicit_width=True)
    assert step_widths(explicit, 64, "cpu") == (1, 4, 8) and step_widths(explicit, 64, "gpu") == (8,)


def test_the_window_in_which_all_decode():
    first = Answer([], [(1.0, 1), (2.0, 3), (3.0, 4), (4.0, 6)], [])
    second = Answer([], [(2.0, 1), (3.0, 2), (4.0, 3), (5.0, 4)], [])
    assert full_window([first, second]) == (2.0, (6 - 3) + (3 - 1), 2)
    late = Answer([], [(9.0, 1), (10.0, 2)], [])
    assert full_window([first, late]) == full_window([Answer([], [], [])]) == (0.0, 0, 0)


def test_points_that_are_run_differ():
    axes = axes_of(TuneSettings(steps=("1", "2"), topks=("1", "2", "4"), draft_tokens=("2", "4")))
    points = sorted(make_grid(HEAD, axes).points, key=lambda point: (-point.nodes, -point.levels))
    assert [(point.levels, point.nodes) for point in points[:2]] == [(2, 4)] * 2, "near-copies first"
    found = distinct(points, 3)
    assert [(point.levels, point.nodes) for point in found] == [(2, 4), (1, 2), (2, 3)]
    assert found[0] == points[0] and distinct(points, 1) == found[:1]
    assert sorted(map(points.index, distinct(points, 99))) == [*range(len(points))], "at last all"


# Flags and the file


@pytest.mark.parametrize(
    "draft",
    [
        Eagle3(steps=5, topk=4, nodes=16),
        Eagle(path='a "folder"\\b', steps=3, topk=1, nodes=4, token_map="8192"),
        Ngram(nodes=6, weak_nodes=1, strong_match=4, match_type="PROB", max_match=7),
        Standalone(path="draft", steps=2, topk=2, nodes=5, vocabulary="intersection"),
        NoDraft(),
    ],
)
def test_the_server_reads_the_file_and_the_flags(draft, tmp_path):
    found = build.speculative_settings(draft)
    file = tmp_path / "best.toml"
    file.write_text(as_toml({"model": {"model": "some/model"}, "speculative": found}, "a comment"))
    parser = settings.Parser()
    settings.add_flags(parser, flags.Settings())
    _, from_file = settings.parse(parser, ["--config", str(file)], flags.Settings())
    assert build.draft_options(from_file) == draft and from_file.model.model == "some/model"
    given = [str(part) for name, value in found.items() for part in (f"--{name}", value)]
    _, from_flags = settings.parse(parser, given, flags.Settings())
    assert build.draft_options(from_flags) == draft


# Whole runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def similar(model, tmp_path_factory):
    """A draft model that is often right: the target with some noise."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(model, folder)
    rng, file = np.random.default_rng(0), folder / "model.safetensors"
    noisy = {k: v + (0.03 * v.std() * rng.normal(size=v.shape)).astype(v.dtype) for k, v in load_file(file).items()}
    save_file(noisy, file, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture
def tune(model, tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [{"id": str(i), "turns": [f"{i} {i} 1 2 1 2", "3 4"][: 1 + i % 2]} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))

    def call(*given):
        shared = ["--model", model, "--sets", str(file), "--output", str(tmp_path / "out"), "--max-new-tokens", "48"]
        return main(["tune-tree", *shared, "--limit", "4", "--plots", "none", "--no-progress", *given])

    return call


def ran(folder):
    """The rows of the grid that were run."""
    rows = csv.DictReader((folder / "grid.csv").read_text().splitlines())
    return [row for row in rows if row["measured_tokens_per_second"]]


SMALL = {
    "NGRAM": ("--draft-tokens", "2", "4", "8", "--strong-matches", "1", "2", "--max-matches", "4", "--turns", "0",
              "--speculative-ngram-capacity", "4096", "--speculative-ngram-max-match-window-size", "4"),
    "STANDALONE": ("--steps", "1", "2", "--topks", "1", "2", "--draft-tokens", "2", "4"),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", SMALL)
def test_a_search(algorithm, tune, similar, tmp_path, capsys):
    given = ["--speculative-algorithm", algorithm, *SMALL[algorithm], "--best", "2"]
    if algorithm == "STANDALONE":
        given += ["--speculative-draft-model-path", similar]
    assert tune(*given) == 0
    out, folder = capsys.readouterr().out, tmp_path / "out"
    summary = json.loads(out.splitlines()[-1])
    document = json.loads((folder / "results.json").read_text())
    assert document["points"] == summary["points"] == len(document["predictions"])
    parts = document["seconds_by_part"].values()
    assert 0 < sum(parts) <= document["seconds"] + 0.05 * (len(parts) + 1), "each is rounded to a tenth"
    assert document["versions"]["jax"] and document["costs"]["1"]["verify"].keys() >= {"1", "4"}

    # Replaying is exact: what was predicted of a point's acceptance is what its run counted.
    verified = ran(folder)
    assert 2 <= len(verified) <= 3
    for row in verified:
        assert row["texts"] == ("4 equal" if algorithm == "STANDALONE" else "6 equal")
        assert float(row["accept_length"]) == pytest.approx(float(row["measured_accept_length"]), abs=1e-4)
    if algorithm == "STANDALONE":  # the tiny model repeats too little for n-grams
        assert any(float(row["accept_length"]) > 1.1 for row in verified), "something is accepted"
    measured = {run["name"]: run["tokens_per_second"] for run in document["verified"]}
    assert document["speed_ups"].keys() == measured.keys() and document["speed_ups"]["none"] == 1
    assert f"The fastest that was run: {summary['flags']}" in out
    assert f"All columns: {folder / 'table.md'}" in out and "speed-up is off by" in (folder / "table.md").read_text()
    shown = [line for line in out.partition("All columns")[0].splitlines() if line]
    assert len(shown) >= len(verified) + 2 and max(map(len, shown)) <= 100, out

    # The server takes the file, which says the fastest.
    parser = settings.Parser()
    settings.add_flags(parser, flags.Settings())
    _, chosen = settings.parse(parser, ["--config", str(folder / "best.toml")], flags.Settings())
    fastest = max(measured, key=measured.__getitem__)
    assert (build.draft_options(chosen).algorithm == "NONE") == (fastest == "none")

    # A second time nothing is measured again.
    before = {file: file.read_text() for file in folder.rglob("runs.jsonl")}
    assert len(before) == 2 and tune(*given) == 0
    assert {file: file.read_text() for file in folder.rglob("runs.jsonl")} == before


@pytest.mark.slow
def test_a_search_of_several_batch_sizes_and_its_heat_map(tune, similar, tmp_path, capsys):
    given = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", similar, *SMALL["STANDALONE"]]
    kind = ["--plots", "svg"] if plots.available() else []
    assert tune(*given, "--batch-sizes", "1", "2", "--best", "1", "--temperature", "0.7", *kind) == 0
    folder = tmp_path / "out"
    rows = ran(folder)
    assert {row["batch"] for row in rows} == {"1", "2"}
    assert all("different" not in row["texts"] for row in rows)
    assert {f"best{part}.toml" for part in ("", "-batch-1", "-batch-2")} <= {file.name for file in folder.iterdir()}
    assert not kind or "<svg" in (folder / "heat-map.svg").read_text()


def test_a_heat_map_has_a_cell_for_each_shape():
    if not plots.available():
        pytest.skip("matplotlib is not installed")
    panels = {"top-k 1": [("1", "2", 1.1), ("2", "3", 0.9)], "top-k 2": [("1", "2", 1.0)]}
    figure = plots.heat_map(panels, {"top-k 1": [("2", "3")]}, ("steps", "draft tokens"))
    first, second = [axes for axes in figure.axes if axes.get_title()]
    shown = first.images[0].get_array().filled(np.nan)
    np.testing.assert_array_equal(shown, [[1.1, np.nan], [np.nan, 0.9]])
    assert [patch.get_xy() for patch in first.patches] == [(0.5, 0.5)] and not second.patches
    assert [text.get_text() for text in first.texts] == ["1.10", "0.90"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--speculative-algorithm", "NONE"], "NONE has no tree to tune"),
        (["--speculative-algorithm", "my_drafter:make"], "my_drafter:make: the tree of a drafter from outside"),
        (["--batch-sizes", "8"], "--batch-sizes 8: a set has 4 conversations; raise --limit"),
        (["--speculative-algorithm", "STANDALONE"], "needs a draft model: --speculative-draft-model-path"),
    ],
)
def test_a_wrong_command_measures_nothing(given, problem, tune, tmp_path, capsys):
    assert tune(*given) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_help_names_the_verb(capsys):
    with pytest.raises(SystemExit) as done:
        main(["tune-tree", "--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "specjax bench tune-tree" in out and all(f"--{name}" in out for name in ("topks", "best", "sets"))
    assert tune_tree.TABLES[0] == "tune"
