"""No drafts: a tree of one node. Plain decoding is speculation that never guesses."""

from __future__ import annotations

from specjax.drafters.base import Drafter
from specjax.tree import root_only


def none_drafter() -> Drafter:
    """A drafter without state. Accept length is exactly 1."""
    return Drafter(
        "NONE",
        features=None,
        width=1,
        depth=0,
        init=lambda params, rows, pool: (),
        propose=lambda params, state, context: (root_only(context.root), state),
        observe=lambda params, state, context, observation: state,
    )
