"""Lossless speculative decoding for JAX. See README.md; the step is `specjax.step`, the engine `specjax.engine`.

Names load their module on first use, so that importing the package, or one light part of it, stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.cache import PageSpec, PoolShape, commit, init_cache
    from specjax.config import HeadConfig, ModelConfig, RopeConfig
    from specjax.drafters import (
        DRAFTERS,
        Auto,
        Drafter,
        Eagle,
        Eagle3,
        Mtp,
        Ngram,
        NoDraft,
        Params,
        TreeShape,
        eagle_drafter,
        make_drafter,
    )
    from specjax.engine import Completion, Engine, EngineConfig, SamplingParams, StreamChunk
    from specjax.inspection import StepTree, render, step_trees
    from specjax.models import make_target
    from specjax.step import (
        DecodeState,
        PrefillInput,
        Row,
        StepConfig,
        StepInput,
        StepOutput,
        admit,
        check_phase,
        commit_phase,
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

_NAMES = {
    "specjax.cache": ("PageSpec", "PoolShape", "commit", "init_cache"),
    "specjax.config": ("HeadConfig", "ModelConfig", "RopeConfig"),
    "specjax.drafters": (
        "DRAFTERS",
        "Auto",
        "Drafter",
        "Eagle",
        "Eagle3",
        "Mtp",
        "Ngram",
        "NoDraft",
        "Params",
        "TreeShape",
        "eagle_drafter",
        "make_drafter",
    ),
    "specjax.engine": ("Completion", "Engine", "EngineConfig", "SamplingParams", "StreamChunk"),
    "specjax.inspection": ("StepTree", "render", "step_trees"),
    "specjax.models": ("make_target",),
    "specjax.step": (
        "DecodeState",
        "PrefillInput",
        "Row",
        "StepConfig",
        "StepInput",
        "StepOutput",
        "admit",
        "check_phase",
        "commit_phase",
        "draft_phase",
        "init_state",
        "make_steps",
        "new_row",
        "prefill_step",
        "speculate_step",
        "verify_phase",
    ),
    "specjax.tree": ("DraftTree",),
    "specjax.verify": ("verify_tree",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__version__ = "0.1.0"

__all__ = [
    "DRAFTERS",
    "Auto",
    "Completion",
    "DecodeState",
    "DraftTree",
    "Drafter",
    "Eagle",
    "Eagle3",
    "Engine",
    "EngineConfig",
    "HeadConfig",
    "ModelConfig",
    "Mtp",
    "Ngram",
    "NoDraft",
    "PageSpec",
    "Params",
    "PoolShape",
    "PrefillInput",
    "RopeConfig",
    "Row",
    "SamplingParams",
    "StepConfig",
    "StepInput",
    "StepOutput",
    "StepTree",
    "StreamChunk",
    "TreeShape",
    "admit",
    "check_phase",
    "commit",
    "commit_phase",
    "draft_phase",
    "eagle_drafter",
    "init_cache",
    "init_state",
    "make_drafter",
    "make_steps",
    "make_target",
    "new_row",
    "prefill_step",
    "render",
    "speculate_step",
    "step_trees",
    "verify_phase",
    "verify_tree",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
