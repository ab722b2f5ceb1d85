"""What is expected of steps that were not measured: predictions for devices by their names, and an engine's use."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from engine_helpers import NGRAM, make_engine, toy
from specjax_kernels import Quantised
from test_costs import HEAD, LLAMA
from test_eagle_cache import toy as llama

from specjax import devices, make_target
from specjax.costs import PLAIN, Decoding, Machine, Tree, expected_accept
from specjax.drafters import Eagle3, Ngram, Params, make_drafter
from specjax.engine import Engine
from specjax.engine.drafting import FOUND
from specjax.engine.step_times import StepTimes, predictions, stored_bits, tree_of
from specjax.models.params import Bits

leaf = jax.ShapeDtypeStruct
FEW = Quantised(leaf((64, 1024), np.int8), leaf((64, 1), np.float32))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA L40S", "L40S"), ("NVIDIA B200", "B200"),
        ("NVIDIA H2000", None), ("Tesla T4", None), ("cpu", None),
    ],
)  # fmt: skip
def test_what_a_driver_calls_a_known_device(kind, name):
    found = devices.named(kind)
    assert (found and found.name) == name


@pytest.mark.parametrize("draft_in_few_bits", [False, True])
def test_predictions_for_a_known_gpu(draft_in_few_bits):
    """As `test_costs` has them of the same model; nothing of weights is read."""
    target = make_target(LLAMA)
    drafter = make_drafter(Eagle3(steps=7, topk=1, nodes=8), target=target, head=HEAD)
    params = Params(None, {"head": FEW} if draft_in_few_bits else None)
    found = predictions(target, params, drafter, HEAD, "NVIDIA H200")
    times = StepTimes(predicted=found)
    ratio = times.milliseconds(1, tree_of(drafter)) / times.milliseconds(1)
    assert ratio == pytest.approx(1.24 if draft_in_few_bits else 1.38, abs=0.01)
    assert predictions(target, params, drafter, HEAD, "Tesla T4") is None


def test_bits_of_stored_weights():
    few = Quantised(leaf((64, 32), np.int8), leaf((64, 1), np.float32))
    packed = Quantised(leaf((16, 64), np.uint8), leaf((16, 4), np.float16))
    assert stored_bits({"layer": {"qkv": leaf((64, 32), np.float32)}}) is None
    assert stored_bits({"layer": [{"qkv": few}]}) == Bits(8 + 32 / 32, ends=False, embed=False)
    assert stored_bits({"head": few, "layer": {"up": few}}) == Bits(9.0, ends=True, embed=False)
    assert stored_bits({"embed": packed}) == Bits(4 + 16 / 32, ends=True, embed=True)


def test_the_ratio_that_an_engine_expects(monkeypatch):
    """Of a GPU that is known what the model says; of others and of a CPU what the number of tokens says."""
    engine = make_engine(llama(), NGRAM, warm=False, adaptive=True)
    free, batch = engine.buckets.free_tokens, 1
    width = engine.buckets.tree_widths(batch)[-1]
    by_tokens = 1 + FOUND * ((batch * width + free) / (batch + free) - 1)
    assert engine._expected_ratio(batch) == by_tokens
    engine.platform = "gpu"
    monkeypatch.setattr(Engine, "device_name", "Tesla T4")
    assert engine._expected_ratio(batch) == by_tokens
    monkeypatch.setattr(Engine, "device_name", "NVIDIA H200")
    predicted = predictions(engine.target, engine.params, engine.drafter.within(width), None, "NVIDIA H200")
    times = StepTimes(predicted=predicted)
    expected = times.milliseconds(batch, tree_of(engine.drafter.within(width))) / times.milliseconds(batch)
    assert engine._expected_ratio(batch) == expected != by_tokens
    own = make_engine(toy(), NGRAM, warm=False, adaptive=True)
    own.platform = "gpu"
    assert own._expected_ratio(batch) == by_tokens, "nothing is known of the user's own target"


def test_what_was_not_measured_is_predicted(monkeypatch):
    def predicted(model, on, *, batch, tree, context):
        return SimpleNamespace(seconds=1e-3 * (batch + tree.nodes))

    monkeypatch.setattr("specjax.engine.step_times.step_cost", predicted)
    model = Decoding((), (), ()), Machine("toy", 1e12, 1e12)
    nothing = StepTimes(predicted=model)
    assert nothing.milliseconds(4, Tree(3, 1, 4)) == pytest.approx(8.0)
    assert nothing.best(4, [Tree(3, 1, 4)], expected_accept([0.8])) == Tree(3, 1, 4)
    some = StepTimes({4: {PLAIN: 10.0}, 1: {PLAIN: 1.0}}, model)  # twice and half the prediction
    assert some.milliseconds(4, Tree(3, 1, 4)) == pytest.approx(16.0)
    assert some.milliseconds(2, PLAIN) == pytest.approx(3.0), "the mean of both ratios"


def test_trees_of_drafters():
    drafter = make_drafter(Ngram(capacity=4096, nodes=8))
    assert tree_of(make_drafter("NONE")) == PLAIN
    assert tree_of(drafter).nodes == 8 and tree_of(drafter.within(4)).nodes == 4
