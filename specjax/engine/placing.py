"""Parameters of a target and of what drafts for it on the devices of a mesh, as their tables declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.config import HeadConfig, MtpConfig
from specjax.drafters.base import Params
from specjax.drafters.standalone import StandaloneParams
from specjax.models import table
from specjax.models.head_spec import head_table
from specjax.models.mtp_spec import mtp_table
from specjax.models.params import Leaf, Scope, Table, map_leaves
from specjax.models.target import Target
from specjax.sharding import copies_of, everywhere, fitted, put

AnyModel = HeadConfig | MtpConfig | Target | None
"""What `Params.draft` belongs to: a head, layers or a model; None: neither."""

MAPPED = Scope((Leaf("head", "M -> W"),))
"""What a token map adds to MTP layers beside `ids`."""


def check_models(target: Target, draft: AnyModel, count: int) -> None:
    """Raises ValueError if the heads of a model, or of what drafts for it, cannot be split over so many devices."""
    for model, what in ((target, "the model"), (draft, "the draft")):
        config = model.config if isinstance(model, Target) else model
        if config is None or fitted(config, count, what) == config:
            continue
        raise ValueError(
            f"EngineConfig.tensor_parallel {count}: {what} has fewer key/value heads; load it by "
            f"Engine.from_pretrained, which makes {copies_of(config, count)} copies of each"
        )


def place_params(mesh: Mesh, params: Params, target: Target, draft: AnyModel) -> Params:
    """The parameters of both models on the mesh. What is not declared is on every device."""
    return Params(_placed(mesh, params.target, table(target.config)), _draft(mesh, params.draft, draft))


def _draft(mesh: Mesh, params: Any, draft: AnyModel) -> Any:
    if isinstance(draft, Target) and isinstance(params, StandaloneParams):
        small = jax.device_put((params.ids, params.reads), everywhere(mesh))
        return StandaloneParams(_placed(mesh, params.model, table(draft.config)), *small)
    if isinstance(draft, HeadConfig):
        return _placed(mesh, params, head_table(draft))
    if isinstance(draft, MtpConfig):
        return _placed(mesh, params, (*mtp_table(draft), MAPPED))
    return jax.device_put(params, everywhere(mesh))


def _placed(mesh: Mesh, weights: Mapping[str, Any], declared: Table) -> dict[str, Any]:
    def place(value: Any, leaf: Any) -> Any:
        if isinstance(value, Mapping):
            inner = leaf if isinstance(leaf, dict) else {}
            return {name: place(part, inner.get(name)) for name, part in value.items()}
        return put(mesh, value, leaf)

    return place(weights, map_leaves(declared, lambda leaf: leaf))
