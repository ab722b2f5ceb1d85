"""Which answers of a dead replica are asked of another one, without Ray: its exceptions are written out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from specjax.fleet.ray_ingress import ATTEMPTS, Ingress


class RayActorError(Exception):
    pass


class DeploymentUnavailableError(Exception):
    pass


@pytest.fixture(autouse=True)
def _exceptions(monkeypatch):
    for name, members in {
        "ray": [],
        "ray.serve": [],
        "ray.exceptions": [RayActorError],
        "ray.serve.exceptions": [DeploymentUnavailableError],
    }.items():
        module = ModuleType(name)
        vars(module).update({member.__name__: member for member in members})
        monkeypatch.setitem(sys.modules, name, module)


WHOLE, STREAM = "application/json", "text/event-stream; charset=utf-8"


class Replicas:
    """A handle whose n-th call is answered by the n-th of `answers`: a type of content, and chunks or an error."""

    def __init__(self, *answers: tuple[str, list[Any]]) -> None:
        self.http, self._left = self, list(answers)

    def options(self, stream: bool) -> Replicas:
        assert stream
        return self

    async def remote(
        self, method: str, path: str, query: bytes, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Any, None]:
        assert (method, path, query, body) == ("POST", "/v1/completions", b"a=b", b"{}")
        kind, items = self._left.pop(0)
        yield 200, [("content-type", kind)]
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item


def ask(*answers: tuple[str, list[Any]], loop: Callable[..., Any]) -> httpx.Response:
    async def main() -> httpx.Response:
        ingress = Ingress(Replicas(*answers))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (await ingress(Request(scope, receive)))(scope, receive, send)

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://serve") as client:
            return await client.post("/v1/completions?a=b", content=b"{}")

    return loop(main())


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner.run


DEAD = RayActorError()
EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]


@pytest.mark.parametrize("cut", range(3))
def test_a_whole_answer_is_asked_again_until_it_is_complete(cut, loop):
    """Also after its headers, and after a part of its body: nothing of that has reached the client."""
    body = [b'{"a":', b' "bc"}']
    answer = ask((WHOLE, [*body[:cut], DEAD]), (WHOLE, body), loop=loop)
    assert (answer.status_code, answer.json()) == (200, {"a": "bc"})


def test_a_stream_is_asked_again_until_its_first_event(loop):
    answer = ask((STREAM, [DEAD]), (STREAM, EVENTS), loop=loop)
    assert answer.content == b"".join(EVENTS)
    assert answer.headers["content-type"] == STREAM


@pytest.mark.parametrize("cut", [1, 2])
def test_a_stream_that_had_begun_says_so(cut, loop):
    answer = ask((STREAM, [*EVENTS[:cut], DEAD]), loop=loop)
    sent = b"".join(EVENTS[:cut])
    assert answer.content.startswith(sent)
    last = json.loads(answer.content.removeprefix(sent).removeprefix(b"data: "))
    assert "died in the middle of the answer" in last["error"]["message"]


def test_no_replica_answers(loop):
    answer = ask(*[(WHOLE, [DEAD])] * ATTEMPTS, loop=loop)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    answer = ask((WHOLE, [DeploymentUnavailableError("its constructor fails")]), loop=loop)
    assert answer.status_code == 503 and "its constructor fails" in answer.json()["error"]["message"]
