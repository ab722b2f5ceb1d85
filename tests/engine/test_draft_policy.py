"""The choice of the nodes of a step's trees: simulated machines, and engines with random choices."""

import functools
import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_helpers import LONGEST, drafting, right_often
from engine_helpers import NGRAM, check_idle, check_texts, make_engine, toy

from specjax.costs import CPU_LEVEL, CPU_STEP, KERNEL, LAYER_KERNELS, LEVEL_KERNELS, STEP_KERNELS
from specjax.drafters import Speculation, TreeShape, make_speculation
from specjax.drafters.base import Params
from specjax.drafters.hybrid import with_ngrams
from specjax.engine import Engine, SamplingParams, runtime
from specjax.engine.draft_policy import (
    COMPILE_GAIN,
    MAX_STEP_RATIO,
    SWITCH_GAIN,
    TRIAL_PAUSE,
    TRIAL_SHARE,
    Acceptance,
    Choice,
    DraftPolicy,
    Mean,
    Own,
    own_acceptance,
)
from specjax.gpu import DEVICES
from specjax.step import speculate_step

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = (1, 2, 3, 4)
CHAIN = 7  # drafts of the longest chain


request = own_acceptance


def policy_of(
    cost: Mapping[int, float] | None = None, guess: float = 0.5, batches: Iterable[int] = (1,)
) -> DraftPolicy:
    """A policy whose estimates are these costs by N, by default one of each node."""
    sizes = SIZES if cost is None else tuple(cost)

    def costs(batch: int, n: int) -> float:
        return float(n) if cost is None else cost[n]

    return DraftPolicy(dict.fromkeys(batches, sizes), costs, guesses=(guess, guess))


def chosen(policy: DraftPolicy, batch: int, own: list[Own], requests: int | None = None, sizes=SIZES) -> int:
    """Nodes of a step that is launched."""
    choice = policy.choose(batch, sizes, len(own) if requests is None else requests, own)
    policy.launched(batch, choice.nodes, trial=choice.trial)
    return choice.nodes


def simulate(
    policy: DraftPolicy, steps: int, seconds: Mapping[int, float], chance: Callable[[int], float], *, batch: int = 1,
    seed: int = 0, length: int = 100,
) -> tuple[list[int], dict[int, float], float]:  # fmt: skip
    """Runs steps of `batch` requests of `length` steps each.

    Args:
        seconds: of a step, by N.
        chance: step -> probability that a draft of a chain is accepted if those before it are.

    Returns:
        The nodes of each step, and the tokens a second of each N in every step, and of the policy.
    """
    rng, nodes, total, taken = np.random.default_rng(seed), [], Counter(), Counter()
    for step in range(steps):
        if step % length == 0:
            requests = [request() for _ in range(batch)]
        nodes.append(chosen(policy, batch, requests, sizes=tuple(seconds)))
        accepted = np.cumprod(rng.random((batch, CHAIN)) < chance(step), axis=1).sum(axis=1)
        noise = rng.uniform(0.95, 1.05)
        ranks = [range(1, 1 + min(int(count), nodes[-1] - 1)) for count in accepted]
        drafted = zip(requests, ranks, strict=True) if nodes[-1] > 1 else []
        policy.record(batch, nodes[-1], seconds[nodes[-1]] * noise, drafted)
        for name, n in [*((n, n) for n in seconds), (0, nodes[-1])]:
            total[name] += sum(1 + min(int(count), n - 1) for count in accepted)
            taken[name] += seconds[n] * noise
    rates = {name: total[name] / taken[name] for name in total}
    return nodes, rates, rates.pop(0)


CPU = {1: 3.55, 2: 4.2, 3: 4.85, 4: 5.6}  # ms of a step with a draft head on 2 cores
STEEP = {1: 1.0, 2: 1.12, 4: 1.25, 8: 1.6}


@pytest.mark.parametrize("seconds", [CPU, STEEP], ids=["cpu", "flat"])
@pytest.mark.parametrize("chance", [0.05, 0.4, 0.6, 0.9])
@pytest.mark.parametrize(("estimate", "batch"), [(0.1, 1), (1.0, 4)])
def test_fastest_size_is_found_from_any_estimate(seconds, chance, estimate, batch):
    """Within 4% of the best size in hindsight, the trials' 0.5% included."""
    cost = {n: 1 + estimate * (n - 1) for n in seconds}
    policy = policy_of(cost, batches=[batch])
    simulate(policy, 3000, seconds, lambda step: chance, batch=batch)
    nodes, rates, rate = simulate(policy, 1500, seconds, lambda step: chance, batch=batch, seed=1)
    assert rate > 0.96 * max(rates.values()), (rates, Counter(nodes))


def test_policy_follows_changes():
    """It beats every fixed size while acceptance changes, and follows the time of a step."""
    policy = policy_of(STEEP)
    _, rates, rate = simulate(policy, 3000, STEEP, lambda step: 0.85 if step // 500 % 2 else 0.2)
    assert rate > 1.03 * max(rates.values())
    slow = STEEP | {8: 6.0, 4: 4.0}
    simulate(policy, 9000, slow, lambda step: 0.9)
    nodes, rates, rate = simulate(policy, 1000, slow, lambda step: 0.9)
    assert nodes.count(2) > 0.7 * len(nodes) and rate > 0.9 * rates[2]


def test_recorded_acceptance_and_changing_load(monkeypatch):
    """It beats SGLang's rule, and comes close to the best fixed size of each stretch."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("accepted", "draft_policy", "model_shapes", "records"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]  # put back as it was after the test
    simulation = importlib.import_module("draft_policy")
    device = simulation.gpu("T4", simulation.llama_8b, 32, "chain", "int8")
    rows = simulation.simulate(device, simulation.read_accepted("chain"), seed=0, steps=200)
    policy, rule = (sum(row[name] for row in rows) / len(rows) for name in ("policy", "rule"))
    assert policy > 0.97 and policy > rule


def test_useless_drafts_cost_no_more_than_trials():
    policy = policy_of(CPU)
    simulate(policy, 500, CPU, lambda step: 0.0)
    nodes, rates, rate = simulate(policy, 2000, CPU, lambda step: 0.0)
    assert rate > (1 - 3 * TRIAL_SHARE) * rates[1] and 0 < len(nodes) - nodes.count(1) < 0.06 * len(nodes)
    others = [i for i, size in enumerate(nodes) if size != 1]
    assert min(np.diff(others)) >= TRIAL_PAUSE


def test_larger_trees_tell_the_acceptance_of_smaller_ones():
    """Of each size, what its own steps would accept, also where accepted nodes are not the first ones."""
    rng = np.random.default_rng(0)
    paths = [sorted((rng.choice(7, rng.integers(4), replace=False) + 1).tolist()) for _ in range(4000)]
    large, own = Acceptance((1, 2, 4, 8), 0.5), Acceptance((1, 2, 4, 8), 0.5)
    for nodes in (2, 4, 8):
        for path in paths:
            large.add(8, [(Mean(1.0), path)])
            own.add(nodes, [(Mean(1.0), [rank for rank in path if rank < nodes])])
        part = (2, 4, 8).index(nodes)
        assert large.survivals[: part + 1] == pytest.approx(own.survivals[: part + 1])


def test_rising_acceptance_shows_in_small_trees():
    """Parts that are not drafted any more follow those that are."""
    acceptance = Acceptance(SIZES, 0.5)
    for count in (0.0, 1.0):
        for _ in range(1600):
            acceptance.add(2, [(Mean(1.0), [1] * int(count))])
        expected = [count, count**2, count**3]
        assert acceptance.survivals == pytest.approx(expected, abs=0.1)
    for _ in range(400):
        acceptance.add(4, [(Mean(1.0), [1, 2])])
    assert acceptance.survivals == pytest.approx([1, 1, 0], abs=0.1)


@pytest.mark.parametrize(("requests", "forced", "expected"), [(1, 1, True), (4, 1, False), (4, 3, False), (4, 9, True)])
def test_forced_tokens_pay_for_the_whole_batch(requests, forced, expected):
    """One forced token of a request makes all rows of its batch wide."""
    policy = DraftPolicy({1: SIZES, 4: SIZES}, lambda batch, n: 1.0 if n == 1 else {1: 1.4, 4: 3.0}[batch])
    assert policy.pays(requests, 4, requests, forced) == expected


def test_seconds_between_measured_sizes():
    """They are as wrong as the estimate of the next smaller size that has run."""
    policy = policy_of({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    assert policy.seconds(1) == {1: 1, 2: 2, 3: 3, 4: 4}
    for _ in range(3):
        policy.record(1, 2, 0.2, [])
    assert policy.seconds(1) == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    policy.launched(1, 2, trial=False)
    for _ in range(200):
        policy.record(1, 3, 0.6, [])
    assert policy.seconds(1)[3] == pytest.approx(0.6, rel=0.01) and policy.seconds(1)[4] == pytest.approx(0.8, rel=0.01)


def test_sizes_follow_the_speed_of_the_machine():
    """While one size runs, the others keep their ratio to it."""
    policy = policy_of({1: 1.0, 2: 2.0})
    for n, seconds in ((1, 0.1), (2, 0.15)):
        policy.launched(1, n, trial=False)
        for _ in range(60):
            policy.record(1, n, seconds, [])
    for _ in range(200):
        policy.record(1, 2, 0.3, [])
    assert policy.seconds(1) == pytest.approx({1: 0.2, 2: 0.3}, rel=0.15)


def test_small_gains_change_nothing():
    """The size in use stays where another is hardly better; a faster one without a program is named."""
    policy = policy_of({1: 1.0, 2: 1.5 / (1 + SWITCH_GAIN / 2), 3: 9.0, 4: 9.0})
    for n in (1, 2):
        policy.launched(1, n, trial=False)
        assert policy.choose(1, SIZES, 1, [request()]) == (n, False, None)
    faster = policy_of({1: 1.0, 2: 1.5 / (1 + 2 * SWITCH_GAIN)})
    faster.launched(1, 1, trial=False)
    assert faster.choose(1, (1, 2), 1, [request()]) == (2, False, None)


@pytest.mark.parametrize(("guess", "better"), [(0.5, 2), (0.9 * COMPILE_GAIN, None)])
def test_sizes_that_may_be_faster_are_compiled(guess, better):
    """Also if the cost model overestimates what they cost by a factor of two."""
    policy = policy_of({1: 1.0, 2: 1.8}, guess=guess)
    assert policy.choose(1, (1,), 1, [request()]) == (1, False, better)


def test_choosing_changes_nothing():
    """Only what was launched and recorded does, so that a plan may be made twice."""
    policy = policy_of(CPU)
    for n in (1,) * 10 + (2,) * 100:
        policy.launched(1, n, trial=False)
        policy.record(1, n, CPU[n], [(request(), [1])] if n > 1 else [])
    first = policy.choose(1, (1, 2), 1, [request()])
    assert first.trial and [policy.choose(1, (1, 2), 1, [request()]) for _ in range(5)] == [first] * 5


def test_acceptance_of_each_request():
    policy = policy_of({1: 1.0, 2: 1.5, 3: 9.0, 4: 9.0})
    good, bad, new = request(), request(), request()
    for _ in range(100):
        for own, ranks in ((good, [1]), (bad, [])):
            policy.launched(1, 2, trial=False)
            policy.record(1, 2, 1.5, [(own, ranks)])
    tokens = [policy.expected(1, 1, [own])[2] for own in (bad, new, good)]
    assert tokens == pytest.approx([1.15, 1.5, 1.85], abs=0.1)
    for _ in range(2):
        policy.record(1, 1, 1.0, [])
    chosen(policy, 1, [bad], sizes=(1, 2))  # a trial is due
    assert chosen(policy, 1, [bad], sizes=(1, 2)) == 1 and chosen(policy, 1, [good], sizes=(1, 2)) == 2
    assert policy.expected(1, 4, [good])[1] == 4 and policy.expected(1, 4, [good])[2] < 5


def test_table_tells_why_a_size_was_chosen():
    policy = policy_of({1: 1.0, 2: 2.0})
    for _ in range(200):
        policy.launched(1, 2, trial=False)
        policy.record(1, 2, 0.3, [(request(), [1])])
    for drafted in ([], [(request(), [])]):  # beside a compilation, whose time does not count
        policy.record(1, 1 + len(drafted), None, drafted)
    plain, tree = policy.table()
    plain_row = {"batch": 1, "nodes": 1, "seconds": pytest.approx(0.15), "measured": False, "tokens": 1.0, "steps": 0}
    assert plain == plain_row | {"using": False} and tree["measured"] and tree["using"]
    assert (tree["nodes"], tree["steps"]) == (2, 200)
    assert tree["seconds"] == pytest.approx(0.3) and tree["tokens"] == pytest.approx(1.97, abs=0.03)


def test_outliers_count_little():
    policy = policy_of({1: 1.0, 2: 2.0})
    for seconds in (1.0, 1.0, 1.0, 100.0):
        policy.record(1, 1, seconds, [])
    assert policy.seconds(1)[1] < MAX_STEP_RATIO


def test_admission():
    policy = policy_of({1: 1.0, 2: 1.2, 3: 1.4, 4: 1.6}, guess=0.8)
    assert policy.admit(1, 1 << 20)
    for _ in range(200):
        policy.record(1, 1, 1.0, [])
        policy.record(1, 4, 1.6, [(request(), [])])
    assert not policy.admit(1, 1 << 20)


@functools.cache
def engine_of(kind: str, **config) -> Engine:
    sizes = {"page_size": 4, "chunked_prefill_size": 8, "context_length": LONGEST, "max_running_requests": 3}
    if kind == "NGRAM":
        speculation = make_speculation(NGRAM)._replace(explicit_width=False, lookup=1)
        return make_engine(toy(), speculation, warm=False, adaptive=True, **sizes | config)
    llama, drafter, params = drafting("eagle3" if kind == "hybrid" else kind)
    speculation = Speculation(drafter, explicit_width=False)
    if kind == "hybrid":
        speculation = with_ngrams(speculation, make_speculation(NGRAM))
    return make_engine(llama, speculation, draft=params, warm=False, adaptive=True, **sizes | config)


@pytest.mark.parametrize("kind", ["NGRAM", "eagle3", "hybrid"])
def test_text_for_any_sizes(kind):
    """Each step has a random N, with penalties, limits of drafts and requests that never draft."""
    # On a CPU a head drafts for single requests only.
    engine = engine_of(kind, overlap=kind == "NGRAM", max_running_requests=3 if kind == "NGRAM" else 1)
    engine.warm_up(progress=False)
    rng, used = np.random.default_rng(3), set()

    def choose(batch: int, compiled: Iterable[int], requests: int, own: object) -> Choice:
        used.add(nodes := int(rng.choice(sorted(compiled))))
        return Choice(nodes)

    engine.policy.choose = choose
    model = toy() if kind == "NGRAM" else drafting("eagle3").toy
    prompts = [rng.integers(5, 30, 4 + 5 * (i % 3)).tolist() for i in range(6)]
    changes = [{}, {"frequency_penalty": 0.5}, {"draft_limit": 0}, {"speculate": False}, {"draft_limit": 1}, {}]
    params = [SamplingParams(max_new_tokens=16 + i, temperature=float(i % 2), seed=i, **changes[i]) for i in range(6)]
    check_texts(engine, model, prompts, params)
    assert len(used) > 2 and used <= {key.nodes for key in engine.buckets.all_steps()}


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
    assert engine._estimated_ratio(1, width) == pytest.approx(by_rows + CPU_LEVEL * depth * draft / target)
    monkeypatch.setattr(engine, "platform", "gpu")
    for name, measured in (("Tesla P4", False), ("NVIDIA H200", True)):
        monkeypatch.setattr(Engine, "device_name", name)
        assert (
            engine._estimated_ratio(1, width) != pytest.approx(by_rows + CPU_LEVEL * depth * draft / target)
        ) == measured
    bandwidth, layers = DEVICES["H200"].bandwidth, engine.target.config.num_layers
    plain = target / bandwidth + (LAYER_KERNELS * layers + STEP_KERNELS) * KERNEL
    level = draft / bandwidth + LEVEL_KERNELS * KERNEL
    assert engine._estimated_ratio(1, width) == pytest.approx((plain + depth * level) / plain)
    ngrams = make_engine(toy(), NGRAM, warm=False, adaptive=True)
    monkeypatch.setattr(ngrams, "platform", "gpu")
    assert 1 <= ngrams._estimated_ratio(1, 4) <= ngrams._estimated_ratio(4, 4), "a target without an architecture"


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
    monkeypatch.setattr(engine.policy, "record", lambda batch, nodes, seconds, drafted: timed.append(seconds))
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    for idle in (1000.0, 1000.0, 0.0):
        engine.generate([5, 6, 7], params)
        assert engine.unfinished == overlap
        clock[0] += idle
    assert len(timed) > 8 and not any(timed)
    check_idle(engine)
