"""Memory of real programs: the pool is updated in place, and temporaries are small.

XLA:CPU silently copies a pool when a write could come before a read.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import tiny_llama

from specjax import Params, PoolShape, PrefillInput, StepInput, Steps, init_state, make_steps, new_row
from specjax.config import BlockConfig, HeadConfig, RopeConfig
from specjax.drafters import make_speculation, options_of
from specjax.models.draft_head import init_head_params
from specjax.state import DecodeState

POOL = PoolShape(pages=8192, page_size=16)
ROWS, BATCH, TABLE, CHUNK = 4, 2, 16, 32
# Two layers, two key/value heads, 16 wide, float32: 512 bytes a token, 64 MB in all.
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 64}

# Its one layer has two key/value heads, too: a third of what both models hold.
HEAD = {
    "hidden_size": 32, "feature_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "norm_epsilon": 1e-5, "rope": RopeConfig(), "vocab_size": LLAMA["vocab_size"],
}  # fmt: skip
KINDS = {
    "EAGLE3": HeadConfig("eagle3", **HEAD | {"aux_layers": (0, 1), "feature_size": 64, "own_head": True}),
    "DFLASH": BlockConfig(
        **HEAD, aux_layers=(0,), block=4, mask_token=0, from_anchor=False, windows=(None,), causal=(False,)
    ),
}
CHAIN, TREE = {"steps": 3}, {"steps": 3, "topk": 3, "nodes": 10}


def case(algorithm: str, **options) -> tuple[Params, DecodeState, Steps]:
    toy = tiny_llama(**LLAMA)
    head = KINDS.get(algorithm)
    draft = None if head is None else init_head_params(head, toy.target, jax.random.key(0))
    drafter = make_speculation(options_of(algorithm, **options), target=toy.target, head=head).drafter
    params = Params(toy.params, draft)
    state = init_state(params, toy.target, drafter, rows=ROWS, pool=POOL)
    return params, state, make_steps(toy.target, drafter)


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def pools(state) -> list:
    """The target's pool, and the draft's if it has one; the state of a block head is its pool."""
    draft = state.draft if type(state.draft) is tuple else None
    return [state.cache, *([state.draft.cache] if hasattr(state.draft, "cache") else [draft] if draft else [])]


def step_input(tables) -> StepInput:
    arrays = (np.arange(BATCH, dtype=np.int32), np.asarray(tables, np.int32), np.ones(BATCH, bool))
    return StepInput(*map(jnp.asarray, arrays))


def prefill_input(step: StepInput, texts) -> PrefillInput:
    tokens = np.zeros((len(texts), CHUNK), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    length = np.array([len(text) for text in texts], np.int32)
    return PrefillInput(*step[:3], *map(jnp.asarray, (tokens, length, np.full(len(texts), -1, np.int32))))


def some_pages() -> np.ndarray:
    """Tables of two requests that share no page."""
    return np.random.default_rng(0).permutation(POOL.pages)[: BATCH * TABLE].reshape(BATCH, TABLE)


@pytest.mark.parametrize(
    ("drafter", "flags", "which"),
    [
        ("NGRAM", {}, "speculate"),
        ("EAGLE3", TREE, "speculate"),
        ("DFLASH", CHAIN, "prefill"),
    ],
)
@pytest.mark.optimized
def test_no_step_copies_the_pool(drafter, flags, which):
    """The whole state is aliased, temporaries are small, and a call reuses the same buffers."""
    params, state, steps = case(drafter, **flags)
    target = nbytes(state.cache)
    assert target == 64 * 2**20
    pool = nbytes(pools(state))
    assert pool == target + (32 * 2**20 if drafter in KINDS else 0)
    inputs = step_input(some_pages())
    if which == "prefill":
        inputs = prefill_input(inputs, [range(CHUNK), range(CHUNK)])
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache)]
    for slot in range(BATCH):
        row = jax.tree.map(jnp.asarray, new_row(LLAMA["vocab_size"], limit=9, prompt=range(3)))
        state = steps.admit(state, jnp.int32(slot), row)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache)] == pointers, "admission copies"
    step = getattr(steps, which).lower(params, state, inputs).compile()
    memory = step.memory_analysis()
    print(f"{drafter} {which}: {memory.temp_size_in_bytes / 2**20:.2f} MB temporary")
    assert memory.alias_size_in_bytes >= nbytes(state) >= pool
    assert memory.temp_size_in_bytes < target / 10, "16 MB is one layer's keys"

    old = jax.tree.leaves(pools(state))
    before = [leaf.unsafe_buffer_pointer() for leaf in old]
    state, _ = step(params, state, inputs)
    assert all(leaf.is_deleted() for leaf in old)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools(state))] == before
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


FREED_AND_USED_AGAIN = """
import ctypes
import resource

from specjax.engine.memory import keep_freed_memory


libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        memory = libc.malloc(48 << 20)
        ctypes.memset(memory, 1, 48 << 20)
        libc.free(memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


before, kept = faults(), keep_freed_memory()
faults()
print(kept, before, faults())
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it sets what glibc's malloc does")
@pytest.mark.parametrize("setting", ["", "MALLOC_TRIM_THRESHOLD_=1000000", "GLIBC_TUNABLES=glibc.malloc.mxfast=0"])
def test_freed_memory_is_reused(setting):
    """48 MB are 12,288 pages. The user's own settings of malloc are not changed."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= dict([setting.split("=", 1)] if setting else [])
    command = [sys.executable, "-c", FREED_AND_USED_AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    reused, before, after = done.stdout.split()
    assert reused == str(not setting) and int(before) > 20 * 1000
    assert (int(after) < 1000) == (not setting)
