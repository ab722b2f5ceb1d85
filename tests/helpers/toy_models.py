"""Small models and drafters with known answers: a table model, a tiny random Llama, and drafters that read a list.

The table model's logits are row ``hash(context) % rows`` of a table, bit for bit, so its ties are exact. The hash runs
over what a real model would attend to: committed tokens read from the pages, and visible nodes of the block. A token
committed wrongly, twice, or at another position changes the text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax import Array
from oracle import NO_PARENT, Sampling, Tree
from specjax_kernels import CAUSAL, unpack_bits

from specjax.cache import PageSpec, PoolShape, pool_shape
from specjax.config import ModelConfig, RopeConfig
from specjax.drafters.base import Drafter, Params, none_drafter
from specjax.models import init_params, make_target
from specjax.models.target import ForwardOutput, Target
from specjax.sampling import History, SamplingRows, sampling_row
from specjax.state import PrefillInput, StepInput, StepOutput, init_state, new_row
from specjax.step import StepConfig, make_steps, prefill_step
from specjax.tree import DraftTree

SEEDS = (0, 7, 2**32 - 1, 2**40 + 7, 2**63 - 1, -1, -(2**63))


class Toy(NamedTuple):
    target: Target
    params: dict
    logits: Callable[[Sequence[int]], np.ndarray]  # of the oracle: tokens so far -> logits of the next

    @property
    def vocab(self) -> int:
        return self.target.config.vocab_size


# The table model.


def random_table(seed: int, rows: int = 13, vocab: int = 7, ties: bool = False) -> np.ndarray:
    """Normal logits; with `ties`, three values only, so that most rows have exact ties."""
    rng = np.random.default_rng(seed)
    table = rng.choice([0.0, 1.0, 2.0], (rows, vocab)) if ties else rng.normal(0, 2, (rows, vocab))
    return table.astype(np.float32)


def table_row(tokens: Sequence[int], window: int, rows: int, stride: int = 5) -> int:
    """The last token weighs 1, the one before 6, then 11 ..., ``window`` of them. [.., 4, 2] -> (2 + 24) % rows."""
    return sum(token * (1 + stride * age) for age, token in enumerate(list(tokens)[::-1][:window])) % rows


def table_model(table: np.ndarray, window: int = 2, stride: int = 5) -> Toy:
    """`stride`: increase of a token's weight for each position back."""
    rows, vocab = table.shape

    def logits(tokens):
        return table[table_row(tokens, window, rows, stride)]

    return Toy(table_target(rows, vocab, window, stride), {"table": jnp.asarray(table)}, logits)


@functools.cache
def table_target(rows: int, vocab: int, window: int, stride: int) -> Target:
    """The functions of all table models of one shape, which share their compiled programs."""
    config = ModelConfig("table", vocab, rows, 1, 1, 1, 1, 1, 1e-5, RopeConfig(), 1 << 20, tied_embeddings=False)

    def embed(params, tokens):
        del params
        return jnp.broadcast_to(tokens.astype(jnp.float32)[:, :, None], (*tokens.shape, rows))

    def forward(params, x, positions, mask, cache, page_table, prefix_length, *, features=None):
        del params
        width = x.shape[1]
        token = x[:, :, 0].astype(jnp.int32)
        if mask is CAUSAL:
            visible = jnp.broadcast_to(jnp.tri(width, dtype=bool), (x.shape[0], width, width))
        else:
            visible = unpack_bits(mask, width)
        safe = jnp.minimum(page_table, pool_shape(cache).pages - 1)
        entries = [leaf[safe].reshape(x.shape[0], -1).astype(jnp.int32) for leaf in cache]
        index = jnp.arange(entries[0].shape[1], dtype=jnp.int32)[None, :]
        committed = index < prefix_length[:, None]
        misplaced = jnp.sum(committed & (entries[1] != index), axis=1)

        def weight(position, seen):  # of keys at `position` [B, 1, C] for queries [B, N]
            age = positions[:, :, None] - position
            return jnp.where(seen & (age >= 0) & (age < window), 1 + stride * age, 0)

        total = jnp.sum(weight(index[:, None, :], committed[:, None, :]) * entries[0][:, None, :], axis=2)
        total += jnp.sum(weight(positions[:, None, :], visible) * token[:, None, :], axis=2)
        hidden = jax.nn.one_hot((total + 3 * misplaced[:, None]) % rows, rows, dtype=jnp.float32)
        block = [leaf.astype(jnp.float32)[:, :, None, None] for leaf in (token, positions)]
        selected = {None: None, "final": hidden}.get(features, hidden)
        return ForwardOutput(hidden, selected, tuple(block))

    def unembed(params, hidden, ids=None):
        logits = params["table"][jnp.argmax(hidden, axis=-1)]
        return logits if ids is None else logits[..., ids]

    # A cache entry is a token's id and position.
    pages = (PageSpec((1, 1), "float32", (None, None)),) * 2
    return Target(config, embed, forward, unembed, pages)


# A tiny Llama, compared with the oracle's.


llama_target = functools.cache(make_target)


def tiny_llama(seed: int = 0, **changes) -> Toy:
    """Two layers, four query heads on two key/value heads, wide enough logits for greedy text that varies."""
    settings = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
    settings |= {"num_kv_heads": 2, "head_dim": 8, "norm_epsilon": 1e-5, "rope": RopeConfig(theta=100.0)}
    settings |= {"max_positions": 256, "tied_embeddings": False} | changes
    config = ModelConfig("llama", **settings)
    rng = np.random.default_rng(seed)

    def redraw(path, leaf):
        normal = rng.normal(0, 1, leaf.shape)
        if path[-1].key.endswith("norm"):
            return jnp.asarray(1 + 0.2 * normal, leaf.dtype)
        if path[-1].key == "embed":  # large tied embeddings would only repeat the input
            return jnp.asarray(normal * (0.2 if config.tied_embeddings else 1.0), leaf.dtype)
        return jnp.asarray(normal * 0.3, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(redraw, dict(init_params(config, jax.random.key(0))))
    on_host = jax.tree.map(np.asarray, params)

    @functools.cache
    def last(tokens: tuple[int, ...]) -> np.ndarray:
        return oracle.llama_logits(on_host, config, tokens)[-1]

    return Toy(llama_target(config), params, lambda tokens: last(tuple(int(t) for t in tokens)))


# Trees as arrays, and drafters that propose listed trees.


def random_tree(root: int, width: int, vocab: int, rng: np.random.Generator, depth: int = 100) -> Tree:
    """At most ``width`` nodes, at most ``depth`` deep, siblings distinct; some long, some bushy."""
    tokens, parents, level = [root], [NO_PARENT], [0]
    latest = rng.random() * 0.8
    for _ in range(width - 1):
        parent = len(tokens) - 1 if rng.random() < latest else int(rng.integers(len(tokens)))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(vocab) if t not in taken]
        if free and level[parent] < depth:
            tokens.append(int(rng.choice(free)))
            parents.append(parent)
            level.append(level[parent] + 1)
    return Tree(tuple(tokens), tuple(parents))


def as_arrays(trees: Sequence[Tree], width: int, *, scored: bool = False) -> DraftTree:
    """[B, width] arrays, in which absent nodes are invalid. Scores are the trees' scores, or minus the depth."""

    def scores(tree):
        return tree.scores if scored else [-float(depth) for depth in oracle.depths(tree)]

    def pad(rows, fill, dtype):
        return jnp.asarray(np.array([[*row, *[fill] * (width - len(row))] for row in rows], dtype))

    return DraftTree(
        tokens=pad([t.tokens for t in trees], -1, np.int32),
        parents=pad([t.parents for t in trees], NO_PARENT, np.int32),
        depth=pad([oracle.depths(t) for t in trees], 0, np.int32),
        valid=pad([[True] * len(t.tokens) for t in trees], False, bool),
        scores=pad([scores(t) for t in trees], -np.inf, np.float32),
    )


def as_tree(tree: DraftTree, row: int) -> Tree:
    """One row's valid nodes."""
    count = int(tree.valid[row].sum())
    return Tree(*(tuple(np.asarray(leaf)[row, :count].tolist()) for leaf in (tree.tokens, tree.parents, tree.scores)))


class Seen(NamedTuple):
    """Observations of a listed drafter, by row of state and position."""

    tokens: Array  # [R, X]
    next_tokens: Array
    times: Array


def listed_drafter(trees: Sequence[Tree], width: int, depth: int, *, length: int = 128, scored=False):
    """Proposes tree ``prefix_length % len(trees)`` with the root replaced, and records its observations.

    So the tree depends on the request's own progress alone, and ``trees[n % len(trees)]`` is the oracle's proposal.
    """
    listed = as_arrays(trees, width, scored=scored)

    def init(params, count, pool):
        del params, pool
        return Seen(*(jnp.full((count, length), fill, jnp.int32) for fill in (-1, -1, 0)))

    def propose(params, state, context):
        del params
        tree = jax.tree.map(lambda leaf: leaf[context.prefix_length % len(trees)], listed)
        return tree._replace(tokens=tree.tokens.at[:, 0].set(context.root)), state

    return Drafter("LISTED", None, width, depth, init, propose, _write_down(length))


@functools.cache
def _write_down(length: int):
    """`observe` of all listed drafters, shared by all trees: see `_compiled_prefill`."""

    def observe(params, state, context, seen):
        del params
        offset = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)[None, :]
        at = jnp.where(offset < seen.length[:, None], context.prefix_length[:, None] + offset, length)
        where = (context.slots[:, None], at)
        return Seen(
            state.tokens.at[where].set(seen.tokens, mode="drop"),
            state.next_tokens.at[where].set(seen.next_tokens, mode="drop"),
            state.times.at[where].add(1, mode="drop"),
        )

    return observe


def listed_proposal(trees: Sequence[Tree]) -> Callable[[list[int]], Tree]:
    """The oracle's trees. All tokens of prompt and output except the root are committed."""

    def propose(tokens: list[int]) -> Tree:
        tree = trees[(len(tokens) - 1) % len(trees)]
        return Tree((tokens[-1], *tree.tokens[1:]), tree.parents)

    return propose


# Requests as rows.


def sampling_rows(requests: Sequence[Sampling], vocab: int) -> SamplingRows:
    """The oracle's sampling parameters as [B] rows."""
    rows = []
    for request in requests:
        fields = dataclasses.asdict(request)
        fields["logit_bias"] = dict(fields.pop("bias"))
        del fields["max_tokens"]
        rows.append(sampling_row(vocab, **fields))
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)


def history(prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], vocab: int) -> History:
    in_prompt = np.stack([np.bincount(list(tokens), minlength=vocab) > 0 for tokens in prompts])
    counts = np.stack([np.bincount(list(tokens), minlength=vocab) for tokens in generated])
    return History(jnp.asarray(in_prompt), jnp.asarray(counts.astype(np.int32)))


def some_sampling(rng: np.random.Generator, vocab: int, **fixed) -> Sampling:
    """Random fields, each disabled about half the time; ``fixed`` overrides."""

    def maybe(off, value):
        return off if rng.random() < 0.5 else value

    fields = {
        "seed": int(rng.choice(SEEDS)) if rng.random() < 0.5 else int(rng.integers(-(2**63), 2**63)),
        "temperature": maybe(0.0, float(rng.choice([0.3, 0.7, 1.0, 1.7]))) if rng.random() < 0.5 else 1.0,
        "top_k": maybe(-1, int(rng.integers(1, vocab + 3))),
        "top_p": maybe(1.0, float(rng.uniform(0.01, 1))),
        "min_p": maybe(0.0, float(rng.uniform(0, 0.5))),
        "repetition_penalty": maybe(1.0, float(rng.uniform(0.5, 2))),
        "frequency_penalty": maybe(0.0, float(rng.uniform(-1, 2))),
        "presence_penalty": maybe(0.0, float(rng.uniform(-1, 2))),
        "bias": maybe({}, {int(t): float(rng.normal(0, 3)) for t in rng.integers(0, vocab, 3)}),
        "min_tokens": maybe(0, int(rng.integers(1, 6))),
        "stop_ids": maybe((), tuple(int(t) for t in rng.choice(vocab, int(rng.integers(1, 3)), replace=False))),
        "max_tokens": int(rng.integers(1, 20)),
    }
    return Sampling(**fields | fixed)


# The smallest possible engine.


@functools.cache
def compiled_steps(target: Target, drafter: Drafter, config: StepConfig):
    """The jitted steps, traced once for every runner of the same target, drafter and shapes."""
    steps = make_steps(target, drafter, config=config)
    reads = drafter.features, drafter.reads_layers
    return steps._replace(prefill=_compiled_prefill(target, *reads, drafter.observe, config.ragged))


@functools.cache
def _compiled_prefill(target: Target, features, layers, observe, ragged: bool):
    """A prefill depends on nothing else of a drafter and of its `StepConfig`, so drafters share the program."""
    drafter = none_drafter()._replace(features=features, reads_layers=layers, observe=observe)
    config = StepConfig(ragged=ragged)
    return jax.jit(functools.partial(prefill_step, target=target, drafter=drafter, config=config), donate_argnums=1)


class Finished(NamedTuple):
    tokens: list[int]
    finish: int
    emitted: list[int]  # per step
    accepted: list[int]


UNTOUCHED = -7.0
"""Content of a runner's pages before a commit."""


class Runner:
    """R rows and a batch bucket of R + 1 (the last entry is always empty), pages handed out in random order."""

    def __init__(
        self, toy: Toy, drafter: Drafter, *, rows=3, page_size=4, pages_a_row=12, chunk=5, config=None, draft=None
    ):
        self.toy, self.rows, self.chunk, self.page_size = toy, rows, chunk, page_size
        self.params = Params(toy.params, draft)
        self.pool = PoolShape(rows * pages_a_row + 1, page_size)
        self.steps = compiled_steps(toy.target, drafter, config or StepConfig())
        state = init_state(self.params, toy.target, drafter, rows=rows, pool=self.pool)
        self.state = state._replace(cache=jax.tree.map(lambda leaf: leaf + UNTOUCHED, state.cache))
        pages = np.random.default_rng(0).permutation(self.pool.pages)[: rows * pages_a_row]
        empty = np.full((1, pages_a_row), self.pool.pages)
        self.table = np.concatenate([pages.reshape(rows, pages_a_row), empty]).astype(np.int32)

    def inputs(self, active: Sequence[bool]) -> StepInput:
        slots = jnp.arange(self.rows + 1, dtype=jnp.int32)
        return StepInput(slots, jnp.asarray(self.table), jnp.asarray([*active, False]))

    def admit(self, slot: int, prompt, request: Sampling, output=(), **changes) -> None:
        fields = dataclasses.asdict(request)
        fields |= {"logit_bias": dict(fields.pop("bias")), "limit": fields.pop("max_tokens")} | changes
        row = new_row(self.toy.vocab, prompt=prompt, output=output, **fields)
        self.state = self.steps.admit(self.state, jnp.int32(slot), jax.tree.map(jnp.asarray, row))

    def prefill(self, texts: Sequence[Sequence[int]], forced: int = -1, chunk: int | None = None) -> StepOutput:
        """Commits a text per row, chunk by chunk. Returns the stacked outputs of the last chunks."""
        chunk, done = chunk or self.chunk, [0] * self.rows
        last: dict[int, StepOutput] = {}
        texts = [list(text) for text in texts] + [[]] * (self.rows - len(texts))
        while any(d < len(t) for d, t in zip(done, texts, strict=True)):
            tokens = np.full((self.rows + 1, chunk), 3, np.int32)
            length, following = np.zeros((2, self.rows + 1), np.int32)
            for row, text in enumerate(texts):
                part = text[done[row] : done[row] + chunk]
                tokens[row, : len(part)], length[row] = part, len(part)
                done[row] += len(part)
                following[row] = text[done[row]] if done[row] < len(text) else forced
            inputs = self.inputs(length[:-1] > 0)
            prefill = PrefillInput(*inputs[:3], *map(jnp.asarray, (tokens, length, following)))
            self.state, output = self.steps.prefill(self.params, self.state, prefill)
            last |= {row: output for row in range(self.rows) if length[row] and done[row] == len(texts[row])}
        picked = [jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], last[row]) for row in sorted(last)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *picked)

    def step(self, active: Sequence[bool]) -> StepOutput:
        self.state, output = self.steps.speculate(self.params, self.state, self.inputs(active))
        return jax.tree.map(np.asarray, output)

    def generate(self, requests: Sequence[tuple[list[int], Sampling]], **changes) -> list[Finished]:
        for slot, (prompt, request) in enumerate(requests):
            self.admit(slot, prompt, request, **changes)
        first = self.prefill([prompt for prompt, _ in requests])
        outputs = zip(first.tokens, first.emitted, first.finish, strict=True)
        results = [Finished(tokens[:count].tolist(), int(finish), [], []) for tokens, count, finish in outputs]
        return self.decode(results)

    def decode(self, results: list[Finished]) -> list[Finished]:
        while any(result.finish == 0 for result in results):
            active = [result.finish == 0 for result in results] + [False] * (self.rows - len(results))
            output = self.step(active)
            for row, result in enumerate(results):
                count = int(output.emitted[row])
                if not active[row]:
                    assert count == 0
                    continue
                assert count > 0 or output.finish[row] != 0
                result.emitted.append(count)
                result.accepted.append(int(output.accepted[row]))
                result.tokens.extend(output.tokens[row, :count].tolist())
                results[row] = result._replace(finish=int(output.finish[row]))
        return results

    def committed(self, row: int, layer: int = 0) -> np.ndarray:
        """A row's key slots in order, [T * S, K, E]."""
        keys = np.asarray(jax.tree.leaves(self.state.cache[layer])[0])
        return keys[self.table[row]].reshape(-1, *keys.shape[2:])
