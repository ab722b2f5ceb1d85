"""The server class behind Ray's interface, without Ray: its types are written out in ray_helpers."""

from __future__ import annotations

import asyncio
import json

import pytest
from generate_helpers import saved_model
from ray_helpers import QUICK, ErrorResponse, LLMConfig, ModelLoadingConfig, RawRequestInfo, Request, Response, Types
from server_helpers import parse_events

from specjax.fleet import ray as server
from specjax.fleet.ray import SpecjaxServer, body_of, build_app
from specjax.fleet.ray_data import Generate

PROMPT = [10, 11, 12, 10, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def replica(model, loop):
    config = LLMConfig(ModelLoadingConfig("tiny", model), QUICK | {"api_key": ["secret"]})
    replica = SpecjaxServer.sync_init(config)
    loop.run(replica.start())
    yield replica
    assert replica._runner.stop(60.0)


@pytest.fixture(autouse=True)
def types(monkeypatch):
    monkeypatch.setattr(server, "_types", lambda: Types)


async def items(generator):
    return [item async for item in generator]


KEY = RawRequestInfo({"Authorization": "Bearer secret", "Host": "a", "Content-Length": "999"})


def ask(loop, method, raw=KEY, **fields):
    async def main():
        return await items(await method(Request(**fields), raw))

    return loop.run(main())


def test_a_body_holds_what_the_client_gave():
    """Neither the types' defaults, one of which is a temperature, nor the nulls that Ray adds to messages."""
    message = {"role": "user", "content": "a", "tool_calls": None, "parts": [{"x": None}]}
    body = json.loads(body_of(Request(messages=[message], stream=True, tools=None, own=1)))
    assert body == {"messages": [{"role": "user", "content": "a", "parts": [{}]}], "stream": True, "own": 1}


def test_answers_and_streams(loop, replica, model):
    """The text is that of `specjax.generate`'s engine, whole and streamed."""
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 3, "temperature": 0.7}
    (row,) = Generate(QUICK | {"model": model}, {"max_new_tokens": 8, "temperature": 0.7, "seed": 3}).complete(
        [{"input_ids": PROMPT, "seed": 3}]
    )
    (answer,) = ask(loop, replica.completions, **fields)
    assert isinstance(answer, Response)
    assert answer.model_dump()["choices"][0]["text"] == row["text"] != ""
    chunks = ask(loop, replica.completions, stream=True, **fields)
    assert all(isinstance(chunk, str) and chunk.endswith("\n\n") for chunk in chunks)
    events = parse_events("".join(chunks).encode())
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == row["text"]


def test_chat(loop, replica):
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    (answer,) = ask(loop, replica.chat, **fields)
    assert answer.model_dump()["usage"]["completion_tokens"] == 4
    chunks = ask(loop, replica.chat, stream=True, **fields)
    assert parse_events("".join(chunks).encode())[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_come_as_the_first_item(loop, replica, stream):
    (error,) = ask(loop, replica.completions, prompt="a", max_tokens=-1, stream=stream)
    assert isinstance(error, ErrorResponse)
    assert (error.error.code, error.error.param) == (400, "max_tokens")
    (error,) = ask(loop, replica.completions, prompt="a", stream=stream, raw=RawRequestInfo({}))
    assert error.error.code == 401
    (error,) = ask(loop, replica.embeddings, input="a")
    assert error.error.code == 501


def test_tokenize_and_detokenize(loop, replica):
    (tokens,) = ask(loop, replica.tokenize, prompt="abc")
    (text,) = ask(loop, replica.detokenize, tokens=tokens.model_dump()["tokens"])
    assert text.model_dump()["prompt"] == "abc"


def test_a_client_that_leaves_ends_its_request(loop, replica):
    async def main():
        stream = await replica.completions(Request(prompt=PROMPT, stream=True, ignore_eos=True, max_tokens=100), KEY)
        await anext(stream)
        assert replica._runner.unfinished == 1
        await stream.aclose()
        async with asyncio.timeout(60):
            while replica._runner.unfinished:
                await asyncio.sleep(0.01)

    loop.run(main())


def test_control(loop, replica):
    async def main():
        await replica.check_health()
        await replica.pause()
        assert await replica.is_paused() and not await replica.is_sleeping()
        await replica.resume()
        assert not await replica.is_paused()
        await replica.reset_prefix_cache()
        with pytest.raises(ValueError, match="mode must be one of abort, retract, in_place, got 'keep'"):
            await replica.pause(mode="keep")
        with pytest.raises(ValueError, match="the server writes no traces"):
            await replica.start_profile()
        got = await items(replica.http("GET", "/v1/models/tiny", b"", [("x-api-key", "secret")], b""))
        assert got[0][0] == 200 and json.loads(b"".join(got[1:]))["id"] == "tiny"
        app = await replica.__serve_build_asgi_app__()
        assert app is replica._app
        asked, sent = iter(["lifespan.startup", "lifespan.shutdown"]), []

        async def receive():
            return {"type": next(asked)}

        async def send(message):
            sent.append(message["type"])

        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)  # as Ray's server asks
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    loop.run(main())


def test_a_model_that_cannot_be_loaded(loop, tmp_path):
    with pytest.raises(RuntimeError, match=f"the engine failed: .*{tmp_path.name}"):
        loop.run(SpecjaxServer.sync_init(LLMConfig(ModelLoadingConfig("tiny", str(tmp_path)))).start())


def test_without_ray(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'specjax\[ray\]'"):
        build_app({"model_loading_config": {"model_id": "a"}})
