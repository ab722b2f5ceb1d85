"""Public names as `help` shows them: documented fields. `make check` tests the types in public_types.py."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing

import pytest

import specjax
from specjax.checkpoint.prompts import Chat
from specjax.engine.intake import with_sampling
from specjax.limits import setting_of


def fields_of(kind: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass or a NamedTuple."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return getattr(kind, "_fields", ())


def classes_in(annotation: object) -> list[type]:
    """The classes that an annotation names, at any depth."""
    inner = [kind for argument in typing.get_args(annotation) for kind in classes_in(argument)]
    return [annotation, *inner] if inspect.isclass(annotation) else inner


def kinds() -> list[type]:
    """Public classes with fields, and the classes of their fields and properties."""
    classes, queue = set(), [value for name in specjax.__all__ if inspect.isclass(value := getattr(specjax, name))]
    while queue:
        kind = queue.pop()
        if kind in classes or not kind.__module__.startswith("specjax.") or not fields_of(kind):
            continue
        values = list(typing.get_type_hints(kind).values())
        getters = [member.fget for member in vars(kind).values() if isinstance(member, property)]
        values += [typing.get_type_hints(get, vars(sys.modules[kind.__module__])).get("return") for get in getters]
        queue += [inner for value in values for inner in classes_in(value)]
        classes.add(kind)
    return sorted(classes, key=lambda kind: kind.__name__)


def explained(kind: type) -> dict[str, str]:
    """Field -> its text in `help`."""
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): (.+(?:\n {6}.+)*)", inspect.getdoc(kind) or "", flags=re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_fields_are_documented(kind):
    names = {member.__name__ for member in kinds()}
    assert names > {"SamplingParams", "Steps", "TokenLogprob", "SamplingRows", "Experts"}
    said = explained(kind)
    short = {name: said.get(name) for name in fields_of(kind) if len(said.get(name, "").split()) < 3}
    assert not short, f"{kind.__name__}: the docstring says too little of these fields"
    if dataclasses.is_dataclass(kind):
        for name in fields_of(kind):
            bounds = [f"{bound}" for bound in setting_of(kind, name).range if bound is not None]
            missing = set(bounds) - set(re.findall(r"-?\d+", said[name]))
            assert not missing or "`" in said[name], f"{kind.__name__}.{name}: no bounds {bounds} in the docstring"


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("prompts", "single"),
    [
        ("once", True), ([1, 2], True), ((1, 2), True), (range(1, 3), True), (MESSAGES, True), (Chat(MESSAGES), True),
        ([], False), (["once", "twice"], False), (("once", "twice"), False), (iter(["once"]), False),
        ([[1, 2], [3]], False), ([MESSAGES, MESSAGES], False), ([Chat(MESSAGES)], False),
        (["once", [1, 2], MESSAGES], False),
    ],
)  # fmt: skip
def test_single_or_several_prompts(prompts, single):
    """Agrees with the types in `public_types.py`."""
    assert with_sampling(prompts, None)[0] is single
