"""`tree_attention` as a decoder calls it: one program of several layers, each with its own pool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from specjax_kernels import tree_attention
from specjax_kernels.specs import Spec


def chain(implementation: str, options: dict[str, Any]) -> Any:
    """`chain_of` an implementation of `tree_attention`."""
    return chain_of(functools.partial(tree_attention, **options, implementation=implementation))


def chain_of(attend: Callable[..., jax.Array]) -> Any:
    """jitted (q, k_block, v_block, pools, rest) -> q: the queries of one call are made from the output of the one
    before. `pools`: (k_pages, v_pages or None) of each layer."""

    @jax.jit
    def run(q, k_block, v_block, pools, rest):
        for k_pages, v_pages in pools:
            out = attend(q, k_block, v_block, k_pages, v_pages, *rest)
            q = q + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - out.shape[-1])))
        return q

    return run


def copies(k_pages: jax.Array, v_pages: jax.Array | None, layers: int) -> list[tuple[jax.Array, jax.Array | None]]:
    """A pool for each layer."""
    return [(k_pages + 0, None if v_pages is None else v_pages + 0) for _ in range(layers)]


def program(spec: Spec, implementation: str, layers: int) -> Callable[[], jax.Array]:
    """One jitted call of `layers` chained attentions, with its inputs bound."""
    (q, k_block, v_block, k_pages, v_pages, *rest), options = spec.arguments()
    pools, run = copies(k_pages, v_pages, layers), chain(implementation, options)
    return lambda: run(q, k_block, v_block, pools, rest)
