"""The thread that makes and sends the text of stream deltas, over sequences that a test changes."""

from __future__ import annotations

import asyncio

import pytest
from engine_helpers import byte_ids, idle_sequence, tokenizer
from server_helpers import SECONDS

from specjax.engine.generation import DeltaReader
from specjax.engine.sequence import Status
from specjax.engine.text import TextStream
from specjax.serve.delivery import FAILED_REQUEST, Change, Delivery, Listener

TEXT = b"a lighthouse warns ships"


def sequence_of(stop=()):
    stream = TextStream(tokenizer(), tuple(stop), skip_special_tokens=True, keep_stop=False, late=True)
    return idle_sequence(stream=stream, status=Status.RUNNING)


def sent(sequence, sizes, *, interval: int = 1, streams: bool = True):
    """The chunks of a sequence that gets so many tokens in each step, and ends with the last. And those that failed."""
    failed = []

    async def run():
        listener, deliverer = Listener([sequence], streams=streams), Delivery(interval, failed.append)
        deliverer.start()
        ids = byte_ids(TEXT)
        for i, size in enumerate(sizes):
            last = i == len(sizes) - 1
            at = len(sequence.output.tokens)
            sequence.accept(ids[at : at + size], False, last)
            sequence.status = Status.FINISHED if last else Status.RUNNING
            deliverer.put([Change(sequence, listener, 0, None if last else len(sequence.output.tokens))])
            await asyncio.sleep(0)
        await asyncio.to_thread(deliverer.stop)
        return [chunk async for chunk in listener.chunks()]

    return asyncio.run(asyncio.wait_for(run(), SECONDS)), failed


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["late", "with stop strings"])
def test_all_text_is_sent_in_order(stop):
    chunks, failed = sent(sequence_of(stop), [1, 4, 1, 6, len(TEXT) - 12])
    assert "".join(chunk.text for chunk in chunks) == TEXT.decode()
    assert [token for chunk in chunks for token in chunk.output_ids] == byte_ids(TEXT)
    assert [chunk.completion is not None for chunk in chunks] == [False] * 4 + [True] and not failed
    assert [len(chunk.output_ids) for chunk in chunks] == [1, 4, 1, 6, len(TEXT) - 12]
    assert chunks[-1].completion.text == TEXT.decode()


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["late", "with stop strings"])
def test_deltas_of_fewer_tokens_than_the_interval_wait(stop):
    chunks, _ = sent(sequence_of(stop), [1, 1, 1, 1, 1, 1, 1], interval=3)
    assert [len(chunk.output_ids) for chunk in chunks] == [3, 3, 1]


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["late", "with stop strings"])
def test_text_that_fails_is_told_once(stop, monkeypatch):
    take, sequence = DeltaReader.take, sequence_of(stop)

    def fail(reader, *others):
        if len(sequence.output.tokens) > 5:
            raise RuntimeError("no such text")
        return take(reader, *others)

    monkeypatch.setattr(DeltaReader, "take", fail)
    chunks, failed = sent(sequence, [5, 5, 5, 5])
    assert failed == [sequence]
    assert chunks[-1].completion.finish_reason == {"type": "abort", "message": FAILED_REQUEST}
    assert sum(chunk.completion is not None for chunk in chunks) == 1
