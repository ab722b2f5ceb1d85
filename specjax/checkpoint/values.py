"""Values of a config.json, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.checkpoint.files import CheckpointError


def given(section: Mapping[str, Any], key: str, default: Any) -> Any:
    """``section[key]``, where null means the default, as transformers reads it."""
    value = section.get(key)
    return default if value is None else value


def require(section: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer ``section[key]``."""
    value = given(section, key, default)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}; a positive integer is needed")
    return value


def number(section: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The positive number ``section[key]``; a ``KeyError`` if it is absent and has no default."""
    value = given(section, key, default)
    if value is None:
        raise KeyError(key)
    # JSON as Python reads it has Infinity and integers that no float holds.
    if type(value) not in (int, float) or not 0 < value < 1e300:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}; a positive number is needed")
    return float(value)


def flag(section: Mapping[str, Any], key: str) -> bool:
    """``section[key]``; absent is false."""
    value = given(section, key, False)
    if type(value) is not bool:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}; true or false is needed")
    return value


def numbers(section: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """The list of positive numbers ``section[key]``; a ``KeyError`` if it is absent."""
    value = section[key]
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}; a list of positive numbers is needed")
    return tuple(number({key: each}, key) for each in value)
