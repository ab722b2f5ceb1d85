"""Reads batches in flight: updates sequences, counters and measurements."""

from __future__ import annotations

import logging
import math

import numpy as np
from jax.profiler import TraceAnnotation

from specjax.engine.device import Output, Read, logprobs_from_bits, read_output
from specjax.engine.runtime import InFlight, Runtime
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import TEXT_FAILED, FinishReason, RawLogprob, Sequence
from specjax.logprobs import LOGPROB_IDS, TOP_LOGPROBS, Logprobs
from specjax.state import FULL, NOT_FINITE, RUNS, STOPPED, step_tree

logger = logging.getLogger(__name__)

NO_DRAW = "the model's logits are not finite (NaN or infinity)"


def collect_all_but(runtime: Runtime, count: int) -> None:
    """Reads batches in flight, the oldest first, until `count` are left."""
    while len(runtime.flights) > count:
        collect(runtime, runtime.flights.popleft())


def collect(runtime: Runtime, flight: InFlight) -> None:
    """Waits for one program and reads its output. Adds sequences with new tokens to `Runtime.changed`."""
    key, sequences, top = flight.batch.key, flight.sequences, min(TOP_LOGPROBS, runtime.vocab_size)
    wanted = any(sequence.params.logprobs is not None for sequence in sequences)
    with TraceAnnotation("wait"):
        read = read_output(runtime.device, flight.output, top if wanted else None)
    seconds = runtime.flights.seconds(flight)
    if seconds is not None:
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
            _take_prompt(sequence, flight.output, i, start, end, top)
        if not tokens and finish == RUNS:
            continue
        kept = take(sequence, read, flight.output, i, finish, verified=key.verifies, forced=forced)
        stepped, drafted = key.verifies and bool(tokens), sequence.id in flight.batch.drafted
        # Of a forced end, only the first token stands for one that the step emitted.
        count, free = min(kept, len(tokens) - forced + 1), sequence.params.grammar is None
        runtime.counters.count(count, verified=stepped, drafted=drafted, free=free)
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


def _record_step(runtime: Runtime, flight: InFlight, read: Read, seconds: float) -> None:
    """Records duration and acceptance of a step without forced tokens."""
    key = flight.batch.key
    if runtime.policy is None or key.kind != "step" or not runtime.buckets.drafts(key.width):
        return
    drafted = [
        (sequence.acceptance, ranks)
        for sequence, ranks, finish in zip(flight.sequences, read.ranks, read.finish, strict=False)
        if sequence.id in flight.batch.drafted and finish == RUNS
    ]
    runtime.policy.record(key.width, key.nodes, seconds, drafted)


def _take_prompt(sequence: Sequence, output: Output, row: int, start: int, end: int, top: int) -> None:
    """Adds the log-probabilities of a prefill of context tokens `start` to `end`. `top`: alternatives per token."""
    scores = sequence.output.prompt_logprobs
    if scores is not None and output.prompt is not None:
        width = output.prompt.shape[1] // (1 + 2 * top + LOGPROB_IDS)
        logprobs = logprobs_from_bits(output.prompt, width, top)
        scores.add(start, end, *(np.asarray(leaf[row]) for leaf in logprobs))


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
