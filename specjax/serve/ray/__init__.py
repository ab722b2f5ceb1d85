"""Ray Serve: a server class for `LLMConfig(server_cls=...)` of ray.serve.llm, and applications around it.

    LLMConfig(server_cls="specjax.serve.ray:SpecjaxServer", ...)    # Ray's own builders
    build_openai_app(...)     # those, with an ingress that sends requests of a dead replica to another one
    build_app(...)            # without ray.serve.llm, which needs vLLM or SGLang to be installed

Needs `pip install 'specjax[ray]'`. Ray is imported when an application is built, not before.
"""

from __future__ import annotations

from typing import Any

from specjax.serve.ray.application import build_app, build_openai_app
from specjax.serve.ray.server import SpecjaxServer

__all__ = [
    "RetryingIngress",  # pyright: ignore[reportUnsupportedDunderAll]
    "SpecjaxServer",
    "build_app",
    "build_openai_app",
]


def __getattr__(name: str) -> Any:
    if name == "RetryingIngress":  # its base class is Ray's
        from specjax.serve.ray.ingress import retrying_ingress

        return retrying_ingress()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
