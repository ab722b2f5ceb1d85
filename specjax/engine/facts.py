"""What the engines of several processes must have in common to run the same programs."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import asdict

import jax
import numpy as np

from specjax.drafters.base import Drafter, Params
from specjax.engine import program_store
from specjax.engine.config import EngineConfig
from specjax.models.target import Target

OWN = ("mem_fraction", "max_total_tokens", "random_seed", "autotune_seconds")
"""Fields of `EngineConfig` that each process may have otherwise. The pool's size is agreed upon."""


def facts(
    target: Target, drafter: Drafter, params: Params, config: EngineConfig, context_length: int
) -> dict[str, str]:  # fmt: skip
    """By the names that an error gives them."""
    try:
        source = program_store.sources()[:16]
    except program_store.Unknown:
        source = "unknown"
    found = {"version of specjax": f"{importlib.metadata.version('specjax')} (source {source})"}
    found["version of jax"] = jax.__version__
    found["model"] = repr(target.config)
    found["drafter"] = f"{drafter.name}, {drafter.depth} levels, {drafter.width} nodes"
    found["context length"] = str(context_length)
    found |= {f"EngineConfig.{name}": repr(value) for name, value in asdict(config).items() if name not in OWN}
    return found | {"weights": f"digest {_weights(params)}"}


def _weights(params: Params) -> str:
    """Of the leaves that each device has as a whole, such as norms, which differ between two models of one shape."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()
