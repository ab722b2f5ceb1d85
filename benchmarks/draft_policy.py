"""Simulates devices on which `DraftPolicy` chooses the nodes of each step, over recorded acceptance and changing load.

    python benchmarks/draft_policy.py [--seeds 2] [--steps 300] [--record]

A stretch has a number of requests at once and a set of prompts; requests that end are replaced. All contenders see the
same acceptance in the same step: the recorded step of each request, of whose accepted nodes a tree of N nodes accepts
those with a rank below N.

| contender | nodes of a step |
|---|---|
| policy | `DraftPolicy`, with the sizes of `Buckets.build` and the estimates of `specjax.costs` |
| fixed | each size of the bucket in every step; the best in hindsight of each stretch is 1.0 |
| rule | SGLang's adaptive steps (chains only) over the bucket's sizes; without drafts only from 8 requests on |
| own | the same with SGLang's own sizes, whose seconds come from the same model |
| known | the size that is best on average over the set and the noise: what hindsight gains by luck |

Seconds of a step follow `specjax.costs`, or on a CPU a measurement. In truth drafts cost `ERRORS` times the estimate,
drawn for each run, with `NOISE` in each step and a slow step now and then. Programs are compiled, and prefills are left
out. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from functools import cache
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from accepted import TREES, Texts, read_accepted
from model_shapes import eagle3_head, head_shapes, llama_8b, qwen3_8b, target_shapes
from records import finish, machine

from specjax import Eagle3, Params, make_speculation, make_target
from specjax.costs import CPU_STEP, estimated_seconds
from specjax.engine.draft_policy import DraftPolicy, Own, own_acceptance
from specjax.engine.plan import Buckets
from specjax.gpu import DEVICES

# Devices


class Device(NamedTuple):
    name: str
    tree: str
    sizes: Mapping[int, tuple[int, ...]]  # of its buckets
    estimate: Callable[[int, int], float]  # (batch, N) -> seconds of a step
    seconds: Callable[[int, int], float] | None = None  # measured; None: the estimate, with an error


CPU_SECONDS = {1: 3.55e-3, 2: 4.2e-3, 3: 4.85e-3, 4: 5.6e-3, 8: 9.0e-3}
"""Steps of the built-in model with its head on 2 cores, by N."""
CPU_LEVEL = 0.12  # duration of a pass of its head relative to a plain step, as `specjax.costs` estimates it


def cpu() -> Device:
    """Two cores with the shipped head, which drafts for single requests."""
    speculation = make_speculation(Eagle3(steps=7), target=make_target(llama_8b(1)), head=eagle3_head(llama_8b(1)))
    buckets = Buckets.build("cpu", speculation._replace(explicit_width=False), rows=1, request_pages=8, adaptive=True)

    def estimate(batch: int, n: int) -> float:
        return float(np.interp(batch * n, [*CPU_STEP], [*CPU_STEP.values()])) + CPU_LEVEL * (n - 1)

    def seconds(batch: int, n: int) -> float:
        return float(np.interp(n, [*CPU_SECONDS], [*CPU_SECONDS.values()]))

    return Device("CPU", "chain", {1: buckets.sizes(1)}, estimate, seconds)


def gpu(name: str, shape: Callable[[int], Any], layers: int, tree: str, quantization: str = "none") -> Device:
    config = shape(layers)
    target, head = make_target(config), eagle3_head(config)
    levels, topk, nodes = TREES[tree]
    speculation = make_speculation(Eagle3(steps=levels, topk=topk, nodes=nodes), target=target, head=head)
    params = Params(target_shapes(config, quantization), head_shapes(head, config, "int8"))
    automatic = speculation._replace(explicit_width=False)
    buckets = Buckets.build("gpu", automatic, rows=max(LOADS), request_pages=64, adaptive=True)

    @cache
    def estimate(batch: int, n: int) -> float:
        resized = speculation._replace(drafter=speculation.within(n)._replace(width=n))
        drafted, plain = estimated_seconds(batch, target, resized, params, DEVICES[name])
        return drafted if n > 1 else plain

    label = f"{name} {shape.__name__}" + (f" {quantization}" if quantization != "none" else "")
    return Device(label, tree, {batch: buckets.sizes(batch) for batch in buckets.batches}, estimate)


def devices() -> list[Device]:
    return [cpu()] + [
        gpu(*case, tree, *weights)
        for *case, weights in (
            ("H200", llama_8b, 32, ()), ("RTX4090", qwen3_8b, 36, ()), ("T4", llama_8b, 32, ("int8",)),
        ) for tree in TREES
    ]  # fmt: skip


ERRORS = 0.6, 1.6  # factors of the true to the estimated cost of drafts
NOISE = 0.03  # standard deviation of the logarithm of a step's seconds
SLOW_SHARE, SLOW = 0.01, 5.0  # share of slow steps, and their factor

# Contenders


class Policy:
    """`DraftPolicy`, called as by an engine."""

    def __init__(self, device: Device) -> None:
        self._sizes, self.policy = device.sizes, DraftPolicy(device.sizes, device.estimate)

    def choose(self, batch: int, own: list[Own]) -> int:
        choice = self.policy.choose(batch, self._sizes[batch], len(own), own)
        self.policy.launched(batch, choice.nodes, trial=choice.trial)
        return choice.nodes

    def record(self, batch: int, nodes: int, seconds: float, own: list[Own], ranks: list[list[int]]) -> None:
        self.policy.record(batch, nodes, seconds, zip(own, ranks, strict=True) if nodes > 1 else [])


class Rule:
    """SGLang's adaptive steps for chains (its pull requests 21599, 23336 and 24055). After ten steps, each fifth moves
    to fewer drafts if the decayed mean of accepted drafts is at most the next lower number - 0.5 (less a hysteresis),
    or to more if it exceeds the present number - 0.5. Without drafts it moves to the fewest."""

    OWN = MappingProxyType({1: [1, 3, 5, 7], 8: [0, 1, 3], 32: [0, 1], 64: [0]})

    def __init__(self, drafts: Mapping[int, List[int]]) -> None:
        self._slots = {batch: Slot(numbers, 0.25 if numbers[0] else 0.0) for batch, numbers in drafts.items()}

    def _slot(self, batch: int) -> Slot:
        return self._slots[max(least for least in self._slots if least <= batch)]

    def choose(self, batch: int, own: list[Own]) -> int:
        return 1 + self._slot(batch).drafts

    def record(self, batch: int, nodes: int, seconds: float, own: list[Own], ranks: list[list[int]]) -> None:
        self._slot(batch).record(mean(map(len, ranks)))


class Slot:
    """State of `Rule` for a range of batches."""

    def __init__(self, numbers: List[int], hysteresis: float) -> None:
        self._numbers, self._hysteresis, self._index = numbers, hysteresis, len(numbers) // 2
        self._mean, self._steps = self.drafts - 1.0, 0

    @property
    def drafts(self) -> int:
        return self._numbers[self._index]

    def record(self, accepted: float) -> None:
        if self.drafts:
            self._mean += 0.2 * (accepted - self._mean)
        self._steps += 1
        if self._steps <= 10 or self._steps % 5:
            return
        before, last = self._index, len(self._numbers) - 1
        if not self.drafts:
            self._index = min(1, last)
            return
        while self._index and self._mean <= max(self._numbers[self._index - 1] - 0.5, 0.5) - self._hysteresis:
            self._index -= 1
        while self._index >= before and self._index < last and self._mean > self.drafts - 0.5:
            self._index += 1


# Simulation

LOADS = 1, 4, 16, 64  # requests at once
TEXTS = "mt_bench", "spec_bench/summarization", "gsm8k", "spec_bench/math_reasoning"


def simulate(device: Device, sets: Mapping[str, Texts], seed: int, steps: int) -> list[dict[str, Any]]:
    """A row for each stretch of `steps` steps: its best fixed size, and tokens a second over this size's."""
    rng = np.random.default_rng(seed)
    error = rng.uniform(*ERRORS)

    def seconds(batch: int, n: int) -> float:
        if device.seconds is not None:
            return device.seconds(batch, n)
        plain = device.estimate(batch, 1)
        return plain + error * (device.estimate(batch, n) - plain)

    loads = [load for load in LOADS if load <= max(device.sizes)]
    contenders: dict[str, Policy | Rule] = {"policy": Policy(device)}
    if device.tree == "chain":
        drafts = {batch: [n - 1 for n in sizes if n > 1 or batch >= 8] for batch, sizes in device.sizes.items()}
        contenders |= {"rule": Rule(drafts), "own": Rule(Rule.OWN)}
    rows, stretches = [], [(load, name) for load in loads for name in TEXTS] * (len(LOADS) // len(loads))
    for load, name in (stretches[i] for i in rng.permutation(len(stretches))):
        batch = min(b for b in device.sizes if b >= load)
        texts, tokens, taken, used = sets[name], Counter[Any](), Counter[Any](), Counter[int]()
        counts = {n: mean(1 + sum(r < n for r in step) for text in texts for step in text) for n in device.sizes[batch]}
        known = max(counts, key=lambda n: counts[n] / seconds(batch, n))
        active = [(text := texts[rng.integers(len(texts))], int(rng.integers(len(text)))) for _ in range(load)]
        own = {contender: [own_acceptance() for _ in active] for contender in contenders}
        for _ in range(steps):
            ranks = [text[i] for text, i in active]
            noise = rng.lognormal(0, NOISE) * (SLOW if rng.random() < SLOW_SHARE else 1.0)
            accepted = cache(lambda n, ranks=ranks: [[rank for rank in path if rank < n] for path in ranks])
            chosen = {contender: each.choose(batch, own[contender]) for contender, each in contenders.items()}
            for contender, n in (chosen | {n: n for n in counts}).items():
                tokens[contender] += load + sum(map(len, accepted(n)))
                taken[contender] += noise * seconds(batch, n)
            for contender, n in chosen.items():
                contenders[contender].record(batch, n, noise * seconds(batch, n), own[contender], accepted(n))
            used[chosen["policy"]] += 1
            for k, (text, i) in enumerate(active):
                if i + 1 < len(text):
                    active[k] = text, i + 1
                    continue
                active[k] = texts[rng.integers(len(texts))], 0
                for means in own.values():
                    means[k] = own_acceptance()
        rates = {contender: tokens[contender] / taken[contender] for contender in tokens}
        best = max(counts, key=rates.__getitem__)
        ratios = {contender: round(rates[contender] / rates[best], 4) for contender in contenders}
        rows.append({
            "device": device.name, "tree": device.tree, "requests": load, "set": name, "seed": seed, "best": best,
            "known": round(rates[known] / rates[best], 4), **ratios, "used": dict(sorted(used.items())),
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the means of each kind of stretch over the seeds, and the worst."""
    names = ("policy", "known", "rule", "own")
    groups = defaultdict[tuple[Any, ...], list[dict[str, Any]]](list)
    for row in rows:
        groups[row["device"], row["tree"], row["requests"], row["set"]].append(row)
    print(f"| device | tree | requests | set | best N | policy / best | worst | known | rule | own |\n{'|---' * 10}|")
    for group, several in [*groups.items(), (("all", "", "", ""), rows)]:
        best = ", ".join(f"{n}" for n, _ in Counter(row["best"] for row in several).most_common(2))
        means = [[row[name] for row in several if name in row] for name in names]
        policy, *others = [f"{mean(values):.3f}" if values else "" for values in means]
        print("|", " | ".join([*map(str, group), best, policy, f"{min(means[0]):.3f}", *others]), "|")
    below = sum(row["policy"] < 0.98 for row in rows)
    print(f"policy below 0.98 of the best fixed size in {below} of {len(rows)} stretches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="simulated runs of each device (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each stretch (default: %(default)s)")
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL")
    args = parser.parse_args()
    sets, rows = {tree: read_accepted(tree) for tree in TREES}, list[dict[str, Any]]()
    for device in devices():
        for seed in range(args.seeds):
            rows += simulate(device, sets[device.tree], seed, args.steps)
    show(rows)
    finish("draft-policy", machine() | {"rows": rows}, record=args.record)


if __name__ == "__main__":
    main()
