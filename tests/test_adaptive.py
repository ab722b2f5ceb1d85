"""The choice between drafting and not: its model on made-up devices, and an engine that often changes its mind."""

import functools
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from engine_helpers import NGRAM, check_idle, check_plain, idle_sequence, make_engine, toy
from test_eagle_cache import LONGEST, drafter, from_scratch, head, slots
from test_eagle_cache import toy as llama

from specjax.costs import Tree
from specjax.engine import SamplingParams, flight, prefilling, stepping
from specjax.engine.adaptive import DOUBT, ENOUGH, FIRST, GUESS, OUTLIER, SAVED, SHARE, TRIAL, Adaptive, warmth
from specjax.engine.choice import HORIZON, PLAIN, accept_lengths, best, catch_up_share, expected_tokens, transferred
from specjax.engine.flight import Flights, InFlight
from specjax.engine.keys import Key
from specjax.engine.notes import not_drafted
from specjax.engine.sampling_params import ParameterError
from specjax.engine.sequence import Status

DRAFT = 0

# The model.

CPU = {1: (20.0, 31.0), 4: (36.0, 98.0), 8: (47.0, 120.0), 16: (72.0, 230.0), 48: (170.0, 700.0)}
"""Milliseconds of a step without and with drafts, by batch: each token in a forward costs time."""
GPU = {1: (4.0, 4.9), 4: (4.1, 5.2), 8: (4.2, 5.6), 16: (4.5, 6.5), 48: (6.0, 14.0)}
"""Reading the weights is most of it until products are bound by arithmetic."""


@pytest.mark.parametrize(
    ("times", "accept_length", "drafting"),
    [
        (CPU, 2.2, {1}), (CPU, 3.5, {1, 4, 8, 16}), (CPU, 1.3, set()), (CPU, 9.0, {1, 4, 8, 16, 48}),
        (GPU, 2.2, {1, 4, 8, 16}), (GPU, 2.6, {1, 4, 8, 16, 48}), (GPU, 1.3, {1, 4}), (GPU, 1.0, set()),
    ],
)  # fmt: skip
def test_what_is_best(times, accept_length, drafting):
    for batch, (plain, draft) in times.items():
        seconds = {DRAFT: draft / 1e3, PLAIN: plain / 1e3}
        tokens = {DRAFT: batch * accept_length, PLAIN: float(batch)}
        assert (best(seconds, tokens, PLAIN) == DRAFT) == (batch in drafting), batch


WHOLE, SMALL = Tree(7, 1, 8), Tree(3, 1, 4)
TREES = {DRAFT: WHOLE, PLAIN: Tree(0, 1, 1), 4: SMALL}


@pytest.mark.parametrize(
    ("seconds", "length", "wanted"),
    [  # a CPU, one request and four; a GPU, one request and 48
        ({DRAFT: 31.9, PLAIN: 10.1, 4: 18.9}, 1.5, PLAIN),
        ({DRAFT: 31.9, PLAIN: 10.1, 4: 18.9}, 2.4, 4),
        ({DRAFT: 31.9, PLAIN: 10.1, 4: 18.9}, 6.5, DRAFT),
        ({DRAFT: 110.0, PLAIN: 18.9, 4: 58.0}, 2.4, PLAIN),
        ({DRAFT: 110.0, PLAIN: 18.9, 4: 58.0}, 7.5, DRAFT),
        ({DRAFT: 4.9, PLAIN: 4.0, 4: 4.5}, 1.05, PLAIN),
        ({DRAFT: 4.9, PLAIN: 4.0, 4: 4.5}, 1.8, 4),
        ({DRAFT: 4.9, PLAIN: 4.0, 4: 4.5}, 3.0, DRAFT),
        ({DRAFT: 14.0, PLAIN: 6.0, 4: 9.0}, 2.1, 4),
        ({DRAFT: 14.0, PLAIN: 6.0, 4: 9.0}, 6.5, DRAFT),
    ],
)  # fmt: skip
def test_which_tree_is_best(seconds, length, wanted):
    for batch in (1, 4, 48):
        assert best(seconds, expected_tokens(TREES, [length] * batch, WHOLE), PLAIN) == wanted


def test_what_one_tree_accepts_says_what_another_would():
    """Exact for a chain where each draft is accepted with one probability; ascending for every tree."""
    for p in (0.25, 0.5, 0.75):
        lengths = [sum(p**level for level in range(tree.nodes)) for tree in (WHOLE, SMALL)]
        np.testing.assert_allclose(transferred(lengths[0], WHOLE, SMALL), lengths[1], rtol=5e-3)
        np.testing.assert_allclose(transferred(lengths[1], SMALL, WHOLE), lengths[0], rtol=5e-3)
    for tree in (WHOLE, SMALL, Tree(2, 2, 4), Tree(1, 4, 5), Tree(5, 8, 32), Tree(7, 8, 64)):
        lengths = accept_lengths(tree)
        assert lengths[0] == 1 and lengths[-1] == tree.depth + 1 and (np.diff(lengths) >= 0).all(), tree


def of_trees(**given) -> Adaptive:
    """Of a made-up device on which the smaller tree is the best: chains, accepted with probability 0.6."""
    return Adaptive(lambda _: (DRAFT, PLAIN, 4), lambda _, nodes: {DRAFT: 2.8, 4: 1.8}[nodes],
                    tree=lambda _, nodes: TREES[nodes], **given)  # fmt: skip


def run_trees(adaptive: Adaptive, steps: int, chance: float = 0.6, seed: int = 1) -> tuple[float, list[int]]:
    """Tokens a second, over those of plain decoding, and the choices."""
    seconds, rng = {DRAFT: 31.9e-3, PLAIN: 10.1e-3, 4: 17.0e-3}, np.random.default_rng(seed)
    request, chosen, emitted = idle_sequence(SamplingParams(), limit=1 << 20), [], 0
    for _ in range(steps):
        chosen.append(nodes := adaptive.choose(1, [request]))
        gained = min(int(rng.geometric(1 - chance)), TREES[nodes].nodes)
        adaptive.record(Key("step", 1, 8, nodes=nodes), seconds[nodes], {} if nodes == PLAIN else {request: gained})
        emitted += gained
    return emitted / sum(seconds[nodes] for nodes in chosen) * seconds[PLAIN], chosen


def test_a_smaller_tree_is_found_and_costs_little_where_it_is_of_no_use():
    rate, chosen = run_trees(of_trees(), 2000)
    assert chosen.count(4) > 0.8 * len(chosen) and rate > 1.2
    assert run_trees(of_trees(), 2000, chance=0.1)[0] > 0.98
    short = [run_trees(of_trees(guess=1.3), 64, chance)[0] for chance in (0.05, 0.1, 0.2)]
    assert min(short) > 0.95, "in a run of 64 steps, begun with what little is expected of a look-up"


def test_a_tree_that_is_not_compiled_is_not_chosen_but_wanted():
    """A single trial may find too little, by chance."""
    compiled, found = set[int](), list[Adaptive]()
    for seed in range(8):
        adaptive = of_trees(ready=lambda _, nodes: nodes in compiled)
        assert 4 not in run_trees(adaptive, 1500, seed=seed)[1]
        found += [adaptive] if adaptive.wanted == {1: 4} else []
    assert len(found) >= 4
    adaptive = found[0]
    compiled.add(4)
    assert run_trees(adaptive, 400)[1].count(4) > 300
    shown = adaptive.report()["1"]
    assert shown["using"] == "draft 4" and shown["drafts"] and set(shown) >= {"plain", "draft", "draft 4"}


def test_the_choice_in_use_stays_where_another_is_hardly_better():
    seconds, tokens = {DRAFT: 1.0, PLAIN: 1.0}, {DRAFT: 1.01, PLAIN: 1.0}
    assert [best(seconds, tokens, using) for using in (DRAFT, PLAIN)] == [DRAFT, PLAIN]


def test_what_was_missed_must_pay():
    """Drafts save half a second a token."""
    seconds, tokens = {DRAFT: 1.0, PLAIN: 1.0}, {DRAFT: 2.0, PLAIN: 1.0}
    assert [best(seconds, tokens, PLAIN, extra) for extra in (0.0, 0.45, 0.55)] == [DRAFT, DRAFT, PLAIN]


def simulate(seconds, acceptance, *, batch: int, steps: int, expected: float) -> tuple[float, Adaptive]:
    """Runs requests on a made-up device. `seconds`: of a step of each choice; `acceptance`: tokens that request `i`
    emits in step `t` with drafts. Returns tokens a second."""
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: expected)
    requests = [idle_sequence(SamplingParams(), limit=1 << 20) for _ in range(batch)]
    clock, emitted = 0.0, 0
    for t in range(steps):
        nodes = adaptive.choose(batch, requests)
        gained = {one: acceptance(i, t) if nodes == DRAFT else 1 for i, one in enumerate(requests)}
        adaptive.record(Key("step", batch, 8, nodes=nodes), seconds[nodes], gained if nodes == DRAFT else {})
        clock, emitted = clock + seconds[nodes], emitted + sum(gained.values())
    return emitted / clock, adaptive


@pytest.mark.parametrize("wrong", [0.4, 1.0, 2.5], ids=lambda factor: f"expected {factor:g} times")
@pytest.mark.parametrize("accept_length", [1.0, 1.3, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("times", [CPU, GPU], ids=["cpu", "gpu"])
def test_it_is_never_slower_than_no_drafts_but_for_trials(times, accept_length, wrong):
    """Whatever was expected of the device; and close to the best where drafts were not expected to be too slow."""
    for batch in (1, 4, 16):
        plain, draft = times[batch]
        emitted = 1 + np.random.default_rng(batch).poisson(accept_length - 1, (1000, batch))
        seconds = {DRAFT: draft / 1e3, PLAIN: plain / 1e3}
        rate, _ = simulate(
            seconds, lambda i, t, emitted=emitted: int(emitted[t, i]), batch=batch, steps=len(emitted),
            expected=wrong * draft / plain,
        )  # fmt: skip
        plainly, ideal = batch / seconds[PLAIN], emitted.mean() * batch / seconds[DRAFT]
        assert rate > 0.97 * plainly, batch
        assert rate > 0.94 * ideal or wrong > 1, batch


def test_it_finds_out_when_texts_change():
    """Drafts become useful after 600 steps, and useless again after 1,800."""
    seconds = {DRAFT: 0.03, PLAIN: 0.02}

    def acceptance(i, t):
        return 4 if 600 <= t < 1800 else 1

    rate, adaptive = simulate(seconds, acceptance, batch=4, steps=2400, expected=1.5)
    ideal, always = (4 * (1200 + 4800) / time for time in (1200 * 0.02 + 1200 * 0.03, 2400 * 0.03))
    assert rate > max(0.85 * ideal, always)
    assert not adaptive.report()["4"]["drafts"]


def test_requests_that_must_not_draft_do_not():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.0)
    quiet = idle_sequence(SamplingParams(speculate=False))
    assert [adaptive.choose(1, [quiet]) for _ in range(100)] == [PLAIN] * 100


def test_always_draft_overrides_the_choice_and_costs_no_credit():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    seconds = {DRAFT: 0.09, PLAIN: 0.02}  # drafts are never worth it
    asked = SamplingParams(always_draft=True), SamplingParams()
    one, other = (idle_sequence(params, limit=1 << 20) for params in asked)

    def steps(requests: list, count: int) -> list[int]:
        chosen = []
        for _ in range(count):
            chosen.append(adaptive.choose(4, requests))
            adaptive.record(Key("step", 4, 8, nodes=chosen[-1]), seconds[chosen[-1]], dict.fromkeys(requests, 1))
        return chosen

    assert steps([other], 400).count(DRAFT) < 40, "trials alone"
    before = adaptive.credit
    assert steps([one], 100) == steps([one, other], 100) == [DRAFT] * 100
    assert before is not None and adaptive.credit is not None and adaptive.credit >= before
    assert steps([other], 100).count(PLAIN) > 80, "the choice goes on as before"


def test_a_request_of_few_tokens_is_not_worth_a_long_catching_up():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.1)
    for nodes in (DRAFT, PLAIN) * 5:
        adaptive.record(Key("step", 1, 8, nodes=nodes), 0.02, {})
    adaptive.record_catch_up(Key("catch-up", 100, 8), 0.4)
    adaptive.record_catch_up(Key("catch-up", 100, 8), 0.4)
    assert adaptive.catch_up_seconds == 0.004 and adaptive.usual(1, 0) == GUESS
    behind = [idle_sequence(SamplingParams(), limit=limit, unseen=100) for limit in (4, 10 * HORIZON)]
    assert [adaptive.choose(1, [one]) for one in behind] == [PLAIN, DRAFT]


def useless_drafts(bucket_steps: list[tuple[int, int]], *, expected: float, times: float) -> tuple[float, float]:
    """Steps of batch buckets in turn, where a step with drafts takes so many `times` as long as one without, and emits
    no more. Returns the seconds that were lost, and those that trials might lose."""
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: expected, guess=1.0)
    clock = lost = first = 0.0
    for batch, steps in bucket_steps:
        requests = [idle_sequence(SamplingParams(), limit=1 << 20) for _ in range(batch)]
        plain = CPU[batch][0] / 1e3
        for _ in range(steps):
            nodes = adaptive.choose(batch, requests)
            seconds = plain * (times if nodes == DRAFT else 1)
            gained = dict.fromkeys(requests, 1) if nodes == DRAFT else {}
            adaptive.record(Key("step", batch, 8, nodes=nodes), seconds, gained)
            clock, lost, first = clock + seconds, lost + seconds - plain, first or seconds
    assert lost, "nothing was tried"
    return lost, SHARE * clock + FIRST * first


def test_all_batch_buckets_share_one_credit():
    lost, allowed = useless_drafts([(1, 100), (4, 120), (16, 120), (48, 120)] * 4, expected=1.5, times=1.5)
    assert lost <= allowed


def test_a_trial_pays_what_it_has_cost():
    """Four steps that cost twice what was expected leave less for the next trial."""
    lost, allowed = useless_drafts([(4, 800)], expected=1.3, times=2.0)
    assert lost <= allowed


def test_a_trial_pays_for_its_catching_up():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    step, catch_up = Key("step", 1, 8, nodes=PLAIN), Key("catch-up", 64, 8)
    adaptive.record_catch_up(catch_up, 9.0, trial=True)  # the first run of a program
    for _ in range(ENOUGH + 1):
        assert adaptive.credit is None
        adaptive.record(step, 0.02, {})
    before = adaptive.credit
    adaptive.record_catch_up(catch_up, 0.01)
    assert adaptive.credit == before == pytest.approx(FIRST * 0.02)
    adaptive.record_catch_up(catch_up, 0.01, trial=True)
    assert adaptive.credit == before - 0.01
    adaptive.charge_catch_up(catch_up._replace(rows=2))
    assert adaptive.credit == pytest.approx(before - 0.03)


def one_after_another(prompt: int, tokens: int, accept_length: float, *, count: int = 30, catch_up: float = 0.07e-3):
    """Requests of so many prompt tokens and tokens, one at a time, on a made-up CPU where a step takes 5.3 ms, with
    drafts 8 ms, and catching up `catch_up` seconds a token. Returns the time over that without drafts, and how often
    the drafter caught up with a whole prompt."""
    adaptive, rng = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5), np.random.default_rng(1)
    clock, caught_up = 0.0, 0
    for _ in range(count):
        request = idle_sequence(SamplingParams(), limit=tokens, unseen=prompt)
        while len(request.output) < tokens:
            nodes, gained = adaptive.choose(1, [request]), 1
            if nodes == DRAFT:
                if request.unseen:
                    clock, caught_up = clock + catch_up * request.unseen, caught_up + (request.unseen >= prompt)
                    for _ in range(0, request.unseen, 50):
                        adaptive.record_catch_up(Key("catch-up", 50, 8), 50 * catch_up, trial=adaptive.tries(1, nodes))
                gained, request.unseen = 1 + int(rng.binomial(4, (accept_length - 1) / 4)), 0
            else:
                request.unseen += 1
            seconds = 8e-3 if nodes == DRAFT else 5.3e-3
            adaptive.record(Key("step", 1, 8, nodes=nodes), seconds, {request: gained} if nodes == DRAFT else {})
            request.output += [7] * gained
            clock += seconds
    return clock / (count * tokens * 5.3e-3), caught_up


def of_two_temperatures(
    accepted: tuple[float, float], draft: float = 1.5, *, tokens: int = 64, count: int = 40, every: int = 2, **given
) -> tuple[float, float]:
    """Requests in turn, each `every`-th at a temperature of 1, whose accept lengths are these. Returns the time over
    that of an engine that knows when a step with drafts, `draft` times as long as one without, pays; and the share of
    the last third's steps at temperature 1 that draft."""
    adaptive, rng, clock = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: draft, **given), np.random.default_rng(1), 0.0
    chosen, best_time = list[int](), 0.0
    for turn in range(count):
        hot = turn % every == every - 1
        request = idle_sequence(SamplingParams(temperature=float(hot)), limit=tokens)
        best_time += tokens * min(draft / accepted[hot], 1.0)
        while len(request.output) < tokens:
            nodes, gained = adaptive.choose(1, [request]), 1
            if nodes == DRAFT:
                gained += int(rng.binomial(7, (accepted[hot] - 1) / 7))
            seconds = draft if nodes == DRAFT else 1.0
            adaptive.record(Key("step", 1, 8, nodes=nodes), seconds, {request: gained} if nodes == DRAFT else {})
            request.output += [7] * gained
            clock += seconds
            chosen += [nodes] if hot and turn > 2 * count / 3 else []
    return clock / best_time, chosen.count(DRAFT) / len(chosen)


def test_requests_begin_with_what_those_of_their_temperature_accept(monkeypatch):
    apart, _ = of_two_temperatures((3.0, 1.1))
    assert apart < 1.06
    monkeypatch.setattr("specjax.engine.adaptive.warmth", lambda request: 0)
    assert apart < of_two_temperatures((3.0, 1.1))[0] - 0.03


def test_a_rare_temperature_learns_from_the_others():
    """Its own trials would come too late: those of the many requests use up the credit."""
    _, drafted = of_two_temperatures((4.0, 3.5), 2.0, count=600, every=10, guess=1.3)
    assert drafted > 0.7


def test_a_trial_ends_with_the_requests_of_its_temperature():
    """What greedy requests gain would pay for drafts that are of no use at a temperature of 1."""
    _, drafted = of_two_temperatures((4.0, 1.0), tokens=4, count=2000)
    assert drafted < 0.08


def test_what_is_usual_is_known_by_temperature():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    given = {temperature: idle_sequence(SamplingParams(temperature=temperature)) for temperature in (0.2, 0.6, 2.0)}
    for _ in range(200):
        adaptive.record(Key("step", 8, 8, nodes=DRAFT), 0.01, {given[0.2]: 3, given[0.6]: 2})

    def corrected(length: float, seen: float, requests: float = 20.0) -> float:
        return (requests * seen + DOUBT * length) / (requests + DOUBT)

    both = corrected(GUESS, 2.5, 40.0)
    each = [corrected(corrected(corrected(GUESS, other), own), own) for own, other in ((3, 2), (2, 3))]
    assert [adaptive.usual(8, kind) for kind in range(5)] == pytest.approx([*each, both, both, both], abs=1e-3)
    assert adaptive.usual(1, 0) == pytest.approx(corrected(corrected(GUESS, 2), 3), abs=1e-3)
    for _ in range(2):
        adaptive.record(Key("step", 1, 8, nodes=DRAFT), 0.01, {given[2.0]: 1})
    assert adaptive.usual(1, 4) < adaptive.usual(1, 3) < both
    shown = adaptive.report()
    assert [list(shown[batch]["usual_by_temperature"]) for batch in "81"] == [["0", "0.5"], ["2"]]
    likeliest = idle_sequence(SamplingParams(temperature=1.0, top_k=1))
    assert [warmth(one) for one in (*given.values(), likeliest)] == [0, 1, 4, 0]


@pytest.mark.parametrize("accept_length", [1.0, 1.75, 3.0])
@pytest.mark.parametrize(("prompt", "tokens"), [(800, 64), (800, 16), (100, 64), (800, 400), (3000, 64)])
def test_catching_up_with_long_prompts_costs_no_more_than_trials_may(prompt, tokens, accept_length):
    time, caught_up = one_after_another(prompt, tokens, accept_length)
    ideal = (tokens * 8e-3 / accept_length + prompt * 0.07e-3) / (tokens * 5.3e-3)
    assert time < 1.03, "begun with a guess, for 30 requests"
    if ideal < 0.7:
        assert time < ideal + 0.03 and caught_up == 30
    if ideal > 1 and prompt >= 800:
        # The first, one that is begun with the last of the credit, and as many as the share of the time pays for. Where
        # drafts save time, that pays for a part of each.
        gained = max(tokens * (5.3e-3 - 8e-3 / accept_length), 0.0)
        assert caught_up <= 2 + SHARE * 30 * tokens * 5.3e-3 / (prompt * 0.07e-3 - gained)


def test_drafting_is_found_where_every_prompt_is_long():
    """Catching up with a prompt takes longer than the share of `SAVED` steps. Nothing is accepted of the first half of
    the texts."""
    prompt, catch_up, plain = 3000, 0.07e-3, 5.3e-3
    assert prompt * catch_up > SHARE * SAVED * plain
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5, guess=1.0)
    for _ in range(2):  # the first run of a program does not count
        adaptive.record_catch_up(Key("catch-up", 50, 8), 50 * catch_up)
    clock, emitted, useful = 0.0, 0, list[float]()
    for i in range(60):
        request, gained, begun = idle_sequence(SamplingParams(), limit=600, unseen=prompt), 0, clock
        while gained < 600:
            nodes, count = adaptive.choose(1, [request]), 1
            if nodes == DRAFT:
                for _ in range(0, request.unseen, 50):
                    adaptive.record_catch_up(Key("catch-up", 50, 8), 50 * catch_up, trial=adaptive.tries(1, nodes))
                clock, request.unseen, count = clock + catch_up * request.unseen, 0, 1 if i < 30 else 3
            else:
                request.unseen += 1
            seconds = 1.5 * plain if nodes == DRAFT else plain
            adaptive.record(Key("step", 1, 8, nodes=nodes), seconds, {request: count} if nodes == DRAFT else {})
            request.output += [7] * count
            clock, gained = clock + seconds, gained + count
        emitted += gained
        if i < 30:
            assert clock <= (1 + SHARE) * emitted * plain + FIRST * 1.5 * plain, "no more than the share"
        useful.append((clock - begun) / (gained * plain))
    assert max(useful[-10:]) < 0.7, "drafts save half of the steps' time"


def test_a_trial_does_not_go_on_with_a_request_that_is_far_behind():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.6)
    for _ in range(2):
        adaptive.record_catch_up(Key("catch-up", 100, 8), 0.01)
    near, far = (idle_sequence(SamplingParams(), limit=1000, unseen=unseen) for unseen in (0, 10000))
    nodes = PLAIN
    for _ in range(1000):
        nodes = adaptive.choose(1, [near])
        if adaptive.tries(1, nodes) and nodes == DRAFT:
            break
        adaptive.record(
            Key("step", 1, 8, nodes=nodes), 0.03 if nodes == DRAFT else 0.02, {near: 1} if nodes == DRAFT else {}
        )
    assert nodes == DRAFT
    assert adaptive.choose(1, [near]) == DRAFT, "the trial goes on"
    assert [adaptive.choose(1, [one]) for one in (far, near)] == [PLAIN, PLAIN]


def test_one_long_wait_does_not_end_drafting_for_good():
    adaptive, key = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5), Key("catch-up", 100, 8)
    for seconds in (9.0, 0.01, 60.0, 0.01, 0.01):  # the first run of a program does not count
        adaptive.record_catch_up(key, seconds)
    assert 0.01 <= 100 * adaptive.catch_up_seconds < 0.02


def test_who_pays_for_catching_up():
    """The tokens that are left, at most `HORIZON` of each request, or as many as it has emitted."""
    assert catch_up_share(1.0, [0], [1000]) == 1 / HORIZON
    assert catch_up_share(1.0, [0, 0], [1000, 10]) == 1 / (HORIZON + 10)
    assert catch_up_share(1.0, [300], [1000]) == 1 / 300
    assert catch_up_share(1.0, [300], [20]) == 1 / 20


def test_what_ended_while_something_compiled_was_not_timed():
    """Programs that had ended when the compiler returned would seem to have taken no time."""
    compiled = [0]
    flights, key = Flights(lambda: compiled[0]), Key("catch-up", 64, 8)
    for programs, timed in ((0, True), (1, False), (1, False), (1, False), (1, True)):
        while len(flights) < 3:
            flights.append(InFlight(key, cast(Any, None), []))
        compiled[0] = programs
        assert (flights.seconds(flights.popleft()) is not None) == timed


def test_one_long_step_earns_no_more_than_a_long_step_counts():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 9.0, guess=1.0)
    one, step = idle_sequence(SamplingParams(), limit=1 << 20), Key("step", 1, 8, nodes=PLAIN)
    for _ in range(ENOUGH + 1):
        assert adaptive.choose(1, [one]) == PLAIN
        adaptive.record(step, 0.02, {})
    before = adaptive.credit
    adaptive.record(step, 60.0, {})
    assert adaptive.credit == pytest.approx(before + SHARE * OUTLIER * 0.02)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_nobody_waits_for_is_not_timed(monkeypatch, overlap):
    """The last one, dispatched ahead before the request's end was known, is read when the next request comes."""
    clock = [0.0]
    for module in (flight, prefilling, stepping):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    engine = make_engine(toy(), NGRAM, adaptive=True, overlap=overlap)
    timed: list[float] = []
    monkeypatch.setattr(engine.pace, "record", lambda key, seconds, context: timed.append(seconds))
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    for idle in (1000.0, 1000.0, 0.0):
        engine.generate([5, 6, 7], params)
        assert engine.unfinished == overlap
        clock[0] += idle
    assert len(timed) > 8 and not any(timed)
    check_idle(engine)


def test_a_trial_ends():
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    one, chosen = idle_sequence(SamplingParams(), limit=1 << 20), []
    for _ in range(2000):
        chosen.append(nodes := adaptive.choose(1, [one]))
        adaptive.record(Key("step", 1, 8, nodes=nodes), 0.03 if nodes == DRAFT else 0.02, {one: 1} if not nodes else {})
    drafts = [i for i, nodes in enumerate(chosen) if nodes == DRAFT and i > 100]
    assert TRIAL <= len(drafts) < 0.05 * len(chosen)


@pytest.mark.parametrize("late", range(1, 4))
def test_one_long_wait_among_the_first_steps_does_not_end_drafting(late):
    """Drafting pays, and a step takes 0.2 s longer, when hardly any was measured."""
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    one, chosen, drafted = idle_sequence(SamplingParams(), limit=1 << 20), [], 0
    for _ in range(300):
        chosen.append(nodes := adaptive.choose(1, [one]))
        drafted += nodes == DRAFT
        seconds = 8e-3 if nodes == DRAFT else 5e-3
        adaptive.record(
            Key("step", 1, 8, nodes=nodes), seconds + 0.2 * (nodes == DRAFT and drafted == 1 + late),
            {one: 2} if nodes == DRAFT else {},
        )  # fmt: skip
    assert chosen[30:].count(DRAFT) > 230


def test_what_was_measured_on_a_slower_machine_counts_as_slower():
    """Drafting pays at first, while something else runs; then the machine is three times as fast, and it does not."""
    adaptive, rng = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5), np.random.default_rng(1)
    one, chosen = idle_sequence(SamplingParams(), limit=1 << 20), []
    for i in range(600):
        chosen.append(nodes := adaptive.choose(1, [one]))
        slower, emitted = (3, 2) if i < 60 else (1, 1 + int(rng.random() < 0.2))
        seconds = slower * (9e-3 if nodes == DRAFT else 6e-3)
        adaptive.record(Key("step", 1, 8, nodes=nodes), seconds, {one: emitted} if nodes == DRAFT else {})
    assert chosen[:60].count(DRAFT) > 40 and chosen[200:].count(PLAIN) > 370


def looked_up(rng, repeats: float) -> tuple[float, int]:
    """Seconds of a draft step of one request, 5 ms without drafts, and what it emits: where nothing is found it costs
    what plain decoding does."""
    return (15e-3, 1 + int(rng.random() < 0.5)) if rng.random() < repeats else (5e-3, 1)


def test_what_is_found_does_not_make_plain_steps_seem_slower():
    """A look-up finds nothing at first, so that its steps take no longer than plain ones, and is then mostly wrong."""
    adaptive, rng = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.6, steady=False), np.random.default_rng(2)
    one, chosen = idle_sequence(SamplingParams(), limit=1 << 20), []
    for i in range(600):
        chosen.append(nodes := adaptive.choose(1, [one]))
        seconds, emitted = looked_up(rng, 0.0 if i < 100 else 0.9) if nodes == DRAFT else (5e-3, 1)
        adaptive.record(Key("step", 1, 8, nodes=nodes), seconds, {one: emitted} if nodes == DRAFT else {})
    plain = adaptive.report()["1"]["plain"]
    assert plain["steps"] > 400 and plain["milliseconds"] == 5, "the machine was as fast all the time"


def test_a_slower_machine_is_not_taken_for_slower_drafts():
    """Look-ups pay for all the time, and the machine becomes three times as slow, then as fast as before."""
    adaptive, rng = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.6, steady=False), np.random.default_rng(3)
    one, chosen = idle_sequence(SamplingParams(), limit=1 << 20), []
    for i in range(1500):
        chosen.append(nodes := adaptive.choose(1, [one]))
        slower = 3 if 500 <= i < 1000 else 1
        seconds, emitted = (8e-3, 1 + int(rng.random() < 0.9)) if nodes == DRAFT else (5e-3, 1)
        adaptive.record(Key("step", 1, 8, nodes=nodes), slower * seconds, {one: emitted} if nodes == DRAFT else {})
    for start in (100, 600, 1100):
        assert chosen[start : start + 400].count(DRAFT) > 300, start


def test_times_beside_the_compiler_are_not_compared_with_those_after_it():
    """Plain steps were measured while something compiled, at a third of the speed; look-ups afterwards."""
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.6, steady=False)
    one, plain = idle_sequence(SamplingParams(), limit=1 << 20), Key("step", 1, 8, nodes=PLAIN)
    for _ in range(20):
        adaptive.record(plain, 15e-3, {}, disturbed=True)
    assert adaptive.report()["1"]["plain"] == {"steps": 19, "milliseconds": 15}
    for _ in range(5):
        adaptive.record(Key("step", 1, 8, nodes=DRAFT), 8e-3, {one: 1})
    assert adaptive.report()["1"]["plain"] == {"steps": 0}


def test_drafts_that_cost_one_request_nothing_are_not_taken_to_cost_many_nothing():
    """Little is found for the one; for one of eight something nearly always is."""
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda batch, _: {1: 1.6, 8: 4.0}[batch], steady=False, guess=1.3)
    drafting, rng = dict.fromkeys((1, 8), 0), np.random.default_rng(1)
    for batch, steps in ((1, 200), (8, 200)):
        requests = [idle_sequence(SamplingParams(), limit=1 << 20) for _ in range(batch)]
        for _ in range(steps):
            nodes = adaptive.choose(batch, requests)
            drafting[batch] += nodes == DRAFT
            seconds = 20e-3 if batch == 8 else 5e-3
            seconds *= 3 if (batch, nodes) == (8, DRAFT) else 1
            emitted = {one: 1 + int(rng.random() < 0.2) for one in requests}
            adaptive.record(Key("step", batch, 8, nodes=nodes), seconds, emitted if nodes == DRAFT else {})
    assert drafting[1] > 150 and not drafting[8], "there is no credit for a trial yet"


def test_a_trial_that_loses_more_than_was_paid_for_ends():
    """It takes ten times as long as when it was measured."""
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    one, chosen = idle_sequence(SamplingParams(), limit=1 << 20), []
    for i in range(1000):
        chosen.append(nodes := adaptive.choose(1, [one]))
        draft = 0.03 if i < 100 else 0.2
        adaptive.record(
            Key("step", 1, 8, nodes=nodes), draft if nodes == DRAFT else 0.02, {one: 1} if nodes == DRAFT else {}
        )
    trials = [i for i, nodes in enumerate(chosen) if nodes == DRAFT and i >= 100]
    first = [i for i in trials if i < trials[0] + TRIAL]
    assert 1 <= len(first) < TRIAL / 2


def test_steps_beside_the_compiler_do_not_change_what_is_known():
    """Those of one choice would be taken for its own, and not for the machine's."""
    adaptive = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    one = idle_sequence(SamplingParams(), limit=1 << 20)
    for i in range(120):
        busy, key = 60 <= i < 100, Key("step", 1, 8, nodes=PLAIN)
        adaptive.record(key, 0.05 if busy else 0.02, {}, disturbed=busy)
        if i == 5 or i >= 60:
            assert adaptive.report()["1"]["plain"]["milliseconds"] == 20
    busy_from_the_start = Adaptive(lambda _: (DRAFT, PLAIN), lambda *_: 1.5)
    for _ in range(5):
        busy_from_the_start.record(Key("step", 1, 8, nodes=PLAIN), 0.05, {one: 1}, disturbed=True)
    assert busy_from_the_start.report()["1"]["plain"]["milliseconds"] == 50, "it is all that is known"


# The engine.


def changes_its_mind(engine, seed: int, usual: float = 0.5) -> None:
    """Makes an engine draft by chance, with each of its trees."""
    rng = np.random.default_rng(seed)

    def choose(batch, requests):
        trees = [nodes for nodes in engine.buckets.choices(batch) if nodes != PLAIN]
        return trees[rng.integers(len(trees))] if trees and rng.random() < usual else PLAIN

    engine.adaptive.choose = choose


def follows_the_text(engine) -> None:
    """Makes the choice depend on the tokens that were drawn last, which must not bias the ones that follow."""

    def choose(batch, requests):
        options = engine.buckets.choices(batch)
        return options[sum(sum(one.output[-2:]) for one in requests) % len(options)]

    engine.adaptive.choose = choose


@functools.cache
def engine_of(kind: str, **config):
    sizes = {"page_size": 4, "chunked_prefill_size": 8, "context_length": LONGEST, "max_running_requests": 3}
    if kind == "NGRAM":
        return make_engine(toy(), NGRAM, warm=False, adaptive=True, **sizes | config)
    return make_engine(llama(), drafter(kind), draft=head(kind)[1], warm=False, adaptive=True, **sizes | config)


def lags(engine, sequence) -> int:
    """By how many tokens the drafter lags behind a running request, from the state on the device."""
    seen = np.asarray(engine.state.draft.seen)[sequence.pages]
    partial = np.flatnonzero(seen < 4)
    known = len(seen) * 4 if not len(partial) else partial[0] * 4 + seen[partial[0]]
    return max(int(engine.state.rows.prefix_length[sequence.slot]) - int(known), 0)


@pytest.mark.parametrize("sizes", [{"overlap": False}, {"overlap": True, "retract_every": 7}], ids=str)
@pytest.mark.parametrize("kind", ["NGRAM", "eagle3"])
@pytest.mark.parametrize("follows", [False, True], ids=["by chance", "by the text"])
def test_texts_whatever_is_chosen(kind, sizes, follows):
    """Each token is the target's own draw, whatever the choice depends on."""
    engine = engine_of(kind, **sizes)
    assert len(engine.buckets.choices(1)) == 3
    follows_the_text(engine) if follows else changes_its_mind(engine, 3)
    model = toy() if kind == "NGRAM" else llama()
    rng = np.random.default_rng(5)
    start = rng.integers(5, 30, 9).tolist()
    prompts = [start[: 4 + i] + rng.integers(5, 30, 1 + 5 * (i % 3)).tolist() for i in range(7)]
    params = [
        SamplingParams(
            max_new_tokens=12 + 3 * i,
            temperature=float(i % 2),
            seed=i,
            speculate=i != 4,
            draft_limit={2: 0, 5: 1}.get(i),
        )
        for i in range(7)
    ]
    found = engine.generate(prompts, params)
    for prompt, wanted, done in zip(prompts, params, found, strict=True):
        check_plain(model, prompt, wanted, done)
    check_idle(engine)
    if sizes.get("retract_every"):
        assert engine.scheduler.retractions


def test_a_head_that_caught_up_knows_what_it_would_have_seen():
    """Its slots and its output are those of a prefill of the whole text; slots after what it has seen are not read."""
    engine = engine_of("eagle3", overlap=False, max_total_tokens=160)
    changes_its_mind(engine, 8, usual=0.6)
    rng = np.random.default_rng(2)
    checked = behind = shared = 0
    known = rng.integers(0, 31, 17).tolist()
    alive = []
    for turn in range(110):
        alive = [one for one in alive if one.status is not Status.FINISHED]
        if turn < 80 and len(alive) < 3 and rng.random() < 0.4:
            prompt = (
                known[: int(rng.integers(0, 17)) * (turn % 2)] + rng.integers(0, 31, int(rng.integers(1, 20))).tolist()
            )
            params = SamplingParams(max_new_tokens=int(rng.integers(5, 40)), temperature=1.0, seed=turn)
            alive.append(engine.add(prompt, params))
        engine.step()
        for one in (one for one in alive if one.status is Status.RUNNING):
            n, lag = int(engine.state.rows.prefix_length[one.slot]), lags(engine, one)
            assert lag <= one.unseen, (lag, one.unseen)
            shared += bool(one.cached)
            text = [*one.prompt, *one.output]
            behind += lag > 0
            if (seen := n - lag) == 0 or rng.random() < 0.5:
                continue
            expected, hidden = from_scratch("eagle3", text[: n + 1])
            draft = engine.state.draft.draft
            # The slot at the end of a shared page is made of the token that followed it there.
            fresh = [i for i in range(seen) if i >= (one.cached or 0) or (i + 1) % 4]
            found = slots(draft, np.asarray(one.pages), n)
            np.testing.assert_allclose(found[fresh], expected[fresh], atol=2e-5)
            if one.cached == 0 and lag == 0:
                np.testing.assert_allclose(np.asarray(draft.hidden[one.slot]), hidden, atol=2e-5)
                checked += 1
    while engine.unfinished:
        engine.step()
    assert checked > 10 and behind > 10 and shared > 10, (checked, behind, shared)
    check_idle(engine)


def test_ngrams_of_a_request_that_never_drafted_are_known_to_the_next():
    engine = engine_of("NGRAM", overlap=True)
    engine.flush_cache()
    changes_its_mind(engine, 0, usual=0.0)
    prompt = list(range(70, 95))
    params = SamplingParams(max_new_tokens=30)
    first = engine.generate([prompt], params)[0]
    assert first.spec_accept_length == 1.0
    changes_its_mind(engine, 0, usual=1.0)
    again = engine.generate([prompt], params)[0]
    assert again.output_ids == first.output_ids
    assert again.spec_accept_length > 1.5


@pytest.mark.parametrize("sizes", [{"overlap": False}, {"overlap": True, "retract_every": 7}], ids=str)
@pytest.mark.parametrize("kind", ["NGRAM", "eagle3"])
def test_always_draft_in_an_engine_that_prefers_plain_steps(kind, sizes):
    """Alone from the first step on. Beside others once the drafter has caught up, and the drafts are no stale ones."""
    engine = engine_of(kind, **sizes)

    def choose(batch, requests):
        asked = any(one.params.always_draft for one in requests)
        return Adaptive.choose(engine.adaptive, batch, requests) if asked else PLAIN

    engine.adaptive.choose = choose
    prompt = [(7 * i + 2) % 30 for i in range(30)]
    plain = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    always = replace(plain, always_draft=True)
    (quiet,) = engine.generate([prompt], plain)
    assert quiet.drafted_steps == 0 < quiet.spec_verify_ct
    assert quiet.not_drafted is not None and "faster by measurement" in quiet.not_drafted
    (alone,) = engine.generate([prompt], always)
    assert alone.output_ids == quiet.output_ids
    assert alone.drafted_steps == alone.spec_verify_ct < quiet.spec_verify_ct and alone.not_drafted is None
    others = [replace(plain, seed=seed) for seed in (8, 9)]
    *_, last = engine.generate([prompt[2:], prompt[1:], prompt], [*others, always])
    assert last.output_ids == quiet.output_ids
    assert last.drafted_steps > 0 and last.spec_verify_ct < quiet.spec_verify_ct
    if last.not_drafted is not None:
        assert "had not read all of the text" in last.not_drafted
    check_plain(toy() if kind == "NGRAM" else llama(), prompt, plain, last)
    check_idle(engine)


def test_reasons_why_a_step_does_not_draft():
    buckets, none = engine_of("NGRAM").buckets, make_engine(toy(), "NONE", warm=False).buckets
    small, drafting, plain = replace(buckets, block_tokens=1), Key("step", 3, 8), Key("step", 3, 8, nodes=PLAIN)
    params, off, always = SamplingParams(), SamplingParams(speculate=False), SamplingParams(always_draft=True)
    for given, reason in (
        ((none, plain, params), "there is no drafter"),
        ((buckets, plain, off), "draft_limit: 0"),
        ((small, plain, always), "batches of more than 1 requests"),
        ((small, drafting, params), "batches of more than 1 requests"),
        ((buckets, drafting, params), "had not read all of the text"),
        ((buckets, plain, always), "had not read all of the text"),
        ((buckets, plain, params), "faster by measurement"),
    ):
        assert reason in not_drafted(*given), given


def test_always_draft_is_refused_where_nothing_can_be_drafted():
    with pytest.raises(ParameterError, match=r"always_draft needs a drafter.* NONE"):
        make_engine(toy(), "NONE", warm=False).intake.sequence([70], SamplingParams(16, always_draft=True))
    for others in ({"draft_limit": 0}, {"speculate": False}):
        with pytest.raises(ParameterError, match="always_draft contradicts"):
            SamplingParams(always_draft=True, **others)


def test_nothing_is_compiled_for_drafts_where_none_can_be():
    engine = engine_of("NGRAM", overlap=True)
    assert {key.kind for key in engine.buckets.all_keys()} == {"prefill", "step", "catch-up"}
    plain = make_engine(toy(), "NONE", warm=False, adaptive=True)
    assert plain.adaptive is None
    assert {key.kind for key in plain.buckets.all_keys()} == {"prefill", "step"}


def test_where_each_step_is_to_be_seen_all_draft():
    for name in ("trace", "time_phases"):
        assert make_engine(toy(), NGRAM, warm=False, adaptive=True, **{name: True}).adaptive is None


def test_a_request_alone_catches_up_at_once_and_several_bit_by_bit():
    engine, now = engine_of("eagle3", overlap=False), PLAIN
    engine.adaptive.choose = lambda batch, requests: now
    for count in (1, 2):
        now = PLAIN
        prompts = [[(3 * i + j) % 30 for i in range(30)] for j in range(count)]
        alive = [engine.add(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)) for prompt in prompts]
        while any(len(one.output) < 3 for one in alive):
            engine.step()
        assert all(lags(engine, one) >= 30 for one in alive)
        now = DRAFT
        engine.step()
        assert [lags(engine, one) > 0 for one in alive] == {1: [False], 2: [True, True]}[count]
        for one in alive:
            engine.abort(one.id)
        engine.step()
        engine.flush_cache()
    check_idle(engine)
