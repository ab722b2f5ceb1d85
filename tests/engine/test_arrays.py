"""Packed inputs of the device against plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import VOCABULARY, idle_sequence

from specjax.engine import SamplingParams
from specjax.engine.device import (
    NO_PAGE,
    admission,
    admission_size,
    admit_packed,
    prefill_input,
    step_input,
    unpack_prefill,
    unpack_step,
)
from specjax.engine.sequence import Slot
from specjax.state import NO_DRAFT_LIMIT, new_row

ROWS, PAGES, TABLE, NEW = 4, 50, 9, 2


def test_page_tables_on_the_device():
    """Rows grow by up to `NEW` pages a step, end and return; batches and tables vary in width."""
    rng = np.random.default_rng(0)
    tables = jnp.full((ROWS, TABLE), PAGES, jnp.int32)
    running = {}
    for _ in range(60):
        if len(running) < ROWS and rng.random() < 0.4:
            slot = min(set(range(ROWS)) - set(running))
            pages = rng.choice(PAGES, rng.integers(1, 5), replace=False).tolist()
            running[slot] = sequence = idle_sequence(slot=Slot(slot, pages, set()))
            width = int(rng.integers(len(pages), TABLE + 1))
            batch = int(rng.integers(1, 4))
            lengths = [min(len(sequence.context), 4)]
            packed = prefill_input([sequence], batch, 4, width, rows=ROWS, pages=PAGES, lengths=lengths)
            inputs, tables = unpack_prefill(jnp.asarray(packed), tables, width, PAGES)
            empty = [[PAGES] * width] * (batch - 1)
            assert np.asarray(inputs.page_table).tolist() == [pages + [PAGES] * (width - len(pages)), *empty]
            assert inputs.slots.tolist() == [slot, *range(ROWS + 1, ROWS + batch)]
            assert inputs.active.tolist() == [True] + [False] * (batch - 1)
        elif running and rng.random() < 0.2:
            del running[rng.choice(list(running))]
        for sequence in running.values():
            count = min(int(rng.integers(NEW + 1)), TABLE - len(sequence.active_slot.pages))
            sequence.active_slot.pages += rng.choice(PAGES, count, replace=False).tolist()
        sequences = [running[slot] for slot in rng.permutation(list(running))]
        batch = len(sequences) + int(rng.integers(1, 3))
        width = max([1, *(len(sequence.active_slot.pages) for sequence in sequences)])
        packed = step_input(sequences, batch, NEW, ROWS)
        assert packed.shape == (batch, 2 + NEW)
        inputs, tables = unpack_step(jnp.asarray(packed), tables, width, PAGES)
        assert inputs.active.tolist() == [i < len(sequences) for i in range(batch)]
        slots = inputs.slots.tolist()
        assert slots[: len(sequences)] == [sequence.active_slot.index for sequence in sequences]
        assert len(set(slots)) == batch and min(slots[len(sequences) :]) >= ROWS
        expected = np.full((batch, width), PAGES)
        for i, sequence in enumerate(sequences):
            expected[i, : len(sequence.active_slot.pages)] = sequence.active_slot.pages
        np.testing.assert_array_equal(inputs.page_table, expected)
        again = step_input(sequences, batch, NEW, ROWS)
        assert (again[:, 2:] == NO_PAGE).all(), "a page is sent twice"


@pytest.mark.parametrize(("output", "vocab_size"), [((), VOCABULARY), ((5, 5, 9, VOCABULARY - 1), VOCABULARY + 7)])
def test_admission_equals_a_new_row(output, vocab_size):
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.25, frequency_penalty=-0.5,
        presence_penalty=0.5, min_new_tokens=3, logit_bias={"4": -2.5, "17": 3.0}, logprobs=2, logprob_ids=[9, 1],
        speculate=False,
    )  # fmt: skip
    prompt = [3, 31, 32, 33, 63, VOCABULARY - 1, 3]
    sequence = idle_sequence(
        params, prompt=prompt, tokens=list(output), slot=Slot(2, [], set()), seed=-(2**62) - 3, salt=2**32 - 5, limit=77
    )
    row = new_row(
        vocab_size, limit=77, prompt=prompt, output=output, draft_limit=0, logprobs=True, logprob_ids=[9, 1],
        salt=2**32 - 5,
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.25, frequency_penalty=-0.5,
        presence_penalty=0.5, min_tokens=3, stop_ids=sequence.request.device_stops, seed=-(2**62) - 3,
        logit_bias={4: -2.5, 17: 3.0},
    )  # fmt: skip
    assert int(row.draft_limit) != NO_DRAFT_LIMIT
    other = new_row(vocab_size, limit=5, prompt=[8, 9], output=[7, 7])
    rows = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * ROWS), other)
    packed = admission(sequence, vocab_size)
    assert packed.dtype == np.int32 and packed.shape == (admission_size(row, resumed=bool(output)),)
    admitted, finished = admit_packed(rows, jnp.ones(ROWS, bool), jnp.asarray(packed))
    assert finished.tolist() == [True, True, False, True]
    for slot in range(ROWS):
        jax.tree.map(
            lambda leaf, wanted, slot=slot: np.testing.assert_array_equal(leaf[slot], wanted),
            admitted, row if slot == 2 else other,
        )  # fmt: skip
