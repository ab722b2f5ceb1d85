"""An optimiser step: sums over parts, placement on devices, master weights, schedule, clipping, decay."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from toy_models import tiny_llama

from specjax.config import HeadConfig, RopeConfig
from specjax.models.draft_head import draft_head
from specjax.models.head_spec import head_sizes, head_table
from specjax.models.params import map_leaves
from specjax.train import head as heads
from specjax.train.data import Example, Rows, pack
from specjax.train.features import teach, training_target
from specjax.train.options import DraftSettings, LossSettings, OptimizerSettings
from specjax.train.unroll import packed_attention
from specjax.train.update import TrainState, make_optimizer, make_update, schedule, split

PLAIN = OptimizerSettings(weight_decay=0.0, clip_norm=0.5)


@functools.cache
def toy():
    return tiny_llama(3, num_layers=3)  # at least the three that a head reads


@functools.cache
def rows(count: int = 4, length: int = 24) -> Rows:
    """Rows with different numbers of counted tokens, so that a mean of means is not the mean."""
    rng = np.random.default_rng(0)
    examples = []
    for i in range(count):
        loss = np.zeros(length - i, bool)
        loss[4 + 3 * i :] = True
        examples.append(Example(rng.integers(0, 31, length - i).astype(np.int32), loss))
    return pack(examples, length, 0)


BIASED = HeadConfig(
    "eagle3", 16, 48, 24, 4, 2, 8, 1e-5, RopeConfig(), 31, (0, 1, 2), own_head=True, fc_bias=True, attention_bias=True
)
"""Declares the leaves of the optimiser's tests."""


def trainer(rate: float = 1e-2, dtype: str = "float32", **changes: Any):
    """(first state, update)."""
    config = toy().target.config
    target = training_target(config, dtype)
    settings = replace(heads.head_config(DraftSettings(draft="EAGLE3"), config), dtype=dtype)
    head = draft_head(settings, target, backend=packed_attention)
    weights, frozen = heads.split_params(heads.new_params(settings, toy().target, toy().params, None, seed=0))
    chain = make_optimizer(replace(PLAIN, **changes), optax.constant_schedule(rate), head_table(settings))
    loss = heads.head_loss(head, target, heads.objective("EAGLE3", LossSettings(rounds=2, feature_noise=0.0)))
    update = make_update(loss, chain, frozen, dtype=dtype, seed=0, teach=teach(target, settings.aux_layers))
    with jax.numpy_dtype_promotion("standard"):
        return TrainState(jnp.int32(0), weights, chain.init(weights)), update


def batch(parts: int, size: int) -> Rows:
    return Rows(*(jnp.asarray(part.reshape(parts, size, *part.shape[1:])) for part in rows()))


def target_params(dtype: str = "float32"):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), toy().params)


def distance(one, other) -> float:
    """Largest difference of a leaf, relative to its largest element."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / (np.abs(np.asarray(a)).max() + 1e-9)) for a, b in pairs
    )


def test_parts_add_up_to_the_batch():
    """By Adam's moments, since its steps do not depend on the gradient's scale."""
    results = []
    for shape in ((1, 4), (2, 2)):
        state, update = trainer(clip_norm=0.0)
        state, metrics = update(state, target_params(), batch(*shape), None)
        results.append((state.optimizer, metrics.loss, metrics.sums, metrics.gradient_norm))
    assert float(results[0][3]) > 1e-3
    assert distance(*results) < 1e-4


def test_split_leaves_are_equal():
    """An axis that the devices do not divide stays whole."""
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    tree = {"matrix": np.arange(24.0).reshape(4, 6), "scalar": np.float32(3)}
    placed = split(mesh, jax.tree.map(jnp.asarray, tree))
    for name, leaf in tree.items():
        np.testing.assert_array_equal(placed[name], leaf)
    assert placed["matrix"].sharding.spec == PartitionSpec(None, "data"), "its longest axis"
    assert placed["scalar"].sharding.is_fully_replicated


def test_master_weights_are_float32():
    """Updates that are too small for bfloat16 move the weights."""
    state, update = trainer(rate=2e-5, dtype="bfloat16")
    before = np.asarray(state.params["final_norm"]).copy()
    for _ in range(20):
        state, _ = update(state, target_params("bfloat16"), batch(1, 4), None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert {leaf.dtype.name for leaf in moments} == {"float32"}
    moved = np.asarray(state.params["final_norm"]) - before
    assert 1e-5 < np.abs(moved).max() < 1e-3
    rounded = jnp.asarray(state.params["final_norm"]).astype(jnp.bfloat16).astype(jnp.float32)
    assert np.abs(np.asarray(rounded) - np.asarray(state.params["final_norm"])).max() > 0


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_schedule(name, warmup):
    peak, steps, final = 0.5, 50, 0.1
    with jax.numpy_dtype_promotion("standard"):
        chosen = replace(PLAIN, schedule=name, learning_rate=peak, final_learning_rate=final, warmup_steps=warmup)
        rate = schedule(chosen, steps)
        found = [float(np.asarray(rate(step))) for step in range(steps + 1)]
    for step, value in enumerate(found):
        share = (step - warmup) / (steps - warmup)
        down = {"cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "constant": 1.0}[name]
        low = final if name != "constant" else 0.0
        expected = peak * (step + 1) / warmup if step < warmup else peak * (low + (1 - low) * down)
        assert value == pytest.approx(expected, rel=1e-5), step


def descend(**changes: Any):
    """An update with known gradients: the change, and the gradients that Adam received."""
    table = head_table(BIASED)
    chain = make_optimizer(replace(PLAIN, **changes), optax.constant_schedule(1.0), table)
    params = {"fc": jnp.ones((2, 2)), "mlp_norm": jnp.ones(2), "fc_bias": jnp.ones(2)}
    gradient = {"fc": jnp.array([[3.0, 0.0], [0.0, 0.0]]), "mlp_norm": jnp.array([0.0, 4.0]), "fc_bias": jnp.zeros(2)}
    with jax.numpy_dtype_promotion("standard"):
        change, state = chain.update(gradient, chain.init(params), params)
    first = next(part for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu"))
    return change, jax.tree.map(lambda mu: mu / (1 - 0.9), first.mu)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"clip_norm": 0.0}, (3.0, 4.0)),
        ({"clip_norm": 10.0}, (3.0, 4.0)),
        ({"clip_norm": 1.0}, (0.6, 0.8)),
    ],
)
def test_clipping(changes, expected):
    _, seen = descend(**changes)
    assert (float(seen["fc"][0, 0]), float(seen["mlp_norm"][1])) == pytest.approx(expected, rel=1e-5)


def test_only_matrices_decay():
    chosen = [replace(PLAIN, weight_decay=decay) for decay in (0.0, 0.5)]
    chains = [make_optimizer(settings, optax.constant_schedule(0.1), head_table(BIASED)) for settings in chosen]
    sizes = head_sizes(BIASED, 31)
    params = dict(map_leaves(head_table(BIASED), lambda leaf: jnp.full(leaf.shape(sizes), 0.5)))
    gradient = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, jnp.float32), params)
    with jax.numpy_dtype_promotion("standard"):
        plain, decayed = (chain.update(gradient, chain.init(params), params)[0] for chain in chains)
    moved = {name for name in params if not np.allclose(plain[name], decayed[name], atol=1e-7)}
    assert moved == {"fc", "qkv", "output", "gate_up", "down", "head"}
    np.testing.assert_allclose(decayed["fc"] - plain["fc"], -0.1 * 0.5 * params["fc"], atol=1e-6)
