"""What carries a batch out: `dispatch` launches it, and `collect` reads it."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as List
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
from jax.profiler import TraceAnnotation

from specjax.engine.device import Device, Output, Read, prefill_input, read_output, step_input
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.grammar_steps import WALK_SECONDS, constrained_input, root_trees
from specjax.engine.plan import Batch, Buckets
from specjax.engine.programs import Programs
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import TEXT_FAILED, AbortCode, FinishReason, RawLogprob, Sequence, Slot, Status
from specjax.logprobs import Logprobs
from specjax.state import FULL, NOT_FINITE, RUNS, STOPPED, step_tree

logger = logging.getLogger(__name__)

NO_DRAW = "the model's logits are not finite (NaN or infinity)"


class InFlight(NamedTuple):
    """A batch that is launched and not yet read."""

    batch: Batch
    sequences: List[Sequence]
    output: Output
    slots: List[Slot]  # of its sequences: a sequence with another slot, or none, has ended or was retracted
    launched: float = 0.0  # seconds of `perf_counter`
    prefilled: List[tuple[int, int]] = ()  # for a prefill: tokens of each sequence in pages before and after it


class Flights(deque[InFlight]):
    """Batches in flight, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self._last_read = 0.0

    def seconds(self, flight: InFlight) -> float | None:
        """Duration of a program whose output has just been read; None: all its requests had ended, so that it may have
        been left unread."""
        begun, self._last_read = max(flight.launched, self._last_read), perf_counter()
        ended = flight.sequences and all(sequence.status is Status.FINISHED for sequence in flight.sequences)
        return None if ended else self._last_read - begun


@dataclass
class Counters:
    """Totals of an engine. Reports take differences."""

    prefilled_sequences: int = 0  # a resumed sequence counts again
    prefilled_tokens: int = 0
    cached_tokens: int = 0  # context tokens from the prefix cache
    nodes: Counter[int] = field(default_factory=Counter)  # decode steps dispatched, by N
    verifications: int = 0  # of one sequence in one step
    drafted_steps: int = 0  # verifications that could draft
    verified: int = 0  # tokens emitted by verifications
    generated: int = 0  # all tokens emitted
    drafts: int = 0  # nodes of their trees, without the roots
    own_drafts: int = 0  # the same for sequences without a grammar, whose forced tokens count as drafts
    own_accepted: int = 0  # accepted drafts in these
    accepted_at: Counter[int] = field(default_factory=Counter)  # accepted drafts, by depth - 1

    def count(self, tokens: int, *, verified: bool, nodes: int, free: bool) -> None:
        """Counts the tokens of a sequence from a prefill or, `verified`, from a step. `nodes`: N of the tree that the
        step could draft for it, else 1; `free`: the sequence has no grammar."""
        self.generated += tokens
        if verified:
            self.verifications += 1
            self.drafted_steps += nodes > 1
            self.drafts += nodes - 1
            self.verified += tokens
            if nodes > 1 and free:
                self.own_drafts += nodes - 1
                self.own_accepted += tokens - 1
            self.accepted_at.update(range(tokens - 1))

    @classmethod
    def sum(cls, several: Iterable[Counters]) -> Counters:
        """Adds the counters of several engines."""
        total = cls()
        for counters in several:
            for name, value in vars(counters).items():  # copied, since the engine's thread may add keys meanwhile
                setattr(total, name, getattr(total, name) + copy(value))
        return total

    @property
    def steps(self) -> int:
        """Decode steps dispatched."""
        return self.nodes.total()

    @property
    def accept_length(self) -> float:
        """Tokens per verification; 1.0 without any."""
        return self.verified / self.verifications if self.verifications else 1.0

    @property
    def accepted(self) -> int:
        """Number of accepted drafts."""
        return self.verified - self.verifications


@dataclass
class Runtime:
    """The parts of an engine that launch and read batches.

    Attributes:
        rows, pages, vocab_size: R, P and V.
        lossless: the verifier does not change the text.
        policy: chooses the nodes of the trees; None: each step drafts as its batch bucket says.
        sequences: those that wait or run, by id.
        changed: sequences with new tokens, or finished, that no step has returned.
    """

    device: Device
    programs: Programs
    buckets: Buckets
    scheduler: Scheduler
    flights: Flights
    counters: Counters
    rows: int
    pages: int
    vocab_size: int
    lossless: bool = True
    policy: DraftPolicy | None = None

    sequences: dict[str, Sequence] = field(default_factory=dict)
    changed: dict[Sequence, None] = field(default_factory=dict)

    def finish(self, sequence: Sequence) -> None:
        """Frees what a sequence holds."""
        self.scheduler.finish(sequence)
        self.sequences.pop(sequence.id, None)

    def give_up(self, sequence: Sequence, message: str, code: AbortCode) -> None:
        """Ends a request within a step, and reports it. `message`: why it cannot go on."""
        sequence.abort(message, code)
        self.finish(sequence)
        self.changed[sequence] = None


# Dispatch


def dispatch(runtime: Runtime, batch: Batch) -> None:
    """Launches a batch and puts it in flight. Raises MemoryError if its program does not fit into memory."""
    key, program = batch.key, runtime.programs.get(batch.key)
    sequences, prefilled = [runtime.sequences[id] for id in batch.rows], list[tuple[int, int]]()
    launched = perf_counter()
    if key.verifies:
        inputs = step_input(sequences, key.width, runtime.programs.new_pages, runtime.rows)
        if key.kind == "constrained":
            seconds = WALK_SECONDS if runtime.lossless else math.inf
            trees = _drafted_trees(runtime, batch, inputs)
            inputs = constrained_input(inputs, sequences, trees, batch.forced, runtime.vocab_size, seconds)
        if runtime.policy is not None and runtime.buckets.drafts(key.width):
            runtime.policy.launched(key.width, key.nodes, trial=batch.trial)
        runtime.counters.nodes[key.nodes] += 1
    else:
        chunks = [(n, runtime.scheduler.snapshot(each, n)) for each, n in zip(sequences, batch.lengths, strict=True)]
        inputs = prefill_input(key, sequences, chunks, runtime.rows, runtime.pages)
    output = runtime.device.run(key, program, inputs)
    for sequence, tokens in zip(sequences, batch.lengths, strict=False):
        start = sequence.active_slot.length
        runtime.counters.prefilled_tokens += tokens
        sequence.prefill(tokens)
        prefilled.append((start, start + tokens))
    slots = [sequence.active_slot for sequence in sequences]
    runtime.flights.append(InFlight(batch, sequences, output, slots, launched, prefilled))


def _drafted_trees(runtime: Runtime, batch: Batch, step: np.ndarray) -> np.ndarray:
    """The drafter's trees for a step with a grammar, int32 [B, 5, N]; roots alone if nothing is drafted, all tokens are
    forced, or the drafter's program does not fit into memory, which is logged."""
    key = batch.key.proposal
    roots = root_trees(batch.key.width, runtime.buckets.widths[batch.key.nodes])
    if batch.drafted <= batch.forced.keys():
        return roots
    try:
        program = runtime.programs.get(key)
    except MemoryError:
        return roots
    return np.array(runtime.device.read(runtime.device.run(key, program, step))).reshape(roots.shape)


# Collect


def collect_all_but(runtime: Runtime, count: int) -> None:
    """Reads batches in flight, the oldest first, until `count` are left."""
    while len(runtime.flights) > count:
        collect(runtime, runtime.flights.popleft())


def collect(runtime: Runtime, flight: InFlight) -> None:
    """Waits for one program and reads its output. Adds sequences with new tokens to `Runtime.changed`."""
    key, sequences = flight.batch.key, flight.sequences
    wanted = any(sequence.params.logprobs is not None for sequence in sequences)
    with TraceAnnotation("wait"):
        read = read_output(runtime.device, flight.output, logprobs=wanted)
    seconds = runtime.flights.seconds(flight)
    _record_step(runtime, flight, read, seconds)
    ended, restarted = list[Sequence](), list[Sequence]()
    for i, (sequence, tokens, finish) in enumerate(zip(sequences, read.tokens, read.finish, strict=False)):
        if sequence.slot is not flight.slots[i]:
            continue
        if key.verifies:
            sequence.active_slot.length += len(tokens)
        forced, finish = sequence.end_thoughts(tokens, finish)
        if tokens and sequence.constraint is not None:
            sequence.constraint.consume(tokens)
        if flight.prefilled and finish != NOT_FINITE:
            start, end = flight.prefilled[i]
            sequence.active_slot.certain = end
            runtime.scheduler.store(sequence)
            scores, logprobs = sequence.output.prompt_logprobs, flight.output.prompt
            if scores is not None and logprobs is not None:
                scores.add(start, end, *(np.asarray(leaf)[i] for leaf in logprobs))
        if not tokens and finish == RUNS:
            continue
        kept = take(sequence, read, flight.output, i, finish, verified=key.verifies, forced=forced)
        stepped, drafted = key.verifies and bool(tokens), sequence.id in flight.batch.drafted
        # Of a forced end, only the first token stands for one that the step emitted.
        count, free = min(kept, len(tokens) - forced + 1), sequence.params.grammar is None
        nodes = runtime.buckets.widths[key.nodes] if drafted else 1
        runtime.counters.count(count, verified=stepped, nodes=nodes, free=free)
        sequence.output.drafted_steps += stepped and drafted
        if sequence.output.finish_reason is not None:
            ended.append(sequence)
        elif forced:
            restarted.append(sequence)
        runtime.changed[sequence] = None
    for sequence in ended:
        runtime.finish(sequence)
    for sequence in restarted:  # prefills the end of its thoughts, which the device did not draw
        runtime.scheduler.retract(sequence)


def _record_step(runtime: Runtime, flight: InFlight, read: Read, seconds: float | None) -> None:
    """Records duration and acceptance of a step without forced tokens."""
    key = flight.batch.key
    if runtime.policy is None or key.kind != "step" or not runtime.buckets.drafts(key.width):
        return
    drafted = [
        (sequence.acceptance, ranks)
        for sequence, ranks, finish in zip(flight.sequences, read.ranks, read.finish, strict=False)
        if sequence.id in flight.batch.drafted and finish == RUNS
    ]
    if flight.launched < runtime.programs.quiet_since:
        seconds = None
    runtime.policy.record(key.width, key.nodes, seconds, drafted)


def take(
    sequence: Sequence, read: Read, output: Output, row: int, finish: int, *, verified: bool, forced: int = 0
) -> int:
    """Adds the tokens of a row to its sequence, with their log-probabilities and tree. Returns the number of tokens
    kept. An error in its text ends this sequence only.

    Args:
        finish: why the row ends; RUNS: it goes on.
        verified: the program is a step.
        forced: number of last tokens that were not drawn; their probability is 1.
    """
    tokens, emitted = read.tokens[row], sequence.output
    kept, drawn = len(tokens), len(tokens) - forced
    try:
        kept = sequence.accept(tokens, finish == STOPPED, finish == FULL)
        if sequence.params.logprobs is not None and read.logprobs is not None:
            emitted.logprobs += _raw_logprobs(read.logprobs, row, min(kept, drawn), sequence.params)
            emitted.logprobs += [_forced_logprob(token, sequence.params) for token in tokens[drawn:kept]]
        if sequence.params.origins and kept:
            accepted = min(kept - 1, drawn)
            emitted.drafted += [True] * accepted + [False] * (kept - accepted)
        if output.trace is not None:
            emitted.trees.append(step_tree(output.trace, row, np.array(tokens[:kept], np.int32)))
        if finish == NOT_FINITE and emitted.finish_reason is None:
            problem = f"{NO_DRAW} after {len(emitted.tokens)} tokens of output"
            emitted.finish(FinishReason("abort", message=problem))
    except Exception:
        logger.exception("request %s failed", sequence.id)
        sequence.abort(TEXT_FAILED)
    if verified and tokens:
        emitted.verify_steps += 1
        emitted.histogram[min(kept - 1, drawn)] += 1
        if finish != NOT_FINITE:
            sequence.active_slot.certain = sequence.active_slot.length
    if forced:
        sequence.active_slot.certain = len(sequence.prompt) + len(emitted.tokens) - forced
    return kept


def _forced_logprob(token: int, params: SamplingParams) -> RawLogprob:
    """The log-probability of a token that came with certainty, in place of a drawn one."""
    top = ((token, 0.0),) if params.logprobs else ()
    return RawLogprob(0.0, top, tuple((id, 0.0 if id == token else -math.inf) for id in params.logprob_ids))


def _raw_logprobs(logprobs: Logprobs, row: int, count: int, params: SamplingParams) -> list[RawLogprob]:
    """Log-probabilities of the first `count` tokens of a row, with the alternatives that `params` asks for."""
    top, wanted = params.logprobs or 0, params.logprob_ids
    drawn, ids = logprobs.drawn[row, :count], logprobs.top_ids[row, :count, :top]
    best, of_ids = logprobs.top[row, :count, :top], logprobs.of_ids[row, :count, : len(wanted)]
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), best.tolist(), strict=True))
    chosen = (tuple(zip(wanted, values, strict=True)) for values in of_ids.tolist())
    return list(map(RawLogprob, drawn.tolist(), tops, chosen))
