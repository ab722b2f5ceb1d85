"""What the parts of a step cost on this device, each measured once per shape.

    draft    the drafter's proposal, by variant and number of levels that are computed
    verify   the target's forward over a tree's nodes and the walk, by number of nodes
    commit   accepted tokens written to pages and reported to the drafter, by depth of the tree

The parts are programs of their own, which are timed in turns, so that whatever else the machine does hits all of them.
In the engine they are one program, started ahead of the host; `rest` is the difference, measured by a run
(`StepCosts.fitted`). A processor's speed changes by a tenth within a minute of work, so the run and the timing take
turns, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench.contenders import shaped
from specjax.bench.grid import Grid, Variant
from specjax.cache import PoolShape
from specjax.compiling import compiler_options
from specjax.drafters import Drafter, DraftOptions
from specjax.drafters.options import ModelOptions
from specjax.drafters.tree_shape import candidates
from specjax.load import LoadedModel
from specjax.progress import progress_bar
from specjax.state import StepInput, init_state, new_row
from specjax.step import StepConfig, check_phase, commit_phase, draft_phase
from specjax.tree import DraftTree, chain

PAGE_SIZE = 16
ROUNDS = 24  # of each program; the median counts
TIMED_NODES = 16  # of trees whose drafting is timed: choosing among the candidates costs little, however many stay
UNLIMITED = 1 << 30  # tokens that a timed request may emit


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step of `batch` requests, by shape; of other shapes interpolated.

    Attributes:
        draft: variant -> levels that are computed -> seconds.
        verify: nodes of each request's tree -> seconds.
        commit: depth of the tree -> seconds.
        rest: seconds that a drafting step of a run took beyond the sum of these; at least 0.
        scale: factor of the parts, above 0.

    Raises:
        ValueError: `rest` is negative.
    """

    batch: int
    draft: Mapping[str, Mapping[int, float]]
    verify: Mapping[int, float]
    commit: Mapping[int, float]
    rest: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.rest < 0:
            raise ValueError(f"rest is {self.rest:g} s; a step cannot take less than its parts: scale them")

    def fitted(self, measured: float, parts: float) -> StepCosts:
        """The costs of a step that took `measured` seconds in a run and whose parts sum to `parts` seconds. Parts that
        exceed the run, as if the machine was busier while they were timed, are scaled down to it."""
        if measured < parts:
            return replace(self, scale=measured / parts)
        return replace(self, rest=measured - parts)

    def seconds(self, variant: str, levels: int, nodes: int, depth: int) -> float:
        """Of a step that computes so many levels of drafts and checks so many nodes of each request."""
        parts = (self.draft[variant], levels), (self.verify, nodes), (self.commit, depth)
        return self.scale * sum(_between(*part) for part in parts) + self.rest

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StepCosts:
        """What `as_dict` gave, as JSON keeps it."""
        draft = {name: _numbers(each) for name, each in found["draft"].items()}
        return cls(
            **{**found, "draft": draft, "verify": _numbers(found["verify"]), "commit": _numbers(found["commit"])}
        )


def _numbers(found: Mapping[str, float]) -> dict[int, float]:
    return {int(key): value for key, value in found.items()}


def _between(known: Mapping[int, float], where: int) -> float:
    """Linear between the measured shapes, and the nearest one beyond them."""
    shapes = sorted(known)
    return float(np.interp(where, shapes, [known[shape] for shape in shapes]))


def timed_levels(draft: DraftOptions) -> tuple[int, ...]:
    """Levels of a variant that are timed: the first, which needs no forward of the draft, the second and the last;
    those between cost alike. NGRAM has no levels."""
    return tuple(sorted({1, min(2, draft.steps or 1), draft.steps or 1})) if isinstance(draft, ModelOptions) else (1,)


def _at(draft: DraftOptions, levels: int) -> DraftOptions:
    """The variant's drafter that computes so many levels."""
    if not isinstance(draft, ModelOptions):
        return draft
    nodes = max(levels + 1, min(candidates(levels, draft.topk or 1) + 1, TIMED_NODES))
    return replace(draft, steps=levels, nodes=nodes)


def measure_costs(
    loaded: LoadedModel, grid: Grid, batch: int, context: int, *, temperature: float = 0.0, rounds: int = ROUNDS,
    beside: Sequence[Callable[[], Any]] = (), progress: bool = True,
) -> StepCosts:  # fmt: skip
    """The costs of all shapes of a grid, `rest` aside, for `batch` requests behind `context` tokens each.

    Args:
        beside: work that is done between rounds, spread evenly over them, each call once.
    """
    depths = sorted({0, 1, max(point.depth for point in grid.points)})
    bench = _Bench(loaded, grid.current.draft, batch, context, (rounds + 2) * sum(d + 1 for d in depths), temperature)
    programs: dict[tuple[Any, ...], Callable[[], Any]] = {}
    wanted = [("draft", one, levels) for one in grid.variants for levels in timed_levels(one.draft)]
    shapes = [*wanted, *(("verify", n) for n in grid.widths), *(("commit", depth) for depth in depths)]
    with progress_bar(f"Compiling parts of a step, batch {batch}", len(shapes), "program", shown=progress) as bar:
        for shape in shapes:
            programs[shape] = getattr(bench, shape[0])(*shape[1:])
            programs[shape]()  # the first run is slower
            bar.update()
    times: dict[tuple[Any, ...], list[float]] = {shape: [] for shape in shapes}
    with progress_bar(f"Timing parts of a step, batch {batch}", rounds, "round", shown=progress) as bar:
        for index in range(rounds):
            for work in beside[index * len(beside) // rounds : (index + 1) * len(beside) // rounds]:
                work()
            for shape, program in programs.items():
                started = time.perf_counter()
                program()
                times[shape].append(time.perf_counter() - started)
            bar.update()
    median = {shape: float(np.median(each)) for shape, each in times.items()}
    draft = {
        one.name: {levels: median["draft", one, levels] for levels in timed_levels(one.draft)} for one in grid.variants
    }
    verify = {nodes: median["verify", nodes] for nodes in grid.widths}
    return StepCosts(batch, draft, verify, {depth: median["commit", depth] for depth in depths})


class _Bench:
    """Programs of a step's parts, over a state in which each row is behind a context of its own pages. What they emit
    is nobody's.

    Args:
        room: tokens that commits may add.
    """

    def __init__(
        self, loaded: LoadedModel, current: DraftOptions, batch: int, context: int, room: int, temperature: float
    ) -> None:
        self._loaded, self._batch, self._context, self._temperature = loaded, batch, context, temperature
        self._drafter = shaped(current, loaded)
        pages = -(-(context + room) // PAGE_SIZE)
        self._pool = PoolShape(batch * pages, PAGE_SIZE)
        table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
        self._inputs = StepInput(jnp.arange(batch, dtype=jnp.int32), table, jnp.ones(batch, bool))
        self._state = self._filled(self._drafter)

    def draft(self, variant: Variant, levels: int) -> Callable[[], Any]:
        drafter = shaped(_at(variant.draft, levels), self._loaded)
        # N-grams of another length have a state of their own.
        own = None if self._shapes(drafter) == self._shapes(self._drafter) else self._filled(drafter)

        def propose(params: Any, state: Any, inputs: StepInput) -> DraftTree:
            return draft_phase(params, state, inputs, drafter=drafter)[0]

        program = self._compiled(propose, own or self._state)
        return lambda: jax.block_until_ready(program(self._loaded.params, own or self._state, self._inputs))

    def verify(self, nodes: int) -> Callable[[], Any]:
        tree = self._chain(nodes)
        program = self._check(tree)
        return lambda: jax.block_until_ready(program(self._loaded.params, self._state, self._inputs, tree))

    def commit(self, depth: int) -> Callable[[], Any]:
        tree = self._chain(depth + 1)
        checked = self._check(tree)(self._loaded.params, self._state, self._inputs, tree)
        finish = partial(commit_phase, drafter=self._deep(depth), config=StepConfig(widths=(depth + 1,)))
        program = self._compiled(finish, self._state, tree, checked, donate_argnums=1)

        def run() -> None:
            given = self._loaded.params, self._state, self._inputs, tree, checked
            self._state = jax.block_until_ready(program(*given))[0]

        return run

    def _compiled(self, function: Callable[..., Any], state: Any, *given: Any, **options: Any) -> Callable[..., Any]:
        jitted = jax.jit(function, compiler_options=compiler_options(), **options)
        return jitted.lower(self._loaded.params, state, self._inputs, *given).compile()

    def _check(self, tree: DraftTree) -> Callable[..., Any]:
        check = partial(
            check_phase, target=self._loaded.target, drafter=self._deep(tree.width - 1),
            verify=self._loaded.verify, config=StepConfig(widths=(tree.width,)),
        )  # fmt: skip
        return self._compiled(check, self._state, tree)

    def _deep(self, depth: int) -> Drafter:
        """The drafter with trees so deep, whose `propose` is not called."""
        return self._drafter._replace(depth=depth, width=depth + 1)

    def _chain(self, nodes: int) -> DraftTree:
        batch, drafts = self._batch, nodes - 1
        tokens, scores = jnp.ones((batch, drafts), jnp.int32), jnp.zeros((batch, drafts), jnp.float32)
        return chain(jnp.zeros(batch, jnp.int32), tokens, jnp.full(batch, drafts, jnp.int32), scores)

    def _shapes(self, drafter: Drafter) -> Any:
        return jax.eval_shape(lambda params: drafter.init(params, self._batch, self._pool), self._loaded.params)

    def _filled(self, drafter: Drafter) -> Any:
        """All rows admitted and running, behind the context."""
        loaded = self._loaded
        state = init_state(loaded.params, loaded.target, drafter, rows=self._batch, pool=self._pool)
        row = new_row(
            loaded.target.config.vocab_size, limit=UNLIMITED, prefix_length=self._context, temperature=self._temperature
        )
        rows = jax.tree.map(lambda leaf: jnp.asarray(np.broadcast_to(leaf, (self._batch, *leaf.shape))), row)
        return state._replace(rows=rows, finished=jnp.zeros(self._batch, bool))
