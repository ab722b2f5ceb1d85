"""`linear` of a few rows as one kernel, with its derivative and what runs on other devices."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from specjax_kernels.choice import ProductBlocks
from specjax_kernels.norm import Norm


class Static(NamedTuple):
    definition: Callable[..., Array]
    blocks: ProductBlocks
    norm: tuple[float, float] | None  # epsilon and offset; None: there is no norm
    gated: Callable[[Array], Array] | None


def linear_few_rows(
    definition: Callable[..., Array], blocks: ProductBlocks, x: Array, weight: Array, *, norm: Norm | None,
    bias: Array | None, gated: Callable[[Array], Array] | None, residual: Array | None,
) -> Array:  # fmt: skip
    """``definition(x, weight, norm=norm, ...)`` by a kernel for NVIDIA GPUs, up to the order of sums and to where half
    precision is rounded. On a CPU the kernel is interpreted; other devices, and derivatives, take the definition."""
    arrays = {
        "x": x,
        "weight": weight,
        "norm": None if norm is None else norm.weight,
        "bias": bias,
        "residual": residual,
    }
    present = {name: array for name, array in arrays.items() if array is not None}
    return _product(Static(definition, blocks, norm and norm[1:], gated), present)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: Static, arrays: dict[str, Array]) -> Array:
    return jax.lax.platform_dependent(
        arrays,
        cpu=functools.partial(_by_kernel, static, True),
        cuda=functools.partial(_by_kernel, static, False),
        default=functools.partial(_by_definition, static),
    )


def _by_definition(static: Static, arrays: dict[str, Array]) -> Array:
    norm = static.norm and Norm(arrays["norm"], *static.norm)
    bias, residual = arrays.get("bias"), arrays.get("residual")
    return static.definition(arrays["x"], arrays["weight"], norm=norm, bias=bias, gated=static.gated, residual=residual)


_product.defvjp(
    lambda static, arrays: (_product(static, arrays), arrays),
    lambda static, arrays, gradient: jax.vjp(functools.partial(_by_definition, static), arrays)[1](gradient),
)


def _by_kernel(static: Static, interpret: bool, arrays: dict[str, Array]) -> Array:
    # Imported here: a process without a GPU starts sooner.
    multiply: Any = importlib.import_module("specjax_kernels.pallas_few_rows").multiply
    x, weight, bias, residual = (arrays.get(name) for name in ("x", "weight", "bias", "residual"))
    assert x is not None and weight is not None
    out = weight.shape[2:] if static.gated else weight.shape[1:]
    matrix = (2, -1) if static.gated else (-1,)
    rows = multiply(
        x.reshape(-1, x.shape[-1]), weight.reshape(x.shape[-1], *matrix),
        norm=static.norm and Norm(arrays["norm"], *static.norm), bias=None if bias is None else bias.reshape(matrix),
        gated=static.gated, residual=None if residual is None else residual.reshape(-1, math.prod(out)),
        blocks=static.blocks, interpret=interpret,
    )  # fmt: skip
    return rows.reshape(*x.shape[:-1], *out)
