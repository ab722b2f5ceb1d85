"""Streams: when deltas are sent, and clients that leave at every stage. All pages become free again."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, LEAST
from engine_helpers import byte_ids, idle_sequence, outcome, shared_engine, tokenizer
from server_helpers import SECONDS, Brake, Running, braked, request, running, wait_until

from specjax.cli.flags import ServerSettings
from specjax.engine import SamplingParams
from specjax.engine.generation import DeltaReader
from specjax.engine.sequence import Status
from specjax.engine.text import TextStream
from specjax.serve import delivery
from specjax.serve.delivery import FAILED_REQUEST, Change, Delivery, Listener

LONG = {"prompt": "hello", "max_tokens": 110, "temperature": 0}


# Clients that leave.


def steps_after_leaving(server: Running, brake: Brake) -> int:
    """Number of steps until a stopped engine is idle, after its requests' clients have left."""
    server.wait_for_command()
    before = server.engine.counters.steps
    brake.release()
    server.wait_idle()
    return server.engine.counters.steps - before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
def test_leaving_while_it_runs(server, path, stream):
    few = {"sampling_params": {"max_new_tokens": 80}} if path == GENERATE else {"max_tokens": 80}
    with braked(server.engine, after=8) as brake:
        with server.connected(request(path, LEAST[path] | few | {"stream": stream})):
            brake.wait()
            assert server.engine.scheduler.running()
        assert steps_after_leaving(server, brake) <= 4, "aborted before the next step, except steps in flight"


def test_leaving_before_the_body_is_complete(server):
    before = server.engine.counters.prefilled_tokens
    complete = request(COMPLETE, LONG)
    for data in (b"POST /v1/completions HTTP/1.1\r\nHo", request(COMPLETE, LONG, length=10_000), complete[:-5]):
        with server.connected(data):
            pass
    assert server.complete(max_tokens=1).status_code == 200
    assert server.engine.counters.prefilled_tokens - before <= len("hello"), "nothing else ran"


def test_leaving_while_it_waits(server):
    """The engine has four rows; the fifth request waits."""
    body = LONG | {"prompt": ["hello"] * 4, "stream": True}
    with braked(server.engine, after=8) as brake, server.client() as client, client.stream("POST", COMPLETE, json=body):
        brake.wait()
        assert len(server.engine.scheduler.active) == 4
        with server.connected(request(COMPLETE, LONG)):
            server.wait_for_command()
            brake.allow(1)
            brake.wait()
            assert len(server.engine.scheduler.waiting) == 1
        server.wait_for_command()
        brake.allow(1)
        brake.wait()
        assert not server.engine.scheduler.waiting and server.runner.unfinished == 4
    server.wait_idle()


def test_leaving_does_not_change_other_texts(server):
    expected = outcome(shared_engine("NONE").generate("hello", SamplingParams(max_new_tokens=40)))[0]
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0}
    with ThreadPoolExecutor(1) as clients, braked(server.engine, after=3) as brake:
        with server.connected(request(COMPLETE, LONG | {"prompt": "another", "stream": True})):
            brake.wait()
            stays = clients.submit(server.events, COMPLETE, body)
            wait_until(lambda: server.runner.unfinished == 2)
            brake.allow(5)
            brake.wait()
            assert len(server.engine.scheduler.running()) == 2
        server.wait_for_command()
        brake.release()
        assert "".join(event["choices"][0]["text"] for event in stays.result(SECONDS)) == expected


def test_leaving_late_does_not_end_a_later_request_with_the_same_id(server):
    """The first request has ended in the engine before its client leaves."""
    intake, params = server.engine.intake, SamplingParams(max_new_tokens=8)

    async def both():
        first = Listener([intake.sequence("hello", params, id="x")])
        server.runner.submit(first)
        assert [chunk async for chunk in first.chunks()][-1].completion is not None
        second = Listener([intake.sequence("other", params, id="x")])
        server.runner.submit(second)
        server.runner.abort(first.sequences)
        return [chunk async for chunk in second.chunks()][-1].completion

    done = asyncio.run(asyncio.wait_for(both(), SECONDS))
    assert done.finish_reason["type"] == "length" and len(done.output_ids) == 8


# When deltas are sent.


@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
def test_stream_begins_with_its_first_event(server, path):
    """Not even headers are sent before: until then a router can give the request to another worker."""
    with server.connected() as sock:
        with server.blocked():
            sock.sendall(request(path, LEAST[path] | {"stream": True}))
            wait_until(lambda: server.runner.unfinished)
            sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                sock.recv(1)
        sock.settimeout(SECONDS)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    server.wait_idle()


def test_interval_and_incremental_output(server):
    """`--stream-interval`, and `--incremental-streaming-output`, whose events of `/generate` have only new tokens."""
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "draft_limit": 0}
    prompts = {"text": ["hello", "other"], "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    many = server.events(COMPLETE, body)
    settings = ServerSettings(stream_interval=4, incremental_streaming_output=True)
    with running(shared_engine("NONE"), settings) as other:
        few, whole, events = other.events(COMPLETE, body), other.post(GENERATE, prompts).json(), []
        events = other.events(GENERATE, prompts)
    assert len(few) <= 12 < 30 < len(many)
    few_text, many_text = ("".join(event["choices"][0]["text"] for event in stream) for stream in (few, many))
    assert few_text == many_text
    for index, expected in enumerate(whole):
        parts = [event for event in events if event["index"] == index]
        assert len(parts) > 2 and max(len(part["output_ids"]) for part in parts) < 12
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [token for part in parts for token in part["output_ids"]] == expected["output_ids"]
        counts = [part["meta_info"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts) and counts[-1] == 12
        endings = [part["meta_info"]["finish_reason"] for part in parts]
        assert endings == [None] * (len(parts) - 1) + [expected["meta_info"]["finish_reason"]]


# The delivery thread, with sequences that the test changes.

TEXT = b"a lighthouse warns ships"


def sequence_of(stop: tuple[str, ...] = ()):
    """With stop strings, the engine's thread makes the text."""
    stream = TextStream(tokenizer(), stop, skip_special_tokens=True, keep_stop=False, late=True)
    return idle_sequence(stream=stream, status=Status.RUNNING)


def deliver(sequence, sizes, *, interval: int = 1):
    """The chunks of a sequence that gets this number of tokens in each step, and the sequences that failed."""
    failed = []

    async def run():
        listener, delivery = Listener([sequence], streams=True), Delivery(interval, failed.append)
        delivery.start()
        ids = byte_ids(TEXT)
        for i, size in enumerate(sizes):
            last = i == len(sizes) - 1
            at = len(sequence.output.tokens)
            sequence.accept(ids[at : at + size], False, last)
            sequence.status = Status.FINISHED if last else Status.RUNNING
            delivery.put([Change(sequence, listener, 0, None if last else len(sequence.output.tokens))])
            await asyncio.sleep(0)
        await asyncio.to_thread(delivery.stop)
        return [chunk async for chunk in listener.chunks()]

    return asyncio.run(asyncio.wait_for(run(), SECONDS)), failed


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["late", "stop strings"])
def test_delivery(stop, monkeypatch):
    """In order, at most an event per `interval` tokens; a text that fails is reported once."""
    sizes = [1, 4, 1, 6, len(TEXT) - 12]
    chunks, failed = deliver(sequence_of(stop), sizes)
    assert "".join(chunk.text for chunk in chunks) == TEXT.decode() == chunks[-1].completion.text
    assert [token for chunk in chunks for token in chunk.output_ids] == byte_ids(TEXT)
    assert [chunk.completion is not None for chunk in chunks] == [False] * 4 + [True] and not failed
    assert [len(chunk.output_ids) for chunk in chunks] == sizes
    chunks, _ = deliver(sequence_of(stop), [1] * 7, interval=3)
    assert [len(chunk.output_ids) for chunk in chunks] == [3, 3, 1]

    take, sequence = DeltaReader.take, sequence_of(stop)

    def fail(reader, *others):
        if len(sequence.output.tokens) > 5:
            raise RuntimeError("no such text")
        return take(reader, *others)

    monkeypatch.setattr(DeltaReader, "take", fail)
    chunks, failed = deliver(sequence, [5, 5, 5, 5])
    assert failed == [sequence]
    assert chunks[-1].completion.finish_reason == {"type": "abort", "message": FAILED_REQUEST}
    assert sum(chunk.completion is not None for chunk in chunks) == 1


def test_unread_deltas_are_bounded(monkeypatch):
    """The deltas of a client that is far behind become larger; none is lost."""
    monkeypatch.setattr(delivery, "MAX_UNREAD", 3)
    chunks, _ = deliver(sequence_of(("#",)), [1] * len(TEXT))
    assert [len(chunk.output_ids) for chunk in chunks] == [1, 1, 1, len(TEXT) - 3]
    assert "".join(chunk.text for chunk in chunks) == TEXT.decode()
