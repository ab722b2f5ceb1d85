"""The cost model of several devices: against bytes and times computed by hand, limits, and published measurements."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import pytest
from specjax_kernels.mesh import spec

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from scale_models import Acceptance, described, llama_70b, models

from specjax.cache import PageSpec
from specjax.costs import (
    EXCHANGE,
    PLAIN,
    PRODUCTS,
    Decoding,
    Tree,
    layer_ops,
    machine,
    op_cost,
    step_cost,
)
from specjax.devices import DEVICES
from specjax.fabric import HGX, Fabric, Protocol
from specjax.models import make_target, table
from specjax.models.params import dimensions, leaves_of
from specjax.sharding import fitted
from specjax.shares import held_bytes, leaf_share, page_bytes, page_share

H200 = machine(DEVICES["H200"], "bfloat16", "gpu")
RING = Protocol("ring", True, 1e-6, 2e-6, 5e-6, 1.0)
MODELS = models()
EIGHT_B = MODELS["8b"].outline
DEEPSEEK = MODELS["deepseek-v3"].outline


def layer_of(outline, devices):
    config, target = outline.target.config, outline.target
    return [*layer_ops(table(config)[-1].leaves, dimensions(config), config, target.pages[-1], bits=outline.bits,
                       devices=devices)]  # fmt: skip


# Exchanges.


def test_a_ring_by_hand():
    """8 devices send an eighth of 8 MB 14 times; 16 over two hosts send a sixteenth, of 30 steps 2 between hosts."""
    fabric = Fabric(link=100e9, network=10e9, protocols=(RING,))
    assert fabric.all_reduce(8e6, 8) == pytest.approx(1e-6 + 14 * (2e-6 + 1e6 / 100e9))
    assert fabric.all_reduce(16e6, 16) == pytest.approx(1e-6 + 28 * 2e-6 + 2 * 5e-6 + 30 * 1e6 / 80e9)
    assert fabric.all_gather(1e6, 4) == pytest.approx(1e-6 + 3 * (2e-6 + 1e6 / 100e9))


def ring_of_arrays(values: list[list[float]]) -> tuple[list[list[float]], int]:
    """A ring that sums: every device passes one part a step; returns the arrays and the numbers that each sent."""
    n = len(values)
    sent = 0
    for step in range(2 * (n - 1)):
        moves = [((i - step) % n, values[i][(i - step) % n]) for i in range(n)]
        for i, (part, value) in enumerate(moves):
            reduced = step < n - 1
            values[(i + 1) % n][part] = values[(i + 1) % n][part] + value if reduced else value
        sent += 1
    return values, sent


def test_the_steps_of_a_ring_that_sums():
    """The formula's 2 (n - 1) parts of 1/n, counted in a ring that is run."""
    arrays, sent = ring_of_arrays([[float(10 * i + j) for j in range(4)] for i in range(4)])
    assert arrays == [[60.0, 64.0, 68.0, 72.0]] * 4
    fabric = Fabric(link=1.0, protocols=(RING._replace(start=0.0, link=0.0),))
    assert fabric.all_reduce(4, 4) == sent


def test_one_kernel_for_small_arrays_and_two_steps_for_larger():
    fabric = Fabric(link=100e9, protocols=(RING._replace(start=1.0),), direct=4e-6, step=1e-6)
    assert fabric.all_reduce(1e3, 8) == pytest.approx(5e-6 + 7e3 / 100e9)
    assert fabric.all_reduce(1e9, 8) == pytest.approx(6e-6 + 1.75e9 / 100e9)
    assert fabric.all_reduce(1e3, 16) > 1, "between hosts there is no such kernel"


def test_fabrics():
    assert HGX.all_reduce(1e6, 1) == HGX.all_gather(1e6, 1) == 0
    assert [HGX.hosts(n) for n in (1, 8, 16)] == [1, 1, 2]
    with pytest.raises(ValueError, match="9 devices"):
        HGX.hosts(9)
    times = [HGX.all_reduce(size, 8) for size in (1, 1e3, 1e5, 1e7, 1e9)]
    assert times == sorted(times)
    assert HGX.all_reduce(1e5, 2) < HGX.all_reduce(1e5, 8) < HGX.all_reduce(1e5, 16)


def test_beside_published_times():
    """Within a third on one host; between two, small arrays took NCCL longer than its own constants say."""
    from scale import MEASURED

    for _, devices, size, seconds in MEASURED:
        found = HGX.all_reduce(size, devices)
        assert (0.65 if devices <= 8 else 0.3) * seconds < found < 1.35 * seconds, (devices, size)


# Shares.


def test_bytes_of_a_layer_by_hand():
    """Llama-3.1-8B: query 4096 x 4096, key and value 4096 x 1024, output 4096 x 4096, three matrices of 4096 x 14336.
    With 16 devices each has two query heads and one key/value head of eight, which two devices share."""
    for devices, heads in ((1, 48), (2, 24), (8, 6), (16, 4)):
        held = 2 * 4096 * (128 * heads + 4096 // devices + 3 * 14336 // devices)
        assert sum(op.weights for op in layer_of(EIGHT_B, devices)) == held
    attention = {n: next(op for op in layer_of(EIGHT_B, n) if op.token_bytes) for n in (1, 8, 16)}
    assert [attention[n].heads for n in (1, 8, 16)] == [(8, 4), (1, 4), (1, 2)]
    assert [attention[n].token_bytes for n in (1, 8, 16)] == [4096, 512, 512]


def test_a_step_of_70b_on_eight_devices_by_hand():
    """Llama-3.1-70B, 32 requests behind 2,048 tokens: each device reads an eighth of 80 layers and of the output, and
    of the pages one key/value head; 161 arrays of 32 x 8192 are summed, and eight bytes a row are gathered."""
    step = step_cost(Decoding.of(MODELS["70b"].outline, 8), H200, batch=32, context=2048)
    layer = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672)
    weights = 2 * (80 * layer + 8192 * 128256) / 8
    products = step.parts["verify, products"]
    assert weights < products.bytes < 1.05 * weights, "and the rows"
    assert weights / 4.8e12 / 0.9 / 0.94 < products.seconds < 1.25 * weights / 4.8e12 / 0.9 / 0.94
    pages = 32 * 2048 * 80 * 2 * 128 * 2
    assert pages < step.parts["verify, attention"].bytes < 1.15 * pages, "and partial results of 16 splits"
    exchanges = step.parts["verify, exchanges"]
    assert exchanges.bytes == 161 * 32 * 8192 * 2 + 32 * 8
    assert exchanges.seconds == pytest.approx(161 * HGX.all_reduce(32 * 8192 * 2, 8) + HGX.all_gather(32 * 8, 8))


def test_latents_are_whole_on_every_device():
    """DeepSeek-V3: (512 + 64) numbers of two bytes a token and layer, 61 layers, however many devices."""
    for devices in (1, 8, 16):
        assert page_bytes(DEEPSEEK.target.pages, devices) == 61 * 576 * 2
        assert next(op for op in layer_of(DEEPSEEK, devices) if op.token_bytes).heads == (1, 128 // devices)


def test_shares_of_leaves():
    config = DEEPSEEK.target.config
    shares = {leaf.name: leaf_share(leaf, dimensions(config), 16) for leaf in leaves_of(table(config))}
    assert {name for name, share in shares.items() if share == 1 and "norm" not in name} == {
        "query_down", "latent", "router", "router_bias",
    }  # fmt: skip
    assert {share for share in shares.values() if share < 1} == {1 / 16}
    odd = replace(llama_70b(), num_heads=60, num_kv_heads=6)
    qkv = next(leaf for leaf in leaves_of(table(odd)) if leaf.name == "qkv")
    assert [leaf_share(qkv, dimensions(odd), n) for n in (3, 4)] == [1 / 3, 1.0], "four devices cannot share six heads"
    key = EIGHT_B.target.pages[0].key
    assert [page_share(key, n) for n in (4, 8, 16, 12)] == [1 / 4, 1 / 8, 1 / 8, 1.0]


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_shares_are_those_of_the_parts_that_devices_get(devices, bias):
    """Bytes by the rule, and of the arrays as `fitted` describes them, split as the mesh splits them."""
    config = replace(EIGHT_B.target.config, attention_bias=bias)
    wide = fitted(config, devices)
    expected = {"weights": 0, "pages": 0}
    for leaf in leaves_of(table(wide)):
        shape = leaf.shape(dimensions(wide))
        expected["weights"] += 2 * prod(shape) // (devices if any(spec(leaf.axes, shape, devices)) else 1)
    for page in jax.tree.leaves(make_target(wide).pages, is_leaf=lambda leaf: isinstance(leaf, PageSpec)):
        expected["pages"] += 2 * prod(page.shape) // (devices if any(spec(page.axes, page.shape, devices)) else 1)
    weights = held_bytes(leaves_of(table(config)), dimensions(config), "bfloat16", devices)
    assert {"weights": weights, "pages": page_bytes(make_target(config).pages, devices)} == expected


@pytest.mark.parametrize("name", MODELS)
def test_exchanges_of_a_step(name):
    """Two a layer, one for the embedding, one for the best token; a chain's level adds four, the observation three."""
    outline = MODELS[name].outline
    layers = outline.target.config.num_layers
    decoding = Decoding.of(outline, 4)
    plain, chain = (step_cost(decoding, H200, tree=tree) for tree in (PLAIN, Tree(3, 1, 4)))
    found = [sum(part.kernels for key, part in step.parts.items() if key.endswith(EXCHANGE)) for step in (plain, chain)]
    assert found[0] == 2 * layers + 2 <= 2 * layers + 4
    assert found[1] - found[0] == 2 * 4 + 3 + 1
    single = step_cost(Decoding.of(outline), H200, tree=Tree(3, 1, 4))
    assert not any(key.endswith(EXCHANGE) for key in single.parts)


def test_an_exchange_takes_what_the_fabric_says():
    op = next(op for op in layer_of(EIGHT_B, 8) if op.kind == EXCHANGE)
    cost = op_cost(op, H200, batch=4, rows=32, context=100)
    assert (cost.bytes, cost.seconds) == (32 * 8192, HGX.all_reduce(32 * 8192, 8))


# Limits.


def test_without_latency_n_devices_take_an_nth():
    """Of a dense model whose heads divide: infinite links, kernels that take no time, no norms to read."""
    free = replace(H200, kernel=0.0, attention=0.0, fabric=Fabric(link=1e30, network=1e30, protocols=(
        RING._replace(start=0.0, link=0.0, network=0.0),)))  # fmt: skip
    times = {}
    for devices in (1, 8):
        ops = [(op, n) for op, n in Decoding.of(EIGHT_B, devices).forward if op.kind == PRODUCTS]
        times[devices] = sum(n * op_cost(op._replace(row_bytes=0), free, 1, 1, 0).seconds for op, n in ops)
    assert times[1] == pytest.approx(8 * times[8])


@pytest.mark.parametrize("devices", [1, 8])
def test_infinite_bandwidth_leaves_the_products(devices):
    """Two operations for each weight and row, by the device's speed; of 8 devices each has an eighth."""
    fast = replace(H200, bandwidth=1e30, kernel=0.0, attention=0.0, fabric=Fabric(link=1e30, network=1e30, protocols=(
        RING._replace(start=0.0, link=0.0, network=0.0),)))  # fmt: skip
    weights = 32 * 218_103_808 + 4096 * 128256
    found = step_cost(Decoding.of(replace(EIGHT_B, head=None), devices), fast, batch=64, context=0).seconds
    assert found == pytest.approx(2 * 64 * weights / devices / H200.flops, rel=1e-3)


def test_slower_links_and_more_hosts_take_longer():
    decoding = Decoding.of(EIGHT_B, 8)
    links = [replace(H200, fabric=Fabric(link=link)) for link in (1e9, 10e9, 100e9, 1000e9)]
    times = [step_cost(decoding, on, batch=64).seconds for on in links]
    assert times == sorted(times, reverse=True)
    assert step_cost(Decoding.of(EIGHT_B, 16), H200).seconds > step_cost(decoding, H200).seconds


# Parameters and drafts.


def test_parameters_are_those_published():
    """DeepSeek-V3 in float8: 671 billion parameters and 14 of its MTP layer; embedding and output have two bytes."""
    from scale import held_bytes

    ends = 2 * 129280 * 7168
    assert held_bytes(MODELS["deepseek-v3"], 1) == pytest.approx(671e9 + 11.5e9 + ends, rel=0.002)
    assert held_bytes(MODELS["70b"], 1) == pytest.approx(2 * 70.6e9, rel=0.03)
    assert held_bytes(MODELS["8b"], 1) == pytest.approx(2 * 8.03e9, rel=0.06)


def test_acceptance_gives_the_published_length():
    found = Acceptance.of(3.2, 7, "")
    assert found.length(Tree(7, 1, 8)) == pytest.approx(sum(found.later**i for i in range(8))) == pytest.approx(3.2)
    two = Acceptance.of(3.2, 7, "", first=0.85)
    assert two.length(Tree(1, 1, 2)) == pytest.approx(1.85) and two.length(Tree(7, 1, 8)) == pytest.approx(3.2)


def test_described_models_have_no_draft_without_a_head():
    assert not Decoding.of(described(llama_70b(), None), 2).drafts_with_model
