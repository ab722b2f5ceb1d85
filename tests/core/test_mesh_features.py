"""Log-probabilities, grammars, reused pages and adaptive drafting on several devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import tokenizer
from test_mesh import run as run_program

pytestmark = pytest.mark.process

run = functools.partial(run_program, program="mesh_features_program.py")


def numbers(result: dict[str, Any]) -> tuple[list[int], np.ndarray]:
    """Token ids and log-probabilities of all requests, in order."""
    leaves = [leaf for leaf in jax.tree.leaves((result["logprobs"], result["prompts"])) if leaf is not None]
    return [leaf for leaf in leaves if type(leaf) is int], np.asarray([x for x in leaves if type(x) is float])


def same(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert result["texts"] == alone["texts"] and result["cached"] == alone["cached"]
    (ids, values), (own_ids, own_values) = numbers(result), numbers(alone)
    assert ids == own_ids and len(values) > 150
    np.testing.assert_allclose(values, own_values, atol=1e-4)
    assert len(result["chosen"]) >= 2 and 1 in result["chosen"], "steps with drafts and steps without"


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return run(["none", 1, False], ["ngram", 2, True])


def test_ngrams_and_adaptive_drafting(both):
    same(both[1], both[0])
    alone = both[0]
    assert [len(result) for result in alone["logprobs"]][:3] == [12, 0, 12] and len(alone["prompts"][1]) == 5
    assert alone["cached"][2] == 16
    assert tokenizer().decode(alone["texts"][3]).lstrip().startswith("{")


@pytest.mark.slow
def test_heads_and_adaptive_drafting(both):
    for result in run(["eagle3", 2, True], ["mtp", 2, True], ["standalone", 4, True]):
        same(result, both[0])
        assert result["accepted"] > 0
