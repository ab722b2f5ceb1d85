"""The distribution of emitted tokens, lossless and with accept thresholds, and engines with thresholds."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.stats
from distil import distilled, pair_model
from engine_helpers import DRAFTS, check_idle, make_engine, toy, wanted
from grammar_helpers import OBJECT, follows
from hypothesis import given, settings
from oracle import Sampling
from test_verify import BATCH, DEPTH, VOCABULARY, WIDTH, requests_for, run_verify, some_trees
from toy_models import as_arrays, history, random_tree, sampling_rows

from specjax import AcceptAbove, Ngram, SyntheticAcceptance
from specjax.drafters import Speculation, TreeShape, eagle_drafter, ngram_drafter
from specjax.engine import SamplingParams
from specjax.sampling import DrawInputs
from specjax.tree import NO_TOKEN
from specjax.verify import is_lossless, verify_tree

COUNT = 4096


def expected_runs(tree, probabilities, single: float, cumulative: float, node: int = 0) -> dict[tuple[int, ...], float]:
    """Emitted runs from `node` on -> their probability: SGLang's loop over children, integrated over the coin."""
    p = probabilities(oracle.path_tokens(tree, node))
    children = [child for child, parent in enumerate(tree.parents) if parent == node]
    used, total, actual = 0.0, 0.0, dict[tuple[int, ...], float]()  # `used`: coins below it have accepted a child
    for child in children:
        token = tree.tokens[child]
        total += p[token]
        upto = 1.0 if p[token] >= single else max(used, min(1.0, total / cumulative))
        for run, each in expected_runs(tree, probabilities, single, cumulative, child).items():
            actual[(token, *run)] = (upto - used) * each
        used = upto
    rest = p.copy()
    rest[[tree.tokens[child] for child in children]] = 0
    if used < 1:
        actual |= {(token,): (1 - used) * each / rest.sum() for token, each in enumerate(rest)}
    return actual


@functools.partial(jax.jit, static_argnames=("verify", "depth"))
def verdict_of(verify, *given, depth):
    return verify(*given, depth=depth)


def seeds_of(params: Sampling, tree: oracle.Tree, logits: np.ndarray, prompt: list[int], generated: list[int]):
    """The arguments of a verifier for COUNT requests that differ in their seeds, 0 to COUNT - 1, alone."""

    def many(array):
        return jnp.broadcast_to(array, (COUNT, *array.shape[1:]))

    rows = jax.tree.map(many, sampling_rows([params], VOCABULARY))
    rows = rows._replace(seed=jnp.stack([jnp.arange(COUNT, dtype=jnp.uint32)] * 2, axis=1))
    zeros, past = jnp.zeros(COUNT, jnp.int32), history([prompt], [generated], VOCABULARY)
    inputs = DrawInputs(rows, past, zeros, jnp.ones(COUNT, bool))
    return jax.tree.map(many, as_arrays([tree], WIDTH)), many(jnp.asarray(logits)[None]), inputs, zeros + 3, zeros + 2


LAWS = {
    "plain": Sampling(temperature=1.0),
    "edited": Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.7, repetition_penalty=1.2),
    "cut": Sampling(temperature=1.3, top_k=3, min_p=0.1),
}


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.5), (0.4, 0.8), (0.01, 1.0)])
@pytest.mark.parametrize("law", LAWS)
def test_distribution_of_emitted_runs(law, thresholds):
    """Chi-square of 4,096 seeds on one tree. At (1, 1) the verdict equals the verdict of `verify_tree`."""
    rng, params = np.random.default_rng(len(law)), LAWS[law]
    tree = random_tree(0, WIDTH, VOCABULARY, rng, 3)
    logits = rng.normal(0, 1, (WIDTH, VOCABULARY)).astype(np.float32)
    nodes = {tuple(oracle.path_tokens(tree, node)): node for node in range(len(tree.tokens))}
    prompt, generated = [1, 2], [3, 0]

    def probabilities(path):
        return oracle.distribution(logits[nodes[tuple(path)]], params, prompt, generated + list(path))

    verdict = verdict_of(AcceptAbove(*thresholds), *seeds_of(params, tree, logits, prompt, generated), depth=3)
    accepted = np.asarray(verdict.accepted)
    runs = [tuple(row[: m + 1]) for row, m in zip(np.asarray(verdict.tokens).tolist(), accepted, strict=True)]

    exact = expected_runs(tree, probabilities, *thresholds)
    assert sum(exact.values()) == pytest.approx(1)
    assert set(runs) <= {run for run, p in exact.items() if p > 0}
    usual = {run: p * COUNT for run, p in exact.items() if p * COUNT > 5}
    observed, expected = [runs.count(run) for run in usual], list(usual.values())
    if (rest := COUNT - sum(expected)) > 1:
        observed, expected = [*observed, COUNT - sum(observed)], [*expected, rest]
    scale = sum(observed) / sum(expected)
    if len(expected) > 1:
        assert scipy.stats.chisquare(observed, np.array(expected) * scale).pvalue > 1e-3
    lossless, mean = oracle.expected_accepted(tree, probabilities), sum(p * (len(run) - 1) for run, p in exact.items())
    assert abs(accepted.mean() - mean) <= 4 * accepted.std() / np.sqrt(COUNT) + 1e-9
    if thresholds == (1.0, 1.0):
        assert mean == pytest.approx(lossless)


rngs = st.integers(0, 2**32).map(np.random.default_rng)


@pytest.mark.parametrize(("verify", "sampling"), [(AcceptAbove(), {}), (AcceptAbove(0.01, 0.1), {"temperature": 0.0})])
@settings(max_examples=30, deadline=None)
@given(rng=rngs)
def test_lossless_at_1_and_for_greedy_rows(rng, verify, sampling):
    batch, (requests, prompts, generated) = some_trees(rng), requests_for(rng, **sampling)
    logits = rng.normal(0, 1, (BATCH, WIDTH, VOCABULARY)).astype(np.float32)
    expected = run_verify(batch, logits, requests, prompts, generated)
    slots = jnp.arange(BATCH, dtype=jnp.int32)
    past = history(prompts, generated, VOCABULARY)
    inputs = DrawInputs(sampling_rows(requests, VOCABULARY), past, slots, jnp.ones(BATCH, bool))
    emitted = jnp.asarray([len(g) for g in generated], jnp.int32)
    prefix = jnp.asarray([len(p) + len(g) - 1 for p, g in zip(prompts, generated, strict=True)], jnp.int32)
    actual = verdict_of(verify, as_arrays(batch, WIDTH), jnp.asarray(logits), inputs, prefix, emitted, depth=DEPTH)
    for name in ("path", "accepted", "tokens"):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), name


NAN = float("nan")
REFUSED = [
    *((AcceptAbove, {name: wrong}, f"AcceptAbove.{name} must be .* above 0 and at most 1")
      for name in ("single", "cumulative") for wrong in (0.0, -0.1, 1.1, NAN)),
    *((SyntheticAcceptance, {"rates": wrong}, r"SyntheticAcceptance\.rates must be numbers from 1 to 0, none")
      for wrong in ((), (0.5, 0.6), (1.2,), (-0.1,), (NAN,))),
]  # fmt: skip


@pytest.mark.parametrize(("verifier", "fields", "message"), REFUSED)
def test_refused_fields(verifier, fields, message):
    with pytest.raises(ValueError, match=message):
        verifier(**fields)


@pytest.mark.parametrize("drafts", ["NGRAM", "EAGLE3"])
def test_one_seed_gives_one_lossy_text(drafts, caplog):
    """Whatever ran before or runs beside it: the same n-grams, a shared prefix, other requests, a retraction."""
    if drafts == "NGRAM":
        model, drafter, head = (
            toy(),
            Speculation(ngram_drafter(Ngram(nodes=6, capacity=1 << 17)), explicit_width=False),
            None,
        )
    else:
        model, (head_fields, head) = pair_model(), distilled("eagle3")
        drafter = Speculation(eagle_drafter(model.target, head_fields, TreeShape(3, 2, 7)), explicit_width=False)
    engine = make_engine(
        model, drafter, draft=head, verify=AcceptAbove(0.02), adaptive=True, retract_every=7, max_total_tokens=512
    )
    assert engine.policy is None and "adaptive has no effect" in caplog.text
    assert all(map(engine.buckets.drafts, engine.buckets.batches)), "large batches draft the same trees"
    rng, vocab = np.random.default_rng(0), model.vocab
    prompt = rng.integers(8, vocab, 21).tolist()
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)
    alone, texts = engine.generate(prompt, params), set[tuple[int, ...]]()
    for other in range(8):
        following = [prompt[: 4 + 3 * (i % 6)] + rng.integers(8, vocab, 9).tolist() for i in range(other % 4)]
        beside = [SamplingParams(max_new_tokens=30, temperature=1.0, seed=100 * other + i) for i in range(other % 4)]
        salted = dataclasses.replace(params, cache_salt="a") if other % 2 else params
        done, *_ = engine.generate([prompt, *following], [salted, *beside])
        texts.add(tuple(done.output_ids))
        assert done.drafted_steps == done.spec_verify_ct
    assert texts == {tuple(alone.output_ids)}
    assert alone.cached_tokens == 0
    exact = oracle.generate_plain(model.logits, prompt, wanted(params))
    assert exact.tokens != alone.output_ids, "the thresholds change the text"
    check_idle(engine)


def test_lossless_verifiers():
    assert is_lossless(verify_tree) and is_lossless(functools.partial(verify_tree, straight=True))
    assert is_lossless(AcceptAbove()) and not is_lossless(AcceptAbove(0.5))
    assert not is_lossless(SyntheticAcceptance((1.0,)))
    assert not is_lossless(lambda *args, **options: verify_tree(*args, **options)), "it may do anything"


def test_lossy_verifier_with_a_grammar():
    engine = make_engine(toy(), DRAFTS["NGRAM"], eos=(2,), verify=AcceptAbove(0.02, 0.5))
    params = [SamplingParams(max_new_tokens=70, temperature=1.0, seed=i, grammar=OBJECT) for i in range(4)]
    for done in engine.generate([list(range(70, 80))] * 4, params):
        assert follows(OBJECT, done.output_ids, whole=done.finish_reason["type"] == "stop")
    check_idle(engine)


def test_synthetic_rates_are_met():
    """The shares of 4,096 seeds. Accepted drafts are a path of the tree, and the bonus token is the target's draw."""
    rng, rates = np.random.default_rng(1), (0.9, 0.6, 0.3, 0.3)
    tree = random_tree(0, WIDTH, VOCABULARY, rng, 3)
    depth = max(len(oracle.path_tokens(tree, node)) for node in range(len(tree.tokens)))
    assert depth == 3, "the fourth rate has no draft"
    logits = rng.normal(0, 1, (WIDTH, VOCABULARY)).astype(np.float32)
    given = seeds_of(Sampling(temperature=1.0), tree, logits, [1, 2], [3, 0])
    verdict = verdict_of(SyntheticAcceptance(rates), *given, depth=3)
    drawn = verdict_of(AcceptAbove(), *given, depth=3).drawn
    tokens, drawn, compared = np.asarray(verdict.tokens), np.asarray(drawn), 0  # draws at the nodes of its own walk
    accepted, path = np.asarray(verdict.accepted), np.asarray(verdict.path)
    for d, rate in enumerate(rates[:3], start=1):
        assert abs(np.mean(accepted >= d) - rate) < 4 * np.sqrt(rate * (1 - rate) / COUNT)
    for row, count in enumerate(accepted.tolist()):
        end = path[row, count]
        assert tokens[row, :count].tolist() == oracle.path_tokens(tree, end)
        compared += drawn[row, end] != NO_TOKEN
        assert tokens[row, count] == drawn[row, end] or drawn[row, end] == NO_TOKEN
    assert compared > 500


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engine_with_synthetic_acceptance(temperature):
    """With rate 1 for two drafts, each step of a long chain accepts two."""
    model, prompts = toy(), [list(range(70 + i, 90 + i)) * 2 for i in range(3)]
    params = [SamplingParams(max_new_tokens=40, temperature=temperature, seed=i) for i in range(3)]
    engine = make_engine(model, DRAFTS["NGRAM"], verify=SyntheticAcceptance((1.0, 1.0, 0.0)))
    assert all(2 < done.spec_accept_length <= 3 for done in engine.generate(prompts, params))
