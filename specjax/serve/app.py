"""The routes. Handlers read a body, give its sequences to the runner, and turn stream deltas into an answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specjax.cli.flags import ServerSettings
from specjax.engine import Completion
from specjax.serve.errors import ApiError, bad_request, error_body, unavailable
from specjax.serve.fields import Ignored
from specjax.serve.json_body import INLINE_BYTES, receive_body
from specjax.serve.middleware import INTERNAL, Gate, HeadWithoutBody, check_state, error_response
from specjax.serve.openapi import document
from specjax.serve.protocol import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    check_model,
    read_request,
)
from specjax.serve.report import describe
from specjax.serve.responses import Answer, GenerateAnswer, OpenAIAnswer, TokenNames, event, fingerprint
from specjax.serve.runner import SEND_AGAIN, Listener, QueueFull, Runner
from specjax.serve.task import Rules, Task, check_capacity
from specjax.serve.tokenising import Tokenising, work

logger = logging.getLogger("specjax.serve")

CLIENT_GONE = 499  # nginx's status of a request whose client has left

READ = ["GET", "HEAD"]


def create_app(runner: Runner, settings: ServerSettings, *, model: str) -> FastAPI:
    """The ASGI application over a runner that is loading or ready. `model` is the name it serves."""
    app = FastAPI(title="specjax", redirect_slashes=False)  # the address would be made of the Host header
    tokenising = Tokenising()

    # One thread: a large body is parsed with Python's lock held, and two at once would take twice the memory.
    parsing = ThreadPoolExecutor(1, thread_name_prefix="specjax-parse")

    def rules() -> Rules:
        engine = runner.engine
        room = min(engine.context_length - 1, engine.intake.pool_tokens)
        limits = (runner.capacity, engine.context_length, room, engine.sampling_defaults)
        return Rules(model, *limits, strict=settings.strict_fields)

    async def read(request: Request, kind: type[AnyRequest]) -> tuple[AnyRequest, Task, Ignored]:
        data = await receive_body(request)
        if len(data) <= INLINE_BYTES:
            return read_request(kind, data, rules())
        return await asyncio.get_running_loop().run_in_executor(parsing, read_request, kind, data, rules())

    async def begin(request: Request, task: Task, id: str) -> Listener:
        """Tokenises and queues. The request has its places in the queue from here on, however short its wait is."""
        check_capacity(task.n, len(task.prompts), rules(), task.prompt_field)
        with contextlib.ExitStack() as stack:
            try:
                places = stack.enter_context(runner.reserve(len(task.prompts) * task.n))
            except QueueFull as error:
                raise unavailable(f"the queue is full: {error}", retry_after=1) from error
            job = tokenising.submit(work(task.prompts, task.n), task.sequences, runner.engine.intake, id)
            made = asyncio.wrap_future(job)
            gone = asyncio.create_task(until_gone(request.receive))
            try:
                await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not made.done():  # the client has left, perhaps to try again
                    raise ClientDisconnect
            finally:
                gone.cancel()
                made.cancel()
            listener = Listener(made.result())
            check_state(runner)
            try:
                runner.submit(listener, places)
            except ValueError as error:
                raise bad_request(str(error), "rid") from error
        return listener

    @functools.cache
    def names() -> TokenNames:
        return TokenNames(runner.engine.tokenizer)

    async def openai(request: Request, kind: type[ChatRequest] | type[CompletionRequest], id: str) -> Response:
        body, task, ignored = await read(request, kind)
        ignored.log(id)
        listener = await begin(request, task, id)
        echo: list[str] = []
        if isinstance(body, CompletionRequest) and body.echo:
            try:  # a batch of token ids takes a while
                echo = await asyncio.get_running_loop().run_in_executor(parsing, _as_texts, runner, task.prompts)
            except BaseException:
                runner.abort(listener.sequences)
                raise
        answer = OpenAIAnswer(
            id=id,
            model=model,
            chat=isinstance(body, ChatRequest),
            n=task.n,
            width=runner.engine.drafter.width,
            names=names(),
            logprobs=task.sampling[0].logprobs is not None,
            metrics=bool(body.return_speculative_metrics),
            include_usage=body.wants_usage,
            echo=echo,
        )
        return await respond(request, runner, listener, answer, stream=bool(body.stream), headers=ignored.headers)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await openai(request, ChatRequest, f"chatcmpl-{secrets.token_hex(12)}")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await openai(request, CompletionRequest, f"cmpl-{secrets.token_hex(12)}")

    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        body, task, ignored = await read(request, GenerateRequest)
        id = secrets.token_hex(16)
        ignored.log(id)
        listener = await begin(request, task, id)
        answer = GenerateAnswer(
            width=runner.engine.drafter.width,
            many=body.is_batch or task.n > 1,
            ids=[sequence.id for sequence in listener.sequences],
            prompt_tokens=[len(sequence.prompt) for sequence in listener.sequences],
            incremental=settings.incremental_streaming_output,
            names=names() if body.return_text_in_logprobs else None,
        )
        return await respond(request, runner, listener, answer, stream=bool(body.stream), headers=ignored.headers)

    def model_card() -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": int(runner.ready_at), "owned_by": "specjax", "root": model}
        return card | {"max_model_len": runner.engine.context_length}

    @app.api_route("/v1/models", methods=READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, model)
        return model_card()

    @app.api_route("/health", methods=READ)
    async def health() -> dict[str, Any]:
        check_state(runner)
        return {"status": "ok"}

    @app.api_route("/get_model_info", methods=READ)
    @app.api_route("/model_info", methods=READ)
    async def model_info() -> dict[str, Any]:
        return describe(runner.engine, model)

    @app.api_route("/flush_cache", methods=[*READ, "POST"])
    async def flush_cache() -> dict[str, Any]:
        done = await asyncio.wrap_future(runner.call(lambda engine: engine.flush_cache()))
        if not done:
            raise bad_request(f"cannot flush while requests run or wait ({runner.unfinished} do)", code="busy")
        return {"success": True, "message": "Cache flushed."}

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        said = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} has no {request.method}"}
        message = said.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)  # it left while it sent the body

    @functools.cache
    def described() -> dict[str, Any]:
        has_key = settings.api_key is not None
        return document(rules(), vocab_size=runner.engine.vocab_size, has_key=has_key, version=fingerprint())

    app.openapi = described  # type: ignore[method-assign]
    app.add_middleware(Gate, runner=runner, api_key=settings.api_key, receive_timeout=settings.receive_timeout)
    app.add_middleware(HeadWithoutBody)
    return app


async def respond(
    request: Request, runner: Runner, listener: Listener, answer: Answer, *, stream: bool, headers: Mapping[str, str]
) -> Response:
    if stream:
        return EventStream(runner, listener, answer, headers)
    done: dict[int, Completion] = {}
    async with _while_connected(request.receive, runner, listener):
        async for chunk in listener.chunks():
            if chunk.completion is not None:
                done[chunk.prompt_index] = chunk.completion
    if len(done) < len(listener.sequences):
        return Response(status_code=CLIENT_GONE)
    completions = [done[index] for index in sorted(done)]
    if failure := next(filter(None, map(_failure, completions)), None):
        raise failure
    return JSONResponse(answer.whole(completions), headers=dict(headers))


class EventStream(Response):
    """Server-sent events, each written as soon as its text is known."""

    media_type = "text/event-stream"

    def __init__(self, runner: Runner, listener: Listener, answer: Answer, headers: Mapping[str, str]) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._runner, self._listener, self._answer = runner, listener, answer
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive, self._runner, self._listener):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for events in self._events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        left = len(self._listener.sequences)
        try:
            async for chunk in self._listener.chunks():
                if chunk.completion is not None:
                    left -= 1
                    if failure := _failure(chunk.completion):
                        yield event(failure.body())
                        return
                yield b"".join(self._answer.events(chunk))
            if not left:
                yield b"".join(self._answer.last_events())
        except Exception:  # the status line has been sent, so an event must carry the error
            logger.exception("a stream failed")
            yield event(error_body(500, INTERNAL))


async def until_gone(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def _while_connected(receive: Receive, runner: Runner, listener: Listener) -> AsyncIterator[None]:
    """Closes the listener when the client disconnects; ends the sequences however the block is left."""

    async def watch() -> None:
        await until_gone(receive)
        listener.close()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        runner.abort(listener.sequences)


def _failure(completion: Completion) -> ApiError | None:
    """The error of a request that was aborted, by a fault of the server: one whose client has left gets no answer."""
    reason = completion.finish_reason
    if reason["type"] != "abort":
        return None
    message = reason.get("message", "the request was aborted")
    if message in SEND_AGAIN:
        return unavailable(message, retry_after=1)
    return ApiError(500, message)  # it would fail again


def _as_texts(runner: Runner, prompts: list[Any]) -> list[str]:
    decode = runner.engine.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
