"""The table of algorithms: names and aliases to options, and AUTO, which chooses one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specjax.drafters.options import DraftOptions, Eagle, Eagle3, Mtp, Ngram, NoDraft, Standalone
from specjax.limits import shown

CHOICES: tuple[type[DraftOptions], ...] = (Eagle, Eagle3, Mtp, Ngram)
"""What `Auto` may choose; the last where the model has no draft head."""


@dataclass(frozen=True, init=False)
class Auto(DraftOptions):
    """The draft head that ships for the model, else the model's MTP layers, else n-grams.

    Takes the options of all algorithms that it may choose, except for `path` and `revision`: `Auto(steps=3)`. A warning
    names those that the chosen algorithm does not have.

    Attributes:
        given: maps names of options to values.

    Raises:
        TypeError: no algorithm has the option.
        ValueError: none of the algorithms that have one of the options can work with the values.
    """

    algorithm: ClassVar[str] = "AUTO"

    given: Mapping[str, str | int | float]

    def __init__(self, **given: str | int | float | None) -> None:
        object.__setattr__(self, "given", {name: value for name, value in given.items() if value is not None})
        if unknown := self.given.keys() - self.names():
            raise TypeError(f"Auto has no option {min(unknown)!r}; it has: {', '.join(sorted(self.names()))}")
        concerned = [options for options in CHOICES if self._own(options)]
        problems: list[ValueError] = []
        for options in concerned:
            try:
                options(**self._own(options))
            except ValueError as error:
                problems.append(error)
        if problems and len(problems) == len(concerned):
            raise problems[-1]

    def __hash__(self) -> int:
        return hash(frozenset(self.given.items()))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        every = dict.fromkeys(name for options in CHOICES for name in options.names())
        return tuple(name for name in every if name not in ("path", "revision"))

    def choose(self, kind: str | None) -> tuple[DraftOptions, list[str]]:
        chosen = {options.kind: options for options in CHOICES}.get(kind, CHOICES[-1])
        own = self._own(chosen)
        return chosen(**own), [name for name in self.given if name not in own]

    def _own(self, options: type[DraftOptions]) -> dict[str, Any]:
        """The given options that an algorithm has."""
        return {name: value for name, value in self.given.items() if name in options.names()}


DRAFTERS: dict[str, type[DraftOptions]] = {
    each.algorithm: each for each in (NoDraft, Ngram, Eagle, Eagle3, Mtp, Standalone)
}
"""The options of each algorithm by its name; `factories` makes the drafters."""
ALIASES = {"NEXTN": Mtp.algorithm}
"""Other names of algorithms: SGLang's."""


def algorithm(name: str) -> str | None:
    """An algorithm's name, AUTO included, as `DRAFTERS` has it; None: there is none. Any case, aliases too."""
    name = name.upper()
    name = ALIASES.get(name, name)
    return name if name in (Auto.algorithm, *DRAFTERS) else None


def algorithms() -> str:
    """The names that `algorithm` knows, for messages."""
    return ", ".join((Auto.algorithm, *DRAFTERS, *ALIASES))


def options_of(draft: object, **given: Any) -> DraftOptions:
    """Options as they are, or those of an algorithm's name in any case, AUTO included.

    Args:
        given: with a name, the options that differ from the defaults.

    Raises:
        ValueError: no algorithm has the name; lists all.
        TypeError: neither options nor a name.
    """
    if isinstance(draft, DraftOptions):
        return draft
    if not isinstance(draft, str):
        raise TypeError(f"draft must be options such as Eagle(steps=5) or an algorithm's name, got {shown(draft)}")
    if (name := algorithm(draft)) is None:
        raise ValueError(f"no algorithm draft={shown(draft)}; there are: {algorithms()}")
    return {Auto.algorithm: Auto, **DRAFTERS}[name](**given)
