"""EAGLE: a head of one layer continues the target's features, level by level.

For EAGLE-1/2, EAGLE-3 and MTP heads (`specjax.models.draft_head`, `specjax.models.mtp`). `grow` builds EAGLE-2's tree.
n tokens are committed, and the root x_n was drawn last. The head's cache holds n slots; slot t reads (f_t, x_{t+1}):

    observe   writes keys and values of new slots, from the target's features, without attention and MLP; the row keeps
              the fused feature of the last token, f_{n-1}
    propose   runs the head over the last slot, (f_{n-1}, x_n), whose output predicts level 1; a node of level l stands
              at position n + l - 1 and reads its parent's output as the feature

P-EAGLE heads predict all levels from that forward, with masks after the last slot (`specjax.drafters.parallel`).
docs/algorithms.md has the alignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, UInt32
from specjax_kernels import CAUSAL

from specjax.cache import PoolShape, commit, init_cache
from specjax.config import HeadConfig, MtpConfig
from specjax.drafters.base import (
    Context,
    Drafter,
    DraftState,
    Observation,
    Params,
    Speculation,
    finite,
    put_rows,
    take_rows,
)
from specjax.drafters.block import independent
from specjax.drafters.grow import Read, grow, tree_drafter
from specjax.drafters.options import Coupling, Loaded, ModelOptions, TreeShape, position_limit
from specjax.drafters.parallel import chain_of, in_one_forward, p_eagle_slots, parallel_drafter
from specjax.limits import ParameterError, documented, setting, shown
from specjax.models.blocks import Past, Ragged, joined
from specjax.models.draft_head import DraftHead, draft_head
from specjax.models.head_spec import ALGORITHMS, head_spec
from specjax.models.mtp import MtpHead
from specjax.models.target import Target
from specjax.tree import DraftTree

P_EAGLE_DRAFTS = 7
"""Default of drafts for heads whose files do not state them; published measurements of P-EAGLE have as many."""


class EagleState(NamedTuple):
    cache: Any  # [P, S, ...] leaves, such as a `KeyValue`: the head's layer, by the target's page table
    feature: Float[Array, "R X M"]  # fused feature of each row's last committed token; P-EAGLE: and of masks


def eagle_drafter(
    target: Target, head: HeadConfig | MtpConfig, shape: TreeShape, *, backend: str | None = None,
    positions: int | None = None, coupling: Coupling = "noise", slots: int | None = None,
) -> Drafter:  # fmt: skip
    """Drafts with a head whose parameters are `Params.draft`. All nodes of a tree are valid, unless the head's
    vocabulary has too few tokens for it.

    Args:
        backend: attention implementation, as for the target.
        positions: maximum position; a tree that would reach beyond it is not proposed. Default: the head's.
        coupling: see `specjax.drafters.coupling`.
        slots: of a P-EAGLE head with several layers, see `parallel_drafter`.
    """
    is_mtp = isinstance(head, MtpConfig)
    model = MtpHead(head, target, backend) if is_mtp else draft_head(head, target, backend=backend)
    windowed = not is_mtp and any(head.windows)
    mask_token = None if is_mtp else head.mask_token
    name, limit = head_spec(head.kind).algorithm, position_limit(target, head, positions)
    if mask_token is not None and not isinstance(model, MtpHead) and model.config.layers > 1:
        return parallel_drafter(name, head.features, p_eagle_slots(model), shape, limit, slots, coupling)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        kept = 1 if mask_token is None else 2
        feature = jnp.zeros((rows, kept, head.hidden_size), jnp.dtype(head.dtype))
        return EagleState(init_cache(model.pages, pool), feature)

    def propose(params: Params, state: EagleState, context: Context) -> tuple[DraftTree, DraftState]:
        def run(
            tokens: Array, feature: Array, positions: Array, mask: Any, attended: Array, before: Any, where: Any = None
        ) -> Read:
            embedded = model.embed(params.target, params.draft, tokens)
            past = Past(state.cache, context.page_table, attended, before, where)
            out, block = model.forward(params.draft, embedded, feature, positions, mask, past)
            return Read(model.unembed(params.target, params.draft, out), out, block)

        def read(
            level: int, tokens: Int32[Array, "B k"], feature: Float[Array, "B k M"], mask: UInt32[Array, "#B k words"],
            before: Any,
        ) -> Read:  # fmt: skip
            positions = jnp.broadcast_to(context.prefix_length[:, None] + (level - 1), tokens.shape)
            where = None  # positions of the keys before, read with a window only
            if before is not None and windowed:
                levels = jnp.repeat(jnp.arange(level - 1, dtype=jnp.int32), tokens.shape[1])
                where = context.prefix_length[:, None] + levels[None]
            output = run(tokens, feature, positions, mask, context.attended, before, where)
            return output._replace(keys=joined(before, output.keys))

        # Levels read the last slot's keys from the pages. An empty text has no slot.
        last = context._replace(prefix_length=jnp.maximum(context.prefix_length - 1, 0))
        feature, ids = take_rows(state.feature, context), partial(model.target_ids, params.draft)
        if mask_token is not None:
            slot = jnp.arange(shape.steps, dtype=jnp.int32)[None, :]
            tokens = jnp.where(slot == 0, context.root[:, None], jnp.int32(mask_token))
            where = last.prefix_length[:, None] + slot
            read_slots = run(tokens, feature[:, jnp.minimum(slot[0], 1)], where, CAUSAL, last.attended, None)
            return independent(context, shape, read_slots.logits, ids, coupling), state
        start = run(context.root[:, None], feature, last.prefix_length[:, None], CAUSAL, last.attended, None)
        start = start._replace(keys=None)
        return grow(context, shape, start, read, ids, coupling=coupling), state

    def observe(params: Params, state: EagleState, context: Context, seen: Observation) -> DraftState:
        assert seen.features is not None
        offset = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)[None, :]
        embedded = Ragged(seen.length).cleared(model.embed(params.target, params.draft, seen.next_tokens))
        count, last = seen.tokens.shape[1], jnp.maximum(seen.length - 1, 0)[:, None]
        if mask_token is None:
            feature = model.fuse(params.draft, seen.features)
        else:
            feature = model.fuse(params.draft, cast(DraftHead, model).with_mask(params.draft, seen.features))
            last = jnp.concatenate([last, jnp.full_like(last, count)], axis=1)
        positions = context.prefix_length[:, None] + offset
        block = finite(model.keep(params.draft, embedded, feature[:, :count], positions))
        cache = commit(state.cache, block, context.page_table, context.prefix_length, seen.length, after=())
        last = jnp.take_along_axis(feature, last[:, :, None], axis=1)
        return EagleState(cache, put_rows(state.feature, last, context, seen))

    return tree_drafter(name, head.features, shape, limit, init, propose, observe)


@documented
@dataclass(frozen=True)
class Eagle3(ModelOptions):
    """EAGLE-3, EAGLE-3.1 and P-EAGLE: a draft head that reads hidden states of several of the target's layers. By
    default the draft of a P-EAGLE head is a chain of as many tokens as in its training."""

    algorithm: ClassVar[str] = "EAGLE3"
    needs: ClassVar[str | None] = "a draft head"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind
    trees: ClassVar[Mapping[str, TreeShape]] = {"llama": TreeShape(5, 4, 8)}
    head_options: ClassVar[tuple[str, ...]] = ("aux_layers", "norm_output", "mask_token")

    _: KW_ONLY
    aux_layers: tuple[int, ...] | tuple[str, ...] | None = setting(
        None, "layers of the target whose outputs the head reads, counted from 0, in the order of training; overrides "
        "the ids in the head's config, which some files count from the layers' inputs: the output of layer 1 is then 2",
        flag="speculative_aux_layers", metavar="LAYER", digits=True,
    )  # fmt: skip
    norm_output: bool | None = setting(
        None, "whether each level reads the normalised output of the level before (EAGLE-3.1); overrides the head's "
        "config, in which SpecForge before September 2026 wrote true for heads that it trained without",
        flag="speculative_norm_output",
    )  # fmt: skip
    mask_token: int | None = setting(
        None, "id of the token in the slots that a P-EAGLE head predicts; overrides the head's config; required if "
        "that has none", minimum=0, flag="speculative_mask_token",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.aux_layers is not None:
            object.__setattr__(self, "aux_layers", _layers(self.aux_layers))
        super().__post_init__()

    def automatic(self, family: str = "llama", head: Any = None) -> TreeShape:
        if head is None or head.mask_token is None:
            return super().automatic(family, head)
        return chain_of(head.slots or P_EAGLE_DRAFTS)

    def speculation(self, loaded: Loaded) -> Speculation:
        speculation, head = super().speculation(loaded), cast(HeadConfig, loaded.head)
        if head.mask_token is None:
            return speculation
        return in_one_forward(speculation, costly=head.layers > 1, trained=head.slots)

    def drafter(self, target: Target, draft: Any, shape: TreeShape, largest: TreeShape, **shared: Any) -> Drafter:
        return eagle_drafter(target, draft, shape, slots=largest.steps, **shared)


@documented
@dataclass(frozen=True)
class Eagle(ModelOptions):
    """EAGLE-1 and EAGLE-2: a draft head that reads the target's final hidden states. Without a head, the model's own
    MTP layers draft, which are such heads."""

    algorithm: ClassVar[str] = "EAGLE"
    needs: ClassVar[str | None] = "a draft head"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind
    reads_mtp_layers: ClassVar[bool] = True
    trees: ClassVar[Mapping[str, TreeShape]] = Eagle3.trees

    token_map: str | int | None = setting(
        None,
        "tokens that the draft may propose (FR-Spec): a .pt or .json file, repo/file on the hub, "
        "or a number of tokens of the map that comes with specjax for the model; default: all",
        flag="speculative_token_map",
        metavar="MAP",
        digits=True,
    )

    drafter = Eagle3.drafter


def _layers(given: object) -> tuple[int, ...]:
    """`Eagle3.aux_layers`, which a flag or a file gives as text. Raises ParameterError unless they are different."""
    texts = [str(layer) for layer in given if not isinstance(layer, bool)] if isinstance(given, tuple | list) else []
    if not texts or not all(text.isdecimal() for text in texts) or len({*map(int, texts)}) < len(cast(Any, given)):
        problem = f"must be different layers of the target, counted from 0, got {shown(given)}"
        raise ParameterError("aux_layers", problem, "Eagle3")
    return tuple(map(int, texts))
