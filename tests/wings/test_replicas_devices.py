"""Replicas over several devices of a CPU give the texts of one device, each replica on its own devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_helpers import tokenizer
from family_helpers import save_family
from mesh_helpers import run

pytestmark = pytest.mark.process

PROGRAM = "replicas_program.py"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One device, without drafts."""
    return run(["texts", "none", 1])[0]


def check(result: dict[str, Any], texts: Any, replicas: int, split: int) -> None:
    assert "error" not in result, result
    assert result["texts"] == [texts, texts]
    assert all(result["generated"]), "a replica has no requests"
    assert result["devices"] == [[rank * split + i for i in range(split)] for rank in range(replicas)]
    assert result["sizes"] == [replicas, split, replicas, replicas]
    assert result["cached"] > 0


def test_replicas_of_one_device_and_of_two(alone):
    """Biased, sampled and penalised requests, a grammar, and prompts with cached pages."""
    plain, drafted = run(["none", 2, 1], ["eagle3", 2, 2], program=PROGRAM)
    check(plain, alone["texts"], 2, 1)
    check(drafted, alone["texts"], 2, 2)
    assert drafted["algorithm"] == "EAGLE3" and drafted["accepted"] > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("replicas")
    save_family(root, "qwen3_moe", num_attention_heads=8, num_key_value_heads=2)
    tokenizer().save_pretrained(root)
    return root


def test_flags(folder):
    """A model with experts from files, and adaptive drafting."""
    sizes = ["--model", str(folder), "--max-running-requests", "1", "--page-size", "4", "--max-total-tokens", "512"]
    sizes += ["--context-length", "64", "--chunked-prefill-size", "16", "--dtype", "float32"]
    plain = [*sizes, "--speculative-algorithm", "NONE"]
    single, both = run(plain, [*sizes, "--dp", "2", "--tp", "2", "--ep", "2"], program=PROGRAM)
    assert "error" not in single, single
    assert single["texts"][0] == single["texts"][1]
    check(both, single["texts"][0], 2, 2)
    assert both["ep_size"] == 2 and both["algorithm"] == "NGRAM" and both["chooses"] == [True, True]
