"""Routes for generation. A request's sequences are queued at the runner, and stream deltas become its answer.

`create_app` makes the application with the routes of OpenAI and SGLang. Other interfaces are `Extension`s: they add
routes whose bodies describe a `Task`, and whose answers `Generation.respond` streams.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from specjax.engine import Completion, StreamChunk
from specjax.engine.chat.message_format import AnswerForm, answer_form
from specjax.engine.sequence import AbortCode, Sequence
from specjax.serve.control import add_control_routes
from specjax.serve.delivery import Listener
from specjax.serve.errors import INVALID, ApiError, ErrorAnswer, ErrorForm, bad_request, unavailable
from specjax.serve.fields import IGNORED_HEADER, BodyRoute
from specjax.serve.middleware import INTERNAL, MAX_METHOD, Gate, check_state, shown_path
from specjax.serve.openai_answers import FINGERPRINT, Answer, Echo, OpenAIAnswer, TokenNames, echo_of
from specjax.serve.openai_requests import ChatRequest, CompletionRequest, TaskBody, check_model
from specjax.serve.runner import Service
from specjax.serve.server_settings import ServerSettings
from specjax.serve.sglang_generate import GenerateAnswer, GenerateRequest
from specjax.serve.tokenising import PER_SEQUENCE, Rules, Task, Tokenising

logger = logging.getLogger("specjax.serve")

LATER = 60  # seconds after which memory may be free again

ABOUT = "Speculative decoding for JAX, behind OpenAI's interface and SGLang's `/generate`."
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "With `stream`: server-sent events.", "content": {"text/event-stream": {}}}
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is refused; `param` names the field."},
    "5XX": {"model": ErrorAnswer, "description": "With `Retry-After`, the request can be sent again."},
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Queued:
    """A request with queued sequences, from which an `Answer` is made."""

    id: str
    task: Task
    sequences: List[Sequence]
    thinking: bool  # as in `ReplyOptions.reply`
    echoes: List[Echo] = ()  # the prompts, if the answer repeats them


class Generation:
    """Shared by all routes for generation: the served model, its tokenizer threads, and how a task is answered."""

    def __init__(self, runner: Service, settings: ServerSettings, *, model: str) -> None:
        self.runner, self.settings, self.model = runner, settings, model
        self.tokenising = Tokenising()

    @functools.cached_property
    def form(self) -> AnswerForm:
        """The format of the model's messages. Only once the model is loaded."""
        return answer_form(
            self.runner.engine.tokenizer,
            tool_call_parser=self.settings.tool_call_parser,
            reasoning_parser=self.settings.reasoning_parser,
        )

    @functools.cached_property
    def names(self) -> TokenNames:
        """Texts of single tokens. Only once the model is loaded."""
        return TokenNames(self.runner.engine.tokenizer)

    def rules(self) -> Rules:
        engine = self.runner.engine
        room = min(engine.context_length - 1, engine.intake.pool_tokens)
        limits = (self.runner.capacity, engine.context_length, room, engine.sampling_defaults)
        return Rules(self.model, *limits, self.form, self.settings.sanitize_control_tokens)

    async def respond(
        self, request: Request, body: TaskBody, id: str, make: Callable[[Queued], Answer], *, echo: bool = False
    ) -> Response:
        """Runs the task that a body describes, and streams or returns the answer.

        Args:
            id: name of the request; its sequences are `id-0`, `id-1`, ... unless the task names them.
            make: makes the answer of the queued request.
            echo: the answer repeats the prompts.
        """
        runner = self.runner
        check_state(runner)
        task = await request.state.reading.run(body.task, self.rules())

        def tokenise() -> tuple[list[Sequence], list[Echo]]:
            sequences, tokenizer = task.sequences(runner.engine.intake, id), runner.engine.tokenizer
            firsts = zip(task.prompts, sequences[:: task.n], strict=True) if echo else ()
            pieces = task.sampling[0].logprobs is not None
            return sequences, [echo_of(p, first.prompt, tokenizer, with_pieces=pieces) for p, first in firsts]

        # The request keeps its places in the queue while its prompts are tokenised.
        with runner.places.reserve(len(task.prompts) * task.n):
            grammars = runner.engine.intake.grammars
            compiles = any(
                params.grammar is not None and not grammars.holds(params.grammar) for params in task.sampling
            )
            size = request.state.reading.size + len(task.prompts) * task.n * PER_SEQUENCE
            job = self.tokenising.submit(size, tokenise, compiles=compiles)
            sequences, echoes = await while_connected(request, asyncio.wrap_future(job))
            listener = Listener(sequences, streams=bool(body.stream))
            check_state(runner)
            runner.submit(listener)
        prompt, tokenizer = sequences[0].prompt, runner.engine.tokenizer
        thinking = task.reply is not None and self.form.is_open(prompt, tokenizer)
        answer = make(Queued(id, task, sequences, thinking, echoes))
        chunks, end = checked_chunks(listener, task, answer), functools.partial(runner.abort, sequences)
        if body.stream:
            return EventStream(_events(chunks, answer), end)
        try:
            completions = await while_connected(request, asyncio.ensure_future(all_completions(chunks)))
        finally:
            end()
        if any(completion.scores for completion in completions):  # possibly thousands of numbers
            return await asyncio.to_thread(lambda: JSONResponse(answer.whole(completions)))
        return JSONResponse(answer.whole(completions))


class Extension(NamedTuple):
    """Routes in addition to OpenAI's and SGLang's.

    Attributes:
        add: registers the routes with the application.
        error_forms: maps prefixes of paths to the form of their errors. Default: OpenAI's.
    """

    add: Callable[[FastAPI, Generation], None]
    error_forms: Mapping[str, ErrorForm] = MappingProxyType({})


def error_forms(extensions: Iterable[Extension]) -> dict[str, ErrorForm]:
    """The forms of errors by prefix of the path, as `form_of` takes them."""
    return {prefix: form for extension in extensions for prefix, form in extension.error_forms.items()}


def create_app(runner: Service, settings: ServerSettings, *, model: str, extensions: List[Extension] = ()) -> FastAPI:
    """The ASGI application over a runner that is loading or ready. `model` is the name that it serves."""
    app = FastAPI(
        title="specjax",
        version=FINGERPRINT,
        description=ABOUT,
        responses=ERRORS,
        redirect_slashes=False,  # the address would be made of the Host header
    )
    app.router.route_class = BodyRoute
    for rank in runner.ranks:
        rank.traffic.model = model
    generation = Generation(runner, settings, model=model)
    add_openai_routes(app, generation)
    add_generate_route(app, generation)
    add_control_routes(app, runner, settings, model=model, tokenising=generation.tokenising)
    for extension in extensions:
        extension.add(app, generation)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> NoReturn:
        path, headers = shown_path(request.scope["path"]), error.headers
        messages = {404: f"there is no {path} here", 405: f"{path} has no {request.method[:MAX_METHOD]}"}
        message = messages.get(error.status_code, str(error.detail))
        if error.status_code == 405:
            headers = {"Allow": ", ".join(sorted(methods(request.scope)))}
        raise ApiError(error.status_code, message, headers=headers)  # `Gate` answers in the form of the path's errors

    def methods(scope: Scope) -> set[str]:
        """The methods of a path, which may have several routes."""
        routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE]
        names = {method for route in routes for method in route.methods or ()}
        return names | {"HEAD"} if "GET" in names else names

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nginx's status; only the log shows it

    app.add_middleware(Gate, runner=runner, settings=settings, error_forms=error_forms(extensions))
    if settings.allowed_origins:  # outermost: the browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["X-Request-Id", IGNORED_HEADER],
        )  # fmt: skip
    return app


def add_openai_routes(app: FastAPI, generation: Generation) -> None:
    runner, model = generation.runner, generation.model

    def answer(body: ChatRequest | CompletionRequest, queued: Queued) -> Answer:
        return OpenAIAnswer(
            queued.id, model, body, queued.task, runner.engine.drafter.width, generation.names, queued.echoes,
            thinking=queued.thinking, form=generation.form,
        )  # fmt: skip

    @app.post("/v1/chat/completions", tags=["OpenAI"], responses=STREAM)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        id = f"chatcmpl-{secrets.token_hex(12)}"
        return await generation.respond(request, body, id, functools.partial(answer, body))

    @app.post("/v1/completions", tags=["OpenAI"], responses=STREAM)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        id, make = f"cmpl-{secrets.token_hex(12)}", functools.partial(answer, body)
        return await generation.respond(request, body, id, make, echo=bool(body.echo))

    def model_card() -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": int(runner.ready_at), "owned_by": "specjax", "root": model}
        return card | {"max_model_len": runner.engine.context_length}

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, model)
        return model_card()


def add_generate_route(app: FastAPI, generation: Generation) -> None:
    runner = generation.runner

    def answer(body: GenerateRequest, queued: Queued) -> Answer:
        return GenerateAnswer(
            queued.sequences,
            runner.engine.drafter.width,
            several=body.is_batch or queued.task.n > 1,
            thoughts=runner.engine.intake.thoughts,
            incremental=generation.settings.incremental_streaming_output,
            names=generation.names if body.return_text_in_logprobs else None,
        )

    @app.put("/generate", include_in_schema=False)
    @app.post("/generate", tags=["SGLang"], responses=STREAM)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        return await generation.respond(request, body, secrets.token_hex(16), functools.partial(answer, body))


class EventStream(StreamingResponse):
    """Server-sent events, each sent as soon as its text exists. Calls `end` at the end, or if the client disconnects.

    The status line is sent with the first event: until then a router can send the request to another server.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    async def stream_response(self, send: Send) -> None:
        first = await anext(aiter(self.body_iterator))
        self.body_iterator = _after(first, self.body_iterator)
        await super().stream_response(send)


async def _after(first: Any, rest: AsyncIterable[Any]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item


async def _events(chunks: AsyncIterator[StreamChunk], answer: Answer) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            scores = chunk.scores or (chunk.completion and chunk.completion.scores)
            make = functools.partial(answer.events, chunk)
            yield b"".join(await asyncio.to_thread(make) if scores else make())
        yield b"".join(answer.last_events())
    except ApiError as error:
        yield answer.error(error)
    except Exception:  # after the status line, an error is an event
        logger.exception("a stream failed")
        yield answer.error(ApiError(500, INTERNAL))


async def checked_chunks(listener: Listener, task: Task, answer: Answer) -> AsyncIterator[StreamChunk]:
    """Stream deltas. Raises an ApiError as `check_completion`."""
    async for chunk in listener.chunks():
        if chunk.completion is not None:
            grammar = task.grammar_field(chunk.prompt_index)
            check_completion(chunk.completion, aborted=answer.shows_aborted, grammar=grammar)
        yield chunk


async def all_completions(chunks: AsyncIterator[StreamChunk]) -> list[Completion]:
    done = {chunk.prompt_index: chunk.completion async for chunk in chunks if chunk.completion is not None}
    return [done[index] for index in sorted(done)]


def check_completion(completion: Completion, *, aborted: bool, grammar: str) -> None:
    """Raises an ApiError if the server, the grammar of the field `grammar`, or `/abort_request` ended the request.
    `aborted`: the answer shows a request that `/abort_request` ended."""
    reason = completion.finish_reason
    if reason["type"] != "abort":
        return
    message = reason.get("message", "the request was aborted")
    match reason.get("code"):
        case AbortCode.REQUESTED if aborted:
            return
        case AbortCode.REQUESTED:
            raise bad_request(message, code="aborted")
        case AbortCode.GRAMMAR:
            raise bad_request(f"{grammar}: {message}", grammar, INVALID)
        case AbortCode.ENGINE:
            raise unavailable(message, retry_after=1)
        case AbortCode.MEMORY:
            raise unavailable(message, retry_after=LATER)
    raise ApiError(500, message)


async def while_connected(request: Request, future: asyncio.Future[Result]) -> Result:
    """The result of `future`, which is cancelled if the client disconnects. Then raises ClientDisconnect."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(until_gone())
    try:
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise ClientDisconnect
        return future.result()
    finally:
        gone.cancel()
        future.cancel()
