"""Shapes that the engine rounds up to, and the small arrays that it builds for a step. All buckets are in this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from specjax.cache import bytes_per_token
from specjax.config import ModelConfig
from specjax.drafters.base import Drafter, Params
from specjax.engine.config import EngineConfig
from specjax.engine.request import Sequence
from specjax.models.protocol import Target
from specjax.step import NO_DRAFT_LIMIT, NO_FORCED_TOKEN, PrefillInput, Row, StepInput, init_state, new_row, tree_widths

BATCHES = (1, 4, 16, 48, 128, 256)

SMALL_CHUNK = {"cpu": 64, "gpu": 256}
CHUNK = {"cpu": 512, "gpu": 2048}
"""Chunk widths. On a CPU a forward's cost grows with its width from 64 on: wider chunks only save overhead."""

BLOCK_TOKENS = {"cpu": 64, "gpu": 1024}
"""Most tree nodes that a step checks over its whole batch. On a CPU checking 64 tokens costs six times as much as one,
so large batches draft less (and the largest not at all) unless the user has chosen the trees' width; on a GPU
verification is nearly free up to far more."""

HEAD_BLOCK_TOKENS = BLOCK_TOKENS | {"cpu": 1}
"""The same where a draft head drafts (a drafter that reads features), which always has something to propose and takes
time itself: on a CPU for one request alone. Four at once had half the speed without drafts with four nodes each
(benchmarks/results/batch-2026-11-22.json, 2 cores)."""

TABLE = 512
"""Pages in the small page table. A request that may hold no more than this needs no other."""


@dataclass(frozen=True)
class Buckets:
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    tables: tuple[int, ...]
    block_tokens: int | None  # None: however many
    several_widths: bool = True  # whether a step may choose among several tree widths

    @classmethod
    def build(
        cls, platform: str, drafter: Drafter, *, rows: int, request_pages: int, chunk: int | None = None
    ) -> Buckets:
        """For R rows, and requests that may hold `request_pages` pages. Trees that were asked for keep their width."""
        kind = "cpu" if platform == "cpu" else "gpu"
        most = (BLOCK_TOKENS if drafter.features is None else HEAD_BLOCK_TOKENS)[kind]
        largest = min(chunk or CHUNK[kind], CHUNK[kind])
        return cls(
            batches=(*(b for b in BATCHES if b < rows), rows),
            chunks=tuple(sorted({min(SMALL_CHUNK[kind], largest), largest})),
            tables=(request_pages,) if request_pages <= TABLE else (TABLE, request_pages),
            block_tokens=None if drafter.explicit_width else most,
            several_widths=kind
            == "cpu",  # on a GPU a wide tree costs what a narrow one costs, and choosing asks the host
        )

    def batch(self, count: int) -> int:
        return next(b for b in self.batches if b >= count)

    def table(self, pages: int) -> int:
        return next(t for t in self.tables if t >= pages)

    def tables_for(self, pages: int) -> tuple[int, ...]:
        """Page-table widths that hold `pages` pages, the smallest first."""
        return tuple(t for t in self.tables if t >= pages)

    def chunk(self, tokens: int) -> int:
        """The width for the next chunk of `tokens` remaining ones: the large one only if most of it is used."""
        small, large = self.chunks[0], self.chunks[-1]
        return large if tokens > large - small else small

    def chunks_for(self, tokens: int) -> tuple[int, ...]:
        """Chunk widths for `tokens` remaining ones, the best first."""
        best = self.chunk(tokens)
        return best, *(width for width in self.chunks if width != best)

    def substitutes(self, count: int, widths: tuple[int, ...]) -> list[int]:
        """Batch buckets that serve `count` requests as well, the smallest first: larger, with the same tree widths."""
        exact = self.batch(count)
        same = self.tree_widths(exact, widths)
        return [b for b in self.batches if b >= exact and self.tree_widths(b, widths) == same]

    def shrinking(self, count: int, widths: tuple[int, ...]) -> list[int]:
        """Batch buckets of a run of `count` requests as it ends: one for each set of tree widths on the way down, and
        all where a step's cost follows its nodes and nothing limits them."""
        needed, each = [], self.block_tokens is None and self.several_widths and len(widths) > 1
        while count:
            batch = self.batch(count)
            needed.append(batch)
            same = self.tree_widths(batch, widths)
            smaller = (b for b in self.batches if b < batch and (each or self.tree_widths(b, widths) != same))
            count = max(smaller, default=0)
        return needed

    def tree_widths(self, batch: int, widths: tuple[int, ...]) -> tuple[int, ...]:
        """The tree widths of a drafter that a batch may use: at most `block_tokens` nodes in all, and always 1. One
        request alone may use them all."""
        most = self.block_tokens
        fitting = tuple(w for w in widths if most is None or 1 in (w, batch) or w * batch <= most)
        return fitting if self.several_widths else fitting[-1:]

    def drafting(self, widths: tuple[int, ...]) -> int:
        """The most requests that still draft when they run together."""
        return max(batch for batch in self.batches if self.tree_widths(batch, widths) != (1,) or batch == 1)


def speculation_note(drafter: Drafter, buckets: Buckets) -> str:
    """What the log says of how an engine drafts."""
    widths = tree_widths(drafter)
    parts = [f"{drafter.name}, trees of up to {drafter.width} tokens"] if drafter.width > 1 else [drafter.name]
    if drafter.note:
        parts.append(drafter.note)
    if len(widths) > 1 and (most := buckets.drafting(widths)) < buckets.batches[-1]:
        many = "several" if most == 1 else f"more than {most}"
        parts.append(
            f"{many} requests at once are decoded without drafts, which is faster here; trees whose numbers are given "
            "by flags are always drafted"
        )
    return "; ".join(parts)


def step_input(sequences: list[Sequence], batch: int, table: int, rows: int, pages: int) -> StepInput:
    """Sequences to a bucket of `batch` entries with `table` pages each.

    Empty entries get slots from R on; holes in the table hold P.
    """
    slots = rows + np.arange(batch, dtype=np.int32)
    slots[: len(sequences)] = cast(Any, [sequence.slot for sequence in sequences])
    inputs: Any = (slots, _page_table(sequences, batch, table, pages), np.arange(batch) < len(sequences))
    return StepInput(*inputs)  # numpy until it reaches the device


def prefill_input(sequence: Sequence, width: int, table: int, pages: int) -> PrefillInput:
    """The next chunk of a sequence's context, in `width` tokens and `table` pages. The last one draws, unless the
    sequence is a resumed one."""
    context = sequence.context
    length = min(len(context) - sequence.prefilled, width)
    end = sequence.prefilled + length
    tokens = np.zeros((1, width), np.int32)
    tokens[0, :length] = context[sequence.prefilled : end]
    after = context[end] if end < len(context) else sequence.forced_token
    inputs: dict[str, Any] = {
        "slots": np.array([sequence.slot], np.int32),
        "page_table": _page_table([sequence], 1, table, pages),
        "active": np.ones(1, bool),
        "tokens": tokens,
        "length": np.array([length], np.int32),
        "next_token": np.array([NO_FORCED_TOKEN if after is None else after], np.int32),
    }
    return PrefillInput(**inputs)


def admission_row(sequence: Sequence, vocab_size: int) -> Row:
    """A sequence's row of the state, as numpy. Output that a resumed sequence has already counts in its penalties."""
    params = sequence.params
    return new_row(
        vocab_size,
        limit=sequence.limit,
        prompt=sequence.prompt,
        output=sequence.output,
        draft_limit=NO_DRAFT_LIMIT if params.speculate else 0,
        logprobs=params.logprobs is not None,
        salt=sequence.salt,
        temperature=params.temperature,
        top_k=min(params.top_k, vocab_size),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=params.min_new_tokens,
        stop_ids=sequence.device_stops,
        seed=sequence.seed,
        logit_bias=dict(params.logit_bias),
    )


def _page_table(sequences: list[Sequence], batch: int, width: int, pages: int) -> np.ndarray:
    table = np.full((batch, width), pages, np.int32)
    for row, sequence in zip(table, sequences, strict=False):
        row[: len(sequence.pages)] = sequence.pages
    return table


DEFAULT_POOL_TOKENS = 32_768
"""Of the pool on a CPU, where memory is shared with everything else."""


STEP_COPIES = 2.5
"""Float32 arrays of [nodes, vocabulary] that a step holds at once: 2.1 to 2.3 in XLA's memory analysis."""


def asked_bytes(model: ModelConfig, rows: int, drafter: Drafter) -> int:
    """Bytes of temporaries that a full batch of trees takes beyond what `mem_fraction` leaves room for: only trees that
    the user asked for can be so large."""
    nodes = rows * drafter.width - BLOCK_TOKENS["gpu"] if drafter.explicit_width else 0
    return int(STEP_COPIES * max(nodes, 0) * model.vocab_size * 4)


def pool_tokens(
    target: Target, config: EngineConfig, context_length: int, platform: str, drafter: Drafter, params: Params
) -> int:
    """Tokens that the pool should hold: what is asked for, else as many as all rows can use, or as fit.

    Raises:
        ValueError: they, or the temporaries of trees that were asked for, do not fit the device.
    """
    model, given = target.config, config.max_total_tokens
    wanted = config.max_running_requests * context_length
    stats = jax.local_devices()[0].memory_stats() or {}
    if platform == "cpu" or "bytes_limit" not in stats:
        return given or min(wanted, DEFAULT_POOL_TOKENS)
    trees = asked_bytes(model, config.max_running_requests, drafter)
    each = bytes_per_token(lambda pool: init_state(params, target, drafter, rows=1, pool=pool), config.page_size)
    if given is not None:
        room = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        if given * each + trees > room:
            raise ValueError(
                f"EngineConfig.max_total_tokens {given} takes {given * each / 1e9:.2f} GB and a full "
                f"batch's trees {trees / 1e9:.2f} GB, but {room / 1e9:.2f} GB are free; give fewer tokens, "
                f"EngineConfig.max_running_requests ({config.max_running_requests}) or draft.nodes ({drafter.width})"
            )
        return given
    free = int(stats["bytes_limit"] * config.mem_fraction) - stats.get("bytes_in_use", 0) - trees
    if free < each * config.page_size:
        limit, used = stats["bytes_limit"] / 1e9, stats.get("bytes_in_use", 0) / 1e9
        raise ValueError(
            f"no memory is left for the KV pool: {used:.2f} of {limit:.2f} GB are taken, and "
            f"EngineConfig.mem_fraction {config.mem_fraction:g} of it is for weights and pool; give a higher fraction, "
            f"or fewer EngineConfig.max_running_requests ({config.max_running_requests}) or draft.nodes "
            f"({drafter.width})"
        )
    return min(wanted, free // each)
