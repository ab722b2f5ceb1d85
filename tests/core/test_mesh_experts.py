"""Expert parallelism: experts over groups of CPU devices give the text of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import tokenizer
from family_helpers import save_family
from mesh_helpers import run
from specjax_kernels.mesh import AXIS, spec
from test_mesh import CONFIG, check, check_forward

from specjax.config import Experts, MtpConfig
from specjax.engine import EngineConfig
from specjax.models.experts import expert_leaves
from specjax.models.params import dimensions
from specjax.parallel.sharding import check_experts, fitted, held_bytes, leaf_share

process = pytest.mark.process


@process
def test_families_and_quantised_experts():
    """Two sums per layer and one for the embedding. Devices of a group split the width of their experts."""
    cases = [
        ["qwen3_moe", 2, 12, None, 2], ["qwen3_moe", 4, 3, None, 2], ["deepseek_v3", 4, 3, None, 4],
        ["deepseek_v3", 4, 12, None, 2], ["gpt_oss", 4, 3, None, 2], ["gpt_oss", 4, 12, "int4", 2],
        ["qwen3_moe", 4, 12, "int4", 2], ["qwen3_moe", 2, 3, "int8", 2],
    ]  # fmt: skip
    for case, result in zip(cases, run(*(["forward", *case] for case in cases)), strict=True):
        _, count, _, kind, groups = case
        check_forward(result)
        within = groups / count
        floats = [[1 / groups, 1, 1, within], [1 / groups, within, 1]]
        codes = [[1 / groups, 1, within, 1], [1 / groups, 1, within]]
        assert result["parts"] == (codes if kind else floats), case
        assert result["quantised experts"] == 2 * (kind is not None)
        assert not any("experts" in text for text in result["warnings"])


@process
def test_texts():
    one, two, head = run(["texts", "none", 1, 1], ["texts", "none", 4, 2], ["texts", "eagle3", 2, 2])
    assert len({tuple(text) for text in one["texts"]}) == 4
    check(two, one, 4)
    check(head, one, 2)
    assert head["accepted"] > 0
    assert two["weights"] < 0.3 * one["weights"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4}
    save_family(root, "qwen3_moe", num_key_value_heads=4, **sizes)
    tokenizer().save_pretrained(root)
    return root


@process
def test_a_model_from_files(folder):
    path = str(folder)
    one, four = run(["from_files", path, 1, "NONE", {}], ["from_files", path, 4, "NGRAM", {}, "auto", 2])
    assert four["texts"] == one["texts"]
    assert four["experts"] == 1 / 4 and four["pool shares"] == [1 / 4]


# Without devices.

EXPERTS = Experts(8, 2, 12, (1,), scoring="sigmoid", shared_width=12)
MIXED = replace(CONFIG, family="qwen3_moe", experts=EXPERTS)


def test_the_split_axes():
    leaves = {leaf.name: leaf for leaf in expert_leaves(EXPERTS)}
    sizes = dimensions(MIXED)

    def split(name: str, count: int, groups: int) -> tuple[Any, ...]:
        return tuple(spec(leaves[name].axes, leaves[name].shape(sizes), count, groups))

    assert split("experts_gate_up", 4, 1) == (None, None, None, AXIS) and split("experts_down", 4, 1) == (None, AXIS)
    assert split("experts_gate_up", 4, 2) == ("expert", None, None, "tensor")
    assert split("experts_down", 4, 2) == ("expert", "tensor")
    for name in ("router", "router_bias"):
        assert split(name, 4, 4) == ()
    for name, axes in (("shared_gate_up", (None, None, AXIS)), ("shared_down", (AXIS,))):
        assert split(name, 4, 4) == split(name, 4, 1) == axes


def test_shares():
    """Eight devices do not divide 12 channels: each has all experts, or with eight groups an eighth."""
    sizes, (router, *stacked) = dimensions(MIXED), expert_leaves(EXPERTS)[:3]
    assert [leaf_share(leaf, sizes, 8) for leaf in stacked] == [1, 1]
    assert [leaf_share(leaf, sizes, 8, 8) for leaf in stacked] == [1 / 8, 1 / 8]
    assert leaf_share(router, sizes, 8, 8) == 1
    assert held_bytes(stacked, sizes, "float32", 8, groups=8) == 4 * 3 * 32 * 12


def test_refused_groups():
    with pytest.raises(ValueError, match=r"expert_parallel 3 must divide .*tensor_parallel 4, .*: 1, 2, 4$"):
        EngineConfig(tensor_parallel=4, expert_parallel=3)
    with pytest.raises(ValueError, match=r"expert_parallel 2 .* the model \(llama\) has none: leave it at 1"):
        check_experts(CONFIG, 2)
    check_experts(CONFIG, 1)
    for groups in (1, 8):
        assert fitted(replace(MIXED, num_heads=8, num_kv_heads=8), 8, groups=groups).experts == EXPERTS
    layer = replace(MIXED, experts=replace(EXPERTS, count=6))
    with pytest.raises(ValueError, match=r"expert_parallel 4 .* 6 experts of the draft, each 12 wide.*: 1, 2$"):
        fitted(MtpConfig("mimo", layer, 2, 1, 64), 8, "the draft", 4)
