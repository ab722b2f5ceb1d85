"""NGRAM against an oracle of dictionaries: drafts are tokens that followed the request's last tokens before."""

import functools
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, example, given, settings
from oracle import NO_PARENT, Sampling
from toy_models import Runner, as_tree, random_table, table_model

from specjax.cache import PoolShape
from specjax.drafters import Ngram, make_speculation, ngram, ngram_drafter
from specjax.drafters.base import Context, Observation, PageSize, Params
from specjax.sampling import sampling_row
from specjax.step import StepConfig

ROWS, CHUNK = 3, 6
SALTS = (0, 0xDEADBEEF)  # 0 and 1 would do, but their windows share buckets
NONE = Params(None)

# Settings.


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": 2, "branch_length": 1, "max_match": 1, "max_breadth": 1},
        {"nodes": 64, "branch_length": 5, "max_match": 2, "max_breadth": 64},
        {"nodes": 32, "branch_length": 1},  # more places than candidates
    ],
)
def test_extreme_settings(changes):
    memory = Memory(Ngram(capacity=1024, **changes))
    memory.observe({0: [1, 2, 3, 1, 2, 3, 1, 2]})
    tree = memory.propose({0: 3})[0]
    assert oracle.problems(tree) == []
    depth = min(changes["branch_length"], changes["nodes"] - 1, 5)
    assert max(oracle.depths(tree)) == depth


# The device's memory, driven like the step does, and the oracle's.


@functools.cache
def compiled(config: Ngram, cautious: bool = False):
    drafter = ngram_drafter(config, cautious=cautious)
    return drafter, jax.jit(drafter.propose), jax.jit(drafter.observe)


class Match(NamedTuple):
    size: int
    time: int  # when its last token was committed
    text: list[int]  # what followed


class Memory:
    """ROWS rows. `texts` holds each request that ever was, as (salt, tokens), in the order of their last tokens."""

    def __init__(self, config: Ngram = Ngram(capacity=1 << 16), *, cautious: bool = False):  # noqa: B008
        self.config = config
        self.drafter, self._propose, self._observe = compiled(config, cautious)
        self.state = self.drafter.init(NONE, ROWS, PoolShape(4, 4))
        self.texts: list[list[int]] = []
        self.salts: list[int] = []
        self.times: list[list[int]] = []  # place in the ring of each token, never wrapped
        self.row = [-1] * ROWS  # which text
        self.written = 0

    def start(self, row: int, salt: int = 0) -> None:
        """A new request at this row."""
        self.texts.append([])
        self.times.append([])
        self.salts.append(salt)
        self.row[row] = len(self.texts) - 1

    def context(self, roots: dict[int, int]) -> Context:
        batch = ROWS + 1
        slots = np.arange(batch, dtype=np.int32)[::-1].copy()  # entries are not rows
        slots[0] = ROWS + 7

        def entries(values, dtype):
            return jnp.asarray([values.get(int(s), 0) for s in slots], dtype)

        indices = {row: self.row[row] for row in roots}
        sampling = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (batch, *x.shape)), sampling_row(8))
        return Context(
            slots=jnp.asarray(slots),
            prefix_length=entries({row: len(self.texts[i]) for row, i in indices.items()}, jnp.int32),
            page_table=jnp.full((batch, 2), 4, jnp.int32),
            root=entries(roots, jnp.int32),
            active=entries(dict.fromkeys(roots, True), bool),
            salt=entries({row: self.salts[i] for row, i in indices.items()}, jnp.uint32),
            sampling=sampling,
        )

    def observe(self, tokens: dict[int, list[int]]) -> None:
        """Chunks at once; a row without a request gets one."""
        for row in tokens:
            if self.row[row] < 0:
                self.start(row)
        most = max(map(len, tokens.values()), default=0)
        for start in range(0, most, CHUNK):
            part = {row: t[start : start + CHUNK] for row, t in tokens.items() if len(t) > start}
            self._observe_chunk(part)

    def _observe_chunk(self, tokens: dict[int, list[int]]) -> None:
        context = self.context(dict.fromkeys(tokens, 0))
        order = [int(s) for s in context.slots]
        block = np.full((len(order), CHUNK), 3, np.int32)  # values beyond the length are arbitrary, no sentinel
        length = np.zeros(len(order), np.int32)
        for entry, row in enumerate(order):
            if row in tokens:
                block[entry, : len(tokens[row])] = tokens[row]
                length[entry] = len(tokens[row])
                self.texts[self.row[row]] += tokens[row]
                self.times[self.row[row]] += range(self.written, self.written + len(tokens[row]))
                self.written += len(tokens[row])
        observation = Observation(jnp.asarray(block), jnp.asarray(block), None, jnp.asarray(length))
        self.state = self._observe(NONE, self.state, context, observation)

    def propose(self, roots: dict[int, int]) -> dict[int, oracle.Tree]:
        context = self.context(roots)
        tree, self.state = self._propose(NONE, self.state, context)
        valid = np.asarray(tree.valid)
        assert valid[:, 0].all() and (np.diff(valid.astype(int), axis=1) <= 0).all(), "a prefix"
        order = [int(s) for s in context.slots]
        for entry, row in enumerate(order):
            if row not in roots:
                assert valid[entry].sum() == 1, "an idle entry proposes nothing"
        result = {row: as_tree(tree, order.index(row)) for row in roots}
        for row, proposal in result.items():
            entry = order.index(row)
            assert proposal.tokens[0] == roots[row] and proposal.parents[0] == NO_PARENT
            assert oracle.problems(proposal) == []
            assert oracle.depths(proposal) == np.asarray(tree.depth)[entry, : len(proposal.tokens)].tolist()
            assert max(oracle.depths(proposal)) <= self.config.depth
        return result

    # The oracle.

    def matches(self, row: int, root: int) -> tuple[list[Match], list[Match]]:
        """All matches with a continuation, and those that must be found; longest first, then most recent.

        A bucket keeps 8 places, by a hash of the place: of two ends of one window in the same one, the later stays. The
        place is that in the ring or, of a request with a salt, that in its text.
        """
        suffix = [*self.texts[self.row[row]], root]
        least, most, ends = self.config.min_match, self.config.max_match, []
        for text, salt, times in zip(self.texts, self.salts, self.times, strict=True):
            if salt != self.salts[self.row[row]]:
                continue
            for end in range(1, len(text) + 1):
                size = 0
                while size < min(most, end, len(suffix)) and text[end - 1 - size] == suffix[-1 - size]:
                    size += 1
                if size >= least:
                    place = end - 1 if salt else times[end - 1] % self.config.capacity
                    way = (place * 2654435761 & 0xFFFFFFFF) >> 29
                    ends.append((Match(size, times[end - 1], text[end : end + self.config.depth]), way))

        def is_kept(match: Match, way: int) -> bool:
            later = [other.size for other, its_way in ends if other.time > match.time and its_way == way]
            return any(all(size < window for size in later) for window in range(least, match.size + 1))

        ends.sort(key=lambda end: (-end[0].size, -end[0].time))
        found = [(match, way) for match, way in ends if match.text]
        return [match for match, _ in found], [match for match, way in found if is_kept(match, way)]

    def room(self, size: int) -> int:
        """Nodes, the root included, that a tree may have after a match of `size` tokens."""
        if size < self.config.min_match:
            return 1
        return self.config.width


def check(memory: Memory, roots: dict[int, int]) -> None:
    for row, tree in memory.propose(roots).items():
        matches, certain = memory.matches(row, roots[row])
        followed = {tuple(match.text[:n]) for match in matches for n in range(1, len(match.text) + 1)}
        assert oracle.paths(tree) <= followed, "never seen after that suffix"
        if not matches:
            assert len(tree.tokens) == 1
            continue
        assert len(tree.tokens) <= memory.room(matches[0].size), "no match is longer"
        if not certain or certain[0] != matches[0]:
            continue
        best = certain[0]
        nodes = memory.room(best.size)
        if nodes == 1:
            assert len(tree.tokens) == 1, "too weak a match to draft from"
            continue
        assert best.text[0] in children(tree), "the longest, most recent match comes first"
        if sum(match.size == best.size for match in matches) == 1:  # nothing as good competes for the nodes
            assert tuple(best.text[: nodes - 1]) in oracle.paths(tree)


def children(tree: oracle.Tree) -> list[int]:
    return [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]


SMALL = {"nodes": 6, "max_match": 4, "branch_length": 4, "capacity": 1 << 16}
CONFIGS = {
    "BFS": Ngram(max_breadth=3, **SMALL),
    "PROB": Ngram(max_breadth=3, match_type="PROB", **SMALL),
    "windows of 2 to 3": Ngram(**SMALL | {"min_match": 2, "max_match": 3}),
}

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, ROWS - 1), st.sampled_from(SALTS)),
        st.tuples(
            st.just("observe"),
            st.dictionaries(
                st.integers(0, ROWS - 1), st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=ROWS
            ),
        ),
        st.tuples(st.just("propose"), st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("config", CONFIGS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(events=EVENTS)
@example(
    events=[("observe", {0: [1, 2, 3], 1: [2, 3, 0]}), ("start", 0, 0), ("observe", {0: [2]}), ("propose", [3] * 3)]
)
@example(events=[("start", 0, SALTS[1]), ("observe", {0: [1, 2, 3]}), ("observe", {1: [1]}), ("propose", [0, 2])])
@example(events=[("start", 0, 0xDEADBEEF), ("observe", {0: [0, 1, 1, 1, 1, 0], 1: [0]}), ("propose", [0, 0, 0])])
def test_proposals_equal_the_oracle(events, config):
    memory = Memory(CONFIGS[config])
    for kind, *what in events:
        if kind == "start":
            memory.start(*what)
        elif kind == "observe":
            memory.observe(*what)
        else:
            check(memory, {row: root for row, root in enumerate(what[0]) if memory.row[row] >= 0})
    check(memory, {row: 1 for row in range(ROWS) if memory.row[row] >= 0})


def plain_memory(**changes) -> Memory:
    return Memory(Ngram(**SMALL | changes))


def test_by_hand():
    """After "2": 3 came lately, 5 before that; the longer match "1 2" was followed by 5."""
    memory = plain_memory()
    memory.observe({0: [1, 2, 5, 6, 7]})
    memory.observe({1: [0, 2, 3, 4]})
    memory.observe({2: [9, 1]})
    tree = memory.propose({2: 2})[2]
    assert oracle.paths(tree) == {(5,), (5, 6), (5, 6, 7), (3,), (3, 4)}
    assert tree.tokens[1] == 5, "the longest match is the first child"


def test_match_type_prob():
    histories = [[1, 2, 3], [1, 2, 3], [1, 2, 4]]
    for match_type, expected in (("BFS", 4), ("PROB", 3)):
        memory = plain_memory(nodes=2, match_type=match_type)
        for text in histories:
            memory.start(0)
            memory.observe({0: text})
        memory.start(0)
        memory.observe({0: [1]})
        assert memory.propose({0: 2})[0].tokens == (2, expected)


def test_small_ring_that_wraps():
    """1024 places, 3000 tokens of a small alphabet: proposals may be missed, never invented. Old text is forgotten."""
    memory = Memory(Ngram(nodes=6, max_match=4, branch_length=4, capacity=1024))
    rng = np.random.default_rng(0)
    proposed = 0
    while memory.written < 3000:
        for row in range(ROWS):
            if memory.row[row] < 0 or rng.random() < 0.03:
                memory.start(row, salt=int(rng.integers(2)))
        memory.observe({row: rng.integers(0, 5, rng.integers(1, CHUNK + 1)).tolist() for row in range(ROWS)})
        if rng.random() < 0.15:
            roots = {row: int(rng.integers(5)) for row in range(ROWS)}
            for row, tree in memory.propose(roots).items():
                texts = [m.text for m in memory.matches(row, roots[row])[0] if m.time >= memory.written - 1024]
                followed = {tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)}
                assert oracle.paths(tree) <= followed
                proposed += len(tree.tokens) - 1
    assert proposed > 100


def test_matches_of_several_lengths():
    """Of 0, 1, 2 and 3 tokens."""
    for size, expected in enumerate((1, 5, 5, 5)):
        memory = plain_memory(nodes=5)
        memory.observe({0: [1, 2, 3, 4, 5, 6, 7]})
        suffix = [11, 12, 13, 1, 2, 3][size : size + 3]
        memory.observe({1: suffix[:-1]})
        tree = memory.propose({1: suffix[-1]})[1]
        assert tree.tokens == (suffix[-1], *range(size + 1, size + expected))


def test_default_on_a_cpu(monkeypatch):
    made = []

    def recorded(config: Ngram, *, cautious: bool):
        made.append((config.width, config.min_match, cautious))
        return ngram_drafter(config, cautious=cautious)

    monkeypatch.setattr(ngram, "ngram_drafter", recorded)
    for options in (Ngram(), Ngram(max_match=1), Ngram(min_match=3), Ngram(nodes=6)):
        assert make_speculation(options, platform="cpu").explicit_width == (options.nodes is not None)
    assert made == [(4, 2, True), (4, 1, True), (4, 3, True), (6, 1, False)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_cautious_trees_have_no_more_nodes_than_matched_tokens(size):
    memory = Memory(Ngram(capacity=1024, nodes=6), cautious=True)
    memory.start(0)
    memory.observe({0: [*range(10, 30)]})
    memory.start(1)
    memory.observe({1: [1, *range(20 - size, 19)]})
    assert len(memory.propose({1: 19})[1].tokens) == min(max(size, 2), 6)


def test_max_breadth():
    histories = [[1, follower] for follower in range(2, 9)]
    for most in (1, 3):
        memory = plain_memory(nodes=12, max_breadth=most, max_match=2, branch_length=4)
        for text in histories:
            memory.start(0)
            memory.observe({0: text})
        memory.start(0)
        tree = memory.propose({0: 1})[0]
        assert 1 <= len(tree.tokens) - 1 <= most
        assert tree.tokens[1] in (8, 7, 6)[:most]


@pytest.mark.optimized
def test_ring_is_written_in_place():
    """XLA:CPU copies what is written before all that reads it is done: milliseconds a step, with a million tokens."""
    memory = Memory(Ngram(capacity=1 << 16))
    memory.start(0)
    context = jax.tree.map(lambda leaf: leaf[:1], memory.context({0: 1}))._replace(page_size=PageSize(4))
    tokens = jnp.zeros((1, CHUNK), jnp.int32)
    seen = Observation(tokens, tokens, None, jnp.ones(1, jnp.int32))
    observe = jax.jit(memory.drafter.observe, donate_argnums=1)
    result = observe.lower(NONE, memory.state, context, seen).compile().memory_analysis()
    assert result.temp_size_in_bytes < memory.state.tokens.nbytes


# In the step: a limit on drafts, and text that stays the model's own.


def test_reused_pages():
    """A request that starts with another's pages continues its text in the ring, unless the salts differ or the ring
    has been overwritten."""
    toy = table_model(random_table(0), window=2)
    text, size = [1, 2, 3, 4, 5, 6, 0, 1, 3, 5], 4
    for salt, overwritten, linked in ((0, False, True), (9, False, False), (0, True, False)):
        drafter = ngram_drafter(Ngram(**SMALL | {"nodes": 4, "max_match": 6}))
        runner = Runner(toy, drafter, rows=2, page_size=size, pages_a_row=8, chunk=3, config=StepConfig(4))
        runner.admit(0, text, Sampling(max_tokens=2))
        runner.prefill([text])
        if overwritten:
            ring = runner.state.draft._replace(tokens=jnp.full_like(runner.state.draft.tokens, 6))
            runner.state = runner.state._replace(draft=ring)
        for shared in (8, 4):  # the ring leads on from a token to the latest that followed
            new = [*text[:shared], 2, 6]
            runner.table[1, : shared // size] = runner.table[0, : shared // size]
            runner.admit(1, new, Sampling(max_tokens=2), prefix_length=shared, salt=salt)
            runner.prefill([[], new[shared:]])
            result = runner.state.draft
            assert result.recent[1].tolist() == ([-1] * 9 + new)[-5:]
            at, walk = int(result.tail[1]), []
            while at != -1 and len(walk) < 20:
                walk.append(int(result.tokens[at]))
                before = int(result.previous[at])
                at = before if before != -1 and int(result.next[before]) == at else -1
            assert walk[::-1] == (new if linked else new[shared:]), (salt, overwritten, shared)
