"""Which requests run next, and in which program: at most one prefill, then a step for each running request.

`next_prefill` and `next_steps` look at what was dispatched and read so far. They change no request, but retract some
where pages run out, and end those that cannot go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List

from specjax.engine.batch import Batch, InFlight
from specjax.engine.collect import collect, collect_all_but
from specjax.engine.device import Unavailable
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.engine.grammar_steps import forced_tokens, is_ready, step_keys
from specjax.engine.keys import PLAIN, TREE, Key
from specjax.engine.output import NO_SCORES
from specjax.engine.runtime import Runtime
from specjax.engine.sequence import Sequence, Status

# Prefill


def next_prefill(run: Runtime) -> Batch | None:
    """The next chunk of one prompt or of several; None: there is none, or a long prefill is in flight while no request
    runs, behind which one that comes now would wait."""
    kind, prompts = _prompts(run)
    if not prompts or (not _running(run) and any(_is_long(run, flight) for flight in run.flights)):
        return None
    try:
        key, program = run.programs.first_usable(_prefill_keys(run, prompts, kind))
    except Unavailable as error:
        if kind != "scoring":
            raise
        run.give_up(prompts[0], f"{NO_SCORES}: {error}")  # only this request needs such a program
        return None
    lengths = key.lengths(sequence.left for sequence in prompts)
    return Batch(key, program, prompts[: len(lengths)], lengths)


def _prompts(run: Runtime) -> tuple[str, list[Sequence]]:
    """The kind of the next prefill and its prompts. A prompt whose log-probabilities are wanted goes alone; while the
    program for it compiles, the others go on."""
    prompts = run.scheduler.prefilling()
    plain = [sequence for sequence in prompts if not sequence.scores_within(run.buckets.chunks[-1])]
    if not prompts or prompts[0] in plain:
        return "prefill", plain
    if not run.programs.compile_ahead(next(_prefill_keys(run, prompts[:1], "scoring"))):
        return "prefill", plain
    return "scoring", prompts[:1]


def _prefill_keys(run: Runtime, prompts: list[Sequence], kind: str) -> Iterator[Key]:
    left, pages = zip(*((sequence.left, len(sequence.active_slot.pages)) for sequence in prompts), strict=True)
    running = _running(run)
    most = run.buckets.most_prefilled(running, len(run.scheduler.active) - running)
    ready, pending = run.programs.compiled(), run.programs.pending
    return run.buckets.prefill_keys([*left], [*pages], most, ready, kind, pending=pending)


def _running(run: Runtime) -> int:
    """Number of requests that decode."""
    return sum(sequence.status is not Status.PREFILLING for sequence in run.scheduler.active)


def _is_long(run: Runtime, flight: InFlight) -> bool:
    key = flight.batch.key
    return key.kind in ("prefill", "scoring") and key.size > run.buckets.small


# Steps


def next_steps(run: Runtime) -> Iterator[Batch]:
    """One step for each running request: in one batch, or in several where no program serves them all. Requests with a
    grammar sit out while their program compiles or their mask is computed."""
    _collect_grammars(run)
    left = _able(run, _reserved(run))
    while left:
        pages, forced = max(len(sequence.active_slot.pages) for sequence in left), dict[Sequence, list[int]]()
        if any(sequence.constraint for sequence in left):
            forced = forced_tokens(run, left)
            nodes = _nodes(run, left, "constrained", forced)
            keys = step_keys(run, len(left), pages, nodes)
            if not is_ready(run, keys):
                left = [sequence for sequence in left if not sequence.constraint]
                continue
        else:
            nodes = _nodes(run, left, "step", forced)
            ready = run.programs.compiled(), run.programs.pending
            keys = run.buckets.step_keys(len(left), pages, *ready, nodes)
        key, program = run.programs.first_usable(keys)
        part, left = left[: key.width], left[key.width :]
        forced = {one: forced[one] for one in part if one in forced and key.drafts}
        drafts = key.drafts and nodes == TREE
        drafted = tuple(one for one in part if one in forced or (one.drafts and drafts))
        yield Batch(key, program, part, drafted=drafted, forced=forced)


def _nodes(run: Runtime, sequences: list[Sequence], kind: str, forced: Mapping[Sequence, List[int]]) -> int:
    """TREE or PLAIN for the next step of these sequences. `kind`: of the program's `Key`. `forced`: tokens that a
    grammar forces, which a step with drafts emits together."""
    batch = run.buckets.batch(len(sequences))
    if run.policy is None:
        return TREE
    if not run.buckets.drafts(batch):
        return PLAIN
    if run.drafter.costly_observe:  # chosen when they were admitted
        return TREE if any(sequence.drafts for sequence in sequences) else PLAIN
    pays = forced and run.policy.pays(batch, len(sequences), sum(map(len, forced.values())))
    nodes = TREE if pays else run.policy.choose(batch, sequences)
    if nodes == TREE and (waiting := run.programs.pending):
        ready, pending = (
            {key.nodes for key in keys if key.kind == kind and key.width == batch}
            for keys in (run.programs.compiled(), waiting)
        )
        if TREE in pending - ready and PLAIN in ready:
            return PLAIN
    return nodes


def _collect_grammars(run: Runtime) -> None:
    """Reads the steps in flight whose tokens a grammar needs: its next masks follow from them."""

    def needed(flight: InFlight) -> bool:
        batch = flight.batch
        return batch.key.verifies and any(sequence.constraint for sequence in batch.sequences)

    while any(map(needed, run.flights)):
        collect(run, run.flights.popleft())


def _able(run: Runtime, running: list[Sequence]) -> list[Sequence]:
    """Ends the requests whose grammar cannot be followed any more. Returns the others, except those whose mask another
    thread computes."""
    running = [one for one in running if one.constraint is None or one.constraint.ready()]
    for sequence in running:
        if sequence.constraint is not None and (problem := sequence.constraint.problem()) is not None:
            run.give_up(sequence, f"{GRAMMAR_FAILED} after {len(sequence.output.tokens)} tokens: {problem}")
    return [sequence for sequence in running if sequence.status is Status.RUNNING]


def _reserved(run: Runtime) -> list[Sequence]:
    """The running requests, with pages for all that they may commit; retracts some where pages run out."""
    while True:
        running = run.scheduler.running()
        due = run.scheduler.is_due(run.counters.steps)
        if not running or (not due and run.scheduler.reserve(running)):
            return running
        # Retract only what has been read: its output must be complete, and reading may free pages.
        if run.flights:
            collect_all_but(run, 0)
        else:
            run.scheduler.retract_youngest(run.counters.steps)
