"""Reading programs in flight, and what follows from their output for sequences, counters and measurements."""

from __future__ import annotations

import logging

import numpy as np
from jax.profiler import TraceAnnotation

from specjax.engine.arrays import Output, Read, logprobs_from_bits, read_output
from specjax.engine.batch import InFlight
from specjax.engine.device import memory_checked
from specjax.engine.notes import not_drafted
from specjax.engine.output import RawLogprob
from specjax.engine.runtime import Runtime
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import TEXT_FAILED, Sequence, Status
from specjax.state import FULL, NOT_FINITE, RUNS, STOPPED
from specjax.trace import step_tree
from specjax.verify import LOGPROB_IDS, TOP_LOGPROBS, Logprobs

logger = logging.getLogger(__name__)


def collect_all_but(run: Runtime, count: int) -> None:
    """Reads what is in flight, the oldest first, until `count` programs are left."""
    while len(run.flights) > count:
        collect(run, run.flights.popleft())


def collect(run: Runtime, flight: InFlight) -> None:
    """Reads one program's output, for which it waits. Adds the sequences with new tokens to `Runtime.changed`."""
    batch = flight.batch
    key, sequences, top = batch.key, batch.sequences, min(TOP_LOGPROBS, run.vocab_size)
    wanted = any(sequence.params.logprobs is not None for sequence in sequences)
    with memory_checked(key), TraceAnnotation("wait"):
        run.device.check(flight.output)
        read = read_output(flight.output, top if wanted else None)
    seconds = run.flights.seconds(flight)
    if seconds is not None:
        _tell_policy(run, flight, read, seconds)
    ended = list[Sequence]()
    drafting = set(batch.drafted if run.buckets.drafts(key.width) else ())
    for i, (sequence, tokens, finish) in enumerate(zip(sequences, read.tokens, read.finish, strict=False)):
        if sequence.status is Status.FINISHED:
            continue
        if key.verifies:
            sequence.active_slot.committed += len(tokens)
        if tokens and sequence.constraint is not None:
            sequence.constraint.consume(tokens)
        if flight.prefilled and finish != NOT_FINITE:
            start, end = flight.prefilled[i]
            sequence.active_slot.certain = end
            run.scheduler.store(sequence)
            take_prompt(sequence, flight.output, i, start, end, top)
        if not tokens and finish == RUNS:
            continue
        kept = take(sequence, read, flight.output, i, verified=key.verifies)
        stepped, drafted = key.verifies and bool(tokens), sequence in drafting
        run.counters.count(kept, verified=stepped, drafted=drafted, free=sequence.params.grammar is None)
        sequence.output.drafted_steps += stepped and drafted
        if stepped and not drafted:
            sequence.output.not_drafted = not_drafted(run.buckets, key, sequence)
        if sequence.output.finish_reason is not None:
            ended.append(sequence)
        run.changed[sequence] = None
    for sequence in ended:
        run.finish(sequence)


def _tell_policy(run: Runtime, flight: InFlight, read: Read, seconds: float) -> None:
    """Records the seconds and the acceptance of a step without forced tokens."""
    batch = flight.batch
    if run.policy is None or batch.key.kind != "step" or not run.buckets.drafts(batch.key.width):
        return
    emitted = dict(zip(batch.sequences, map(len, read.tokens), strict=False))
    drafted = {sequence: emitted[sequence] for sequence in batch.drafted if emitted[sequence]}
    run.policy.record(batch.key.width, batch.key.nodes, seconds, drafted)


def take_prompt(sequence: Sequence, output: Output, row: int, start: int, end: int, top: int) -> None:
    """Adds the log-probabilities that a prefill of tokens `start` to `end` of the context has computed; waits for
    it. `top`: alternatives that its output holds of a token."""
    scores = sequence.output.prompt_logprobs
    if scores is not None and output.prompt is not None:
        width = output.prompt.shape[1] // (1 + 2 * top + LOGPROB_IDS)
        found = logprobs_from_bits(output.prompt, width, top)
        scores.add(start, end, *(np.asarray(leaf[row]) for leaf in found))


def take(sequence: Sequence, read: Read, output: Output, row: int, *, verified: bool) -> int:
    """Adds the tokens of a row to its sequence, with their log-probabilities and tree. Returns how many it kept.

    An error in its text ends this sequence; the others go on. `verified`: the tokens come from a verification, not from
    a prefill.
    """
    tokens, finish = read.tokens[row], read.finish[row]
    kept, emitted = len(tokens), sequence.output
    try:
        kept = sequence.accept(tokens, finish == STOPPED, finish == FULL)
        if sequence.params.logprobs is not None and read.logprobs is not None:
            emitted.logprobs += _raw_logprobs(read.logprobs, row, kept, sequence.params)
        if sequence.params.origins and kept:
            emitted.drafted += [True] * (kept - 1) + [False]
        if output.trace is not None and (most := sequence.request.most_trees) != 0:
            emitted.trees.append(step_tree(output.trace, row, np.array(tokens[:kept], np.int32)))
            if most is not None:
                del emitted.trees[:-most]
        if finish == NOT_FINITE and emitted.finish_reason is None:
            sequence.abort_not_finite()
    except Exception:
        logger.exception("request %s failed", sequence.id)
        sequence.abort(TEXT_FAILED)
    if verified and tokens:
        emitted.verify_steps += 1
        emitted.histogram[kept - 1] += 1
        if finish != NOT_FINITE:
            sequence.active_slot.certain = sequence.active_slot.committed
    return kept


def _raw_logprobs(found: Logprobs, row: int, count: int, params: SamplingParams) -> list[RawLogprob]:
    """Of the first `count` tokens of a row, with as many of the likeliest and with the ids that are wanted."""
    top, wanted = params.logprobs or 0, params.logprob_ids
    drawn, ids, best = found.drawn[row, :count], found.top_ids[row, :count, :top], found.top[row, :count, :top]
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), best.tolist(), strict=True))
    of_ids = (tuple(zip(wanted, values, strict=True)) for values in found.of_ids[row, :count, : len(wanted)].tolist())
    return list(map(RawLogprob, drawn.tolist(), tops, of_ids))
