"""Routes other than generation: state of the server, commands to it, tokenising, and the page at `/`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fastapi import FastAPI, Request
from pydantic import Field, SkipValidation
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from specjax.acceptance import AcceptAbove, SyntheticAcceptance
from specjax.engine import Engine, SamplingParams
from specjax.engine.runtime import Counters
from specjax.parallel.sharding import row_bytes
from specjax.serve.delivery import Listener
from specjax.serve.errors import Pause, bad_request, shown, unavailable
from specjax.serve.fields import Body, Flag, Text, Values, whole
from specjax.serve.metrics import exposition, read
from specjax.serve.middleware import HEALTH, PAGE, check_state
from specjax.serve.openai_answers import FINGERPRINT
from specjax.serve.openai_requests import Ids, Texts, check_model
from specjax.serve.runner import Runner, Service
from specjax.serve.server_settings import ServerSettings
from specjax.serve.tokenising import Tokenising, refusal

Result = TypeVar("Result")

PLAYGROUND = Path(__file__).with_name("playground.html")
HEALTH_SECONDS = 20.0  # time limit for a token of `/health_generate`


class TokenizeRequest(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"messages": ()}

    model: Text | None = None
    prompt: SkipValidation[Texts]
    add_special_tokens: Flag | None = Field(None, description="Default: true.")

    def prompts(self) -> tuple[list[Any], bool]:
        """The prompts, and True if the request has a list of prompts."""
        several = isinstance(self.prompt, list)
        prompts: Any = self.prompt if several else [self.prompt]
        if not all(isinstance(text, str) for text in prompts):
            raise bad_request(f"prompt must be a string or a list of strings, got {shown(self.prompt)}", "prompt")
        return prompts, several


class DetokenizeRequest(Body):
    model: Text | None = None
    tokens: SkipValidation[Ids]
    skip_special_tokens: Flag | None = Field(None, description="Default: true.")

    def lists(self, vocab_size: int) -> tuple[list[list[int]], bool]:
        """The lists of token ids, and True if the request has a list of lists."""
        several = isinstance(self.tokens, list) and bool(self.tokens) and isinstance(self.tokens[0], list)
        lists: Any = self.tokens if several else [self.tokens]
        for ids in lists:
            if not isinstance(ids, list) or not all(type(whole(token)) is int for token in ids):
                problem = f"tokens must be a list of token ids or a list of such lists, got {shown(self.tokens)}"
                raise bad_request(problem, "tokens")
            if outside := [token for token in ids if not 0 <= token < vocab_size]:
                problem = f"tokens holds {shown(outside[0])}; token ids of this model are 0 to {vocab_size - 1}"
                raise bad_request(problem, "tokens")
        return [[int(token) for token in ids] for ids in lists], several


class AbortRequest(Body):
    rid: Text | None = Field(None, description="Name of the request; all its choices and prompts end.")
    abort_all: Flag | None = None


class PauseRequest(Body):
    mode: Pause | None = Field(
        None,
        description="abort (the default): requests end with their text so far. retract: requests free their pages and "
        "continue later. in_place: requests keep their pages and continue later.",
    )


# The page is static, without secrets, and needs no API key. It connects only to this server.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def rank_state(rank: Runner) -> dict[str, Any]:
    """The state of one engine, with SGLang's names."""
    engine, values = rank.engine, {metric.name: metric.value for metric in read([rank])}
    scheduler = engine.scheduler
    return {
        "avg_spec_accept_length": round(values["spec_accept_length"], 4),
        "last_gen_throughput": round(values["gen_throughput"], 2),
        "num_running_reqs": values["num_running_reqs"],
        "num_queue_reqs": values["num_queue_reqs"],
        "retractions": values["num_retracted_reqs"],
        "pages": {
            "total": engine.pool.pages,
            "free": len(scheduler.free_pages),
            "cached": scheduler.prefix.evictable,
            "tokens_each": engine.pool.page_size,
        },
        "state_snapshots": snapshot_state(engine),
        "prefilled_tokens": engine.counters.prefilled_tokens,
        "cached_tokens": values["cached_tokens"],
        "cache_hit_rate": round(values["cache_hit_rate"], 4),
        "generated_tokens": values["generation_tokens"],
        # How many nodes steps have, and why; empty if the engine does not choose.
        "speculative_sizes": engine.policy.table() if engine.policy is not None else [],
    }


def snapshot_state(engine: Engine) -> dict[str, int] | None:
    """Rows that keep the state of a recurrent model at the ends of cached prefixes; None: it is not recurrent."""
    kept = engine.scheduler.prefix.snapshots
    if kept is None:
        return None
    return {"total": kept.count, "held": kept.held, "bytes": kept.count * row_bytes(engine.target.pages)}


def describe(engines: List[Engine], model: str) -> dict[str, Any]:
    """The answer of `/get_model_info`: counts of all replicas, sizes of the one with the smallest pool."""
    engine = min(engines, key=lambda replica: replica.intake.pool_tokens)
    counters, verify = Counters.sum(replica.counters for replica in engines), engine.verify
    lossy = None
    if isinstance(verify, AcceptAbove) and verify.lossy:
        lossy = {"accept_threshold_single": verify.single, "accept_threshold_acc": verify.cumulative}
    return {
        "model_path": model,
        "served_model_name": model,
        "tokenizer_path": engine.tokenizer.name_or_path,
        "is_generation": True,
        "dtype": engine.target.config.dtype,
        "vocab_size": engine.vocab_size,
        "context_length": engine.context_length,
        "max_total_num_tokens": engine.intake.pool_tokens,
        "max_running_requests": engine.config.max_running_requests,
        "page_size": engine.pool.page_size,
        "speculative_algorithm": engine.drafter.name,
        "speculative_num_draft_tokens": engine.drafter.width,
        "speculative_coupling": engine.speculation.coupling,
        "speculative_lossy": lossy,
        "speculative_synthetic_acceptance": [*verify.rates] if isinstance(verify, SyntheticAcceptance) else None,
        "verify_steps": counters.verifications,
        "drafted_steps": counters.drafted_steps,
        "device": engine.device_name,
        "compiling": sum(len(replica.programs.pending) for replica in engines),  # in the background
    }


def server_info(ranks: List[Runner], settings: ServerSettings, model: str) -> dict[str, Any]:
    """The answer of `/get_server_info`: settings, and the state of each engine in `internal_states`."""
    engines = [rank.engine for rank in ranks]
    server = {name: value for name, value in dataclasses.asdict(settings).items() if name != "api_key"}
    return {
        **describe(engines, model),
        # SGLang's tests and scripts read these flags here.
        "speculative_num_steps": engines[0].drafter.depth,
        "speculative_eagle_topk": engines[0].drafter.topk,  # None: trees of no fixed width
        "disable_radix_cache": not engines[0].config.prefix_cache,
        "version": FINGERPRINT,
        "dp_size": len(engines),
        "tp_size": engines[0].config.tensor_parallel,
        "ep_size": engines[0].config.expert_parallel,
        "engine": dataclasses.asdict(engines[0].config),
        "server": server,
        "internal_states": [rank_state(rank) for rank in ranks],
    }


async def on_all(runner: Service, job: Callable[[Runner], Future[Result]]) -> list[Result]:
    """Starts a job on all engines at once, and returns the results."""
    return await asyncio.gather(*(asyncio.wrap_future(job(rank)) for rank in runner.ranks))


def add_control_routes(
    app: FastAPI, runner: Service, settings: ServerSettings, *, model: str, tokenising: Tokenising
) -> None:
    @app.get(PAGE, response_class=HTMLResponse, tags=["server"])
    async def playground() -> Response:
        return HTMLResponse(PLAYGROUND.read_bytes(), headers=PAGE_HEADERS)

    @app.get(HEALTH, tags=["server"])
    async def health() -> dict[str, Any]:
        check_state(runner)
        return {"status": "paused" if runner.paused else "ok"}

    @app.get("/health_generate", tags=["SGLang"])
    async def health_generate() -> dict[str, Any]:
        """Draws a token on each idle engine; a busy engine must make progress."""
        check_state(runner)
        if runner.paused:
            raise unavailable("no token is drawn until /continue_generation", retry_after=5)
        id = f"health-{secrets.token_hex(8)}"
        params, intake = SamplingParams(max_new_tokens=1), runner.engine.intake

        def progress(rank: Runner) -> int:
            return rank.engine.counters.generated + rank.engine.counters.prefilled_tokens

        busy = [(rank, progress(rank)) for rank in runner.ranks if rank.unfinished]
        ranks = [rank for rank in runner.ranks if not rank.unfinished]
        with runner.places.reserve(len(ranks)):
            sequences = [intake.sequence([0], params, id=f"{id}-{number}") for number in range(len(ranks))]
            listener = Listener(sequences, streams=False)
            for number, rank in enumerate(ranks):
                rank.submit(listener, [number])
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                async for chunk in listener.chunks():
                    done = chunk.completion
                    if done is not None and done.finish_reason["type"] == "abort":
                        raise unavailable(f"no token could be drawn: {done.finish_reason}", retry_after=5)
                while any(rank.unfinished and progress(rank) == before for rank, before in busy):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise unavailable(f"no token came within {HEALTH_SECONDS:g} s", retry_after=5) from None
        finally:
            runner.abort(sequences)
        return {"status": "ok"}

    @app.get("/get_model_info", tags=["SGLang"])
    @app.get("/model_info", tags=["SGLang"])
    async def get_model_info() -> dict[str, Any]:
        return describe([rank.engine for rank in runner.ranks], model)

    @app.get("/get_server_info", tags=["SGLang"])
    @app.get("/server_info", tags=["SGLang"])
    async def get_server_info() -> dict[str, Any]:
        return server_info(runner.ranks, settings, model)

    @app.get("/metrics", response_class=PlainTextResponse, tags=["server"])
    async def metrics(request: Request) -> Response:
        text, kind = exposition(runner.ranks, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": kind})

    # `Gate` checks the origin of commands, and `BodyRoute` the type of their bodies. They change the state of the
    # engine, so none of them is a GET.

    @app.post("/flush_cache", tags=["SGLang"])
    async def flush_cache(body: Body | None = None) -> dict[str, Any]:
        flushed = await on_all(runner, lambda rank: rank.call(lambda engine: engine.flush_cache()))
        if not all(flushed):
            part = f"; {sum(flushed)} of {len(flushed)} replicas were flushed" if any(flushed) else ""
            problem = f"cannot flush while requests run or wait ({runner.unfinished} do){part}"
            raise bad_request(problem, code="busy")
        return {"success": True, "message": "Cache flushed."}

    @app.post("/pause_generation", tags=["SGLang"])
    async def pause_generation(body: PauseRequest | None = None) -> dict[str, Any]:
        mode = (body and body.mode) or "abort"
        count = sum(await on_all(runner, lambda rank: rank.pause(mode)))
        end = "aborted" if mode == "abort" else "wait"
        return {"success": True, "message": f"Generation paused; {count} requests {end}."}

    @app.post("/continue_generation", tags=["SGLang"])
    async def continue_generation(body: Body | None = None) -> dict[str, Any]:
        paused = any(await on_all(runner, Runner.go_on))
        return {"success": True, "message": "Generation continues." if paused else "Generation was not paused."}

    @app.post("/abort_request", tags=["SGLang"])
    async def abort_request(body: AbortRequest) -> dict[str, Any]:
        if not body.rid and not body.abort_all:
            raise bad_request("rid names the request to abort; or abort_all: true", "rid")
        count = runner.abort_named(None if body.abort_all else body.rid)
        return {"success": True, "message": f"{count} aborted."}

    @app.post("/tokenize", tags=["SGLang"])
    @app.post("/v1/tokenize", tags=["SGLang"])
    async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
        check_model(body.model, model)
        engine = runner.engine
        prompts, several = body.prompts()

        def encode() -> list[list[int]]:
            intake = engine.intake
            for text in prompts:
                intake.check_text(text)
            special = True if body.add_special_tokens is None else body.add_special_tokens
            return [engine.tokenizer(text, add_special_tokens=special)["input_ids"] for text in prompts]

        try:
            ids = await asyncio.wrap_future(tokenising.submit(request.state.reading.size, encode))
        except ValueError as error:
            raise refusal(error, {}, "prompt") from error
        counts = [len(tokens) for tokens in ids]
        answer = {"tokens": ids, "count": counts} if several else {"tokens": ids[0], "count": counts[0]}
        return answer | {"max_model_len": engine.context_length}

    @app.post("/detokenize", tags=["SGLang"])
    @app.post("/v1/detokenize", tags=["SGLang"])
    async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
        check_model(body.model, model)
        lists, several = body.lists(runner.engine.vocab_size)
        skip = True if body.skip_special_tokens is None else body.skip_special_tokens
        decode = functools.partial(runner.engine.tokenizer.decode, skip_special_tokens=skip)
        job = tokenising.submit(request.state.reading.size, lambda: [decode(tokens) for tokens in lists])
        texts = await asyncio.wrap_future(job)
        text = texts if several else texts[0]
        return {"text": text, "prompt": text}  # SGLang's name, and vLLM's
