"""The choice between steps with and without drafts: simulated machines, and engines with random choices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_helpers import LONGEST, drafting, right_often
from engine_helpers import NGRAM, check_idle, check_texts, make_engine, toy

from specjax.costs import CPU_LEVEL, CPU_STEP, KERNEL, LAYER_KERNELS, LEVEL_KERNELS, STEP_KERNELS
from specjax.drafters import Speculation, TreeShape
from specjax.drafters.base import Params
from specjax.engine import Engine, SamplingParams, runtime
from specjax.engine.draft_policy import (
    ACCEPTANCE_DECAY,
    DECAY,
    HYSTERESIS,
    MAX_STEP_RATIO,
    TRIAL_PAUSE,
    TRIAL_SHARE,
    DraftPolicy,
    Mean,
)
from specjax.gpu import DEVICES
from specjax.step import speculate_step

TREES = 4  # nodes


def request() -> Mean:
    """The acceptance of a new request."""
    return Mean(ACCEPTANCE_DECAY)


def chosen(policy: DraftPolicy, batch: int, acceptance: list[Mean], requests: int | None = None) -> int:
    """Nodes of a step that is launched."""
    nodes, trial = policy.choose(batch, TREES, len(acceptance) if requests is None else requests, acceptance)
    policy.launched(batch, drafts=nodes > 1, trial=trial)
    return nodes


def simulate(
    policy: DraftPolicy, steps: int, plain: float, tree: float, chance: float, *, batch: int = 1, seed: int = 0
) -> tuple[float, list[int]]:
    """Runs steps of `batch` requests. Returns the tokens a second and the nodes of each step.

    Args:
        plain, tree: seconds of a step without and with drafts.
        chance: probability that a draft is accepted, of three one after another.
    """
    rng, requests = np.random.default_rng(seed), [request() for _ in range(batch)]
    tokens, seconds, nodes = 0, 0.0, []
    for _ in range(steps):
        nodes.append(chosen(policy, batch, requests))
        drafts, emitted = nodes[-1] > 1, [1] * batch
        if drafts:
            emitted = [1 + int(np.cumprod(rng.random(3) < chance).sum()) for _ in requests]
        taken = (tree if drafts else plain) * rng.uniform(0.95, 1.05)
        policy.record(batch, taken, zip(requests, emitted, strict=True) if drafts else None)
        tokens, seconds = tokens + sum(emitted), seconds + taken
    return tokens / seconds, nodes


@pytest.mark.parametrize(
    ("tree", "chance", "expected"),
    [(1.7, 0.8, TREES), (1.7, 0.2, 1), (1.2, 0.4, TREES), (3.2, 0.7, 1), (1.0, 0.0, 1)],
)
@pytest.mark.parametrize(("estimate", "batch"), [(0.5, 1), (6.0, 1), (1.7, 8)])
def test_faster_size_is_found_from_any_estimate(tree, chance, expected, estimate, batch):
    policy = DraftPolicy(lambda batch: estimate, 2.0)
    simulate(policy, 1500, 0.01, 0.01 * tree, chance, batch=batch)
    rate, nodes = simulate(policy, 1000, 0.01, 0.01 * tree, chance, batch=batch, seed=1)
    if (tree, chance) != (1.0, 0.0):  # equal rates, so either size is right
        assert nodes.count(expected) > 0.95 * len(nodes)
    assert rate > (1 - 1.5 * TRIAL_SHARE) * batch / 0.01


@pytest.mark.parametrize(("requests", "forced", "expected"), [(1, 1, True), (4, 1, False), (4, 3, False), (4, 9, True)])
def test_forced_tokens_pay_for_the_whole_batch(requests, forced, expected):
    """One forced token of a request makes all rows of its batch wide."""
    policy = DraftPolicy({1: 1.4, 4: 3.0}.__getitem__, 1.3)
    assert policy.pays(requests, requests, forced) == expected


def test_policy_follows_changes():
    """Of acceptance and of the time of a step. Useless drafts cost no more than the trials."""
    policy = DraftPolicy(lambda batch: 1.7, 2.0)
    for chance, tree, expected in ((0.9, 1.7, TREES), (0.0, 1.7, 1), (0.9, 1.7, TREES), (0.9, 5.0, 1)):
        simulate(policy, 6000, 0.01, 0.01 * tree, chance)
        rate, nodes = simulate(policy, 4000, 0.01, 0.01 * tree, chance)
        assert nodes.count(expected) > 0.9 * len(nodes), (chance, tree)
        if chance == 0.0:
            assert rate > (1 - 1.1 * TRIAL_SHARE) / 0.01 and 0 < nodes.count(TREES) < 0.02 * len(nodes)


def test_hysteresis():
    """The size in use stays where the other is hardly better."""
    policy, new = DraftPolicy(lambda batch: 2.0, 2.0), request()
    for _ in range(4):
        policy.record(1, 0.01, None)
        policy.record(1, 0.02, [(request(), 2)])
    chosen(policy, 1, [new])  # a trial is due
    assert abs(policy.accept_length(new) / 0.02 * 0.01 - 1) < HYSTERESIS
    for drafts in (False, True):
        policy.launched(1, drafts=drafts, trial=False)
        assert policy.choose(1, TREES, 1, [new]) == (TREES if drafts else 1, False)


def test_choosing_changes_nothing():
    """Only what was launched and recorded does, so that a plan may be made twice."""
    policy = DraftPolicy(lambda batch: 2.0, 2.0)
    for _ in range(40):
        policy.record(1, 0.01, None)
        policy.record(1, 0.02, [(request(), 2)])
    first = policy.choose(1, TREES, 1, [request()])
    assert first[1] and [policy.choose(1, TREES, 1, [request()]) for _ in range(5)] == [first] * 5


def test_acceptance_of_each_request():
    policy = DraftPolicy(lambda batch: 2.0, 2.0)
    good, bad, new = request(), request(), request()
    for _ in range(100):
        policy.record(1, 0.01, None)
        policy.record(1, 0.02, [(good, 4)])
        policy.record(1, 0.02, [(bad, 1)])
    assert policy.accept_length(good) > 3.5 and policy.accept_length(bad) < 1.5
    assert policy.accept_length(new) == pytest.approx(2.5, abs=0.3)
    chosen(policy, 1, [good])  # a trial is due
    assert chosen(policy, 1, [good]) == TREES and chosen(policy, 1, [bad]) == 1


def test_requests_without_drafts():
    policy = DraftPolicy(lambda batch: 9.0, 1.0)
    assert chosen(policy, 1, [], 1) == 1 == chosen(policy, 1, [request()])
    eager = DraftPolicy(lambda batch: 1.0, 9.0)
    assert chosen(eager, 1, [request()]) == TREES and chosen(eager, 1, [], 1) == 1
    mixed = DraftPolicy(lambda batch: 2.0, 2.9)
    assert chosen(mixed, 2, [request(), request()]) == TREES
    assert chosen(mixed, 4, [request()], 4) == 1, "rows that do not draft emit one token"


def test_trial_pause_and_outliers():
    policy = DraftPolicy(lambda batch: 1.0, 1.0)
    _, nodes = simulate(policy, 3000, 0.01, 0.01, 0.0)
    others = [i for i, size in enumerate(nodes) if size != nodes[-1] and i > 100]
    assert others and min(np.diff(others)) >= TRIAL_PAUSE
    mean = Mean(DECAY)
    for value in (1.0, 1.0, 100.0):
        mean.add(value, most=MAX_STEP_RATIO)
    assert mean.value < 1.0 + MAX_STEP_RATIO


def test_admission():
    policy = DraftPolicy(lambda batch: 2.0, 2.9)
    assert policy.admit(1, 1 << 20)
    bad = request()
    for _ in range(200):
        policy.record(1, 0.01, None)
        policy.record(1, 0.02, [(bad, 1)])
    assert not policy.admit(1, 1 << 20)


@functools.cache
def engine_of(kind: str, **config) -> Engine:
    sizes = {"page_size": 4, "chunked_prefill_size": 8, "context_length": LONGEST, "max_running_requests": 3}
    if kind == "NGRAM":
        return make_engine(toy(), NGRAM, warm=False, adaptive=True, **sizes | config)
    llama, drafter, params = drafting(kind)
    return make_engine(llama, drafter, draft=params, warm=False, adaptive=True, **sizes | config)


def test_draft_model_drafts_for_whole_requests():
    """Its cache has no pages of steps that it did not observe."""
    model, params, make = right_often("standalone")
    speculation = Speculation(make(TreeShape(2, 2, 4)), costly_observe=True)
    engine = make_engine(
        model, speculation, draft=params, adaptive=True, max_running_requests=3, warm=False, retract_every=5
    )
    turns = itertools.cycle([True, False, False])
    engine.policy.admit = lambda batch, steps: next(turns)
    prompts = [[(5 * i + j) % model.vocab for j in range(4 + i)] for i in range(9)]
    completions = check_texts(engine, model, prompts, [SamplingParams(max_new_tokens=20, ignore_eos=True)] * 9)
    drafted = [done.drafted_steps for done in completions]
    assert all(steps in (0, done.spec_verify_ct) for steps, done in zip(drafted, completions, strict=True))
    assert 0 in drafted and sum(map(bool, drafted)) >= 3


def test_plain_steps_do_not_run_the_draft_model():
    model, params, make = right_often("standalone")
    engine = make_engine(
        model, Speculation(make(TreeShape(2, 2, 4)), costly_observe=True), draft=params, adaptive=True, warm=False
    )
    broken = engine.params._replace(draft=params._replace(model={}))
    key = next(key for key in engine.buckets.all_keys() if key.kind == "step" and key.nodes == 1)
    function, unpack, shape = engine.programs._function(key)
    inputs, _ = unpack(jnp.zeros(shape, jnp.int32), engine.device.state.tables)
    _, output = jax.eval_shape(function, Params(*broken), engine.state, inputs)  # would raise KeyError
    assert output.tokens.shape[1] == 1 and function.func is speculate_step


def test_estimate_before_the_first_step(monkeypatch):
    """From bytes and kernels on a GPU of measured bandwidth, otherwise from row counts and the bytes of the draft."""
    engine = engine_of("eagle3")
    width, depth = engine.drafter.width, engine.drafter.depth
    by_rows = float(np.interp(width, list(CPU_STEP), list(CPU_STEP.values())))
    draft, target = (sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for part in engine.params[::-1])
    assert engine._estimated_ratio(1) == pytest.approx(by_rows + CPU_LEVEL * depth * draft / target)
    monkeypatch.setattr(engine, "platform", "gpu")
    for name, measured in (("Tesla P4", False), ("NVIDIA H200", True)):
        monkeypatch.setattr(Engine, "device_name", name)
        assert (engine._estimated_ratio(1) != pytest.approx(by_rows + CPU_LEVEL * depth * draft / target)) == measured
    bandwidth, layers = DEVICES["H200"].bandwidth, engine.target.config.num_layers
    plain = target / bandwidth + (LAYER_KERNELS * layers + STEP_KERNELS) * KERNEL
    level = draft / bandwidth + LEVEL_KERNELS * KERNEL
    assert engine._estimated_ratio(1) == pytest.approx((plain + depth * level) / plain)
    ngrams = make_engine(toy(), NGRAM, warm=False, adaptive=True)
    monkeypatch.setattr(ngrams, "platform", "gpu")
    assert 1 <= ngrams._estimated_ratio(1) <= ngrams._estimated_ratio(4), "a target without an architecture"


def test_engines_without_a_policy():
    assert make_engine(toy(), "NONE", warm=False, adaptive=True).policy is None
    assert make_engine(toy(), NGRAM, warm=False, adaptive=True, trace=True).policy is None


@pytest.mark.parametrize("overlap", [True, False])
def test_idle_time_is_not_part_of_a_step(monkeypatch, overlap):
    """A step in flight at the end of a request is read when the next request arrives."""
    clock = [0.0]
    monkeypatch.setattr(runtime, "perf_counter", lambda: clock[0])
    engine = make_engine(toy(), NGRAM, adaptive=True, overlap=overlap)
    timed: list[float] = []
    monkeypatch.setattr(engine.policy, "record", lambda batch, seconds, drafted: timed.append(seconds))
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    for idle in (1000.0, 1000.0, 0.0):
        engine.generate([5, 6, 7], params)
        assert engine.unfinished == overlap
        clock[0] += idle
    assert len(timed) > 8 and not any(timed)
    check_idle(engine)
