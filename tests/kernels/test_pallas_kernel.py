"""The Pallas kernel beyond the specs: splits, tiles, chunks of a prefill, and what it asks a GPU for."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import launched
from specjax_kernels import INACTIVE, attention, pack_bits, pallas_triton, tree_attention
from specjax_kernels.attention import Call
from specjax_kernels.specs import Spec, named

P = 40


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@functools.cache
def compiled(spec: Spec, launch: tuple[int, int, int]):
    """Not named by the seed or the lengths, which are arguments."""
    _, options = spec.arguments()

    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pallas_triton, "launch_for", launched(*launch))
            return pallas_triton.tree_attention(Call(*args, **options))

    return jax.jit(run)


def expected(args, options) -> np.ndarray:
    return np.asarray(_reference(tuple(options.items()))(*args))


@functools.cache
def _reference(options: tuple[tuple[str, Any], ...]):
    return jax.jit(functools.partial(tree_attention, **dict(options), implementation="reference"))


def fixed_pool(spec: Spec, seed: int):
    """The spec's arguments with P pages, whatever the lengths are, so that one program serves them all."""
    args, options = spec.arguments(seed)
    pool = [
        None if pages is None else jnp.pad(pages, ((0, P - spec.P), (0, 0), (0, 0), (0, 0)), constant_values=np.nan)
        for pages in args[3:5]
    ]
    table = jnp.where(args[5] >= spec.P, P, args[5])
    return (*args[:3], *pool, table, *args[6:]), options


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=st.data())
def test_random_shapes_lengths_and_splits(data: st.DataObject) -> None:
    """Every slot that must not be read holds NaN. Few shapes, many lengths, tables, trees and holes."""
    shape = data.draw(
        st.sampled_from(
            [
                {"N": 1, "C": 1, "mask": "causal"},
                {"N": 9, "C": 9, "mask": "tree"},
                {"N": 4, "C": 37, "mask": "tree", "latent": True, "Ev": 5},
                {"N": 20, "C": 20, "mask": "causal", "window": 7},
                {"N": 5, "C": 40, "mask": "random", "window": 9, "softcap": 3.0},
            ]
        ),
        "shape",
    )
    launch = data.draw(st.sampled_from([(16, 16, 1), (16, 16, 4), (32, 32, 2)]), "rows, tokens, splits")
    lengths = st.one_of(st.just(INACTIVE), st.integers(0, 64))
    prefix = tuple(data.draw(st.lists(lengths, min_size=2, max_size=2), "prefix"))
    fixed = {"H": 4, "K": 2, "E": 8, "T": 16, "S": 4} | shape
    spec = Spec("random", prefix, holes=data.draw(st.booleans(), "holes"), **fixed)
    args, options = fixed_pool(spec, data.draw(st.integers(0, 2**16), "seed"))
    run = compiled(Spec("random", (0, 0), **fixed), launch)
    np.testing.assert_allclose(run(*args), expected(args, options), rtol=0, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_splits_agree(dtype: str, splits: int) -> None:
    spec = Spec("splits", (0, 5, 130, 512), N=5, C=5, H=6, K=2, E=24, T=32, S=16, mask="tree", dtype=dtype)
    args, options = spec.arguments()
    out = np.asarray(compiled(spec, (16, 16, splits))(*args), np.float32)
    atol = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}[dtype]
    np.testing.assert_allclose(out, expected(args, options).astype(np.float32), rtol=0, atol=atol)


def test_a_wide_chunk_of_a_prefill() -> None:
    """Several tiles of rows, each with fewer trips over the block than the next."""
    spec = Spec("chunk", (33, 0), N=150, C=150, H=4, K=2, E=16, T=10, S=4)
    args, options = spec.arguments()
    out = compiled(spec, (64, 32, 1))(*args)
    np.testing.assert_allclose(out, expected(args, options), rtol=0, atol=1e-5)


def test_rows_that_are_inactive_write_zeros_over_what_was_there() -> None:
    spec = Spec("inactive", (INACTIVE, 40, INACTIVE), N=3, C=3, H=4, K=2, E=16, T=12, S=4)
    args, _ = spec.arguments()
    for launch in ((16, 16, 1), (16, 16, 4)):
        out = np.asarray(compiled(spec, launch)(*args))
        assert (out[0] == 0).all() and (out[2] == 0).all() and (out[1] != 0).all()


def test_a_length_beyond_the_table_reads_no_further() -> None:
    """An error of the caller's; memory that is not the row's stays unread."""
    spec = Spec("beyond", (16,), N=1, C=1, H=2, K=1, E=16, T=4, S=4)
    args, _ = spec.arguments()
    longer = (*args[:6], args[6] + 100, *args[7:])
    assert (np.asarray(compiled(spec, (16, 16, 1))(*longer)) == np.asarray(compiled(spec, (16, 16, 1))(*args))).all()


def test_two_runs_are_bitwise_equal() -> None:
    spec = Spec("again", (200, 512), N=5, C=5, H=4, K=2, E=16, T=32, S=16, mask="tree")
    args, _ = spec.arguments()
    run = compiled(spec, (16, 16, 8))
    assert (np.asarray(run(*args)) == np.asarray(run(*args))).all()


@pytest.mark.parametrize("cap", [0.01, 30.0, 1e5, *(pytest.param(cap, marks=pytest.mark.slow) for cap in (1.0, 1e3))])
def test_soft_caps_of_any_size(cap: float) -> None:
    """A large one is nearly no cap; its tangent must not cancel near 0."""
    spec = Spec("cap", (9, 200), N=7, C=7, H=4, K=2, E=16, T=52, S=4, mask="tree", softcap=cap)
    args, options = spec.arguments()
    out = compiled(spec, (16, 16, 1))(*args)
    np.testing.assert_allclose(out, expected(args, options), rtol=0, atol=1e-5)


def test_what_is_too_wide_is_refused() -> None:
    spec = Spec("wide", (4,), N=1, C=1, H=1, K=1, E=300, T=1, S=4)
    args, options = spec.arguments()
    with pytest.raises(NotImplementedError, match="up to 256 wide for keys and 256 for values in float32, got E = 300"):
        tree_attention(*args, **options, implementation="pallas")
    half, more = Spec("wide", (4,), N=1, C=1, H=1, K=1, E=520, T=1, S=4, dtype="bfloat16").arguments()
    with pytest.raises(NotImplementedError, match=r"1024 wide for keys and 512 for values in bfloat16, got .*520"):
        tree_attention(*half, **more, implementation="pallas")
    wide = jax.jit(functools.partial(tree_attention, **options, implementation="xla"))
    assert np.isfinite(np.asarray(wide(*args))).all()


@pytest.mark.parametrize("name", ["decode", "tree", "latent-tree", "window-tree-holes", "bfloat16", "many-chunks"])
def test_lowered_for_a_gpu(name: str) -> None:
    """Two custom calls at most, and nothing else that costs: no copy of pages, no gather, no loop."""
    args, options = named(name).arguments()
    function = functools.partial(tree_attention, **options, implementation="pallas")
    with on_a_gpu():
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = text.count("__gpu$xla.gpu.triton")
    assert calls == (2 if name == "many-chunks" else 1)
    for operation in ("gather", "while", "dot_general", "concatenate", "reduce"):
        assert f"stablehlo.{operation}" not in text, operation


def on_a_gpu():
    """From jax 0.11 on, lowering for a GPU that is not there needs to be told which."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        import contextlib

        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    device = AbstractDevice("NVIDIA H200", None, "cuda")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


@pytest.mark.parametrize(("queries", "window"), [(1, None), (2, None), (2, 9)])
def test_earlier_keys_are_read_from_one_array_with_the_block(queries: int, window: int | None) -> None:
    """A level of a draft: the packed array begins with tokens of upper levels, which have keys and values alone."""
    rng = np.random.default_rng(queries)
    batch, earlier, kv_heads, group, size = 2, 3, 2, 2, 16

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    qkv = normal(batch, queries, kv_heads, group + 2, size)
    before = normal(batch, earlier, kv_heads, size), normal(batch, earlier, kv_heads, size)
    pages = normal(6, 4, kv_heads, size), normal(6, 4, kv_heads, size)
    table, length = jnp.array([[0, 2, 4], [5, 1, 6]], jnp.int32), jnp.array([11, 6], jnp.int32)
    positions = length[:, None] + earlier + jnp.arange(queries, dtype=jnp.int32)[None, :]
    where = length[:, None] + jnp.arange(earlier, dtype=jnp.int32)[None, :]
    own = np.broadcast_to(np.eye(queries, dtype=bool), (batch, queries, queries))
    visible = np.concatenate([rng.random((batch, queries, earlier)) < 0.6, own], axis=2)
    found = [
        attention(
            qkv, *pages, table, length, positions, pack_bits(jnp.asarray(visible)), before=before,
            before_positions=where, scale=0.25, window=window, implementation=name,
        )
        for name in ("pallas", "reference")
    ]  # fmt: skip
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    np.testing.assert_array_equal(pack_bits(visible), pack_bits(jnp.asarray(visible)))
