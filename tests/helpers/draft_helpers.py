"""Small draft heads and models for tests, and what their caches must hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from distil import distilled, pair_model
from oracle import Sampling
from toy_models import Runner, Toy, tiny_llama

from specjax.config import HeadConfig, RopeConfig
from specjax.drafters import Drafter, StandaloneParams, TreeShape, eagle_drafter, standalone_drafter
from specjax.models.draft_head import init_head_params, with_token_map

LONGEST = 96  # tokens of a text
MAP = np.random.default_rng(5).permutation(48)[:40].astype(np.int32)
"""A token map of the pair model."""


def noisy(toy: Toy) -> StandaloneParams:
    """A draft model: the target with noise in its weights, which is right often, but not always."""
    rng = np.random.default_rng(1)

    def moved(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(np.asarray(leaf) + rng.normal(0, 0.05, leaf.shape).astype(np.float32))

    return StandaloneParams(jax.tree.map(moved, toy.params))


@functools.cache
def right_often(kind: str) -> tuple[Toy, Any, Callable[..., Drafter]]:
    """A target, the parameters of a draft that is right often, and a function from a tree's shape to the drafter.

    `kind`: standalone, eagle, eagle3 or mtp; "eagle map": with a token map.
    """
    if kind == "standalone":
        toy = tiny_llama(3)
        return toy, noisy(toy), functools.partial(standalone_drafter, toy.target, toy.target)
    toy, (config, params) = pair_model(), distilled(kind.removesuffix(" map"))
    if kind.endswith("map"):
        config, params = with_token_map(config, params, toy.target, toy.params, MAP)
    return toy, params, functools.partial(eagle_drafter, toy.target, config)


# Caches.


class Drafting(NamedTuple):
    toy: Toy
    drafter: Drafter
    params: Any


@functools.cache
def drafting(kind: str) -> Drafting:
    """A draft of a tiny Llama with trees of six nodes; `kind`: eagle, eagle3 or standalone."""
    toy, shape = tiny_llama(5), TreeShape(3, 3, 6)
    if kind == "standalone":
        return Drafting(toy, standalone_drafter(toy.target, toy.target, shape), noisy(toy))
    aux_layers = (0, 1) if kind == "eagle3" else ()
    config = HeadConfig(kind, 16, 16 * (len(aux_layers) or 1), 24, 4, 2, 8, 1e-5, RopeConfig(), 31, aux_layers)
    params = dict(init_head_params(config, toy.target, jax.random.key(2)))
    params = {name: leaf * 15 if leaf.ndim > 1 else leaf for name, leaf in params.items()}
    return Drafting(toy, eagle_drafter(toy.target, config, shape), params)


def cached(state: Any, pages: Sequence[int] | np.ndarray, row: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The draft's cache of a request: its first `count` slots [count, X], and what its row holds [Y]."""
    cache, *rows = state

    def slots(leaf: jax.Array) -> np.ndarray:
        return np.asarray(leaf)[np.asarray(pages)].reshape(-1, *leaf.shape[2:])[:count].reshape(count, -1)

    return (
        np.concatenate([slots(leaf) for leaf in jax.tree.leaves(cache)], axis=1),
        np.concatenate([np.asarray(leaf)[row].ravel() for leaf in jax.tree.leaves(rows)]),
    )


@functools.cache
def _fresh_runner(kind: str) -> Runner:
    toy, drafter, params = drafting(kind)
    return Runner(toy, drafter, rows=1, pages_a_row=LONGEST, page_size=1, chunk=LONGEST, draft=params)


def from_scratch(kind: str, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """What `cached` must be after this text, whose last token is the root: one prefill of one chunk."""
    runner = _fresh_runner(kind)
    runner.admit(0, text[:-1], Sampling(max_tokens=4))
    runner.prefill([text[:-1]], forced=text[-1])
    return cached(runner.state.draft, runner.table[0], 0, len(text) - 1)
