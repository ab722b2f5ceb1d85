"""Ray Serve: a server class for `LLMConfig(server_cls=...)` of ray.serve.llm, and an application around it.

    LLMConfig(
        server_cls="specjax.fleet.ray:SpecjaxServer",   # for Ray's own builders, which need vLLM or SGLang
        model_loading_config={"model_id": "smol", "model_source": "folder or hub id"},   # --served-model-name, --model
        engine_kwargs={"max_running_requests": 16},                                      # all other flags
        accelerator_config={"kind": "cpu"},                                              # default: one GPU a replica
    )

`build_app` makes an application without ray.serve.llm: `serve run specjax.fleet.ray:build_app
model_loading_config=...`. Needs `pip install -e '.[ray]'`; Ray is imported when an application is built.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, get_args

from specjax.cli.flags import Settings
from specjax.cli.serve import load, make_app
from specjax.engine import EngineConfig
from specjax.fleet.ray_ingress import Ingress, call
from specjax.serve.errors import Pause, State
from specjax.serve.runner import Runner
from specjax.settings import from_mapping

logger = logging.getLogger("specjax.serve")

NEEDS_RAY = "specjax.fleet.ray needs Ray Serve: pip install -e '.[ray]'"
NEEDS_TYPES = (
    "ray.serve.llm takes its request and response types from vLLM or SGLang, and neither is installed here: install "
    "one of them, or serve specjax.fleet.ray:build_app, which needs neither"
)
PLACE = "engine_kwargs"
MODEL_FIELDS = {"model": "model_source", "model_path": "model_source", "served_model_name": "model_id",
                "tokenizer_path": "tokenizer_source"}  # fmt: skip
"""Maps settings to the fields of `model_loading_config` that set them."""
SOCKET_SETTINGS = ("host", "port", "ssl_certfile", "ssl_keyfile", "shutdown_timeout",
                   "dist_init_addr", "nnodes", "node_rank", "profiler_port")  # fmt: skip
"""Settings of the process `specjax serve`: Ray Serve has proxies, and graceful_shutdown_timeout_s."""
HEADERS = ("authorization", "x-api-key", "x-request-id")  # headers of a client that the application reads
STOP_SECONDS = 5.0


def settings_of(llm_config: Any) -> Settings:
    """The settings of a replica. Raises ValueError for wrong values, and for anything unsupported."""
    loading, kwargs = llm_config.model_loading_config, dict(llm_config.engine_kwargs)
    if llm_config.lora_config is not None:
        raise ValueError("lora_config: specjax loads no LoRA adapters")
    source = loading.model_id if loading.model_source is None else loading.model_source
    if not isinstance(source, str) or "://" in source:
        place = getattr(source, "bucket_uri", source)
        raise ValueError(f"model_source must be a folder, a .gguf file, a hub id or an alias, got {place!r}")
    names = {name.replace("-", "_"): name for name in kwargs}
    for name, key in names.items():
        if name in MODEL_FIELDS:
            raise ValueError(f"{PLACE}: {key} is {MODEL_FIELDS[name]} in model_loading_config")
        if name in SOCKET_SETTINGS:
            raise ValueError(f"{PLACE}: {key} has no effect under Ray Serve, which has its own settings for it")
    if "max_model_len" in kwargs:  # Ray puts this key of vLLM's into the model card
        if "context_length" in names:
            raise ValueError(f"{PLACE}: max_model_len and {names['context_length']} are the same setting")
        kwargs["context_length"] = kwargs.pop("max_model_len")
    values: dict[str, Any] = {"model": source, "served_model_name": loading.model_id}
    if loading.tokenizer_source is not None:
        values["tokenizer_path"] = loading.tokenizer_source
    settings = from_mapping(values | kwargs, Settings(), PLACE)
    if settings.server.data_parallel_size > 1:
        raise ValueError(
            f"{PLACE}: data_parallel_size must be 1 under Ray Serve, got {settings.server.data_parallel_size}; "
            "num_replicas in deployment_config starts replicas"
        )
    return settings


def deployment_options(llm_config: Any) -> dict[str, Any]:
    """Options of `serve.deployment` for replicas of the config.

    By default a replica takes as many requests as can run and wait in its engine, so that Ray's router gets no 503 for
    a full queue, and autoscaling aims at the number of requests in one batch. Raises ValueError as `settings_of`, and
    for a placement of more than one bundle.
    """
    settings = settings_of(llm_config)
    options = copy.deepcopy(llm_config.deployment_config)
    for name in ("placement_group_bundles", "placement_group_strategy"):
        if name in options:
            raise ValueError(f"deployment_config: {name}: write placement_group_config={{'bundles': [...]}} instead")
    actor = options.setdefault("ray_actor_options", {})
    for name, value in _resources(llm_config, settings.engine.tensor_parallel_size).items():
        actor.setdefault(name, value)
    actor["runtime_env"] = {**actor.get("runtime_env", {}), **(llm_config.runtime_env or {})}
    running = settings.engine.max_running_requests or EngineConfig.max_running_requests
    options.setdefault("max_ongoing_requests", running + settings.server.max_queued_requests)
    if options.get("num_replicas") == "auto":
        options.setdefault("autoscaling_config", {})
    if isinstance(scaling := options.get("autoscaling_config"), dict):
        scaling.setdefault("target_ongoing_requests", running)
    return options


def deployment_name(llm_config: Any) -> str:
    """A name as Ray's builders make it: without characters that a model's id may have and a name may not."""
    name = llm_config.model_loading_config.model_id.replace("/", "--").replace(".", "_")
    return f"SpecjaxServer:{llm_config.deployment_config.get('name', name)}"


def _resources(llm_config: Any, devices: int) -> dict[str, Any]:
    """Resources of a replica's actor: GPUs for its devices, of the type that the config names, or none."""
    kind = llm_config.accelerator_config.kind
    if kind not in ("gpu", "cpu"):
        raise ValueError(f"accelerator_config: kind must be gpu or cpu, got {kind!r}")
    placement = llm_config.placement_group_config or {}
    per_worker = placement.get("bundle_per_worker")
    bundles = list(placement.get("bundles") or ([] if per_worker is None else [per_worker]))
    if len(bundles) > 1:
        raise ValueError(
            f"placement_group_config: a replica is one process and takes one bundle, got {len(bundles)}; "
            "num_replicas in deployment_config starts more replicas"
        )
    bundle = dict(bundles[0]) if bundles else {}
    resources: dict[str, Any] = {
        "num_cpus": bundle.pop("CPU", 1),
        "num_gpus": bundle.pop("GPU", devices * (kind == "gpu")),
    }
    if "memory" in bundle:
        resources["memory"] = bundle.pop("memory")
    if bundle:
        resources["resources"] = bundle
    if llm_config.accelerator_type is not None:
        resources["accelerator_type"] = llm_config.accelerator_type
    return resources


class SpecjaxServer:
    """One replica of a deployment, with its own engine. Implements `LLMServerProtocol` of ray.serve.llm.

    A request of Ray's OpenAI types goes, as JSON, through the application of `specjax serve`, and the answer back into
    Ray's types. `await SpecjaxServer(llm_config)` loads the model; after `sync_init`, `start` loads it.
    """

    async def __init__(self, llm_config: Any) -> None:
        self._prepare(llm_config)
        await self.start()

    @classmethod
    def sync_init(cls, llm_config: Any) -> SpecjaxServer:
        """A server that has not started."""
        server = cls.__new__(cls)
        server._prepare(llm_config)
        return server

    def _prepare(self, llm_config: Any) -> None:
        self._llm_config = llm_config
        settings = settings_of(llm_config)
        self._runner = Runner(lambda: load(settings), settings.server)
        self._app = make_app(self._runner, settings.server, model=llm_config.model_loading_config.model_id)

    async def start(self) -> None:
        """Loads the model, and returns when it accepts requests. Raises RuntimeError if it cannot be loaded."""
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
        """See `deployment_options`. Ray's builders call this before they build the ingress."""
        _pickle_ingress_by_value()
        return deployment_options(llm_config)

    # Requests. Each method returns a generator. Its items: whole server-sent events of a stream, as text; else one
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
        return _unsupported("embeddings")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _unsupported("transcriptions")

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _unsupported("score")

    async def _answer(self, path: str, kind: str, request: Any, raw: Any) -> AsyncGenerator[Any, None]:
        headers = [item for item in ({} if raw is None else raw.headers).items() if item[0].lower() in HEADERS]
        headers.append(("content-type", "application/json"))
        items = call(self._app, "POST", path, headers=headers, body=body_of(request))
        async with contextlib.aclosing(items):
            status, _ = await anext(items)
            if status == 200 and getattr(request, "stream", False):
                async for chunk in items:
                    yield chunk.decode()
                return
            body = b"".join([chunk async for chunk in items])
            if status == 200:
                yield getattr(_types(), kind).model_validate_json(body)
            else:
                error = json.loads(body)["error"]
                yield _error_response(error["message"], error["type"], status, error["param"])

    async def http(
        self, method: str, path: str, query: bytes, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Any, None]:
        """Any request, as a client sent it: first yields the status and the headers, then the body's chunks."""
        async with contextlib.aclosing(call(self._app, method, path, query=query, headers=headers, body=body)) as items:
            async for item in items:
                yield item

    async def __serve_build_asgi_app__(self) -> Any:
        """For RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING: Ray's proxies reach the application without an ingress."""
        return self._app

    # Control of this replica.

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


def _pickle_ingress_by_value() -> None:
    """Makes the ingress of ray.serve.llm answer requests with FastAPI 0.137 and later.

    Ray marks the `self` of its routes in `__signature__`, which a replica loses because installed modules are pickled
    by reference. FastAPI then takes `self` for a query parameter and refuses every request with a 400 (ray 2.60.0).
    """
    with contextlib.suppress(ImportError):  # without Ray, or without the types that the ingress needs
        from ray import cloudpickle  # type: ignore
        from ray.llm._internal.serve.core.ingress import ingress  # type: ignore

        cloudpickle.register_pickle_by_value(ingress)


def body_of(request: Any) -> bytes:
    """The JSON body of a request of Ray's types: the fields that the client set. Null fields, which the types add to
    messages, are left out."""

    def without_null(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_null(member) for name, member in value.items() if member is not None}
        return [without_null(item) for item in value] if isinstance(value, list) else value

    return json.dumps(without_null(request.model_dump(mode="json", exclude_unset=True))).encode()


def _types() -> Any:
    try:
        from ray.llm._internal.serve.core.configs import openai_api_models  # type: ignore
    except ImportError as error:
        raise ImportError(NEEDS_TYPES) from error
    return openai_api_models


def _error_response(message: str, type: str, code: int, param: str | None = None) -> Any:
    types = _types()
    return types.ErrorResponse(error=types.ErrorInfo(message=message, type=type, param=param, code=code))


async def _unsupported(name: str) -> AsyncGenerator[Any, None]:
    yield _error_response(f"specjax has no {name}", "invalid_request_error", 501)


def build_app(args: Any) -> Any:
    """An application with all routes of `specjax serve` that any replica can answer.

    Args:
        args: an `LLMConfig`, or its fields. One more field, `ingress_deployment_config`, holds options of the
            ingress's deployment, which has one replica by default.

    Returns: a `ray.serve.Application`.

    Raises:
        ImportError: Ray Serve is not installed.
        ValueError: the config asks for something unsupported; see `settings_of` and `deployment_options`.
    """
    try:
        from ray import serve  # type: ignore

        # ray.serve.llm has it, too, but can only be imported with vLLM or SGLang.
        from ray.llm._internal.serve.core.configs.llm_config import LLMConfig  # type: ignore
    except ImportError as error:
        raise ImportError(NEEDS_RAY) from error
    ingress: dict[str, Any] = {"max_ongoing_requests": 10_000}  # the replicas have the limit
    config = args
    if isinstance(args, Mapping):
        fields = {str(name): value for name, value in args.items()}
        ingress |= fields.pop("ingress_deployment_config", {})
        config = LLMConfig(**fields)
    options = deployment_options(config) | {"name": deployment_name(config)}
    replicas: Any = serve.deployment(SpecjaxServer, **options)
    return serve.deployment(Ingress, **ingress).bind(replicas.bind(config))
