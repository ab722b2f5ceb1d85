"""The server class: one replica of a Ray Serve deployment, with an engine of its own.

Implements `LLMServerProtocol` of ray.serve.llm. A request of Ray's OpenAI types goes, as JSON, through the application
that `specjax.serve` has behind its socket, and its answer back into Ray's types. So a field means the same in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any, get_args

from specjax.serve.app import create_app
from specjax.serve.command import load
from specjax.serve.errors import Pause, State
from specjax.serve.in_process import Answer, call
from specjax.serve.ray.config import deployment_options, settings_of
from specjax.serve.runner import Runner

logger = logging.getLogger("specjax.serve")

PASSED_ON = ("authorization", "x-api-key", "x-request-id")  # headers of a client that the application reads
NEEDS_TYPES = (
    "ray.serve.llm takes its request and response types from vLLM or SGLang, and neither is installed here: install "
    "one of them, or serve specjax.serve.ray:build_app, which needs neither"
)
STOP_SECONDS = 5.0


class SpecjaxServer:
    """`LLMConfig(server_cls="specjax.serve.ray:SpecjaxServer")`; `specjax.serve.ray.config` says what it may hold.

    Constructed as Ray's own `LLMServer` is: `await SpecjaxServer(llm_config)` loads the model; `sync_init` does not,
    `start` does later.
    """

    async def __init__(self, llm_config: Any) -> None:
        self._prepare(llm_config)
        await self.start()

    @classmethod
    def sync_init(cls, llm_config: Any) -> SpecjaxServer:
        """One that is not started."""
        server = cls.__new__(cls)
        server._prepare(llm_config)
        return server

    def _prepare(self, llm_config: Any) -> None:
        self._llm_config = llm_config
        settings = settings_of(llm_config)
        self._runner = Runner(lambda: load(settings), settings.server)
        self._app = create_app(self._runner, settings.server, model=llm_config.model_loading_config.model_id)

    async def start(self) -> None:
        """Loads the model, and returns when it takes requests. Raises RuntimeError if it cannot be loaded."""
        package = logging.getLogger("specjax")
        package.setLevel(logging.INFO)
        if not package.hasHandlers():  # a replica's stderr is in Ray's logs
            package.addHandler(logging.StreamHandler())
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def on_change() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        self._runner.on_change = on_change
        self._runner.start()
        while self._runner.state is State.LOADING:
            await changed.wait()
            changed.clear()
        self._check()

    def _check(self) -> None:
        if self._runner.failure is not None:
            raise RuntimeError(f"the engine failed: {self._runner.failure}") from self._runner.failure

    async def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed, or is stuck (watchdog_timeout): Ray then starts another."""
        self._check()

    def __del__(self) -> None:
        if (runner := vars(self).get("_runner")) is not None and runner.ident is not None:
            runner.stop(STOP_SECONDS)

    async def llm_config(self) -> Any:
        return self._llm_config

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """See `specjax.serve.ray.config.deployment_options`. Ray's builders call this before they build the ingress."""
        _pickle_ingress_by_value()
        return deployment_options(llm_config)

    # Requests. Each method returns a generator. Its items: of a stream, texts of whole server-sent events; else one
    # response, or one `ErrorResponse`, which is also the first item of a stream that could not begin.

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer("/v1/chat/completions", "ChatCompletionResponse", request, raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer("/v1/completions", "CompletionResponse", request, raw_request_info)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer("/tokenize", "TokenizeResponse", request, raw_request_info)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer("/detokenize", "DetokenizeResponse", request, raw_request_info)

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _not_there("embeddings")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _not_there("transcriptions")

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _not_there("score")

    async def _answer(self, path: str, kind: str, request: Any, raw: Any) -> AsyncGenerator[Any, None]:
        headers = [item for item in ({} if raw is None else raw.headers).items() if item[0].lower() in PASSED_ON]
        headers.append(("content-type", "application/json"))
        answer = await call(self._app, "POST", path, headers=headers, body=body_of(request))
        async with contextlib.aclosing(answer.chunks) as chunks:
            if answer.status != 200:
                yield await _error(answer)
            elif getattr(request, "stream", False):
                async for chunk in chunks:
                    yield chunk.decode()
            else:
                yield getattr(_types(), kind).model_validate_json(await answer.read())

    async def http(
        self, method: str, path: str, query: bytes, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Any, None]:
        """Any request, as a client sent it: first yields the status and the headers, then the body's chunks."""
        answer = await call(self._app, method, path, query=query, headers=headers, body=body)
        async with contextlib.aclosing(answer.chunks) as chunks:
            yield answer.status, answer.headers
            async for chunk in chunks:
                yield chunk

    async def __serve_build_asgi_app__(self) -> Any:
        """For RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING: Ray's proxies reach the application without an ingress."""
        return self._app

    # Control, of this replica.

    async def reset_prefix_cache(self) -> None:
        """Raises RuntimeError while requests run."""
        if not await asyncio.wrap_future(self._runner.call(lambda engine: engine.flush_cache())):
            raise RuntimeError(f"cannot flush while requests run or wait ({self._runner.unfinished} do)")

    async def pause(self, mode: Pause = "abort") -> None:
        """Draws no more tokens until `resume`. `mode`: what happens to running requests."""
        if mode not in get_args(Pause):
            raise ValueError(f"mode must be one of {', '.join(get_args(Pause))}, got {mode!r}")
        await asyncio.wrap_future(self._runner.pause(mode))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._runner.go_on())

    async def is_paused(self) -> bool:
        return self._runner.paused

    async def sleep(self, **options: Any) -> None:
        raise NotImplementedError("specjax does not take its weights off the device; pause stops generation")

    async def wakeup(self, **options: Any) -> None:
        raise NotImplementedError("specjax does not take its weights off the device; resume goes on after pause")

    async def is_sleeping(self) -> bool:
        return False

    async def start_profile(self) -> None:
        """Writes a trace of the next steps into the folder of the setting `profile`. ValueError: there is none."""
        await asyncio.wrap_future(self._runner.call(lambda _: self._runner.profiler.begin(None)))

    async def stop_profile(self) -> None:
        await asyncio.wrap_future(self._runner.call(lambda _: self._runner.profiler.end()))


def _pickle_ingress_by_value() -> None:
    """Make the ingress of ray.serve.llm answer requests with FastAPI 0.137 and later.

    Ray marks the `self` of an ingress's routes as injected by setting `__signature__` of its methods. A method of an
    installed module is pickled by reference, so its replica has the method without the mark. FastAPI < 0.137 brought
    what it had read from the mark; later versions read signatures in the replica, take `self` for a query parameter,
    and refuse every request with a 400 (ray 2.60.0).
    """
    with contextlib.suppress(ImportError):  # without Ray, or without the types that the ingress needs
        from ray import cloudpickle  # type: ignore
        from ray.llm._internal.serve.core.ingress import ingress  # type: ignore

        cloudpickle.register_pickle_by_value(ingress)


def body_of(request: Any) -> bytes:
    """The JSON body of a request of Ray's types: the fields that the client gave. Fields that are null, which the types
    add to messages, are left out."""
    return json.dumps(_without_null(request.model_dump(mode="json", exclude_unset=True))).encode()


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _types() -> Any:
    try:
        from ray.llm._internal.serve.core.configs import openai_api_models  # type: ignore
    except ImportError as error:
        raise ImportError(NEEDS_TYPES) from error
    return openai_api_models


def _error_response(message: str, kind: str, status: int, param: str | None = None) -> Any:
    types = _types()
    return types.ErrorResponse(error=types.ErrorInfo(message=message, type=kind, param=param, code=status))


async def _error(answer: Answer) -> Any:
    problem = json.loads(await answer.read())["error"]
    return _error_response(problem["message"], problem["type"], answer.status, problem["param"])


async def _not_there(what: str) -> AsyncGenerator[Any, None]:
    yield _error_response(f"specjax has no {what}", "invalid_request_error", 501)
