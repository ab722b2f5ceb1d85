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

SMALL_CHUNK = {"cpu": 64, "gpu": 256}
CHUNK = {"cpu": 512, "gpu": 2048}  # on a CPU a forward's cost grows from 64 on: wider chunks only save overhead

PROMPTS = 8  # small chunks that one forward takes, and on a CPU twice as many of half the width
RAGGED = (4, 2)
"""Small chunks in as many tokens as a forward of several prompts computes on a CPU, if the model can leave out their
padding: of up to twice as many prompts, since many are shorter. Attention and what is kept in pages are padded still,
so more prompts would cost those that fill a chunk."""

MIDDLE_CHUNK = {"cpu": 128}
"""For long prompts where the wide chunk takes too long (`specjax.engine.pace.WAIT`); the overhead of the small one is
larger."""

FINE_CHUNKS = {"cpu": (16, 8)}  # for prompts beside running requests; on a GPU a small chunk costs what these would
PART = 0.9  # what a token of a prompt counts that goes on: of programs that save as much, the one that ends more
FREE_TOKENS = {"cpu": 12, "gpu": 256}  # a forward of as many costs about twice what a forward of one token costs
CONTEXT = {"cpu": 1024, "gpu": 16384}  # to attend to so many tokens costs what the rest of a token's forward does
PACE = 2
"""Beside running requests, a prefill costs at most this many of their steps, or as many for each prompt that waits for
one of them: the streams go on, and where many wait for few, the few wait for the many. Where `PROMPTS` wait, and half
as many as run, nothing limits it: together they take much less time than one after another. `specjax.engine.pace` says
what fits."""

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
    chunks: tuple[int, ...]  # of one prompt: one or two
    packs: tuple[tuple[int, int], ...]  # other prefills that are worth a program: prompts, tokens of each
    ragged: tuple[tuple[int, int, int], ...]  # and those without padding: prompts, most tokens of each and of all
    tables: tuple[int, ...]
    widths: tuple[int, ...]  # of the drafter's trees
    block_tokens: int | None  # None: no limit
    several_widths: bool = True  # whether a step may choose among several tree widths; else each batch has its own
    free_tokens: int = FREE_TOKENS["cpu"]
    context: int = CONTEXT["cpu"]
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
        largest = min(chunk or CHUNK[kind], prefill or CHUNK[kind], CHUNK[kind])
        small = min(SMALL_CHUNK[kind], largest)
        packs = [(1, fine) for fine in FINE_CHUNKS.get(kind, ()) if fine < small]
        packs += [(1, middle)] if small < (middle := MIDDLE_CHUNK.get(kind, 0)) < largest else []
        if (prompts := min(PROMPTS, rows, (prefill or PROMPTS * small) // small)) > 1:
            packs.append((prompts, small))
        if kind == "cpu" and prompts == PROMPTS and small == SMALL_CHUNK[kind]:
            packs.append((2, small))  # beside many running requests, whose steps give it the time
            if rows >= 2 * PROMPTS:
                packs.append((2 * PROMPTS, small // 2))  # of many short prompts the rest after a common beginning
        together = [(prompts * small, min(rows, 2 * prompts)) for prompts in RAGGED] if kind == "cpu" and ragged else []
        together = [(min(tokens, prefill or tokens), prompts) for tokens, prompts in together]
        together = [(n, small, tokens) for tokens, n in together if n > 1 and small < tokens < n * small]
        return cls(
            batches=(*(b for b in BATCHES[kind] if b < rows), rows),
            chunks=tuple(sorted({small, largest})),
            packs=tuple(packs),
            ragged=tuple(dict.fromkeys(together)),
            tables=(request_pages,) if request_pages <= TABLE else (TABLE, request_pages),
            widths=tree_widths(drafter),
            block_tokens=None if drafter.explicit_width else most,
            # On a GPU a wide tree costs what a narrow one costs, and choosing would ask the host.
            several_widths=kind == "cpu",
            free_tokens=FREE_TOKENS[kind],
            context=CONTEXT[kind],
            adaptive=adaptive,
        )

    def batch(self, count: int) -> int:
        return next((b for b in self.batches if b >= count), self.batches[-1])

    def tables_for(self, pages: int) -> tuple[int, ...]:
        """Page-table widths that hold `pages` pages, the smallest first."""
        return tuple(t for t in self.tables if t >= pages)

    def chunks_for(self, tokens: int) -> tuple[int, ...]:
        """Chunk widths for `tokens` remaining ones, the best first: the large one only if most of it is used."""
        return self.chunks[::-1] if tokens > self.chunks[-1] - self.chunks[0] else self.chunks

    def steps_beside(self, running: int, waiting: int) -> float | None:
        """How many steps of `running` requests a prefill may take while `waiting` prompts wait; see `PACE`. None: any
        number."""
        if not running or (waiting >= PROMPTS and 2 * waiting >= running):
            return None
        return PACE * max(1.0, waiting / running)

    def prefill_shapes(self) -> list[tuple[int, int, int]]:
        """`Key.rows`, `Key.width` and `Key.tokens` of all programs that several prompts can share, and of those for
        one. Prefills without padding take the place of others for several prompts."""
        padded = [(rows, width, 0) for rows, width in self.packs if rows == 1 or not self.ragged]
        return [*((1, chunk, 0) for chunk in self.chunks), *padded, *self.ragged]

    def step_cost(self, batch: int) -> int:
        """Of a step of a batch bucket, in units of one token's forward."""
        return self.free_tokens + batch * (1 if self.adaptive else self.tree_widths(batch)[-1])

    def prefill_cost(self, tokens: int, context: int = 0) -> float:
        """Of a prefill after `context` committed tokens, in the same unit."""
        return tokens * (1 + context / self.context) + self.free_tokens

    def prefill_keys(
        self,
        left: list[int],
        pages: list[int],
        most: int | None,
        compiled: set[Key],
        kind: str = "prefill",
        *,
        running: int = 0,
        pending: Collection[Key] = (),
    ) -> Iterator[Key]:
        """Programs for the next chunk of the first of some prompts, or of the first few, the best first.

        1. Compiled ones of at most `most` tokens (None: any number; the smallest where none is so small), those first
           that save the most: what the same tokens would cost in programs of one prompt, over their own cost, each
           with the step of the running requests that follows it. Where there is no limit and the chunk that suits the
           first prompt is neither compiled nor compiling in the background, only those for several prompts.
        2. Those for one prompt alone, which are compiled where they must be.

        Args:
            left: tokens that the prompts still need, in the order of their turn.
            pages: that they hold.
            kind: of the programs.
            running: requests, a step of which follows.
            pending: programs that are being compiled in the background.
        """
        after = self.step_cost(self.batch(min(running, self.batches[-1]))) if running else 0
        chunks = self.chunks_for(left[0]) if most is None else self.chunks
        single = [Key(kind, chunk, table) for table in self.tables_for(pages[0]) for chunk in chunks]
        shapes = self.prefill_shapes()
        tables = {rows: self.tables_for(max(pages[:rows]))[0] for rows, _, _ in shapes}
        keys = [Key(kind, width, tables[rows], rows, tokens=tokens) for rows, width, tokens in shapes]
        ready = sorted((key for key in keys if key in compiled), key=lambda key: key.size)
        found = [key for key in ready if most is None or key.size <= most] or ready[:1]
        widths = [key.width for key in found if key.rows == 1] or [single[0].width]

        def cost(tokens: int) -> int:
            return tokens + self.free_tokens + after

        def alone(tokens: int) -> float:
            """What a token of a prompt costs that needs so many."""
            return min(cost(width) / max(1, min(tokens, width)) for width in widths)

        each = [alone(tokens) for tokens in left[: max(key.rows for key in found)]] if found else []

        def saving(key: Key) -> float:
            taken = zip(key.lengths(left), left, each, strict=False)
            otherwise = sum(price * (tokens if tokens == whole else PART * tokens) for tokens, whole, price in taken)
            return otherwise / cost(key.size)

        if most is None and single[0] not in compiled and single[0] not in pending:
            found = [key for key in found if key.rows > 1 and saving(key) > 1]
        yield from sorted(found, key=saving, reverse=True)
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
        sizes = [("prefill", 1, chunk, 0, 0) for chunk in self.chunks]
        sizes += [("step", 1, batch, nodes, 0) for batch in batches for nodes in self.choices(batch)]
        packs = self.prefill_shapes()[len(self.chunks) :]
        sizes += [("prefill", rows, width, 0, tokens) for rows, width, tokens in packs]
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
        return [Key("scoring", chunk, table) for chunk in self.chunks for table in self.tables]

    def single_request_keys(self) -> list[Key]:
        """Programs that one request at a time cannot do without: the small prefill, and its steps."""
        needed = {("step", self.batches[0]), ("prefill", self.chunks[0])}
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
