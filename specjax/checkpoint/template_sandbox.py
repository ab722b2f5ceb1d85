"""The sandbox of chat templates: a template that comes with a model takes bounded memory.

Jinja's sandbox bounds `range` only. Here, all values that a template makes while it renders are counted together. What
may be large at once (operators, formats, widths, replacements) is estimated before it is made.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

MAX_BYTES = 2**28  # of all values that a template makes while it renders; prompts of a million tokens take a tenth
STEP_BYTES = 256  # counted for a filter, and an item of a loop or a list: a million of them take seconds
CALL_BYTES = 2048  # counted for a call

_left: ContextVar[list[int] | None] = ContextVar("left", default=None)  # bytes that a template may still make


class TemplateLimit(ValueError):
    """A chat template makes more than `MAX_BYTES`."""


def bound_templates() -> None:
    """Makes transformers compile chat templates for this sandbox."""
    from transformers.utils import chat_template_utils as theirs

    if theirs.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        theirs.ImmutableSandboxedEnvironment = BoundedEnvironment
        theirs._compile_jinja_template.cache_clear()


def spend(size: int, what: str) -> None:
    """Counts the bytes of a value before or after it is made. Raises TemplateLimit."""
    left = _left.get()
    remaining = (MAX_BYTES if left is None else left[0]) - size
    if remaining < 0:
        raise TemplateLimit(
            f"the chat template makes more than {MAX_BYTES >> 20} MB of values: {what} needs {size} bytes more; "
            "use another template (--chat-template)"
        )
    if left is not None:
        left[0] = remaining


def charged(value: Any, what: str) -> Any:
    """A new value, counted."""
    if isinstance(value, str | bytes | int | list | tuple | dict | set):
        spend(sys.getsizeof(value), what)
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with `MAX_BYTES` for each rendering. Thread-safe."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.code_generator_class = _BoundedCode
        self.filters = _Filters(self.filters)
        self.finalize = _finalized
        del self.globals["lipsum"]

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the text of a template, or of a part of it."""
        if _left.get() is not None:
            return "".join(map(_piece, pieces))
        token = _left.set([MAX_BYTES])
        try:
            return "".join(map(_piece, pieces))
        finally:
            _left.reset(token)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _BINOPS[operator](left, right)
        if size:
            spend(size, f"{type(left).__name__} {operator} {_shown(right)}")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        formatter = (
            _BoundedEscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _BoundedFormatter(self)
        )

        def format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            spend(sys.getsizeof(text), "str.format")
            return type(text)(formatter.vformat(text, args, kwargs))

        return format

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", getattr(function, "name", ""))
        if not isinstance(owner, str | bytes | int):
            what = f"the function {name}"
            spend(CALL_BYTES, what)
            return charged(super().call(context, function, *args, **kwargs), what)
        what, args = f"{type(owner).__name__}.{name}", _listed(args)
        spend(STEP_BYTES + _estimate(name, owner, *args, *kwargs.values()), what)
        value = super().call(context, function, *args, **kwargs)
        spend(_text_size(value), what)  # with the parts of a text
        return value

    def joined(self, *values: Any) -> str:
        """The operator ~."""
        spend(sum(map(_text_size, values)), "the operator ~")
        return "".join(map(str, values))

    def sliced(self, value: Any) -> Any:
        return charged(value, "a slice")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop."""
        for item in items:
            spend(STEP_BYTES, "a loop")
            yield item


class _BoundedCode(CodeGenerator):
    """Code that calls the environment where the sandbox's own code does not."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        sliced = isinstance(node.arg, nodes.Slice)
        self.write("environment.sliced(" if sliced else "")
        super().visit_Getitem(node, frame)
        self.write(")" if sliced else "")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        items = nodes.Call(nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None, lineno=node.lineno)
        node.iter = items
        super().visit_For(node, frame)


class _BoundedFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        spend(_text_size(value) + _numbers(format_spec), f"str.format with {format_spec[:40]!r}")
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        spend(_text_size(value), "str.format")
        return super().convert_field(value, conversion)


class _BoundedEscapeFormatter(_BoundedFormatter, SandboxedEscapeFormatter):
    pass


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name. Their results are counted."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        for name, function in filters.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or a context comes first

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            what = f"the filter {name}"
            args = _listed(args)
            spend(STEP_BYTES + _estimate(name, *args[skipped:], *kwargs.values()), what)
            return charged(function(*args, **kwargs), what)

        super().__setitem__(name, bounded)


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose sizes can be estimated."""
    return tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)


def _finalized(value: Any) -> Any:
    """An expression that is part of the text."""
    if isinstance(value, list | tuple | dict | int):
        spend(_text_size(value), "its text")
    return value


def _piece(piece: str) -> str:
    spend(sys.getsizeof(piece), "its text")
    return piece


# Estimates


def _estimate(name: str, value: Any, *args: Any) -> int:
    """Bytes that a method or a filter of this name may take. 0 for those that make nothing much larger than `value`,
    because results are counted, too."""
    numbers = sum(arg for arg in args if isinstance(arg, int) and arg > 0)
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes" | "batch" | "slice":
            return 8 * numbers
        case "expandtabs":
            return value.count("\t") * numbers
        case "indent":
            return (str(value).count("\n") + 1) * (numbers + _length(*args))
        case "wordwrap":
            return (str(value).count("\n") + len(str(value)) // max(numbers, 1)) * _length(*args)
        case "replace":
            return (str(value).count(str(args[0])) if args else 0) * _length(*args[1:])
        case "translate":
            return len(value) * max(map(_text_size, args), default=0)
        case "join":
            return _text_size(value) + _text_size(args) + _length(value) * _length(*args)
        case "format":
            return _percent_size(value, args)
        case "tojson" | "pprint" | "string" | "list" | "xmlattr":
            return _text_size(value) * max(numbers, 1)
    return 0


def _length(*values: Any) -> int:
    return sum(len(value) for value in values if isinstance(value, Collection))


def _percent_size(text: str | bytes, values: Any) -> int:
    """Bytes of `text % values`."""
    values = values if isinstance(values, tuple) else (values,)
    widths = sum(value for value in values if isinstance(value, int)) if b"*" in _bytes(text) else 0
    largest = max(map(_text_size, values), default=0)
    return len(text) + widths + _numbers(text) + _bytes(text).count(b"%") * largest


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def _numbers(text: str | bytes) -> int:
    """The sum of the numbers in a text, which may be widths."""
    return sum(int(digits[:20]) for digits in re.findall(rb"[0-9]+", _bytes(text)))


# An integer of n bytes counts for n squared, because arithmetic takes such a time.


def _product(left: Any, right: Any) -> int:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            return sys.getsizeof(value) * max(times, 0)
    return (_int_bytes(left) + _int_bytes(right)) ** 2


def _power(left: Any, right: Any) -> int:
    if not isinstance(left, int) or not isinstance(right, int):
        return 0
    return (_int_bytes(left) * max(right, 0)) ** 2 if abs(left) > 1 else 0


def _sum(left: Any, right: Any) -> int:
    if isinstance(left, int | float):
        return _int_bytes(left)
    return sys.getsizeof(left) + sys.getsizeof(right)


def _int_bytes(value: Any) -> int:
    return value.bit_length() // 8 + 1 if isinstance(value, int) else 0


_BINOPS: Mapping[str, Callable[[Any, Any], int]] = {
    "+": _sum,
    "*": _product,
    "**": _power,
    "%": lambda left, right: _percent_size(left, right) if isinstance(left, str | bytes) else 0,
}


def _text_size(value: Any) -> int:
    """Bytes of a value's text, at least; of the items of lists and dicts, too."""
    if isinstance(value, str | bytes):
        return sys.getsizeof(value)
    if not isinstance(value, Collection):
        return _int_bytes(value) * 3 + STEP_BYTES
    size = STEP_BYTES
    for item in itertools.chain(*value.items()) if isinstance(value, Mapping) else value:
        size += _text_size(item) + STEP_BYTES
        if size > MAX_BYTES:  # lists that hold a list twice, and so on, have a text that never ends
            break
    return size


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int) and value.bit_length() < 64 else type(value).__name__
