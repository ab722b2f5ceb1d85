"""The output of a program: packed, copied to the host, added to sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import TEXT_FAILED, RawLogprob, Sequence
from specjax.state import FULL, NOT_FINITE, STOPPED, DecodeState, StepOutput, Trace
from specjax.verify import LOGPROB_IDS, Logprobs
from specjax.viz.trees import step_tree

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """Totals since an engine was made. Reports take differences."""

    prefilled_sequences: int = 0  # a resumed one counts again
    prefilled_tokens: int = 0
    cached_tokens: int = 0  # of their contexts, taken from the prefix cache instead
    steps: int = 0  # decode steps dispatched
    verifications: int = 0  # of one sequence in one step
    drafted_steps: int = 0  # those of them that could draft
    verified: int = 0  # tokens that these emitted
    generated: int = 0  # all tokens emitted
    own_steps: int = 0  # drafted steps of sequences without a grammar, which forces tokens that count as drafts
    own_accepted: int = 0  # drafts that became text in these
    accepted_at: list[int] = field(default_factory=list)  # drafts that became text, by depth - 1

    def count(self, kept: int, *, verified: bool, drafted: bool, free: bool) -> None:
        """A sequence, `free` of a grammar, kept so many tokens of a prefill or, `verified`, of a step, that could draft
        for it."""
        self.generated += kept
        if verified:
            self.verifications += 1
            self.drafted_steps += drafted
            self.verified += kept
            if drafted and free:
                self.own_steps += 1
                self.own_accepted += kept - 1
            self.accepted_at += [0] * (kept - 1 - len(self.accepted_at))
            for depth in range(kept - 1):
                self.accepted_at[depth] += 1

    @classmethod
    def sum(cls, several: Iterable[Counters]) -> Counters:
        """Those of several engines together."""
        found = cls()
        for each in several:
            for name, value in vars(each).items():
                if name != "accepted_at":
                    setattr(found, name, getattr(found, name) + value)
            found.accepted_at = [*map(sum, zip_longest(found.accepted_at, each.accepted_at, fillvalue=0))]
        return found

    @property
    def accept_length(self) -> float:
        """Tokens a verification; 1.0 when there was none."""
        return self.verified / self.verifications if self.verifications else 1.0

    @property
    def accepted(self) -> int:
        """Drafts that became text."""
        return self.verified - self.verifications


class Output(NamedTuple):
    """Of a step or a prefill, on the device. One array holds what every step needs, so that it costs one copy."""

    packed: Array  # [B, 2 + J] int32: emitted, finish, tokens
    logprobs: Array  # [B, (1 + 2 * top + 128) * J] int32; copied only where a request wants them
    trace: Trace | None
    prompt: Array | None = None  # the same of a prefill's C tokens, if its program computes them


def packed(
    function: Callable[..., tuple[DecodeState, StepOutput]], *given: Any, **fixed: Any
) -> tuple[DecodeState, Output]:
    """A step or a prefill with its output packed, to be traced."""
    state, output = function(*given, **fixed)
    integers = jnp.concatenate([output.emitted[:, None], output.finish[:, None], output.tokens], axis=1)
    prompt = None if output.prompt is None else _bits(output.prompt)
    return state, Output(integers, _bits(output.logprobs), output.trace, prompt)


def _bits(found: Logprobs) -> Array:
    rows = found.drawn.shape[0]
    floats = [found.drawn, found.top.reshape(rows, -1), found.of_ids.reshape(rows, -1)]
    bits = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in floats]
    return jnp.concatenate([*bits, found.top_ids.reshape(rows, -1)], axis=1)


class Read(NamedTuple):
    """A step's output on the host."""

    tokens: list[list[int]]  # [B][emitted]
    finish: list[int]  # [B]
    logprobs: Logprobs | None  # of numpy arrays


def read_output(output: Output, top: int | None) -> Read:
    """Copies a step's output to the host; waits for the step. Log-probabilities hold `top` alternatives of a token, and
    are not copied if it is None."""
    packed = np.asarray(output.packed)
    tokens = [row[2 : 2 + row[0]] for row in packed.tolist()]
    finish = packed[:, 1].tolist()
    if top is None:
        return Read(tokens, finish, None)
    return Read(tokens, finish, _from_bits(output.logprobs, packed.shape[1] - 2, top))


def _from_bits(bits: Array, width: int, top: int) -> Logprobs:
    ends = np.cumsum([width, width * top, width * LOGPROB_IDS])
    drawn, best, of_ids, ids = np.split(np.asarray(bits), ends, axis=1)
    shape = (-1, width, top)
    found: Any = (
        drawn.view(np.float32),
        best.view(np.float32).reshape(shape),
        ids.reshape(shape),
        of_ids.view(np.float32).reshape(-1, width, LOGPROB_IDS),
    )
    return Logprobs(*found)


def take_prompt(sequence: Sequence, output: Output, row: int, start: int, end: int, top: int) -> None:
    """Adds the log-probabilities that a prefill of tokens `start` to `end` of the context has computed; waits for
    it. `top`: alternatives that its output holds of a token."""
    if sequence.prompt_logprobs is not None and output.prompt is not None:
        width = output.prompt.shape[1] // (1 + 2 * top + LOGPROB_IDS)
        found = _from_bits(output.prompt, width, top)
        sequence.prompt_logprobs.add(start, end, *(np.asarray(leaf[row]) for leaf in found))


def take(sequence: Sequence, read: Read, output: Output, row: int, *, verified: bool) -> int:
    """Adds the tokens of a row to its sequence, with their log-probabilities and tree. Returns how many it kept.

    An error in its text ends this sequence; the others go on. `verified`: the tokens come from a verification, not from
    a prefill.
    """
    tokens, finish = read.tokens[row], read.finish[row]
    kept = len(tokens)
    try:
        kept = sequence.accept(tokens, finish == STOPPED, finish == FULL)
        if sequence.params.logprobs is not None and read.logprobs is not None:
            sequence.logprobs += _raw_logprobs(read.logprobs, row, kept, sequence.params)
        if sequence.params.origins and kept:
            sequence.drafted_flags += [True] * (kept - 1) + [False]
        if output.trace is not None and (most := sequence.most_trees) != 0:
            sequence.trees.append(step_tree(output.trace, row, np.array(tokens[:kept], np.int32)))
            if most is not None:
                del sequence.trees[:-most]
        if finish == NOT_FINITE and sequence.finish_reason is None:
            sequence.abort_not_finite()
    except Exception:
        logger.exception("request %s failed", sequence.id)
        sequence.abort(TEXT_FAILED)
    if verified and tokens:
        sequence.verify_steps += 1
        sequence.histogram[kept - 1] += 1
        if finish != NOT_FINITE:
            sequence.certain = sequence.committed
    return kept


def _raw_logprobs(found: Logprobs, row: int, count: int, params: SamplingParams) -> list[RawLogprob]:
    """Of the first `count` tokens of a row, with as many of the likeliest and with the ids that are wanted."""
    top, wanted = params.logprobs or 0, params.logprob_ids
    drawn, ids, best = found.drawn[row, :count], found.top_ids[row, :count, :top], found.top[row, :count, :top]
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), best.tolist(), strict=True))
    of_ids = (tuple(zip(wanted, values, strict=True)) for values in found.of_ids[row, :count, : len(wanted)].tolist())
    return list(map(RawLogprob, drawn.tolist(), tops, of_ids))
