"""Block sizes of the GPU kernels: the rule of thumb and the table of measured entries."""

from __future__ import annotations

import json

import pytest
from specjax_kernels import launch
from specjax_kernels.launch import Blocks, launch_for, power_of_two, rule_of_thumb
from specjax_kernels.specs import SPECS

BLOCKS = Blocks(rows=16, tokens=32, warps=2, stages=5, programs=8)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The file of an empty table."""
    file = tmp_path / "launch_table.json"
    file.write_text("{}")
    monkeypatch.setattr(launch, "TABLE", file)
    launch.table.cache_clear()
    yield file
    launch.table.cache_clear()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_spec_has_a_launch(spec, table):
    rows = spec.N * spec.H // spec.K
    chosen = launch_for(spec.dtype, max(spec.E, spec.v_width), rows, spec.B * spec.K, spec.T * spec.S)
    assert chosen.tiles * chosen.rows >= rows > (chosen.tiles - 1) * chosen.rows
    assert 1 <= chosen.splits <= min(launch.MOST_SPLITS, max(1, spec.T * spec.S / launch.LEAST_SPLIT))
    for size in (chosen.rows, chosen.tokens, chosen.splits, chosen.warps):
        assert size == power_of_two(size)
    tile = 2 * chosen.tokens * launch.padded(max(spec.E, spec.v_width)) * (4 if spec.dtype == "float32" else 2)
    assert tile * chosen.stages <= launch.UNKNOWN.shared_memory


def test_splits_fill_the_device(table):
    def splits(heads: int, context: int, rows: int = 8) -> int:
        return launch_for("bfloat16", 128, rows, heads, context).splits

    assert splits(8, 128) == 1  # too few tokens
    assert splits(8, 4096) == 32  # shares of 128 tokens
    assert splits(8, 131072) == 64
    assert splits(8 * 32, 131072) == 2  # a batch of 32 has enough programs
    assert splits(8 * 64, 131072) == 1
    assert splits(8, 131072, rows=8192) == 1  # so has a prefill


def test_sizes_by_hand():
    assert [launch.padded(width) for width in (8, 64, 80, 96, 128, 256, 576)] == [16, 64, 128, 128, 128, 256, 1024]
    assert launch.key("bfloat16", 80, 3) == "bfloat16 width 128 rows 16"
    assert launch.key("float32", 64, 9 * 16) == "float32 width 64 rows 256"
    assert launch.key("float32", 64, 100_000) == "float32 width 64 rows 256"
    assert rule_of_thumb("bfloat16", 128, 4).rows == 16
    assert rule_of_thumb("bfloat16", 128, 8192).rows == 64
    assert rule_of_thumb("float32", 128, 8192).rows == 16
    # Two tiles of the widest latent heads fit a data centre's GPU, one a workstation's.
    assert [rule_of_thumb("bfloat16", 576, 16, name).stages for name in ("9.0", "8.9", None)] == [2, 1, 1]


def test_a_measured_entry_is_for_one_generation(table, monkeypatch):
    name = launch.key("bfloat16", 128, 4)
    table.write_text(json.dumps({"9.0": {name: vars(BLOCKS)}}))
    monkeypatch.setattr(launch, "generation", lambda: "9.0")
    chosen = launch_for("bfloat16", 128, 4, 8, 131072)
    assert (chosen.rows, chosen.tokens, chosen.warps, chosen.stages) == (16, 32, 2, 5)
    assert launch_for("bfloat16", 128, 4, 64, 131072).splits == 16  # 8 programs for each of 132 multiprocessors
    assert launch_for("float16", 128, 4, 8, 131072).tokens == 64
    monkeypatch.setattr(launch, "generation", lambda: "8.0")
    assert launch_for("bfloat16", 128, 4, 8, 131072).tokens == 64


def test_the_shipped_table():
    launch.table.cache_clear()
    for blocks in (blocks for entries in launch.table().values() for blocks in entries.values()):
        for number, smallest in ((blocks.rows, 16), (blocks.tokens, 16), (blocks.warps, 1)):
            assert number == power_of_two(number) >= smallest
        assert blocks.stages >= 1 and blocks.programs >= 1
