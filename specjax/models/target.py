"""The interface of a target model: three pure functions and a config.

Prefill, plain decoding and tree verification are one operation, `forward`: N new tokens attend to committed pages and
to one another under a mask. It returns the block's keys and values and does not write pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32
from specjax_kernels import CAUSAL

from specjax.cache import Block, Cache, Hidden, PageTable, PerRequest, PoolShape, Positions, Tokens, Weights, init_cache
from specjax.config import ModelConfig


class ForwardOutput(NamedTuple):
    """Results of `Target.forward` for N tokens of each of B requests.

    Attributes:
        hidden: [B, N, M]. Hidden states after the final norm.
        features: [B, N, F]. The requested features; None: none requested.
        block: cache entries of the tokens, leaves [B, N, ...].
    """

    hidden: Hidden
    features: Float[Array, "B N F"] | None
    block: Block


class Before(NamedTuple):
    """Uncommitted tokens that a block attends to: the upper levels of a tree that a draft model grows.

    Attributes:
        block: cache entries of these tokens, leaves [B, C - N, ...].
        positions: int32 [B, C - N]. Positions of these tokens.
    """

    block: Block
    positions: Positions


class Target(NamedTuple):
    """A model as pure functions of its parameters.

    Attributes:
        config: sizes of the model.
        embed: (params, tokens int32 [B, N]) -> [B, N, M], or more channels: what `forward` reads. The first M are the
            embedding.
        forward: (params, x [B, N, M], positions int32 [B, N], mask, cache, page_table, prefix_length, *, features,
            before, ragged) -> `ForwardOutput`. `mask`: `specjax_kernels.CAUSAL`, or packed ancestor bits [B, N, W].
            `features`: see `specjax.drafters.base`. `before`: `Before` or None; its keys are the first C - N bits of
            the mask. `ragged`: `Ragged` or None; the numbers of tokens in the rows.
        unembed: (params, hidden [..., M], ids=None, *, capped=True) -> float32 logits [..., V]. `ids`: int32 [W],
            compute the logits of these tokens only, [..., W]. `capped`: apply the config's soft cap.
        pages: a pytree of `specjax.cache.PageSpec`, the cache entries of a token, and of `specjax.cache.RowState`s.
        norm_offset: norms multiply by this + their weight.
        ragged: True if `forward` can omit the padding of rows of different lengths.
    """

    config: ModelConfig
    embed: Callable[..., Hidden]
    forward: Callable[..., ForwardOutput]
    unembed: Callable[..., Float32[Array, "... V"]]
    pages: Any
    norm_offset: float = 0.0
    ragged: bool = False


def no_past(target: Target, rows: int) -> tuple[Cache, PageTable, PerRequest]:
    """An empty cache, a page table and prefix lengths for B = `rows` texts."""
    return init_cache(target.pages, PoolShape(1, 16), rows), jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32)


def hidden_states(
    target: Target, params: Weights, tokens: Tokens, features: tuple[int, ...] | Literal["final"] = "final"
) -> Float[Array, "B N F"]:
    """Features of whole texts, as `Observation.features` holds them. Can be jitted.

    Args:
        params: the target's, `Params.target`.
        tokens: int32 [B, N]. Whole texts. Shorter texts may be padded at the end with any token id: attention is
            causal, so padding does not change earlier positions.
        features: "final": the hidden states after the final norm, from which `Target.unembed` computes logits. A tuple
            of layers, 0-based: their output residual streams, concatenated.

    Returns:
        [B, N, F] in the dtype of the target's config. F is M, times the number of layers if layers are given.

    Raises:
        ValueError: the target has no such layer, or fewer than N positions.
    """
    layers, limit = target.config.num_layers, target.config.max_positions
    selected = features if features == "final" else tuple(features)
    if not selected or (selected != "final" and not set(selected) <= set(range(layers))):
        raise ValueError(f'features must be "final" or layers from 0 to {layers - 1}, got {features!r:.60}')
    if tokens.shape[1] > limit:
        raise ValueError(f"the texts have {tokens.shape[1]} tokens, and the model {limit} positions")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    past = no_past(target, tokens.shape[0])
    output = target.forward(params, target.embed(params, tokens), positions, CAUSAL, *past, features=selected)
    assert output.features is not None
    return output.features
