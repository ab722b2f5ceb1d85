"""The sandbox of chat templates: a template that comes with a model takes bounded memory.

Jinja's sandbox bounds `range` only. Here, an operator, a method or a filter is refused if its result may take more than
is left of `MAX_BYTES`, and what a template makes while it renders is counted.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_BYTES = 2**28  # of all values that a template makes while it renders; prompts of a million tokens take a tenth
STEP_BYTES = 256  # counted for a filter, and an item of a loop or a list: a million of them take seconds
CALL_BYTES = 2048  # counted for a call
PART_BYTES = 32  # for a character of a text that is split, encoded or escaped
# Methods, filters and functions whose result is a part of the first value, or another form of it.
PARTS = frozenset((
    "abs", "attr", "capitalize", "casefold", "count", "counted", "d", "decode", "default", "dictsort", "e",
    "encode", "endswith", "escape", "find", "first", "float", "groupby", "index", "int", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
    "isupper", "items", "last", "length", "list", "lower", "lstrip", "map", "max", "min", "partition", "reject",
    "rejectattr", "removeprefix", "removesuffix", "reverse", "rfind", "rindex", "rpartition", "rsplit", "rstrip",
    "safe", "select", "selectattr", "sliced", "sort", "split", "splitlines", "startswith", "strftime_now", "strip",
    "striptags", "swapcase", "title", "trim", "unique", "upper", "urlencode", "wordcount"
))  # fmt: skip

_left: ContextVar[list[int] | None] = ContextVar("left", default=None)  # bytes that a template may still make


class TemplateLimit(ValueError):
    """A chat template makes more than `MAX_BYTES`."""


def bound_templates() -> None:
    """Makes transformers compile chat templates for this sandbox."""
    from transformers.utils import chat_template_utils as theirs

    if theirs.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        theirs.ImmutableSandboxedEnvironment = BoundedEnvironment
        theirs._compile_jinja_template.cache_clear()


def check(size: int, what: str) -> list[int]:
    """The bytes that are left. Raises TemplateLimit if they are fewer than `size`."""
    left = _left.get() or [MAX_BYTES]
    if size > left[0]:
        raise TemplateLimit(
            f"the chat template makes more than {MAX_BYTES >> 20} MB of values: {what} needs {size} bytes more; "
            "use another template (--chat-template)"
        )
    return left


def spend(size: int, what: str) -> None:
    check(size, what)[0] -= size


def charged(value: Any, what: str) -> Any:
    """A new value, counted without its items."""
    if isinstance(value, str | bytes | int | list | tuple | dict | set):
        spend(sys.getsizeof(value), what)
    return value


def bounded(
    what: str, name: str, function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], *,
    owner: Collection[Any] = (), skipped: int = 0,
) -> Any:  # fmt: skip
    """The result of a filter, or of a method of `owner`. Its size depends on all arguments but the first `skipped`."""
    args = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
    first, *others = *owner, *args[skipped:], *kwargs.values(), None
    check(_result_size(name, first, *others), what)
    result = function(*args, **kwargs)
    is_selection = isinstance(result, list | dict | tuple | set) and not isinstance(first, str | bytes)
    spend(STEP_BYTES + (8 * sys.getsizeof(result) if is_selection else _text_size(result)), what)
    return result


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with `MAX_BYTES` for each rendering. Thread-safe."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=_finalized, **kwargs)
        own = {"counted": _counted, "sliced": lambda value: value, "~": lambda values: "".join(map(str, values))}
        self.filters: Any = _Filters(self.filters | own)
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Filtered().visit(super()._parse(source, name, filename))

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the text of a template, or of a part of it."""
        token = _left.set(_left.get() or [MAX_BYTES])
        try:
            pieces = list(pieces)
            check(_joined_size(pieces), "its text")
            return charged("".join(pieces), "its text")
        finally:
            _left.reset(token)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        shown = right if isinstance(right, int) and right.bit_length() < 64 else type(right).__name__
        what = f"{type(left).__name__} {operator} {shown}"
        check(_operator_size(operator, left, right), what)
        return charged(super().call_binop(context, operator, left, right), what)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps str.format.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", getattr(function, "name", ""))
        owners = [owner] if isinstance(owner, str | bytes | int) else []
        run = functools.partial(super().call, context, function)
        if owners or name == "strftime_now":
            return bounded(f"{type(owner).__name__}.{name}", name, run, args, kwargs, owner=owners)
        spend(CALL_BYTES, f"the function {name}")
        return charged(run(*args, **kwargs), f"the function {name}")


class _Filtered(NodeTransformer):
    """Makes filters of operations that the sandbox's own code does without the environment."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filter("~", nodes.List(node.nodes))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter("sliced", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        pieces = nodes.Const(sum(len(output.nodes) for output in node.find_all(nodes.Output)))
        node.iter = _filter("counted", node.iter, pieces)
        return node


def _filter(name: str, value: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _counted(items: Iterable[Any], pieces: int) -> Iterator[Any]:
    """The items of a loop, whose body writes so many pieces of text."""
    for item in items:
        spend(STEP_BYTES + 8 * pieces, "a loop")
        yield item


class _Filters(UserDict[str, Callable[..., Any]]):
    """Filters by name. Their results are counted."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or a context comes first

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return bounded(f"the filter {name}", name, function, args, kwargs, skipped=skipped)

        super().__setitem__(name, run)


def _finalized(value: Any) -> Any:
    """An expression that is part of the text."""
    if not isinstance(value, str):
        spend(_text_size(value), "its text")
    return value


# Bytes that a result may take.


def _result_size(name: str, value: Any, *args: Any) -> int:
    """Bytes of a method's or filter's result: at most those of the value for each unit of the other arguments."""
    if name in PARTS:
        return PART_BYTES * len(value) if isinstance(value, str | bytes) else 0
    if name in ("format", "format_map"):
        return _format_size(value, args)
    if name == "replace" and len(args) > 1:
        text, first, second = (each if isinstance(each, bytes) else str(each) for each in (value, *args[:2]))
        counts: Any = text.count  # of old and new, in any order, because they may be named
        return 4 * (len(text) + counts(first) * len(second) + counts(second) * len(first))
    return _text_size(value) * (8 + sum(map(_units, args)))


def _units(value: Any) -> int:
    """What an argument may multiply a result by."""
    if isinstance(value, int):
        return abs(value)  # 10**abs(precision) in `round`
    if isinstance(value, str):
        return len(value) * (1 if value.isascii() else 4)
    return _text_size(value) if isinstance(value, Collection) else 0


def _operator_size(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        size = _int_bytes(left) * max(right, 0) if operator == "**" else _int_bytes(left) + _int_bytes(right)
        return size**2  # arithmetic takes such a time
    if operator == "%":
        return _format_size(left, right if isinstance(right, tuple) else (right,))
    times = sum(_units(value) for value in (left, right) if isinstance(value, int)) if operator == "*" else 1
    return times * _joined_size([value for value in (left, right) if isinstance(value, str | bytes | list | tuple)])


def _joined_size(values: Collection[Any]) -> int:
    """Bytes of values in one: four for a character of a text if one is not ASCII."""
    is_wide = any(isinstance(value, str) and not value.isascii() for value in values)
    return sum(map(sys.getsizeof, values)) * (4 if is_wide else 1)


def _format_size(template: Any, values: Collection[Any]) -> int:
    """Bytes of `template % values` or of `template.format(*values)`, whose numbers may be widths."""
    if not isinstance(template, str | bytes):
        return 0
    text = str(template)
    size = _text_size(values, MAX_BYTES if "{" in text else STEP_BYTES)
    numbers = [value for value in values if isinstance(value, int)] if "*" in text else []
    if re.search(r"{[^}]*{", text) and size < MAX_BYTES:  # a format in a format
        text += str(values)
    widths = sum(int(digits[:20]) for digits in [*re.findall(r"\d+", text), *map(str, numbers)])
    return 4 * len(text) + (text.count("%") + text.count("{")) * (4 * size + widths)


def _int_bytes(value: int) -> int:
    return value.bit_length() // 8 + 1


def _text_size(value: Any, opaque: int = STEP_BYTES) -> int:
    """Bytes of a value's text, at least; of the items of lists and dicts, too. `opaque`: of other objects."""
    if isinstance(value, str | bytes):
        return sys.getsizeof(value)
    if isinstance(value, int):
        return _int_bytes(value) * 3 + STEP_BYTES
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if not isinstance(value, Collection):
        return STEP_BYTES if value is None or isinstance(value, float | Undefined) else opaque
    size = STEP_BYTES
    for item in itertools.chain(*value.items()) if isinstance(value, Mapping) else value:
        size += _text_size(item, opaque) + STEP_BYTES
        if size > MAX_BYTES:  # lists that hold a list twice, and so on, have a text that never ends
            break
    return size
