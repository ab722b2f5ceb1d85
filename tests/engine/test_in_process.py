"""Requests to an ASGI application without a socket."""

from __future__ import annotations

import asyncio

import pytest

from specjax.fleet.in_process import call


async def echo(scope, receive, send):
    """Answers with what it was sent, in two chunks."""
    message = await receive()
    assert message == {"type": "http.request", "body": b"body", "more_body": False}
    await send({"type": "http.response.start", "status": 201, "headers": [(b"X-Kind", b"echo")]})
    head = b" ".join([scope["method"].encode(), scope["path"].encode(), scope["query_string"], scope["headers"][0][1]])
    await send({"type": "http.response.body", "body": head, "more_body": True})
    await send({"type": "http.response.body", "body": message["body"]})


def test_a_request_and_its_answer():
    async def main():
        answer = await call(echo, "PUT", "/x", query=b"a=1", headers=[("Who", "me")], body=b"body")
        return answer.status, answer.headers, await answer.read()

    assert asyncio.run(main()) == (201, [("x-kind", "echo")], b"PUT /x a=1 mebody")


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_an_application_that_fails(sent):
    """Before its first chunk the call fails; after it, reading does."""

    async def app(scope, receive, send):
        if sent:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if sent == 2:
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0)
        raise KeyError("broken")

    async def main():
        answer = await call(app, "GET", "/")
        assert sent == 2
        await answer.read()

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(main())


def test_an_answer_that_is_not_whole():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with pytest.raises(RuntimeError, match="GET /half: the application ended without a whole answer"):
        asyncio.run(call(app, "GET", "/half"))


def test_nothing_is_returned_before_the_first_chunk():
    async def main():
        go = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await go.wait()
            await send({"type": "http.response.body", "body": b"a"})

        waiting = asyncio.create_task(call(app, "GET", "/"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        assert await (await waiting).read() == b"a"

    asyncio.run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_caller_that_leaves_ends_the_request(begun):
    """Both while it waits for the first chunk and after it, with more chunks than are read ahead."""

    async def main():
        ended = asyncio.Event()

        async def app(scope, receive, send):
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                if not begun:
                    await asyncio.sleep(60)
                while True:
                    await send({"type": "http.response.body", "body": b"a", "more_body": True})
            finally:
                ended.set()

        waiting = asyncio.create_task(call(app, "GET", "/"))
        if begun:
            answer = await waiting
            assert await anext(answer.chunks)
            await answer.chunks.aclose()
        else:
            for _ in range(5):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert ended.is_set()

    asyncio.run(main())


def test_closing_before_anything_is_read_cancels_the_request():
    ended = []

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        answer = await call(app, "GET", "/")
        await answer.chunks.aclose()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert ended
