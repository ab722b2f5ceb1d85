"""Launching a batch: its input is packed and sent, and its sequences count as computed that far."""

from __future__ import annotations

from time import perf_counter

from specjax.engine.arrays import prefill_input, step_input
from specjax.engine.grammar_steps import grammar_input
from specjax.engine.runtime import Batch, InFlight, Runtime


def dispatch(run: Runtime, batch: Batch) -> None:
    """Launches a batch, which is in flight from then on."""
    key, sequences, prefilled = batch.key, batch.sequences, []
    launched = perf_counter()
    if key.verifies:
        inputs = step_input(sequences, key.width, run.new_pages, run.rows)
        if key.kind == "constrained":
            inputs = grammar_input(run, batch, inputs)
        run.counters.steps += 1
    else:
        inputs = prefill_input(
            sequences, key.rows, key.width, key.table, rows=run.rows, pages=run.pages, lengths=batch.lengths
        )
    output = run.device.run(key, batch.program, inputs)
    for sequence, tokens in zip(sequences, batch.lengths, strict=False):
        start = sequence.active_slot.prefilled
        run.counters.prefilled_tokens += tokens
        sequence.prefill(tokens)
        prefilled.append((start, start + tokens))
    run.flights.append(InFlight(batch, output, launched, prefilled))
