"""Requests to an ASGI application without a socket."""

from __future__ import annotations

import asyncio

import pytest

from specjax.fleet.ray_ingress import call


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_failing_application(sent):
    """Before the first chunk the call fails, later the read. An incomplete response is an error."""

    async def app(scope, receive, send):
        if sent:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if sent == 2:
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0)
        if sent != 1:
            raise KeyError("broken")

    async def main():
        items = call(app, "GET", "/half")
        await anext(items)
        assert sent == 2
        await anext(items)
        await anext(items)

    error = RuntimeError if sent == 1 else KeyError
    with pytest.raises(error, match=r"broken|GET /half: the application ended without a whole answer"):
        asyncio.run(main())


@pytest.mark.parametrize("place", ["before the first chunk", "after the first chunk", "before reading"])
def test_leaving_caller_ends_the_request(place):
    async def main():
        ended = asyncio.Event()

        async def app(scope, receive, send):
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                if place == "before the first chunk":
                    await asyncio.sleep(60)
                while True:
                    await send({"type": "http.response.body", "body": b"a", "more_body": True})
            finally:
                ended.set()

        items = call(app, "GET", "/")
        waiting = asyncio.ensure_future(anext(items))
        if place != "before the first chunk":
            assert await waiting == (200, [])
            if place == "after the first chunk":
                assert await anext(items)
            await items.aclose()
        else:
            for _ in range(5):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert ended.is_set()

    asyncio.run(asyncio.wait_for(main(), 10))
