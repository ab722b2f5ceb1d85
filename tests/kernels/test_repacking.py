"""Compiled functions that load weights, against their definitions in numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from quantised_formats import packed
from specjax_kernels import quantise
from specjax_kernels.cpu import repacking
from specjax_kernels.cpu.runtime import host_function
from specjax_kernels.quantised import pack

from specjax.checkpoint.parameters import quantise_leaf
from specjax.checkpoint.quantised import pack_awq, pack_rows
from specjax.models.params import Scope, mlp_leaves

SHAPES = [(8, 32), (24, 96), (136, 64), (40, 1056)]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    repacking.prepare(every=True)
    for name, build in repacking._BUILDS.items():
        assert host_function(f"specjax_repacking_{name}", build) is not None


@pytest.mark.parametrize(("out", "inside"), SHAPES)
def test_words_of_rows(out, inside, monkeypatch):
    codes = np.random.default_rng(out).integers(0, 16, (out, inside), np.uint8)
    words, output = packed(codes, 4), np.empty((out, inside // 2), np.uint8)
    wider = np.concatenate([words, words[:, :3]], axis=1)
    layouts = {"rows": words, "transposed": np.asarray(words.T, order="C").T, "cut": wider[:, : words.shape[1]]}
    for name, layout in layouts.items():
        output[...] = 0xAA
        assert repacking.from_rows(layout, output), name
        np.testing.assert_array_equal(output, pack(codes), name)
        with monkeypatch.context() as patch:
            patch.setenv("SPECJAX_CPU_KERNELS", "0")
            np.testing.assert_array_equal(pack_rows(layout), pack(codes), name)
    np.testing.assert_array_equal(pack_rows(layouts["transposed"][3:7]), pack(codes[3:7]))


@pytest.mark.parametrize(("out", "inside"), SHAPES)
def test_words_of_awq(out, inside, monkeypatch):
    codes = np.random.default_rng(out).integers(0, 16, (out, inside), np.uint8)
    words = packed(codes.T.reshape(inside, -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(inside, -1), 4)
    output = np.empty((out, inside // 2), np.uint8)
    assert repacking.from_awq(words, output)
    np.testing.assert_array_equal(output, pack(codes))
    for compiled in ("1", "0"):
        monkeypatch.setenv("SPECJAX_CPU_KERNELS", compiled)
        np.testing.assert_array_equal(pack_awq(words), pack(codes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("columns", [1, 37, 256])
def test_quantised_codes(kind, dtype, columns):
    """Numbers of many sizes, halves between codes, zeros and the smallest numbers."""
    rng = np.random.default_rng(columns)
    matrix = rng.standard_normal((64, columns)) * np.exp(3 * rng.standard_normal((64, columns)))
    matrix[3], matrix[4], matrix[5] = 0, 1e-7, rng.integers(-254, 255, columns) / 2
    matrix[5, 0], matrix[6, 0] = 127, -448
    matrix = np.clip(matrix, -6e4, 6e4).astype(np.dtype(dtype))
    expected = quantise(matrix, kind)
    largest = np.empty(64, np.float32)
    assert repacking.magnitudes(matrix, largest)
    np.testing.assert_array_equal(largest, np.abs(matrix.astype(np.float32)).max(1))
    codes = np.empty(matrix.shape, expected.codes.dtype)
    assert repacking.codes(matrix, expected.scale, codes)
    np.testing.assert_array_equal(codes.view(np.uint8), expected.codes.view(np.uint8))


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_leaves_with_and_without_compiled_functions(kind, monkeypatch):
    sizes = {"M": 96, "I": 40, "2": 2}
    (leaf, *_) = mlp_leaves(bias=False)
    parts = [np.random.default_rng(i).standard_normal((40, 96), np.float32).astype("bfloat16") for i in range(2)]
    compiled = quantise_leaf(parts, Scope((leaf,)), leaf, sizes, kind)
    monkeypatch.setenv("SPECJAX_CPU_KERNELS", "0")
    assert not repacking.magnitudes(parts[0], np.empty(40, np.float32))
    plain = quantise_leaf(parts, Scope((leaf,)), leaf, sizes, kind)
    assert jax.tree.structure(compiled) == jax.tree.structure(plain)
    for pair in zip(jax.tree.leaves(compiled), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(*(np.asarray(array).view(np.uint8) for array in pair))


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_magnitudes_of_infinity_and_nan(number):
    matrix = np.ones((3, 40), np.float32)
    matrix[1, 7] = number
    largest = np.empty(3, np.float32)
    assert repacking.magnitudes(matrix, largest)
    np.testing.assert_array_equal(np.isfinite(largest), [True, False, True])
