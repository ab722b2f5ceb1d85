"""Runs a Triton kernel over numpy arrays in Triton's interpreter, for tests. Needs neither a GPU nor torch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def interpret(
    kernel: Any,
    grid: tuple[int, ...],
    names: tuple[str, ...],
    outputs: dict[str, jax.ShapeDtypeStruct],
    constants: dict[str, Any],
    *arrays: Any,
) -> tuple[np.ndarray, ...]:
    """A kernel in Triton's interpreter. Results begin as NaN, so that reading what nobody wrote is seen."""
    given = {name: np.ascontiguousarray(array) for name, array in zip(names, arrays, strict=True)}
    results = {name: np.full(out.shape, np.nan, out.dtype) for name, out in outputs.items()}
    kernel[grid](**{name: _Memory(array) for name, array in (given | results).items()}, **constants)
    return tuple(results.values())


class _Memory:
    """As much of a torch.Tensor as Triton's interpreter asks of an argument: it copies tensors to the host and back.
    This one is there already."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        kind, bits = array.dtype.name.rstrip("0123456789"), 8 * array.itemsize
        self.dtype = {"float": "fp", "bfloat": "bf", "int": "i", "uint": "u"}[kind] + str(bits)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def _itself(self, *_: Any, **__: Any) -> _Memory:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = _itself

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)
