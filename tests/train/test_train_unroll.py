"""The unrolled head against serving's oracle, slot by slot and round by round; losses against numpy."""

from __future__ import annotations

from typing import Any

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.models import init_params, make_target
from specjax.models.draft_head import draft_head, init_head_params
from specjax.train.data import Rows
from specjax.train.export import head_tensors
from specjax.train.features import teach, training_target
from specjax.train.unroll import LOSSES, Objective, Teacher, feature_regression, packed_attention, packed_mask, unroll

V, M, W = 19, 16, 7
TARGET = ModelConfig("llama", V, M, 24, 4, 4, 2, 8, 1e-5, RopeConfig(theta=500.0), 64, tied_embeddings=True)
KINDS = ("eagle3", "eagle3-whole", "eagle", "mtp")


def head_for(kind: str) -> HeadConfig:
    third = kind.startswith("eagle3")
    base = kind.split("-")[0]
    mapped = kind == "eagle3"
    return HeadConfig(
        base,  # type: ignore[arg-type]
        hidden_size=M, feature_size=3 * M if third else M, intermediate_size=24, num_heads=4, num_kv_heads=2,
        head_dim=8, norm_epsilon=1e-5, rope=RopeConfig(theta=700.0), vocab_size=W if mapped else V,
        aux_layers=(0, 1, 3) if third else (), own_head=third, mapped=mapped,
    )  # fmt: skip


class World:
    """A tiny target, a head with large random weights, and two packed rows with random outputs of the target."""

    def __init__(self, kind: str) -> None:
        rng = np.random.default_rng(3)
        self.config = head_for(kind)
        self.target = make_target(TARGET, backend=packed_attention)
        self.target_params = init_params(TARGET, jax.random.key(0))
        params = dict(init_head_params(self.config, self.target, jax.random.key(1)))
        self.params = {name: leaf if leaf.ndim < 2 else leaf * 12 for name, leaf in params.items()}
        if self.config.mapped:
            self.params["ids"] = jnp.asarray([1, 2, 5, 6, 11, 12, 17], jnp.int32)
        lengths = [[5, 6], [4, 3, 2]]  # of the examples in rows of 12, each with padding
        shape = (2, 12)
        tokens, positions, segments, loss = (np.zeros(shape, np.int32) for _ in range(4))
        for row, sizes in enumerate(lengths):
            start = 0
            for number, size in enumerate(sizes, 1):
                part = row, slice(start, start + size)
                tokens[part], positions[part] = rng.integers(0, V, size), np.arange(size)
                segments[part], loss[part] = number, rng.random(size) < 0.8
                start += size
        self.batch = Rows(
            jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments), jnp.asarray(loss.astype(bool))
        )
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
        spec = eagle_oracle.HeadSpec(config.kind, 4, 8, 1e-5, 700.0)
        table = np.asarray(self.target_params["embed"])
        ids = np.asarray(self.params["ids"]) if config.mapped else np.arange(V)
        sums = [[0.0, 0.0, 0.0, 0.0] for _ in objective.weights]
        for row in range(2):
            segments = np.asarray(self.batch.segments[row])
            for number in range(1, segments.max() + 1):
                where = np.flatnonzero(segments == number)
                x = np.asarray(self.batch.tokens[row])[where]
                loss = np.asarray(self.batch.loss[row])[where]
                features = np.asarray(self.teacher.features[row])[where]
                hidden = np.asarray(self.teacher.hidden[row])[where]
                top = np.asarray(self.teacher.top[row])[where]
                for t in range(len(x) - 2):
                    self._slot(t, x, loss, features, hidden, top, tensors, spec, table, ids, objective, sums)
        total = sum(weight * loss for weight, (loss, *_) in zip(objective.weights, sums, strict=True))
        return total, sums

    def _slot(self, t, x, loss, features, hidden, top, tensors, spec, table, ids, objective, sums) -> None:
        """Slot t of an example: slots up to t with the target's features, then its own outputs, round by round."""
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


def test_the_teacher_in_bfloat16_is_near():
    world = World("eagle3")
    params = init_params(TARGET, jax.random.key(0))
    exact = jax.jit(teach(training_target(TARGET, "float32"), (0, 1, 3)))(params, world.batch)
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    rounded = jax.jit(teach(training_target(TARGET, "bfloat16"), (0, 1, 3)))(half, world.batch)
    assert rounded.features.dtype == rounded.hidden.dtype == "bfloat16"
    np.testing.assert_allclose(rounded.hidden.astype(jnp.float32), exact.hidden, atol=0.15)


def test_the_mask_is_causal_within_an_example():
    mask = packed_mask(jnp.asarray([[1, 1, 2, 2, 0]], jnp.int32))
    rows = ["x....", "xx...", "..x..", "..xx.", "....x"]
    np.testing.assert_array_equal(mask[0], [[c == "x" for c in row] for row in rows])


# Losses.


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def oracle(name: str, x: np.ndarray, p: np.ndarray, label: int) -> float:
    q = softmax(x)
    rate = sum(min(a, b) for a, b in zip(p, q, strict=True))
    entropy = -sum(a * np.log(b) for a, b in zip(p, q, strict=True))
    share = np.exp(-3 * rate)
    return {
        "cross_entropy": entropy,
        "token": -np.log(q[label]),
        "acceptance": -np.log(rate),
        "hybrid": share * entropy + (1 - share) * (1 - rate),
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_their_formulas(name):
    rng = np.random.default_rng(0)
    x, p = rng.normal(0, 2, (2, 3, 9)).astype(np.float32), rng.normal(0, 2, (2, 3, 9)).astype(np.float32)
    p, labels = np.apply_along_axis(softmax, -1, p), rng.integers(0, 9, (2, 3)).astype(np.int32)
    losses = LOSSES[name](jnp.asarray(x), jnp.asarray(p), jnp.asarray(labels))
    assert losses.shape == (2, 3) and losses.dtype == jnp.float32
    for slot in np.ndindex(2, 3):
        expected = oracle(name, x[slot].astype(np.float64), p[slot].astype(np.float64), labels[slot])
        np.testing.assert_allclose(losses[slot], expected, rtol=2e-5)


@pytest.mark.parametrize("name", ["cross_entropy", "acceptance", "hybrid"])
def test_the_targets_distribution_has_the_least_loss(name):
    """Elsewhere, a small step along the gradient lowers the loss."""
    rng = np.random.default_rng(7)
    x, p = rng.normal(0, 2, 9).astype(np.float32), softmax(rng.normal(0, 2, 9)).astype(np.float32)
    loss = lambda logits: LOSSES[name](logits, jnp.asarray(p), jnp.int32(0))  # noqa: E731
    best = loss(jnp.log(jnp.asarray(p)))
    for _ in range(20):
        other = np.log(p) + rng.normal(0, 0.1, p.size).astype(np.float32)
        assert loss(jnp.asarray(other)) >= best - 1e-6
    before, gradient = jax.value_and_grad(loss)(jnp.asarray(x))
    assert loss(jnp.asarray(x) - 0.05 * gradient) < before


def test_no_overlap_has_a_finite_loss():
    x, p = jnp.asarray([100.0, 0.0, 0.0]), jnp.asarray([0.0, 0.5, 0.5])
    for name, loss in LOSSES.items():
        value, gradient = jax.value_and_grad(loss)(x, p, jnp.int32(1))
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all(), name


def test_feature_regression_is_smooth_l1():
    a, b = np.random.default_rng(0).normal(0, 2, (2, 2, 3, 8)).astype(np.float32)
    expected = np.mean([[0.5 * d * d if abs(d) < 1 else abs(d) - 0.5 for d in row] for row in (a - b).reshape(6, 8)], 1)
    np.testing.assert_allclose(feature_regression(jnp.asarray(a), jnp.asarray(b)).ravel(), expected, rtol=1e-6)
