"""Multi-token prediction (MTP) heads in a target's own checkpoint. `mtp_spec` declares styles and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Float32, Int32
from specjax_kernels import mesh, rms_norm

from specjax.cache import Hidden, Positions, Tokens, Weights
from specjax.config import MtpConfig
from specjax.models import family
from specjax.models.blocks import Backend, Past, linear, soft_cap
from specjax.models.decoder import Layer
from specjax.models.mtp_spec import STYLES
from specjax.models.rope import rotations
from specjax.models.target import Target


@dataclass(frozen=True, eq=False)
class MtpHead:
    """A head and its target, with the methods of `specjax.models.draft_head.DraftHead`. The next feature is normed, and
    logits are computed from it."""

    config: MtpConfig
    target: Target
    backend: Backend = None
    index: int = 0

    @property
    def pages(self) -> Any:
        """The cache entry of a token: a pytree of `PageSpec`s."""
        return self._layer.page_spec(self.config.layer)

    def embed(self, target_params: Weights, params: Weights, tokens: Tokens) -> Hidden:
        return self.target.embed(target_params, tokens)[..., : self.target.config.hidden_size]

    def fuse(self, params: Weights, features: Float[Array, "B N M"]) -> Hidden:
        return features

    def forward(
        self, params: Weights, embedded: Hidden, feature: Hidden, positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, Any]:
        """The next features, and the cache entries of the block."""
        x, rotation = self._inputs(params, embedded, feature, positions)
        out, block = self._run(params, x, rotation, positions, mask, past)
        return self._norm(params, "final_norm", out), block

    def keep(self, params: Weights, embedded: Hidden, feature: Hidden, positions: Positions) -> Any:
        """The cache entries of a block, as `forward` returns them."""
        return self._run(params, *self._inputs(params, embedded, feature, positions), method="keep")

    def _inputs(self, params: Weights, embedded: Hidden, feature: Hidden, positions: Positions) -> tuple[Hidden, Any]:
        """The layer's input, and the rotation."""
        config, style = self.config.layer, STYLES[self.config.style]
        if style.first_embedding_zero:
            embedded = jnp.where((positions == 0)[..., None], jnp.zeros_like(embedded), embedded)
        pair = [self._norm(params, "embedding_norm", embedded), self._norm(params, "feature_norm", feature)]
        x = linear(jnp.concatenate(pair[::-1] if style.feature_first else pair, axis=-1), self._around(params), "fc")
        return x, rotations(config.rope, config.latent.rope_dim if config.latent else config.head_dim, positions)

    def _run(self, params: Weights, *arguments: Any, method: str | None = None) -> Any:
        """Apply the layer, or one of its methods."""
        config = self.config.layer
        leaves = family(config).table(config)[1].leaves
        layer = self._layer(config, leaves, None, self.backend, parent=None)
        weights = {leaf.name: params[f"layers_{self.index}"][leaf.name] for leaf in leaves}
        return layer.apply({"params": weights}, *arguments, method=method)

    def _around(self, params: Weights) -> Weights:
        """The weights around the layer: of this head, or shared by all heads."""
        return params[f"layers_{self.index}"] if STYLES[self.config.style].shared is None else params

    def _norm(self, params: Weights, name: str, x: Hidden) -> Hidden:
        return rms_norm(x, self._around(params)[name], self.config.layer.norm_epsilon, offset=self._layer.norm_offset)

    def unembed(self, target_params: Weights, params: Weights, out: Hidden) -> Float32[Array, "B N W"]:
        """Logits of features that `forward` returned."""
        if self.config.own_head:
            return soft_cap(mesh.split(kernels.unembed(out, params["head"]), 2), self.config.logit_softcap)
        return self.target.unembed(target_params, out)

    def target_ids(self, params: Weights, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The target's ids of tokens of the head."""
        return params["ids"][ids] if self.config.mapped else ids

    @property
    def _layer(self) -> type[Layer]:
        return family(self.config.layer).layer
