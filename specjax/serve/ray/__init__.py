"""Ray Serve: a server class for `LLMConfig(server_cls=...)` of ray.serve.llm, and an application around it.

    LLMConfig(server_cls="specjax.serve.ray:SpecjaxServer", ...)    # for Ray's own builders
    build_app(...)            # without ray.serve.llm, which needs vLLM or SGLang to be installed

Needs `pip install 'specjax[ray]'`. Ray is imported when an application is built, not before.
"""

from specjax.serve.ray.application import build_app
from specjax.serve.ray.server import SpecjaxServer

__all__ = ["SpecjaxServer", "build_app"]
