"""A new drafter is a file and a row of the table: options, flags, keys, commands and engines follow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from generate_helpers import saved_model
from lookup_drafter import Lookup
from mesh_helpers import environment

from specjax.drafters import DRAFTERS, make_speculation, options_of

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture
def row(monkeypatch):
    monkeypatch.setitem(DRAFTERS, Lookup.algorithm, Lookup)


def test_by_name(row):
    assert options_of("lookup", span=2) == Lookup(span=2)
    speculation = make_speculation("Lookup")
    assert (speculation.drafter.name, speculation.drafter.width, speculation.drafter.depth) == ("LOOKUP", 5, 4)
    assert speculation.note == "4 tokens after the latest occurrence" and not speculation.runs_model
    with pytest.raises(ValueError, match=r"Lookup\.span must be an integer from 1 to 16, got 99"):
        options_of("lookup", span=99)
    with pytest.raises(ValueError, match=r"no algorithm draft='lookups'; there are: .*STANDALONE, LOOKUP, "):
        options_of("lookups")


@pytest.mark.process
def test_in_the_commands(tmp_path):
    """In a process of its own, because the flags are made from the table when the commands are imported."""
    model = saved_model(tmp_path, max_position_embeddings=256)
    command = [sys.executable, str(HELPERS / "new_drafter_program.py"), model]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["flags"] == "Lookup(span=4, occurrence='earliest', places=('1', 'b'))"
    assert answer["file"] == "Lookup(span=3, occurrence='latest', places=None)"
    assert answer["keys"] == {"speculative-algorithm": "LOOKUP", "speculative-lookup-span": 2}
    assert answer["refused"] == "--speculative-lookup-span must be an integer from 1 to 16, got 99"
    for text in (
        "STANDALONE, LOOKUP (NEXTN",
        "--speculative-lookup-span N LOOKUP: tokens of a draft (default: 4)",
        "--speculative-lookup-occurrence {latest,earliest}",
        "--speculative-lookup-places [TEXT ...]",
    ):
        assert text in answer["help"]
    assert answer["dry run"]["tree"] == "up to 4 tokens; 3 tokens after the latest occurrence"
    assert [line["text"] for line in answer["drafted"]] == [line["text"] for line in answer["plain"]]
    assert np.mean([line["spec_accept_length"] for line in answer["drafted"]]) > 1
