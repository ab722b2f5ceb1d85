"""The interface of a target model: three pure functions and a config.

Prefill, plain decoding and tree verification are one operation, `forward`: N new tokens attend to committed pages and
to one another under a mask. It returns the block's keys and values and does not write pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float

from specjax.cache import Block
from specjax.config import ModelConfig
from specjax.types import Hidden, Positions


class ForwardOutput(NamedTuple):
    hidden: Hidden  # after the final norm
    features: Float[Array, "B N F"] | None  # what `features` asked for
    block: Block  # what the layers keep of the block's tokens: leaves [B, N, ...]


class Before(NamedTuple):
    """Uncommitted tokens that a block attends to: the upper levels of a tree that a draft model grows."""

    block: Block  # leaves [B, C - N, ...]
    positions: Positions  # [B, C - N]


class Target(NamedTuple):
    """embed(params, tokens [B,N]) -> [B,N,M]

    forward(params, x, positions [B,N], mask, cache, page_table, prefix_length, *, features, before, ragged)
            -> ForwardOutput
        mask: `specjax_kernels.CAUSAL`, or packed ancestor bits [B,N,W]. features: see `specjax.drafters.base`.
        before: `Before` or None; its keys are the first C - N bits of the mask.
        ragged: `Ragged` or None; how many tokens of each row count. Needed only where `Target.ragged` says so.

    unembed(params, hidden [..., M], ids=None, *, capped=True) -> float32 logits [..., V]; ids: rows of the head
        (FR-Spec, draft vocabularies). capped: with the config's soft cap.
    """

    config: ModelConfig
    embed: Callable[..., Any]
    forward: Callable[..., ForwardOutput]
    unembed: Callable[..., Any]
    pages: Any  # a pytree of `specjax.cache.PageSpec`: what the layers keep of each token
    norm_offset: float = 0.0  # norms multiply by this + their weight
    ragged: bool = False  # whether `forward` can leave out the padding of rows of different lengths
