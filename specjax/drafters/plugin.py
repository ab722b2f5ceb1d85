"""Drafters from outside: a ready `Drafter`, a function that makes one, or the name of such a function.

docs/drafters.md is a guide.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

from specjax.drafters.base import Drafter
from specjax.models.target import Target
from specjax.verify import Verifier, verify_tree


class Speculation(NamedTuple):
    """A drafter and what belongs to it.

    Attributes:
        drafter: proposes trees.
        params: its parameters, which its functions get as `Params.draft`; None: it has none.
        verify: decides which drafts are accepted; the default keeps the text the target's own.
    """

    drafter: Drafter
    params: Any = None
    verify: Verifier = verify_tree


DrafterFactory: TypeAlias = Callable[[Target], Drafter | Speculation]
"""Makes a drafter for a target, whose configuration it may look at."""


def load_drafter(name: str) -> DrafterFactory:
    """The factory that ``module:function`` names. Imports the module, which must be on Python's path.

    Raises:
        ValueError: the name has another form, or there is no such module or function.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and attribute and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"drafter {name!r}: write module:function, such as my_drafter:make")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"drafter {name!r}: cannot import {module} ({error}); is its folder in PYTHONPATH?") from error
    factory = getattr(found, attribute, None)
    if not callable(factory):
        problem = "has no function" if factory is None else f"has a {type(factory).__name__}, no function, named"
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == module]
        raise ValueError(f"drafter {name!r}: {module} {problem} {attribute}; it defines: {', '.join(own) or 'none'}")
    return cast(DrafterFactory, factory)


def make_speculation(given: Drafter | DrafterFactory | str, target: Target) -> Speculation:
    """What a ready drafter, a factory or its name gives for a target.

    Raises:
        ValueError: see `load_drafter`. TypeError: the factory returns something else.
    """
    if isinstance(given, Drafter):
        return Speculation(given)
    made = (load_drafter(given) if isinstance(given, str) else given)(target)
    if isinstance(made, Drafter):
        return Speculation(made)
    if not isinstance(made, Speculation):
        name = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
        raise TypeError(f"drafter {name!r} returned {made!r:.80}; it must return a Drafter or a Speculation")
    return made
