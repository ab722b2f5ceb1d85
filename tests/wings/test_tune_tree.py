"""`specjax bench tune-tree`: grid, rounds, configuration file, and whole runs."""

from __future__ import annotations

import contextlib
import json

import pytest
from generate_helpers import saved_model, saved_prompts

from specjax import settings
from specjax.bench import tune_tree
from specjax.bench.__main__ import main
from specjax.bench.run import Experiment, Log
from specjax.bench.tune_tree import Round, TuneSettings, as_toml, make_grid, schedule
from specjax.cli import build, flags
from specjax.drafters import Eagle, Eagle3, Ngram, NoDraft, Standalone

HEAD = Eagle3(steps=2, topk=2, nodes=4)
WORDS = Ngram(nodes=8)


@pytest.mark.parametrize("current", [HEAD, WORDS, Ngram()])
def test_the_default_grid(current):
    grid = make_grid(current, TuneSettings())
    assert len(grid) >= (30 if current == HEAD else 8) and grid[0].draft == current
    for names in ([method.name for method in grid], [method.text for method in grid], [m.draft for m in grid]):
        assert len(set(names)) == len(grid)
    assert grid[0].name.endswith(" current") and sum("current" in method.name for method in grid) == 1


def test_the_grid_has_no_equivalent_trees():
    tune = TuneSettings(steps=("1", "3"), topks=("1", "2"), draft_tokens=("2", "3", "8"))
    grid = make_grid(Eagle3(steps=3, topk=2, nodes=8), tune)
    shapes = {(method.draft.steps, method.draft.topk, method.draft.nodes) for method in grid}
    assert shapes == {(1, 1, 2), (3, 1, 4), (1, 2, 2), (1, 2, 3), (3, 2, 8)}


def test_schedule():
    assert schedule(33, 3, 8) == [(33, 1), (17, 1), (9, 2), (5, 4), (3, 8)]
    assert schedule(2, 3, 8) == [(2, 8)]
    assert schedule(8, 1, 6, minimum=4) == [(8, 4), (4, 4), (2, 4), (1, 6)]


def rows(speeds, batch=1):
    return [{"method": name, "batch": batch, "speed_up": {"value": speed}} for name, speed in speeds.items()]


def test_scores_are_geometric_means_over_batch_sizes():
    results = Round(1, rows({"NONE": 1.0, "a": 2.0}) + rows({"NONE": 1.0, "a": 0.5}, batch=4))
    assert results.scores() == pytest.approx({"NONE": 1, "a": 1})
    assert results.scores(4) == pytest.approx({"NONE": 1, "a": 0.5})


def test_a_search_keeps_the_fastest_and_the_current_tree(monkeypatch, tmp_path):
    """Speeds are from a table; the current tree is the slowest."""
    grid = make_grid(HEAD, TuneSettings())
    speeds = {method.name: float(index) for index, method in enumerate(grid, start=1)}
    seen = []

    def measure(plan, source, log, current, progress):
        names = [method.name for method in plan.methods]
        assert names[0] == "NONE" and len(names) <= 1 + tune_tree.METHODS_AT_ONCE
        seen.append((len(plan.sets[0].conversations), plan.repeats, names[1:]))
        return rows({name: speeds.get(name, 1.0) for name in names})

    monkeypatch.setattr(tune_tree, "_measure", measure)
    plan = tune_tree.make_plan(tune_tree.BenchSettings(methods=("none",), sets=("mt_bench",), limit=8))
    experiment = object.__new__(Experiment)
    experiment.plan, experiment.source = plan, None
    experiment.sets = {prompts.name: [*prompts.conversations] for prompts in plan.sets}
    rounds = tune_tree.search(grid, experiment, Log(tmp_path, {}), best=3, repeats=5)
    last = [row["method"] for row in rounds[-1].rows]
    assert last[:3] == [method.name for method in grid[:-4:-1]] and {*last[3:]} == {grid[0].name, "NONE"}
    assert all(grid[0].name in {row["method"] for row in results.rows} for results in rounds)
    assert [results.conversations for results in rounds] == sorted(results.conversations for results in rounds)
    assert seen[-1][:2] == (8, 5) and {repeats for _, repeats, _ in seen[:-1]} == {1}
    assert {name for count, _, names in seen if count == 1 for name in names} == speeds.keys()


@pytest.mark.parametrize(
    "draft",
    [
        Eagle3(steps=5, topk=4, nodes=16),
        Eagle3(path="head", aux_layers=(0, 3, 5)),
        Eagle(path='a "folder"\\b', steps=3, topk=1, nodes=4, token_map="8192"),
        Ngram(nodes=6, match_type="PROB", max_match=7),
        Standalone(path="draft", steps=2, topk=2, nodes=5),
        NoDraft(),
    ],
)
def test_the_server_reads_the_file_and_the_flags(draft, tmp_path):
    values = build.speculative_settings(draft)
    file = tmp_path / "best.toml"
    file.write_text(as_toml({"model": {"model": "some/model"}, "speculative": values}, "a comment"))
    parser = settings.Parser()
    settings.add_flags(parser, flags.Settings())
    _, from_file = settings.parse(parser, ["--config", str(file)], flags.Settings())
    assert build.draft_options(from_file) == draft and from_file.model.model == "some/model"
    texts = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    argv = [str(part) for name, parts in texts.items() for part in (f"--{name}", *parts)]
    _, from_flags = settings.parse(parser, argv, flags.Settings())
    assert build.draft_options(from_flags) == draft


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture
def tune(model, tmp_path):
    prompts = saved_prompts(tmp_path, 4)

    def call(*arguments):
        shared = ["--model", model, "--sets", prompts, "--output", str(tmp_path / "out"), "--max-new-tokens", "24"]
        return main(["tune-tree", *shared, "--limit", "4", "--no-progress", *arguments])

    return call


def test_a_search(tune, tmp_path, capsys):
    arguments = ["--speculative-algorithm", "NGRAM", "--draft-tokens", "2", "4", "--max-matches", "4"]
    arguments += ["--speculative-ngram-capacity", "4096", "--speculative-ngram-max-match-window-size", "4"]
    arguments += ["--match-types", "BFS", "--turns", "0", "--best", "1"]
    assert tune(*arguments) == 0
    out, folder = capsys.readouterr().out, tmp_path / "out"
    summary = json.loads(out.splitlines()[-1])
    document = json.loads((folder / "results.json").read_text())
    assert document["trees"] == summary["trees"] == 3 and document["versions"]["jax"]

    first, last = document["rounds"][0], document["rounds"][-1]
    assert len(first["rows"]) == summary["trees"] + 1 > len(last["rows"]), "the losers are recorded"
    assert last["conversations"] == 4
    for row in last["rows"]:
        assert row["texts"]["equal"] == sum(row["texts"].values()) == 6
    speeds = document["speed_ups"]
    assert speeds["NONE"] == 1 and speeds.keys() == {row["method"] for row in last["rows"]}
    assert f"The fastest of {summary['trees']} trees: {summary['flags']}" in out
    assert max(map(len, out.partition("All rounds")[0].splitlines())) <= 100, out
    assert (folder / "table.md").read_text().startswith(f"Round {len(document['rounds'])}, 4 conversations")

    # The server reads the file with the fastest tree.
    parser = settings.Parser()
    settings.add_flags(parser, flags.Settings())
    _, chosen = settings.parse(parser, ["--config", str(folder / "best.toml")], flags.Settings())
    fastest = max(speeds, key=speeds.__getitem__)
    assert (build.draft_options(chosen).algorithm == "NONE") == (fastest == "NONE")

    # A second search measures nothing.
    before = (folder / "runs.jsonl").read_text()
    assert tune(*arguments) == 0
    assert (folder / "runs.jsonl").read_text() == before


MISTAKES = {
    "NONE has no tree to tune": ("--speculative-algorithm", "NONE"),
    "my_drafter:make: the tree of a custom drafter": ("--speculative-algorithm", "my_drafter:make"),
    "--batch-sizes 8: mine has 4 conversations that fit; give more (--limit)": ("--batch-sizes", "8"),
    "--speculative-draft-model-path is missing: STANDALONE needs a draft model": (
        "--speculative-algorithm",
        "STANDALONE",
    ),
    "--match-types must be one of BFS, PROB, got": ("--match-types", "DFS"),
    "--draft-tokens must be at least 2, got 1": ("--speculative-algorithm", "NGRAM", "--draft-tokens", "1"),
    "--steps must be numbers, got 'x'": ("--speculative-algorithm", "NGRAM", "--steps", "x"),
}


@pytest.mark.parametrize("problem", MISTAKES)
def test_errors_before_a_measurement(problem, tune, tmp_path, capsys):
    with contextlib.suppress(SystemExit):
        assert tune(*MISTAKES[problem]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
