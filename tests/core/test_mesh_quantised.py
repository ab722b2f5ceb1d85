"""Quantised weights on several devices: parts of leaves, products, and texts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import tokenizer
from mesh_helpers import run
from quantised_leaves import FORMATS, leaf_of
from specjax_kernels import Quantised, dequantise
from specjax_kernels.quantised import check as checked
from specjax_kernels.quantised import shared, split_axes
from test_mesh import check, check_forward
from test_quantised_checkpoints import save_quantised
from tiny_checkpoints import save_llama
from tiny_heads import save_head

process = pytest.mark.process


def part_of(leaf: Quantised, index: int, count: int) -> Quantised:

    def cut(axis: int, array: np.ndarray) -> np.ndarray:
        return np.asarray(array) if axis < 0 else np.split(np.asarray(array), count, axis)[index]

    return jax.tree.map(cut, split_axes(leaf), leaf)


@pytest.mark.parametrize("axis", [-4, -2, -1])
@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_a_leaf(name, axis):
    """Each part is a valid leaf with its slice of the weights."""
    leaf = leaf_of(name, (4, 2, 12), 512)
    whole = np.asarray(dequantise(leaf))
    for count in (2, 4):
        result = shared(leaf, axis, count)
        if name == "GPTQ" and axis == -1:
            assert result is None, "an input order mixes what devices have"
            continue
        assert result is not None and result.split == axis
        for index, expected in enumerate(np.split(whole, count, axis)):
            part = dataclasses.replace(part_of(result, index, count), split=None)
            np.testing.assert_array_equal(np.asarray(dequantise(checked(part))), expected)


def test_groups_across_two_devices():
    """Halves of 48 inputs need groups of 16, which 4-bit codes do not support."""
    rng = np.random.default_rng(0)
    scale = rng.normal(size=(3, 3)).astype(np.float32)
    leaf = Quantised(rng.integers(-9, 9, (3, 192)).astype(np.int8), scale)
    result = shared(leaf, -1, 4)
    assert result is not None and result.group == 16 and result.depth // 4 == 48
    packed = Quantised(rng.integers(0, 256, (3, 96), np.uint8), scale, shift=8)
    assert shared(packed, -1, 4) is None
    halves = shared(packed, -1, 2)
    assert halves is not None and halves.group == 32
    assert shared(leaf, -2, 2) is None, "three outputs"


@process
def test_products():
    """Split inputs need one sum, split outputs no communication. One row and many rows use different kernels."""
    cases = [["product", name, 2, split, 1] for name in FORMATS for split in ("outputs", "inputs")]
    cases += [
        ["product", name, 4, split, 20] for name in ("Q4_K", "fp8 blocks") for split in ("last outputs", "inputs")
    ]
    cases += [["rows_of_a_table", name, 4] for name in ("Q4_0", "int8 per output")]
    for case, result in zip(cases, run(*cases), strict=True):
        if case[0] == "rows_of_a_table":
            assert result["error"] < 1e-6 and result["collectives"] == ["all-reduce"], case
            continue
        _, name, count, split, _ = case
        assert result["split"] == (name != "GPTQ" or split != "inputs"), case
        if result["split"]:
            assert result["error"] < 2e-6, (case, result)
            assert result["collectives"] == ["all-reduce"] * (split == "inputs"), case
            assert result["share"] < 1.2 / count, case


@process
def test_families():
    """Two sums per layer and one for the embedding. 4-bit matrices with 16 inputs per device are dequantised."""
    cases = [["forward", family, 2, 3, "int4"] for family in ("llama", "deepseek_v3")]
    cases += [["forward", "qwen3_moe", 2, 12, "int8"], ["forward", "llama", 4, 3, "int4"]]
    *two, four = run(*cases)
    for result in (*two, four):
        check_forward(result)
    assert not any(result["warnings"] for result in two)
    (line,) = four["warnings"]
    assert line.startswith("the model: 2 matrices are dequantised") and line.endswith(": output"), line
    assert four["quantised"] == two[0]["quantised"] - 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("quantised")
    for name in ("awq", "gptq act order"):
        save_quantised(root / name, name)
        tokenizer().save_pretrained(root / name)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3}
    save_llama(root / "llama", initializer_range=0.2, **heads, **sizes)
    tokenizer().save_pretrained(root / "llama")
    sizes |= {"target_hidden_size": 64, "target_vocab_size": 300, "draft_vocab_size": 12}
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}}
    save_head(root / "head", "eagle3", dtype="float32", config=config, **sizes)
    return root


@process
def test_texts_of_a_quantised_checkpoint(folder):
    """Four devices have copies of two key/value heads, and matrices whose blocks of 32 inputs cannot be split."""
    path = str(folder / "awq")
    one, two, four = run(*(["from_files", path, count, "NONE", {}] for count in (1, 2, 4)))
    assert len({tuple(text) for text in one["texts"]}) == 4
    for result, devices in ((two, 2), (four, 4)):
        check(result, one, devices)
    assert not one["warnings"] and not any("dequantised" in text for text in two["warnings"])
    (line,) = (text for text in four["warnings"] if "dequantised" in text)
    assert "4 matrices are dequantised" in line and line.endswith(": down, output"), line
    assert two["weights"] < 0.6 * one["weights"]


@process
@pytest.mark.slow
def test_texts_of_other_formats_and_drafts(folder):
    """Act order, and target and draft head quantised at load."""
    ordered, llama = (str(folder / name) for name in ("gptq act order", "llama"))
    head = {"path": str(folder / "head"), "quantization": "int8", "steps": 2, "topk": 2, "nodes": 5}
    one, two, int8, drafted = run(
        ["from_files", ordered, 1, "NONE", {}], ["from_files", ordered, 2, "NGRAM", {}],
        ["from_files", llama, 1, "NONE", {}, "int8"], ["from_files", llama, 4, "EAGLE3", head, "int8"],
    )  # fmt: skip
    assert two["texts"] == one["texts"]
    assert next(text for text in two["warnings"] if "dequantised" in text).endswith(": down, output")
    assert drafted["texts"] == int8["texts"] and drafted["quantised draft"] > 3
    assert drafted["weights"] < 0.4 * int8["weights"]
