"""MTP heads: what the step feeds them, the trees they draft, and that they change the speed and never the text."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distil import distilled, pair_model, small_head
from eagle_oracle import HeadSpec, draft_tree, head_forward, llama_features
from engine_helpers import VOCABULARY, check_idle, check_plain, make_engine, tokenizer
from oracle import Sampling
from specjax_kernels import CAUSAL
from tiny_checkpoints import save_llama
from tiny_heads import save_head
from toy_models import Runner, tiny_llama

from specjax.checkpoint import load_head
from specjax.drafters import DRAFTERS, Mtp, NoDraft, make_drafter
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.models.blocks import KeyValue, Past, joined
from specjax.models.draft_head import draft_head, init_head_params, with_token_map
from specjax.step import StepConfig

SPEC = HeadSpec("mtp", num_heads=4, head_dim=8, eps=1e-5, rope_theta=640000.0)
ERROR = 1e-4
"""In scores. Where the oracle's own gap is below, a tree may differ."""


@functools.cache
def target():
    return tiny_llama(3)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A head in MiMo's format: its raw tensors, and as loaded."""
    folder = tmp_path_factory.mktemp("mtp")
    raw = save_head(folder, "mtp", seed=5)
    return raw, *load_head(str(folder), target().target.config, kind="mtp", progress=False)


def mtp(shape, toy, config):
    return make_drafter(Mtp(None, None, *shape, coupling="none"), target=toy.target, head=config)


# What a head computes.


def test_forward_and_recurrence(saved):
    """Six slots from position 0 on; then four times the head's own output, as a chain; logits are the target's."""
    raw, config, params = saved
    toy, rng = target(), np.random.default_rng(0)
    head = draft_head(config, toy.target, backend="reference")
    tokens, features = rng.integers(0, 31, 10), rng.normal(0, 1, (6, 16)).astype(np.float32)
    embedding = np.asarray(toy.params["embed"])
    empty = jnp.zeros((1, 1, config.num_kv_heads, config.head_dim))

    @jax.jit
    def run(tokens, feature, positions, mask, before):
        past = Past(KeyValue(empty, empty), jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), before)
        embedded = head.embed(toy.params, params, tokens)
        out, block = head.forward(params, embedded, head.fuse(params, feature), positions, mask, past)
        return out, head.unembed(toy.params, params, out[:, -1:])[0, 0], joined(before, block)

    given, ours, feature, before = list(features), [], jnp.asarray(features[None]), None
    for count in (6, 7, 8, 9, 10):
        visible = [set(range(item + 1)) for item in range(count)]
        expected = head_forward(
            raw, SPEC, embedding[tokens[:count]], given, list(range(count)), visible, [False] * count
        )
        given.append(expected[-1])
        new = slice(0, 6) if count == 6 else slice(count - 1, count)
        positions = np.arange(10, dtype=np.int32)[None, new]
        mask = CAUSAL if before is None else np.full((1, 1, 1), 2**count - 1, np.uint32)
        out, logits, before = run(tokens[None, new].astype(np.int32), feature, positions, mask, before)
        ours.append(out[0])
        np.testing.assert_allclose(np.concatenate(ours), expected, atol=2e-5)
        np.testing.assert_allclose(logits, np.asarray(toy.params["head"]).T @ expected[-1], atol=1e-4)
        feature = out[:, -1:]


def test_the_token_of_slot_0_says_nothing(saved):
    """As in SGLang and vLLM; the token of every other slot does."""
    _, config, params = saved
    head = draft_head(config, target().target, backend="reference")
    empty = jnp.zeros((1, 1, config.num_kv_heads, config.head_dim))
    past = Past(KeyValue(empty, empty), jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    feature = jax.random.normal(jax.random.key(0), (1, 3, 16))

    @jax.jit
    def out(*tokens):
        embedded = head.embed(target().params, params, jnp.asarray([tokens], jnp.int32))
        return head.forward(params, embedded, feature, jnp.arange(3, dtype=jnp.int32)[None], CAUSAL, past)[0]

    np.testing.assert_array_equal(out(1, 2, 3), out(9, 2, 3))
    assert np.abs(out(1, 2, 3) - out(1, 9, 3))[0, 1:].min(axis=1).max() > 0
    np.testing.assert_array_equal(out(1, 2, 3)[0, 0], out(1, 9, 3)[0, 0])


def test_parameters(saved):
    _, config, params = saved
    made = init_head_params(config, target().target, jax.random.key(0))
    assert {name: leaf.shape for name, leaf in made.items()} == {name: leaf.shape for name, leaf in params.items()}


# What the step feeds it.


def tree_paths(found, row: int) -> dict[tuple[int, ...], float]:
    """Path below the root -> score."""
    paths: dict[int, tuple[int, ...]] = {-1: (), 0: ()}
    for node in range(1, int(np.sum(found.valid[row]))):
        paths[node] = (*paths[int(found.parents[row, node])], int(found.tokens[row, node]))
    return {path: float(found.scores[row, node]) for node, path in paths.items() if node > 0}


@pytest.mark.parametrize(
    "shape", [pytest.param((4, 1, 5), id="chain", marks=pytest.mark.slow), pytest.param((3, 3, 8), id="tree")]
)
def test_the_step_drafts_the_oracles_trees(saved, shape):
    """Features, shifted tokens, positions and commits: the trees of five steps, each computed from scratch."""
    raw, config, params = saved
    toy = target()
    drafter = mtp(shape, toy, config)
    assert (drafter.name, drafter.features) == ("MTP", "final")
    step = StepConfig(widths=(drafter.width,), trace=True)
    runner = Runner(toy, drafter, rows=2, draft=params, config=step, page_size=3)
    requests = [([4, 8, 15, 16, 23], Sampling(max_tokens=12)), ([7], Sampling(max_tokens=12, temperature=1.0, seed=1))]
    for slot, (prompt, request) in enumerate(requests):
        runner.admit(slot, prompt, request)
    first = runner.prefill([prompt for prompt, _ in requests], chunk=2)
    texts = [[*prompt, int(first.tokens[row, 0])] for row, (prompt, _) in enumerate(requests)]
    clear, on_host = 0, jax.tree.map(np.asarray, toy.params)
    for _ in range(5):
        before = [list(text) for text in texts]
        output = runner.step([True, True])
        for row, text in enumerate(before):
            expected = draft_tree(
                raw, SPEC, text[:-1], text[-1], llama_features(on_host, toy.target.config, text[:-1]),
                embedding=on_host["embed"], head=on_host["head"].T, steps=shape[0], topk=shape[1], width=shape[2],
            )  # fmt: skip
            if expected.gap > ERROR:
                ours = tree_paths(output.trace.tree, row)
                wanted = {expected.path(node): expected.scores[node] for node in range(1, expected.size)}
                assert ours.keys() == wanted.keys()
                np.testing.assert_allclose([ours[path] for path in wanted], list(wanted.values()), atol=ERROR)
                clear += 1
            texts[row] += output.tokens[row, : output.emitted[row]].tolist()
    assert clear >= 6, "of 10"


# The text.

REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3], {}),
    ([7] * 20, {"temperature": 1.0, "seed": 3}),
    ([40, 5], {"temperature": 0.7, "seed": -1, "top_k": 9, "frequency_penalty": 0.5}),
    ([30, 31, 30, 31], {"stop_token_ids": [17, 23]}),
]


@pytest.mark.parametrize(("shape", "page_size"), [pytest.param((3, 1, 4), 1, marks=pytest.mark.slow), ((3, 3, 8), 16)])
def test_no_text_changes(shape, page_size):
    config = small_head("mtp", pair_model(), attention_bias=True)
    params = dict(init_head_params(config, pair_model().target, jax.random.key(1)))
    params = {name: leaf * 5 if leaf.ndim > 1 else leaf for name, leaf in params.items()}
    engine = make_engine(pair_model(), mtp(shape, pair_model(), config), draft=params, page_size=page_size)
    sampling = [SamplingParams(**{"max_new_tokens": 30} | fields) for _, fields in REQUESTS]
    together = engine.generate([prompt for prompt, _ in REQUESTS], sampling)
    for (prompt, _), wanted, found in zip(REQUESTS, sampling, together, strict=True):
        check_plain(pair_model(), prompt, wanted, found)
    check_idle(engine)


@pytest.mark.parametrize(
    "size", [pytest.param(None, id="whole vocabulary", marks=pytest.mark.slow), pytest.param(20, id="token map")]
)
def test_a_distilled_head_is_often_right(size):
    """And less so with a token map (FR-Spec), which leaves the text alone too."""
    config, params = distilled("mtp")
    if size:
        toy = pair_model()
        config, params = with_token_map(config, params, toy.target, toy.params, np.arange(size, dtype=np.int32))
        assert config.mapped and params["head"].shape == (config.hidden_size, size)
    engine = make_engine(pair_model(), mtp((4, 1, 5), pair_model(), config), draft=params)
    sampling = [SamplingParams(**{"max_new_tokens": 60} | fields) for _, fields in REQUESTS[:2]]
    found = engine.generate([prompt for prompt, _ in REQUESTS[:2]], sampling)
    for (prompt, _), wanted, done in zip(REQUESTS[:2], sampling, found, strict=True):
        check_plain(pair_model(), prompt, wanted, done)
    greedy = found[0].spec_accept_histogram
    accepted = sum(count * times for count, times in enumerate(greedy)) / sum(greedy)
    assert accepted > (0.2 if size else 1.5), greedy


def test_the_name_and_the_kind():
    assert DRAFTERS["MTP"] is Mtp and Mtp.kind == "mtp" and "token_map" in Mtp.names()
    config = small_head("eagle", pair_model())
    with pytest.raises(
        ValueError, match="MTP needs a target and a draft head of kind 'mtp'; what is given is a head of kin"
    ):
        make_drafter("MTP", target=pair_model().target, head=config)


def test_served_from_folders(tmp_path):
    """The flags of a user: a target and a head on disk; the same tokens as without it, greedy and seeded."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    save_llama(tmp_path / "model", **sizes, initializer_range=0.3, eos_token_id=2)
    tokenizer().save_pretrained(tmp_path / "model")
    save_head(tmp_path / "head", "mtp", target_vocab_size=VOCABULARY)
    settings = EngineConfig(page_size=4, chunked_prefill_size=16, max_total_tokens=160, max_running_requests=1)
    options = Mtp(str(tmp_path / "head"), steps=2, topk=3, nodes=6)
    texts = {}
    for algorithm, given in (("NONE", NoDraft()), ("MTP", options)):
        engine = Engine.from_pretrained(str(tmp_path / "model"), draft=given, config=settings, progress=False)
        wanted = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=1.0, seed=4)]
        texts[algorithm] = [done.output_ids for done in engine.generate([[5, 6, 7], [9]], wanted)]
        check_idle(engine)
    assert texts["MTP"] == texts["NONE"]
