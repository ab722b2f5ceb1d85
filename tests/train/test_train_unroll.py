"""The unrolled head against the oracle that serving is held to, one slot and one round at a time."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import eagle_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import PoolShape, init_cache
from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.models import init_params, make_target
from specjax.models.draft_head import draft_head, init_head_params
from specjax.train.data import Rows
from specjax.train.export import head_tensors
from specjax.train.features import teach, training_target
from specjax.train.unroll import Objective, Teacher, packed_attention, packed_mask, unroll

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
    """A tiny target, a head with large random weights, and two packed rows with what the target is said to think."""

    def __init__(self, kind: str) -> None:
        rng = np.random.default_rng(3)
        self.config = head_for(kind)
        self.target = make_target(TARGET, backend=packed_attention)
        self.target_params = init_params(TARGET, jax.random.key(0))
        params = dict(init_head_params(self.config, self.target, jax.random.key(1)))
        self.params = {name: leaf if leaf.ndim < 2 else leaf * 12 for name, leaf in params.items()}
        if self.config.mapped:
            self.params["ids"] = jnp.asarray([1, 2, 5, 6, 11, 12, 17], jnp.int32)
        lengths = [[5, 6], [4, 3, 2]]  # of the examples in rows of 12: one has padding, the other too
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

    def found(self, objective: Objective, **changes: Any) -> Any:
        head = draft_head(self.config, self.target, backend=packed_attention)
        return unroll(
            head, self.target, self.params, self.target_params, changes.get("batch", self.batch),
            changes.get("teacher", self.teacher), objective, changes.get("key"),
        )  # fmt: skip

    def expected(self, objective: Objective) -> tuple[float, list[list[float]]]:
        """The total, and loss, matched, count and asked of each round: every slot computed from its example alone."""
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
        """Slot t of an example: the slots up to it with the target's features, then its own outputs, round by round."""
        embeddings, given = [table[x[s + 1]] for s in range(t + 1)], [features[s] for s in range(t + 1)]
        positions, again = list(range(t + 1)), [False] * (t + 1)
        visible = [set(range(s + 1)) for s in range(t + 1)]
        for j in range(len(objective.weights)):
            if t + 2 + j >= len(x):
                return
            if j:
                embeddings.append(table[x[t + 1 + j]])
                given.append(out)
                positions.append(t + j)
                again.append(True)
                visible.append({*range(t + 1), *range(t + 1, t + 1 + j)})
            out = eagle_oracle.head_forward(tensors, spec, embeddings, given, positions, visible, again)[-1]
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


OBJECTIVES = {
    "three rounds": Objective("cross_entropy", (1.0, 0.8, 0.64)),
    "token": Objective("token", (0.5, 0.3)),
    "regression": Objective("cross_entropy", (0.1,), regression=1.0),
}
CASES = [(name, kind) for name in OBJECTIVES for kind in KINDS]
FEW = {("three rounds", kind) for kind in KINDS} | {("token", "eagle3"), ("token", "eagle"), ("regression", "eagle")}


@pytest.mark.parametrize(
    ("objective", "kind"),
    [
        pytest.param(OBJECTIVES[name], kind, id=f"{name}-{kind}", marks=[pytest.mark.slow] * ((name, kind) not in FEW))
        for name, kind in CASES
    ],
)
def test_each_round_is_what_serving_would_compute(kind, objective):
    world = World(kind)
    total, sums = world.found(objective)
    wanted, rounds = world.expected(objective)
    assert rounds[0][3] > 3, "the case is not empty"
    np.testing.assert_allclose(np.stack(sums, axis=1), rounds, rtol=2e-4)
    np.testing.assert_allclose(total, wanted, rtol=2e-4)


def test_neither_a_neighbour_nor_padding_changes_an_example():
    """Other tokens, features and teachers in the rest of a row: the gradients of one example stay what they were."""
    world = World("eagle3-whole")
    objective = Objective("cross_entropy", (1.0, 0.8, 0.64))
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


def test_noise_is_of_its_width_and_its_key():
    world = World("eagle")
    plain, noisy = Objective("cross_entropy", (1.0,)), Objective("cross_entropy", (1.0,), noise=0.01)
    key = jax.random.key(5)
    quiet = float(world.found(noisy)[0])
    assert quiet == float(world.found(plain)[0]), "without a key there is none"
    one, again, other = (float(world.found(noisy, key=k)[0]) for k in (key, key, jax.random.key(6)))
    assert one == again and one != other and one != quiet
    # 0.01 * 512 / 12 is the width: the loss of features moved by half of it, at most, each.
    moved = world.teacher._replace(features=world.teacher.features + 0.5 * 0.01 * 512 / 12)
    assert abs(one - quiet) < 20 * abs(float(world.found(plain, teacher=moved)[0]) - quiet)


# The teacher.


@functools.partial(jax.jit, static_argnames="features")
def prefilled(params: Any, row: Any, features: Any) -> tuple[Any, Any, Any]:
    """Features, hidden states and logits of one row."""
    from specjax_kernels import CAUSAL

    target = make_target(TARGET)
    cache = init_cache(target.pages, PoolShape(1, 4))
    positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    output = target.forward(
        params, target.embed(params, row), positions, CAUSAL, cache, jnp.ones((1, 1), jnp.int32),
        jnp.zeros(1, jnp.int32), features=features,
    )  # fmt: skip
    assert output.features is not None
    return output.features[0], output.hidden[0], target.unembed(params, output.hidden)[0]


def reference(tokens: np.ndarray, features: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target over one example alone, as prefill runs it: a chunk is filled up, and what follows changes nothing."""
    chunk = np.zeros((1, 6), np.int32)  # one shape for all examples
    chunk[0, : len(tokens)] = tokens
    found = prefilled(init_params(TARGET, jax.random.key(0)), jnp.asarray(chunk), features)
    given, hidden, logits = (np.asarray(each)[: len(tokens)] for each in found)
    return given, hidden, logits.argmax(-1)


@pytest.mark.parametrize("features", [(0, 1, 3), "final"])
def test_the_teacher_sees_packed_examples_as_prefill_sees_them_alone(features):
    world = World("eagle3")
    params = init_params(TARGET, jax.random.key(0))
    found = jax.jit(teach(training_target(TARGET, "float32"), features))(params, world.batch)
    for row in range(2):
        segments = np.asarray(world.batch.segments[row])
        for number in range(1, segments.max() + 1):
            where = np.flatnonzero(segments == number)
            wanted = reference(np.asarray(world.batch.tokens[row])[where], features)
            for mine, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(mine[row])[where], theirs, atol=2e-5)


def test_the_teacher_in_bfloat16_is_near():
    world = World("eagle3")
    params = init_params(TARGET, jax.random.key(0))
    exact = teach(training_target(TARGET, "float32"), (0, 1, 3))(params, world.batch)
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    found = teach(training_target(replace(TARGET), "bfloat16"), (0, 1, 3))(half, world.batch)
    assert found.features.dtype == found.hidden.dtype == "bfloat16"
    np.testing.assert_allclose(found.hidden.astype(jnp.float32), exact.hidden, atol=0.15)


def test_the_mask_is_causal_and_stays_in_its_example():
    mask = packed_mask(jnp.asarray([[1, 1, 2, 2, 0]], jnp.int32))
    rows = ["x....", "xx...", "..x..", "..xx.", "....x"]
    np.testing.assert_array_equal(mask[0], [[c == "x" for c in row] for row in rows])
