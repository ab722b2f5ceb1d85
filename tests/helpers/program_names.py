"""Names of programs, equal for values with equal traces."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

KNOWN_CODE = {"specjax", "specjax_kernels", "jax", "flax", "functools"}
# Modules of the tests.
KNOWN_CODE |= {file.stem for file in Path(__file__).parents[1].rglob("*.py")}


class Unknown(Exception):
    """A value without a name."""


def name_of(value: Any) -> str:
    """Returns a digest of a value. Raises Unknown."""
    return hashlib.sha256("\n".join(describe(value)).encode()).hexdigest()


def describe(value: Any) -> Iterator[str]:
    """Yields text that is equal for values with equal traces. Raises Unknown for other values."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    text, parts = name, ()
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | np.dtype):
        text += f" {value!r}"
    elif isinstance(value, jax.ShapeDtypeStruct):
        # Programs are compiled for devices, which the text of a sharding does not name.
        ids = [] if value.sharding is None else sorted(device.id for device in value.sharding.device_set)
        text = f"{value.shape} {value.dtype} {value.sharding} {ids}"
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        text = f"{array.shape} {array.dtype} {hashlib.sha256(array.tobytes()).hexdigest()}"
    elif isinstance(value, Mapping):
        parts = [(key, value[key]) for key in sorted(value, key=repr)]
    elif isinstance(value, Set):
        parts = sorted(value, key=repr)
    elif isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif inspect.ismethod(value):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, type):
        text = f"class {_known(value)}"
    elif inspect.isfunction(function := inspect.unwrap(value) if callable(value) else value):
        text = f"function {_known(function)}"
        parts = [function.__defaults__, function.__kwdefaults__]
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # unset variable
                content = cell.cell_contents
                itself = callable(content) and inspect.unwrap(content) is function
                parts.append((variable, None if itself else content))
    elif dataclasses.is_dataclass(value):
        text = f"dataclass {_known(kind)}"
        parts = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        raise Unknown(f"a value of type {name}")
    yield f"{text} {len(parts)}"
    for part in parts:
        yield from describe(part)


def _known(code: Any) -> str:
    """Returns the name of a function or class of a known package."""
    name = f"{code.__module__}.{code.__qualname__}"
    if name.partition(".")[0] not in KNOWN_CODE:
        raise Unknown(f"{name} is not part of specjax")
    return name
