"""The interface of a target model: three pure functions and a config.

Prefill, plain decoding and tree verification are one operation, `forward`: N new tokens attend to committed pages and
to one another under a mask. It returns the block's keys and values and does not write pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float, Float32

from specjax.cache import Block
from specjax.config import ModelConfig
from specjax.types import Hidden, Positions


class ForwardOutput(NamedTuple):
    """What `Target.forward` computes of N tokens of each of B requests.

    Attributes:
        hidden: [B, N, M]. Hidden states after the final norm.
        features: [B, N, F]. What `features` asked for; None: nothing.
        block: what the layers keep of the tokens: leaves [B, N, ...].
    """

    hidden: Hidden
    features: Float[Array, "B N F"] | None
    block: Block


class Before(NamedTuple):
    """Uncommitted tokens that a block attends to: the upper levels of a tree that a draft model grows.

    Attributes:
        block: what the layers keep of them, leaves [B, C - N, ...].
        positions: int32 [B, C - N]. Of these tokens in their texts.
    """

    block: Block
    positions: Positions


class Target(NamedTuple):
    """A model as pure functions of its parameters.

    Attributes:
        config: sizes of the model.
        embed: (params, tokens int32 [B, N]) -> [B, N, M].
        forward: (params, x [B, N, M], positions int32 [B, N], mask, cache, page_table, prefix_length, *, features,
            before, ragged) -> `ForwardOutput`. `mask`: `specjax_kernels.CAUSAL`, or packed ancestor bits [B, N, W].
            `features`: see `specjax.drafters.base`. `before`: `Before` or None; its keys are the first C - N bits of
            the mask. `ragged`: `Ragged` or None; how many tokens of each row count.
        unembed: (params, hidden [..., M], ids=None, *, capped=True) -> float32 logits [..., V]. `ids`: int32 [W], the
            tokens whose logits are wanted, [..., W]; None: all. `capped`: with the config's soft cap.
        pages: a pytree of `specjax.cache.PageSpec`: what the layers keep of each token.
        norm_offset: norms multiply by this + their weight.
        ragged: whether `forward` can leave out the padding of rows of different lengths.
    """

    config: ModelConfig
    embed: Callable[..., Hidden]
    forward: Callable[..., ForwardOutput]
    unembed: Callable[..., Float32[Array, "... V"]]
    pages: Any
    norm_offset: float = 0.0
    ragged: bool = False
