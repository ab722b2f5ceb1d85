"""Branches of a traced function by platform, of which a program for one platform traces only its own.

`jax.lax.platform_dependent` traces every branch and drops the others when the program is lowered. Branches nest, so the
trace of a step on a CPU took twice as long as its own branch needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from specjax_kernels import launch

_only: ContextVar[str | None] = ContextVar("only", default=None)


@contextmanager
def of_default_device() -> Iterator[None]:
    """Within the context, `by_platform` traces the branch of JAX's default device alone. The programs must not be
    lowered for another platform, and a `jax.jit` that outlives the context must not call `by_platform`: JAX would reuse
    its trace outside of the context."""
    token = _only.set("cuda" if launch.on_nvidia() else jax.default_backend())
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
