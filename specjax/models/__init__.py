"""Families of target models. (From a Hugging Face architecture to its family: `specjax.checkpoint.hf_config`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from specjax.config import ModelConfig
from specjax.models import llama
from specjax.models.blocks import Backend
from specjax.models.protocol import ForwardOutput, Target


class Family(NamedTuple):
    make_target: Callable[..., Target]  # (config, *, backend) -> Target
    init_params: Callable[..., object]  # (config, key) -> random parameters
    logical_axes: dict[str, tuple[str | None, ...]]


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.llama_target, llama.init_params, llama.LOGICAL_AXES),
}


def make_target(config: ModelConfig, *, backend: Backend = None) -> Target:
    """The target of a config's family. `backend`: see `specjax.models.blocks.Backend`.

    Raises:
        ValueError: no such family.
    """
    if config.family not in FAMILIES:
        raise ValueError(f"no model family {config.family!r}; there are: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[config.family].make_target(config, backend=backend)


__all__ = ["FAMILIES", "Family", "ForwardOutput", "Target", "make_target"]
