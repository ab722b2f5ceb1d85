"""Lossless speculative decoding for JAX. See README.md; the step is `specjax.step`, the engine `specjax.engine`."""

from specjax.cache import PagedCache, PoolShape, commit, init_cache
from specjax.config import ModelConfig, RopeConfig
from specjax.drafters import DRAFTERS, Drafter, Params, make_drafter
from specjax.engine import Completion, Engine, EngineConfig, SamplingParams, StreamChunk
from specjax.models import make_target
from specjax.step import (
    DecodeState,
    PrefillInput,
    Row,
    StepConfig,
    StepInput,
    StepOutput,
    admit,
    draft_phase,
    init_state,
    make_steps,
    new_row,
    prefill_step,
    speculate_step,
    verify_phase,
)
from specjax.tree import DraftTree
from specjax.verify import verify_tree

__version__ = "0.1.0"

__all__ = [
    "DRAFTERS",
    "Completion",
    "DecodeState",
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "PagedCache",
    "Params",
    "PoolShape",
    "PrefillInput",
    "RopeConfig",
    "Row",
    "SamplingParams",
    "StepConfig",
    "StepInput",
    "StepOutput",
    "StreamChunk",
    "admit",
    "commit",
    "draft_phase",
    "init_cache",
    "init_state",
    "make_drafter",
    "make_steps",
    "make_target",
    "new_row",
    "prefill_step",
    "speculate_step",
    "verify_phase",
    "verify_tree",
]
