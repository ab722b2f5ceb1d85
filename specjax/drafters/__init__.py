"""Drafters, and the table from an algorithm's name to its factory: the only place that asks for one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params
from specjax.drafters.ngram import NgramConfig, ngram_config, ngram_drafter
from specjax.drafters.none import none_drafter

DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "NONE": lambda **unused: none_drafter(),
    "NGRAM": lambda **flags: ngram_drafter(ngram_config(jax.default_backend(), **flags)),
}
"""Algorithm name to factory. A factory takes its algorithm's flags as keyword arguments."""

AUTO = "AUTO"
DEFAULT = "NGRAM"
"""What AUTO means for a model without a draft head or layers of its own."""


def make_drafter(algorithm: str, flags: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter of an algorithm's name, in any case.

    Raises:
        ValueError: no such algorithm, or a flag that it does not have.
    """
    name = DEFAULT if algorithm.upper() == AUTO else algorithm.upper()
    if name not in DRAFTERS:
        raise ValueError(
            f"no speculative algorithm {algorithm!r} (--speculative-algorithm); there are: "
            f"{AUTO}, {', '.join(DRAFTERS)}"
        )
    try:
        return DRAFTERS[name](**dict(flags or {}))
    except TypeError as error:
        raise ValueError(f"--speculative-algorithm {name} does not take these flags: {error}") from None


__all__ = [
    "AUTO",
    "DRAFTERS",
    "Context",
    "DraftState",
    "Drafter",
    "NgramConfig",
    "Observation",
    "Params",
    "make_drafter",
    "ngram_config",
    "ngram_drafter",
    "none_drafter",
]
