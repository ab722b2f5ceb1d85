"""Names for programs: text that is equal for values that are traced alike."""

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
# The tests' own modules do not change while they run.
KNOWN_CODE |= {file.stem for file in Path(__file__).parents[1].rglob("*.py")}


class Unknown(Exception):
    """A value that a name cannot stand for."""


def name_of(value: Any) -> str:
    """A digest of a value. Raises Unknown."""
    return hashlib.sha256("\n".join(describe(value)).encode()).hexdigest()


def describe(value: Any) -> Iterator[str]:
    """Text that stands for a value: equal for values that are traced alike. Raises Unknown if it holds
    something for which there is no such text."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    text, parts = name, ()
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | np.dtype):
        text += f" {value!r}"
    elif isinstance(value, jax.ShapeDtypeStruct):
        # A program runs on the devices that it was compiled for, and a sharding's text does not name them.
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
            with contextlib.suppress(ValueError):  # a variable that is not set yet
                found = cell.cell_contents
                itself = callable(found) and inspect.unwrap(found) is function
                parts.append((variable, None if itself else found))
    elif dataclasses.is_dataclass(value):
        text = f"dataclass {_known(kind)}"
        parts = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        raise Unknown(f"a value of type {name}")
    yield f"{text} {len(parts)}"
    for part in parts:
        yield from describe(part)


def _known(code: Any) -> str:
    """The name of a function or class that does not change while the tests run."""
    name = f"{code.__module__}.{code.__qualname__}"
    if name.partition(".")[0] not in KNOWN_CODE:
        raise Unknown(f"{name} is not part of specjax")
    return name
