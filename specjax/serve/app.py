"""Routes for generation. They queue a body's sequences at the runner, and make an answer of the stream deltas."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specjax.checkpoint.prompts import begins_thinking
from specjax.cli.flags import ServerSettings
from specjax.engine import Completion
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.engine.sequence import NO_SCORES, Sequence
from specjax.serve.anthropic_messages import CountTokensRequest, MessagesRequest
from specjax.serve.control import add_control_routes, get
from specjax.serve.delivery import Deadline, Listener
from specjax.serve.errors import ABORTED, SEND_AGAIN, ApiError, ErrorAnswer, bad_request, unavailable
from specjax.serve.fields import IGNORED_HEADER, MAX_NODES, MAX_VALUES, BodyRoute
from specjax.serve.forms import AnswerForm, answer_form
from specjax.serve.generate_answer import GenerateAnswer
from specjax.serve.generate_request import GenerateRequest
from specjax.serve.messages_answer import MessagesAnswer
from specjax.serve.middleware import INTERNAL, OPEN, Gate, check_state
from specjax.serve.openai_responses import ResponsesRequest
from specjax.serve.protocol import ChatRequest, CompletionRequest, check_model
from specjax.serve.replicas import Service
from specjax.serve.responses import Answer, Echo, OpenAIAnswer, TokenNames, echo_of, fingerprint
from specjax.serve.responses_answer import ResponsesAnswer
from specjax.serve.structured import INVALID
from specjax.serve.task import Rules, Task, refusal
from specjax.serve.tokenising import Tokenising, work

logger = logging.getLogger("specjax.serve")

LATER = 60  # seconds after which memory may be free again

ABOUT = f"""\
Speculative decoding for JAX, behind OpenAI's interface and SGLang's `/generate`.

- Unsupported fields of OpenAI, SGLang and vLLM return a 400 that names the field, unless their value changes nothing.
- Unknown fields are ignored and named in the header `{IGNORED_HEADER}`, or refused with `--strict-fields`.
- Parameters that a request omits are those of the model's `generation_config.json` where the server uses it, else
  OpenAI's.
- A prompt and its new tokens must fit the context together, and the number of prompts times `n` the queue.
- A body has at most {MAX_VALUES:,} JSON values, {MAX_NODES:,} of them lists, objects or members of objects.
"""
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "With `stream`: server-sent events.", "content": {"text/event-stream": {}}}
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is refused; `param` names the field."},
    "5XX": {"model": ErrorAnswer, "description": "With `Retry-After`, the request can be sent again."},
}

Result = TypeVar("Result")
Kind: TypeAlias = ChatRequest | CompletionRequest | GenerateRequest | ResponsesRequest | MessagesRequest


def create_app(runner: Service, settings: ServerSettings, *, model: str) -> FastAPI:
    """The ASGI application over a runner that is loading or ready. `model` is the name it serves."""
    app = FastAPI(
        title="specjax",
        version=fingerprint(),
        description=ABOUT,
        responses=ERRORS,
        redirect_slashes=False,  # the address would be made of the Host header
    )
    app.router.route_class = BodyRoute
    app.state.strict_fields = settings.strict_fields
    tokenising = Tokenising()

    for rank in runner.ranks:
        rank.traffic.model = model

    def rules() -> Rules:
        engine = runner.engine
        room = min(engine.context_length - 1, engine.intake.pool_tokens)
        limits = (runner.capacity, engine.context_length, room, engine.sampling_defaults)
        trees = engine.config.trace
        return Rules(model, *limits, trees=trees, form=form())

    @functools.cache
    def form() -> AnswerForm:
        return answer_form(
            runner.engine.tokenizer,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )

    @functools.cache
    def names() -> TokenNames:
        return TokenNames(runner.engine.tokenizer)

    async def respond(request: Request, body: Kind, id: str) -> Response:
        task = await request.state.reading.run(body.task, rules())
        deadline = Deadline.after(body.timeout, settings.request_timeout)
        echo = isinstance(body, CompletionRequest) and bool(body.echo)

        def tokenise() -> tuple[list[Sequence], list[Echo]]:
            sequences, tokenizer = task.sequences(runner.engine.intake, id), runner.engine.tokenizer
            firsts = zip(task.prompts, sequences[:: task.n], strict=True) if echo else ()
            pieces = task.sampling[0].logprobs is not None
            return sequences, [echo_of(p, one.prompt, tokenizer, with_pieces=pieces) for p, one in firsts]

        # The request keeps its places in the queue while it waits for the tokenizer.
        with runner.reserve(len(task.prompts) * task.n):
            known = runner.engine.intake.grammars
            compiles = any(each.grammar is not None and not known.holds(each.grammar) for each in task.sampling)
            job = asyncio.wrap_future(tokenising.submit(work(task.prompts, task.n), tokenise, compiles=compiles))
            async with deadline.limit():
                sequences, echoes = await while_connected(request, job)
            listener = Listener(sequences, streams=bool(body.stream))
            check_state(runner)
            runner.submit(listener)
        thinking = task.reply is not None and bool(begins_thinking(sequences[0].prompt, runner.engine.tokenizer))
        answer: Answer
        if isinstance(body, GenerateRequest):
            answer = GenerateAnswer(
                runner.engine.drafter.width,
                body.is_batch or task.n > 1,
                ids=[sequence.id for sequence in sequences],
                prompt_tokens=[len(sequence.prompt) for sequence in sequences],
                thoughts=lambda index, output: runner.engine.intake.thoughts(sequences[index], output),
                scored=[sequence.params.logprobs is not None for sequence in sequences],
                with_ids=[bool(sequence.params.logprob_ids) for sequence in sequences],
                incremental=settings.incremental_streaming_output,
                names=names() if body.return_text_in_logprobs else None,
            )
        elif isinstance(body, ResponsesRequest):
            answer = ResponsesAnswer(id, model, body, task, thinking=thinking, end_think=form().end_think)
        elif isinstance(body, MessagesRequest):
            reply = None if task.reply is None else task.reply.reply(thinking=thinking)
            answer = MessagesAnswer(id, model, len(sequences[0].prompt), reply)
        else:
            answer = OpenAIAnswer(
                id, model, body, task, runner.engine.drafter.width, names(), echoes,
                thinking=thinking, end_think=form().end_think,
            )  # fmt: skip
        if body.stream:
            return EventStream(runner, listener, task, answer, deadline)
        try:
            completions = await while_connected(
                request, asyncio.ensure_future(all_completions(listener, deadline, task, answer))
            )
        finally:
            runner.abort(sequences)
        if any(completion.scores for completion in completions):  # possibly thousands of numbers
            return await beside(lambda: JSONResponse(answer.whole(completions)))
        return JSONResponse(answer.whole(completions))

    @app.post("/v1/chat/completions", tags=["OpenAI"], responses=STREAM)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await respond(request, body, f"chatcmpl-{secrets.token_hex(12)}")

    @app.post("/v1/completions", tags=["OpenAI"], responses=STREAM)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await respond(request, body, f"cmpl-{secrets.token_hex(12)}")

    @app.post("/v1/responses", tags=["OpenAI"], responses=STREAM)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await respond(request, body, f"resp_{secrets.token_hex(12)}")

    @app.post("/v1/messages", tags=["Anthropic"], responses=STREAM)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        return await respond(request, body, f"msg_{secrets.token_hex(12)}")

    @app.post("/v1/messages/count_tokens", tags=["Anthropic"])
    async def count_tokens(request: Request, body: CountTokensRequest) -> dict[str, int]:
        check_model(body.model, model)
        chat = body.prompt(form())
        try:
            job = tokenising.submit(work([chat], 1), lambda: len(runner.engine.encode(chat)))
            count = await while_connected(request, asyncio.wrap_future(job))
        except ValueError as error:
            raise refusal(error, {}, "messages") from error
        return {"input_tokens": count}

    # The inner route answers, the outer one describes it: a route of two methods has one id.
    @app.post("/generate", tags=["SGLang"], responses=STREAM)
    @app.api_route("/generate", methods=["POST", "PUT"], include_in_schema=False)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        return await respond(request, body, secrets.token_hex(16))

    def model_card() -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": int(runner.ready_at), "owned_by": "specjax", "root": model}
        return card | {"max_model_len": runner.engine.context_length}

    @get(app, "/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @get(app, "/v1/models/{name:path}", tags=["OpenAI"])
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, model)
        return model_card()

    add_control_routes(app, runner, settings, model=model, tokenising=tokenising)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        said = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} has no {request.method}"}
        message = said.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nginx's status; only the log shows it

    if settings.api_key:
        app.openapi = functools.partial(with_security, app.openapi)  # type: ignore[method-assign]
    app.add_middleware(Gate, runner=runner, settings=settings)
    if settings.allowed_origins:  # outermost: a browser asks without a key whether it may call
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["X-Request-Id", IGNORED_HEADER],
        )  # fmt: skip
    return app


def with_security(describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """FastAPI's OpenAPI document of a server that needs an API key."""
    document = describe()
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    for path in OPEN:
        document["paths"][path]["get"]["security"] = []
    return document


class EventStream(StreamingResponse):
    """Server-sent events, each sent as soon as its text exists. Ends the sequences if the client disconnects.

    The status line is sent with the first event: until then a router can send the request to another server.
    """

    media_type = "text/event-stream"

    def __init__(self, runner: Service, listener: Listener, task: Task, answer: Answer, deadline: Deadline) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(listener, task, answer, deadline), headers=headers)
        self._runner, self._sequences = runner, listener.sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._runner.abort(self._sequences)

    async def stream_response(self, send: Send) -> None:
        first = await anext(aiter(self.body_iterator))
        self.body_iterator = _after(first, self.body_iterator)
        await super().stream_response(send)


async def _after(first: Any, rest: AsyncIterable[Any]) -> AsyncIterator[Any]:
    yield first
    async for each in rest:
        yield each


async def _events(listener: Listener, task: Task, answer: Answer, deadline: Deadline) -> AsyncIterator[bytes]:
    try:
        async for chunk in listener.chunks(deadline):
            if chunk.completion is not None:
                check_completion(
                    chunk.completion, aborted=answer.shows_aborted, grammar=task.grammar_field(chunk.prompt_index)
                )
            scores = chunk.scores or (chunk.completion and chunk.completion.scores)
            make = functools.partial(answer.events, chunk)
            yield b"".join(await beside(make) if scores else make())
        yield b"".join(answer.last_events())
    except ApiError as error:
        yield answer.error(error)
    except Exception:  # after the status line, an error is an event
        logger.exception("a stream failed")
        yield answer.error(ApiError(500, INTERNAL))


async def beside(function: Callable[[], Result]) -> Result:
    """Runs a slow function in a thread, so that it does not block other requests."""
    return await asyncio.get_running_loop().run_in_executor(None, function)


async def all_completions(listener: Listener, deadline: Deadline, task: Task, answer: Answer) -> list[Completion]:
    """The results of all sequences, after all have finished."""
    chunks = listener.chunks(deadline)
    done = {chunk.prompt_index: chunk.completion async for chunk in chunks if chunk.completion is not None}
    completions = [done[index] for index in sorted(done)]
    for index, completion in enumerate(completions):
        check_completion(completion, aborted=answer.shows_aborted, grammar=task.grammar_field(index))
    return completions


def check_completion(completion: Completion, *, aborted: bool, grammar: str) -> None:
    """Raises an ApiError if an error of the server ended the request, or the grammar of the field `grammar`, or
    `/abort_request`, which `aborted` allows."""
    if completion.finish_reason["type"] == "abort":
        message = completion.finish_reason.get("message", "the request was aborted")
        if message == ABORTED:
            if aborted:
                return
            raise bad_request(message, code="aborted")
        if message.startswith(GRAMMAR_FAILED):
            raise bad_request(f"{grammar}: {message}", grammar, INVALID)
        # Any other request would fail again.
        if message in SEND_AGAIN:
            raise unavailable(message, retry_after=1)
        if message.startswith(NO_SCORES):  # there may be enough memory later
            raise unavailable(message, retry_after=LATER)
        raise ApiError(500, message)


async def while_connected(request: Request, future: asyncio.Future[Result]) -> Result:
    """The result of `future`. If the client disconnects, cancels it and raises ClientDisconnect."""

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
