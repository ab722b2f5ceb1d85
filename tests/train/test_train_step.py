"""A training step: the unrolled head against serving's oracle, losses, optimiser, and stored features."""

from __future__ import annotations

import errno
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from scipy.special import softmax
from toy_models import tiny_llama

from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.models import init_params, make_target
from specjax.models.draft_head import draft_head, init_head_params
from specjax.train import features
from specjax.train import head as heads
from specjax.train.data import Example, Rows, batch_rows, pack
from specjax.train.export import head_tensors
from specjax.train.features import FeatureStore, teach, training_target
from specjax.train.losses import LOSSES, Objective, Teacher, packed_attention, packed_mask, unroll
from specjax.train.options import DraftSettings, LossSettings, OptimizerSettings
from specjax.train.run import TrainState, make_optimizer, make_update, schedule

V, M, W = 19, 16, 7
TARGET = ModelConfig("llama", V, M, 24, 4, 4, 2, 8, 1e-5, RopeConfig(theta=500.0), 64, tied_embeddings=True)
KINDS = ("eagle3", "eagle3-whole", "eagle3-fc_norm-norm_output", "eagle3-norm_before_fc-norm_output", "eagle", "mtp")


def head_for(kind: str) -> HeadConfig:
    third = kind.startswith("eagle3")
    base, *norms = kind.replace("-whole", "").split("-")
    mapped = kind == "eagle3"
    return HeadConfig(
        base,  # type: ignore[arg-type]
        hidden_size=M, feature_size=3 * M if third else M, intermediate_size=24, num_heads=4, num_kv_heads=2,
        head_dim=8, norm_epsilon=1e-5, rope=RopeConfig(theta=700.0), vocab_size=W if mapped else V,
        aux_layers=(0, 1, 3) if third else (), own_head=third, mapped=mapped,
        **dict.fromkeys(norms, True),
    )  # fmt: skip


class World:
    """A tiny target, a head with large random weights, and two packed rows with random outputs of the target."""

    def __init__(self, kind: str) -> None:
        rng = np.random.default_rng(3)
        self.config = head_for(kind)
        self.target = make_target(TARGET, backend=packed_attention)
        self.target_params = init_params(TARGET, jax.random.key(0))
        params = dict(init_head_params(self.config, self.target, jax.random.key(1)))
        self.params = {
            name: leaf * 12 if leaf.ndim >= 2 and name != "fc_norm" else leaf for name, leaf in params.items()
        }
        if self.config.mapped:
            self.params["ids"] = jnp.asarray([1, 2, 5, 6, 11, 12, 17], jnp.int32)
        examples = [Example(rng.integers(0, V, n).astype(np.int32), rng.random(n) < 0.8) for n in (5, 6, 4, 3, 2)]
        self.batch, shape = jax.tree.map(jnp.asarray, pack(examples, 12, 3)), (2, 12)  # each row has padding
        self.teacher = Teacher(
            jnp.asarray(rng.normal(size=(*shape, self.config.feature_size)), jnp.float32),
            jnp.asarray(rng.normal(0, 3, (*shape, M)), jnp.float32),
            jnp.asarray(rng.integers(0, V, shape), jnp.int32),
        )

    def unrolled(self, objective: Objective, **changes: Any) -> Any:
        head = draft_head(self.config, self.target, backend=packed_attention)
        return unroll(
            head, self.target, self.params, self.target_params, changes.get("batch", self.batch),
            changes.get("teacher", self.teacher), objective, changes.get("key"),
        )  # fmt: skip

    def expected(self, objective: Objective) -> tuple[float, list[list[float]]]:
        """The total, and the sums of each round, with each slot computed from its example alone."""
        config = self.config
        tensors = head_tensors(config, self.params, TARGET, "float32")
        spec = eagle_oracle.HeadSpec(config.kind, 4, 8, 1e-5, 700.0, norm_output=config.norm_output)
        table = np.asarray(self.target_params["embed"])
        ids = np.asarray(self.params["ids"]) if config.mapped else np.arange(V)
        sums = [[0.0, 0.0, 0.0, 0.0] for _ in objective.weights]
        for row in range(2):
            segments = np.asarray(self.batch.segments[row])
            for number in range(1, segments.max() + 1):
                slots = np.flatnonzero(segments == number)
                parts = self.batch.tokens, self.batch.loss, *self.teacher
                example = [np.asarray(part[row])[slots] for part in parts]
                for t in range(len(slots) - 2):
                    self._slot(t, example, tensors, spec, table, ids, objective, sums)
        total = sum(weight * loss for weight, (loss, *_) in zip(objective.weights, sums, strict=True))
        return total, sums

    def _slot(self, t, example, tensors, spec, table, ids, objective, sums) -> None:
        """Slot t of an example: slots up to t with the target's features, then its own outputs, round by round."""
        x, loss, features, hidden, top = example
        embeddings, inputs = [table[x[s + 1]] for s in range(t + 1)], [features[s] for s in range(t + 1)]
        positions, again = list(range(t + 1)), [False] * (t + 1)
        visible = [set(range(s + 1)) for s in range(t + 1)]
        for j in range(len(objective.weights)):
            if t + 2 + j >= len(x):
                return
            if j:
                embeddings.append(table[x[t + 1 + j]])
                inputs.append(out)
                positions.append(t + j)
                again.append(True)
                visible.append({*range(t + 1), *range(t + 1, t + 1 + j)})
            out = eagle_oracle.head_forward(tensors, spec, embeddings, inputs, positions, visible, again)[-1]
            scores = eagle_oracle.draft_logits(tensors, spec, out, table)
            p = np.exp(eagle_oracle.log_softmax(table[ids] @ hidden[t + 1 + j]))
            if not loss[t + 2 + j]:
                continue
            best = top[t + 1 + j]
            sums[j][3] += 1
            sums[j][1] += ids[scores.argmax()] == best
            log_q = eagle_oracle.log_softmax(scores)
            if best not in ids:
                continue
            if objective.loss == "token":
                if x[t + 2 + j] not in ids:
                    continue
                value = -log_q[list(ids).index(x[t + 2 + j])]
            else:
                value = -(p * log_q).sum()
            if objective.regression:
                d = np.abs(out - hidden[t + 1 + j])
                value += objective.regression * np.where(d < 1, d * d / 2, d - 0.5).mean()
            sums[j][0] += value
            sums[j][2] += 1


THREE_ROUNDS = Objective("cross_entropy", (1.0, 0.8, 0.64))
TOKEN = Objective("token", (0.5, 0.3))
REGRESSION = Objective("cross_entropy", (0.1,), regression=1.0)


@pytest.mark.parametrize(
    ("objective", "kind"),
    [*((THREE_ROUNDS, kind) for kind in KINDS), (TOKEN, "eagle3"), (TOKEN, "eagle"), (REGRESSION, "eagle")],
    ids=lambda value: value if isinstance(value, str) else value.loss,
)
def test_each_round_is_computed_as_in_serving(kind, objective):
    world = World(kind)
    total, sums = world.unrolled(objective)
    expected, rounds = world.expected(objective)
    assert rounds[0][3] > 3, "the case is not empty"
    np.testing.assert_allclose(np.stack(sums, axis=1), rounds, rtol=2e-4)
    np.testing.assert_allclose(total, expected, rtol=2e-4)


def test_examples_of_a_row_are_independent():
    """Other tokens, features and teachers in the rest of a row do not change the gradients of an example."""
    world, objective = World("eagle3-whole"), THREE_ROUNDS
    only = world.batch.segments == 2
    batch = world.batch._replace(loss=only)
    elsewhere = (world.batch.segments != 2)[..., None]
    other = Teacher(
        jnp.where(elsewhere, 9.0, world.teacher.features),
        jnp.where(elsewhere, -7.0, world.teacher.hidden),
        jnp.where(elsewhere[..., 0], 1, world.teacher.top),
    )
    changed = batch._replace(tokens=jnp.where(elsewhere[..., 0], 4, batch.tokens))
    head = draft_head(world.config, world.target, backend=packed_attention)

    @jax.jit
    def gradient(batch: Rows, teacher: Teacher) -> Any:
        def loss(weights: Any) -> Any:
            return unroll(head, world.target, weights, world.target_params, batch, teacher, objective, None)[0]

        return jax.grad(loss)(world.params)

    first, second = gradient(batch, world.teacher), gradient(changed, other)
    assert max(float(jnp.abs(leaf).max()) for leaf in first.values()) > 0
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-5, atol=1e-5 * float(jnp.abs(first[name]).max()))


def test_noise_depends_on_its_width_and_key():
    world = World("eagle")
    plain, noisy = Objective("cross_entropy", (1.0,)), Objective("cross_entropy", (1.0,), noise=0.01)
    key = jax.random.key(5)
    quiet = float(world.unrolled(noisy)[0])
    assert quiet == float(world.unrolled(plain)[0]), "no key, no noise"
    first, again, other = (float(world.unrolled(noisy, key=k)[0]) for k in (key, key, jax.random.key(6)))
    assert first == again and first != other and first != quiet
    # The width is 0.01 * 512 / 12; noise moves a feature by at most half of it.
    moved = world.teacher._replace(features=world.teacher.features + 0.5 * 0.01 * 512 / 12)
    assert abs(first - quiet) < 20 * abs(float(world.unrolled(plain, teacher=moved)[0]) - quiet)


def test_the_mask_is_causal_within_an_example():
    mask = packed_mask(jnp.asarray([[1, 1, 2, 2, 0]], jnp.int32))
    rows = ["x....", "xx...", "..x..", "..xx.", "....x"]
    np.testing.assert_array_equal(mask[0], [[c == "x" for c in row] for row in rows])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_their_formulas(name):
    rng = np.random.default_rng(0)
    x, labels = rng.normal(0, 2, (2, 3, 9)), rng.integers(0, 9, (2, 3)).astype(np.int32)
    p, q = softmax(rng.normal(0, 2, (2, 3, 9)), axis=-1), softmax(x, axis=-1)
    entropy, rate = -(p * np.log(q)).sum(axis=-1), np.minimum(p, q).sum(axis=-1)
    share = np.exp(-3 * rate)
    expected = {
        "cross_entropy": entropy,
        "token": -np.log(np.take_along_axis(q, labels[..., None], axis=-1))[..., 0],
        "hybrid": share * entropy + (1 - share) * (1 - rate),
    }
    losses = LOSSES[name](jnp.asarray(x, jnp.float32), jnp.asarray(p, jnp.float32), jnp.asarray(labels))
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected[name], rtol=2e-5)


def test_no_overlap_has_a_finite_loss():
    x, p = jnp.asarray([100.0, 0.0, 0.0]), jnp.asarray([0.0, 0.5, 0.5])
    for name, loss in LOSSES.items():
        value, gradient = jax.value_and_grad(loss)(x, p, jnp.int32(1))
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all(), name


PLAIN = OptimizerSettings(clip_norm=0.5)


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


def trainer(rate: float = 1e-2, dtype: str = "float32", **changes: Any):
    config = toy().target.config
    target = training_target(config, dtype)
    settings = replace(heads.head_config(DraftSettings(draft="EAGLE3"), config), dtype=dtype)
    weights, frozen = heads.split_params(heads.new_params(settings, toy().target, toy().params, None, seed=0))
    chain = make_optimizer(replace(PLAIN, **changes), optax.constant_schedule(rate))
    loss = heads.head_loss(
        settings, target, heads.objective("EAGLE3", LossSettings(rounds=2)), frozen=frozen,
        teach=teach(target, settings.aux_layers),
    )  # fmt: skip
    update = make_update(loss, chain, seed=0)
    with jax.numpy_dtype_promotion("standard"):
        return TrainState(jnp.int32(0), weights, chain.init(weights)), update


def batch(parts: int, size: int) -> Rows:
    return Rows(*(jnp.asarray(part.reshape(parts, size, *part.shape[1:])) for part in rows()))


def target_params(dtype: str = "float32"):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), toy().params)


def test_parts_add_up_to_the_batch():
    """By Adam's moments, since its steps do not depend on the gradient's scale."""
    results = []
    for shape in ((1, 4), (2, 2)):
        state, update = trainer(clip_norm=0.0)
        state, metrics = update(state, target_params(), batch(*shape), None)
        results.append(jax.tree.leaves((state.optimizer, metrics.loss, metrics.sums, metrics.gradient_norm)))
    assert float(metrics.gradient_norm) > 1e-3
    for whole, parts in zip(*results, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-4 * (np.abs(whole).max() + 1e-9))


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
@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_schedule(name, warmup):
    peak, steps, final = 0.5, 50, 0.1
    with jax.numpy_dtype_promotion("standard"):
        chosen = replace(PLAIN, schedule=name, learning_rate=peak, final_learning_rate=final, warmup_steps=warmup)
        rate = schedule(chosen, steps)
        rates = [float(np.asarray(rate(step))) for step in range(steps + 1)]
    for step, value in enumerate(rates):
        share = (step - warmup) / (steps - warmup)
        down = {"cosine": (1 + math.cos(math.pi * share)) / 2, "constant": 1.0}[name]
        low = final if name != "constant" else 0.0
        expected = peak * (step + 1) / warmup if step < warmup else peak * (low + (1 - low) * down)
        assert value == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, (3.0, 4.0)), (10.0, (3.0, 4.0)), (1.0, (0.6, 0.8))])
def test_clipping(clip_norm, expected):
    """By Adam's first moment."""
    chain = make_optimizer(replace(PLAIN, clip_norm=clip_norm), optax.constant_schedule(1.0))
    params = {"fc": jnp.ones((2, 2)), "mlp_norm": jnp.ones(2)}
    gradient = {"fc": jnp.array([[3.0, 0.0], [0.0, 0.0]]), "mlp_norm": jnp.array([0.0, 4.0])}
    with jax.numpy_dtype_promotion("standard"):
        _, state = chain.update(gradient, chain.init(params), params)
    moments = optax.tree.get(state, "mu")
    received = float(moments["fc"][0, 0]) / (1 - 0.9), float(moments["mlp_norm"][1]) / (1 - 0.9)
    assert received == pytest.approx(expected, rel=1e-5)


# Stored features.

COUNT, LENGTH, BATCH, SEED = 7, 4, 3, 1


def feature_rows(shift: int = 0) -> Rows:
    tokens = (np.arange(COUNT * LENGTH, dtype=np.int32) + shift).reshape(COUNT, LENGTH)
    return Rows(tokens, np.zeros_like(tokens), np.ones_like(tokens), np.ones(tokens.shape, bool))


class Teach:
    """Values that depend on the whole batch, as the last bits of a compiled forward may. Records its batches."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.batches: list[list[int]] = []
        self.dtype = dtype

    def __call__(self, batch: Rows) -> Teacher:
        self.batches.append((batch.tokens[:, 0] // LENGTH).tolist())
        values = batch.tokens[..., None] + batch.tokens.sum() / 1024
        features, hidden = (np.repeat(values, width, axis=-1).astype(self.dtype) for width in (6, 2))
        return Teacher(features, hidden, batch.tokens + 1)


def store(teach: Teach, folder: Path, **changes: Any) -> FeatureStore:
    settings: dict[str, Any] = {"dtype": "float32", "batch": BATCH, "seed": SEED, "identity": "a model"} | changes
    return FeatureStore(teach, settings.pop("rows", feature_rows()), folder=folder, widths=(6, 2), **settings)


def test_values_do_not_depend_on_the_order_of_requests(tmp_path):
    first, second = Teach(), Teach()
    forward = store(first, tmp_path / "a").get(np.arange(COUNT))
    other = store(second, tmp_path / "b")
    backward = {number: other.get(np.array([number])) for number in reversed(range(COUNT))}
    for name, part in forward._asdict().items():
        np.testing.assert_array_equal(part, np.concatenate([getattr(backward[i], name) for i in range(COUNT)]))
    np.testing.assert_array_equal(forward.top, feature_rows().tokens + 1)
    batches = [sorted(batch_rows(step, COUNT, BATCH, SEED).tolist()) for step in range(3)]
    assert sorted(map(sorted, first.batches)) == sorted(batches) == sorted(map(sorted, second.batches))
    assert other._done.sum() == COUNT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_store_is_reused(tmp_path, dtype):
    """Each row is computed once, also by runs that were interrupted."""
    first, second = (Teach(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32) for _ in range(2))
    numbers = batch_rows(0, COUNT, BATCH, SEED)
    fresh = store(first, tmp_path, dtype=dtype)
    (file,) = tmp_path.rglob("rows.bin")
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 0, "space is reserved"
    values = fresh.get(numbers)
    again = store(second, tmp_path, dtype=dtype)
    assert again._done.sum() == BATCH
    for expected, part, name in zip(values, again.get(numbers), Teacher._fields, strict=True):
        assert part.dtype == (np.int32 if name == "top" else dtype)
        np.testing.assert_array_equal(expected.view(np.uint8), part.view(np.uint8))
    assert second.batches == []
    for step in range(10):
        again.get(batch_rows(step, COUNT, BATCH, SEED))
    assert len(second.batches) == 2


@pytest.mark.parametrize(
    "changes",
    [{"identity": "another"}, {"rows": feature_rows(1)}, {"dtype": "float16"}, {"batch": 2}, {"seed": 2}],
    ids=str,
)
def test_other_inputs_use_another_folder(tmp_path, changes):
    store(Teach(), tmp_path).get(np.arange(COUNT))
    other = store(Teach(), tmp_path, **changes)
    assert other._done.sum() == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(features.os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"needs 0\.0 GB: No space left on device; give another --feature-folder"):
        store(Teach(), tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--features disk cannot use .*file"):
        store(Teach(), tmp_path / "file")
    store(Teach(), tmp_path).get(np.arange(COUNT))
    assert store(Teach(), tmp_path)._done.sum() == COUNT
