"""Trees to look at: hand-made ones to the character, a table model's against the oracle, an engine's, and the flags."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from dataclasses import fields

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import NGRAM, make_engine, outcome, shared_engine, tokenizer, toy
from generate_helpers import QUICK, saved_model
from oracle import NO_PARENT, Sampling, Tree
from toy_models import Runner, as_arrays, listed_drafter, listed_proposal, random_table, random_tree, table_model

from specjax import StepConfig
from specjax.cli import generate
from specjax.drafters import none_drafter
from specjax.engine import SamplingParams
from specjax.serve.report import Report
from specjax.state import StepOutput, Trace
from specjax.trace import StepTree, render, step_tree, step_trees
from specjax.tree import NO_TOKEN

WORDS = (" cat", " sat", " is", " on", " by", " a", "\n", "'", "né", "猫", "🦊", "�")


def words(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def step_of(tree: Tree, drawn: list[int], *, width: int, kept: int | None = None) -> StepOutput:
    """A step of two requests, the first inactive, whose target drew these tokens. `kept`: emitted, if not all."""
    nodes = oracle.walk(tree, drawn)
    depth = width - 1

    def pad(values, length, fill):
        return [*values, *[fill] * (length - len(values))]

    other = Tree((0,), (NO_PARENT,))
    trace = Trace(
        tree=as_arrays([other, tree], width),
        drawn=jnp.array([[NO_TOKEN] * width, pad(drawn, width, NO_TOKEN)], jnp.int32),
        path=jnp.array([[0] * (depth + 1), pad(nodes, depth + 1, 0)], jnp.int32),
        accepted=jnp.array([0, len(nodes) - 1], jnp.int32),
    )
    tokens = pad([drawn[node] for node in nodes], depth + 1, NO_TOKEN)
    kept = len(nodes) if kept is None else kept
    return StepOutput(
        tokens=jnp.array([[NO_TOKEN] * (depth + 1), tokens], jnp.int32),
        emitted=jnp.array([0, kept], jnp.int32),
        accepted=jnp.array([0, kept - 1], jnp.int32),
        finish=jnp.array([0, 0], jnp.int32),
        logprobs=None,
        trace=trace,
    )


def only(output: StepOutput) -> StepTree:
    trees = step_trees(output)
    assert trees[0] is None
    assert len(trees) == 2 and trees[1] is not None
    return trees[1]


# By hand. cat -> sat -> {on, by}, cat -> is; the target draws sat, on, a.
SMALL = Tree((0, 1, 2, 3, 4), (NO_PARENT, 0, 0, 1, 1), (0.0, -0.48, -2.21, -0.89, -2.41))


def test_a_tree_by_hand():
    tree = only(step_of(SMALL, [1, 3, NO_TOKEN, 5, NO_TOKEN], width=7))
    assert tree.tokens.tolist() == [0, 1, 2, 3, 4], "the two invalid nodes are left out"
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2]
    assert tree.scores.tolist() == [0.0, -1.0, -1.0, -2.0, -2.0]
    assert tree.drawn.tolist() == [1, 3, -1, 5, -1]
    assert tree.path.tolist() == [0, 1, 3]
    assert tree.emitted.tolist() == [1, 3, 5]
    assert tree.accepted == 2
    assert [tree.children(node) for node in range(5)] == [[1, 2], [3, 4], [], [], []]
    for field in fields(tree):
        array = getattr(tree, field.name)
        assert type(array) is np.ndarray and array.base is None, "its own, not a view of the whole batch"
        assert array.dtype == (np.float32 if field.name == "scores" else np.int32), field.name


def with_scores(tree: StepTree, scores) -> StepTree:
    return StepTree(**{f.name: getattr(tree, f.name) for f in fields(tree)} | {"scores": np.array(scores, np.float32)})


def test_it_is_rendered_as_its_docstring_shows():
    tree = with_scores(only(step_of(SMALL, [1, 3, NO_TOKEN, 5, NO_TOKEN], width=5)), SMALL.scores)
    shown = render(tree, words)
    assert shown.split("\n") == [
        "' cat' drew ' sat'",
        "├── ' sat' -0.48 ✓ drew ' on'",
        "│   ├── ' on' -0.89 ✓ drew ' a'",
        "│   └── ' by' -2.41",
        "└── ' is' -2.21",
        "2 of 4 drafts accepted; emitted ' sat on a'",
    ]
    assert render.__doc__ is not None
    assert all(line in render.__doc__ for line in shown.split("\n"))
    assert render(tree).split("\n") == [
        "0 drew 1", "├── 1 -0.48 ✓ drew 3", "│   ├── 3 -0.89 ✓ drew 5", "│   └── 4 -2.41", "└── 2 -2.21",
        "2 of 4 drafts accepted; emitted 1 3 5",
    ]  # fmt: skip


def test_draws_off_the_path_are_not_shown():
    """A greedy step draws at every node; only the path's say anything about the text."""
    tree = only(step_of(SMALL, [2, 3, 0, 5, 5], width=5))
    assert render(tree, words).split("\n") == [
        "' cat' drew ' is'",
        "├── ' sat' -1",
        "│   ├── ' on' -2",
        "│   └── ' by' -2",
        "└── ' is' -1 ✓ drew ' cat'",
        "1 of 4 drafts accepted; emitted ' is cat'",
    ]


def test_a_tree_of_the_root_alone():
    tree = only(step_of(Tree((0,), (NO_PARENT,)), [4], width=4))
    assert render(tree, words) == "' cat' drew ' by'\n0 of 0 drafts accepted; emitted ' by'"


def test_a_text_that_ends_on_the_path():
    tree = only(step_of(SMALL, [1, 3, NO_TOKEN, 5, NO_TOKEN], width=5, kept=1))
    assert tree.accepted == 2 and tree.emitted.tolist() == [1]
    assert render(tree, words).endswith("2 of 4 drafts accepted; emitted ' sat'")


def test_tokens_of_any_kind_keep_one_line_each():
    tree = Tree((9, 6, 7, 8, 10, 11), (NO_PARENT, 0, 0, 1, 3, 4))
    shown = render(only(step_of(tree, [6, 8, 0, 10, 11, 6], width=6)), words)
    assert shown.split("\n") == [
        "'猫' drew '\\n'",
        "├── '\\n' -1 ✓ drew 'né'",
        "│   └── 'né' -2 ✓ drew '🦊'",
        "│       └── '🦊' -3 ✓ drew '�'",
        "│           └── '�' -4 ✓ drew '\\n'",
        '└── "\'" -1',
        "4 of 5 drafts accepted; emitted '\\nné🦊�\\n'",
    ]


def test_wide_and_deep_trees():
    wide = Tree(tuple(range(64)), (NO_PARENT, *[0] * 63))
    lines = render(only(step_of(wide, [63] * 64, width=64))).split("\n")
    assert lines[0] == "0 drew 63" and lines[62] == "├── 62 -1" and lines[63] == "└── 63 -1 ✓ drew 63"
    assert len(lines) == 65

    # No draft is as deep as the Python stack; a few hundred must not be near it either.
    count = 300
    deep = Tree(tuple(range(count)), (NO_PARENT, *range(count - 1)))
    tree = only(step_of(deep, [*range(1, count), 7], width=count))
    assert tree.accepted == count - 1 and tree.path.tolist() == list(range(count))
    lines = render(tree).split("\n")
    assert lines[299] == "    " * 298 + "└── 299 -299 ✓ drew 7"


def test_a_step_without_a_trace_says_what_to_do():
    runner = Runner(table_model(random_table(0)), none_drafter())
    with pytest.raises(ValueError, match=r"StepConfig\(trace=True\)"):
        step_trees(runner.step([False, False, False]))


# A table model.

WIDTH, DEPTH = 7, 4
LISTED = [random_tree(0, WIDTH, 7, np.random.default_rng(seed), DEPTH) for seed in range(11)]
REQUESTS = [
    ([1, 2, 3], Sampling(max_tokens=24)),
    ([4, 4], Sampling(max_tokens=24, temperature=1.0, seed=16, frequency_penalty=0.3)),
]


def check_tree(tree: StepTree, emitted: list[int]) -> None:
    """What holds for every tree of every step."""
    count = len(tree.tokens)
    assert tree.parents[0] == NO_PARENT and (tree.parents[1:] < np.arange(1, count)).all(), "parents come first"
    assert all(tree.depth[node] == tree.depth[tree.parents[node]] + 1 for node in range(1, count))
    assert tree.path[0] == 0
    for parent, node in zip(tree.path, tree.path[1:], strict=False):
        assert tree.parents[node] == parent and node in tree.children(int(parent))
        assert tree.tokens[node] == tree.drawn[parent], "accepted: the target drew it"
    assert tree.emitted.tolist() == emitted == tree.drawn[tree.path].tolist()[: len(emitted)]
    assert tree.drawn[tree.path[-1]] not in tree.tokens[tree.children(int(tree.path[-1]))], "else it would go on"


@pytest.mark.parametrize("on_device", [False, True])
def test_the_trees_of_a_batch_are_those_that_were_proposed(on_device):
    """Three rows of which one never runs, and the always empty fourth entry."""
    model = table_model(random_table(8))
    runner = Runner(model, listed_drafter(LISTED, WIDTH, DEPTH), config=StepConfig(trace=True))
    propose = listed_proposal(LISTED)
    for slot, (prompt, request) in enumerate(REQUESTS):
        runner.admit(slot, prompt, request)
    first = runner.prefill([prompt for prompt, _ in REQUESTS])
    texts = [[*prompt, int(first.tokens[row, 0])] for row, (prompt, _) in enumerate(REQUESTS)]
    accepted, running = [[], []], [True, True]
    while any(running):
        if on_device:
            runner.state, output = runner.steps.speculate(runner.params, runner.state, runner.inputs([*running, False]))
        else:
            output = runner.step([*running, False])
        trees = step_trees(output)
        assert [tree is not None for tree in trees] == [*running, False, False]
        for row, text in enumerate(texts):
            if (tree := trees[row]) is None:
                continue
            proposed = propose(text)
            found = (tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist())
            assert found == (list(proposed.tokens), list(proposed.parents), oracle.depths(proposed))
            assert tree.path.tolist() == oracle.walk(proposed, tree.drawn.tolist())
            emitted = np.asarray(output.tokens)[row, : int(output.emitted[row])].tolist()
            check_tree(tree, emitted)
            accepted[row].append(tree.accepted)
            text += emitted
            running[row] = int(output.finish[row]) == 0
    for row, (prompt, request) in enumerate(REQUESTS):
        expected = oracle.generate_speculative(model.logits, propose, prompt, request)
        assert texts[row] == [*prompt, *expected.tokens]
        assert accepted[row] == expected.accepted
    assert max(max(each) for each in accepted) == DEPTH, "a whole path, once"


def test_one_entry_of_a_trace():
    output = step_of(SMALL, [1, 3, NO_TOKEN, 5, NO_TOKEN], width=5)
    assert output.trace is not None
    tree = step_tree(output.trace, 1, np.array([1, 3], np.int32))
    assert tree.emitted.tolist() == [1, 3] and tree.path.tolist() == [0, 1, 3]


# The engine.

PARAMS = [
    SamplingParams(max_new_tokens=30, ignore_eos=True),
    SamplingParams(max_new_tokens=21, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=26, stop=["e"], logit_bias={70: 9.0, 71: 9.5}),
    SamplingParams(max_new_tokens=9, speculate=False),
    SamplingParams(max_new_tokens=1),
]
PROMPTS = [[70, 71, 72] * 4, "the the the", [70, 71] * 5, [40] * 9, [5, 6]]


def test_an_engine_keeps_the_trees_when_asked():
    engine = make_engine(toy(), NGRAM, trace=True)
    plain = shared_engine("NGRAM")
    for done, expected in zip(engine.generate(PROMPTS, PARAMS), plain.generate(PROMPTS, PARAMS), strict=True):
        assert outcome(done) == outcome(expected)
        assert expected.trees == []
        assert len(done.trees) == done.spec_verify_ct
        text = done.output_ids[:1]  # prefill draws the first token
        for tree in done.trees:
            assert tree.tokens[0] == text[-1], "the root is the last emitted token"
            check_tree(tree, tree.emitted.tolist())
            text += tree.emitted.tolist()
        assert text == done.output_ids
        histogram = np.bincount([len(tree.emitted) - 1 for tree in done.trees], minlength=1)
        assert done.spec_accept_histogram[: len(histogram)] == histogram.tolist()
    assert all(len(tree.tokens) == 1 for tree in engine.generate(PROMPTS[3], PARAMS[3]).trees), "no speculation"


# `specjax generate`.

LINES = [{"id": "a", "input_ids": [70, 71, 72] * 4, "logit_bias": {"70": 20.0, "71": 19.5}}, {"prompt": "héll\n"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, capsys):
    """run(*flags) -> the output lines, and all of stdout."""

    def call(*flags):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        status = generate.main(
            [
                "--model",
                model,
                "--input",
                str(source),
                "--output",
                str(target),
                *QUICK,
                "--ignore-eos",
                "--speculative-algorithm",
                "NGRAM",
                "--max-running-requests",  # each size of a batch is a program more to compile
                "1",
                *flags,
            ]
        )
        printed = capsys.readouterr()
        assert (status, printed.err) == (0, "")
        return [json.loads(row) for row in target.read_text(encoding="utf-8").splitlines()], printed.out

    return call


@pytest.fixture(scope="module")
def known() -> dict[str, tuple]:
    return {}


@pytest.fixture
def without(run, known):
    """What `run` gives without a flag, from one run for all tests."""
    if "" not in known:
        known[""] = run()
    return known[""]


def test_show_trees_prints_every_step_before_the_summary(run, without):
    plain, summary = without
    assert len(summary.splitlines()) == 1
    rows, out = run("--show-trees")
    assert rows == plain
    *blocks, last = out.split("\n\n")
    assert json.loads(last) == json.loads(out.splitlines()[-1])
    assert json.loads(last)["accept_length"] > 1
    assert len(blocks) == sum(row["spec_verify_ct"] for row in rows)
    for row in rows:
        mine = [block.removeprefix(f"{row['id']}: ") for block in blocks if block.startswith(f"{row['id']}: ")]
        assert len(mine) == row["spec_verify_ct"]
        text = "".join(ast.literal_eval(block.rpartition("; emitted ")[2]) for block in mine)
        first = tokenizer().decode(row["output_ids"][:1])
        assert isinstance(first, str) and row["text"] == first + text


def test_an_id_does_not_reach_the_terminal_as_it_is(run, monkeypatch):
    monkeypatch.setitem(LINES[0], "id", "é\x1b[31m\n1: ")
    rows, out = run("--show-trees")
    assert rows[0]["id"] == "é\x1b[31m\n1: "
    assert "\né\\x1b[31m\\n1: : " in out and "\x1b" not in out


def test_show_trees_on_a_terminal_without_the_lines(run, without, monkeypatch):
    plain, _ = without
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    rows, _ = run("--show-trees")
    narrow.seek(0)
    assert rows == plain
    assert "\\u2514\\u2500\\u2500 " in narrow.read()


def test_time_phases_adds_three_numbers_and_changes_no_text(run, without):
    plain, summary_without = without
    rows, out = run("--time-phases")
    assert rows == plain
    summary = json.loads(out)
    assert list(summary["phase_ms"]) == ["draft", "verify", "commit"]
    assert all(isinstance(value, float) and value >= 0 for value in summary["phase_ms"].values())
    assert summary["phase_ms"]["verify"] > 0
    assert set(summary) - set(json.loads(summary_without)) == {"phase_ms"}


@pytest.mark.slow
def test_trees_and_times_together(run, without):
    plain, _ = without
    rows, out = run("--time-phases", "--show-trees", "--temperature", "0")
    assert rows == plain
    assert "drafts accepted; emitted" in out and "phase_ms" in json.loads(out.splitlines()[-1])


# The server's log.

PHASES = "Decode step. draft: "


@pytest.mark.parametrize("timed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_log_says_what_a_step_consists_of(caplog, timed):
    engine = make_engine(toy(), NGRAM, warm=False, max_running_requests=1, time_phases=timed)
    report = Report(engine, interval=4)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with caplog.at_level(logging.DEBUG, logger="specjax.serve"):
        sequence = engine.add([70, 71, 72] * 3, params)
        while engine.unfinished:
            engine.step()
            report.after_step()
    messages = [record.getMessage() for record in caplog.records if record.name == "specjax.serve"]
    decodes = [message for message in messages if message.startswith("Decode batch.")]
    found = [record for record in caplog.records if record.getMessage().startswith(PHASES)]
    assert len(decodes) >= 2
    assert len(found) == (len(decodes) if timed else 0)
    for record in found:
        assert record.levelno == logging.DEBUG
        parts = record.getMessage().removeprefix("Decode step. ").split(", ")
        assert [part.split(": ")[0] for part in parts] == ["draft", "verify", "commit"]
        assert all(part.endswith(" ms") and float(part.split(": ")[1].split(" ")[0]) >= 0 for part in parts)
    assert sequence.output.tokens == shared_engine("NGRAM").generate([70, 71, 72] * 3, params).output_ids
