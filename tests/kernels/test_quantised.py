"""Quantised weights: every implementation against products with the weights that numpy decodes."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_leaves import E2M1, FORMATS, IN_FEW_BITS, decoded, leaf_of
from specjax_kernels import Quantised, dequantise, embed, gpu_quantised, linear, quantise, unembed
from specjax_kernels.cpu import object_code
from specjax_kernels.cpu import quantised as cpu_kernels
from specjax_kernels.linear import by_channel, by_dequantising, dot, products_of_rows
from specjax_kernels.quantised import KINDS, check, pack

OUT, DEPTH = (3, 2, 7), 512


@functools.cache
def read(name: str) -> tuple[Quantised, np.ndarray]:
    """A leaf and its weights by numpy."""
    leaf = leaf_of(name, OUT, DEPTH)
    return leaf, decoded(leaf)


def inputs(rows: int, depth: int = DEPTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(rows).standard_normal((1, rows, depth), np.float32))


def assert_product(output, x, weights: np.ndarray, once: float = 0.0) -> None:
    """The error is relative to the sum of absolute terms; `once`: relative error of a rounding of the result."""
    x = np.asarray(x, np.float64)
    exact = np.einsum("bnm,...m->bn...", x, weights)
    terms = np.einsum("bnm,...m->bn...", np.abs(x), np.abs(weights))
    assert output.shape == exact.shape
    assert (np.abs(np.asarray(output, np.float64) - exact) <= 2e-6 * terms + once * np.abs(exact) + 1e-30).all()


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_weights(name):
    leaf, weights = read(name)
    assert check(leaf) is leaf and leaf.shape == weights.shape and leaf.out == OUT and leaf.depth == DEPTH
    exact = dequantise(leaf)
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(exact), weights, rtol=3e-7, atol=3e-7 * np.abs(weights).max())
    assert (dequantise(leaf, jnp.bfloat16) == exact.astype(jnp.bfloat16)).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 9, 29])
def test_products(name, rows):
    leaf, weights = read(name)
    x = inputs(rows)
    product = jax.jit(lambda x, w: linear(x, w))
    text = product.lower(x, leaf).as_text()
    assert text.count("custom_call @specjax_quantised") == 1
    assert ("_blocks(" in text) == (rows > cpu_kernels.MOST_ROWS)
    assert_product(product(x, leaf), x, weights)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "MXFP4", "fp8 per output", "float16", "bfloat16"])
def test_bits_of_a_row_do_not_depend_on_the_others(name):
    """Of a few rows, and of many."""
    leaf, weights = read(name)
    x = inputs(90)
    product = jax.jit(lambda x, w: linear(x, w))
    alone = np.concatenate([np.asarray(product(x[:, i : i + 1], leaf)) for i in range(16)], axis=1)
    assert_product(alone, x[:, :16], weights)
    for rows in (*range(2, 10), 16):
        np.testing.assert_array_equal(np.asarray(product(x[:, :rows], leaf)), alone[:, :rows])
    many = np.asarray(product(x, leaf))
    assert_product(many, x, weights)
    for rows in (17, 28, 29, 43):
        np.testing.assert_array_equal(np.asarray(product(x[:, :rows], leaf)), many[:, :rows])


@pytest.mark.parametrize(
    ("name", "out"), [("Q4_1", (530,)), ("Q6_K", OUT), ("MXFP4", OUT), ("fp8 per tensor", OUT), ("float16", (2, 33))]
)
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 33])
def test_last_rows_of_zeros(name, out, rows):
    """Their results are 0. The rows before them have the bits that they have beside other rows, even if only their
    last input is not 0."""
    leaf, product = leaf_of(name, out, DEPTH), jax.jit(lambda x, w: linear(x, w))
    for filled in sorted({0, 1, rows // 2, rows - 1, rows}):
        x = np.array(inputs(rows))
        x[:, :filled:3, :-1] = 0
        x[:, 1:filled:4] = 0
        x[:, 2:filled:9, 100] = np.nan
        x[:, max(filled - 1, 0), -1] = np.inf
        beside = np.asarray(product(jnp.asarray(x), leaf))
        for zero in (0.0, -0.0):
            x[:, filled:] = zero
            output = np.asarray(product(jnp.asarray(x), leaf))
            np.testing.assert_array_equal(output[:, :filled], beside[:, :filled])
            np.testing.assert_array_equal(output[:, filled:], np.zeros_like(output[:, filled:]))


@pytest.mark.parametrize("out", [(1,), (33,), (530,), (2, 4099)], ids=str)
@pytest.mark.parametrize("name", ["Q4_1", "fp8 per tensor", "float16"])
def test_odd_numbers_of_outputs(name, out):
    """A last output without a neighbour, tiles of unequal size, an odd number of groups."""
    leaf = leaf_of(name, out, 96)
    for rows in (3, 17):
        x = inputs(rows, 96)
        assert_product(linear(x, leaf), x, np.asarray(dequantise(leaf), np.float64))


@pytest.mark.parametrize("groups", [15, 16, 17, 48, 65, 130])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_numbers_of_groups(name, groups):
    """Scales are widened in vectors of 16 in rows with 16 or more, and in blocks of at most 64."""
    leaf = leaf_of(name, (33,), 32 * groups)
    x = inputs(2, 32 * groups)
    assert_product(linear(x, leaf), x, np.asarray(dequantise(leaf), np.float64))


@pytest.mark.parametrize("name", ["Q4_1", "MXFP4"])
def test_processors_without_avx512(name, monkeypatch):
    """Shorter vectors, whose sums have another order; codes of 4 bits are not looked up by a permutation."""
    leaf, weights = read(name)
    some = inputs(3), inputs(8), inputs(16).at[:, 14:].set(0), inputs(29), inputs(40).at[:, 27:].set(0)
    here = [jax.jit(lambda x, w: linear(x, w))(x, leaf) for x in some]
    monkeypatch.setattr(object_code, "has", lambda feature: False)
    monkeypatch.setattr(cpu_kernels.Layout, "name", f"specjax_quantised_elsewhere_{name}")
    there = [jax.jit(lambda x, w: linear(x, w) + 0)(x, leaf) for x in some]
    for x, *both in zip(some, here, there, strict=True):
        for output in both:
            assert_product(output, x, weights)
        np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [2, 257])
def test_half_precision_activations(dtype, rows):
    leaf, weights = read("Q4_1")
    x = jnp.asarray(inputs(rows), dtype)
    output = linear(x, leaf)
    assert output.dtype == dtype
    assert_product(output.astype(jnp.float32), x, weights, once=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("transposed", [False, True])
def test_logits(transposed):
    leaf = leaf_of("Q8_0", (100,), 64)
    x = jnp.asarray(inputs(2, 64), jnp.bfloat16)
    logits = unembed(x, leaf, transposed=transposed)
    assert logits.dtype == jnp.float32
    assert_product(logits, x, np.asarray(dequantise(leaf), np.float64))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_table(name):
    leaf = leaf_of(name, (12,), 512)
    ids = jnp.array([[3, 11, 3], [0, 7, 5]], jnp.int32)
    whole = np.asarray(dequantise(leaf))
    np.testing.assert_array_equal(np.asarray(jax.jit(embed)(leaf, ids)), whole[np.asarray(ids)])
    chosen = check(leaf[ids[0]])
    np.testing.assert_array_equal(np.asarray(dequantise(chosen)), whole[np.asarray(ids[0])])
    x = inputs(2, 512)
    assert_product(unembed(x, chosen), x, whole[np.asarray(ids[0])].astype(np.float64))


@pytest.mark.parametrize("name", ["Q4_1", "fp8 per output"])
@pytest.mark.parametrize("rows", [2, 257])
def test_inputs_of_nan_and_infinity(name, rows):
    leaf, _ = read(name)
    x = inputs(rows).at[0, 0, 5].set(np.nan).at[0, 1, 7].set(np.inf)
    output = np.asarray(linear(x, leaf)).reshape(rows, -1)
    assert np.isnan(output[0]).all() and not np.isfinite(output[1]).any()
    assert np.isfinite(output[2:]).all()


def test_nan_codes_of_fp8():
    leaf = leaf_of("fp8 per output", (4,), 64)
    codes = np.asarray(leaf.codes).view(np.uint8).copy()
    codes[1, 3], codes[2, 40] = 127, 255
    leaf = dataclasses.replace(leaf, codes=codes.view(jnp.float8_e4m3fn))
    for rows in (1, 257):
        output = np.asarray(linear(inputs(rows, 64), leaf))
        assert np.isnan(output[..., 1:3]).all() and np.isfinite(output[..., [0, 3]]).all()


def test_subnormal_scales_and_codes():
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32).view(jnp.float8_e4m3fn)  # the first 8 are subnormal
    for leaf in (
        Quantised(codes, np.full((2, 1), 3e-6, np.float16)),
        Quantised(np.arange(64, dtype=np.int8).reshape(2, 32), np.full((2, 1), 6e-8, np.float16)),
    ):
        x = jnp.eye(32, dtype=jnp.float32)[None, :8]
        np.testing.assert_allclose(np.asarray(linear(x, leaf))[0], decoded(leaf)[:, :8].T, rtol=1e-6)


def test_every_code_and_scale_of_mxfp4_is_exact():
    """Also in bfloat16, on the CPU and in the GPU's kernel. Scale 255 is none; products with 0 count as 0."""
    scale = np.arange(1, 253, dtype=np.uint8)[:, None]  # the largest weight is below 2 ** 128
    leaf = Quantised(np.tile(pack(np.arange(32, dtype=np.uint8) % 16), (len(scale), 1)), scale)
    exact = np.ldexp(np.float64(E2M1 * 2), scale.astype(int) - 127)
    normal = np.abs(exact) >= 2.0**-126  # XLA:CPU flushes smaller numbers to 0
    assert normal[:, 2:8].all() and not normal[0, 1]
    for dtype in (jnp.float32, jnp.bfloat16):
        weights = np.asarray(dequantise(jax.tree.map(jnp.asarray, leaf), dtype), np.float64)
        np.testing.assert_array_equal(weights[normal], exact[normal])
        assert not weights[~normal].any()
        np.testing.assert_array_equal(np.asarray(dequantise(leaf, dtype), np.float64)[normal], exact[normal])
    some = slice(1, 250)
    leaf = Quantised(leaf.codes[some], scale[some])
    x = jnp.eye(32, dtype=jnp.float32)[None]
    for rows in (16, 32):
        np.testing.assert_array_equal(np.asarray(linear(x[:, :rows], leaf))[0], np.float32(exact[some].T[:rows]))
    # XLA, which interprets the kernel, multiplies scales by 2 ** 14 first, so the largest would overflow.
    some = slice(1, 226)
    leaf = jax.tree.map(jnp.asarray, Quantised(leaf.codes[: len(scale[some])], scale[some]))
    kernel = jax.jit(lambda x, w: gpu_quantised.multiply(x, w))(x[0], leaf)
    np.testing.assert_array_equal(np.asarray(kernel), np.float32(exact[some].T))


def test_without_the_cpu_kernel(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "unmet", lambda rows, layout: "as without Numba")
    leaf, weights = read("Q4_1")
    assert "custom_call @specjax" not in jax.jit(lambda x, w: linear(x, w)).lower(inputs(2), leaf).as_text()
    assert_product(linear(inputs(2), leaf), inputs(2), weights)


def test_groups_without_a_kernel():
    """Groups of 24 do not divide into vectors: the weights are dequantised."""
    rng = np.random.default_rng(0)
    leaf = Quantised(rng.integers(-128, 128, (5, 72)).astype(np.int8), rng.random((5, 3), np.float32))
    assert cpu_kernels.layout_of(leaf) is None and not gpu_quantised.takes(1, leaf)
    assert_product(linear(inputs(1, 72), leaf), inputs(1, 72), decoded(leaf))


@pytest.mark.parametrize("name", [*IN_FEW_BITS[:-2], "bfloat16"])
def test_rows_with_their_own_matrices(name):
    """XLA's operations, and the kernel interpreted."""
    leaf, weights = read(name)
    x, ids = inputs(4)[0], jnp.array([2, 0, 2, 1], jnp.int32)
    outputs = [jax.jit(products_of_rows)(x, leaf, ids)]
    if name not in ("GPTQ", "bfloat16"):
        flat = jax.tree.map(lambda a: jnp.asarray(a).reshape(-1, a.shape[-1]), leaf)
        kernel = jax.jit(lambda x, w, ids: gpu_quantised.multiply(x, w, ids=ids, out=math.prod(OUT[1:])))
        outputs.append(kernel(x, flat, ids).reshape(4, *OUT[1:]))
    for output in outputs:
        for row, of_row, index in zip(x, output, ids, strict=True):
            assert_product(of_row[None, None], row[None, None], weights[index])


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_at_load(kind):
    matrix = np.random.default_rng(0).standard_normal((3, 5, 128), np.float32)
    matrix[0, 0] = 0
    leaf = check(quantise(matrix, kind))
    rounded = np.asarray(dequantise(leaf))
    size = sum(array.nbytes for array in jax.tree.leaves(leaf))
    assert size == {"fp8": 15 * 132, "int8": 15 * 132, "int4": 15 * 80}[kind]
    error = np.sqrt(np.mean((rounded - matrix) ** 2))
    assert error < {"fp8": 0.03, "int8": 0.012, "int4": 0.082}[kind]
    assert (rounded[0, 0] == 0).all()
    again = quantise(rounded, kind)
    if kind != "int4":  # quantising again changes nothing
        np.testing.assert_array_equal(np.asarray(again.codes).view(np.uint8), np.asarray(leaf.codes).view(np.uint8))


def test_codes_of_four_bits_as_gguf_stores_them():
    codes = np.arange(64, dtype=np.uint8).reshape(1, 64) % 16
    packed = pack(codes)
    assert packed.shape == (1, 32) and packed[0, 3] == 3 | 3 << 4
    codes[0, 16:32] = 0
    assert pack(codes)[0, 3] == 3 and pack(codes)[0, 19] == 3 | 3 << 4


F4 = np.dtype(np.float32)
REFUSED = {
    "float32": ({"codes": np.zeros((4, 64), F4)}, "codes are uint8"),
    "depth": ({"codes": np.zeros((4, 24), np.uint8), "scale": np.zeros((4, 1), F4)}, "a multiple of 32 inputs"),
    "groups": ({"scale": np.zeros((4, 3), F4)}, "3 scales for 64 inputs"),
    "small groups": ({"scale": np.zeros((4, 4), F4)}, "multiples of 32"),
    "scale": ({"scale": np.zeros((5, 2), F4)}, r"scale must be \[4, 2\], got \[5, 2\]"),
    "scale dtype": ({"scale": np.zeros((4, 2), np.int8)}, "float32 or bfloat16 or float16, got int8"),
    "MXFP4": ({"scale": np.zeros((4, 2), np.uint8), "shift": 8}, "scales of uint8 belong to codes of 4 bits"),
    "no scale": ({"scale": None}, "its scales are missing"),
    "16 bits": ({"codes": np.zeros((4, 64), np.float16)}, "weights in 16 bits have no scales"),
    "offset and shift": ({"offset": np.zeros((4, 2), F4), "shift": 8}, "not both"),
    "rows": ({"rows": 3}, "3 outputs share scales"),
    "super": ({"super_scale": np.zeros((4, 1), np.float16)}, "scale must be uint8 or int8"),
    "inputs": ({"codes": np.zeros((4, 48), np.uint8), "scale": np.zeros((4, 3), F4)}, "takes 96 inputs, got 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_leaves(case):
    changes, message = REFUSED[case]
    leaf = Quantised(np.zeros((4, 32), np.uint8), np.zeros((4, 2), np.float32))
    with pytest.raises(ValueError, match=message):
        linear(inputs(1, 64), dataclasses.replace(leaf, **changes))


def test_invalid_quantisations():
    with pytest.raises(ValueError, match=r"a multiple of 32 inputs, got a matrix \[4, 48\]"):
        quantise(np.zeros((4, 48), np.float32), "int4")
    with pytest.raises(ValueError, match="'int3' is none of fp8, int8, int4"):
        quantise(np.zeros((4, 48), np.float32), "int3")
    blocks = leaf_of("fp8 blocks", OUT, DEPTH)
    with pytest.raises(ValueError, match="cannot be chosen"):
        blocks[np.array([0])]


# GPUs before Ampere, with the CPU's products


@pytest.fixture
def old_gpu(monkeypatch):
    """Products as on a T4, in parts of at most 600 weights."""
    module = sys.modules["specjax_kernels.linear"]
    monkeypatch.setattr(module, "before_ampere", lambda: True)
    monkeypatch.setattr(module, "WIDENED", 600)


@pytest.mark.parametrize(("dtype", "stored"), [("float16",) * 2, ("bfloat16",) * 2, ("float32", "bfloat16")])
@pytest.mark.parametrize("rows", [0, 1, 4, 5])
def test_parts_of_a_product(old_gpu, dtype, stored, rows):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 1, 64)), dtype)
    weight = jnp.asarray(rng.standard_normal((64, 3, 11)), stored)
    wanted = np.einsum("bnm,mio->bnio", *(np.asarray(array, np.float64) for array in (x, weight)))
    for out in (dtype, "float32"):
        result = dot(x, weight, 0, out)
        assert result.dtype == out
        np.testing.assert_allclose(
            np.asarray(result, np.float64), wanted, rtol=1e-2, atol=0.1 if out != "float32" else 1e-4
        )
    rows_of_outputs = jnp.asarray(weight.reshape(64, 33).T)
    result = dot(x, rows_of_outputs, 1, jnp.float32)
    np.testing.assert_allclose(np.asarray(result), wanted.reshape(rows, 1, 33), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "int8 per output", "fp8 per tensor", "AWQ"])
@pytest.mark.parametrize("rows", [3, 9])
def test_parts_of_quantised_products(old_gpu, name, rows):
    leaf = leaf_of(name, OUT, DEPTH)
    flat = jax.tree.map(lambda array: jnp.asarray(array).reshape(-1, array.shape[-1]), leaf)
    multiply = by_channel if leaf.scale.shape[-1] == 1 else by_dequantising
    x = inputs(rows)
    assert_product(multiply(x[0], flat).reshape(1, rows, *OUT), x, read(name)[1])
    assert str(jax.make_jaxpr(multiply)(x[0], flat)).count("dot_general") == (0 if rows == 3 else 21)
