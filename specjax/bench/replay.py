"""Accept lengths of many draft trees from one recorded run of a drafter.

A run is recorded with every candidate that the drafter expands, at every position of a text: each step emits one token,
so what a tree of any shape would have proposed there is known, wherever its steps would have begun. What a smaller
shape accepts is then replayed on the host:

    fewer steps        the candidates of the first levels: a level depends on those above it alone
    fewer nodes        of these the best by score, ties to the first, as `specjax.tree.rerank` takes them
    another top-k      is recorded for itself, in the same run: the nodes that a beam of k' expands need not be among
                       those of a wider one, where children of other nodes may displace them

The drafter's state depends on the committed tokens alone, not on the steps in which they were committed, so a replay is
what a run of that shape does, up to the rounding of products of another width.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import PoolShape
from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter, Params
from specjax.models.target import Target
from specjax.state import NO_FORCED_TOKEN, RUNS, PrefillInput, StepInput, init_state, new_row
from specjax.step import StepConfig, draft_phase, make_steps, verify_phase
from specjax.tree import DraftTree, root_only

PAGE_SIZE = 16


class Candidates(NamedTuple):
    """What a drafter expanded at one position: the valid nodes of its tree, node 0 the root, parents first."""

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]
    depth: np.ndarray  # int32 [n]
    scores: np.ndarray  # float32 [n], cumulative log-probability


class Recording(NamedTuple):
    """One text. At position i the root is `tokens[i]`."""

    tokens: list[int]
    candidates: list[list[Candidates]]  # [drafters][positions]: all but the last token have them

    def packed(self) -> str:
        """As text, for a log."""
        flat = [tree for trees in self.candidates for tree in trees]
        leaves: dict[str, Any] = {
            name: np.concatenate([getattr(t, name) for t in flat] or [[]]) for name in Candidates._fields
        }
        sizes = np.array([[len(tree.tokens) for tree in trees] for trees in self.candidates], np.int32)
        out = io.BytesIO()
        np.savez_compressed(out, text=np.array(self.tokens, np.int32), sizes=sizes, **leaves)
        return base64.b64encode(out.getvalue()).decode()

    @classmethod
    def unpacked(cls, text: str) -> Recording:
        """What `packed` made."""
        with np.load(io.BytesIO(base64.b64decode(text))) as file:
            sizes, leaves = file["sizes"], [file[name] for name in Candidates._fields]
            tokens = file["text"].tolist()
        ends = iter(np.cumsum(sizes.reshape(-1)).tolist())
        start, found = 0, []
        for trees in sizes:
            found.append([])
            for _ in trees:
                end = next(ends)
                found[-1].append(Candidates(*(leaf[start:end] for leaf in leaves)))
                start = end
        return cls(tokens, found)


class Recorder:
    """Records texts of one target with drafters that share `init` and `observe`, such as one head with several top-k.

    Args:
        pages: of 16 tokens; a prompt and its text must fit.
        chunk: tokens of a prompt in one forward.
    """

    def __init__(
        self, target: Target, params: Params, drafters: Sequence[Drafter], *, pages: int = 64, chunk: int = 64
    ) -> None:
        self._target, self._params, self._drafters = target, params, tuple(drafters)
        self._pool, self._chunk = PoolShape(pages, PAGE_SIZE), chunk
        self._steps = make_steps(target, self._drafters[0])
        step = partial(_step, target=target, drafters=self._drafters)
        self._step = jax.jit(step, donate_argnums=1, compiler_options=compiler_options())
        self._state: Any = None

    def forget(self) -> None:
        """Forgets earlier texts: drafters such as NGRAM draft from them otherwise, as they do in a server."""
        self._state = None

    def __call__(self, prompt: Sequence[int], count: int, **sampling: Any) -> Recording:
        """Records at most `count` tokens after a prompt. `sampling`: as of `specjax.state.new_row`.

        Raises:
            ValueError: they do not fit the pages.
        """
        if len(prompt) + count > self._pool.pages * PAGE_SIZE:
            raise ValueError(f"{len(prompt)} and {count} tokens do not fit {self._pool.pages} pages of {PAGE_SIZE}")
        state, self._state = self._state, None
        if state is None:
            state = init_state(self._params, self._target, self._drafters[0], rows=1, pool=self._pool)
        row = new_row(self._target.config.vocab_size, limit=count, prompt=prompt, **sampling)
        state = self._steps.admit(state, jnp.int32(0), jax.tree.map(jnp.asarray, row))
        table = jnp.arange(self._pool.pages, dtype=jnp.int32)[None, :]
        inputs = StepInput(jnp.zeros(1, jnp.int32), table, jnp.ones(1, bool))
        output = None
        for start in range(0, len(prompt), self._chunk):
            part = list(prompt[start : start + self._chunk])
            following = prompt[start + self._chunk] if start + self._chunk < len(prompt) else NO_FORCED_TOKEN
            tokens = np.zeros((1, self._chunk), np.int32)
            tokens[0, : len(part)] = part
            count_and_next = np.array([len(part)], np.int32), np.array([following], np.int32)
            given = PrefillInput(*inputs[:3], *map(jnp.asarray, (tokens, *count_and_next)))
            state, output = self._steps.prefill(self._params, state, given)
        assert output is not None, "a prompt has a token"
        found = Recording([int(output.tokens[0, 0])], [[] for _ in self._drafters])
        while int(output.finish[0]) == RUNS:
            state, output, trees = self._step(self._params, state, inputs)
            if not int(output.emitted[0]):
                break
            found.tokens.append(int(output.tokens[0, 0]))
            for seen, tree in zip(found.candidates, jax.device_get(trees), strict=True):
                seen.append(_candidates(tree))
        self._state = state
        return found


def _step(
    params: Params, state: Any, inputs: StepInput, *, target: Target, drafters: tuple[Drafter, ...]
) -> tuple[Any, Any, list[DraftTree]]:
    """Each drafter's tree, and a step of plain decoding of which the drafter is told."""
    trees, drafted = [], state
    for drafter in drafters:
        tree, drafted = draft_phase(params, state, inputs, drafter=drafter)
        trees.append(tree)
    root = root_only(state.root[inputs.slots])
    plain = StepConfig(widths=(1,))
    state, output = verify_phase(params, drafted, inputs, root, target=target, drafter=drafters[0], config=plain)
    return state, output, trees


def _candidates(tree: DraftTree) -> Candidates:
    valid = np.asarray(tree.valid[0])
    return Candidates(*(np.asarray(leaf[0])[valid] for leaf in (tree.tokens, tree.parents, tree.depth, tree.scores)))


class Outcomes(NamedTuple):
    """What a tree of one shape would do at each position of a text; int [positions] each."""

    accepted: np.ndarray  # drafts on the path that the text takes
    nodes: np.ndarray  # valid nodes of the tree, the root included


class Candidacy:
    """The candidates of one drafter in one text, arranged so that any smaller shape is read off them at once."""

    def __init__(self, recording: Recording, drafter: int) -> None:
        trees = recording.candidates[drafter]
        width = max((len(tree.tokens) for tree in trees), default=1)
        depth = max((int(tree.depth.max()) for tree in trees), default=0)
        self.tokens = len(recording.tokens)
        self._depth = np.zeros((len(trees), width), np.int32)
        self._scores = np.full((len(trees), width), -np.inf, np.float32)
        self._path = np.full((len(trees), depth), NOWHERE, np.int32)  # the node that is the text's d-th token from here
        for i, tree in enumerate(trees):
            self._depth[i, : len(tree.depth)] = tree.depth
            self._scores[i, 1 : len(tree.scores)] = tree.scores[1:]
            path = _path(tree, recording.tokens[i + 1 :])
            self._path[i, : len(path)] = path
        self._ranks: dict[int, np.ndarray] = {}

    def outcomes(self, steps: int, nodes: int) -> Outcomes:
        """What trees of at most `steps` levels and `nodes` nodes do."""
        inside = (self._scores > -np.inf) & (self._depth <= steps)
        there = self._path != NOWHERE
        own = np.take_along_axis(inside, np.where(there, self._path, 0), axis=1) & there
        taken = own & (self._ranked(steps) < nodes - 1)
        return Outcomes(np.cumprod(taken, axis=1).sum(axis=1), 1 + np.minimum(inside.sum(axis=1), nodes - 1))

    def _ranked(self, steps: int) -> np.ndarray:
        """Of each node on the text's path, the number of candidates of so many levels that come before it: those with a
        better score, and of equal ones the first, as `specjax.tree.rerank` has it."""
        if steps not in self._ranks:
            scores = np.where(self._depth <= steps, self._scores, -np.inf)
            place = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
            self._ranks[steps] = np.take_along_axis(place, np.maximum(self._path, 0), axis=1)
        return self._ranks[steps]


NOWHERE = -1  # the text's path has left the candidates


def _path(found: Candidates, text: Sequence[int]) -> list[int]:
    """Indices of the candidates that the text takes, level by level."""
    children = {(int(found.parents[i]), int(found.tokens[i])): i for i in range(1, len(found.tokens))}
    path, at = [], 0
    for token in text:
        if (at := children.get((at, int(token)), NOWHERE)) == NOWHERE:
            break
        path.append(at)
    return path


def replay(recording: Recording, drafter: int, steps: int, nodes: int) -> list[int]:
    """Steps by drafts accepted, as a run with a tree of this shape would count them.

    Args:
        drafter: index of the one whose candidates are used.
    """
    drafts = Candidacy(recording, drafter).outcomes(steps, nodes).accepted
    histogram, position, last = [0] * (steps + 1), 0, len(recording.tokens) - 1
    while position < last:
        emitted = min(int(drafts[position]) + 1, last - position)
        histogram[emitted - 1] += 1
        position += emitted
    return histogram
