"""Ranges of options: declared with a dataclass's field, checked when an object is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, field, fields
from types import NoneType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

Number: TypeAlias = float | int

KINDS: dict[type, str] = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}


@runtime_checkable
class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


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
        limits = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        return " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)

    def holds(self, number: Number) -> bool:
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


ANY = Range()


def limited(default: Any, minimum: Number | None = None, maximum: Number | None = None, **others: Number) -> Any:
    """A dataclass field with a default and a `Range`."""
    return field(default=default, metadata={"range": Range(minimum, maximum, **others)})


def range_of(owner: type, name: str) -> Range:
    """The range that a dataclass declares for a field."""
    declared: dict[str, Field[Any]] = vars(owner)["__dataclass_fields__"]
    return declared[name].metadata.get("range", ANY)


def check(options: Dataclass) -> None:
    """Checks each field of a dataclass against its annotation and its range. None is outside every range.

    Annotations may be int, float (an int will do), str, bool, a Literal of strings, unions of these, and None.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is out of range. Both name the field: `Ngram.capacity must be an integer from ...`.
    """
    owner = type(options)
    hints = get_type_hints(owner)
    for name in (each.name for each in fields(options)):
        value: Any = getattr(options, name)
        limits = range_of(owner, name)
        kinds = get_args(hints[name]) or (hints[name],)
        choices: Sequence[Any] = kinds if get_origin(hints[name]) is Literal else ()
        if (choices and value in choices) or (value is None and NoneType in kinds):
            continue
        words = " or ".join(map(str, choices or [KINDS[kind] for kind in kinds if kind is not NoneType]))
        if limits.words:
            words += f"{' of' if limits.words.startswith('at') else ''} {limits.words}"
        message = f"{owner.__name__}.{name} must be {words}, got {value!r:.80}"
        if not choices and type(value) not in kinds and not (type(value) is int and float in kinds):
            raise TypeError(message)
        if choices or (limits != ANY and not limits.holds(cast(Number, value))):
            raise ValueError(message)
