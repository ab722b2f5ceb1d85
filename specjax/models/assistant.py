"""Gemma 4's assistants: four layers of Gemma 4 without keys and values, which read those of two of the target's layers.

A node of a draft tree is a token with a feature g of the target's width. n tokens are committed, x_n is the root:

    z = fc(e, g)            e: the target's embedding, scaled as the target scales it
    z = layers(z)           attention to the committed tokens 0 .. n - 1 alone, all of them or those in the window
    o = norm(z)             logits = o head, or of the tokens of the best clusters;  the children's g = feature(o)

The root's g is the target's hidden state after the final norm at token n - 1. Nodes do not see each other, and all of a
tree have one position (`AssistantConfig.position`), so a node depends on its token and its g alone. Layers with a
window read the target's last layer with keys of its own and a window, the others the last one without. Sources:
transformers' `gemma4_assistant`; google-ai-edge/LiteRT-LM; sgl-project/sglang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Float32, Int32
from specjax_kernels import mesh, pack_bits, rms_norm

from specjax.cache import Hidden, PageTable, PerRequest, Tokens, Weights
from specjax.config import AssistantConfig
from specjax.models import family
from specjax.models.blocks import Backend, KeyValue, Past, linear, soft_cap
from specjax.models.decoder import embedding_rows
from specjax.models.mtp_spec import misfit, mtp_table
from specjax.models.params import CLUSTERED
from specjax.models.rope import rotations
from specjax.models.target import Target

Feature: TypeAlias = Float[Array, "B N F"]
"""Of the target's width."""


@dataclass(frozen=True, eq=False)
class AssistantHead:
    """An assistant and its target. Raises ValueError unless the target has the layers that it reads."""

    config: AssistantConfig
    target: Target
    backend: Backend = None

    def __post_init__(self) -> None:
        if problem := misfit(self.config, self.target.config):
            raise ValueError(problem)

    @property
    def reads(self) -> tuple[int, ...]:
        """The target's layer that each layer reads."""
        layer = self.config.layer
        windows = (layer.window(i) is not None for i in range(layer.num_layers))
        return tuple(self.target.config.last_owner(windowed=windowed) for windowed in windows)

    def embed(self, target_params: Weights, tokens: Tokens) -> Feature:
        rows = self.target.embed(target_params, tokens)[..., : self.config.feature_size]
        return rows * jnp.asarray(family(self.config.layer).input_scale(self.target.config), rows.dtype)

    def forward(
        self, params: Weights, embedded: Feature, feature: Feature, pages: dict[int, KeyValue], page_table: PageTable,
        prefix_length: PerRequest, attended: PerRequest,
    ) -> Hidden:  # fmt: skip
        """Outputs of k nodes of each request, [B, k, M], after the final norm.

        Args:
            pages: cache entries [P, S, K, E] of each layer in `reads`.
            attended: n; INACTIVE skips the request.
        """
        config, batch, count = self.config.layer, *embedded.shape[:2]
        assert config.kinds is not None
        at = jnp.broadcast_to(prefix_length[:, None] + self.config.position, (batch, count))
        everywhere = rotations(config.rope, config.kinds.head_dim, at)
        in_windows = rotations(config.window_rope or config.rope, config.head_dim, at)
        # Attention takes a block with keys of its own: these are zeros that no node sees.
        mask = jnp.asarray(pack_bits(np.zeros((1, count, count), bool)))
        x = linear(jnp.concatenate([embedded, feature], axis=-1), params, "fc")
        scopes, kind = mtp_table(self.config)[1:], family(config).layer
        for i, (scope, source) in enumerate(zip(scopes, self.reads, strict=True)):
            layer = kind(config, scope.leaves, config.window(i), self.backend, parent=None)
            unseen = KeyValue(*(jnp.zeros((batch, count, *leaf.shape[2:]), leaf.dtype) for leaf in pages[source]))
            past = Past(pages[source], page_table, attended, shared=unseen)
            rotation = everywhere if config.window(i) is None else in_windows
            x, _ = layer.apply({"params": params[scope.name]}, x, rotation, at, mask, past)
        return rms_norm(x, params["final_norm"], config.norm_epsilon)

    def feature(self, params: Weights, out: Hidden) -> Feature:
        """The feature of the nodes' children."""
        return linear(out, params, "feature")

    def unembed(self, params: Weights, out: Hidden) -> tuple[Float32[Array, "B k W"], Int32[Array, "B k W"] | None]:
        """The logits, and the ids of their tokens; None: all tokens of the target."""
        cap = self.config.layer.logit_softcap
        if not self.config.centroids:
            return soft_cap(mesh.split(kernels.unembed(out, params["head"]), 2), cap), None
        _, best = kernels.top_k(kernels.unembed(out, params["centroids"]), self.config.best)
        ids = params["clusters"][best].reshape(*best.shape[:2], -1)
        rows = embedding_rows(params[CLUSTERED], ids.reshape(len(ids), -1), self.config.dtype)
        return soft_cap(_products(out, rows.reshape(*ids.shape, -1)), cap), ids


def _products(out: Hidden, rows: Float[Array, "B k W M"]) -> Float32[Array, "B k W"]:
    exact = "highest" if out.dtype == jnp.float32 else None
    return jnp.einsum("bkm,bkwm->bkw", out, rows, precision=exact, preferred_element_type=jnp.float32)
