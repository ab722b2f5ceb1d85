"""Settings of a quick engine, and Ray's types, written out because Ray may not be installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from specjax.cli import build, generate
from specjax.engine import Engine
from specjax.settings import from_mapping

QUICK: dict[str, Any] = {
    "max_running_requests": 2, "chunked_prefill_size": 16, "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4, "speculative_ngram_max_match_window_size": 4,
    "speculative_ngram_capacity": 4096, "speculative_adaptive": False,
}  # fmt: skip
"""Settings of an engine with few programs to compile."""


def quick_engine(model: str) -> Engine:
    settings = from_mapping(QUICK | {"model": model}, generate.DEFAULTS, "settings")
    return build.make_engine(settings, progress=False)


@dataclass
class ModelLoadingConfig:
    """The fields of `ray.serve.llm.ModelLoadingConfig`, ray 2.60."""

    model_id: str = "tiny"
    model_source: Any = None
    tokenizer_source: str | None = None


@dataclass
class CPUConfig:
    kind: str = "cpu"


@dataclass
class LLMConfig:
    """The used fields of `ray.serve.llm.LLMConfig`, ray 2.60, with their defaults."""

    model_loading_config: ModelLoadingConfig = field(default_factory=ModelLoadingConfig)
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    deployment_config: dict[str, Any] = field(default_factory=dict)
    accelerator_type: str | None = None
    accelerator_config: Any = field(default_factory=CPUConfig)
    placement_group_config: dict[str, Any] | None = None
    lora_config: Any = None
    runtime_env: dict[str, Any] | None = None


@dataclass
class RawRequestInfo:
    headers: dict[str, str]


class Request(BaseModel):
    """Like request types of ray.serve.llm: fields with defaults, some of them set by the client."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    stream: bool = False
    temperature: float = 1.0
    n: int | None = 1
    max_tokens: int | None = None
    tools: list[Any] | None = None


class Response(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo


class Types:
    """Replaces ray.llm's module openai_api_models."""

    ChatCompletionResponse = CompletionResponse = TokenizeResponse = DetokenizeResponse = Response
    ErrorInfo, ErrorResponse = ErrorInfo, ErrorResponse
