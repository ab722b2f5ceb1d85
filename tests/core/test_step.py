"""Whole steps against the oracle; memory, compilation, traces and rows."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from oracle import LENGTH, RUNNING, STOP, Sampling, Tree
from toy_models import (
    UNTOUCHED,
    Finished,
    Runner,
    listed_drafter,
    listed_proposal,
    random_table,
    random_tree,
    some_sampling,
    table_model,
    tiny_llama,
)

from specjax.config import RopeConfig
from specjax.drafters.base import none_drafter
from specjax.drafters.ngram import Ngram, ngram_drafter
from specjax.step import NOT_FINITE, StepConfig, draft_phase, verify_phase

WIDTH, DEPTH, VOCABULARY = 6, 4, 7
LISTED = [random_tree(0, WIDTH, VOCABULARY, np.random.default_rng(seed), DEPTH) for seed in range(11)]
NEAR_TABLE, NEAR_LLAMA = 1e-4, 1e-3

DRAFTERS = {
    "none": functools.cache(none_drafter),
    "listed": functools.cache(lambda: listed_drafter(LISTED, WIDTH, DEPTH)),
    "ngram": functools.cache(lambda: ngram_drafter(Ngram(nodes=5, max_match=3, capacity=1024))),
}
TABLES = {
    "last two": lambda: table_model(random_table(0), window=2),
    "everything": lambda: table_model(random_table(1, rows=31), window=100),
    "ties": lambda: table_model(random_table(2, ties=True), window=2),
}
CONFIGS = {"listed": StepConfig(trace=True)}


def new_runner(toy, drafter, **options):
    return Runner(toy, DRAFTERS[drafter](), config=CONFIGS.get(drafter), **options)


@functools.cache
def table_runner(table, drafter):
    return new_runner(TABLES[table](), drafter)


def some_requests(rng, count=3):
    lengths = rng.integers(1, 13, count)
    return [(rng.integers(0, VOCABULARY, n).tolist(), some_sampling(rng, VOCABULARY)) for n in lengths]


def check_tokens(actual: Finished, toy, prompt, request, near):
    """Equal to plain decoding up to the first near-tie. Returns the tokens compared."""
    expected = oracle.generate_plain(toy.logits, prompt, request)
    close = [i for i, gap in enumerate(expected.gaps) if gap < near]
    if not close:
        assert (actual.tokens, actual.finish) == (expected.tokens, expected.finish), request
        return len(expected.tokens)
    assert actual.tokens[: close[0]] == expected.tokens[: close[0]], (request, expected.gaps)
    return close[0]


@pytest.mark.parametrize(
    ("table", "drafter"),
    [("last two", d) for d in DRAFTERS] + [("everything", "listed"), ("ties", "listed"), ("ties", "none")],
)
@settings(max_examples=15)
@given(rng=st.integers(0, 2**32).map(np.random.default_rng))
def test_steps_equal_the_oracles(rng, table, drafter):
    """Any parameters, three requests at once, in reused rows: the text of plain decoding, and the steps of the tree."""
    runner = table_runner(table, drafter)
    requests = some_requests(rng)
    for (prompt, request), actual in zip(requests, runner.generate(requests), strict=True):
        check_tokens(actual, runner.toy, prompt, request, NEAR_TABLE)
        if drafter == "none":
            assert set(actual.emitted) <= {1}
        if drafter == "listed":
            expected = oracle.generate_speculative(runner.toy.logits, listed_proposal(LISTED), prompt, request)
            if min(expected.gaps) >= NEAR_TABLE:
                assert actual.emitted == expected.emitted
                assert actual.accepted == [count - 1 for count in expected.emitted]


def test_drafts_are_accepted():
    requests = [([1, 2, 3], Sampling(max_tokens=30)), ([4], Sampling(max_tokens=30, temperature=1.0, seed=3))]
    for drafter in ("listed", "ngram"):
        emitted = [n for result in table_runner("last two", drafter).generate(requests) for n in result.emitted]
        assert np.mean(emitted) > 1.2
        assert max(emitted) > 2


LLAMA_REQUESTS = [
    ([3, 1, 4, 1, 5, 9, 2, 6], Sampling(max_tokens=24)),
    ([7], Sampling(max_tokens=24, temperature=0.8, seed=2**40 + 7, top_p=0.9)),
    ([2, 7, 1, 8], Sampling(max_tokens=24, temperature=1.0, seed=-5, repetition_penalty=1.3, frequency_penalty=0.2)),
]


def test_text_of_a_llama():
    """The oracle's Llama is the decoder's. test_lossless.py compares drafts of trees with transformers' models."""
    rope = RopeConfig(theta=100.0, scaling="llama3", factor=4.0, original_max_position=16)
    toy = tiny_llama(rope=rope, attention_bias=True, tied_embeddings=True)
    results = Runner(toy, DRAFTERS["none"]()).generate(LLAMA_REQUESTS)
    compared = [
        check_tokens(actual, toy, prompt, request, NEAR_LLAMA)
        for (prompt, request), actual in zip(LLAMA_REQUESTS, results, strict=True)
    ]
    assert sum(compared) > 40, compared
    assert all(len(set(actual.tokens)) > 3 for actual in results)


# Truncation: token p stands at position p, and drafts are always right.

LONG = 40
COUNTING = np.eye(LONG, dtype=np.float32)[np.arange(1, LONG + 1) % LONG]
COUNTED = [oracle.chain_tree(0, [(n + i) % LONG for i in (1, 2, 3)]) for n in range(LONG)]


@functools.cache
def counter():
    toy = table_model(COUNTING, window=1)
    return Runner(toy, listed_drafter(COUNTED, 4, 3, length=48), config=StepConfig(4))


@pytest.mark.parametrize(
    ("change", "emitted", "finish"),
    [
        ({"max_tokens": 1}, [], LENGTH),
        ({"max_tokens": 9}, [4, 4], LENGTH),
        ({"max_tokens": 7}, [4, 2], LENGTH),
        ({"stop_ids": (3,)}, [], STOP),  # the token that prefill draws
        ({"stop_ids": (4,)}, [1], STOP),
        ({"stop_ids": (20, 6)}, [3], STOP),
        ({"stop_ids": (7,)}, [4], STOP),  # the bonus
        ({"stop_ids": (8,)}, [4, 1], STOP),
        ({"stop_ids": (6,), "max_tokens": 4}, [3], STOP),  # both at once: stop
        ({"stop_ids": (6,), "max_tokens": 3}, [2], LENGTH),
        ({"stop_ids": (6, 9), "min_tokens": 3, "max_tokens": 16}, [3], STOP),  # 6 is the fourth
    ],
)
def test_truncation_of_accepted_runs(change, emitted, finish):
    runner = counter()
    others = [([0, 1], Sampling(max_tokens=20)), ([0], Sampling(max_tokens=2))]
    actual, *rest = runner.generate([([0, 1, 2], Sampling(**{"max_tokens": 20} | change)), *others])
    count = 1 + sum(emitted)
    assert actual == Finished(list(range(3, 3 + count)), finish, emitted, [e - 1 for e in emitted])
    assert [result.tokens for result in rest] == [list(range(2, 22)), [1, 2]]
    # All tokens but the root are committed.
    assert runner.state.rows.prefix_length[0] == 3 + count - 1
    assert runner.state.rows.generated[0] == count
    assert runner.state.root[0] == 3 + count - 1
    assert bool(runner.state.finished[0])
    slots = runner.committed(0)[: 3 + count - 1, 0, 0]
    assert slots.tolist() == list(range(3 + count - 1))


def test_pages_and_drafters_receive_committed_tokens_once():
    toy = table_model(random_table(0), window=2)
    runner = new_runner(toy, "listed")
    requests = [([1, 2, 3, 4, 5, 6], Sampling(max_tokens=25)), ([4], Sampling(max_tokens=12, temperature=1.0))]
    for row, ((prompt, _), actual) in enumerate(zip(requests, runner.generate(requests), strict=True)):
        text = prompt + actual.tokens
        count = len(text) - 1
        slots = runner.committed(row)[:, 0, 0]
        assert slots[:count].tolist() == text[:-1]
        assert (slots[count:] == UNTOUCHED).all()
        seen = jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], runner.state.draft)
        assert seen.times.tolist() == [1] * count + [0] * (128 - count)
        assert seen.tokens[:count].tolist() == text[:-1]
        assert seen.next_tokens[:count].tolist() == text[1:]
    used = set(runner.table[:2].ravel().tolist())
    others = [page for page in range(runner.pool.pages) if page not in used]
    assert (np.asarray(jax.tree.leaves(runner.state.cache)[0])[others] == UNTOUCHED).all()


def row_of(state, row):
    """All bytes of a row."""
    leaves = jax.tree.leaves((state.rows, state.root, state.finished, state.draft))
    return [np.asarray(leaf)[row].tobytes() for leaf in leaves]


def test_inactive_and_finished_rows_do_not_change():
    runner = new_runner(TABLES["last two"](), "listed")
    requests = [([1, 2], Sampling(max_tokens=30, temperature=1.0, seed=s)) for s in range(3)]
    for slot, (prompt, request) in enumerate(requests):
        runner.admit(slot, prompt, request)
    runner.prefill([prompt for prompt, _ in requests])
    before, pages = [row_of(runner.state, row) for row in range(3)], runner.committed(1).tobytes()
    output = runner.step([True, False, True])
    after = [row_of(runner.state, row) for row in range(3)]
    assert (output.emitted[1], output.finish[1], output.emitted[3], output.finish[3]) == (0, RUNNING, 0, RUNNING)
    assert after[1] == before[1]
    assert runner.committed(1).tobytes() == pages
    assert after[0] != before[0]
    assert after[2] != before[2]

    # The host may dispatch step t + 1 before it reads that step t finished a row.
    runner = counter()
    runner.generate([([0, 1, 2], Sampling(max_tokens=5))])
    before = row_of(runner.state, 0)
    output = runner.step([True, False, False])
    assert (int(output.emitted[0]), int(output.finish[0])) == (0, RUNNING)
    assert row_of(runner.state, 0) == before


def test_draft_limit():
    for limit, emitted in ((0, [1] * 12), (1, [2] * 6), (2, [3] * 4), (9, [4] * 3)):
        assert counter().generate([([0], Sampling(max_tokens=13))], draft_limit=limit)[0].emitted == emitted


BROKEN_ROW = {"nan": np.nan, "inf": np.inf, "all -inf": -np.inf}


@functools.cache
def broken_runner(what, drafter):
    """One row of logits cannot be drawn from; another has some -inf, which is allowed."""
    table = random_table(4)
    table[3, 1:] = -np.inf
    if what == "all -inf":
        table[5] = -np.inf
    else:
        table[5, 4] = BROKEN_ROW[what]
    return new_runner(table_model(table), drafter)


@pytest.mark.parametrize("drafter", ["none", "listed"])
@pytest.mark.parametrize("what", BROKEN_ROW)
def test_non_finite_logits_end_one_request(what, drafter):
    """Requests emit tokens up to the broken row, and others continue."""
    runner = broken_runner(what, drafter)
    requests = [
        ([1, 2, 3], Sampling(max_tokens=20)),
        ([4, 4], Sampling(max_tokens=20, temperature=1.0, seed=7, top_p=0.95)),
        ([6, 1], Sampling(max_tokens=20, temperature=0.7, seed=9, frequency_penalty=0.3)),
    ]
    healthy = table_model(np.nan_to_num(np.asarray(runner.toy.params["table"]), nan=0.0, posinf=0.0, neginf=-1e30))
    results = runner.generate(requests)
    for (prompt, request), (tokens, finish, *_) in zip(requests, results, strict=True):
        text = [*prompt, *tokens]
        finite = [np.isfinite(runner.toy.logits(text[:end]).max()) for end in range(len(prompt), len(text) + 1)]
        assert all(finite[:-1]) and (not finite[-1] or len(tokens) == 20)
        assert finish == (NOT_FINITE if len(tokens) < 20 else LENGTH)
        assert tokens == oracle.generate_plain(healthy.logits, prompt, request).tokens[: len(tokens)]
    assert NOT_FINITE in [result.finish for result in results]


@pytest.mark.parametrize("where", ["prompt", "chunk", "output"])
def test_non_finite_values_never_reach_a_page(where):
    """A NaN in the embedding of a token in the last chunk of a prompt, in an earlier chunk, or drawn."""
    toy = tiny_llama()
    embed = toy.params["embed"].at[5].set(jnp.nan)
    runner = new_runner(toy._replace(params=toy.params | {"embed": embed}), "none")
    prompts = {"prompt": [1, 2, 5], "chunk": [1, 5, 2, 3, 1, 2], "output": [1, 2]}
    bias = {5: 100.0} if where == "output" else {}
    runner.admit(0, prompts[where], Sampling(max_tokens=8, bias=bias))
    runner.admit(1, [3, 3, 1], Sampling(max_tokens=8))
    first = runner.prefill([prompts[where], [3, 3, 1]])
    expected = NOT_FINITE if where != "output" else RUNNING
    if where != "chunk":  # else the row ended before its last chunk
        assert (first.finish[0], first.emitted[0]) == (expected, int(where == "output"))
    other = [int(first.tokens[1, 0])]
    for _ in range(4):
        output = runner.step([where == "output", True, False])
        other += output.tokens[1, : output.emitted[1]].tolist()
        assert output.finish[0] in (NOT_FINITE, RUNNING)
        assert output.emitted[0] == 0
    assert bool(runner.state.finished[0])
    assert other == oracle.generate_plain(toy.logits, [3, 3, 1], Sampling(max_tokens=8)).tokens[:5]
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(runner.state.cache))


@pytest.mark.parametrize(("nodes", "emitted"), [(4, 4), (2, 2), (1, 1)])
def test_fewer_nodes_are_the_best(nodes, emitted):
    """The likely path comes after shallow nodes; a step of four nodes verifies the path."""
    table = random_table(0)
    toy = table_model(table)
    text = [1, 2]
    for _ in range(5):
        text.append(int(np.argmax(toy.logits(text))))
    a, b, c = text[3:6]
    wrong = [t for t in range(7) if t != a][:3]
    tokens = (text[2], *wrong, a, b, c)
    tree = Tree(tokens, (-1, 0, 0, 0, 0, 4, 5), (0.0, -5.0, -5.1, -5.2, -0.1, -0.2, -0.3))
    runner = Runner(toy, listed_drafter([tree] * 11, 7, 3, scored=True), config=StepConfig(nodes, trace=True))
    runner.admit(0, text[:2], Sampling(max_tokens=8))
    runner.prefill([text[:2]])
    output = runner.step([True, False, False])
    assert output.emitted[0] == emitted
    assert output.tokens[0, :emitted].tolist() == text[3 : 3 + emitted]
    assert output.trace.tree.tokens.shape[1] == nodes
    assert output.tokens.shape[1] == min(4, nodes), "length of the longest path"


def test_logprobs_and_trace():
    runner = new_runner(TABLES["last two"](), "listed")
    prompt, request = [1, 2, 3], Sampling(max_tokens=30, temperature=1.0, seed=4, bias={2: 1.0})
    runner.admit(0, prompt, request, logprobs=True)
    text = [*prompt, int(runner.prefill([prompt]).tokens[0, 0])]
    for _ in range(6):
        output = runner.step([True, False, False])
        proposed = listed_proposal(LISTED)(text)
        count = len(proposed.tokens)
        assert output.trace.tree.tokens[0].tolist() == [*proposed.tokens] + [-1] * (WIDTH - count)
        nodes = oracle.walk(proposed, output.trace.drawn[0].tolist())
        assert output.trace.path[0, : len(nodes)].tolist() == nodes
        assert output.trace.accepted[0] == len(nodes) - 1
        for i in range(int(output.emitted[0])):
            expected = oracle.raw_logprobs(runner.toy.logits(text))
            token = int(output.tokens[0, i])
            assert output.trace.drawn[0, nodes[i]] == token
            np.testing.assert_allclose(output.logprobs.drawn[0, i], expected[token], atol=1e-5)
            order = np.argsort(-expected, kind="stable")
            assert output.logprobs.top_ids[0, i].tolist() == order.tolist()
            np.testing.assert_allclose(output.logprobs.top[0, i], expected[order], atol=1e-5)
            text.append(token)


def test_phases_with_a_grammar():
    """The grammar allows even tokens, so the odd draft is rejected."""
    runner = counter()
    drafter = listed_drafter(COUNTED, 4, 3, length=48)
    draft = jax.jit(functools.partial(draft_phase, drafter=drafter))
    verify = jax.jit(functools.partial(verify_phase, target=runner.toy.target, drafter=drafter))
    runner.admit(0, [0, 1], Sampling(max_tokens=20))
    runner.prefill([[0, 1]])
    inputs = runner.inputs([True, False, False])
    tree, state = draft(runner.params, runner.state, inputs)
    assert tree.tokens[0].tolist() == [2, 3, 4, 5]
    allowed = np.zeros((4, 4, LONG), bool)
    allowed[..., ::2] = True
    bits = jnp.asarray(np.stack([oracle.pack_bits(rows) for rows in allowed]))
    _, output = verify(runner.params, state, inputs, tree, allowed=bits)
    assert (int(output.emitted[0]), int(output.tokens[0, 0])) == (1, 0)  # 3 is excluded; others tie
    allowed[0, 1:] = allowed[0, 0, 3] = True
    bits = jnp.asarray(np.stack([oracle.pack_bits(rows) for rows in allowed]))
    _, output = verify(runner.params, state, inputs, tree, allowed=bits)
    assert output.tokens[0].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("nodes", [-1, 5])
def test_nodes_out_of_range(nodes):
    runner, drafter = counter(), listed_drafter(COUNTED, 4, 3, length=48)
    inputs = runner.inputs([True, False, False])
    with pytest.raises(ValueError, match=f"StepConfig.nodes is {nodes}; LISTED proposes trees of 4 nodes"):
        draft_phase(runner.params, runner.state, inputs, drafter=drafter, config=StepConfig(nodes))
    tree, state = draft_phase(runner.params, runner.state, inputs, drafter=drafter)
    with pytest.raises(ValueError, match="trees of 4 nodes in a step of 2"):
        verify_phase(
            runner.params, state, inputs, tree, target=runner.toy.target, drafter=drafter, config=StepConfig(2)
        )


# Promises about compilation.


def test_one_trace_per_bucket():
    runner = new_runner(TABLES["last two"](), "listed")
    for seed in range(3):
        runner.generate(some_requests(np.random.default_rng(seed)))
        if seed == 0:
            admits = runner.steps.admit._cache_size()  # shared by all runners
    assert runner.steps.speculate._cache_size() == 1
    assert runner.steps.prefill._cache_size() == 1
    assert runner.steps.admit._cache_size() == admits
