"""From options to drafters."""

from __future__ import annotations

import importlib
import logging
from typing import cast

import jax

from specjax.config import HeadConfig
from specjax.drafters.base import Drafter
from specjax.drafters.eagle import Confidence, eagle_drafter
from specjax.drafters.ngram import ngram_drafter
from specjax.drafters.none import none_drafter
from specjax.drafters.options import AUTOMATIC_TREES, DRAFTERS, OTHER_TREE, DraftOptions, HeadOptions, Ngram, options_of
from specjax.drafters.shape import TreeShape
from specjax.models.target import Target

logger = logging.getLogger(__name__)


def make_drafter(
    draft: DraftOptions | str,
    *,
    target: Target | None = None,
    head: HeadConfig | None = None,
    backend: str | None = None,
    automatic: TreeShape | None = None,
) -> Drafter:
    """The drafter of an algorithm.

    Args:
        draft: its options, or its name in any case for the defaults; not AUTO, which needs a model to choose for.
        target, head: for algorithms with a draft head; the head's parameters go into `Params.draft`.
        backend: the head's attention implementation.
        automatic: the head's tree where the options give no number of it; None: the target's family decides.

    Raises:
        ValueError: no such algorithm, or no head of the kind that it needs.
    """
    options = options_of(draft)
    name = options.algorithm
    if options.kind is not None and (target is None or head is None or options.kind != head.kind):
        given = "no head" if head is None else f"a head of kind {head.kind!r}"
        given += " and no target" if target is None else ""
        raise ValueError(f"{name} needs a target and a draft head of kind {options.kind!r}; what is given is {given}")
    if name not in DRAFTERS:
        raise ValueError(f"{name} is no drafter; there are: {', '.join(DRAFTERS)}")
    module, _, function = DRAFTERS[name].factory.partition(":")
    make = getattr(importlib.import_module(module), function)
    return cast(Drafter, make(options, target=target, head=head, backend=backend, automatic=automatic))


def make_none(options: DraftOptions, **models: object) -> Drafter:
    del options, models
    return none_drafter()


def make_ngram(options: Ngram, **models: object) -> Drafter:
    del models
    return ngram_drafter(options.on(jax.default_backend()))._replace(explicit_width=options.nodes is not None)


def make_eagle(
    options: HeadOptions, *, target: Target, head: HeadConfig, backend: str | None, automatic: TreeShape | None
) -> Drafter:
    """The drafter of EAGLE, EAGLE-3 and MTP."""
    shape = options.tree(automatic or AUTOMATIC_TREES.get(target.config.family, OTHER_TREE))
    if options.nodes not in (None, shape.nodes):
        owner = type(options).__name__
        logger.warning(
            "%s.nodes is %d and not %d: with %s.topk 1 the draft is a chain of %s.steps + 1 tokens",
            owner, shape.nodes, options.nodes, owner, owner,
        )  # fmt: skip
    given = [number is not None for number in (options.steps, options.topk, options.nodes)]
    how = "given" if all(given) else "what was not given was chosen" if any(given) else "automatic"
    return eagle_drafter(
        target,
        head,
        shape,
        confidence=Confidence(options.min_probability or 0.0, skips=jax.default_backend() == "cpu"),
        backend=backend,
        explicit_width=any(given),
        note=f"{shape} ({how})",
    )
