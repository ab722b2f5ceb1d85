"""Caches of leaves with any shape and dtype, and the dependency of writes on reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import PageSpec, PoolShape, bytes_per_token, commit, init_cache, pool_shape, take_path
from specjax.drafters.base import Context
from specjax.sampling import sampling_row
from specjax.tree import NO_TOKEN

SPECS = (
    {"latent": PageSpec((7,), "bfloat16", (None,)), "scale": PageSpec((), "float16", ())},
    {"codes": PageSpec((3, 2), "int8", ("kv_heads", None))},
)
POOL = PoolShape(pages=10, page_size=4)


def block(batch: int, width: int) -> object:
    def fill(spec: PageSpec) -> jax.Array:
        count = batch * width * int(np.prod(spec.shape, dtype=int))
        return (1 + jnp.arange(count) % 120).astype(spec.dtype).reshape(batch, width, *spec.shape)

    return jax.tree.map(fill, SPECS)


def test_shapes_and_bytes():
    cache = init_cache(SPECS, POOL)
    assert pool_shape(cache) == POOL
    assert cache[0]["latent"].shape == (10, 4, 7) and cache[0]["latent"].dtype == jnp.bfloat16
    assert SPECS[1]["codes"].page_axes == (None, None, "kv_heads", None)
    assert bytes_per_token(lambda pool: init_cache(SPECS, pool)) == 7 * 2 + 2 + 6


def test_commit_of_a_path():
    """The example of `commit`; a second request writes nothing."""
    nodes, path = block(2, 5), jnp.array([[0, 2, 4, 0], [0, 1, 0, 0]], jnp.int32)
    rows = take_path(nodes, path)
    table = jnp.array([[9, 2, 5], [3, 10, 10]], jnp.int32)
    start, length = jnp.array([6, 1], jnp.int32), jnp.array([3, 0], jnp.int32)
    cache = commit(init_cache(SPECS, POOL), rows, table, start, length, after=())
    for leaf, source in zip(jax.tree.leaves(cache), jax.tree.leaves(nodes), strict=True):
        leaf, source = np.array(leaf, np.float32), np.array(source, np.float32)
        for place, node in {(2, 2): 0, (2, 3): 2, (5, 0): 4}.items():
            np.testing.assert_array_equal(leaf[place], source[0, node])
            leaf[place] = 0
        assert not leaf.any()


def test_committed_tokens_of_a_context():
    pages = jnp.full(POOL, 99, jnp.int32)
    table, length = jnp.array([[9, 2, 10], [3, 10, 10]], jnp.int32), jnp.array([6, 1], jnp.int32)
    text = jnp.array([[10, 11, 12, 13, 14, 15], [20, 0, 0, 0, 0, 0]], jnp.int32)
    pages = commit(pages, text, table, jnp.zeros(2, jnp.int32), length, after=())
    row = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), sampling_row(31))
    slots = jnp.arange(2, dtype=jnp.int32)
    salt = jnp.zeros(2, jnp.uint32)
    context = Context(slots, length, table, jnp.array([16, 21], jnp.int32), jnp.ones(2, bool), salt, row, pages)
    assert context.room == 12
    everything = context.committed(jnp.arange(-1, context.room, dtype=jnp.int32)[None, :])
    none = NO_TOKEN
    assert everything.tolist() == [[none, *range(10, 16), *[none] * 6], [none, 20, *[none] * 11]]
    assert context.suffix(3).tolist() == [[14, 15, 16], [none, 20, 21]]
    assert context.suffix(1).tolist() == [[16], [21]]
    with pytest.raises(ValueError, match="reads_tokens=True"):
        context._replace(tokens=None).suffix(2)
