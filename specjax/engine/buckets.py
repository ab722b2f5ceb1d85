"""The shapes that the engine compiles for and rounds up to, and the programs of these shapes that requests need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from specjax.drafters.base import Drafter
from specjax.engine.keys import PLAIN, TREE, Key
from specjax.engine.sequence import Sequence
from specjax.step import tree_widths

BATCHES = {"cpu": (1, 4, 16, 48, 128, 256), "gpu": (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)}
"""On a GPU few batches are rounded up by much: rows without a request cost what the others cost."""

FINE_CHUNK = {"cpu": 16, "gpu": 256}  # tokens of a prompt beside running requests; on a GPU fewer cost as much
SMALL_CHUNK = {"cpu": 64, "gpu": 256}
LARGE_CHUNK = {"cpu": 256, "gpu": 2048}

PROMPTS = 8
"""Most prompts that one forward takes, each with a small chunk. On a CPU, if the model can leave out their padding, the
forward computes half as many tokens, since many prompts are shorter; attention and the page writes are padded still."""

PART = 0.9  # what a token of a prompt counts that goes on: of programs with equal rates, the one that ends more
FREE_TOKENS = {"cpu": 12, "gpu": 256}  # a forward of as many costs about twice what a forward of one token costs

BLOCK_TOKENS = {"cpu": 64, "gpu": 256}
"""Most tree nodes that a step checks over its whole batch, unless the user has chosen the trees' width: larger batches
draft less, and the largest not at all. On a CPU checking 64 tokens costs six times as much as one; on a GPU
verification is nearly free until products stop being bound by memory, at the device's products a second over its bytes
a second."""

HEAD_BLOCK_TOKENS = BLOCK_TOKENS | {"cpu": 1}
"""The same limit for a drafter that runs a model. It always proposes something and takes time itself, so on a CPU it
drafts for one request alone: with a draft head, four at once had half the speed without drafts with four nodes each
(benchmarks/results/batch-2026-11-22.json, 2 cores)."""

TABLE = 512  # pages in the small page table; a request that may hold no more needs no other


@dataclass(frozen=True)
class Buckets:
    batches: tuple[int, ...]  # more requests than the last are served in parts
    chunks: tuple[int, ...]  # tokens of one prompt in a prefill: fine, small and large, without repetitions
    small: int  # of `chunks`
    several: tuple[int, int, int] | None  # prefill of several prompts: prompts, most tokens of each, and of all
    tables: tuple[int, ...]
    widths: tuple[int, ...]  # of the drafter's trees
    block_tokens: int | None  # None: no limit
    several_widths: bool = True  # whether a step may choose among several tree widths; else each batch has its own
    free_tokens: int = FREE_TOKENS["cpu"]
    adaptive: bool = False  # whether steps with and without drafts are chosen between (`specjax.engine.draft_policy`)

    @classmethod
    def build(
        cls,
        platform: str,
        drafter: Drafter,
        *,
        rows: int,
        request_pages: int,
        chunk: int | None = None,
        prefill: int | None = None,
        adaptive: bool = False,
        ragged: bool = False,
    ) -> Buckets:
        """For batches of up to `rows` requests that may hold `request_pages` pages. A width set explicitly is never
        reduced. `chunk`, `prefill`: the most tokens of a prompt and of all prompts in one forward. `ragged`: whether
        the model can leave out the padding of prompts of different lengths."""
        kind = "cpu" if platform == "cpu" else "gpu"
        most = (HEAD_BLOCK_TOKENS if drafter.runs_model else BLOCK_TOKENS)[kind]
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
            widths=tree_widths(drafter),
            block_tokens=None if drafter.explicit_width else most,
            # On a GPU a wide tree costs what a narrow one costs, and choosing would ask the host.
            several_widths=kind == "cpu",
            free_tokens=FREE_TOKENS[kind],
            adaptive=adaptive,
        )

    def batch(self, count: int) -> int:
        return next((b for b in self.batches if b >= count), self.batches[-1])

    def tables_for(self, pages: int) -> tuple[int, ...]:
        """Page-table widths that hold `pages` pages, the smallest first."""
        return tuple(t for t in self.tables if t >= pages)

    @property
    def plain_chunks(self) -> tuple[int, ...]:
        """Chunk widths that every kind of prefill has: small and large."""
        return tuple(sorted({self.small, self.chunks[-1]}))

    def chunks_for(self, tokens: int) -> tuple[int, ...]:
        """Chunk widths for `tokens` remaining ones while no request runs, the best first: the large one only if most of
        it is used."""
        larger = tokens > self.chunks[-1] - self.small
        return self.plain_chunks[::-1] if larger else self.plain_chunks

    def most_prefilled(self, running: int, waiting: int) -> int | None:
        """Most tokens of a prefill beside running requests, whose next step it delays, while `waiting` prompts wait.
        None: any number, since none runs, or so many wait that they take much less time together."""
        if not running or (waiting >= PROMPTS and 2 * waiting >= running):
            return None
        return self.small if waiting > running else self.chunks[0]

    def prefill_shapes(self) -> list[tuple[int, int, int]]:
        """`Key.rows`, `Key.width` and `Key.tokens` of all prefills. `tokens` is 0 where each prompt has a whole row."""
        shapes = [(1, chunk, 0) for chunk in self.chunks]
        if self.several is not None:
            prompts, width, tokens = self.several
            shapes.append((prompts, width, 0 if tokens == prompts * width else tokens))
        return shapes

    def prefill_keys(
        self,
        left: list[int],
        pages: list[int],
        most: int | None,
        compiled: set[Key],
        kind: str = "prefill",
        *,
        pending: Collection[Key] = (),
    ) -> Iterator[Key]:
        """Programs for the next chunk of the first of some prompts, or of the first few, the best first: the compiled
        ones of at most `most` tokens, first the one that computes the most tokens for its cost, then those for one
        prompt, which are compiled where they must be.

        Where there is no limit, and the chunk that suits the first prompt is neither compiled nor compiling in the
        background, it is compiled before another one is used for that prompt alone.

        Args:
            left: tokens that the prompts still need, in the order of their turn.
            pages: that they hold.
            most: see `most_prefilled`.
            kind: of the programs.
            pending: programs that are being compiled in the background.
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
        """The tree widths of a batch's steps, of at most `block_tokens` nodes over the batch; one request alone has all
        that the drafter has. With `several_widths` they are the drafter's own that fit, (1,) if none does; else there
        is one, as large as fits, of which the drafter makes a smaller tree (`Drafter.within`)."""
        most, widest = self.block_tokens, self.widths[-1]
        if not self.several_widths:
            widest = widest if most is None or batch == 1 else max(min(widest, most // batch), 1)
            return (widest,)
        return tuple(w for w in self.widths if most is None or 1 in (w, batch) or w * batch <= most) or (1,)

    def drafts(self, batch: int) -> bool:
        """Whether steps of this batch bucket may draft."""
        return self.tree_widths(batch) != (1,)

    def drafts_alike(self, batch: int, other: int) -> bool:
        """Whether requests lose nothing by running in the other batch bucket. With a width of its own for each batch,
        a smaller tree is no loss that would be worth a compiler; none at all is."""
        if self.several_widths:
            return self.tree_widths(batch) == self.tree_widths(other)
        return self.drafts(batch) == self.drafts(other)

    @property
    def most_drafting(self) -> int:
        """The most requests that still draft when they run together."""
        return max(filter(self.drafts, self.batches), default=1)

    @property
    def most_whole(self) -> int:
        """The most requests whose trees are as wide as those of one."""
        return max(b for b in self.batches if self.tree_widths(b)[-1] == self.widths[-1] or b == self.batches[0])

    def choices(self, batch: int) -> tuple[int, ...]:
        """`Key.nodes` of the steps of a batch bucket."""
        if not self.adaptive:
            return (TREE,)
        return (TREE, PLAIN) if self.drafts(batch) else (PLAIN,)

    # Programs

    def all_keys(self) -> list[Key]:
        """Every program that the engine can need, those for a single request first. With many batches the largest is
        next: all requests can share it while the others are compiled."""
        first, *others = self.batches
        batches = self.batches if self.several_widths or not others else (first, others.pop(), *others)
        prefills = sorted(self.prefill_shapes(), key=lambda shape: shape[:2] != (1, self.small))
        steps = [("step", 1, batch, nodes, 0) for batch in batches for nodes in self.choices(batch)]
        first, *rest = [("prefill", rows, width, 0, tokens) for rows, width, tokens in prefills]
        sizes = [first, *steps, *rest]
        return [
            Key(kind, width, table, rows, nodes, tokens)
            for kind, rows, width, nodes, tokens in sizes
            for table in self.tables
        ]

    def constrained_keys(self) -> list[Key]:
        """Programs for requests that follow a grammar, which are compiled when there is one."""
        sizes = [(batch, nodes) for batch in self.batches for nodes in self.constrained_choices(batch)]
        steps = [Key("constrained", batch, table, nodes=nodes) for batch, nodes in sizes for table in self.tables]
        return [*steps, *(key._replace(kind="propose") for key in steps if key.drafts)]

    def constrained_choices(self, batch: int) -> tuple[int, ...]:
        """As `choices`, for steps in which some follow a grammar."""
        return (TREE, PLAIN) if self.drafts(batch) else (PLAIN,)

    def step_widths(self, key: Key) -> tuple[int, ...]:
        """The tree widths of a step."""
        return (1,) if key.nodes == PLAIN else self.tree_widths(key.width)

    def scoring_keys(self) -> list[Key]:
        """Programs for prompts whose log-probabilities are wanted, which are compiled when the first such prompt
        comes."""
        return [Key("scoring", width, table) for width in self.plain_chunks for table in self.tables]

    def single_request_keys(self) -> list[Key]:
        """Programs that one request at a time cannot do without: the small prefill, and its steps."""
        needed = {("step", self.batches[0]), ("prefill", self.small)}
        return [key for key in self.all_keys() if key[:2] in needed and key.rows == 1]

    def first_keys(self, sequences: Iterable[Sequence], page_size: int) -> list[Key]:
        """Programs that these sequences will certainly need, if they are all that runs."""
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
        """Batch buckets of a run of `count` requests as it ends: one for each way of drafting (`drafts_alike`) on the
        way down, and all of them where a step's cost follows its nodes and nothing limits those."""
        needed, each = [], self.block_tokens is None and self.several_widths and self.widths[-1] > 1
        while count:
            batch = self.batch(count)
            needed.append(batch)
            smaller = (b for b in self.batches if b < batch)
            count = max((b for b in smaller if each or not self.drafts_alike(b, batch)), default=0)
        return needed

    def step_keys(
        self,
        count: int,
        pages: int,
        compiled: set[Key],
        pending: set[Key],
        nodes: int = TREE,
        kind: str = "step",
    ) -> Iterator[Key]:
        """Programs that can serve `count` requests of up to `pages` pages, the best first; a batch of them if that is
        more than the largest.

        1. The smallest compiled batch that fits and does not draft less (`drafts_alike`): an idle row costs less than a
           compiler, and the last requests of a wide run are to speculate.
        2. While that batch compiles in the background, the largest compiled one, which serves them in parts.
        3. What must be compiled first: batches that fit, then smaller ones. Where there are many batches, the first is
           one for twice as many requests, if they are several: more are about to come, and each would need a compiler.

        `pending` programs are being compiled in the background. `nodes`, `kind`: as in the keys.
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
