"""The frozen target's forward over packed rows: features for the head, hidden states, likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from specjax.cache import PoolShape, init_cache
from specjax.config import ModelConfig
from specjax.models import make_target
from specjax.models.target import Target
from specjax.train.attention import packed_attention, packed_mask
from specjax.train.unroll import Batch, Teacher
from specjax.types import Weights

CHUNK = 512
"""Tokens whose full logits exist at one time."""


def training_target(config: ModelConfig, dtype: str) -> Target:
    """The target for packed rows: no pages, differentiable attention, computing in `dtype`."""
    return make_target(replace(config, dtype=dtype), backend=packed_attention)


def teach(target: Target, features: tuple[int, ...] | str) -> Callable[[Weights, Batch], Teacher]:
    """(target parameters, batch) -> Teacher, for `jax.jit`."""

    def run(params: Weights, batch: Batch) -> Teacher:
        rows = batch.tokens.shape[0]
        cache = init_cache(target.pages, PoolShape(1, 1))  # `packed_attention` reads no pages
        table, start = jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32)
        embedded, mask = target.embed(params, batch.tokens), packed_mask(batch.segments)
        output = target.forward(params, embedded, batch.positions, mask, cache, table, start, features=features)
        assert output.features is not None
        return Teacher(output.features, output.hidden, _likeliest(target, params, output.hidden))

    return run


def _likeliest(target: Target, params: Weights, hidden: Array) -> Array:
    """argmax of the logits, computed in chunks: the logits of all tokens may be gigabytes."""
    rows, length, width = hidden.shape
    flat = hidden.reshape(rows * length, width)
    flat = jnp.pad(flat, ((0, -flat.shape[0] % CHUNK), (0, 0))).reshape(-1, CHUNK, width)
    top = jax.lax.map(lambda part: jnp.argmax(target.unembed(params, part), axis=-1).astype(jnp.int32), flat)
    return top.reshape(-1)[: rows * length].reshape(rows, length)
