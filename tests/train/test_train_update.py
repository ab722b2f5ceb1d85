"""One optimiser step: sums over parts and devices, master weights, schedule, clipping, decay, two optimisers."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mesh_helpers import environment
from toy_models import tiny_llama

from specjax.config import HeadConfig, RopeConfig
from specjax.models.draft_head import draft_head
from specjax.models.head_spec import head_table
from specjax.train import head as heads
from specjax.train.data import Example, Rows, pack
from specjax.train.features import teach, training_target
from specjax.train.options import DraftSettings, LossSettings, OptimizerSettings
from specjax.train.unroll import packed_attention
from specjax.train.update import TrainState, make_optimizer, make_update, schedule

PLAIN = OptimizerSettings(weight_decay=0.0, clip_norm=0.5)


@functools.cache
def toy():
    return tiny_llama(3, num_layers=3)  # the fewest of which three are read


@functools.cache
def rows(count: int = 4, length: int = 24) -> Rows:
    """Rows with another number of tokens that count in each, so that a mean of means is not the mean."""
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
"""Declares the leaves that the optimiser's tests make by hand."""


@functools.cache
def made_trainer(rate: float, dtype: str, kind: str, **changes: Any):
    """(weights, chain, update): with equal arguments a program is compiled once."""
    config = toy().target.config
    target = training_target(config, dtype)
    settings = replace(heads.head_config(DraftSettings(draft=kind), config), dtype=dtype)
    head = draft_head(settings, target, backend=packed_attention)
    params = heads.new_params(settings, toy().target, toy().params, None, seed=0)
    weights, frozen = heads.split_params(params)
    chain = make_optimizer(replace(PLAIN, **changes), optax.constant_schedule(rate), head_table(settings))
    loss = heads.head_loss(head, target, heads.objective(kind, LossSettings(rounds=2, feature_noise=0.0)))
    update = make_update(loss, chain, frozen, dtype=dtype, seed=0, teach=teach(target, settings.aux_layers or "final"))
    return weights, chain, update


def trainer(rate: float = 1e-2, dtype: str = "float32", kind: str = "EAGLE3", **changes: Any):
    """(first state, update)."""
    weights, chain, update = made_trainer(rate, dtype, kind, **changes)
    weights = jax.tree.map(jnp.copy, weights)  # an update takes its state's memory
    with jax.numpy_dtype_promotion("standard"):
        return TrainState(jnp.int32(0), weights, chain.init(weights)), update


def batch(parts: int, size: int) -> Rows:
    return Rows(*(jnp.asarray(part.reshape(parts, size, *part.shape[1:])) for part in rows()))


def target_params(dtype: str = "float32"):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), toy().params)


def distance(one, other) -> float:
    """Largest difference of a leaf, as a share of its largest element."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / (np.abs(np.asarray(a)).max() + 1e-9)) for a, b in pairs
    )


@functools.cache
def updated(kind: str, *shape: int):
    """One update with rows in so many parts of such a size."""
    # Plain gradient descent in effect: Adam would hide a gradient that is scaled.
    state, update = trainer(kind=kind, clip_norm=0.0)
    state, metrics = update(state, target_params(), batch(*shape), None)
    return state.optimizer, metrics.loss, metrics.sums, metrics.gradient_norm


@pytest.mark.parametrize("kind", ["EAGLE3", pytest.param("EAGLE", marks=pytest.mark.slow)])
@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_add_up_to_the_batch(kind, parts):
    whole = updated(kind, 1, 4)
    assert float(whole[3]) > 1e-3
    assert distance(whole, updated(kind, parts, 4 // parts)) < 1e-4


DEVICES = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
import test_train_update as t
from specjax.train.update import everywhere, spread

mesh = Mesh(np.array(jax.devices()), ("data",))
state, update = t.trainer(clip_norm=0.0)
state, weights = everywhere(mesh, state), everywhere(mesh, t.target_params())
for _ in range(2):
    given = spread(mesh, t.rows(), (2, 2))
    state, metrics = update(state, weights, given, None)
placed = {str(leaf.sharding.is_fully_replicated) for leaf in jax.tree.leaves(state)}
counts = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)}
print(json.dumps([t.lists((state.params, metrics)), sorted(placed), sorted(counts)]))
"""


def lists(tree) -> list[list[float]]:
    return [np.asarray(leaf, np.float64).ravel().tolist() for leaf in jax.tree.leaves(tree)]


@pytest.mark.process
def test_two_devices_are_as_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DEVICES], capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    two, whole, devices = json.loads(done.stdout.splitlines()[-1])
    assert (whole, devices) == (["True"], [2]), "the state is on both, whole"
    state, update = trainer(clip_norm=0.0)
    for _ in range(2):
        state, metrics = update(state, target_params(), batch(2, 2), None)
    for a, b in zip(lists((state.params, metrics)), two, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


def test_master_weights_are_float32():
    """Sixty updates, each too small for bfloat16 to hold, move the weights."""
    state, update = trainer(rate=2e-5, dtype="bfloat16")
    before = {name: np.asarray(leaf).copy() for name, leaf in state.params.items()}
    for _ in range(20):
        state, _ = update(state, target_params("bfloat16"), batch(1, 4), None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert {leaf.dtype.name for leaf in moments} == {"float32"}
    moved = np.asarray(state.params["final_norm"]) - before["final_norm"]
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


def test_the_loss_falls():
    state, update = trainer(rate=3e-3)
    losses = []
    for _ in range(30):
        state, metrics = update(state, target_params(), batch(1, 4), None)
        losses.append(float(metrics.loss))
    assert np.mean(losses[-3:]) < losses[0] - 0.25, losses


def descend(**changes: Any):
    """The first update of known gradients: what Adam's first moment got of them, over 1 - beta1."""
    table = head_table(BIASED)
    chain = make_optimizer(replace(PLAIN, **changes), optax.constant_schedule(1.0), table)
    params = {"fc": jnp.ones((2, 2)), "mlp_norm": jnp.ones(2), "fc_bias": jnp.ones(2)}
    gradient = {"fc": jnp.array([[3.0, 0.0], [0.0, 0.0]]), "mlp_norm": jnp.array([0.0, 4.0]), "fc_bias": jnp.zeros(2)}
    with jax.numpy_dtype_promotion("standard"):
        change, state = chain.update(gradient, chain.init(params), params)
    first = next(each for each in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(each, "mu"))
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
    chains = [make_optimizer(each, optax.constant_schedule(0.1), head_table(BIASED)) for each in chosen]
    params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in trainer()[0].params.items()}
    params |= {"fc_bias": jnp.ones(16), "qkv_bias": jnp.ones((2, 4, 8))}
    gradient = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, jnp.float32), params)
    with jax.numpy_dtype_promotion("standard"):
        plain, decayed = (chain.update(gradient, chain.init(params), params)[0] for chain in chains)
    moved = {name for name in params if not np.allclose(plain[name], decayed[name], atol=1e-7)}
    assert moved == {"fc", "qkv", "output", "gate_up", "down", "head"}
    np.testing.assert_allclose(decayed["fc"] - plain["fc"], -0.1 * 0.5 * params["fc"], atol=1e-6)
