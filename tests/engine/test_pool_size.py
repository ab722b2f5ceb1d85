"""The size of the pool, beside weights and the temporaries of the largest program."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from toy_models import tiny_llama

from specjax.cache import PoolShape
from specjax.drafters import Ngram, Params, Speculation, make_speculation
from specjax.engine import EngineConfig
from specjax.engine.config import layout
from specjax.engine.memory import pool_tokens, room_beside, temporary_bytes
from specjax.models.target import Target
from specjax.state import init_state


def with_width(speculation: Speculation, width: int) -> Speculation:
    return speculation._replace(drafter=speculation.drafter._replace(width=width))


def test_pool_leaves_room_for_temporaries(monkeypatch):
    """A GPU of 200 MB. JAX has taken three quarters, and weights and pool may use half. The largest program's
    temporaries must fit beside both into what JAX has taken."""
    toy = tiny_llama(5)
    target, params = toy.target, Params(toy.params)
    model = target.config
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 150_000_000, "bytes_in_use": 20_000_000})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    config = EngineConfig(max_running_requests=64, page_size=16, mem_fraction=0.5)

    def tokens(speculation: Speculation, target: Target = target, config: EngineConfig = config) -> int:
        return pool_tokens(target, config, 1 << 30, "gpu", speculation, params)

    automatic = with_width(make_speculation(Ngram(capacity=1024)), 64)
    a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4 + 12 * 4 // 16
    assert tokens(automatic) == 80_000_000 // a_token
    # 64 trees of 64 nodes that were asked for; 50 MB beside them are more than half of the device leaves.
    explicit = automatic._replace(explicit_width=True)
    wide = target._replace(config=replace(model, vocab_size=2000))
    _, buckets = layout(config, 1 << 30, 1 << 30, "gpu", explicit)
    reserved = temporary_bytes(wide, explicit.drafter.features, buckets, "gpu")
    assert reserved > 2.5 * 64 * 64 * 2000 * 4 > 50_000_000
    state = jax.eval_shape(lambda: init_state(params, wide, explicit.drafter, rows=64, pool=PoolShape(1, 16)))
    rest = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) - 16 * a_token
    assert rest > 64 * 2000 and tokens(explicit, wide) == (130_000_000 - reserved - rest) // a_token
    assert room_beside({"pool": np.zeros(1_000_000, np.int8)}) == 129_000_000
    large = with_width(explicit, 512)
    with pytest.raises(
        ValueError,
        match=r"no memory is left .* 0\.02 of 0\.20 GB .*mem_fraction 0\.5; .* program take 0\.\d+ GB; "
        r"give a higher fraction, .*\(64\).*\(512\)",
    ):
        tokens(large, wide)
    # A size that is given must leave the same room.
    given = replace(config, max_total_tokens=100_000_000 // a_token)
    assert tokens(automatic, config=given) == given.max_total_tokens
    with pytest.raises(
        ValueError, match=r"^EngineConfig.max_total_tokens \d+ takes 0\.10 GB .* 0\.\d+ GB, but 0\.13 GB are free"
    ):
        tokens(large, wide, given)
    too_many = replace(config, max_total_tokens=200_000_000 // a_token)
    with pytest.raises(ValueError, match=r"takes 0\.20 GB .*, but 0\.13 GB are free; give fewer tokens"):
        tokens(automatic, config=too_many)
