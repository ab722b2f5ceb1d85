"""Options: a field declares its default, help, type and range once; they are checked when an object is made.

    @documented
    @dataclass(frozen=True)
    class CacheOptions:
        '''Sizes of a cache.'''

        page_size: int = setting(16, "tokens in a page", minimum=1)

        def __post_init__(self) -> None:
            check(self)

`documented` adds the help and the range of each field to the docstring; `specjax.settings` makes flags of the same
declarations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import cleandoc
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

KINDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    tuple: "a list of strings",
}


class ParameterError(ValueError):
    """A parameter or an option has a wrong value. The message is "`owner`.`name` `problem`".

    Attributes:
        name: parameter or field.
        problem: the rest of the message.
        owner: class of options that has the field; "" for parameters of requests and functions.
    """

    def __init__(self, name: str, problem: str, owner: str = "") -> None:
        super().__init__(f"{owner}.{name} {problem}" if owner else f"{name} {problem}")
        self.name, self.problem, self.owner = name, problem, owner

    def __reduce__(self) -> Any:  # makes the error picklable
        return type(self), (self.name, self.problem, self.owner)

    def renamed(self, names: Mapping[str, str]) -> ParameterError:
        return type(self)(names.get(self.name, self.name), self.problem)


class Range(NamedTuple):
    """Bounds of a number; `above` and `below` exclude the bound itself. All None: any number."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

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


@dataclass(frozen=True)
class Setting:
    """Metadata of a field that `setting` declares."""

    help: str  # text in docstrings and in --help
    range: Range = ANY  # bounds of a number
    names: tuple[str, ...] = ()  # further flags (`--model-path`)
    choices: tuple[str, ...] = ()  # allowed strings; (): any string
    # Converts a value (`str.upper`) before it is compared with `choices`; its ValueError completes "must be".
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None  # placeholder of the value in --help
    digits: bool = False  # True for strings that may be numbers, which a file may hold without quotes
    alone: bool = False  # True for a list of strings that a file may replace by one string
    sets: str = ""  # library option that the flag sets
    flag: str = ""  # field of a command's settings that sets this option of the library
    instead: str = ""  # explains why the flag has no effect; "" for flags with an effect


def setting(default: Any, help: str, *, secret: bool = False, **more: Any) -> Any:
    """Declares a field of a frozen dataclass.

    The annotation gives the type: int, float, str, bool, tuple[str, ...] or a Literal of strings, optionally with None.
    None means "not set" and is allowed only as the default.

    `default` may be a function that makes the value. `secret` omits the value from the dataclass's repr, which may be
    logged. `more`: fields of `Setting` and of its `Range` (`minimum=1`).
    """
    bounds = Range(**{name: more.pop(name) for name in Range._fields if name in more})
    metadata = {"setting": Setting(help, **{"range": bounds, **more})}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def setting_of(owner: Any, name: str) -> Setting:
    """Returns the declaration of a dataclass field; empty if `setting` did not declare it."""
    return owner.__dataclass_fields__[name].metadata.get("setting", Setting(""))


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Returns the strings of a Literal or of a union with a Literal; () for other annotations."""
    kinds = (annotation, *get_args(annotation))
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())


def documented(kind: type[T]) -> type[T]:
    """Adds help and range of the dataclass's fields to its docstring, before the section of errors."""
    text, raises, errors = cleandoc(kind.__doc__ or "").partition("\n\nRaises:\n")
    lines = []
    for member in fields(kind):  # pyright: ignore[reportArgumentType]
        declared = setting_of(kind, member.name)
        words = declared.range.words.removeprefix("of ")
        lines.append(f"    {member.name}: {declared.help}{f' ({words})' if words else ''}.")
    kind.__doc__ = "\n".join([text, "", "Attributes:", *lines]) + raises + errors
    return kind


def shown(value: Any) -> str:
    """Formats a value for an error message, short and on one line."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a huge number"


def check_value(value: Any, annotation: Any, declared: Setting = Setting("")) -> None:
    """Checks a value, or each item of a tuple of strings, against its type and range.

    `annotation` is int, float (accepts int), str, bool, tuple, a Literal of strings, or a union of these and None.
    Raises TypeError or ValueError with text that completes "must be": `an integer from 1 to 9`.
    """
    limits, choices = declared.range, declared.choices or choices_of(annotation)
    kinds = (annotation,) if get_origin(annotation) is Literal else get_args(annotation) or (annotation,)
    kinds = tuple({Literal: str, tuple: tuple}.get(cast(Any, get_origin(kind)), kind) for kind in kinds)
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


_hints = cache(get_type_hints)  # evaluates the annotations of a class


def check(options: Any) -> None:
    """Checks each field of a dataclass. Raises TypeError if a value has another type than its annotation, and
    ParameterError if it is out of range."""
    hints = _hints(type(options))
    for member in fields(options):
        name, value, owner = member.name, getattr(options, member.name), type(options).__name__
        try:
            check_value(value, hints[name], setting_of(options, name))
        except TypeError as error:
            raise TypeError(f"{owner}.{name} must be {error}, got {shown(value)}") from None
        except ValueError as error:
            raise ParameterError(name, f"must be {error}, got {shown(value)}", owner) from None
