"""One decode step: draft a tree, verify it with one forward of the target, commit the accepted path.

    speculate_step = draft_phase -> verify_phase        a grammar may run between the two
    verify_phase   = check_phase -> commit_phase
    prefill_step                                        a chunk of a prompt; the last chunk draws the first token
    admit                                               a request's parameters into its row of the state

All are pure functions of one `DecodeState`, and are jitted with the state donated (`make_steps`). Shapes depend on the
config and the batch bucket, never on acceptance. A step gathers B of the R rows by slot and scatters them back; the
scatter drops empty entries, whose slots are >= R.

Example of one request with a drafter of depth 2 (n = prefix_length, committed tokens in brackets):

    prefill  [the cat]          draws sat                        root = sat, n = 2
    step     sat -> on -> a     draws on, the: 1 accepted        emits on, the; root = the, n = 4: [the cat sat on]
    step     the -> mat -> .    draws mat, ., <eos>: 2 accepted  emits mat, ., <eos>; finish = stop
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int32, UInt32
from specjax_kernels import CAUSAL, pack_bits

from specjax.cache import Active, Block, PerRequest, RowMoves, commit, pool_shape, read_rows, take_path
from specjax.drafters.base import Context, Drafter, Flag, Observation, PageSize, Params
from specjax.drafters.check import check_declared, checked_observe, checked_propose
from specjax.gpu import compiler_options, warn_of_problem
from specjax.logprobs import Logprobs, block_logprobs, path_logprobs
from specjax.models.blocks import Ragged
from specjax.models.target import Target
from specjax.sampling import DrawInputs, greedy_and_finite
from specjax.state import (
    FULL,
    NO_FORCED_TOKEN,
    NOT_FINITE,
    RUNS,
    STOPPED,
    DecodeState,
    PrefillInput,
    Row,
    StepInput,
    StepOutput,
    Trace,
    admit,
)
from specjax.tree import DraftTree, ancestor_mask, best_nodes, first_nodes, narrow, ranks, root_only, with_root
from specjax.verify import Verdict, Verifier, verify_tree


@dataclass(frozen=True)
class StepConfig:
    """Static options of a step.

    Attributes:
        nodes: N, number of nodes of the step's trees, at most the drafter's; `draft_phase` cuts wider trees to their
            best nodes. 1: the step drafts nothing; 0: the drafter's width.
        trace: True to return `StepOutput.trace`.
        prompt_logprobs: True to return `StepOutput.prompt` from a prefill.
        tokens: maximum number of tokens of a prefill, all requests together. The layers compute this many positions; 0
            computes the padded chunk.
        ragged: padding, nodes that are not valid and rows without a request are zeros. Products of quantised weights on
            a CPU skip the last rows that are all zeros.
    """

    nodes: int = 0
    trace: bool = False
    prompt_logprobs: bool = False
    tokens: int = 0
    ragged: bool = False


class Checked(NamedTuple):
    """Results of the target's forward and of the walk at the J nodes of the path; J = min(D + 1, N).

    Attributes:
        verdict: accepted nodes; the first `accepted` + 1 entries are valid.
        block: cache entries of the nodes, leaves [B, J, ...].
        features: [B, J, F]. Features for the drafter; None if it reads none.
        finite: bool [B, J]. True if a token can be drawn: no NaN, no +inf, not all -inf.
        logprobs: log-probabilities of the emitted tokens; zeros if no row requests them.
    """

    verdict: Verdict
    block: Block
    features: Float[Array, "B J F"] | None
    finite: Bool[Array, "B J"]
    logprobs: Logprobs


def draft_phase(
    params: Params, state: DecodeState, inputs: StepInput, *, drafter: Drafter, config: StepConfig = StepConfig()
) -> tuple[DraftTree, DecodeState]:
    """Drafts trees for the batch; returns trees of N nodes, and the state with the drafter's new state.

    Trees are cut to the nodes of `config` and to each row's `draft_limit`; the nodes with the best scores remain.
    Node 0 is the row's root, and nodes that cannot be verified are invalid, whatever the drafter returns. With one node
    the drafter is not called.

    Raises:
        ValueError: `config` asks for more nodes than the drafter proposes.
    """
    context, row, _ = _gather(state, inputs)
    if not 0 <= config.nodes <= drafter.width:
        raise ValueError(f"StepConfig.nodes is {config.nodes}; {drafter.name} proposes trees of {drafter.width} nodes")
    if config.nodes == 1:
        return root_only(context.root), state
    context = context._replace(layers=tuple(state.cache[layer] for layer in drafter.reads_layers))
    tree, draft = checked_propose(drafter, params, state.draft, context)
    tree = with_root(tree, context.root, state.rows.history.counts.shape[1])
    most = config.nodes or tree.width
    count = jnp.where(context.active, row.draft_limit + 1, 1)
    tree = narrow(first_nodes(tree, count), most) if drafter.topk == 1 else best_nodes(tree, count, most)
    return tree, state._replace(draft=draft)


def check_phase(
    params: Params,
    state: DecodeState,
    inputs: StepInput,
    tree: DraftTree,
    *,
    target: Target,
    drafter: Drafter,
    verify: Verifier = verify_tree,
    config: StepConfig = StepConfig(),
    allowed: UInt32[Array, "B N W"] | None = None,
) -> Checked:
    """Runs the target over the trees and walks down each tree; reads the state only. See `verify_phase`."""
    context, row, draws = _gather(state, inputs)
    prefix_length = context.prefix_length
    cache = read_rows(state.cache, _row_moves(context, inputs), prefix_length)
    if config.nodes not in (0, tree.width):
        raise ValueError(f"trees of {tree.width} nodes in a step of {config.nodes} (StepConfig.nodes)")
    embedded, positions = target.embed(params.target, tree.tokens), prefix_length[:, None] + tree.depth
    past, mask = (cache, context.page_table, context.attended), pack_bits(ancestor_mask(tree))
    ragged, extra = None, dict[str, Any]()
    if config.ragged:
        nodes = jnp.max(jnp.where(tree.valid, jnp.arange(1, tree.width + 1, dtype=jnp.int32), 0), axis=1)
        ragged = extra["ragged"] = Ragged.of(jnp.where(context.active, nodes, 0), tree.width)
    output = target.forward(params.target, embedded, positions, mask, *past, features=drafter.features, **extra)
    if ragged is None:
        logits = target.unembed(params.target, output.hidden)
    else:
        logits = ragged.parted(target.unembed(params.target, ragged.joined(output.hidden)))
    greedy, is_finite = greedy_and_finite(logits)
    draws, depth = draws._replace(greedy=greedy), min(drafter.depth, tree.width - 1)
    verdict = verify(tree, logits, draws, prefix_length, row.generated, depth=depth, allowed=allowed)
    path, features = verdict.path, output.features
    wanted = jnp.any(row.logprobs & context.active)
    return Checked(
        verdict=verdict,
        block=take_path(output.block, path),
        features=None if features is None else jnp.take_along_axis(features, path[:, :, None], axis=1),
        finite=jnp.take_along_axis(is_finite, path, axis=1),
        logprobs=path_logprobs(logits, path, verdict.tokens, wanted, row.logprob_ids),
    )


def commit_phase(
    params: Params,
    state: DecodeState,
    inputs: StepInput,
    tree: DraftTree,
    checked: Checked,
    *,
    drafter: Drafter,
    config: StepConfig = StepConfig(),
) -> tuple[DecodeState, StepOutput]:
    """Commits and emits the accepted tokens, and passes them to the drafter's `observe`."""
    context, row, _ = _gather(state, inputs)
    verdict = checked.verdict
    emitted, finish = _truncate(verdict.tokens, verdict.accepted, row, context.active, checked.finite)
    path_tokens = jnp.take_along_axis(tree.tokens, verdict.path, axis=1)
    features = checked.features
    if features is not None and config.ragged:
        features = Ragged(emitted).cleared(features)
    observation = Observation(path_tokens, verdict.tokens, features, emitted)
    trace = Trace(tree, verdict.drawn, verdict.path, verdict.accepted) if config.trace else None
    accepted = jnp.maximum(emitted - 1, 0)
    # A chain has no scores.
    order = verdict.path
    if drafter.topk != 1:
        order = jnp.take_along_axis(ranks(tree, given=drafter.ranked), verdict.path, axis=1)
    output = StepOutput(verdict.tokens, emitted, accepted, order, finish, checked.logprobs, trace)
    rows = _row_moves(context, inputs)
    state = _advance(
        params, drafter, state, context, row, checked.block, observation, output, after=checked.finite, rows=rows
    )
    return state, output


def verify_phase(
    params: Params,
    state: DecodeState,
    inputs: StepInput,
    tree: DraftTree,
    *,
    target: Target,
    drafter: Drafter,
    verify: Verifier = verify_tree,
    config: StepConfig = StepConfig(),
    allowed: UInt32[Array, "B N W"] | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Verifies trees: `check_phase`, then `commit_phase`. `allowed`: a grammar's bits; see `verify_tree`."""
    checked = check_phase(
        params, state, inputs, tree, target=target, drafter=drafter, verify=verify, config=config, allowed=allowed
    )
    return commit_phase(params, state, inputs, tree, checked, drafter=drafter, config=config)


def speculate_step(
    params: Params,
    state: DecodeState,
    inputs: StepInput,
    *,
    target: Target,
    drafter: Drafter,
    verify: Verifier = verify_tree,
    config: StepConfig = StepConfig(),
) -> tuple[DecodeState, StepOutput]:
    """Decodes one step of B requests, which emits 1 to D + 1 tokens each.

    Plain decoding is the same step with `none_drafter`.
    """
    tree, state = draft_phase(params, state, inputs, drafter=drafter, config=config)
    return verify_phase(params, state, inputs, tree, target=target, drafter=drafter, verify=verify, config=config)


def prefill_step(
    params: Params,
    state: DecodeState,
    inputs: PrefillInput,
    *,
    target: Target,
    drafter: Drafter,
    config: StepConfig = StepConfig(),
) -> tuple[DecodeState, StepOutput]:
    """Commits a chunk of each request's prompt, and draws the next token unless `next_token` forces it.

    A chunk without tokens only sets the root to a forced token. The output has tokens [B, 1]; `emitted` is 1 for drawn
    tokens, else 0.
    """
    context, row, draws = _gather(state, inputs)
    length = jnp.where(context.active, inputs.length, 0)
    offset = jnp.arange(inputs.tokens.shape[1], dtype=jnp.int32)[None, :]
    embedded, positions = target.embed(params.target, inputs.tokens), context.prefix_length[:, None] + offset
    rows = _row_moves(context, inputs)
    past = read_rows(state.cache, rows, context.prefix_length), context.page_table, context.attended
    is_ragged, width = config.ragged or bool(config.tokens), inputs.tokens.shape[1]
    extra = {"ragged": Ragged.of(length, width, config.tokens)} if is_ragged else {}
    forward = target.forward(params.target, embedded, positions, CAUSAL, *past, features=drafter.features, **extra)
    last = jnp.maximum(length - 1, 0)
    hidden = jnp.take_along_axis(forward.hidden, last[:, None, None], axis=1)
    logits = target.unembed(params.target, hidden)
    wants_draw = context.active & (inputs.next_token == NO_FORCED_TOKEN)
    tail = root_only(jnp.take_along_axis(inputs.tokens, last[:, None], axis=1)[:, 0])
    greedy, finite = greedy_and_finite(logits)
    # Rows that draw nothing must not enable branches of the draw.
    draws = draws._replace(active=wants_draw, greedy=greedy)
    verdict = verify_tree(tail, logits, draws, context.prefix_length + last, row.generated, depth=0)
    token = jnp.where(wants_draw, verdict.tokens[:, 0], inputs.next_token)
    # The last token attends to the whole chunk, so its logits are not finite if any other token's are not.
    committed = jnp.where(finite[:, 0], length, 0)

    emitted, finish = _truncate(token[:, None], jnp.zeros_like(length), row, wants_draw, finite)
    finish = jnp.where(context.active & ~finite[:, 0], NOT_FINITE, finish)
    shifted = jnp.roll(inputs.tokens, -1, axis=1)
    next_tokens = jnp.where(offset == last[:, None], token[:, None], shifted)
    observation = Observation(inputs.tokens, next_tokens, forward.features, committed)
    logprobs = path_logprobs(logits, verdict.path, verdict.tokens, jnp.any(row.logprobs & wants_draw), row.logprob_ids)
    prompt = None
    if config.prompt_logprobs:
        unembed = partial(target.unembed, params.target)
        counted = offset < committed[:, None]
        prompt = block_logprobs(forward.hidden, next_tokens, counted, row.logprob_ids, unembed)
    none = jnp.zeros_like(emitted)
    output = StepOutput(token[:, None], emitted, none, none[:, None], finish, logprobs, None, prompt)
    state = _advance(params, drafter, state, context, row, forward.block, observation, output, after=finite, rows=rows)
    return state, output


class Steps(NamedTuple):
    """Jitted functions of one (target, drafter, config). Each donates the state and returns the next state.

    Attributes:
        admit: (state, slot int32 [], row) -> state. See `specjax.state.admit`.
        prefill: (params, state, `PrefillInput`) -> (state, `StepOutput`). See `prefill_step`.
        speculate: (params, state, `StepInput`) -> (state, `StepOutput`). See `speculate_step`.
    """

    admit: Callable[[DecodeState, ArrayLike, Row], DecodeState]
    prefill: Callable[[Params, DecodeState, PrefillInput], tuple[DecodeState, StepOutput]]
    speculate: Callable[[Params, DecodeState, StepInput], tuple[DecodeState, StepOutput]]


def make_steps(
    target: Target, drafter: Drafter, *, verify: Verifier = verify_tree, config: StepConfig = StepConfig()
) -> Steps:
    """Jits the step functions. They compile once per batch bucket, chunk width and page-table width.

    Raises:
        DrafterError: the drafter declares wrong numbers; the first step raises it for wrong results (`check_drafter`).
    """
    check_declared(drafter, target)
    warn_of_problem()
    config = replace(config, nodes=config.nodes or drafter.width)
    fixed = {"target": target, "drafter": drafter, "config": config}
    jit = partial(jax.jit, compiler_options=compiler_options())
    return Steps(
        admit=jit(admit, donate_argnums=0),
        prefill=jit(partial(prefill_step, **fixed), donate_argnums=1),
        speculate=jit(partial(speculate_step, verify=verify, **fixed), donate_argnums=1),
    )


def _gather(state: DecodeState, inputs: StepInput | PrefillInput) -> tuple[Context, Row, DrawInputs]:
    """Gathers the rows [B] of a step; `history` stays [R, V]."""
    slots, page_table, active = inputs[:3]
    rows = state.root.shape[0]
    index = jnp.minimum(slots, rows - 1)
    small = state.rows._replace(history=cast(Any, None))
    row = jax.tree.map(lambda x: x[index], small)._replace(history=state.rows.history)
    active = active & (slots < rows) & ~state.finished[index]
    context = Context(
        slots=slots,
        prefix_length=jnp.where(active, row.prefix_length, 0),
        page_table=page_table,
        root=state.root[index],
        active=active,
        salt=row.salt,
        sampling=row.sampling,
        tokens=state.tokens,
        page_size=PageSize(pool_shape(state.cache).page_size),
        in_prompt=Flag(isinstance(inputs, PrefillInput)),
    )
    return context, row, DrawInputs(row.sampling, row.history, slots, active)


def _row_moves(context: Context, inputs: StepInput | PrefillInput) -> RowMoves:
    """Where the states of recurrent layers are read and written."""
    slots = jnp.where(context.active, context.slots, -1)
    if isinstance(inputs, StepInput) or inputs.source is None:
        return RowMoves(context.slots, slots)
    return RowMoves(inputs.source, slots, inputs.snapshot, inputs.snapshot_length)


def _truncate(
    tokens: Int32[Array, "B J"], accepted: PerRequest, row: Row, active: Active, finite: Bool[Array, "B J"]
) -> tuple[PerRequest, PerRequest]:
    """Computes the number of emitted tokens and the finish value of each request.

    emitted = min(accepted + 1, index of the first stop id + 1, tokens left, index of the first node without finite
    logits). A stop id is emitted and counted; a token drawn from logits that are not finite is not.
    """
    width = tokens.shape[1]
    is_stop = jnp.any(tokens[:, :, None] == row.sampling.stop_ids[:, None, :], axis=2) & (tokens >= 0)
    first_stop = jnp.where(jnp.any(is_stop, axis=1), jnp.argmax(is_stop, axis=1).astype(jnp.int32), width)
    broken = jnp.where(jnp.all(finite, axis=1), width, jnp.argmin(finite, axis=1).astype(jnp.int32))
    left = row.limit - row.generated
    wanted = jnp.minimum(jnp.minimum(accepted + 1, first_stop + 1), left)
    emitted = jnp.where(active, jnp.maximum(jnp.minimum(wanted, broken), 0), 0)
    stopped = first_stop + 1 <= emitted
    finish = jnp.where(stopped, STOPPED, jnp.where(emitted >= left, FULL, RUNS))
    finish = jnp.where(broken < wanted, NOT_FINITE, finish)
    return emitted, jnp.where(active, finish, RUNS).astype(jnp.int32)


def _advance(
    params: Params,
    drafter: Drafter,
    state: DecodeState,
    context: Context,
    row: Row,
    block: Block,
    observation: Observation,
    output: StepOutput,
    *,
    after: Any,
    rows: RowMoves,
) -> DecodeState:
    """Commits the observed tokens and their cache entries, calls `observe`, and scatters progress to the rows.

    The new root is the last emitted token, or the forced token.
    """
    pools, blocks = (state.cache, state.tokens), (block, None if state.tokens is None else observation.tokens)
    where = context.page_table, context.prefix_length, observation.length
    cache, committed = commit(pools, blocks, *where, after=after, rows=rows)
    layers = tuple(cache[layer] for layer in drafter.reads_layers)
    context = context._replace(tokens=committed, layers=layers)
    draft = checked_observe(drafter, params, state.draft, context, observation)
    tokens, emitted = output.tokens, output.emitted
    entry = jnp.arange(context.slots.shape[0], dtype=jnp.int32)
    slot = jnp.where(context.active, context.slots, state.root.shape[0] + entry)
    root = jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
    counted = jnp.arange(tokens.shape[1])[None, :] < emitted[:, None]
    vocab = state.rows.history.counts.shape[1]
    counts = state.rows.history.counts.at[slot[:, None], jnp.where(counted, tokens, vocab)].add(1, mode="drop")

    def put(values: Array, new: Array) -> Array:
        return values.at[slot].set(new, mode="drop", unique_indices=True)

    return DecodeState(
        cache=cache,
        tokens=committed,
        draft=draft,
        rows=state.rows._replace(
            prefix_length=put(state.rows.prefix_length, context.prefix_length + observation.length),
            generated=put(state.rows.generated, row.generated + emitted),
            history=state.rows.history._replace(counts=counts),
        ),
        root=put(state.root, root),
        finished=put(state.finished, output.finish != RUNS),
    )
