"""No drafts: a tree of one node. Plain decoding is speculation that never guesses."""

from __future__ import annotations

from specjax.cache import PoolShape
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params
from specjax.tree import DraftTree, root_only


def none_drafter() -> Drafter:
    """A drafter without state. Accept length is exactly 1."""

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params, rows, pool
        return ()

    def propose(params: Params, state: DraftState, context: Context) -> tuple[DraftTree, DraftState]:
        del params
        return root_only(context.root), state

    def observe(params: Params, state: DraftState, context: Context, observation: Observation) -> DraftState:
        del params, context, observation
        return state

    return Drafter("NONE", features=None, width=1, depth=0, init=init, propose=propose, observe=observe)
