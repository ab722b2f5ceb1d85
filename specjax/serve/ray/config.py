"""What an `LLMConfig` of Ray's says, as settings of specjax and as options of a Ray Serve deployment.

    LLMConfig(
        model_loading_config={"model_id": "smol", "model_source": "folder or hub id"},   # --served-model-name, --model
        engine_kwargs={"max_running_requests": 16},                                      # every other flag
        accelerator_config={"kind": "cpu"},                                              # default: one GPU a replica
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
    )

Reads the config by its attributes: ray need not be installed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from specjax.cli.flags import Settings
from specjax.engine import EngineConfig
from specjax.settings import from_mapping

PLACE = "engine_kwargs"
OF_THE_MODEL = {"model": "model_source", "model_path": "model_source", "served_model_name": "model_id",
                "tokenizer_path": "tokenizer_source"}  # fmt: skip
"""Settings that `model_loading_config` has fields of its own for."""
OF_THE_SOCKET = ("host", "port", "ssl_certfile", "ssl_keyfile", "max_connections", "shutdown_timeout",
                 "dist_init_addr", "nnodes", "node_rank")  # fmt: skip
"""Settings of the process `specjax.serve`: Ray Serve has proxies, and graceful_shutdown_timeout_s."""


def settings_of(llm_config: Any) -> Settings:
    """The settings of a replica. Raises ValueError if the config asks for what there is not, or a value is wrong."""
    loading, kwargs = llm_config.model_loading_config, dict(llm_config.engine_kwargs)
    if llm_config.lora_config is not None:
        raise ValueError("lora_config: specjax loads no LoRA adapters")
    source = loading.model_id if loading.model_source is None else loading.model_source
    if not isinstance(source, str) or "://" in source:
        given = getattr(source, "bucket_uri", source)
        raise ValueError(f"model_source must be a folder, a .gguf file, a hub id or an alias, got {given!r}")
    names = {name.replace("-", "_"): name for name in kwargs}
    for name, field in OF_THE_MODEL.items():
        if name in names:
            raise ValueError(f"{PLACE}: {names[name]} is {field} in model_loading_config")
    for name in OF_THE_SOCKET:
        if name in names:
            raise ValueError(
                f"{PLACE}: {names[name]} has no effect under Ray Serve, which has settings of its own for it"
            )
    if "max_model_len" in kwargs:  # Ray puts this key of vLLM's into the model card
        if "context_length" in names:
            raise ValueError(f"{PLACE}: max_model_len and {names['context_length']} are the same setting")
        kwargs["context_length"] = kwargs.pop("max_model_len")
    found: dict[str, Any] = {"model": source, "served_model_name": loading.model_id}
    if loading.tokenizer_source is not None:
        found["tokenizer_path"] = loading.tokenizer_source
    settings = from_mapping(found | kwargs, Settings(), PLACE)
    if settings.server.data_parallel_size > 1:
        raise ValueError(
            f"{PLACE}: data_parallel_size must be 1 under Ray Serve, got {settings.server.data_parallel_size}; "
            "num_replicas in deployment_config starts replicas"
        )
    return settings


def deployment_options(llm_config: Any) -> dict[str, Any]:
    """Options of `serve.deployment` for replicas of the config.

    Where the config does not say, a replica takes as many requests as run and wait in its engine, so that Ray's router
    never gets a 503 for a full queue, and autoscaling aims at as many as run in one batch.

    Raises ValueError as `settings_of`, and for a placement of more than one bundle: a replica is one process.
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
    """As Ray's builders name theirs: a model's id may hold what a name may not."""
    name = llm_config.model_loading_config.model_id.replace("/", "--").replace(".", "_")
    return f"SpecjaxServer:{llm_config.deployment_config.get('name', name)}"


def _resources(llm_config: Any, devices: int) -> dict[str, Any]:
    """What a replica's actor needs: GPUs for its devices, of the type that is named, or none."""
    kind = llm_config.accelerator_config.kind
    if kind not in ("gpu", "cpu"):
        raise ValueError(f"accelerator_config: kind must be gpu or cpu, got {kind!r}")
    bundle = _bundle(llm_config.placement_group_config or {})
    found: dict[str, Any] = {"num_cpus": bundle.pop("CPU", 1), "num_gpus": bundle.pop("GPU", devices * (kind == "gpu"))}
    if "memory" in bundle:
        found["memory"] = bundle.pop("memory")
    if bundle:
        found["resources"] = bundle
    if llm_config.accelerator_type is not None:
        found["accelerator_type"] = llm_config.accelerator_type
    return found


def _bundle(placement: Mapping[str, Any]) -> dict[str, Any]:
    each = placement.get("bundle_per_worker")
    bundles = list(placement.get("bundles") or ([] if each is None else [each]))
    if len(bundles) > 1:
        raise ValueError(
            f"placement_group_config: a replica is one process and takes one bundle, got {len(bundles)}; "
            "num_replicas in deployment_config starts more of them"
        )
    return dict(bundles[0]) if bundles else {}
