"""The table of algorithms, and what makes their drafters or those of functions outside of this package.

A drafter is a file with its options and its functions, and a row of `DRAFTERS`. Guide: docs/drafters.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias, cast

import jax

from specjax.config import HeadConfig, MtpConfig
from specjax.drafters.assistant import Assistant
from specjax.drafters.base import Drafter, Speculation
from specjax.drafters.block import Block
from specjax.drafters.eagle import Eagle, Eagle3
from specjax.drafters.mtp import Mtp
from specjax.drafters.ngram import MATCH_BEFORE_HEAD, Ngram
from specjax.drafters.options import DraftOptions, Loaded, NoDraft, TreeShape
from specjax.drafters.standalone import Standalone
from specjax.limits import ParameterError, shown
from specjax.models.target import Target

CHOICES: tuple[type[DraftOptions], ...] = (Eagle, Eagle3, Mtp, Assistant, Ngram)
"""Algorithms that `Auto` chooses from; the last if the model has no draft head."""


@dataclass(frozen=True, init=False)
class Auto(DraftOptions):
    """The draft head that ships for the model, else the model's MTP layers or assistant, else n-grams. On a CPU,
    n-grams draft before these (`specjax.drafters.hybrid`), unless the tree is given.

    Takes the options of these algorithms, except for `path` and `revision`: `Auto(steps=3)`. A warning names options
    that the chosen algorithm does not have.

    Attributes:
        given: values of options by name.

    Raises:
        TypeError: no algorithm has the option.
        ValueError: the values are wrong for every algorithm that has one of the options.
    """

    algorithm: ClassVar[str] = "AUTO"
    reads_mtp_layers: ClassVar[bool] = True

    given: Mapping[str, str | int | float | tuple[int, ...] | tuple[str, ...]]

    def __init__(self, **given: str | int | float | tuple[int, ...] | tuple[str, ...] | None) -> None:
        object.__setattr__(self, "given", {name: value for name, value in given.items() if value is not None})
        if unknown := self.given.keys() - self.names():
            raise TypeError(f"Auto has no option {min(unknown)!r}; it has: {', '.join(sorted(self.names()))}")
        affected = [options for options in CHOICES if self._given_of(options)]
        problems: list[ValueError] = []
        for options in affected:
            try:
                options(**self._given_of(options))
            except ValueError as error:
                problems.append(error)
        if problems and len(problems) == len(affected):
            raise problems[-1]

    def __hash__(self) -> int:
        return hash(frozenset(self.given.items()))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        names = dict.fromkeys(name for options in CHOICES for name in options.names())
        return tuple(name for name in names if name not in ("path", "revision"))

    def ngrams(self) -> Ngram | None:
        """The n-grams that draft before a head on a CPU; None: the head's tree is given, which has no others."""
        if {"steps", "topk", "nodes"} & self.given.keys():
            return None
        ngrams = Ngram(**self._given_of(Ngram))
        return replace(ngrams, min_match=max(ngrams.min_match, min(MATCH_BEFORE_HEAD, ngrams.max_match)))

    def choose(self, kind: str | None) -> tuple[DraftOptions, list[str]]:
        chosen = {options.kind: options for options in CHOICES}.get(kind, CHOICES[-1])
        effective = self._given_of(chosen)
        return chosen(**effective), [name for name in self.given if name not in effective]

    def speculation(self, loaded: Loaded) -> Speculation:
        raise ValueError(f"{self.algorithm} chooses a drafter for a model: use Engine.from_pretrained")

    def _given_of(self, options: type[DraftOptions]) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name in options.names()}


DRAFTERS: dict[str, type[DraftOptions]] = {
    options.algorithm: options for options in (NoDraft, Ngram, Eagle, Eagle3, Mtp, Assistant, Block, Standalone)
}
"""The options of each algorithm by name. A row adds a drafter, with its flags and its keys of a configuration file."""
ALIASES = {"NEXTN": Mtp.algorithm, "DSPARK": Block.algorithm, "P-EAGLE": Eagle3.algorithm, "PARD": Standalone.algorithm}
"""Other names of algorithms: SGLang's, and those of papers."""


def algorithm(name: str) -> str | None:
    """The key of `DRAFTERS`, or AUTO, for a name or alias in any case; None: there is no such algorithm."""
    name = name.upper()
    name = ALIASES.get(name, name)
    return name if name in (Auto.algorithm, *DRAFTERS) else None


def algorithms() -> str:
    """All names and aliases, for messages."""
    return ", ".join((Auto.algorithm, *DRAFTERS, *ALIASES))


def options_of(draft: object, **given: Any) -> DraftOptions:
    """Returns options unchanged, or creates the options of an algorithm from its name.

    Args:
        draft: options, or a name or alias in any case, including AUTO.
        given: with a name, options that differ from the defaults.

    Raises:
        ValueError: no algorithm has the name; lists all names.
        TypeError: neither options nor a name.
    """
    if isinstance(draft, DraftOptions):
        return draft
    if not isinstance(draft, str):
        raise TypeError(f"draft must be options such as Eagle(steps=5) or an algorithm's name, got {shown(draft)}")
    if (name := algorithm(draft)) is None:
        raise ValueError(f"no algorithm draft={shown(draft)}; there are: {algorithms()}")
    return {Auto.algorithm: Auto, **DRAFTERS}[name](**given)


DrafterFactory: TypeAlias = Callable[[Target], Drafter | Speculation]
"""Makes a drafter for a target."""


def with_kind(options: DraftOptions, kind: str) -> DraftOptions:
    """The options of the algorithm with heads of another kind, such as MTP's for EAGLE's. Raises ParameterError for an
    option that it lacks."""
    other = {each.kind: each for each in DRAFTERS.values()}[kind]
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    for each in fields(options):
        if each.name not in other.names() and given[each.name] != each.default:
            raise ParameterError(each.name, f"has no effect with {other.algorithm}", type(options).__name__)
    return other(**{name: value for name, value in given.items() if name in other.names()})


def load_drafter(name: str) -> DrafterFactory:
    """Imports the factory ``module:function``; the module must be on Python's path.

    Raises:
        ValueError: the name has another form, or the module or the function does not exist.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and attribute and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"drafter {name!r}: write module:function, such as my_drafter:make")
    try:
        imported = importlib.import_module(module)
    except SyntaxError as error:
        raise ValueError(f"drafter {name!r}: cannot import {module}: {error}") from error
    except ImportError as error:
        raise ValueError(f"drafter {name!r}: cannot import {module} ({error}); is its folder in PYTHONPATH?") from error
    factory = getattr(imported, attribute, None)
    if not callable(factory):
        problem = "has no function" if factory is None else f"has a {type(factory).__name__}, no function, named"
        defined = [key for key, value in vars(imported).items() if getattr(value, "__module__", None) == module]
        raise ValueError(
            f"drafter {name!r}: {module} {problem} {attribute}; it defines: {', '.join(defined) or 'none'}"
        )
    return cast(DrafterFactory, factory)


def make_speculation(
    draft: DraftOptions | Drafter | Speculation | DrafterFactory | str, *, target: Target | None = None,
    head: HeadConfig | MtpConfig | None = None, model: Target | None = None, backend: str | None = None,
    automatic: TreeShape | None = None, platform: str | None = None,
) -> Speculation:  # fmt: skip
    """Makes the speculation of an algorithm, a drafter, a factory or a factory's name. Parameters of a head or a model
    go into `Params.draft`.

    Args:
        draft: options, or an algorithm's name for the defaults; not AUTO, which needs a model to choose for.
        target, head, model, backend: fields of `Loaded`. Factories and algorithms with a head or model need the target.
        automatic: `Loaded.tree`.
        platform: `Loaded.platform`; None: this process's.

    Raises:
        ValueError: the algorithm does not exist, its head or model is missing, or a factory returned another type; see
            also `load_drafter`.
    """
    if isinstance(draft, Drafter):
        return Speculation(draft)
    if isinstance(draft, Speculation):
        return draft
    if isinstance(draft, DraftOptions) or (isinstance(draft, str) and ":" not in draft):
        loaded = Loaded(target, head, model, automatic, backend, platform or jax.default_backend())
        return options_of(draft).speculation(loaded)
    result = (load_drafter(draft) if isinstance(draft, str) else draft)(cast(Target, target))
    if isinstance(result, Drafter):
        return Speculation(result)
    if not isinstance(result, Speculation):
        module, name = (getattr(draft, key, None) for key in ("__module__", "__qualname__"))
        name = draft if isinstance(draft, str) else f"{module}:{name}" if module and name else repr(draft)
        raise ValueError(f"drafter {name!r} returned {result!r:.80}; it must return a Drafter or a Speculation")
    return result
