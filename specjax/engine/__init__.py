"""The engine: requests in, text out. Host side, plain Python; see `specjax.engine.engine`."""

from specjax.engine.engine import Engine, EngineConfig
from specjax.engine.generation import StreamChunk
from specjax.engine.grammar import Grammar
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import Completion, FinishReason

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "Grammar", "SamplingParams", "StreamChunk"]
