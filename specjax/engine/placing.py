"""Parameters of a target and of what drafts for it on the devices of a mesh, as their tables declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from specjax_kernels import Quantised

from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.drafters.base import Params
from specjax.drafters.standalone import StandaloneParams
from specjax.limits import ParameterError
from specjax.models import table
from specjax.models.head_spec import head_sizes, head_table
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import Leaf, Scope, Sizes, Table, dimensions, map_leaves
from specjax.models.target import Target
from specjax.parallel.sharding import Widened, check_experts, copies_of, everywhere, fitted, placed, put, put_quantised

AnyModel = HeadConfig | MtpConfig | Target | None
"""What `Params.draft` belongs to: a head, layers or a model; None: neither."""

MAPPED = Scope((Leaf("head", "M -> W"),))
"""What a token map adds to MTP layers beside `ids`."""


def check_models(target: Target, draft: AnyModel, count: int, groups: int = 1) -> None:
    """Raises ValueError if the heads of a model, or of what drafts for it, cannot be split over so many devices, or
    their experts spread over so many groups of them."""
    check_experts(target.config, groups)
    for model, what in ((target, "the model"), (draft, "the draft")):
        config = model.config if isinstance(model, Target) else model
        if config is None or fitted(config, count, what, groups) == config:
            continue
        problem = (
            f"{count}: {what} has fewer key/value heads; load it by Engine.from_pretrained, which makes "
            f"{copies_of(config, count)} copies of each"
        )
        raise ParameterError("tensor_parallel", problem, "EngineConfig")


def place_params(mesh: Mesh, params: Params, target: Target, draft: AnyModel) -> Params:
    """The parameters of both models on the mesh. What is not declared is on every device."""
    if mesh.size == 1:
        return _everywhere(mesh, params)
    return Params(_model(mesh, params.target, target.config), _draft(mesh, params.draft, draft, target))


def _model(mesh: Mesh, weights: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    return _placed(mesh, weights, table(config), dimensions(config), config.dtype, "the model")


def _draft(mesh: Mesh, params: Any, draft: AnyModel, target: Target) -> Any:
    if isinstance(draft, Target) and isinstance(params, StandaloneParams):
        small = _everywhere(mesh, (params.ids, params.reads))
        return StandaloneParams(_model(mesh, params.model, draft.config), *small)
    if isinstance(draft, HeadConfig):
        sizes = head_sizes(draft, target.config.vocab_size)
        return _placed(mesh, params, head_table(draft), sizes, draft.dtype, "the draft")
    if isinstance(draft, MtpConfig):
        declared = (*mtp_table(draft), MAPPED)
        return _placed(mesh, params, declared, mtp_sizes(draft), draft.dtype, "the draft")
    return _everywhere(mesh, params)


def _everywhere(mesh: Mesh, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: placed(leaf, everywhere(mesh)), tree)


def _placed(
    mesh: Mesh, weights: Mapping[str, Any], declared: Table, sizes: Sizes, dtype: str, what: str
) -> dict[str, Any]:
    widened = Widened()

    def place(value: Any, leaf: Any) -> Any:
        if isinstance(value, Mapping):
            inner = leaf if isinstance(leaf, dict) else {}
            return {name: place(part, inner.get(name)) for name, part in value.items()}
        if isinstance(value, Quantised) and leaf is not None:
            return put_quantised(mesh, value, leaf, lambda floats: floats.reshape(leaf.shape(sizes)), dtype, widened)
        return put(mesh, value, leaf)

    found = place(weights, map_leaves(declared, lambda leaf: leaf))
    widened.tell(what)
    return found
