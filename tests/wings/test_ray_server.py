"""The server class, its settings, the ingress and batches of Ray Data, without Ray: Ray's types are written out in
ray_helpers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from generate_helpers import saved_model
from ray_helpers import (
    QUICK,
    CPUConfig,
    ErrorResponse,
    LLMConfig,
    ModelLoadingConfig,
    RawRequestInfo,
    Request,
    Response,
    Types,
    quick_engine,
)
from server_helpers import parse_events
from starlette.requests import Request as HttpRequest

from specjax.engine import EngineConfig
from specjax.fleet import ray as server
from specjax.fleet.ray import SpecjaxServer, body_of, build_app, deployment_name, deployment_options, settings_of
from specjax.fleet.ray_ingress import ATTEMPTS, Ingress, call

PROMPT = [10, 11, 12, 10, 11]


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


async def items(generator):
    return [item async for item in generator]


# Settings and deployment options.


def test_settings():
    loading = ModelLoadingConfig("org/tiny.1", "folder", "tokens")
    settings = settings_of(LLMConfig(loading, {"max-running-requests": 3, "api_key": ["k"], "max_model_len": 99}))
    assert settings.model.model == "folder" and settings.model.tokenizer_path == "tokens"
    assert settings.server.served_model_name == "org/tiny.1" and settings.server.api_key == ("k",)
    assert settings.engine.max_running_requests == 3 and settings.engine.context_length == 99
    assert settings_of(LLMConfig()).model.model == "tiny", "an id without a source is the source"


@pytest.mark.parametrize(
    ("function", "changes", "text"),
    [
        *((settings_of, {"engine_kwargs": options}, text) for options, text in (
            ({"max_runing_requests": 3}, "unknown key max_runing_requests; did you mean max-running"),
            ({"page_size": 0}, "engine_kwargs: page_size must be"),
            ({"model_path": "x"}, "model_path is model_source in model_loading_config"),
            ({"port": 1}, "port has no effect under Ray Serve"),
            ({"max_model_len": 9, "context-length": 9}, "context-length are the same setting"))),
        (settings_of, {"lora_config": object()}, "no LoRA adapters"),
        (settings_of, {"model_loading_config": ModelLoadingConfig("a", "s3://bucket/a")}, "got 's3://bucket/a'"),
        (settings_of, {"model_loading_config": ModelLoadingConfig("a", SimpleNamespace(bucket_uri="gs://b"))},
         "got 'gs://b'"),
        (deployment_options, {"accelerator_config": CPUConfig("tpu")}, "kind must be gpu or cpu, got 'tpu'"),
        (deployment_options, {"placement_group_config": {"bundles": [{"GPU": 1}] * 2}},
         "takes one bundle, got 2; num_replicas"),
        (deployment_options, {"deployment_config": {"placement_group_bundles": [{}]}}, "write placement_group_config"),
    ],
)  # fmt: skip
def test_refused_configs(function, changes, text):
    with pytest.raises(ValueError, match=text):
        function(LLMConfig(**changes))


def test_resources_of_a_replica():
    """One GPU for each device, unless the config says otherwise."""

    def actor(**changes):
        options = deployment_options(LLMConfig(**changes))["ray_actor_options"]
        options.pop("runtime_env")
        return options

    gpu = CPUConfig("gpu")
    assert actor() == {"num_cpus": 1, "num_gpus": 0}
    assert actor(accelerator_config=gpu) == {"num_cpus": 1, "num_gpus": 1}
    assert actor(accelerator_config=gpu, engine_kwargs={"tp": 2}) == {"num_cpus": 1, "num_gpus": 2}
    bundle = {"CPU": 4, "GPU": 0.5, "memory": 7, "disk": 1}
    assert actor(accelerator_config=gpu, accelerator_type="H100", placement_group_config={"bundles": [bundle]}) == {
        "num_cpus": 4, "num_gpus": 0.5, "memory": 7, "resources": {"disk": 1}, "accelerator_type": "H100",
    }  # fmt: skip
    assert actor(placement_group_config={"bundle_per_worker": {"CPU": 2}})["num_cpus"] == 2
    assert actor(deployment_config={"ray_actor_options": {"num_cpus": 3}})["num_cpus"] == 3


def test_limits_and_autoscaling():
    """Ray's default for a model is not to scale up."""
    engine = {"max_running_requests": 3, "max_queued_requests": 5}
    scaled = {"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}}
    before = json.dumps(scaled)
    config = LLMConfig(engine_kwargs=engine, deployment_config=scaled, runtime_env={"env_vars": {"A": "1"}})
    options = deployment_options(config)
    assert options["max_ongoing_requests"] == 8
    assert options["autoscaling_config"] == {"min_replicas": 0, "max_replicas": 4, "target_ongoing_requests": 3}
    assert options["ray_actor_options"]["runtime_env"] == {"env_vars": {"A": "1"}}
    assert json.dumps(scaled) == before, "the config is not changed"
    auto = deployment_options(LLMConfig(deployment_config={"num_replicas": "auto"}))
    assert auto["autoscaling_config"] == {"target_ongoing_requests": EngineConfig.max_running_requests}
    explicit = {"max_ongoing_requests": 9, "autoscaling_config": {"target_ongoing_requests": 2}}
    assert deployment_options(LLMConfig(deployment_config=explicit)).items() >= explicit.items()
    assert "autoscaling_config" not in deployment_options(LLMConfig(deployment_config={"num_replicas": 2}))
    assert deployment_name(LLMConfig(ModelLoadingConfig("org/tiny.1"))) == "SpecjaxServer:org--tiny_1"
    assert deployment_name(LLMConfig(deployment_config={"name": "mine"})) == "SpecjaxServer:mine"


# The server class.


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def replica(model, loop):
    config = LLMConfig(ModelLoadingConfig("tiny", model), QUICK | {"api_key": ["secret"]})
    replica = SpecjaxServer.sync_init(config)
    loop.run(replica.start())
    yield replica
    assert replica._runner.stop(60.0)


@pytest.fixture(scope="module", autouse=True)
def types():
    with mock.patch.object(server, "_types", return_value=Types):
        yield


KEY = RawRequestInfo({"Authorization": "Bearer secret", "Host": "a", "Content-Length": "999"})


def ask(loop, method, raw=KEY, **fields):
    async def main():
        return await items(await method(Request(**fields), raw))

    return loop.run(main())


def test_body_has_only_fields_of_the_client():
    """Neither defaults of Ray's types, such as a temperature, nor nulls that Ray adds to messages."""
    message = {"role": "user", "content": "a", "tool_calls": None, "parts": [{"x": None}]}
    body = json.loads(body_of(Request(messages=[message], stream=True, tools=None, own=1)))
    assert body == {"messages": [{"role": "user", "content": "a", "parts": [{}]}], "stream": True, "own": 1}


def test_answers_and_streams(loop, replica, model):
    """The text equals that of an engine."""
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 3, "temperature": 0.7}
    expected = quick_engine(model).generate(PROMPT, {"max_new_tokens": 8, "temperature": 0.7, "seed": 3}).text
    (answer,) = ask(loop, replica.completions, **fields)
    assert isinstance(answer, Response)
    assert answer.model_dump()["choices"][0]["text"] == expected != ""
    chunks = ask(loop, replica.completions, stream=True, **fields)
    assert all(isinstance(chunk, str) and chunk.endswith("\n\n") for chunk in chunks)
    events = parse_events("".join(chunks).encode())
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == expected

    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    (answer,) = ask(loop, replica.chat, **chat)
    assert answer.model_dump()["usage"]["completion_tokens"] == 4
    chunks = ask(loop, replica.chat, stream=True, **chat)
    assert parse_events("".join(chunks).encode())[0]["choices"][0]["delta"]["role"] == "assistant"
    (tokens,) = ask(loop, replica.tokenize, prompt="abc")
    (text,) = ask(loop, replica.detokenize, tokens=tokens.model_dump()["tokens"])
    assert text.model_dump()["prompt"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_first_item(loop, replica, stream):
    (error,) = ask(loop, replica.completions, prompt="a", max_tokens=-1, stream=stream)
    assert isinstance(error, ErrorResponse)
    assert (error.error.code, error.error.param) == (400, "max_tokens")
    (error,) = ask(loop, replica.completions, prompt="a", stream=stream, raw=RawRequestInfo({}))
    assert error.error.code == 401
    (error,) = ask(loop, replica.embeddings, input="a")
    assert error.error.code == 501


def test_leaving_ends_the_request(loop, replica):
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
        (status, _), *body = await items(replica.http("GET", "/v1/models/tiny", b"", [("x-api-key", "secret")], b""))
        assert status == 200 and json.loads(b"".join(body))["id"] == "tiny"
        app = await replica.__serve_build_asgi_app__()
        assert app is replica._app
        received, sent = iter(["lifespan.startup", "lifespan.shutdown"]), []

        async def receive():
            return {"type": next(received)}

        async def send(message):
            sent.append(message["type"])

        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    loop.run(main())


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_failing_application(loop, sent):
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
        chunks = call(app, "GET", "/half")
        await anext(chunks)
        assert sent == 2
        await anext(chunks)
        await anext(chunks)

    error = RuntimeError if sent == 1 else KeyError
    with pytest.raises(error, match=r"broken|GET /half: the application ended without a whole answer"):
        loop.run(main())


def test_failed_starts(loop, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=f"the engine failed: .*{tmp_path.name}"):
        loop.run(SpecjaxServer.sync_init(LLMConfig(ModelLoadingConfig("tiny", str(tmp_path)))).start())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[ray\]'"):
        build_app({"model_loading_config": {"model_id": "a"}})


# The ingress: which answers of a dead replica are requested from another replica.


class RayActorError(Exception):
    pass


class DeploymentUnavailableError(Exception):
    pass


@pytest.fixture
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
DEAD = RayActorError()
EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]


class Replicas:
    """A handle that gives its n-th call the n-th of `answers`: a content type, and chunks or an error."""

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


def answer_of(loop, *answers: tuple[str, list[Any]]) -> httpx.Response:
    async def main() -> httpx.Response:
        ingress = Ingress(Replicas(*answers))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (await ingress(HttpRequest(scope, receive)))(scope, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://serve") as client:
            return await client.post("/v1/completions?a=b", content=b"{}")

    return loop.run(main())


@pytest.mark.usefixtures("_exceptions")
def test_ingress_repeats_what_no_client_has_seen(loop):
    """A whole answer until it is complete, a stream until its first event."""
    body = [b'{"a":', b' "bc"}']
    for cut in range(3):
        answer = answer_of(loop, (WHOLE, [*body[:cut], DEAD]), (WHOLE, body))
        assert (answer.status_code, answer.json()) == (200, {"a": "bc"})
    answer = answer_of(loop, (STREAM, [DEAD]), (STREAM, EVENTS))
    assert answer.content == b"".join(EVENTS)
    assert answer.headers["content-type"] == STREAM


@pytest.mark.usefixtures("_exceptions")
def test_ingress_reports_errors(loop):
    for cut in (1, 2):
        content = answer_of(loop, (STREAM, [*EVENTS[:cut], DEAD])).content
        begun = b"".join(EVENTS[:cut])
        assert content.startswith(begun)
        last = json.loads(content.removeprefix(begun).removeprefix(b"data: "))
        assert "died in the middle of the answer" in last["error"]["message"]
    answer = answer_of(loop, *[(WHOLE, [DEAD])] * ATTEMPTS)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    answer = answer_of(loop, (WHOLE, [DeploymentUnavailableError("its constructor fails")]))
    assert answer.status_code == 503 and "its constructor fails" in answer.json()["error"]["message"]
