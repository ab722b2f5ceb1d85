"""The GPU kernels in Pallas, whose Triton backend is deprecated (jax 0.11); `triton` does not need it.

A CPU interprets the kernels, for tests.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
from jax import Array

from specjax_kernels.platforms import by_platform, refuse_unless_ampere

UNMET: str | None = None
"""The reason why this process cannot make kernels."""
try:
    pl: Any = importlib.import_module("jax.experimental.pallas")
    plgpu: Any = importlib.import_module("jax.experimental.pallas.triton")
except ImportError as error:
    UNMET = f"'pallas' needs a jax with Pallas's Triton backend (0.10.2 to 0.12): {type(error).__name__}: {error}"


def refuse() -> None:
    """Raises NotImplementedError without Pallas's Triton backend, or on an accelerator that Triton does not compile
    for. A CPU interprets the kernels."""
    if UNMET is not None:
        raise NotImplementedError(f"implementation {UNMET}")
    if jax.default_backend() != "cpu":
        refuse_unless_ampere("pallas")


def run(
    kernel: Any, inputs: dict[str, Array], outputs: dict[str, Any], *, grid: tuple[int, ...], warps: int, stages: int,
    s: Any,
) -> dict[str, Array]:  # fmt: skip
    """See `gpu_language`."""
    names = (*inputs, *outputs)

    def on_references(*references: Any) -> None:
        kernel(**dict(zip(names, references, strict=True)), s=s)

    def call(*arguments: Array, interpret: bool) -> Any:
        return pl.pallas_call(
            on_references,
            grid=grid,
            out_shape=tuple(outputs.values()),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            name=kernel.__name__,
        )(*arguments)

    by_interpret = {interpret: functools.partial(call, interpret=interpret) for interpret in (True, False)}
    results = by_platform(*inputs.values(), cpu=by_interpret[True], default=by_interpret[False])
    return dict(zip(outputs, results, strict=True))
