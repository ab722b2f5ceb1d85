"""JAX's default device, and branches of a traced function by platform.

`jax.lax.platform_dependent` traces every branch and drops the others when the program is lowered. Branches nest, so the
trace of a step on a CPU took twice as long as its own branch needs: within `of_default_device`, `by_platform` traces
one branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_only: ContextVar[str | None] = ContextVar("only", default=None)


@contextmanager
def of_default_device() -> Iterator[None]:
    """Within the context, `by_platform` traces the default device's branch alone. Programs must not be lowered for
    another platform. A `jax.jit` that outlives the context must not call `by_platform`: JAX would reuse its trace."""
    token = _only.set("cuda" if on_nvidia() else jax.default_backend())
    try:
        yield
    finally:
        _only.reset(token)


def by_platform(*arguments: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """`jax.lax.platform_dependent`, or within `of_default_device` a call of one branch.

    Args:
        default: the branch of platforms that are not named.
        branches: by JAX's name of the platform, such as cpu or cuda.
    """
    if (platform := _only.get()) is None:
        return jax.lax.platform_dependent(*arguments, default=default, **branches)
    return branches.get(platform, default)(*arguments)


def on_nvidia() -> bool:
    """True if JAX's default device is an NVIDIA GPU. AMD GPUs have the same backend, "gpu"."""
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version.lower()


def generation() -> str | None:
    """Compute capability of JAX's default device ("9.0": Hopper); None: it is no NVIDIA GPU."""
    return str(jax.devices()[0].compute_capability) if on_nvidia() else None


def has_kernels() -> bool:
    """True if Triton compiles for JAX's default device: an NVIDIA GPU, Ampere (8.0) or newer."""
    capability = generation()
    return capability is not None and int(capability.partition(".")[0]) >= 8


def before_ampere() -> bool:
    """True if JAX's default device is an NVIDIA GPU below compute capability 8.0: XLA multiplies no bfloat16 there, and
    float16 in few cases."""
    return on_nvidia() and not has_kernels()


def after(array: Array, before: Array) -> Array:
    """The array, with a dependence on another value. Without it, XLA:GPU computes what needs parameters alone, such as
    wider weights, for all layers in one early kernel. It ignores optimization barriers (jax 0.10.2)."""
    never = before[(0,) * before.ndim] > jnp.inf
    return jnp.where(never, jnp.zeros((), array.dtype), array)


def refuse_unless_ampere(implementation: str) -> None:
    """Raises NotImplementedError on a device that Triton does not compile for."""
    if not has_kernels():
        device = f"{jax.devices()[0]}" + (f" of compute capability {version}" if (version := generation()) else "")
        raise NotImplementedError(
            f"implementation {implementation!r} of tree_attention runs on NVIDIA GPUs of compute capability 8.0 "
            f"(Ampere) and up, and JAX's default device is {device}. Implementation 'xla' runs everywhere"
        )
