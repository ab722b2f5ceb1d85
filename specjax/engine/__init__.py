"""The engine: requests in, text out. Plain Python on the host. In reading order:

engine         Engine: requests, the loop (`step`: plan, dispatch, collect), generation
config         EngineConfig, and the sizes derived from it
plan           which program runs next, and for which requests, a function of values; `draft_policy`: of how many nodes
scheduler      which requests have slots and pages: `pages` and the prefix cache
programs       what each program computes, and when it is compiled
runtime        what launches a batch, `dispatch`, and reads it, `collect`; `device`: the state, launches, packed arrays
sequence       a request: its output, its pages, its result; `text`: tokens to text, stop strings
grammar        structured output; `grammar_steps`: steps with masks from the host
intake         requests from prompts and `sampling_params`; `generation`: completions and streams
chat           a model's calls and reasoning: `message_format` the format and its parser, `calls`, `tools` the functions
memory         a plan of what each device holds, and the size of the KV pool
"""

from specjax.engine.config import EngineConfig
from specjax.engine.engine import Engine
from specjax.engine.generation import StreamChunk
from specjax.engine.grammar import Grammar
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import Completion, FinishReason

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "Grammar", "SamplingParams", "StreamChunk"]
