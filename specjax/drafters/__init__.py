"""Drafters, and the table from an algorithm's name to what makes one: the only place that asks for one by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax

from specjax.config import HeadConfig, HeadKind
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params
from specjax.drafters.eagle import Confidence, eagle_drafter, probability
from specjax.drafters.ngram import NgramConfig, ngram_config, ngram_drafter
from specjax.drafters.none import none_drafter
from specjax.drafters.shape import TreeShape, tree_shape
from specjax.models.protocol import Target

logger = logging.getLogger(__name__)

AUTOMATIC_TREES = {"llama": (5, 4, 8)}
OTHER_TREE = (3, 1, 4)
"""Steps, top-k and draft tokens of EAGLE where none is given: SGLang's, by the target's family."""


@dataclass(frozen=True)
class Algorithm:
    """What a name stands for.

    Attributes:
        flags: keyword arguments that `check` and `make` take.
        check: refuses wrong flags; needs nothing else, so it can be called before anything is loaded.
        make: (target, head, backend, **flags) -> Drafter. Target and head may be None where `head` is. Where it is not,
            `automatic` may be a flag, too: the tree where no number is given.
        head: the kind of draft head that it needs a checkpoint of; None: it needs none.
        takes_token_map: whether its vocabulary may be reduced (FR-Spec); False: a head brings its own.
    """

    flags: frozenset[str]
    check: Callable[..., Any]
    make: Callable[..., Drafter]
    head: HeadKind | None = None
    takes_token_map: bool = False


def _ngram_config(**flags: Any) -> NgramConfig:
    return ngram_config(jax.default_backend(), **flags)


def _check_eagle(
    num_steps: int | None = None,
    eagle_topk: int | None = None,
    num_draft_tokens: int | None = None,
    draft_p_min: Any = 0.0,
) -> None:
    """What is wrong for every target; only one with fewer automatic steps can find more wrong."""
    _confidence(draft_p_min)
    tree_shape(num_steps, eagle_topk, num_draft_tokens, automatic=max(OTHER_TREE, *AUTOMATIC_TREES.values()))


def _confidence(draft_p_min: Any) -> Confidence:
    return Confidence(probability(draft_p_min), skips=jax.default_backend() == "cpu")


def _make_eagle(
    target: Target,
    head: HeadConfig,
    backend: str | None,
    num_steps: int | None = None,
    eagle_topk: int | None = None,
    num_draft_tokens: int | None = None,
    draft_p_min: Any = 0.0,
    automatic: tuple[int, int, int] | None = None,
) -> Drafter:
    automatic = automatic or AUTOMATIC_TREES.get(target.config.family, OTHER_TREE)
    chosen = tree_shape(num_steps, eagle_topk, num_draft_tokens, automatic=automatic)
    if chosen.warning:
        logger.warning("%s", chosen.warning)
    confidence = _confidence(draft_p_min)
    return eagle_drafter(
        target,
        head,
        chosen.shape,
        confidence=confidence,
        backend=backend,
        explicit_width=chosen.explicit_width,
        note=chosen.note,
    )


def _make_ngram(target: Target | None, head: HeadConfig | None, backend: str | None, **flags: Any) -> Drafter:
    return ngram_drafter(_ngram_config(**flags))._replace(explicit_width="num_draft_tokens" in flags)


EAGLE_FLAGS = frozenset({"num_steps", "eagle_topk", "num_draft_tokens", "draft_p_min"})

DRAFTERS: dict[str, Algorithm] = {
    "NONE": Algorithm(frozenset(), dict, lambda target, head, backend: none_drafter()),
    "NGRAM": Algorithm(
        frozenset(field.name for field in fields(NgramConfig)),
        _ngram_config,
        _make_ngram,
    ),
    "EAGLE": Algorithm(EAGLE_FLAGS, _check_eagle, _make_eagle, head="eagle", takes_token_map=True),
    "EAGLE3": Algorithm(EAGLE_FLAGS, _check_eagle, _make_eagle, head="eagle3"),
    "MTP": Algorithm(EAGLE_FLAGS, _check_eagle, _make_eagle, head="mtp", takes_token_map=True),
}
"""Algorithm name to what makes its drafter."""

AUTO = "AUTO"
DEFAULT = "NGRAM"
"""What AUTO means for a model for which no draft head ships."""


def is_automatic(name: str) -> bool:
    """Whether the model decides which algorithm the name stands for."""
    return name.upper() == AUTO


def algorithm_named(name: str, *, shipped: str | None = None) -> tuple[str, Algorithm]:
    """The algorithm of a name in any case, and the name that it has in the table.

    Args:
        shipped: the kind of the draft head that ships for the model, which AUTO then means.

    Raises:
        ValueError: there is none; names all.
    """
    found = name.upper()
    if is_automatic(name):
        found = next((key for key, other in DRAFTERS.items() if shipped and other.head == shipped), DEFAULT)
    if found not in DRAFTERS:
        raise ValueError(
            f"no speculative algorithm {name!r} (--speculative-algorithm); there are: {AUTO}, {', '.join(DRAFTERS)}"
        )
    return found, DRAFTERS[found]


def check_flags(algorithm: str, flags: Mapping[str, Any]) -> None:
    """Refuses what can be seen to be wrong before a model is loaded.

    Raises:
        ValueError: no such algorithm, a flag that it does not have, or a value out of range.
    """
    name, found = algorithm_named(algorithm)
    unknown = sorted(set(flags) - found.flags)
    if unknown:
        takes = ", ".join(sorted(found.flags)) or "none"
        raise ValueError(f"--speculative-algorithm {name} has no flag {unknown[0]!r}; it has: {takes}")
    found.check(**flags)


def check_automatic(flags: Mapping[str, Any]) -> None:
    """Refuses what is wrong whatever AUTO comes to mean: a flag that nothing has that it may mean, or a value that none
    of those that have the flag can work with.

    Raises:
        ValueError: see above.
    """
    known = frozenset[str]().union(*(found.flags for found in automatic_choices().values()))
    if unknown := sorted(set(flags) - known):
        raise ValueError(
            f"--speculative-algorithm {AUTO} has no flag {unknown[0]!r}; it has: {', '.join(sorted(known))}"
        )
    refusals: list[ValueError] = []
    concerned = [(name, found) for name, found in automatic_choices().items() if found.flags & set(flags)]
    for name, found in concerned:
        try:
            check_flags(name, {key: value for key, value in flags.items() if key in found.flags})
        except ValueError as error:
            refusals.append(error)
    if refusals and len(refusals) == len(concerned):
        raise refusals[-1]


def automatic_choices() -> dict[str, Algorithm]:
    """What AUTO may mean, the last of them where nothing better is there."""
    names = dict.fromkeys([*(name for name, found in DRAFTERS.items() if found.head), DEFAULT])
    return {name: DRAFTERS[name] for name in names}


def flag_named(name: str) -> str:
    """The command's flag, `--speculative-num-steps`, of an algorithm's, `num_steps`."""
    owners = [key for key, found in DRAFTERS.items() if name in found.flags]
    prefix = "ngram-" if owners == ["NGRAM"] else ""
    return f"--speculative-{prefix}{name.replace('_', '-')}"


def make_drafter(
    algorithm: str,
    flags: Mapping[str, Any] | None = None,
    *,
    target: Target | None = None,
    head: HeadConfig | None = None,
    backend: str | None = None,
    automatic: tuple[int, int, int] | None = None,
) -> Drafter:
    """The drafter of an algorithm's name, in any case.

    Args:
        flags: the algorithm's, by their names without the prefix `--speculative-` (and `ngram-`).
        target, head: for EAGLE and EAGLE3; the head's parameters go into `Params.draft`.
        backend: the head's attention implementation.
        automatic: steps, top-k and draft tokens of the head's tree where the flags have none of the three; None: the
            target's family decides.

    Raises:
        ValueError: no such algorithm, a flag that it does not have, or no head of the kind that it needs.
    """
    flags = dict(flags or {})
    check_flags(algorithm, flags)
    name, found = algorithm_named(algorithm)
    if found.head is not None and (target is None or head is None or head.kind != found.head):
        given = "no head" if head is None else f"a head of kind {head.kind!r}"
        given += " and no target" if target is None else ""
        raise ValueError(f"{name} needs a target and a draft head of kind {found.head!r}; what is given is {given}")
    tree = {} if automatic is None or found.head is None else {"automatic": automatic}
    return found.make(target, head, backend, **flags, **tree)


__all__ = [
    "AUTO",
    "DRAFTERS",
    "Algorithm",
    "Confidence",
    "Context",
    "DraftState",
    "Drafter",
    "NgramConfig",
    "Observation",
    "Params",
    "TreeShape",
    "algorithm_named",
    "automatic_choices",
    "check_automatic",
    "check_flags",
    "eagle_drafter",
    "flag_named",
    "is_automatic",
    "make_drafter",
    "ngram_config",
    "ngram_drafter",
    "none_drafter",
    "tree_shape",
]
