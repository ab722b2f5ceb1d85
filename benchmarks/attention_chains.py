"""`tree_attention` as a decoder calls it: one program of several layers, each with its own pool."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from specjax_kernels import tree_attention
from specjax_kernels.specs import Spec

CACHES = 2**28
"""Bytes of keys and values that are gone through before any is read again: several times a GPU's largest cache."""


def enough_layers(spec: Spec) -> int:
    """Calls in one program, on a GPU: more where one is short, so that the host is not what is timed."""
    return 4 if spec.bytes_read > 2**24 else 16


def enough_sets(spec: Spec, layers: int) -> int:
    """Sets of pools, on a GPU, that together no cache holds. One on a CPU."""
    return 1 if jax.default_backend() == "cpu" else max(1, -(-CACHES // (layers * spec.bytes_read)))


def chain(implementation: str, options: dict[str, Any]) -> Any:
    """`chain_of` an implementation of `tree_attention`."""
    return chain_of(functools.partial(tree_attention, **options, implementation=implementation))


def chain_of(attend: Callable[..., jax.Array]) -> Any:
    """jitted (q, k_block, v_block, pools, rest) -> q: the queries of one call are made from the output of the one
    before. `pools`: (k_pages, v_pages or None) of each layer."""
    attend = jax.jit(attend)  # lowered once, not once a layer: a kernel takes a third of a second

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


def inputs_of(args: Sequence[Any], layers: int, sets: int) -> list[tuple[Any, ...]]:
    """What a chain takes, from the arguments of one call: `sets` times the same, each time in other pools."""
    q, k_block, v_block, k_pages, v_pages, *rest = args
    return [(q, k_block, v_block, copies(k_pages, v_pages, layers), rest) for _ in range(sets)]


def rotating(run: Callable[..., jax.Array], inputs: Sequence[tuple[Any, ...]]) -> Callable[[], jax.Array]:
    """Calls of `run`, each with the next one of the inputs, round and round."""
    turn = itertools.cycle(inputs)
    return lambda: run(*next(turn))


def program(spec: Spec, implementation: str, layers: int, sets: int = 1) -> Callable[[], jax.Array]:
    """One jitted call of `layers` chained attentions, with its inputs bound."""
    args, options = spec.arguments()
    return rotating(chain(implementation, options), inputs_of(args, layers, sets))
