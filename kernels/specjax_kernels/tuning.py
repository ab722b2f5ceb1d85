"""Finds block sizes of the GPU kernels by measuring, one entry of a table at a time.

A search starts from what would run now and changes one field at a time, keeping what is faster, until no change is. A
candidate's score is its time over the start's; for several specs of attention that share an entry (dtype, head width,
query rows) the geometric mean. Candidates that do not run (no room for their tiles, say) or differ from the definition
are passed over.

`tune` searches the entries of `launch_table.json` and writes each as it is found: a search that is cut off loses one.
There a start that fails gives way to the rule of thumb. Products are in `product_tuning.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax_kernels import launch, pallas_triton
from specjax_kernels.api import tree_attention
from specjax_kernels.call import Call
from specjax_kernels.chains import chain_of, enough_layers, enough_sets, inputs_of, rotating
from specjax_kernels.launch import Blocks
from specjax_kernels.search import Say, neighbours, print_now, search, tell
from specjax_kernels.specs import Spec
from specjax_kernels.timing import interleaved

CHOICES: dict[str, tuple[int, ...]] = {
    "rows": (16, 32, 64, 128),
    "tokens": (16, 32, 64, 128),
    "warps": (2, 4, 8),
    "stages": (1, 2, 3, 4, 5),
    "programs": (1, 2, 4, 8, 16),
}

TOLERANCE = {"float32": 1e-4, "bfloat16": 2**-5, "float16": 2**-8}
"""Twice what the tests allow, and more in float32, whose sums are longer here."""


def around(blocks: Blocks) -> Iterator[Blocks]:
    """Those with one field changed."""
    return neighbours(blocks, CHOICES)


def groups(specs: Iterable[Spec]) -> dict[str, list[Spec]]:
    """Specs by the entry of the table that serves them."""
    found: dict[str, list[Spec]] = {}
    for spec in specs:
        name = launch.key(spec.dtype, max(spec.E, spec.v_width), spec.N * spec.H // spec.K)
        found.setdefault(name, []).append(spec)
    return found


class Bench:
    """The specs of a group on the device, and what they take with given blocks."""

    def __init__(
        self, specs: list[Spec], layers: int | None, *, runs: int, seconds: float, say: Say = print_now
    ) -> None:
        self._runs, self._seconds, self._say = runs, seconds, say
        self.start_seconds: float | None = None  # of the specs' chains with the start, when they were last timed
        self._specs = [(spec, *self._prepare(spec, layers or enough_layers(spec))) for spec in specs]
        self._starts: dict[Blocks, list[Callable[[], jax.Array] | None]] = {}

    @staticmethod
    def _prepare(spec: Spec, layers: int) -> tuple[Any, Any, list[tuple[Any, ...]], np.ndarray]:
        args, options = spec.arguments()
        expected = jax.jit(functools.partial(tree_attention, **options, implementation="reference"))(*args)
        return args, options, inputs_of(args, layers, enough_sets(spec, layers)), np.asarray(expected, np.float32)

    def call(self, index: int, blocks: Blocks) -> Callable[[], jax.Array] | None:
        """One spec's chain of layers with these blocks; None: it does not run, or is wrong."""
        spec, args, options, inputs, expected = self._specs[index]
        attend = jax.jit(lambda *args: pallas_triton.tree_attention(Call(*args, **options), blocks=blocks))
        try:
            out = np.asarray(attend(*args).astype(jnp.float32))
            if not np.abs(out - expected).max() <= TOLERANCE[spec.dtype]:
                self._say(f"    {spec.name}: {blocks} is wrong by {np.abs(out - expected).max():.2e}")
                return None
            call = rotating(chain_of(attend), inputs)
            jax.block_until_ready(call())
        except Exception as error:  # compilers and drivers raise whatever they like
            tell(self._say, f"    {spec.name}: {blocks} does not run", error)
            return None
        return call

    def runs(self, start: Blocks) -> bool:
        """Whether all specs run with these blocks, and are right: what others can be measured against."""
        if start not in self._starts:
            self._starts[start] = [self.call(index, start) for index in range(len(self._specs))]
        return None not in self._starts[start]

    def score(self, blocks: Blocks, start: Blocks) -> float:
        """Geometric mean over the specs of the time over the start's, both measured now, taking turns. `start` runs."""
        assert self.runs(start)
        logs, starts = [], 0.0
        for index, (spec, *_) in enumerate(self._specs):
            candidate = self.call(index, blocks)
            if candidate is None:
                return math.inf
            calls: dict[str, Any] = {"start": self._starts[start][index], "candidate": candidate}
            try:
                found = interleaved(calls, runs=self._runs, region_seconds=self._seconds)
            except Exception as error:
                tell(self._say, f"    {spec.name}: {blocks} cannot be timed", error)
                return math.inf
            medians = {name: float(np.median([one.total for one in many])) for name, many in found.items()}
            logs.append(math.log(medians["candidate"] / medians["start"]))
            starts += medians["start"]
        self.start_seconds = starts
        return math.exp(sum(logs) / len(logs))


def tune(
    specs: list[Spec], *, layers: int | None = None, runs: int = 5, seconds: float = 0.02, table: Path | None = None
) -> list[dict[str, Any]]:
    """Tunes each group of the specs and writes its entry, to `table` or to the package's own. Returns what was tried,
    for the record: all that was found is in it, also what could not be written."""
    generation = launch.generation()
    assert generation is not None  # the caller has looked
    file, records = table or launch.TABLE, []
    for name, members in groups(specs).items():
        print(f"{name}: {', '.join(spec.name for spec in members)}", flush=True)
        try:
            bench = Bench(members, layers, runs=runs, seconds=seconds)
        except Exception as error:
            tell(print_now, f"  {name}: skipped, cannot be prepared", error)
            continue
        start = _start(bench, name, members[0], generation)
        if start is None:
            print(f"  {name}: skipped, there is nothing to start from", flush=True)
            continue
        print(f"  from {start}", flush=True)

        def report(blocks: Blocks, score: float) -> None:
            print(f"    {score:6.3f}  {blocks}", flush=True)

        found = search(start, functools.partial(bench.score, start=start), report, around=around)
        print(f"  {found.blocks}: {found.score:.3f} of the time", flush=True)
        scores = {blocks: score if math.isfinite(score) else None for blocks, score in found.tried.items()}  # JSON
        tried = [{"blocks": vars(blocks), "score": score} for blocks, score in scores.items()]
        specs_of = [spec.name for spec in members]
        records.append({"entry": name, "specs": specs_of, "start": vars(start), "best": vars(found.blocks),
                        "score": found.score, "tried": tried})  # fmt: skip
        try:
            launch.write_table(generation, {name: found.blocks}, file)
        except Exception as error:  # a folder of somebody else's, or what is there is no table
            tell(
                print_now,
                f"  {file} cannot be written (--table FILE writes elsewhere); the record has the entry",
                error,
            )
    return records


def _start(bench: Bench, name: str, spec: Spec, generation: str) -> Blocks | None:
    """What the kernel would use now, or where that does not run or is wrong, the rule of thumb; None: nor does that."""
    try:
        entry = launch.table().get(generation, {}).get(name)
    except Exception as error:
        tell(print_now, "  the table cannot be used", error)
        entry = None
    if entry is not None:
        if bench.runs(entry):
            return entry
        print(f"  {name}: the table's entry fails; the rule of thumb is tried instead", flush=True)
    width, rows = max(spec.E, spec.v_width), spec.N * spec.H // spec.K
    thumb = launch.rule_of_thumb(spec.dtype, width, rows, generation)
    return thumb if bench.runs(thumb) else None
