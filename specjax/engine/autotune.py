"""An engine that measures itself: whole steps on its own state, and all of `specjax.engine.tuning_tasks`, once."""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specjax_kernels import choice, launch
from specjax_kernels.search import Say, tell
from specjax_kernels.timing import WARMUP, region

from specjax.compiling import SCHEDULING, compiler_options
from specjax.costs import PLAIN, Tree
from specjax.drafters.deferred import all_seen
from specjax.engine import program_store, tuning, tuning_tasks
from specjax.engine.keys import Key
from specjax.engine.packing import NO_PAGE, Resident
from specjax.engine.step_times import STEP_TIMES, tree_of
from specjax.engine.tuning import STEP_SECONDS, Stage, Task, Trial, Tuning
from specjax.engine.tuning_tasks import SCHEDULE
from specjax.state import NOT_FINITE, new_row

logger = logging.getLogger(__name__)

NEVER = 10**9  # tokens that a row may still emit
ALIKE = 0.75  # share of the rows whose first token must be the start's: near-ties may part where numbers have 16 bits


@dataclass(frozen=True)
class Schedule:
    """How a step's graph runs."""

    scheduling: str  # XLA's command buffers: CONCURRENT or SERIALIZE
    pages: choice.Name  # "pallas": one kernel writes the pages of all layers

    def __str__(self) -> str:
        return f"{self.scheduling}, pages by {self.pages}"


DEFAULT_SCHEDULE = Schedule("CONCURRENT", "xla")


def tune_at_start(engine: Any, *, progress: bool = True) -> Tuning | None:
    """Uses what was measured for this engine on this device; on an NVIDIA GPU it is measured now if it is the first
    time, or if the first time was cut off. None: nothing was measured, or `EngineConfig.autotune_seconds` is 0. Before
    the engine compiles anything.

    Raises:
        Stuck: a candidate did not end. The next start leaves it out.
    """
    if not engine.config.autotune_seconds:
        return None
    found = known(engine)
    if launch.on_nvidia() and (found is None or not found.ended):
        found = measure(engine, seconds=engine.config.autotune_seconds, before=found, progress=progress)
        left = "" if found.complete else "; `specjax tune` goes on with the others"
        done = sum(result.finished for result in found.results)
        logger.info("Measured %d of %d choices on this GPU in %.0f s%s", done, found.tasks, found.seconds, left)
    if found is not None:
        apply(engine, found)
    return found


def known(engine: Any) -> Tuning | None:
    """The record of this engine's device, versions and shapes; None: there is none that can be used."""
    found = tuning.read(_identity(engine))
    try:
        return found if found is None or tuning_tasks.entries(found) else None
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("the measurements in %s are not used: %s", tuning.file_for(found.of if found else {}), error)
        return None


def measure(
    engine: Any,
    *,
    seconds: float,
    before: Tuning | None = None,
    kernels: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
    keep: Callable[[Tuning], None] = tuning.write,
    progress: bool = False,
) -> Tuning:
    """Measures what `before` lacks within `seconds`, and keeps it. The engine must be idle, and is empty afterwards.

    Args:
        kernels: whether there are products and attention's blocks to measure; None: where Triton compiles for the
            device. On a CPU Pallas interprets the kernels, for tests.
        clock, keep, progress: as `specjax.engine.tuning.measure`.
    """
    dtype = engine.target.config.dtype
    engine.wait_until_allocated()  # which takes the device
    begun = clock()
    before = tuning_tasks.with_ceilings(before or Tuning(_identity(engine)), dtype)
    on = tuning_tasks.machine(before)
    tasks = []
    if launch.has_kernels() if kernels is None else kernels:
        tasks += tuning_tasks.product_tasks(engine.params, dtype, engine.drafter, engine.buckets, on)
        size = engine.pool.page_size
        tasks += tuning_tasks.attention_tasks(engine.target, engine.drafter, engine.buckets, size, on)
    tasks = list({(task.stage, task.name): task for task in sorted(tasks, key=lambda task: task.value)}.values())
    tasks += step_tasks(engine)

    stepped = False

    def begin_stage(stage: Stage, now: Tuning) -> None:
        nonlocal stepped
        if stage == "steps":
            stepped = True
            tuning_tasks.use(now)

    left = max(seconds - (clock() - begun), 0.0)
    shared: dict[str, Any] = {"clock": clock, "keep": keep, "begin_stage": begin_stage, "progress": progress}
    with program_store.not_read_ahead():
        found = tuning.measure(tasks, before, seconds=left, **shared)
    if stepped:
        engine.device.renew()
    return found


def apply(engine: Any, found: Tuning) -> None:
    """Uses a record in this process, and for the programs that the engine compiles from now on."""
    tuning_tasks.use(found)
    engine.executables.options.update(tuning_tasks.options(found))


def _identity(engine: Any) -> dict[str, Any]:
    shapes = engine.params, engine.target, engine.drafter, engine.buckets, engine.pool.page_size
    return tuning_tasks.identity(*shapes)


# Steps.


def step_tasks(engine: Any) -> Iterator[Task]:
    """On a GPU how a step's graph runs, for one request's steps; then the times of plain steps and of those of trees,
    by batch bucket, if the trees are not explicit."""
    first = engine.buckets.batches[0]
    if compiler_options() is not None:
        yield Task("steps", SCHEDULE, functools.partial(_begin_schedule, engine, first), math.inf, limit=STEP_SECONDS)
    if engine.drafter.width == 1 or engine.drafter.explicit_width:
        return
    plain = [leaf for name, leaf in tuning_tasks.matrices_of(engine.params.target) if name != "embed"]
    elements = sum(leaf.size for leaf in plain)
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params.target))
    for rank, batch in enumerate(engine.buckets.batches, start=1):
        begin = functools.partial(_begin_times, engine, batch)
        yield Task("steps", f"{STEP_TIMES}{batch}", begin, 1 / rank, read, 2 * elements * batch, STEP_SECONDS)


def _begin_times(engine: Any, batch: int, say: Say) -> Trial:
    bench = StepBench(engine, batch, say)
    widths = {tree_of(engine.drafter.within(width)): width for width in engine.buckets.tree_widths(batch)}
    widths[PLAIN] = 1

    def score(tree: Tree) -> float:
        return bench.score(str(tree), lambda: engine.executables.variant(bench.key, widths[tree]))

    bench.begin(lambda: engine.executables.variant(bench.key, 1))
    return Trial(PLAIN, lambda tree: list(widths), score, bench.seconds)


def _begin_schedule(engine: Any, batch: int, say: Say) -> Trial:
    bench = StepBench(engine, batch, say)
    width, measured = engine.buckets.tree_widths(batch)[-1], choice.in_use()

    def compiled(schedule: Schedule) -> Any:
        choice.use({**measured, "pages": schedule.pages})
        try:
            return engine.executables.variant(bench.key, width, {SCHEDULING: schedule.scheduling})
        finally:
            choice.use(measured)

    def around(schedule: Schedule) -> Iterator[Schedule]:
        if SCHEDULING in (compiler_options() or {}):  # else XLA_FLAGS say how
            yield replace(schedule, scheduling="SERIALIZE" if schedule.scheduling == "CONCURRENT" else "CONCURRENT")
        if choice.forced() is None:
            yield replace(schedule, pages="xla" if schedule.pages == "pallas" else "pallas")

    bench.begin(lambda: compiled(DEFAULT_SCHEDULE))
    return Trial(DEFAULT_SCHEDULE, around, lambda one: bench.score(str(one), lambda: compiled(one)), bench.seconds)


class StepBench:
    """Steps of one batch bucket on the engine's own state, every row behind a context of its own pages. What they emit
    is nobody's: the state is to be renewed afterwards."""

    def __init__(self, engine: Any, batch: int, say: Say) -> None:
        self._engine, self._say = engine, say
        self.key = Key("step", batch, engine.buckets.tables[0])
        self._times = 4 if engine.platform == "cpu" else 16  # steps that are waited for together
        self._turns = 3
        size, pages = engine.pool.page_size, engine.pool.pages
        room = min(self.key.table, max(1, pages // batch)) * size
        longest = (self._times + WARMUP + 1) * (engine.drafter.depth + 1)
        self.context = max(1, min(tuning_tasks.CONTEXT, room - longest))
        self._start: Any = None
        self._expected = np.zeros(0)
        self._seconds: float | None = None
        if engine.device.lost:
            engine.device.renew()
        engine.device.update(self._filled)

    def begin(self, compiled: Callable[[], Any]) -> None:
        """Compiles and runs what candidates are compared with."""
        self._start = compiled()
        self._expected = self._first_tokens(self._start)
        self._seconds = self._region(self._start)

    def seconds(self) -> float | None:
        """Of a step of the start."""
        return self._seconds

    def score(self, name: str, compiled: Callable[[], Any]) -> float:
        """The time of a step over the start's, taking turns; infinite: it does not run, or draws other tokens."""
        try:
            program = compiled()
            tokens = self._first_tokens(program)
            alike = float((tokens == self._expected).mean())
            if alike < ALIKE:
                self._say(f"    {self.key}, {name}: draws other tokens in {1 - alike:.0%} of the rows")
                return math.inf
            taken = [(self._region(program), self._region(self._start)) for _ in range(self._turns)]
        except Exception as error:
            tell(self._say, f"    {self.key}, {name} does not run", error)
            if self._engine.device.poisoned:
                self._engine.device.renew()
                self._engine.device.update(self._filled)
            return math.inf
        program_seconds, self._seconds = (statistics.median(each) for each in zip(*taken, strict=True))
        return program_seconds / self._seconds

    def _filled(self, state: Resident) -> Resident:
        """All rows admitted, each with pages of its own as far as there are enough."""
        vocab_size, tables = self._engine.vocab_size, state.tables
        count, width = tables.shape
        row = new_row(vocab_size, limit=NEVER, prefix_length=self.context)
        rows = jax.device_put(
            jax.tree.map(lambda leaf: np.broadcast_to(leaf, (count, *leaf.shape)), row), may_alias=False
        )
        each = max(1, self._engine.pool.pages // self.key.width)
        place = np.arange(count)[:, None] * each + np.arange(width)[None] % each
        pages = jnp.asarray((place % self._engine.pool.pages).astype(np.int32))
        decode = state.decode._replace(rows=rows, draft=all_seen(state.decode.draft))
        return self._again(Resident(decode, pages))

    def _again(self, state: Resident) -> Resident:
        """All rows back to the context."""
        decode = state.decode
        where = jnp.full_like(decode.rows.prefix_length, self.context)
        rows = decode.rows._replace(prefix_length=where, generated=jnp.zeros_like(where))
        begun = {"root": jnp.zeros_like(decode.root), "finished": jnp.zeros_like(decode.finished)}
        return state._replace(decode=decode._replace(rows=rows, **begun))

    def _step(self, program: Any) -> jax.Array:
        inputs = np.full((self.key.width, 2 + self._engine.executables.new_pages), NO_PAGE, np.int32)
        inputs[:, 0], inputs[:, 1] = np.arange(self.key.width), self.key.table
        return self._engine.device.run(self.key, program, inputs).packed

    def _first_tokens(self, program: Any) -> np.ndarray:
        """[B], of a step from the context; -1 where the logits are not finite."""
        self._engine.device.update(self._again)
        found = np.asarray(self._step(program))
        return np.where(found[:, 1] == NOT_FINITE, -1, found[:, 2])

    def _region(self, program: Any) -> float:
        """Seconds of a step, of several that are waited for together."""
        self._engine.device.update(self._again)
        for _ in range(WARMUP):
            jax.block_until_ready(self._step(program))
        return region(lambda: self._step(program), self._times).total
