"""Which program runs next, and for which requests: `plan`, a pure function of values.

    view    what the scheduler knows of the prompts and of the running requests
    ready   the programs that are compiled, or on their way
    policy  how many nodes the trees of a step have

A `Key` names a program by what it computes: kind, rows, page table, and N, the nodes of its trees; plain decoding is
N = 1. Rows, chunks, page tables and nodes are rounded up to a few sizes (`Buckets`), and one rule chooses among them:
the smallest ready program that fits, else the largest ready one, which runs the requests in parts, else the program
that must be compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from specjax.drafters.base import Speculation
from specjax.engine.draft_policy import NO_ACCEPTANCE, Choice, DraftPolicy, Own

BATCHES = {"cpu": (1, 4, 16, 48, 128, 256), "gpu": (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)}
"""The steps between sizes are small on a GPU, where rows without a request cost as much as others."""

FINE_CHUNK = {"cpu": 16, "gpu": 256}  # tokens of a prompt while requests run; fewer are not faster on a GPU
SMALL_CHUNK = {"cpu": 64, "gpu": 256}
LARGE_CHUNK = {"cpu": 256, "gpu": 2048}

PROMPTS = 8
"""Maximum number of prompts in a forward, each with a small chunk. On a CPU, if the model skips padding, the forward
computes half as many tokens, because many prompts are shorter. Attention and page writes are padded in any case."""

PART = 0.9  # value of a token of an unfinished prompt: among equal rates, prefer programs that finish more prompts
SMALL_SIZES = 2, 3, 4  # on a CPU, where each node costs time, the policy also chooses among these N
READY_NODES = {"cpu": 6, "gpu": 512}  # maximum N of the step that a start waits for
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

STEPS = {"step": "step", "propose": "draft", "constrained": "step with a grammar"}
"""Kinds of programs that run steps, and their names."""


class Key(NamedTuple):
    """Name of a program.

    Kinds: "step"; "prefill"; "scoring", a prefill with log-probabilities of its tokens; "propose" and "constrained",
    the two halves of a step in which a request has a grammar (`specjax.engine.grammar_steps`).
    """

    kind: str
    width: int  # batch bucket of a step; chunk width of a prefill
    table: int  # pages per request
    rows: int = 1  # prompts in a prefill
    nodes: int = 1  # N, of a step's trees
    tokens: int = 0  # maximum number of tokens of a prefill over all prompts; 0: `rows` times `width`

    def __str__(self) -> str:
        unit = "requests" if self.kind in STEPS else "tokens"
        size = f"{STEPS.get(self.kind, self.kind)} of {self.width} {unit}"
        size += f" with {self.nodes} nodes each" if self.nodes > 1 else ""
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
    def halves(self) -> tuple[Key, ...]:
        """The programs that a batch of this key runs."""
        return (self.proposal, self) if self.kind == "constrained" and self.nodes > 1 else (self,)

    @property
    def proposal(self) -> Key:
        """The first half of a step with a grammar."""
        return self._replace(kind="propose")


@dataclass(frozen=True)
class Buckets:
    """Sizes of the programs."""

    batches: tuple[int, ...]  # more requests than the last run in several batches
    chunks: tuple[int, ...]  # tokens of one prompt in a prefill: fine, small and large, without repetitions
    small: int  # chunk
    several: tuple[int, int, int] | None  # prefill of several prompts: prompts, most tokens of each, and of all
    tables: tuple[int, ...]  # pages per request
    trees: Mapping[int, int]  # batch bucket -> largest N of its trees; 1: its steps never draft
    depths: Mapping[int, int]  # N -> depth of the trees
    widths: Mapping[int, int]  # N -> nodes of the trees: N, or fewer of a drafter without as many
    nested: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # largest N -> N that the policy chooses among
    ready_nodes: int = READY_NODES["gpu"]
    ahead: bool = False  # a batch that must be compiled has room for twice as many requests
    free_tokens: int = FREE_TOKENS["cpu"]
    ragged: bool = False  # a prefill takes the time of its tokens, not of its padded size

    @classmethod
    def build(
        cls, platform: str, speculation: Speculation, *, rows: int, request_pages: int, chunk: int | None = None,
        prefill: int | None = None, adaptive: bool = False, ragged: bool = False,
    ) -> Buckets:  # fmt: skip
        """Chooses the sizes for batches of up to `rows` requests of up to `request_pages` pages. `chunk` and `prefill`
        limit the tokens of one prompt and of all prompts; with `ragged` the model can skip padding."""
        kind = "cpu" if platform == "cpu" else "gpu"
        largest = min(chunk or LARGE_CHUNK[kind], prefill or LARGE_CHUNK[kind], LARGE_CHUNK[kind])
        small = min(SMALL_CHUNK[kind], largest)
        prompts, tokens = min(PROMPTS, rows), PROMPTS * small
        if kind == "cpu" and ragged:
            tokens = min(tokens // 2, prompts * small, prefill or tokens)
        else:  # every prompt has a row of the same width
            prompts = min(prompts, (prefill or tokens) // small)
            tokens = prompts * small
        batches = (*(b for b in BATCHES[kind] if b < rows), rows)
        most = (HEAD_BLOCK_TOKENS if speculation.runs_model else BLOCK_TOKENS)[kind]
        unlimited, width, lookup = speculation.explicit_width, speculation.largest_size, speculation.lookup

        def largest_tree(batch: int) -> int:
            most_found = min(lookup, BLOCK_TOKENS[kind] // batch)
            return width if unlimited or batch == 1 else max(min(width, most // batch), most_found, 1)

        trees = {batch: largest_tree(batch) for batch in batches}
        nested = dict[int, tuple[int, ...]]()
        small_sizes = SMALL_SIZES if lookup == 1 or speculation.runs_model else ()  # n-grams propose all or nothing
        for n in trees.values():
            if adaptive and n > 1:
                smaller = small_sizes if kind == "cpu" else (-(-n // 4), -(-n // 2))
                nested[n] = tuple(sorted({1, n, *(size for size in smaller if 1 < size < n and not unlimited)}))
        drafters = {n: speculation.within(n) for n in {1, *trees.values(), *chain(*nested.values())}}
        return cls(
            batches=batches,
            chunks=tuple(sorted({min(FINE_CHUNK[kind], small), small, largest})),
            small=small,
            several=(prompts, small, tokens) if prompts > 1 and tokens > small else None,
            tables=(request_pages,) if request_pages <= TABLE else (TABLE, request_pages),
            trees=trees,
            depths={n: min(drafter.depth, n - 1) for n, drafter in drafters.items()},
            widths={n: min(drafter.width, n) for n, drafter in drafters.items()},
            nested=nested,
            ready_nodes=READY_NODES[kind],
            ahead=kind == "gpu",
            free_tokens=FREE_TOKENS[kind],
            ragged=kind == "cpu" and ragged,
        )

    def batch(self, count: int) -> int:
        """The smallest batch bucket for `count` requests; the largest one if none fits."""
        return next((b for b in self.batches if b >= count), self.batches[-1])

    def tables_for(self, pages: int) -> tuple[int, ...]:
        """Page-table widths for `pages` pages, ascending."""
        return tuple(t for t in self.tables if t >= pages)

    def sizes(self, batch: int) -> tuple[int, ...]:
        """N of the programs of a batch bucket's steps, ascending."""
        return self.nested.get(self.trees[batch], (self.trees[batch],))

    def first_sizes(self, batch: int) -> tuple[int, ...]:
        """N of those programs of a batch bucket that compile before they are asked for: its usual trees, and 1."""
        sizes = self.sizes(batch)
        return tuple(dict.fromkeys((self.usual(batch), *sizes[:1])))

    def usual(self, batch: int) -> int:
        """N of a batch bucket's trees before any measurement."""
        return max((n for n in self.sizes(batch) if n <= self.ready_nodes), default=self.trees[batch])

    def alike(self, batch: int, nodes: int) -> int | None:
        """The N of a batch bucket's steps that is next to `nodes`: 1 for 1, else one that drafts; None: there is
        none."""
        alike = [n for n in self.sizes(batch) if (n > 1) == (nodes > 1)]
        return min(alike, key=lambda n: abs(n - nodes), default=None)

    def drafts(self, batch: int) -> bool:
        """True if steps of this batch bucket may draft."""
        return self.trees[batch] > 1

    @property
    def chooses(self) -> bool:
        """True if `DraftPolicy` chooses N; else each step has its bucket's trees."""
        return bool(self.nested)

    @property
    def most_drafting(self) -> int:
        """The largest batch that drafts."""
        return max(filter(self.drafts, self.batches), default=1)

    # Prefills

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

    def prefills(self, kind: str, table: int) -> list[Key]:
        """All prefills with a page table, by size."""
        keys = [Key(kind, chunk, table) for chunk in self.chunks]
        if self.several is not None:
            rows, width, tokens = self.several
            keys.append(Key(kind, width, table, rows, tokens=0 if tokens == rows * width else tokens))
        return sorted(keys, key=lambda key: key.size)

    # Programs of a start

    def all_keys(self) -> list[Key]:
        """Every program of the engine without grammars, scoring and wide page tables, in the order of compilation:
        `ready_keys`; the other steps of a single request; the next batch and the other prefills; the other batches;
        the second choices of batches. Where a batch has room for later requests (`ahead`) the largest is next."""
        single, *others = self.batches
        others = others[-1:] + others[:-1] if self.ahead else others
        prefills = self.prefills("prefill", self.tables[0])
        prefills.sort(key=lambda key: (key[:2] != ("prefill", self.small) or key.rows > 1, key.rows, key.width))

        def steps(batches: list[int], choices: slice) -> list[Key]:
            return [self.step(b, nodes) for b in batches for nodes in self.first_sizes(b)[choices]]

        first, second = slice(1), slice(1, None)
        return [
            *prefills[:1], *steps([single], first), *steps([single], second), *steps(others[:1], first), *prefills[1:],
            *steps(others[1:], first), *steps(others, second),
        ]  # fmt: skip

    def step(self, batch: int, nodes: int | None = None) -> Key:
        """The step of a batch bucket with the small page table, by default with its usual trees."""
        return Key("step", batch, self.tables[0], nodes=self.usual(batch) if nodes is None else nodes)

    def all_steps(self) -> list[Key]:
        """The steps of every batch bucket and N with the small page table."""
        return [self.step(batch, nodes) for batch in self.batches for nodes in self.sizes(batch)]

    def ready_keys(self) -> list[Key]:
        """Programs that an engine needs before its first request: the small prefill, and a step that can run any
        request. A step with drafts can also run requests that do not draft."""
        return self.all_keys()[:2]

    def first_keys(self, requests: int = 1, longest: int = 1) -> list[Key]:
        """Programs that so many requests need first, if none has more than `longest` tokens in its context: prefills
        of the small and, if it pays, of the large chunk, and the steps of their batch bucket."""
        chunks, batch = {self.small, self.chunks_for(longest)[0]}, self.batch(requests)

        def needed(key: Key) -> bool:
            if key.kind == "step":
                return key.width == batch
            return key.width in chunks and (key.rows == 1 or key.size <= requests * key.width)

        return list(filter(needed, self.all_keys()))


# Values


class Prompt(NamedTuple):
    """A request whose context is not all dispatched."""

    id: str
    left: int  # tokens that its next prefills may take together
    pages: int
    scores: bool = False  # its next prefill gives log-probabilities of the prompt


class Running(NamedTuple):
    """A request that takes part in steps."""

    id: str
    pages: int
    drafts: bool = True  # False: its steps never draft
    acceptance: Own = NO_ACCEPTANCE  # of its first drafts; see `DraftPolicy`
    grammar: bool = False
    unread: bool = False  # a step of it is in flight, or its grammar waits for its turn
    forced: tuple[int, ...] = ()  # tokens that its grammar forces next


class View(NamedTuple):
    """What the scheduler knows."""

    prompts: List[Prompt] = ()  # in the order of their prefills
    running: List[Running] = ()  # oldest first
    prefilling: int = 0  # tokens of the largest prefill in flight


class Ready(NamedTuple):
    """State of the programs. A program that cannot be compiled, whatever its size, counts as compiled, and raises its
    error when it is launched."""

    compiled: frozenset[Key] = frozenset()
    failed: frozenset[Key] = frozenset()  # do not fit into memory

    def runs(self, key: Key) -> bool:
        """True if a batch of this key waits for no compilation."""
        return key in self.compiled and all(half in self.compiled or half in self.failed for half in key.halves)


class Batch(NamedTuple):
    """Requests that run next, and their program."""

    key: Key
    rows: tuple[str, ...]  # ids
    runs: bool = True  # False: nothing runs these requests before `wanted` is compiled. A failed program raises
    wanted: tuple[Key, ...] = ()  # programs that would run these requests better, not compiled yet
    lengths: tuple[int, ...] = ()  # for a prefill: tokens of each prompt
    drafted: frozenset[str] = frozenset()  # for a step: requests that it may draft for
    forced: Mapping[str, tuple[int, ...]] = {}  # tokens forced by a grammar, which replace drafts
    trial: bool = False  # for a step: see `Choice`


@dataclass(frozen=True)
class Drafting:
    """Who chooses N.

    Attributes:
        policy: chooses; None: each step has its bucket's trees.
        always: a request drafts in all of its steps or in none, as `Running.drafts` says. A step without drafts would
            leave a hole in the drafter's state, or change a lossy text.
    """

    policy: DraftPolicy | None = None
    always: bool = False


def plan(view: View, ready: Ready, buckets: Buckets, drafting: Drafting) -> list[Batch]:
    """Plans one iteration: at most one prefill that runs, then a step for each running request.

    Nothing waits for a compilation while a ready program could run it. Requests with a grammar or a wide page table,
    whose programs no start compiles, let the others run meanwhile. A request with a grammar whose last step is unread
    is left out: its masks are not known.
    """
    running = [request for request in view.running if not (request.grammar and request.unread)]
    return [*_prefills(view, ready, buckets), *_steps(running, ready, buckets, drafting)]


def _possible(keys: list[Key], ready: Ready) -> list[Key]:
    """The programs that may fit into memory; all, which then raise, if none does."""
    return [key for key in keys if key not in ready.failed] or keys


# Prefills


def _prefills(view: View, ready: Ready, buckets: Buckets) -> list[Batch]:
    """The next chunk of one or several prompts. A prompt with log-probabilities or a wide page table runs alone."""
    if not view.prompts or (not view.running and view.prefilling > buckets.small):
        return []  # a long prefill in flight would delay a request that comes now
    first, most = view.prompts[0], buckets.most_prefilled(len(view.running), len(view.prompts))
    alone = [prompt for prompt in view.prompts if prompt.scores or prompt.pages > buckets.tables[0]]
    others = [prompt for prompt in view.prompts if prompt not in alone]
    if first not in alone:
        return [_prefill(others, most, ready, buckets)]
    batch = _prefill([first], most, ready, buckets)
    return [batch] if batch.runs or not others else [batch, _prefill(others, most, ready, buckets)]


def _prefill(prompts: list[Prompt], most: int | None, ready: Ready, buckets: Buckets) -> Batch:
    """The prefill of these prompts with the most tokens per cost, of at most `most` tokens if one is ready."""
    left, table = [prompt.left for prompt in prompts], buckets.tables_for(prompts[0].pages)[0]
    kind = "scoring" if prompts[0].scores else "prefill"

    def rate(key: Key) -> float:
        lengths = key.lengths(left)
        computed = sum(n if n == whole else PART * n for n, whole in zip(lengths, left, strict=False))
        return computed / ((sum(lengths) if buckets.ragged else key.size) + buckets.free_tokens)

    sizes = [key for table in buckets.tables_for(prompts[0].pages) for key in buckets.prefills(kind, table)]
    usable = [key for key in _possible(sizes, ready) if ready.runs(key)]
    usable = [key for key in usable if most is None or key.size <= most] or usable[:1]
    chunks = buckets.chunks_for(left[0]) if most is None else buckets.plain_chunks
    best = _possible([Key(kind, chunk, table) for chunk in chunks], ready)[0]
    key = max(usable, key=rate) if usable else best
    lengths = tuple(key.lengths(left))
    # With a limit, or together with other prompts, one chunk is as good as another.
    better = not usable or (most is None and key.rows == 1 and rate(best) > rate(key))
    wanted = (best,) if better and not ready.runs(best) else ()
    runs = bool(usable) or key in ready.failed
    return Batch(key, tuple(prompt.id for prompt in prompts[: len(lengths)]), runs, wanted, lengths)


# Steps


def _steps(left: list[Running], ready: Ready, buckets: Buckets, drafting: Drafting) -> list[Batch]:
    """One step for each request: in one batch, or in several if no ready program fits all."""

    def special(request: Running) -> tuple[bool, bool]:
        return request.grammar, request.pages > buckets.tables[0]

    batches = list[Batch]()
    while left:
        for allowed in ((True, True), (True, False), (False, True), (False, False)):
            part = [r for r in left if all(need <= may for need, may in zip(special(r), allowed, strict=True))]
            if part and (batch := _step(part, ready, buckets, drafting)).runs:
                break
        else:
            part = [request for request in left if special(request) == special(left[0])]
            batch = _step(part, ready, buckets, drafting)
        batches.append(batch)
        left = [request for request in left if request.id not in batch.rows]
    return batches


def _step(requests: list[Running], ready: Ready, buckets: Buckets, drafting: Drafting) -> Batch:
    """The first of the batches that run these requests; those with a grammar come first."""
    requests = sorted(requests, key=lambda request: not request.grammar)
    count, pages = min(len(requests), buckets.batches[-1]), max(request.pages for request in requests)
    kind = "constrained" if any(request.grammar for request in requests) else "step"
    tables, own = buckets.tables_for(pages), buckets.sizes(buckets.batch(count))
    compiled = {n for n in own for t in tables if ready.runs(Key(kind, buckets.batch(count), t, nodes=n))}
    nodes, trial, better = _choice(requests, compiled, buckets, drafting)

    def sizes(nodes: int) -> list[Key]:
        """Programs by page table and rows."""
        pairs = [(batch, buckets.alike(batch, nodes)) for batch in buckets.batches]
        return [Key(kind, batch, table, nodes=n) for table in tables for batch, n in pairs if n is not None]

    def fit(key: Key) -> tuple[bool, int, int, int]:
        """Requests that fit come first, then the chosen nodes, then the smallest program or the largest part."""
        fits = key.width >= count
        return fits, -abs(key.nodes - nodes), -key.table, -key.width if fits else key.width

    chosen = _possible(sizes(nodes), ready)
    others = list[Key]()  # a step with drafts also runs requests that do not draft
    if drafting.policy is not None:
        least = 2 if drafting.always and nodes > 1 else 1
        others = [key for n in own if n >= least and n != nodes for key in sizes(n)]
    roomy = buckets.batch(2 * count) if buckets.ahead and count > 1 else buckets.batch(count)
    order = sorted(chosen, key=lambda key: (key.table, key.width != roomy, key.width < count, abs(key.width - count)))
    usable = [key for key in (*chosen, *others) if ready.runs(key)]
    key = max(usable, key=fit) if usable else order[0]
    whole = bool(usable) and key.width >= count and key.nodes == buckets.alike(key.width, nodes)
    best = key._replace(nodes=better) if whole and better in buckets.sizes(key.width) else order[0]
    wanted = () if (whole and better is None) or ready.runs(best) else best.halves
    runs, part = bool(usable) or key in ready.failed, requests[: key.width]
    forced = _forced(part, buckets.depths.get(key.nodes, 0)) if kind == "constrained" else {}
    return Batch(
        key, tuple(request.id for request in part), runs, wanted, forced=forced, trial=trial and whole,
        drafted=frozenset(r.id for r in part if key.nodes > 1 and (r.drafts or r.id in forced)),
    )  # fmt: skip


def _forced(requests: list[Running], depth: int) -> dict[str, tuple[int, ...]]:
    """Forced tokens by request, at most one path of a tree of this depth."""
    return {request.id: request.forced[:depth] for request in requests if request.forced and depth}


def _choice(requests: list[Running], compiled: set[int], buckets: Buckets, drafting: Drafting) -> Choice:
    """Nodes of the next step of these requests. `compiled`: N of the programs of their bucket that can run."""
    batch = buckets.batch(len(requests))
    sizes, policy = buckets.sizes(batch), drafting.policy
    if policy is None or sizes == (1,):
        return Choice(sizes[-1])
    own = [request.acceptance for request in requests if request.drafts]
    if drafting.always:  # whether to draft was chosen at the admission
        sizes = sizes[1:] if own else sizes[:1]
    usual = buckets.usual(batch)
    forced = _forced(requests, buckets.depths[usual])
    if forced and not drafting.always and policy.pays(batch, usual, len(requests), sum(map(len, forced.values()))):
        return Choice(usual)
    if not own:
        return Choice(1)
    return policy.choose(batch, compiled.intersection(sizes) or sizes, len(requests), own)


# For the log


def speculation_table(speculation: Speculation, buckets: Buckets) -> dict[str, str]:
    """Describes drafting: algorithm, tree, head, and the steps that draft."""
    drafter = speculation.drafter
    if drafter.width == 1:
        return {"algorithm": drafter.name}
    tree = f"up to {drafter.width} tokens" + (f"; {speculation.note}" if speculation.note else "")
    drafts, more = "in steps" if buckets.chooses else "in every step", ""
    if (most := buckets.most_drafting) < buckets.batches[-1]:
        drafts = "in steps of one request" if most == 1 else f"in steps of up to {most} requests"
        more = "; larger batches are faster without drafts here, and draft only if the number of draft tokens is set"
    drafts += " where that is measured to be faster" * buckets.chooses + more
    head = {"head": speculation.source} if speculation.source else {}
    return {"algorithm": drafter.name, "tree": tree, **head, "drafts": drafts}


def as_lines(table: Mapping[str, str]) -> str:
    """Formats `speculation_table` as indented lines below a heading."""
    return "".join(f"\n  {name:9}  {text}" for name, text in table.items())
