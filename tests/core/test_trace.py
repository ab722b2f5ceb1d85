"""Traced trees: rendering, trees of engines and of `specjax generate`. test_step.py compares traces with the oracle."""

from __future__ import annotations

import ast
import io
import json
import sys
from dataclasses import fields

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import NGRAM, make_engine, outcome, shared_engine, tokenizer, toy
from generate_helpers import QUICK, saved_model
from oracle import NO_PARENT, Tree
from toy_models import Runner, as_arrays, random_table, table_model

from specjax.cli import generate
from specjax.drafters import none_drafter
from specjax.engine import SamplingParams
from specjax.state import StepOutput, Trace
from specjax.trace import StepTree, render, step_trees
from specjax.tree import NO_TOKEN

WORDS = (" cat", " sat", " is", " on", " by", " a", "\n", "'", "né", "猫", "🦊", "�")


def words(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def step_of(tree: Tree, drawn: list[int], *, width: int, emitted: int | None = None) -> StepOutput:
    """A step of two requests, the first inactive. `drawn`: the target's draws; `emitted`: number of emitted tokens."""
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
    count = len(nodes) if emitted is None else emitted
    return StepOutput(
        tokens=jnp.array([[NO_TOKEN] * (depth + 1), tokens], jnp.int32),
        emitted=jnp.array([0, count], jnp.int32),
        accepted=jnp.array([0, count - 1], jnp.int32),
        finish=jnp.array([0, 0], jnp.int32),
        logprobs=None,
        trace=trace,
    )


def only(output: StepOutput) -> StepTree:
    trees = step_trees(output)
    assert trees[0] is None
    assert len(trees) == 2 and trees[1] is not None
    return trees[1]


# cat -> sat -> {on, by}, cat -> is; the target draws sat, on, a.
SMALL = Tree((0, 1, 2, 3, 4), (NO_PARENT, 0, 0, 1, 1), (0.0, -0.48, -2.21, -0.89, -2.41))


def test_step_tree():
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
        assert type(array) is np.ndarray and array.base is None, "a copy, not a view of the batch"
        assert array.dtype == (np.float32 if field.name == "scores" else np.int32), field.name


def with_scores(tree: StepTree, scores) -> StepTree:
    return StepTree(**{f.name: getattr(tree, f.name) for f in fields(tree)} | {"scores": np.array(scores, np.float32)})


def test_render_example_of_the_docstring():
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


@pytest.mark.parametrize(
    ("tree", "drawn", "emitted", "shown"),
    [
        # Draws off the path are left out.
        (SMALL, [2, 3, 0, 5, 5], None, [
            "' cat' drew ' is'", "├── ' sat' -1", "│   ├── ' on' -2", "│   └── ' by' -2", "└── ' is' -1 ✓ drew ' cat'",
            "1 of 4 drafts accepted; emitted ' is cat'",
        ]),
        (Tree((0,), (NO_PARENT,)), [4], None, ["' cat' drew ' by'", "0 of 0 drafts accepted; emitted ' by'"]),
        (SMALL, [1, 3, NO_TOKEN, 5, NO_TOKEN], 1, ["2 of 4 drafts accepted; emitted ' sat'"]),
        (Tree((9, 6, 7, 8, 10, 11), (NO_PARENT, 0, 0, 1, 3, 4)), [6, 8, 0, 10, 11, 6], None, [
            "'猫' drew '\\n'", "├── '\\n' -1 ✓ drew 'né'", "│   └── 'né' -2 ✓ drew '🦊'",
            "│       └── '🦊' -3 ✓ drew '�'", "│           └── '�' -4 ✓ drew '\\n'", '└── "\'" -1',
            "4 of 5 drafts accepted; emitted '\\nné🦊�\\n'",
        ]),
    ],
)  # fmt: skip
def test_render(tree, drawn, emitted, shown):
    lines = render(only(step_of(tree, drawn, width=6, emitted=emitted)), words).split("\n")
    assert lines[-len(shown) :] == shown and (emitted or lines == shown)


def test_wide_and_deep_trees():
    wide = Tree(tuple(range(64)), (NO_PARENT, *[0] * 63))
    lines = render(only(step_of(wide, [63] * 64, width=64))).split("\n")
    assert lines[0] == "0 drew 63" and lines[62] == "├── 62 -1" and lines[63] == "└── 63 -1 ✓ drew 63"
    assert len(lines) == 65

    count = 300
    deep = Tree(tuple(range(count)), (NO_PARENT, *range(count - 1)))
    tree = only(step_of(deep, [*range(1, count), 7], width=count))
    assert tree.accepted == count - 1 and tree.path.tolist() == list(range(count))
    lines = render(tree).split("\n")
    assert lines[299] == "    " * 298 + "└── 299 -299 ✓ drew 7"


def test_step_without_trace():
    runner = Runner(table_model(random_table(0)), none_drafter())
    with pytest.raises(ValueError, match=r"StepConfig\(trace=True\)"):
        step_trees(runner.step([False, False, False]))


def check_tree(tree: StepTree, emitted: list[int]) -> None:
    count = len(tree.tokens)
    assert tree.parents[0] == NO_PARENT and (tree.parents[1:] < np.arange(1, count)).all(), "parents come first"
    assert all(tree.depth[node] == tree.depth[tree.parents[node]] + 1 for node in range(1, count))
    assert tree.path[0] == 0
    for parent, node in zip(tree.path, tree.path[1:], strict=False):
        assert tree.parents[node] == parent and node in tree.children(int(parent))
        assert tree.tokens[node] == tree.drawn[parent], "accepted: the target drew it"
    assert tree.emitted.tolist() == emitted == tree.drawn[tree.path].tolist()[: len(emitted)]
    assert tree.drawn[tree.path[-1]] not in tree.tokens[tree.children(int(tree.path[-1]))], "else it would go on"


# The engine.

PARAMS = [
    SamplingParams(max_new_tokens=30, ignore_eos=True),
    SamplingParams(max_new_tokens=21, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=26, stop=["e"], logit_bias={70: 9.0, 71: 9.5}),
    SamplingParams(max_new_tokens=9, speculate=False),
    SamplingParams(max_new_tokens=1),
]
PROMPTS = [[70, 71, 72] * 4, "the the the", [70, 71] * 5, [40] * 9, [5, 6]]


def test_trees_of_an_engine():
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
        files = ["--model", model, "--input", str(source), "--output", str(target)]
        more = ["--ignore-eos", "--speculative-algorithm", "NGRAM", "--max-running-requests", "1"]
        status = generate.main([*files, *QUICK, *more, *flags])
        printed = capsys.readouterr()
        assert (status, printed.err) == (0, "")
        return [json.loads(row) for row in target.read_text(encoding="utf-8").splitlines()], printed.out

    return call


def test_show_trees(run, monkeypatch):
    plain, summary = run()
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
    # An id with control characters, and a terminal without the characters of the lines.
    monkeypatch.setitem(LINES[0], "id", "é\x1b[31m\n1: ")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    rows, _ = run("--show-trees")
    narrow.seek(0)
    shown = narrow.read()
    assert rows[0]["id"] == "é\x1b[31m\n1: " and "\\xe9\\x1b[31m\\n1: : " in shown and "\x1b" not in shown
    assert "\\u2514\\u2500\\u2500 " in shown
