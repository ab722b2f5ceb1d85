"""DFLASH: a head drafts a block of tokens in one forward (DFlash, DSpark, DFlash2, JetSpec).

n tokens are committed, and the root x_n was drawn last. `specjax.models.block_head` describes the forward:

    observe   writes keys and values of new tokens, computed from the target's features at the same tokens
    propose   runs the head over the root and masks, at positions n, n + 1, ...; slot d predicts x_{n+d}

Without a walk, slots are independent: the tree's nodes are the N - 1 most probable prefixes of w tokens for each slot
(`best_prefixes`). With a walk, a child's logits depend on its parent, so the tree grows level by level (`grow`),
without further forwards. docs/algorithms.md has the alignment.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32
from specjax_kernels import largest

from specjax.cache import PerRequest, PoolShape, commit, init_cache
from specjax.config import BlockConfig
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, finite
from specjax.drafters.coupling import with_noise
from specjax.drafters.grow import Read, grow, tree_drafter
from specjax.drafters.options import MAX_STEPS, Coupling, ModelOptions, TreeShape, position_limit
from specjax.limits import ParameterError, documented, setting, setting_of
from specjax.models.block_head import BlockHead
from specjax.models.draft_head import check_fit
from specjax.models.target import Target
from specjax.tree import NO_PARENT, DraftTree, Pool, chain, log_total, rerank, top_k_children


def block_drafter(
    target: Target, config: BlockConfig, shape: TreeShape, *, block: int | None = None, window: int | None = None,
    backend: str | None = None, positions: int | None = None, coupling: Coupling = "noise",
) -> Drafter:  # fmt: skip
    """Drafts with a block head whose parameters are `Params.draft`. The state is a pair of page leaves for each layer.

    Args:
        block: slots of the forward, the anchor included; None: as many as the tree's levels need.
        window: most keys that a slot sees, itself included; None: the windows of `config`.
        backend, positions, coupling: see `eagle_drafter`.

    Raises:
        ParameterError: the block or the tree is longer than the head's blocks.
        ValueError: the head does not fit the target.
    """
    check_fit(config, target)
    _check_size(config, shape, block)
    if window is not None:
        config = replace(config, windows=tuple(min(window, own or window) for own in config.windows))
    model = BlockHead(config, target, backend)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params, rows
        return init_cache(model.pages, pool)

    def propose(params: Params, state: DraftState, context: Context) -> tuple[DraftTree, DraftState]:
        width = block or shape.steps + (0 if config.from_anchor else 1)
        outputs = model.block(
            params.target, params.draft, context.root, width, state, context.page_table, context.prefix_length,
            context.attended,
        )  # fmt: skip
        slots = model.slots(params.target, params.draft, outputs, shape.steps)
        ids = partial(model.target_ids, params.draft)
        if config.walk == "none":
            return independent(context, shape, slots.logits, ids, coupling), state

        def read(level: int, tokens: Int32[Array, "B k"], walked: Float[Array, "B k r"], *_: Any) -> Read:
            logits, walked = model.walk(params.draft, slots, level, tokens, walked)
            candidates = slots.candidates
            return Read(logits, walked, None, None if candidates is None else ids(candidates.ids[:, level, None]))

        start = read(0, context.root[:, None], model.start(context.root.shape[0]))
        return grow(context, shape, start, read, ids, coupling=coupling), state

    def observe(params: Params, state: DraftState, context: Context, seen: Observation) -> DraftState:
        assert seen.features is not None
        offset = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)[None, :]
        entries = finite(model.context(params.draft, seen.features, context.prefix_length[:, None] + offset))
        return commit(state, entries, context.page_table, context.prefix_length, seen.length, after=())

    limit = position_limit(target, config, positions)
    return tree_drafter(Block.algorithm, config.features, shape, limit, init, propose, observe)


@documented
@dataclass(frozen=True)
class Block(ModelOptions):
    """A head that drafts a block of tokens in one forward: DFlash, DSpark, DFlash2 or JetSpec, as its files say.
    By default the draft is a chain of the whole block."""

    algorithm: ClassVar[str] = "DFLASH"
    needs: ClassVar[str | None] = "a draft head"
    kind: ClassVar[str | None] = "block"
    head_options: ClassVar[tuple[str, ...]] = ("sample_from_anchor",)
    passes: ClassVar[int | None] = 1

    steps: int | None = setting(
        None,
        "levels D of the draft tree, each a token of the block; default: all tokens that the block drafts",
        range=setting_of(TreeShape, "steps").range,
        flag="speculative_num_steps",
    )
    _: KW_ONLY
    block: int | None = setting(
        None, "slots of the block that the head runs on, including the root, at most as many as in its training; "
        "default: as many as the tree's levels need", minimum=2, maximum=MAX_STEPS,
        flag="speculative_dflash_block_size",
    )  # fmt: skip
    window: int | None = setting(
        None, "most tokens that a slot of the block attends to, itself included, in all layers of the head; default: "
        "the windows in the head's config", minimum=1, flag="speculative_dflash_draft_window_size",
    )  # fmt: skip
    sample_from_anchor: bool | None = setting(
        None, "whether the block's first slot, the root, drafts the next token; overrides the head's config; required "
        "if that does not say. A wrong value gives an accept length of about 1",
        flag="speculative_sample_from_anchor",
    )  # fmt: skip

    def automatic(self, family: str = "llama", head: BlockConfig | None = None) -> TreeShape:
        """A chain of all tokens that the head's block drafts, up to MAX_STEPS; without a head, of MAX_STEPS tokens."""
        drafts = MAX_STEPS if head is None else head.drafts_of(min(self.block or head.block, head.block))
        drafts = min(drafts, MAX_STEPS)
        return TreeShape(drafts, 1, drafts + 1)

    def drafter(self, target: Target, draft: Any, shape: TreeShape, largest: TreeShape, **shared: Any) -> Drafter:
        return block_drafter(target, draft, shape, block=self.block, window=self.window, **shared)


def _check_size(config: BlockConfig, shape: TreeShape, block: int | None) -> None:
    trained = f"the head was trained on blocks of {config.block} slots"
    if block is not None and block > config.block:
        raise ParameterError("block", f"is {block}, and {trained}; give at most that", Block.__name__)
    most = config.drafts_of(block or config.block)
    if shape.steps > most:
        slots = trained if block is None else f"a block has {block} slots"
        problem = f"are too many: {shape}, and {slots}, which draft {most} tokens; give at most {most} steps"
        raise ParameterError("nodes", f"{problem}, or {most + 1} draft tokens for a chain", Block.__name__)


def independent(
    context: Context, shape: TreeShape, logits: Float32[Array, "B D W"], target_ids: Any, coupling: Coupling
) -> DraftTree:
    """The best chain, or the best prefixes, of slots whose logits do not depend on each other's tokens."""
    is_chain, batch = shape.topk == 1, logits.shape[0]
    if coupling == "noise":
        ids = target_ids(jnp.arange(logits.shape[2], dtype=jnp.int32))
        slots = (logits[:, slot, None] for slot in range(shape.steps))
        noisy = [with_noise(context, slot + 1, ids, each, chain=is_chain) for slot, each in enumerate(slots)]
        logits = jnp.concatenate(noisy, axis=1)
    if is_chain:
        drafts, best = largest(logits)
        scores = jnp.cumsum(-log_total(logits, best[:, :, None])[:, :, 0], axis=1)
        return chain(context.root, target_ids(drafts), jnp.full(batch, shape.steps, jnp.int32), scores)
    none = jnp.zeros((batch, shape.steps), jnp.float32)
    drafts, scores = top_k_children(none, logits, min(shape.topk, shape.nodes - 1), normalised=False)
    return best_prefixes(context.root, target_ids(drafts), scores, shape.nodes)


def best_prefixes(
    root: PerRequest, tokens: Int32[Array, "B D w"], log_probs: Float32[Array, "B D w"], nodes: int
) -> DraftTree:
    """The root and the N - 1 most probable prefixes of sequences with one of w tokens in each of D slots.

    These are the nodes that a heap would pop (DDTree, arXiv 2604.12989), level by level: a prefix is at most as
    probable as its parent, so a chosen prefix of d tokens has d - 1 chosen ancestors, and is one of the N - d best
    prefixes of its level. `tokens` and `log_probs` are best first. Raises ValueError for fewer prefixes than nodes.
    """
    batch, depth, count = tokens.shape
    above, first, pool = jnp.zeros((batch, 1), jnp.float32), NO_PARENT, list[Pool]()
    for slot in range(min(depth, nodes - 1)):
        candidates = (above[:, :, None] + log_probs[:, slot, None]).reshape(batch, -1)
        above, index = jax.lax.top_k(candidates, min(candidates.shape[1], nodes - 1 - slot))
        token = jnp.take_along_axis(tokens[:, slot], index % count, axis=1)
        # Candidate i of a level belongs to its parent i // w. The root's index in the pool is NO_PARENT.
        pool.append(Pool(token, first + index // count, jnp.full_like(token, slot + 1), above))
        first = 0 if first == NO_PARENT else first + pool[-2].tokens.shape[1]
    return rerank(root, Pool(*(jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True))), nodes)
