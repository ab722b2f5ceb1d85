"""Types and ranges of options: declared with a dataclass's field, checked when an object is made."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from inspect import cleandoc
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

Number: TypeAlias = float | int

KINDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    tuple: "a list of strings",
}


class ParameterError(ValueError):
    """A request's parameter is wrong: "`name` `problem`"."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem

    def renamed(self, names: Mapping[str, str]) -> ParameterError:
        """The same error in the words of an interface that has other names for these parameters."""
        words = re.sub(r"\w+_\w+", lambda word: names.get(word[0], word[0]), self.problem)
        return ParameterError(names.get(self.name, self.name), words)


class Range(NamedTuple):
    """Bounds of a number; `above` and `below` exclude the bound itself. All None: any number."""

    minimum: Number | None = None
    maximum: Number | None = None
    above: Number | None = None
    below: Number | None = None

    @property
    def words(self) -> str:
        """`from 0 to 65535`, `above 0 and at most 1`; empty for any number."""
        if self.minimum is not None and (self.maximum is not None or self.below is not None):
            return f"from {self.minimum} to {f'below {self.below}' if self.maximum is None else self.maximum}"
        limits = {"of at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        return " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)

    def holds(self, number: Any) -> bool:
        tests = zip((operator.ge, operator.le, operator.gt, operator.lt), self, strict=True)
        return all(bound is None or test(number, bound) for test, bound in tests)


ANY = Range()


def limited(default: Any, minimum: Number | None = None, maximum: Number | None = None, **others: Number) -> Any:
    """A dataclass field with a default and a `Range`."""
    return field(default=default, metadata={"range": Range(minimum, maximum, **others)})


def range_of(owner: Any, name: str) -> Range:
    """The range that a dataclass declares for a field."""
    return owner.__dataclass_fields__[name].metadata.get("range", ANY)


def documented(kind: type) -> dict[str, str]:
    """The fields of a class, from `Attributes:` in its docstring, with their texts as `--help` shows them."""
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {6}.+)*)", cleandoc(kind.__doc__ or ""), re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".").replace("`", "") for name, text in entries}


def shown(value: Any) -> str:
    """A value as an error shows it: short, and on one line."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a huge number"


def check_value(value: Any, annotation: Any, limits: Range = ANY, choices: Sequence[str] = ()) -> None:
    """Checks a value, or each item of a tuple of strings. `annotation` is int, float (an int will do), str, bool,
    tuple, a Literal of strings, or a union of these and None. Raises TypeError if the value has another type, and
    ValueError if it is out of range. Both messages complete "must be": `an integer from 1 to 9`."""
    kinds = (annotation,) if get_origin(annotation) is Literal else get_args(annotation) or (annotation,)
    if literals := [kind for kind in kinds if get_origin(kind) is Literal]:
        kinds, choices = tuple(str if kind in literals else kind for kind in kinds), get_args(literals[0])
    if value is None and NoneType in kinds:
        return
    words = f"one of {', '.join(choices)}" if choices else " or ".join(KINDS[k] for k in kinds if k is not NoneType)
    words += f" {limits.words}" if limits.words else ""
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        raise TypeError(words)
    items = value if isinstance(value, tuple) else (value,)
    if not limits.holds(value) or (choices and not set(items) <= set(choices)):
        raise ValueError(words)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer of 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a finite number")


def check(options: Any) -> None:
    """Checks each field of a dataclass against its annotation and its range. None is outside every range. Raises as
    `check_value`, with the field in the message: `Ngram.capacity must be an integer from ..., got ...`."""
    hints = get_type_hints(type(options))
    for each in fields(options):
        value = getattr(options, each.name)
        try:
            check_value(value, hints[each.name], each.metadata.get("range", ANY))
        except (TypeError, ValueError) as error:
            name = f"{type(options).__name__}.{each.name}"
            raise type(error)(f"{name} must be {error}, got {shown(value)}") from None
