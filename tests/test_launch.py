"""Block sizes of the GPU kernels: the rule of thumb, the table of what was measured, and the tuner that writes it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
from specjax_kernels import launch
from specjax_kernels.launch import Blocks, launch_for, power_of_two, rule_of_thumb, write_table
from specjax_kernels.specs import SPECS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
BLOCKS = Blocks(rows=16, tokens=32, warps=2, stages=5, programs=8)


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "TABLE", tmp_path / "launch_table.json")
    launch.table.cache_clear()
    yield tmp_path / "launch_table.json"
    launch.table.cache_clear()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_spec_has_a_launch(spec, table):
    rows = spec.N * spec.H // spec.K
    found = launch_for(spec.dtype, max(spec.E, spec.v_width), rows, spec.B * spec.K, spec.T * spec.S)
    assert found.tiles * found.rows >= rows > (found.tiles - 1) * found.rows
    assert 1 <= found.splits <= min(launch.MOST_SPLITS, max(1, spec.T * spec.S / launch.LEAST_SPLIT))
    for size in (found.rows, found.tokens, found.splits, found.warps):
        assert size == power_of_two(size)
    tile = 2 * found.tokens * launch.padded(max(spec.E, spec.v_width)) * (4 if spec.dtype == "float32" else 2)
    assert tile * found.stages <= launch.UNKNOWN.shared_memory


def test_splits_fill_the_device_and_no_more(table):
    def splits(heads: int, context: int, rows: int = 8) -> int:
        return launch_for("bfloat16", 128, rows, heads, context).splits

    assert splits(8, 128) == 1  # nothing to divide
    assert splits(8, 4096) == 32  # shares of 128 tokens
    assert splits(8, 131072) == 64
    assert splits(8 * 32, 131072) == 2  # a batch of 32 has programs enough
    assert splits(8 * 64, 131072) == 1
    assert splits(8, 131072, rows=8192) == 1  # as has a prefill


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


def test_a_measured_entry_is_used_on_its_generation_alone(table, monkeypatch):
    name = launch.key("bfloat16", 128, 4)
    write_table("9.0", {name: BLOCKS}, table)
    monkeypatch.setattr(launch, "generation", lambda: "9.0")
    found = launch_for("bfloat16", 128, 4, 8, 131072)
    assert (found.rows, found.tokens, found.warps, found.stages) == (16, 32, 2, 5)
    assert launch_for("bfloat16", 128, 4, 64, 131072).splits == 16  # 8 programs for each of 132 multiprocessors
    assert launch_for("float16", 128, 4, 8, 131072).tokens == 64
    monkeypatch.setattr(launch, "generation", lambda: "8.0")
    assert launch_for("bfloat16", 128, 4, 8, 131072).tokens == 64
    assert launch_for("bfloat16", 128, 4, 8, 131072, blocks=BLOCKS).tokens == 32  # the tuner's word


def test_writing_keeps_what_is_there(table):
    write_table("9.0", {"a": BLOCKS, "b": BLOCKS}, table)
    write_table("8.0", {"a": BLOCKS}, table)
    other = Blocks(32, 64, 4, 2, 4)
    write_table("9.0", {"b": other}, table)
    assert launch.table() == {"8.0": {"a": BLOCKS}, "9.0": {"a": BLOCKS, "b": other}}
    assert list(json.loads(table.read_text())) == ["8.0", "9.0"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rows": 16}, "9.0: a must give the whole numbers rows, tokens, warps, stages, programs, got"),
        (vars(BLOCKS) | {"rows": 24}, "a: rows must be a power of two, got 24"),
        (vars(BLOCKS) | {"tokens": 8}, "tokens must be at least 16, got 8"),
        (vars(BLOCKS) | {"warps": 3}, "warps must be a power of two, got 3"),
        (vars(BLOCKS) | {"stages": 0}, "stages must be at least 1, got 0"),
        (vars(BLOCKS) | {"stages": 2.5}, "whole numbers"),
    ],
)
def test_a_table_that_cannot_be_used(table, entry, message):
    table.write_text(json.dumps({"9.0": {"a": entry}}))
    with pytest.raises(ValueError, match=message):
        launch.table()


def test_the_table_that_ships_can_be_read():
    launch.table.cache_clear()
    for entries in launch.table().values():
        assert all(isinstance(blocks, Blocks) for blocks in entries.values())


# The tuner


@pytest.fixture
def tuner(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from specjax_kernels import tuning

    return tuning


def test_search_finds_the_fastest_by_single_changes(tuner):
    """A cost with its least value two changes away, and candidates that do not run."""
    start, best = Blocks(32, 32, 4, 2, 4), Blocks(32, 64, 4, 3, 4)
    asked = []

    def distance(blocks: Blocks) -> float:
        return sum(abs(math.log2(getattr(blocks, name) / getattr(best, name))) for name in vars(best))

    def score(blocks: Blocks) -> float:
        asked.append(blocks)
        return math.inf if blocks.rows == 64 else (1 + distance(blocks)) / (1 + distance(start))

    found = tuner.search(start, score, lambda blocks, score: None, around=tuner.around)
    assert found.blocks == best
    assert found.score == pytest.approx(1 / (1 + distance(start)))
    assert len(asked) == len(set(asked)), "each is measured once"
    assert start not in asked


def test_noise_changes_nothing(tuner):
    start = Blocks(32, 32, 4, 2, 4)
    assert tuner.search(start, lambda blocks: 0.99, lambda blocks, score: None, around=tuner.around).blocks == start


def test_groups_share_an_entry(tuner):
    groups = tuner.groups(SPECS)
    assert sum(map(len, groups.values())) == len(SPECS)
    names = {spec.name: name for name, members in groups.items() for spec in members}
    assert names["llama8b-decode-1000"] == names["llama8b-decode-4000"] == "bfloat16 width 128 rows 16"
    assert names["llama8b-chain-8"] == "bfloat16 width 128 rows 32"


def test_a_bench_runs_and_refuses_wrong_results(tuner, monkeypatch):
    """On the CPU: the kernel interpreted."""
    from specjax_kernels.specs import named

    bench = tuner.Bench([named("tree")], 2, runs=1, seconds=0.001)
    start = Blocks(16, 16, 4, 2, 4)
    score = bench.score(Blocks(32, 16, 4, 2, 4), start)
    assert 0 < score < math.inf

    right = tuner.pallas_triton.tree_attention

    def wrong(call, *, blocks):
        out = right(call, blocks=blocks)
        return out if blocks == start else out + 1

    monkeypatch.setattr(tuner.pallas_triton, "tree_attention", wrong)
    assert bench.score(Blocks(32, 16, 4, 2, 4), start) == math.inf


@pytest.mark.parametrize(
    ("where", "error"),
    [
        pytest.param(where, error, marks=() if i == j else pytest.mark.slow)
        for i, where in enumerate(["alone", "in a chain", "while it is timed"])
        for j, error in enumerate([KeyError("no\nroom"), MemoryError("x" * 5000), RuntimeError("")])
    ],
)
def test_whatever_a_candidate_raises_it_is_passed_over(tuner, monkeypatch, capsys, where, error):
    """On the CPU: the kernel interpreted. The start still runs."""
    from specjax_kernels.specs import named

    bench = tuner.Bench([named("decode")], 2, runs=1, seconds=0.001)
    start, candidate = Blocks(16, 16, 4, 2, 4), Blocks(16, 16, 4, 2, 8)
    assert bench.runs(start)

    def fail(*args, **options):
        raise error

    patched = {
        "alone": (tuner.pallas_triton, "tree_attention", fail),
        "in a chain": (tuner, "chain_of", lambda attend: fail),
        "while it is timed": (tuner, "interleaved", fail),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*patched[where])
        assert bench.score(candidate, start) == math.inf
    (line,) = capsys.readouterr().out.splitlines()
    told = "cannot be timed" if where == "while it is timed" else "does not run"
    assert line.startswith(f"    decode: {candidate} {told}: {type(error).__name__}: ") and len(line) < 300
    assert 0 < bench.score(candidate, start) < math.inf


GROUPS = {"decode": "float32 width 16 rows 16", "causal-33": "float32 width 16 rows 128"}
"""Specs that are tuned one after the other, each an entry of its own."""


@pytest.fixture
def tune(tuner, table, monkeypatch):
    """(rightly tuned blocks, blocks that fail) -> what `tune` gives for `GROUPS`, nothing being run: 9 rows of time for
    a candidate, but 3 for `best`."""
    from specjax_kernels.specs import named
    from specjax_kernels.timing import Region

    monkeypatch.setattr(launch, "generation", lambda: "9.0")
    monkeypatch.setattr(tuner.Bench, "_prepare", staticmethod(lambda spec, layers: (None, None, None, None)))

    def run(best: Blocks, failing=lambda spec, blocks: False, **options):
        def call(bench, index: int, blocks: Blocks):
            return None if failing(bench._specs[index][0].name, blocks) else lambda: blocks

        def interleaved(calls, *, runs, region_seconds):
            return {name: [Region(3 if call() == best else 9, 0)] for name, call in calls.items()}

        monkeypatch.setattr(tuner.Bench, "call", call)
        monkeypatch.setattr(tuner, "interleaved", interleaved)
        return tuner.tune([named(name) for name in GROUPS], **options)

    return run


def thumb_of(name: str) -> Blocks:
    from specjax_kernels.specs import named

    spec = named(name)
    return rule_of_thumb(spec.dtype, spec.E, spec.N * spec.H // spec.K, "9.0")


def test_tuning_starts_from_the_table(tune, table):
    start, best = Blocks(32, 32, 2, 5, 8), Blocks(32, 64, 2, 5, 8)
    write_table("9.0", dict.fromkeys(GROUPS.values(), start), table)
    records = tune(best)
    assert [(record["entry"], record["start"], record["best"]) for record in records] == [
        (entry, vars(start), vars(best)) for entry in GROUPS.values()
    ]
    assert all(record["score"] == pytest.approx(1 / 3) for record in records)
    assert launch.table() == {"9.0": dict.fromkeys(GROUPS.values(), best)}
    json.dumps(records, allow_nan=False)


def test_a_stale_entry_gives_way_to_the_rule_of_thumb(tune, table, capsys):
    stale = Blocks(128, 128, 2, 5, 8)
    write_table("9.0", dict.fromkeys(GROUPS.values(), stale), table)
    records = tune(BLOCKS, lambda spec, blocks: spec == "decode" and blocks == stale)
    assert [record["start"] for record in records] == [vars(thumb_of("decode")), vars(stale)]
    (told,) = (line for line in capsys.readouterr().out.splitlines() if "rule of thumb is tried" in line)
    assert told.strip().startswith(GROUPS["decode"])


@pytest.mark.parametrize("text", ['{"9.0": {"a": {"rows": 24}}}', "[]", "{"])
def test_a_table_that_cannot_be_read_gives_way_too(tune, table, text, capsys):
    table.write_text(text)
    records = tune(BLOCKS, table=table.parent / "other.json")
    assert [record["start"] for record in records] == [vars(thumb_of(name)) for name in GROUPS]
    assert capsys.readouterr().out.count("the table cannot be used") == 2


def test_a_group_that_nothing_runs_is_skipped_and_the_others_are_not(tune, table, capsys):
    records = tune(BLOCKS, lambda spec, blocks: spec == "decode")
    assert [record["entry"] for record in records] == [GROUPS["causal-33"]]
    assert list(launch.table()["9.0"]) == [GROUPS["causal-33"]]
    assert f"{GROUPS['decode']}: skipped" in capsys.readouterr().out


def test_a_group_that_cannot_be_prepared_is_skipped(tune, tuner, monkeypatch, capsys):
    def prepare(spec, layers):
        if spec.name == "decode":
            raise MemoryError("out of memory")
        return (None,) * 4

    monkeypatch.setattr(tuner.Bench, "_prepare", staticmethod(prepare))
    assert [record["entry"] for record in tune(BLOCKS)] == [GROUPS["causal-33"]]
    assert f"{GROUPS['decode']}: skipped, cannot be prepared: MemoryError: out of memory" in capsys.readouterr().out


def test_a_table_that_cannot_be_written_loses_nothing(tune, tmp_path, monkeypatch, capsys):
    nowhere = tmp_path / "read-only" / "launch_table.json"
    monkeypatch.setattr(launch, "TABLE", nowhere)
    best = Blocks(16, 64, 4, 4, 4)
    records = tune(best)
    assert [(record["entry"], record["best"]) for record in records] == [(x, vars(best)) for x in GROUPS.values()]
    out = capsys.readouterr().out
    assert out.count(f"{nowhere} cannot be written") == 2 and "FileNotFoundError" in out and "--table" in out
    other = tmp_path / "other.json"
    assert tune(best, table=other) == records
    assert json.loads(other.read_text()) == {"9.0": dict.fromkeys(GROUPS.values(), vars(best))}
    assert "cannot be written" not in capsys.readouterr().out and not nowhere.exists()


def test_tuning_without_a_gpu_is_refused():
    done = subprocess.run([sys.executable, BENCHMARKS / "kernels.py", "--tune"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--tune measures on an NVIDIA GPU" in done.stderr


# The benchmark


@pytest.fixture
def kernels(tuner, monkeypatch):
    """`benchmarks/kernels.py`; the folder kernels/ is a package to Python, too."""
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    import kernels

    yield kernels
    for name in ("kernels", "records"):
        sys.modules.pop(name, None)


def test_the_table_to_write_is_the_tuners(kernels, tuner, monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(kernels, "generation", lambda: "9.0")
    monkeypatch.setattr(tuner, "tune", lambda specs, **options: asked.update(options, specs=specs) or ["found"])
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--tune", "--spec", "decode", "--table", "here.json"])
    kernels.main()
    assert asked["table"] == Path("here.json") and [spec.name for spec in asked["specs"]] == ["decode"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["entries"] == ["found"]
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--table", "here.json"])
    with pytest.raises(SystemExit, match="2"):
        kernels.main()


def test_on_a_gpu_no_cache_holds_the_pools(tuner, monkeypatch):
    from specjax_kernels import chains

    assert {chains.enough_sets(spec, 4) for spec in SPECS if spec.bytes_read} == {1}, "on a CPU"
    monkeypatch.setattr(chains.jax, "default_backend", lambda: "gpu")
    for spec in SPECS:
        if "bench" in spec.tags:
            layers = chains.enough_layers(spec)
            assert layers * chains.enough_sets(spec, layers) * spec.bytes_read >= 4 * 60e6
    seen = []
    call = chains.rotating(lambda *inputs: seen.append(inputs), [(1, 2), (3, 4), (5, 6)])
    for _ in range(5):
        call()
    assert seen == [(1, 2), (3, 4), (5, 6), (1, 2), (3, 4)]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_calls_are_timed_as_the_device_needs(kernels, monkeypatch, capsys, backend):
    """One at a time on a CPU; on a GPU many together, over several sets of pools. (XLA's attention runs on both.)"""
    from specjax_kernels import chains
    from specjax_kernels.specs import named
    from specjax_kernels.timing import Region

    spec, used, pools = named("decode"), set(), set()
    monkeypatch.setattr(chains, "CACHES", 3 * 2 * spec.bytes_read)
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: backend)
    make_inputs = chains.inputs_of

    def inputs_of(args, layers, sets):
        inputs = make_inputs(args, layers, sets)
        pools.update(pool[0].unsafe_buffer_pointer() for each in inputs for pool in each[3])
        return inputs

    def seconds(call):
        used.add("seconds")
        return float(call().sum() * 0) + 1

    def interleaved(calls, *, runs, region_seconds):
        used.add("regions")
        return {name: [Region(float(call().sum() * 0) + 1, 0)] * runs for name, call in calls.items()}

    monkeypatch.setattr(chains, "inputs_of", inputs_of)
    monkeypatch.setattr(kernels, "seconds", seconds)
    monkeypatch.setattr(kernels, "interleaved", interleaved)
    (record,) = kernels.measure(spec, ["xla"], 2, 5, 1e9)
    assert used == {"seconds" if backend == "cpu" else "regions"}
    assert record["sets"] == (1 if backend == "cpu" else 3)
    assert len(pools) == 2 * record["sets"]
    assert record["samples"] == [500_000] * 5


@pytest.mark.parametrize(
    ("backend", "version", "expected"),
    [("cpu", "", None), ("gpu", "PJRT C API\ncuda 12090", "9.0"), ("gpu", "PJRT C API\nrocm 60200", None)],
)
def test_the_generation_is_the_devices(monkeypatch, backend, version, expected):
    device = types.SimpleNamespace(client=types.SimpleNamespace(platform_version=version), compute_capability="9.0")
    monkeypatch.setattr(launch.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(launch.jax, "devices", lambda: [device])
    assert launch.generation() == expected
