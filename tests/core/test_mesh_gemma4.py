"""Gemma 4 and its assistants on two devices: texts, reused pages and pools as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_helpers import tokenizer
from family_helpers import save_family
from mesh_helpers import run
from safetensors.numpy import load_file, save_file
from tiny_assistants import save_assistant

pytestmark = pytest.mark.process

FAMILIES = ("gemma4", "gemma4_shared", "gemma4_experts")
TREE: dict[str, Any] = {"steps": 2, "topk": 3, "nodes": 10}
BIASED = slice(70, 82)
"""`FEW` of mesh_program.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Each family, and its assistant. Two devices divide the key/value heads of both kinds of layers."""
    root = tmp_path_factory.mktemp("gemma4")
    for family in FAMILIES:
        sizes: dict[str, Any] = {"vocab_size": len(tokenizer()), "num_key_value_heads": 2}
        if family == "gemma4":
            sizes["num_global_key_value_heads"] = 2
        save_family(root / family, family, **sizes)
        tokenizer().save_pretrained(root / family)
        clusters = {"centroids": 5, "best": 3} if family == "gemma4_shared" else {}
        save_assistant(assistant := root / f"{family}-assistant", root / family, **clusters)
        tensors = load_file(file := assistant / "model.safetensors")
        # Of few tokens, those to which requests are biased, so that drafts are right now and then.
        tensors["model.embed_tokens.weight"][BIASED] *= 8
        save_file(tensors, file)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_with_assistants(folder, family):
    model, draft = str(folder / family), {"path": str(folder / f"{family}-assistant"), **TREE}
    groups = 2 if family == "gemma4_experts" else 1  # of experts
    one, plain, drafted = run(
        ["from_files", model, 1, "NONE", {}], ["from_files", model, 2, "NONE", {}],
        ["from_files", model, 2, "ASSISTANT", draft, "auto", groups],
    )  # fmt: skip
    assert len({tuple(text) for text in one["texts"]}) == 4
    for result in (plain, drafted):
        assert result["texts"] == one["texts"] and result["cached"] == one["cached"] > 0
        assert result["pool shares"] == [1 / 2] and result["aliased"] == result["state"]
        assert result["weights"] < 0.7 * one["weights"]
    assert drafted["algorithm"] == "ASSISTANT" and drafted["accepted"] > 0
