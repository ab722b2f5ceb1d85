"""What the frozen target says of packed rows: the features a head reads, its hidden state, its likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from specjax.cache import PoolShape, init_cache
from specjax.config import ModelConfig
from specjax.models import make_target
from specjax.models.protocol import Target
from specjax.train.attention import packed_attention, packed_mask
from specjax.train.unroll import Batch, Teacher
from specjax.types import Weights

CHUNK = 512
"""Tokens whose logits over the whole vocabulary exist at one time."""


def training_target(config: ModelConfig, dtype: str) -> Target:
    """The target for packed rows: no pages, attention with a derivative, in the dtype to compute in."""
    return make_target(replace(config, dtype=dtype), backend=packed_attention)


def teach(target: Target, features: tuple[int, ...] | str) -> Callable[[Weights, Batch], Teacher]:
    """(target parameters, batch) -> Teacher, for `jax.jit`."""

    def run(params: Weights, batch: Batch) -> Teacher:
        rows = batch.tokens.shape[0]
        cache = init_cache(target.pages, PoolShape(1, 1))  # `packed_attention` reads no pages
        table, start = jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32)
        output = target.forward(
            params,
            target.embed(params, batch.tokens),
            batch.positions,
            packed_mask(batch.segments),
            cache,
            table,
            start,
            features=features,
        )
        assert output.features is not None
        return Teacher(output.features, output.hidden, _likeliest(target, params, output.hidden))

    return run


def _likeliest(target: Target, params: Weights, hidden: Array) -> Array:
    """argmax of the logits, a chunk of tokens at a time: all of them at once may be gigabytes."""
    rows, length, width = hidden.shape
    flat = hidden.reshape(rows * length, width)
    flat = jnp.pad(flat, ((0, -flat.shape[0] % CHUNK), (0, 0))).reshape(-1, CHUNK, width)
    top = jax.lax.map(lambda part: jnp.argmax(target.unembed(params, part), axis=-1).astype(jnp.int32), flat)
    return top.reshape(-1)[: rows * length].reshape(rows, length)
