"""The engine: requests in, text out. Host side, plain Python. In reading order:

engine         Engine: requests, the loop (`step`), generation
runtime        what the parts share
schedule       which requests run next: `scheduler` (slots), `pages`, `draft_policy`, `buckets`, `keys`
batch          a batch and its launch: `arrays` (what is sent), `programs`, `phases`, `device`
collect        reading it: `sequence`, `output`, `text`
grammar        structured output: `grammar_steps`
intake         requests from prompts and `sampling_params`; `specjax.checkpoint.prompts` encodes them
"""

from specjax.engine.engine import Engine, EngineConfig
from specjax.engine.generation import StreamChunk
from specjax.engine.grammar import Grammar
from specjax.engine.output import Completion, FinishReason
from specjax.engine.sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "Grammar", "SamplingParams", "StreamChunk"]
