"""The cost model: against declared parameters, XLA's counts, brute force, known figures, and devices made up."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_helpers import FAMILIES, WINDOW
from specjax_kernels import CAUSAL
from tiny_checkpoints import SIZES

from specjax import PoolShape, RopeConfig, make_target
from specjax.cache import init_cache
from specjax.config import Experts, HeadConfig, ModelConfig
from specjax.costs import (
    ATTENTION,
    KERNEL_RANGE,
    PLAIN,
    PRODUCTS,
    Cost,
    Decoding,
    Machine,
    Tree,
    cheapest_tree,
    distinct_experts,
    expected_accept,
    layer_ops,
    machine,
    op_cost,
    splits,
    step_cost,
)
from specjax.devices import DEVICES
from specjax.drafters import NoDraft, Params, StandaloneParams
from specjax.drafters.base import none_drafter
from specjax.models import init_params, table
from specjax.models.params import Bits, dimensions
from specjax.outline import Outline, outline

ROPE = RopeConfig(theta=500000.0)
LLAMA = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, ROPE, 131072, False, dtype="bfloat16")
HEAD = HeadConfig(
    "eagle3", 4096, 3 * 4096, 14336, 32, 8, 128, 1e-5, ROPE, 32000, aux_layers=(1, 15, 28), own_head=True, mapped=True,
    dtype="bfloat16",
)  # fmt: skip
CHAIN, BUSHY = Tree(7, 1, 8), Tree(5, 8, 32)
H200 = machine(DEVICES["H200"], "bfloat16", "gpu")
INT8 = Bits(8, ends=True)


def described(config: ModelConfig, head: HeadConfig | None = None, **given: Any) -> Outline:
    none: dict[str, Any] = {
        "model": None,
        "bits": None,
        "draft_bits": None,
        "headers": False,
        "params": Params(None, None),
    }
    return Outline(make_target(config), drafter=none_drafter(), head=head, **none | given)


EIGHT_B = Decoding.of(described(LLAMA, HEAD))


# Known figures: Llama-3.1-8B in bfloat16 with an EAGLE-3 head on an H200, behind 1024 tokens.


@pytest.mark.parametrize(
    ("batch", "tree", "milliseconds"),
    [
        (1, PLAIN, (4.8, 5.1)),
        (1, CHAIN, (6.4, 6.9)),
        (1, BUSHY, (6.0, 6.5)),
        (8, PLAIN, (5.1, 5.4)),
        (16, PLAIN, (5.4, 5.7)),
        (16, CHAIN, (7.4, 7.8)),
        (64, PLAIN, (7.5, 7.8)),
    ],
)
def test_milliseconds_of_a_step(batch, tree, milliseconds):
    least, most = milliseconds
    assert least <= 1e3 * step_cost(EIGHT_B, H200, batch=batch, tree=tree).seconds <= most


@pytest.mark.parametrize(
    ("batch", "rows", "tree", "ratio"),
    [
        (1, 1, CHAIN, 1.35), (1, 1, BUSHY, 1.27), (8, 8, CHAIN, 1.36), (8, 8, BUSHY, 1.7), (8, 16, BUSHY, 2.8),
        (64, 64, CHAIN, 2.4), (64, 64, BUSHY, 7.5),
    ],
)  # fmt: skip
def test_ratio_of_a_step_to_a_plain_one(batch, rows, tree, ratio):
    """`rows` of the batch bucket that runs `batch` requests."""
    plain, drafted = (step_cost(EIGHT_B, H200, batch=rows, tree=each) for each in (PLAIN, tree))
    assert drafted.seconds / plain.seconds == pytest.approx(ratio, rel=0.05)


def test_products_reach_80_to_93_percent_of_a_copy():
    shares = [
        each.weights / H200.bandwidth / op_cost(each, H200, 1, 1, 0).seconds
        for each, _ in (*EIGHT_B.forward, *EIGHT_B.output)
        if each.kind == PRODUCTS
    ]
    assert 0.74 < min(shares) < 0.82 and 0.92 < max(shares) < 0.95


def test_counts_of_a_plain_step():
    cost = step_cost(Decoding.of(described(LLAMA)), H200)
    assert cost.total.kernels == pytest.approx(472, abs=2)  # compiled: 471 kernels and a copy
    assert cost.phase("commit").kernels == 64
    observing = step_cost(EIGHT_B, H200).total.kernels
    assert observing == cost.total.kernels + 9  # compiled for 4 layers: 84 kernels with an EAGLE-3 head, 75 without
    layer = [*layer_ops(table(LLAMA)[1].leaves, dimensions(LLAMA), LLAMA, make_target(LLAMA).pages[0])]
    assert sum(op.kernels for op in layer) == 12
    weights = 2 * (32 * 218_103_808 + 4096 * 128256)
    assert cost.parts["verify, products"].bytes == pytest.approx(weights, rel=0.002)
    assert cost.parts["verify, attention"].bytes > 1024 * 131072
    assert cost.total.flops == pytest.approx(weights, rel=0.05), "two for each number of two bytes"


def test_a_chain_with_an_int8_head():
    """The step's time by the kernels' range: 700 tokens/s need the fast end of it."""
    few = Decoding.of(described(LLAMA, HEAD, draft_bits=INT8))
    saved = step_cost(EIGHT_B, H200, tree=CHAIN).seconds - step_cost(few, H200, tree=CHAIN).seconds
    assert saved == pytest.approx(0.7e-3, rel=0.15)
    side_by_side = step_cost(EIGHT_B, H200).seconds - step_cost(EIGHT_B, H200, concurrent=True).seconds
    assert 0.1e-3 < side_by_side < 0.17e-3
    fast, slow = (
        step_cost(few, replace(H200, kernel=kernel), tree=CHAIN, concurrent=True).rate(3.91) for kernel in KERNEL_RANGE
    )
    assert slow < 650 < 700 < fast


def test_no_bucket_in_which_the_chosen_tree_is_slower_than_plain():
    """And the chosen tree grows no wider with the batch."""
    accept = expected_accept((0.78, 0.07, 0.03, 0.02, 0.01))
    assert accept(CHAIN) == pytest.approx(3.91, rel=0.02)
    trees = [Tree(steps, topk, nodes) for steps in (3, 5, 7) for topk in (1, 4, 8) for nodes in (4, 6, 8, 16, 32)
             if steps + 1 <= nodes and (topk > 1 or nodes == steps + 1)]  # fmt: skip
    chosen = [cheapest_tree(EIGHT_B, H200, batch, trees, accept) for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64)]
    for step in chosen:
        plain = step_cost(EIGHT_B, H200, batch=step.batch)
        assert step.tree != PLAIN and step.rate(accept(step.tree)) > plain.rate()
    rows = [step.tree.nodes for step in chosen]
    assert rows == sorted(rows, reverse=True) and rows[0] > rows[-1]


# Bytes and operations.


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_family_is_read_once(tmp_path, family):
    """Against the parameters that a model is made with; of stacked experts one token needs a few."""
    name, own = FAMILIES[family]
    tied = family.startswith("gemma")
    given = {"architectures": [f"{name}ForCausalLM"], "tie_word_embeddings": tied, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | own | given))
    found = outline(str(tmp_path), draft=NoDraft(), platform="gpu")
    config = found.target.config
    made = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    expected = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        key = path[-1].key
        if leaf.ndim > 1 and (key != "embed" or tied):
            share = config.experts.per_token / config.experts.count if key.startswith("experts_") else 1
            expected += share * leaf.size * leaf.dtype.itemsize
    model = Decoding.of(found)
    ops = [*model.forward, *model.output]
    read = sum(count * op_cost(op._replace(row_bytes=0), H200, 1, 1, 0).bytes for op, count in ops)
    partials = sum(count * 2 * op.partial * splits(op.heads[0], op.heads[1], 8192) for op, count in ops)
    assert read - partials == pytest.approx(expected)
    flops = sum(count * op_cost(op, H200, 1, 1, 0).flops for op, count in ops)
    assert flops == pytest.approx(expected), "two for each number of two bytes"
    kept = sum(count * op.token_bytes for op, count in ops)
    assert kept == sum(model.written) > 0
    windows = [op.window for op, _ in ops if op.kind == ATTENTION]
    assert (WINDOW in windows) == any(config.windows)


def program(config: ModelConfig, rows: int) -> Any:
    """The target's forward over rows behind nothing, and its logits, compiled for this CPU without our kernels."""
    target = make_target(config, backend="reference")

    def forward(params: Any, tokens: Any, cache: Any, page_table: Any, start: Any) -> Any:
        positions = start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
        embedded = target.embed(params, tokens)
        output = target.forward(params, embedded, positions, CAUSAL, cache, page_table, start)
        return target.unembed(params, output.hidden), output.block

    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    params = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    cache = jax.eval_shape(lambda: init_cache(target.pages, PoolShape(2, 4)))
    compiled = jax.jit(forward).lower(params, int32((1, rows)), cache, int32((1, 2)), int32((1,))).compile()
    found = compiled.cost_analysis()
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize(("rows", "counted"), [(1, ("flops", "bytes")), (8, ("flops",))])
def test_what_xla_counts_in_the_program(monkeypatch, rows, counted):
    """Bytes of one row only: products of several are compiled with transposed copies on a CPU."""
    monkeypatch.setenv("SPECJAX_CPU_KERNELS", "0")
    config = ModelConfig("llama", 4096, 1024, 3072, 2, 8, 4, 128, 1e-5, ROPE, 64, tied_embeddings=False)
    expected = program(config, rows)
    cost = step_cost(
        Decoding.of(described(config)), machine(DEVICES["H200"], "float32", "cpu"), tree=Tree(rows - 1, 1, rows),
        context=0,
    ).phase("verify")  # fmt: skip
    xla = {"flops": expected["flops"], "bytes": expected["bytes accessed"]}
    for name in counted:
        assert getattr(cost, name) == pytest.approx(xla[name], rel=0.05), name


def test_distinct_experts_against_draws():
    experts, generator = Experts(count=32, per_token=4, width=8, layers=(0,)), np.random.default_rng(0)
    for rows in (1, 5, 40):
        draws = [len({e for _ in range(rows) for e in generator.permutation(32)[:4]}) for _ in range(400)]
        assert distinct_experts(experts, rows) == pytest.approx(np.mean(draws), rel=0.02)


def test_a_window_bounds_what_is_attended():
    windowed = replace(LLAMA, windows=(512,) * 31 + (None,))
    model, whole = Decoding.of(described(windowed)), Decoding.of(described(LLAMA))
    more, most = (step_cost(model, H200, batch=4, context=n).total.bytes for n in (512, 1536))
    assert most - more == 4 * 1024 * 4096, "one layer of 32 sees the rest"
    assert step_cost(whole, H200, context=512).total == step_cost(model, H200, context=512).total


@pytest.mark.parametrize("bits", [4.25, 8])
def test_quantised_weights(bits):
    few = Decoding.of(described(LLAMA, bits=Bits(bits, ends=False)))
    read = step_cost(few, H200).parts["verify, products"].bytes
    assert read == pytest.approx(32 * 218_103_808 * bits / 8 + 2 * 4096 * 128256, rel=0.002)


def test_a_standalone_model_drafts():
    small = replace(LLAMA, num_layers=4)
    found = described(LLAMA, model=make_target(small), params=Params(None, StandaloneParams(None)))
    drafted = step_cost(Decoding.of(found), H200, tree=Tree(3, 1, 4))
    own = step_cost(Decoding.of(described(small)), H200).parts["verify, products"]
    assert drafted.parts["draft, products"].bytes == pytest.approx(2 * own.bytes + 2 * 4096 * 128256, rel=0.01)
    assert drafted.phase("draft").kernels < 3 * 4 * 14 + 60


# The form of the model.


def milliseconds(**changes: Any) -> float:
    on = replace(H200, **{name: changes.pop(name) for name in ("bandwidth", "flops", "kernel") if name in changes})
    return step_cost(EIGHT_B, on, **{"batch": 4, "tree": CHAIN, "context": 1024} | changes).seconds


@pytest.mark.parametrize(
    "changes",
    [
        [{"batch": n} for n in (1, 2, 8, 64, 256)],
        [{"context": n} for n in (0, 100, 10_000)],
        [{"tree": Tree(n, 1, n + 1)} for n in (1, 3, 7, 15)],
        [{"tree": Tree(5, 8, n)} for n in (8, 32, 64)],
        [{"tree": Tree(5, n, 32)} for n in (4, 8, 16)],
        [{"bandwidth": n} for n in (4e12, 2e12, 1e12)],
        [{"batch": 64, "flops": n} for n in (8e14, 4e14, 1e14)],
        [{"kernel": n} for n in (1e-6, 2e-6, 4e-6)],
    ],
)
def test_time_grows(changes):
    found = [milliseconds(**each) for each in changes]
    assert found == sorted(found) and found[0] < found[-1]


def test_a_cpu_adds_reading_and_multiplying():
    """So it did with SmolLM2-135M in float32: 19.4, 24.1, 27.8, 41.1 ms for 1, 2, 4, 8 tokens, least of 30 runs
    (benchmarks/results/before-after-2026-11-23-kernels-off-float32.json)."""
    record = json.loads(
        (
            Path(__file__).parent.parent / "benchmarks/results/before-after-2026-11-23-kernels-off-float32.json"
        ).read_text()
    )
    measured = {row["tokens"]: row["least"]["after"] for row in record["rows"]}
    config = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, ROPE, 8192, tied_embeddings=True)
    model = Decoding.of(described(config))

    def forward(on: Machine, rows: int) -> Cost:
        return step_cost(model, on, tree=Tree(rows - 1, 1, rows), context=300).phase("verify")

    def fitted(on: Machine) -> Machine:
        """With the two speeds that give the times of 1 and of 8 tokens."""
        for _ in range(30):
            for field, rows in (("bandwidth", 1), ("flops", 8)):
                on = replace(on, **{field: getattr(on, field) * forward(on, rows).seconds / measured[rows]})
        return on

    cpu = fitted(replace(machine(DEVICES["H200"], "float32", "cpu"), bandwidth=3e10, flops=1e11))
    for rows in (2, 4):
        assert forward(cpu, rows).seconds == pytest.approx(measured[rows], rel=0.1)
    assert 2e10 < cpu.bandwidth < 8e10


def brute_force(by_rank: tuple[float, ...], tree: Tree) -> float:
    """The sum of the probabilities of the N - 1 likeliest nodes: every prefix of every sequence of ranks."""
    ranks = range(min(tree.topk, len(by_rank)))
    nodes = [np.prod([by_rank[i] for i in path]) for n in range(1, tree.depth + 1)
             for path in itertools.product(ranks, repeat=n)]  # fmt: skip
    return 1 + sum(sorted(nodes, reverse=True)[: tree.nodes - 1])


@pytest.mark.parametrize("tree", [PLAIN, Tree(3, 1, 4), Tree(2, 2, 4), Tree(3, 3, 12), Tree(2, 2, 64)])
def test_expected_accept_lengths(tree):
    by_rank = (0.7, 0.15, 0.05)
    assert expected_accept(by_rank)(tree) == pytest.approx(brute_force(by_rank, tree))


@pytest.mark.parametrize(
    ("device", "batch", "accept", "chosen"),
    [
        ({"flops": 1e18}, 1, 0.8, Tree(5, 8, 32)),  # multiplying costs nothing
        ({"flops": 3e12}, 64, 0.8, PLAIN),  # each checked node costs what it saves
        ({"kernel": 1e-3}, 1, 0.3, PLAIN),  # a level has 23 kernels, the target's one layer 14
        ({}, 64, 0.1, PLAIN),  # a draft that is hardly ever right
        ({}, 64, 0.8, Tree(3, 1, 4)),
    ],
)
def test_the_cheapest_tree_of_a_made_up_device(device, batch, accept, chosen):
    trees = [Tree(3, 1, 4), Tree(5, 8, 32)]
    model = Decoding.of(described(replace(LLAMA, num_layers=1), HEAD)) if "kernel" in device else EIGHT_B
    found = cheapest_tree(model, replace(H200, **device), batch, trees, expected_accept((accept, 0.1, 0.05)))
    assert found.tree == chosen


def test_devices():
    for name, device in DEVICES.items():
        on = machine(device, "bfloat16", "gpu")
        assert (on.name, on.bandwidth, on.flops) == (name, 0.9 * device.bandwidth, 0.7 * device.flops)
    measured = machine(DEVICES["L40S"]._replace(measured=True), "float32", "cpu")
    assert (measured.bandwidth, measured.flops) == (864e9, 91.6e12) and not measured.overlapped


# The benchmark.


def test_estimates_beside_a_record_of_the_device(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    from cost_model import compared, measured

    step = {"kind": "step", "batch": 8, "context": 1024, "implementation": "pallas"}
    rows = [
        {"kind": "ceiling"},
        step | {"tree": None, "milliseconds": 5.0},
        step | {"tree": [7, 1, 8], "milliseconds": 9.0},
    ]
    record = {"parts": {"steps-8": {"rows": rows}}}
    (tmp_path / "gpu-check-nvidia-h200-2026-11-23.json").write_text(json.dumps(record))
    (tmp_path / "gpu-check-nvidia-l40s-2026-11-23.json").write_text(json.dumps(record))
    found = [compared(EIGHT_B, H200, row) for row in measured("H200", tmp_path)]
    assert [row["ratio"] for row in found] == pytest.approx([5.0 / 5.195, 9.0 / 7.164], rel=1e-3)
