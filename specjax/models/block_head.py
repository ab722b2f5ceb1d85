"""Block heads: decoder layers that read an anchor and masks and predict a block of tokens in one forward.

DFlash, DSpark, DFlash2 and JetSpec; `specjax.models.head_spec.block_table` declares the parameters. The draft's context
at position t is c_t = norm(fc(f_t)), f_t the target's features. All layers make their keys and values from the same
c_t, so an entry depends on f_t alone. A block stands at positions s, s + 1, ...:

    slots      anchor x_s    mask    mask   ...      the last emitted token, and B - 1 masks
    attention  each slot sees the context 0 .. s - 1 and the block: all of it, or causally; within the layer's window
    logits     of x_{s+j+1} from slot j (`from_anchor`), or of x_{s+j} from slot j > 0

The block's own keys and values are dropped. A *walk* makes a slot's logits depend on the token before it, without
another forward (`walk`). DFlash2 also mixes neighbouring slots by a convolution around attention and MLP. Sources:
z-lab/dflash, deepseek-ai/DeepSpec, vllm-project/speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Float32, Int32
from specjax_kernels import CAUSAL, Norm, mesh, pack_bits, rms_norm

from specjax.cache import Hidden, PageTable, PerRequest, Positions, Tokens, Weights
from specjax.config import BlockConfig
from specjax.models.blocks import Past, Scores, attention, gated_mlp, key_value_spec, keys_values, linear, soft_cap
from specjax.models.decoder import embedding_rows
from specjax.models.draft_head import DraftHead
from specjax.models.rope import rotations


class Candidates(NamedTuple):
    """The c best tokens of each slot, best first. A selector chooses among them."""

    logits: Float32[Array, "B D c"]
    ids: Int32[Array, "B D c"]  # of the head
    rows: Float[Array, "B D c r"]  # their vectors


class Slots(NamedTuple):
    """The predictions of a block's D slots, before a walk."""

    hidden: Hidden  # [B, D, M]: outputs after the final norm
    logits: Float32[Array, "B D W"]
    candidates: Candidates | None = None  # of a selector


@dataclass(frozen=True, eq=False)
class BlockHead(DraftHead):
    """A block head and its target; see `DraftHead`."""

    config: BlockConfig

    @property
    def pages(self) -> Any:
        """The cache entry of a token: a `KeyValue` of `PageSpec`s for each layer."""
        return (key_value_spec(self.config),) * self.config.layers

    def context(self, params: Weights, features: Float[Array, "B N F"], positions: Positions) -> tuple[Any, ...]:
        """The cache entries of tokens with these features, [B, N, K, E] for each layer."""
        context = rms_norm(linear(features, params, "fc"), params["feature_norm"], self.config.norm_epsilon)
        rotation = rotations(self.config.rope, self.config.head_dim, positions)
        entries = []
        for i in range(self.config.layers):
            # XLA:GPU would multiply equal inputs once, by a concatenation of all layers' matrices made in each step.
            context = jax.lax.optimization_barrier(context)
            weights, norm_values = params[f"layers_{i}"], self.config.gemma_layers
            entries.append(keys_values(context, weights, rotation, head_norm=self._head_norm, norm_values=norm_values))
        return tuple(entries)

    def block(
        self, target_params: Weights, params: Weights, anchor: PerRequest, width: int, cache: Any,
        page_table: PageTable, start: PerRequest, attended: PerRequest,
    ) -> Float[Array, "B {width} M"]:  # fmt: skip
        """The outputs of a block of `width` slots at positions ``start``, ``start`` + 1, ..., after the final norm.

        Args:
            anchor: int32 [B]. The token at ``start``.
            cache: for each layer the keys and values of the positions before, [P, S, K, E].
            attended: int32 [B]. Number of these positions; INACTIVE skips the request.
        """
        config = self.config
        masks = jnp.full((anchor.shape[0], width - 1), config.mask_token, jnp.int32)
        x = self.embed(target_params, params, jnp.concatenate([anchor[:, None], masks], axis=1))
        positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        rotation = rotations(config.rope, config.head_dim, positions)
        everything = jnp.asarray(pack_bits(np.ones((1, width, width), bool)))
        for i in range(config.layers):
            mask = CAUSAL if config.causal[i] else everything
            past = Past(cache[i], page_table, attended)
            x = self._layer(params[f"layers_{i}"], x, rotation, positions, mask, past, config.windows[i])
        return rms_norm(x, params["final_norm"], config.norm_epsilon)

    def _layer(
        self, weights: Weights, x: Hidden, rotation: Any, positions: Positions, mask: Any, past: Past,
        window: int | None,
    ) -> Hidden:  # fmt: skip
        where: Any = {"rotation": rotation, "positions": positions, "mask": mask, "past": past}
        norms = [Norm(weights[name], self.config.norm_epsilon) for name in ("attention_norm", "mlp_norm")]
        if not self.config.conv_taps:
            return self._decoded(weights, x, x, norm=norms[0], window=window, **where)[0]
        where |= {"scores": Scores(window=window), "norm_values": self.config.gemma_layers}
        attend = partial(attention, weights=weights, backend=self.backend, head_norm=self._head_norm, **where)
        before, after = self._convolutions(weights, "attention_conv", rms_norm(x, *norms[0][:2]))
        x = x + after(attend(before)[0])
        before, after = self._convolutions(weights, "mlp_conv", rms_norm(x, *norms[1][:2]))
        return x + after(gated_mlp(before, weights))

    def _convolutions(self, weights: Weights, name: str, x: Hidden) -> tuple[Hidden, Any]:
        """x after the convolution before a sublayer, and the function that follows the sublayer.

        Tap t of slot i is slot i - t, zero before the block. Its kernel is a parameter plus a function of the
        sublayer's input x at slot i, equal within a group of channels.
        """
        taps, width, size = self.config.conv_taps, x.shape[1], x.shape[2]
        delta = jnp.repeat(linear(x, weights, name), size // self.config.conv_groups, axis=-1)
        kernel = weights[f"{name}_base"][None, None].astype(x.dtype) + delta  # [B, N, 2, T, M]

        def side(index: int, x: Hidden) -> Hidden:
            shifted = (jnp.pad(x, ((0, 0), (t, 0), (0, 0)))[:, :width] for t in range(taps))
            return cast(Array, sum(kernel[:, :, index, t] * rows for t, rows in enumerate(shifted)))

        return side(0, x), partial(side, 1)

    @property
    def _head_norm(self) -> Any:
        return partial(rms_norm, epsilon=self.config.norm_epsilon)

    def slots(self, target_params: Weights, params: Weights, outputs: Hidden, count: int) -> Slots:
        """The first `count` slots of a block that predict a token."""
        hidden = outputs[:, 0 if self.config.from_anchor else 1 :][:, :count]
        logits = self._logits(target_params, params, hidden)
        if self.config.walk != "selector":
            return Slots(hidden, logits)
        best, ids = kernels.top_k(logits, min(self.config.candidates, logits.shape[2]))
        rows = embedding_rows(params["next"], ids.reshape(ids.shape[0], -1), self.config.dtype)
        return Slots(hidden, logits, Candidates(best, ids, rows.reshape(*ids.shape, -1)))

    def _logits(self, target_params: Weights, params: Weights, hidden: Hidden) -> Float32[Array, "B D W"]:
        config, own = self.config, self.config.own_head
        if not own and config.output_scale == 1 and config.logit_softcap is None:
            return self.target.unembed(target_params, hidden)
        if own:
            logits = mesh.split(kernels.unembed(hidden, params["head"]), 2)
        else:
            logits = self.target.unembed(target_params, hidden, capped=False)
        return soft_cap(logits * jnp.float32(config.output_scale), config.logit_softcap)

    def start(self, batch: int) -> Float[Array, "B 1 r"]:
        """The state of a walk before the first slot."""
        return jnp.zeros((batch, 1, self.config.rank), jnp.dtype(self.config.dtype))

    def walk(
        self, params: Weights, slots: Slots, slot: int, previous: Tokens, state: Float[Array, "B N r"]
    ) -> tuple[Float32[Array, "B N W"], Float[Array, "B N r"]]:
        """The logits of a slot after N different tokens, and the next state of the walk; only "rnn" has one. With a
        selector, the logits are of the slot's candidates.

        Args:
            previous: int32 [B, N]. The target's ids of the tokens before the slot's.
            state: of the same N paths.
        """
        config = self.config
        logits, hidden = slots.logits[:, slot, None], slots.hidden[:, slot, None]
        if config.walk == "none":
            return jnp.broadcast_to(logits, (*previous.shape, logits.shape[2])), state
        vector = embedding_rows(params["previous"], previous, config.dtype)
        if slots.candidates is not None:
            query = vector * linear(hidden, params, "selector")
            rows = slots.candidates.rows[:, slot].astype(jnp.float32)
            scores = jnp.einsum("bkr,bcr->bkc", query.astype(jnp.float32), rows, precision="highest")
            return slots.candidates.logits[:, slot, None] + scores, state
        hidden = jnp.broadcast_to(hidden, (*previous.shape, hidden.shape[2]))
        if config.walk == "gated":
            vector = jax.nn.sigmoid(linear(jnp.concatenate([hidden, vector], axis=-1), params, "gate")) * vector
        if config.walk == "rnn":
            joint = linear(jnp.concatenate([state, vector, hidden], axis=-1), params, "joint")
            keep = jax.nn.sigmoid(joint[:, :, 0])
            state = keep * state + (1 - keep) * jnp.tanh(joint[:, :, 1])
            vector = jnp.tanh(joint[:, :, 2])
        return logits + mesh.split(kernels.unembed(vector, params["next"]), 2), state
