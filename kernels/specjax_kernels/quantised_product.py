"""The product of activations and a `Quantised` weight: platform, rows and format choose the implementation.

| where | rows | how |
|---|---|---|
| CPU | up to 16 | `cpu/quantised_rows.py`: codes are widened in registers |
| CPU | more | `cpu/quantised_blocks.py`: a panel at a time is widened in the cache |
| CPU, without Numba | any | the weights are dequantised to float32, then XLA's product |
| NVIDIA, a scale for each output | any | XLA's product of codes, which it widens inside; then the scale |
| NVIDIA, groups | up to 64 | `pallas_quantised.py`: codes are widened in registers |
| NVIDIA, groups; other accelerators | more | the weights are dequantised to x's dtype, then XLA's product |
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels import launch, mesh
from specjax_kernels.cpu import quantised_blocks, quantised_rows
from specjax_kernels.cpu.quantised_dots import Layout
from specjax_kernels.platforms import by_platform
from specjax_kernels.quantised import Quantised, check, dequantise, scales, split_axes


def product(x: Array, leaf: Quantised, dtype: Any) -> Array:
    """x [..., M] times the transpose of the dequantised weights [*out, M]: [..., *out] in a dtype; sums are float32.

    Over the devices of a mesh each has what `Quantised.split` says: its outputs, which it keeps, or the sums over its
    inputs, which are added up.
    """
    check(leaf)
    if x.shape[-1] != leaf.depth:
        raise ValueError(f"a quantised weight of shape {leaf.shape} takes {leaf.depth} inputs, got {x.shape[-1]}")
    if mesh.devices() == 1:
        return _on_one_device(x, leaf, dtype)
    inputs, last = leaf.split == -1, x.ndim - 1

    def own(x: Array, leaf: Quantised) -> Array:
        if inputs:
            return jax.lax.psum(_on_one_device(x, leaf, jnp.float32), mesh.AXIS).astype(dtype)
        return _on_one_device(x, leaf, dtype)

    result = -1 if leaf.split is None or inputs else last + leaf.codes.ndim + leaf.split
    return mesh.apart(own, (last if inputs else -1, split_axes(leaf)), result, x, leaf)


def _on_one_device(x: Array, leaf: Quantised, dtype: Any) -> Array:
    rows = x.reshape(-1, leaf.depth)
    if leaf.order is not None:
        rows = rows[:, leaf.order]
    arrays, of_arrays = jax.tree.flatten(_matrix(leaf))

    def by(implementation: Any, *arguments: Array) -> Array:
        return implementation(arguments[0], jax.tree.unflatten(of_arrays, arguments[1:])).astype(dtype)

    on_cpu = by_dequantising
    if (kernel := cpu_kernel(rows.shape[0], layout_of(leaf))) is not None:
        on_cpu = functools.partial(by_kernel, kernel=kernel)
    if leaf.scale is None:
        elsewhere = on_nvidia = by_dequantising
    elif leaf.scale.shape[-1] == 1 and leaf.bits == 8:
        elsewhere = on_nvidia = by_channel
    else:
        elsewhere = by_dequantising

        def by_gpu_kernel(rows: Array, matrix: Quantised) -> Array:
            return (_gpu_kernel(rows, leaf, dtype) or by_dequantising)(rows, matrix)

        on_nvidia = by_gpu_kernel

    branches = {"cpu": on_cpu, "cuda": on_nvidia, "default": elsewhere}
    bound = {platform: functools.partial(by, implementation) for platform, implementation in branches.items()}
    out = by_platform(rows, *arrays, **bound)
    return out.reshape(*x.shape[:-1], *leaf.out)


def _matrix(leaf: Quantised) -> Quantised:
    """Without order, and all outputs as one axis."""
    return jax.tree.map(
        lambda array: jnp.asarray(array).reshape(-1, array.shape[-1]), dataclasses.replace(leaf, order=None)
    )


def _gpu_kernel(rows: Array, leaf: Quantised, dtype: Any) -> Any:
    """The implementation for an NVIDIA GPU, None: it has none for this."""
    # Imported here: other devices and models start sooner.
    kernel = importlib.import_module("specjax_kernels.pallas_quantised")
    if not kernel.takes(rows.shape[0], leaf):
        return None
    implementation = functools.partial(kernel.multiply, dtype=dtype)
    if not launch.on_nvidia():
        return implementation  # for a GPU that is not there
    needed = (8, 9) if leaf.codes.dtype == jnp.float8_e4m3fn else (8, 0)  # Triton's conversions of fp8
    return implementation if tuple(map(int, str(launch.generation()).split("."))) >= needed else None


def layout_of(leaf: Quantised) -> Layout | None:
    """What the CPU's kernel is compiled for; None: it does not take this format."""
    group = leaf.group
    chunk = next((chunk for chunk in (32, 16) if group % chunk == 0), 0)
    if not chunk or not math.prod(leaf.out):
        return None
    if leaf.scale is None:
        return Layout(str(leaf.codes.dtype), "", "", 0, chunk, False, 0)
    coarse = 0 if leaf.super_scale is None else leaf.scale.shape[-1] // leaf.super_scale.shape[-1]
    offset = "" if leaf.offset is None else str(leaf.offset.dtype)
    return Layout(str(leaf.codes.dtype), str(leaf.scale.dtype), offset, leaf.shift, chunk, group == chunk, coarse)


def cpu_kernel(rows: int, layout: Layout | None) -> Any:
    """The module whose `multiply` takes so many rows; None: none can be called here."""
    return next((each for each in (quantised_rows, quantised_blocks) if each.takes(rows, layout)), None)


def by_kernel(rows: Array, leaf: Quantised, *, kernel: Any) -> Array:
    """By what `cpu_kernel` gives."""
    layout = layout_of(leaf)
    assert layout is not None
    codes, *others = jax.tree.leaves(leaf)
    return kernel.multiply(rows.astype(jnp.float32), layout, codes, *others)


def by_dequantising(rows: Array, leaf: Quantised) -> Array:
    """In float32 on a CPU, elsewhere in x's dtype with float32 sums."""

    def plain(rows: Array, *arrays: Array, dtype=rows.dtype) -> Array:
        weights = dequantise(jax.tree.unflatten(kind, arrays), dtype)
        return _dot(rows.astype(dtype), weights)

    arrays, kind = jax.tree.flatten(leaf)
    if rows.dtype == jnp.float32:
        return plain(rows, *arrays)
    return by_platform(rows, *arrays, cpu=functools.partial(plain, dtype=jnp.float32), default=plain)


def by_channel(rows: Array, leaf: Quantised) -> Array:
    """Codes of 8 bits are exact in every dtype of x: XLA widens them inside of its product."""
    scale, offset = scales(leaf)
    out = _dot(rows, jnp.asarray(leaf.codes).astype(rows.dtype))
    wide = [jnp.repeat(one[:, 0], leaf.rows) for one in (scale, offset) if one is not None]
    if leaf.shift:
        wide.append(wide[0] * jnp.float32(-leaf.shift))
    out = out * wide[0][None]
    if len(wide) == 1:
        return out
    return out + jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True) * wide[1][None]


def _dot(rows: Array, matrix: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, matrix, axes, precision=precision, preferred_element_type=jnp.float32)
