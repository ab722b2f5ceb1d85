"""Finds block sizes of the GPU kernel by measuring, one entry of `launch_table.json` at a time.

Specs that share an entry (dtype, head width, query rows) are tuned together. The search starts from what the kernel
would use now and changes one field at a time, keeping what is faster, until no change is. A candidate's score is the
geometric mean, over the specs, of its time over the start's. Candidates that do not compile (no room for their tiles)
or differ from the reference are passed over. Entries are written as they are found: a search that is cut off loses one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention import chain_of, copies
from specjax_kernels import launch, pallas_triton, tree_attention
from specjax_kernels.launch import Blocks
from specjax_kernels.specs import Spec
from timing import interleaved

CHOICES: dict[str, tuple[int, ...]] = {
    "rows": (16, 32, 64, 128),
    "tokens": (16, 32, 64, 128),
    "warps": (2, 4, 8),
    "stages": (1, 2, 3, 4, 5),
    "programs": (1, 2, 4, 8, 16),
}

WORTH = 0.98
"""A change must take less than this share of the time: less is noise."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2**-5, "float16": 2**-8}
"""Twice what the tests allow, and more in float32, whose sums are longer here."""


class Found(NamedTuple):
    blocks: Blocks
    score: float  # of the start's time
    tried: dict[Blocks, float]


def neighbours(blocks: Blocks) -> Iterator[Blocks]:
    """One field one choice up or down."""
    for name, choices in CHOICES.items():
        at = min(range(len(choices)), key=lambda i: abs(choices[i] - getattr(blocks, name)))
        for other in (at - 1, at + 1):
            if 0 <= other < len(choices):
                yield replace(blocks, **{name: choices[other]})


def search(start: Blocks, score: Callable[[Blocks], float], report: Callable[[Blocks, float], None]) -> Found:
    """Descends from `start`, whose score is 1; each candidate is scored once. An infinite score: it cannot run."""
    best, tried = start, {start: 1.0}
    while True:
        before = best
        for candidate in neighbours(best):
            if candidate not in tried:
                tried[candidate] = score(candidate)
                report(candidate, tried[candidate])
        fastest = min(tried, key=tried.__getitem__)
        if tried[fastest] < WORTH * tried[best]:
            best = fastest
        if best == before:
            return Found(best, tried[best], tried)


def groups(specs: Iterable[Spec]) -> dict[str, list[Spec]]:
    """Specs by the entry of the table that serves them."""
    found: dict[str, list[Spec]] = {}
    for spec in specs:
        name = launch.key(spec.dtype, max(spec.E, spec.v_width), spec.N * spec.H // spec.K)
        found.setdefault(name, []).append(spec)
    return found


class Bench:
    """The specs of a group on the device, and what they take with given blocks."""

    def __init__(self, specs: list[Spec], layers: int, *, runs: int, seconds: float) -> None:
        self._runs, self._seconds = runs, seconds
        self._specs = [(spec, *self._prepare(spec, layers)) for spec in specs]
        self._calls: dict[tuple[int, Blocks], Callable[[], jax.Array] | None] = {}

    @staticmethod
    def _prepare(spec: Spec, layers: int) -> tuple[Any, Any, Any, np.ndarray]:
        args, options = spec.arguments()
        expected = jax.jit(functools.partial(tree_attention, **options, implementation="reference"))(*args)
        return args, options, copies(args[3], args[4], layers), np.asarray(expected, np.float32)

    def call(self, index: int, blocks: Blocks) -> Callable[[], jax.Array] | None:
        """One spec's chain of layers with these blocks; None: it does not compile, or is wrong."""
        spec, args, options, pools, expected = self._specs[index]
        attend = functools.partial(pallas_triton.tree_attention, **options, blocks=blocks)
        try:
            out = np.asarray(jax.jit(attend)(*args).astype(jnp.float32))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            print(f"    {spec.name}: {blocks} does not run: {str(error).splitlines()[0][:120]}", flush=True)
            return None
        if not np.abs(out - expected).max() <= TOLERANCE[spec.dtype]:
            print(f"    {spec.name}: {blocks} is wrong by {np.abs(out - expected).max():.2e}", flush=True)
            return None
        run, (q, k_block, v_block, _, _, *rest) = chain_of(attend), args
        return lambda: run(q, k_block, v_block, pools, rest)

    def score(self, blocks: Blocks, start: Blocks) -> float:
        """Geometric mean over the specs of the time over the start's, both measured now, taking turns."""
        logs = []
        for index in range(len(self._specs)):
            if (index, start) not in self._calls:
                self._calls[index, start] = self.call(index, start)
            calls = {"start": self._calls[index, start], "candidate": self.call(index, blocks)}
            if calls["start"] is None:
                raise RuntimeError(f"{self._specs[index][0].name}: the kernel is wrong as it is, with {start}")
            if calls["candidate"] is None:
                return math.inf
            found = interleaved(calls, runs=self._runs, region_seconds=self._seconds)  # pyright: ignore
            medians = {name: float(np.median([one.total for one in many])) for name, many in found.items()}
            logs.append(math.log(medians["candidate"] / medians["start"]))
        return math.exp(sum(logs) / len(logs))


def tune(specs: list[Spec], *, layers: int, runs: int = 5, seconds: float = 0.02) -> list[dict[str, Any]]:
    """Tunes each group of the specs and writes its entry. Returns what was tried, for the record."""
    generation = launch.generation()
    assert generation is not None  # the caller has looked
    records = []
    for name, members in groups(specs).items():
        bench = Bench(members, layers, runs=runs, seconds=seconds)
        width, rows = max(members[0].E, members[0].v_width), members[0].N * members[0].H // members[0].K
        start = launch.table().get(generation, {}).get(name)
        start = start or launch.rule_of_thumb(members[0].dtype, width, rows, generation)
        print(f"{name}: {', '.join(spec.name for spec in members)}; from {start}", flush=True)

        def report(blocks: Blocks, score: float) -> None:
            print(f"    {score:6.3f}  {blocks}", flush=True)

        score = functools.partial(bench.score, start=start)
        found = search(start, score, report)
        launch.write_table(generation, {name: found.blocks})
        print(f"  {found.blocks}: {found.score:.3f} of the time", flush=True)
        tried = [{"blocks": vars(blocks), "score": score} for blocks, score in found.tried.items()]
        specs_of = [spec.name for spec in members]
        records.append({"entry": name, "specs": specs_of, "start": vars(start), "best": vars(found.blocks),
                        "score": found.score, "tried": tried})  # fmt: skip
    return records
