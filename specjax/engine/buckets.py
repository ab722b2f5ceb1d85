"""The shapes that the engine compiles for and rounds up to. All buckets are chosen in this file."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.drafters.base import Drafter
from specjax.step import tree_widths

BATCHES = (1, 4, 16, 48, 128, 256)

SMALL_CHUNK = {"cpu": 64, "gpu": 256}
CHUNK = {"cpu": 512, "gpu": 2048}
"""Chunk widths. On a CPU a forward's cost grows with its width from 64 on: wider chunks only save overhead."""

BLOCK_TOKENS = {"cpu": 64, "gpu": 1024}
"""Most tree nodes that a step checks over its whole batch. On a CPU checking 64 tokens costs six times as much as one,
so large batches draft less (and the largest not at all) unless the user has chosen the trees' width; on a GPU
verification is nearly free up to far more."""

HEAD_BLOCK_TOKENS = BLOCK_TOKENS | {"cpu": 1}
"""The same limit for a drafter that reads features. A draft head always proposes something and takes time itself, so on
a CPU it drafts for one request alone: four at once had half the speed without drafts with four nodes each
(benchmarks/results/batch-2026-11-22.json, 2 cores)."""

TABLE = 512
"""Pages in the small page table. A request that may hold no more than this needs no other."""


@dataclass(frozen=True)
class Buckets:
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    tables: tuple[int, ...]
    block_tokens: int | None  # None: no limit
    several_widths: bool = True  # whether a step may choose among several tree widths

    @classmethod
    def build(
        cls, platform: str, drafter: Drafter, *, rows: int, request_pages: int, chunk: int | None = None
    ) -> Buckets:
        """For R rows, and requests that may hold `request_pages` pages. A width set explicitly is never reduced."""
        kind = "cpu" if platform == "cpu" else "gpu"
        most = (BLOCK_TOKENS if drafter.features is None else HEAD_BLOCK_TOKENS)[kind]
        largest = min(chunk or CHUNK[kind], CHUNK[kind])
        return cls(
            batches=(*(b for b in BATCHES if b < rows), rows),
            chunks=tuple(sorted({min(SMALL_CHUNK[kind], largest), largest})),
            tables=(request_pages,) if request_pages <= TABLE else (TABLE, request_pages),
            block_tokens=None if drafter.explicit_width else most,
            # On a GPU a wide tree costs what a narrow one costs, and choosing would ask the host.
            several_widths=kind == "cpu",
        )

    def batch(self, count: int) -> int:
        return next(b for b in self.batches if b >= count)

    def table(self, pages: int) -> int:
        return self.tables_for(pages)[0]

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
        """Batch buckets that serve `count` requests equally well, the smallest first: larger, with the same trees."""
        exact = self.batch(count)
        same = self.tree_widths(exact, widths)
        return [b for b in self.batches if b >= exact and self.tree_widths(b, widths) == same]

    def shrinking(self, count: int, widths: tuple[int, ...]) -> list[int]:
        """Batch buckets of a run of `count` requests as it ends: one for each set of tree widths on the way down, and
        all of them where a step's cost follows its nodes and nothing limits those."""
        needed, each = [], self.block_tokens is None and self.several_widths and len(widths) > 1
        while count:
            batch = self.batch(count)
            needed.append(batch)
            same = self.tree_widths(batch, widths)
            smaller = (b for b in self.batches if b < batch and (each or self.tree_widths(b, widths) != same))
            count = max(smaller, default=0)
        return needed

    def tree_widths(self, batch: int, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Which of a drafter's tree widths a batch may use: 1, those of at most `block_tokens` nodes over the batch,
        and for one request alone all of them."""
        most = self.block_tokens
        fitting = tuple(w for w in widths if most is None or 1 in (w, batch) or w * batch <= most)
        return fitting if self.several_widths else fitting[-1:]

    def drafting(self, widths: tuple[int, ...]) -> int:
        """The most requests that still draft when they run together."""
        return max(batch for batch in self.batches if self.tree_widths(batch, widths) != (1,) or batch == 1)


def speculation_note(drafter: Drafter, buckets: Buckets) -> str:
    """How an engine drafts, for the log."""
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
