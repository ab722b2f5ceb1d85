"""`specjax generate --dp` on two CPU devices writes the file of one device."""

from __future__ import annotations

import json

import pytest
from generate_helpers import QUICK, saved_model
from mesh_helpers import run

pytestmark = pytest.mark.process

SAMPLED = {"temperature": 0.8, "top_p": 0.9}
LINES = [
    {"id": "first", "prompt": "hello there"},
    {"prompt": "a longer line, whose prompt takes two chunks", "max_new_tokens": 12},
    {"prompt": "x" * 10_000},  # longer than the context
    {"messages": [{"role": "user", "content": "hello"}], **SAMPLED},
    {"prompt": "one token", "max_new_tokens": 1},
    {"prompt": "hello there", **SAMPLED},
    {"input_ids": [40, 41, 42], "ignore_eos": True, "max_new_tokens": 20},
    {"prompt": "penalties", "frequency_penalty": 0.5, "seed": 9, **SAMPLED},
    {"prompt": "the end"},
]


def test_replicas_equal_one_device(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    model = saved_model(tmp_path / "model")
    argv = ["--model", model, "--input", f"{tmp_path}/in.jsonl", *QUICK, "--speculative-algorithm", "NONE"]
    one, two = run(
        [*argv, "--output", f"{tmp_path}/one"],
        [*argv, "--output", f"{tmp_path}/two", "--dp", "2"],
        program="generate_program.py",
    )
    expected = (tmp_path / "one").read_text()
    assert [json.loads(line)["id"] for line in expected.splitlines()] == ["first", 1, 3, 4, 5, 6, 7, 8]
    assert (tmp_path / "two").read_text() == expected
    assert (one["devices"], two["devices"]) == ([[0]], [[0], [1]])
    assert all(two["generated"]), "a replica has no requests"
    assert two["status"] == 1 and two["summary"]["replicas"] == 2
    counts = ("requests", "failed", "completion_tokens", "verify_steps", "accept_length")
    assert {name: two["summary"][name] for name in counts} == {name: one["summary"][name] for name in counts}
