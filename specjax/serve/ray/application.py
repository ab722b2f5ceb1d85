"""Ray Serve applications: `serve run specjax.serve.ray:build_app model_loading_config=...`, or a Serve config file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.serve.ray.config import deployment_name, deployment_options
from specjax.serve.ray.ingress import Ingress
from specjax.serve.ray.server import SpecjaxServer

NEEDS_RAY = "specjax.serve.ray needs Ray Serve: pip install 'specjax[ray]'"


def config_of(args: Any) -> Any:
    """Ray's `LLMConfig` of its fields, or as it is. Raises ImportError without Ray, ValueError for wrong fields."""
    try:
        # ray.serve.llm has it, too, but can only be imported with vLLM or SGLang.
        from ray.llm._internal.serve.core.configs.llm_config import LLMConfig  # type: ignore
    except ImportError as error:
        raise ImportError(NEEDS_RAY) from error
    return LLMConfig(**{str(name): value for name, value in args.items()}) if isinstance(args, Mapping) else args


def build_app(args: Any) -> Any:
    """An application with every route of `specjax.serve` that any replica can answer.

    Args:
        args: an `LLMConfig`, or its fields. One more field, `ingress_deployment_config`, holds options of the
            ingress's deployment, of which there is one replica by default.

    Returns: a `ray.serve.Application`.

    Raises:
        ImportError: Ray Serve is not installed.
        ValueError: the config asks for what there is not; see `specjax.serve.ray.config`.
    """
    ingress: dict[str, Any] = {"max_ongoing_requests": 10_000}  # the replicas have the limit
    if isinstance(args, Mapping):
        ingress |= args.get("ingress_deployment_config", {})
        args = {name: value for name, value in args.items() if name != "ingress_deployment_config"}
    config = config_of(args)
    from ray import serve  # type: ignore

    options = deployment_options(config) | {"name": deployment_name(config)}
    replicas: Any = serve.deployment(SpecjaxServer, **options)
    return serve.deployment(Ingress, **ingress).bind(replicas.bind(config))
