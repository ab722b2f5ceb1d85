"""The engine: requests in, text out. Host side, plain Python. In reading order:

engine         Engine: requests, the loop (`step`), generation
runtime        what the parts share; the values `Batch` and `InFlight`
schedule       which requests run next: `scheduler` (slots), `pages`, `pace`, `draft_policy`, `buckets`, `keys`
dispatch       launching a batch: `arrays` (what is sent), `programs`, `phases`, `device`
collect        reading it: `sequence`, `text`
grammar        structured output: `grammar_steps`, `constraint`
intake         requests from prompts and `sampling_params`
"""

from specjax.engine.engine import Engine, EngineConfig
from specjax.engine.generation import StreamChunk
from specjax.engine.grammar import Grammar
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import Completion, FinishReason

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "Grammar", "SamplingParams", "StreamChunk"]
