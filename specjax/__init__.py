"""Lossless speculative decoding for JAX. See README.md; the step is `specjax.step`, the engine `specjax.engine`.

Names load their module on first use, so that importing the package, or one light part of it, stays quick.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.acceptance import AcceptAbove, SyntheticAcceptance
    from specjax.cache import PageSpec, PoolShape, commit, init_cache
    from specjax.checkpoint import load_head
    from specjax.config import HeadConfig, ModelConfig, RopeConfig
    from specjax.drafters import DRAFTERS, Auto, Block, Context, Drafter, Eagle, Eagle3, Mtp, Ngram, NoDraft
    from specjax.drafters import Observation, Params, Speculation, Standalone, StandaloneParams, TreeShape
    from specjax.drafters import block_drafter, eagle_drafter, load_drafter, make_speculation, standalone_drafter
    from specjax.drafters.check import DrafterError, check_drafter
    from specjax.engine import Completion, Engine, EngineConfig, Grammar, SamplingParams, StreamChunk
    from specjax.models import make_target
    from specjax.models.target import ForwardOutput, Target, hidden_states
    from specjax.sampling import DrawInputs, draw
    from specjax.state import DecodeState, PrefillInput, Row, StepInput, StepOutput, StepTree, admit, init_state
    from specjax.state import new_row, step_trees
    from specjax.step import StepConfig, Steps, check_phase, commit_phase, draft_phase, make_steps
    from specjax.step import prefill_step, speculate_step, verify_phase
    from specjax.tree import NO_PARENT, NO_TOKEN, DraftTree, Pool, best_nodes, chain, rerank, root_only, top_k_children
    from specjax.verify import Verdict, Verifier, find_verdict, verify_tree

_NAMES = {
    "specjax.acceptance": "AcceptAbove SyntheticAcceptance",
    "specjax.cache": "PageSpec PoolShape commit init_cache",
    "specjax.checkpoint": "load_head",
    "specjax.config": "HeadConfig ModelConfig RopeConfig",
    "specjax.drafters": (
        "DRAFTERS Auto Block Context Drafter Eagle Eagle3 Mtp Ngram NoDraft Observation Params Speculation Standalone "
        "StandaloneParams TreeShape block_drafter eagle_drafter load_drafter make_speculation standalone_drafter"
    ),
    "specjax.drafters.check": "DrafterError check_drafter",
    "specjax.engine": "Completion Engine EngineConfig Grammar SamplingParams StreamChunk",
    "specjax.models": "make_target",
    "specjax.models.target": "ForwardOutput Target hidden_states",
    "specjax.sampling": "DrawInputs draw",
    "specjax.state": "DecodeState PrefillInput Row StepInput StepOutput StepTree admit init_state new_row step_trees",
    "specjax.step": (
        "StepConfig Steps check_phase commit_phase draft_phase make_steps prefill_step speculate_step verify_phase"
    ),
    "specjax.tree": "NO_PARENT NO_TOKEN DraftTree Pool best_nodes chain rerank root_only top_k_children",
    "specjax.verify": "Verdict Verifier find_verdict verify_tree",
}
"""Module to the names that it gives."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__version__ = "0.1.0"

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


# transformers advises to install PyTorch, which specjax does not need: it uses tokenizers and configs alone.
logging.getLogger("transformers").addFilter(
    lambda record: "Models won't be available and only tokenizers" not in record.getMessage()
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
