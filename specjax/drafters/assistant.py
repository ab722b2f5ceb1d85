"""ASSISTANT: Gemma 4's assistant drafts from the target's own keys and values.

n tokens are committed, and the root x_n was drawn last. `specjax.models.assistant` describes the forward:

    observe   keeps the target's hidden state at the last committed token, n - 1, after the final norm: the state from
              which the target drew x_n
    propose   runs the assistant over the root and this state; a node of a level reads its parent's feature. A level is
              independent queries over the target's pages of two layers (`Drafter.reads_layers`)

The assistant has no pages. A tree of D levels costs D forwards, each of a level's nodes (`grow`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from specjax.cache import PoolShape
from specjax.config import AssistantConfig
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, put_rows, take_rows
from specjax.drafters.grow import Read, grow, tree_drafter
from specjax.drafters.options import Coupling, ModelOptions, TreeShape, position_limit
from specjax.limits import documented
from specjax.models.assistant import AssistantHead
from specjax.models.target import Target
from specjax.tree import DraftTree


class AssistantState(NamedTuple):
    hidden: Float[Array, "R M"]  # the target's, after the final norm, at each row's last committed token


def assistant_drafter(
    target: Target, config: AssistantConfig, shape: TreeShape, *, backend: str | None = None,
    positions: int | None = None, coupling: Coupling = "noise",
) -> Drafter:  # fmt: skip
    """Drafts with an assistant whose parameters are `Params.draft`. Arguments: see `eagle_drafter`.

    Raises:
        ValueError: the assistant does not fit the target.
    """
    model = AssistantHead(config, target, backend)
    reads = tuple(sorted({*model.reads}))

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params, pool
        return AssistantState(jnp.zeros((rows, config.feature_size), jnp.dtype(config.dtype)))

    def propose(params: Params, state: AssistantState, context: Context) -> tuple[DraftTree, DraftState]:
        pages = dict(zip(reads, context.layers, strict=True))

        def read(level: int, tokens: Int32[Array, "B k"], feature: Float[Array, "B k M"], *_: Any) -> Read:
            del level
            embedded = model.embed(params.target, tokens)
            where = context.page_table, context.prefix_length, context.attended
            out = model.forward(params.draft, embedded, feature, pages, *where)
            logits, ids = model.unembed(params.draft, out)
            return Read(logits, model.feature(params.draft, out), None, ids)

        start = read(0, context.root[:, None], take_rows(state.hidden, context)[:, None])
        return grow(context, shape, start, read, coupling=coupling), state

    def observe(params: Params, state: AssistantState, context: Context, seen: Observation) -> DraftState:
        del params
        assert seen.features is not None
        last = jnp.take_along_axis(seen.features, jnp.maximum(seen.length - 1, 0)[:, None, None], axis=1)[:, 0]
        return AssistantState(put_rows(state.hidden, last, context, seen))

    limit = position_limit(target, config, positions)
    drafter = tree_drafter(Assistant.algorithm, config.features, shape, limit, init, propose, observe)
    return drafter._replace(reads_layers=reads)


@documented
@dataclass(frozen=True)
class Assistant(ModelOptions):
    """Gemma 4's assistant, a small model that reads the target's keys and values. MTP (NEXTN) with an assistant's
    folder is this."""

    algorithm: ClassVar[str] = "ASSISTANT"
    needs: ClassVar[str | None] = "an assistant of the model"
    kind: ClassVar[str | None] = AssistantConfig.kind
    trees: ClassVar[Mapping[str, TreeShape]] = {}

    def drafter(self, target: Target, draft: Any, shape: TreeShape, largest: TreeShape, **shared: Any) -> Drafter:
        return assistant_drafter(target, draft, shape, **shared)
