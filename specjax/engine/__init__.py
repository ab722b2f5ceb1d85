"""The engine: requests in, text out. Plain Python on the host. In reading order:

engine         Engine: requests, the loop (`step`: schedule, dispatch, collect), generation
config         EngineConfig, and the sizes derived from it
scheduler      which requests run next: slots, `pages` and the prefix cache, batches; `draft_policy`
buckets        which sizes are compiled; `programs`: what each program computes, and when it is compiled
batch          `dispatch` and `collect` of a batch; `device`: the state, launches, packed arrays
sequence       a request: its output, its pages, its result; `text`: tokens to text, stop strings
grammar        structured output; `grammar_steps`: steps with masks from the host
intake         requests from prompts and `sampling_params`; `generation`: completions and streams
memory         placement of parameters, size of the KV pool
"""

from specjax.engine.config import EngineConfig
from specjax.engine.engine import Engine
from specjax.engine.generation import StreamChunk
from specjax.engine.grammar import Grammar
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import Completion, FinishReason

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "Grammar", "SamplingParams", "StreamChunk"]
