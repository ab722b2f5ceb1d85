"""Shapes that the engine compiles for, and the programs of these shapes that requests need.

Batches, prefill chunks, page tables and tree widths are rounded up to a few sizes. A `Key` names a program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from specjax.drafters.base import Speculation
from specjax.step import tree_widths

if TYPE_CHECKING:
    from specjax.engine.sequence import Sequence

TREE, PLAIN = 0, 1
"""`Key.nodes` of a step that drafts the trees of its batch bucket, and of a step without drafts."""

BATCHES = {"cpu": (1, 4, 16, 48, 128, 256), "gpu": (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)}
"""The steps between sizes are small on a GPU, where rows without a request cost as much as others."""

FINE_CHUNK = {"cpu": 16, "gpu": 256}  # tokens of a prompt while requests run; fewer are not faster on a GPU
SMALL_CHUNK = {"cpu": 64, "gpu": 256}
LARGE_CHUNK = {"cpu": 256, "gpu": 2048}

PROMPTS = 8
"""Maximum number of prompts in a forward, each with a small chunk. On a CPU, if the model skips padding, the forward
computes half as many tokens, because many prompts are shorter. Attention and page writes are padded in any case."""

PART = 0.9  # value of a token of an unfinished prompt: among equal rates, prefer programs that finish more prompts
FREE_TOKENS = {"cpu": 12, "gpu": 256}  # a forward of this many tokens costs about twice as much as one of one token

BLOCK_TOKENS = {"cpu": 64, "gpu": 256}
"""Maximum number of tree nodes in a step, over the batch, unless the user sets the tree's width. Larger batches draft
smaller trees, or none. On a CPU 64 tokens cost six times as much as one. On a GPU verification is nearly free until
products stop being bound by memory, at FLOP/s divided by bytes/s."""

HEAD_BLOCK_TOKENS = BLOCK_TOKENS | {"cpu": 1}
"""`BLOCK_TOKENS` for a drafter that runs a model, which always drafts and takes time itself. On a CPU it drafts for
single requests only: with a draft head, four requests with four nodes each ran at half the speed of plain decoding
(benchmarks/results/batch-2026-11-22.json, 2 cores)."""

TABLE = 512  # pages in the small page table, the only one if requests cannot hold more


class Key(NamedTuple):
    """Name of a program.

    Kinds: "step"; "prefill"; "scoring", a prefill with log-probabilities of its tokens; "propose" and "constrained",
    the two halves of a step in which a request has a grammar (`specjax.engine.grammar_steps`).
    """

    kind: str
    width: int  # batch bucket of a step; chunk width of a prefill
    table: int  # pages per request
    rows: int = 1  # prompts in a prefill
    nodes: int = TREE  # or PLAIN
    tokens: int = 0  # maximum number of tokens of a prefill over all prompts; 0: `rows` times `width`

    def __str__(self) -> str:
        steps = {"step": "step", "propose": "draft", "constrained": "step with a grammar"}
        size = f"{steps.get(self.kind, self.kind)} of {self.width} {'requests' if self.kind in steps else 'tokens'}"
        size += " without drafts" if self.nodes == PLAIN else ""
        size += f" of each of {self.rows} requests" if self.rows > 1 else ""
        size += f", {self.tokens} together," if self.tokens else ""
        return f"a {size} with {self.table} pages each"

    @property
    def size(self) -> int:
        """Number of tokens of a prefill, over all prompts."""
        return self.tokens or self.rows * self.width

    def lengths(self, left: Iterable[int]) -> list[int]:
        """Returns the number of tokens that a prefill takes from each prompt, first prompts first.

        Example: 10 tokens in all, 8 per prompt, 3 prompts: `left` [4, 20, 3, 5] gives [4, 6].
        """
        lengths, room = list[int](), self.size
        for count in islice(left, self.rows):
            if not room:
                break
            lengths.append(min(count, self.width, room))
            room -= lengths[-1]
        return lengths

    @property
    def verifies(self) -> bool:
        """True for programs that verify and emit tokens."""
        return self.kind in ("step", "constrained")

    @property
    def drafts(self) -> bool:
        return self.verifies and self.nodes != PLAIN


@dataclass(frozen=True)
class Buckets:
    """Sizes of the programs."""

    batches: tuple[int, ...]  # more requests than the last run in several batches
    chunks: tuple[int, ...]  # tokens of one prompt in a prefill: fine, small and large, without repetitions
    small: int  # chunk
    several: tuple[int, int, int] | None  # prefill of several prompts: prompts, most tokens of each, and of all
    tables: tuple[int, ...]  # pages per request
    widths: tuple[int, ...]  # of the drafter's trees
    block_tokens: int | None  # see `BLOCK_TOKENS`; None: no limit
    several_widths: bool = True  # steps choose among several tree widths; else each batch bucket has one
    free_tokens: int = FREE_TOKENS["cpu"]
    adaptive: bool = False  # `specjax.engine.draft_policy` chooses which steps draft

    @classmethod
    def build(
        cls, platform: str, speculation: Speculation, *, rows: int, request_pages: int, chunk: int | None = None,
        prefill: int | None = None, adaptive: bool = False, ragged: bool = False,
    ) -> Buckets:  # fmt: skip
        """Chooses the sizes for batches of up to `rows` requests of up to `request_pages` pages. `chunk` and `prefill`
        limit the tokens of one prompt and of all prompts; with `ragged` the model can skip padding."""
        kind = "cpu" if platform == "cpu" else "gpu"
        block_tokens = (HEAD_BLOCK_TOKENS if speculation.runs_model else BLOCK_TOKENS)[kind]
        largest = min(chunk or LARGE_CHUNK[kind], prefill or LARGE_CHUNK[kind], LARGE_CHUNK[kind])
        small = min(SMALL_CHUNK[kind], largest)
        prompts, tokens = min(PROMPTS, rows), PROMPTS * small
        if kind == "cpu" and ragged:
            tokens = min(tokens // 2, prompts * small, prefill or tokens)
        else:  # every prompt has a row of the same width
            prompts = min(prompts, (prefill or tokens) // small)
            tokens = prompts * small
        return cls(
            batches=(*(b for b in BATCHES[kind] if b < rows), rows),
            chunks=tuple(sorted({min(FINE_CHUNK[kind], small), small, largest})),
            small=small,
            several=(prompts, small, tokens) if prompts > 1 and tokens > small else None,
            tables=(request_pages,) if request_pages <= TABLE else (TABLE, request_pages),
            widths=tree_widths(speculation.drafter),
            block_tokens=None if speculation.explicit_width else block_tokens,
            # On a GPU wide trees cost as much as narrow ones, and a choice would need the host.
            several_widths=kind == "cpu",
            free_tokens=FREE_TOKENS[kind],
            adaptive=adaptive,
        )

    def batch(self, count: int) -> int:
        return next((b for b in self.batches if b >= count), self.batches[-1])

    def tables_for(self, pages: int) -> tuple[int, ...]:
        """Page-table widths for `pages` pages, ascending."""
        return tuple(t for t in self.tables if t >= pages)

    @property
    def plain_chunks(self) -> tuple[int, ...]:
        """The small and the large chunk, which every kind of prefill has."""
        return tuple(sorted({self.small, self.chunks[-1]}))

    def chunks_for(self, tokens: int) -> tuple[int, ...]:
        """Chunk widths for a prompt while no request runs, best first. The large one must be mostly used."""
        larger = tokens > self.chunks[-1] - self.small
        return self.plain_chunks[::-1] if larger else self.plain_chunks

    def most_prefilled(self, running: int, waiting: int) -> int | None:
        """Maximum number of tokens of the next prefill, which delays the step of `running` requests; None: no limit,
        because no request runs or many prompts wait, which are faster together."""
        if not running or (waiting >= PROMPTS and 2 * waiting >= running):
            return None
        return self.small if waiting > running else self.chunks[0]

    def prefill_shapes(self) -> list[tuple[int, int, int]]:
        """`Key.rows`, `Key.width` and `Key.tokens` of all prefills."""
        shapes = [(1, chunk, 0) for chunk in self.chunks]
        if self.several is not None:
            prompts, width, tokens = self.several
            shapes.append((prompts, width, 0 if tokens == prompts * width else tokens))
        return shapes

    def prefill_keys(
        self, left: list[int], pages: list[int], most: int | None, compiled: set[Key], kind: str = "prefill", *,
        pending: Collection[Key] = (),
    ) -> Iterator[Key]:  # fmt: skip
        """Programs for the next chunk of the first prompt, or of the first few prompts, best first.

        Compiled programs of at most `most` tokens come first, by the number of tokens that they compute per cost, then
        programs for one prompt. Without a limit, the best chunk for the first prompt is compiled before another one is
        used for that prompt alone, unless it is `pending`. `left`, `pages`: remaining tokens and pages of each prompt.
        """
        chunks = self.chunks_for(left[0]) if most is None else self.plain_chunks
        single = [Key(kind, chunk, table) for table in self.tables_for(pages[0]) for chunk in chunks]
        tables = {rows: self.tables_for(max(pages[:rows]))[0] for rows, _, _ in self.prefill_shapes()}
        keys = [Key(kind, width, tables[rows], rows, tokens=tokens) for rows, width, tokens in self.prefill_shapes()]
        ready = sorted((key for key in keys if key in compiled), key=lambda key: key.size)
        usable = [key for key in ready if most is None or key.size <= most] or ready[:1]

        def rate(key: Key) -> float:
            taken = zip(key.lengths(left), left, strict=False)
            computed = sum(tokens if tokens == whole else PART * tokens for tokens, whole in taken)
            return computed / (key.size + self.free_tokens)

        if most is None and single[0] not in compiled and single[0] not in pending:
            usable = [key for key in usable if key.rows > 1 and rate(key) > rate(single[0])]
        yield from sorted(usable, key=rate, reverse=True)
        yield from single

    # Drafting

    def tree_widths(self, batch: int) -> tuple[int, ...]:
        """Tree widths of a batch bucket's steps; a single request has all of the drafter's widths.

        With `several_widths` these are the drafter's widths that fit `block_tokens`, (1,) if none does. Otherwise it is
        the largest width that fits, for which the drafter makes a smaller tree (`Speculation.within`).
        """
        most, widest = self.block_tokens, self.widths[-1]
        if not self.several_widths:
            widest = widest if most is None or batch == 1 else max(min(widest, most // batch), 1)
            return (widest,)
        return tuple(w for w in self.widths if most is None or 1 in (w, batch) or w * batch <= most) or (1,)

    def drafts(self, batch: int) -> bool:
        """True if steps of this batch bucket may draft."""
        return self.tree_widths(batch) != (1,)

    def drafts_alike(self, batch: int, other: int) -> bool:
        """True if requests lose nothing in the other batch bucket. Where each bucket has its own width, a smaller tree
        is not worth a compilation, but a step without drafts is a loss."""
        if self.several_widths:
            return self.tree_widths(batch) == self.tree_widths(other)
        return self.drafts(batch) == self.drafts(other)

    @property
    def most_drafting(self) -> int:
        """The largest batch that drafts."""
        return max(filter(self.drafts, self.batches), default=1)

    def choices(self, batch: int) -> tuple[int, ...]:
        """`Key.nodes` of a batch bucket's steps."""
        return self.constrained_choices(batch) if self.adaptive else (TREE,)

    def constrained_choices(self, batch: int) -> tuple[int, ...]:
        """`choices` for steps with grammars."""
        return (TREE, PLAIN) if self.drafts(batch) else (PLAIN,)

    def step_widths(self, key: Key) -> tuple[int, ...]:
        """Tree widths of a step."""
        return (1,) if key.nodes == PLAIN else self.tree_widths(key.width)

    # Programs

    def all_keys(self) -> list[Key]:
        """Every program of the engine without grammars, scoring and wide page tables, in the order of compilation:
        `ready_keys`; the other step of a single request; the next batch and the other prefills; the other batches; the
        second choices of batches. With many batch sizes the largest is next, which all requests can share."""
        single, *others = self.batches
        others = others if self.several_widths else others[-1:] + others[:-1]
        prefill, *prefills = [
            Key("prefill", width, self.tables[0], rows, tokens=tokens)
            for rows, width, tokens in sorted(self.prefill_shapes(), key=lambda shape: shape[:2] != (1, self.small))
        ]

        def steps(batches: list[int], choices: slice) -> list[Key]:
            return [Key("step", b, self.tables[0], nodes=nodes) for b in batches for nodes in self.choices(b)[choices]]

        first, second = slice(1), slice(1, None)
        return [
            prefill, *steps([single], first), *steps([single], second), *steps(others[:1], first), *prefills,
            *steps(others[1:], first), *steps(others, second),
        ]  # fmt: skip

    def ready_keys(self) -> list[Key]:
        """Programs that an engine needs before its first request: the small prefill, and a step that can run any
        request. A step with drafts can also run requests that do not draft."""
        return self.all_keys()[:2]

    def single_request_keys(self) -> list[Key]:
        """Programs that one request at a time needs: the small prefill and its steps."""
        needed = {("step", self.batches[0]), ("prefill", self.small)}
        return [key for key in self.all_keys() if key[:2] in needed and key.rows == 1]

    def first_keys(self, sequences: Iterable[Sequence], page_size: int) -> list[Key]:
        """Programs that these sequences need if no others run."""
        sequences, keys, table = list(sequences), dict[Key, None](), self.tables[0]
        for sequence in sequences:
            table = max(table, self.tables_for(-(-sequence.most_tokens // page_size))[0])
            left = len(sequence.context)
            while left > 0:
                width = self.chunks_for(left)[0]
                keys[Key("prefill", width, table)] = None
                left -= width
        for rows, width, tokens in self.prefill_shapes():
            if rows > 1 and len(sequences) >= (-(-tokens // width) if tokens else rows):
                keys[Key("prefill", width, table, rows, tokens=tokens)] = None
        most = min(len(sequences), self.batches[-1])
        sizes = [(batch, nodes) for batch in self.shrinking(most) for nodes in self.choices(batch)]
        return [*keys, *(Key("step", batch, table, nodes=nodes) for batch, nodes in sizes)]

    def shrinking(self, count: int) -> list[int]:
        """Batch buckets of `count` requests as they finish: one for each way of drafting (`drafts_alike`), and all of
        them where the cost of a step follows its nodes and nothing limits these."""
        batches = list[int]()
        every = self.block_tokens is None and self.several_widths and self.widths[-1] > 1
        while count:
            batch = self.batch(count)
            batches.append(batch)
            smaller = (b for b in self.batches if b < batch)
            count = max((b for b in smaller if every or not self.drafts_alike(b, batch)), default=0)
        return batches

    def step_keys(
        self, count: int, pages: int, compiled: set[Key], pending: set[Key], nodes: int = TREE, kind: str = "step"
    ) -> Iterator[Key]:
        """Programs for `count` requests of up to `pages` pages, best first.

        1. The smallest compiled batch that fits and drafts as much (`drafts_alike`): an idle row costs less than a
           compilation, and the last requests of a wide run should draft.
        2. While that batch compiles in the background, the largest compiled one, which runs the requests in parts.
        3. Programs that must be compiled: batches that fit, then smaller ones. On a GPU the first is one for twice as
           many requests if there are several, because more requests would each need a compilation.
        """
        count = min(count, self.batches[-1])
        best = self.batch(count)
        roomy = best if self.several_widths or count == 1 else self.batch(2 * count)
        for table in self.tables_for(pages):
            choices = self.constrained_choices if kind == "constrained" else self.choices
            keys = [Key(kind, batch, table, nodes=nodes) for batch in self.batches if nodes in choices(batch)]
            larger = [key for key in keys if key.width >= count]
            smaller = [key for key in reversed(keys) if key.width < count]
            fitting = [key for key in larger if nodes == PLAIN or self.drafts_alike(best, key.width)]
            yield from (key for key in fitting if key in compiled)
            if fitting and fitting[0] in pending:
                yield from (key for key in smaller if key in compiled)
            else:
                yield from (key for key in fitting if key.width == roomy)
            yield from (*fitting, *larger, *smaller)
