"""After any sequence of events the draft cache equals one built from scratch."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import NEAR, check_idle, check_plain, make_engine
from oracle import Sampling
from toy_models import Runner, tiny_llama

from specjax.cache import bytes_per_token
from specjax.config import HeadConfig, RopeConfig
from specjax.drafters import Drafter, Params, TreeShape, eagle_drafter, make_drafter
from specjax.engine import EngineConfig, SamplingParams
from specjax.engine.config import Layout
from specjax.engine.memory import pool_tokens, room_beside, temporary_bytes
from specjax.engine.sequence import Status
from specjax.models.draft_head import init_head_params
from specjax.models.target import Target
from specjax.step import StepConfig

LONGEST = 96
ERROR = 2e-5


@functools.cache
def toy():
    return tiny_llama(5)


@functools.cache
def head(kind: str):
    aux_layers = (0, 1) if kind == "eagle3" else ()
    config = HeadConfig(kind, 16, 16 * (len(aux_layers) or 1), 24, 4, 2, 8, 1e-5, RopeConfig(), 31, aux_layers)
    params = dict(init_head_params(config, toy().target, jax.random.key(2)))
    params = {name: leaf * 15 if leaf.ndim > 1 else leaf for name, leaf in params.items()}
    return config, params


@functools.cache
def drafter(kind: str):
    return eagle_drafter(toy().target, head(kind)[0], TreeShape(3, 3, 6))


@functools.cache
def fresh_runner(kind: str) -> Runner:
    return Runner(toy(), drafter(kind), rows=1, pages_a_row=LONGEST, page_size=1, chunk=LONGEST, draft=head(kind)[1])


def slots(draft, table: np.ndarray, count: int) -> np.ndarray:
    """The keys and values of a row's first `count` slots, [count, 2 * K * E]."""
    both = [np.asarray(leaf)[table].reshape(-1, *leaf.shape[2:]) for leaf in draft.cache]
    return np.concatenate([part[:count].reshape(count, -1) for part in both], axis=1)


def from_scratch(kind: str, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Slots and last output for these tokens, all but the last of which are committed: one prefill of one chunk."""
    runner = fresh_runner(kind)
    runner.admit(0, tokens[:-1], Sampling(max_tokens=4))
    runner.prefill([tokens[:-1]], forced=tokens[-1])
    draft = runner.state.draft
    return slots(draft, runner.table[0], len(tokens) - 1), np.asarray(draft.feature[0])


def check_sequence(engine, kind: str, sequence) -> None:
    n = int(engine.state.rows.prefix_length[sequence.active_slot.index])
    if sequence.status is Status.PREFILLING:
        n = sequence.active_slot.prefilled
    text = [*sequence.prompt, *sequence.output.tokens]
    if n == 0:
        return
    assert n < len(text), "the root is known"
    table = np.asarray(sequence.active_slot.pages)
    expected, feature = from_scratch(kind, text[: n + 1])
    np.testing.assert_allclose(slots(engine.state.draft, table, n), expected, atol=ERROR)
    np.testing.assert_allclose(np.asarray(engine.state.draft.feature[sequence.active_slot.index]), feature, atol=ERROR)


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def test_after_chunks_retractions_and_aborts(kind):
    rng = np.random.default_rng(7)
    engine = make_engine(
        toy(), drafter(kind), draft=head(kind)[1], max_total_tokens=100, page_size=4, chunked_prefill_size=8,
        overlap=False, context_length=LONGEST, max_running_requests=3,
    )  # fmt: skip
    alive, wanted, checked, aborted = {}, {}, 0, 0
    for turn in range(130):
        if turn < 90 and len(alive) < 5 and rng.random() < 0.4:
            prompt = rng.integers(0, 31, int(rng.integers(1, 30))).tolist()
            greedy = rng.random() < 0.5
            params = SamplingParams(
                max_new_tokens=int(rng.integers(5, 60)), temperature=0.0 if greedy else 1.0, seed=turn,
                speculate=bool(rng.random() < 0.8),
            )  # fmt: skip
            sequence = engine.add(prompt, params)
            alive[sequence.id], wanted[sequence.id] = sequence, (prompt, params)
        if alive and rng.random() < 0.05:
            aborted += engine.abort(str(rng.choice(list(alive))))
        engine.step()
        for sequence in engine.scheduler.active:
            if rng.random() < 0.3:
                check_sequence(engine, kind, sequence)
                checked += 1
        alive = {id: s for id, s in alive.items() if s.status is not Status.FINISHED}
        engine.check_integrity()
    while engine.unfinished:
        engine.step()
    assert engine.scheduler.retractions >= 2 and aborted >= 2 and checked > 50, (
        engine.scheduler.retractions,
        aborted,
        checked,
    )
    check_idle(engine)


@pytest.mark.parametrize("sizes", [{"max_total_tokens": 100}, {"retract_every": 3}], ids=["no room", "forced"])
def test_the_texts_of_requests_that_were_retracted(sizes):
    kind = "eagle3"
    engine = make_engine(
        toy(), drafter(kind), draft=head(kind)[1], page_size=4, context_length=LONGEST, max_running_requests=3, **sizes
    )
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = [SamplingParams(max_new_tokens=50, temperature=float(i > 0), seed=i) for i in range(3)]
    found = engine.generate(prompts, params)
    assert engine.scheduler.retractions
    for prompt, wanted, done in zip(prompts, params, found, strict=True):
        check_plain(toy(), prompt, wanted, done)
    check_idle(engine)


@pytest.mark.parametrize(
    ("kind", "same_next"),
    [
        ("eagle3", True),
        ("eagle3", False),
        pytest.param("eagle", False, marks=pytest.mark.slow),
        pytest.param("eagle", True, marks=pytest.mark.slow),
    ],
)
def test_a_page_list_that_is_reused(kind, same_next):
    """Row 1 begins with two pages of row 0. Its slot at their end is stale if what follows there is another token."""
    shared, size = [3, 1, 4, 1, 5, 9, 2, 6], 4
    first = [*shared, 5, 3, 5]
    second = [*shared, 5 if same_next else 8, 8, 9, 7]
    runner = Runner(
        toy(), drafter(kind), rows=2, page_size=size, pages_a_row=12, chunk=3, draft=head(kind)[1],
        config=StepConfig((drafter(kind).width,)),
    )  # fmt: skip
    request = Sampling(max_tokens=20)
    runner.admit(0, first, request)
    runner.prefill([first])
    before = slots(runner.state.draft, runner.table[0], 8)
    runner.table[1, :2] = runner.table[0, :2]
    runner.admit(1, second, request, prefix_length=len(shared))
    start = runner.prefill([[], second[len(shared) :]])
    text = [*second, int(start.tokens[0, 0])]
    for _ in range(4):
        output = runner.step([False, True])
        text += output.tokens[1, : output.emitted[1]].tolist()
    n = len(text) - 1
    found, (expected, feature) = slots(runner.state.draft, runner.table[1], n), from_scratch(kind, text)
    stale = len(shared) - 1
    others = [slot for slot in range(n) if slot != stale]
    np.testing.assert_array_equal(found[:8], before)
    np.testing.assert_allclose(found[others], expected[others], atol=ERROR)  # a slot is made of its own inputs
    fits = np.allclose(found[stale], expected[stale], atol=ERROR)
    assert fits == same_next
    if same_next:
        np.testing.assert_allclose(np.asarray(runner.state.draft.feature[1]), feature, atol=ERROR)
    alone = oracle.generate_plain(toy().logits, second, Sampling(max_tokens=len(text) - len(second)))
    assert min(alone.gaps) > NEAR and alone.tokens == text[len(second) :]
    assert jnp.all(jnp.isfinite(runner.state.draft.feature))


@pytest.mark.parametrize(("kind", "page_size"), [("eagle", 1), ("eagle3", 16)])
def test_what_a_token_takes_in_the_drafts_cache(kind, page_size):
    """Keys and values of one layer with 2 heads of 8, float32. N-grams keep 12 numbers for each page."""
    params = Params(toy().params, head(kind)[1])

    def taken(drafter: Drafter) -> int:
        return bytes_per_token(lambda pool: drafter.init(params, 1, pool), page_size)

    assert taken(drafter(kind)) == 2 * 2 * 8 * 4
    assert taken(make_drafter("NGRAM")) == 12 * 4 // page_size and taken(make_drafter("NONE")) == 0


def test_the_pool_leaves_room_for_the_largest_programs_temporaries(monkeypatch):
    """A GPU of 200 MB, of which jax has taken three quarters and half may be used: weights, then the pool; and what
    the largest program holds must fit beside both into what jax has taken."""
    target, params = toy().target, Params(toy().params)
    model = target.config
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 150_000_000, "bytes_in_use": 20_000_000})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    config = EngineConfig(max_running_requests=64, page_size=16, mem_fraction=0.5)

    def tokens(drafter: Drafter, target: Target = target, config: EngineConfig = config) -> int:
        return pool_tokens(target, config, 1 << 30, "gpu", drafter, params)

    automatic = make_drafter("NGRAM")._replace(width=64)
    a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4 + 12 * 4 // 16
    assert tokens(automatic) == 80_000_000 // a_token
    # 64 trees of 64 nodes that were asked for; 50 MB beside them are more than half of the device leaves.
    explicit = automatic._replace(explicit_width=True)
    wide = target._replace(config=replace(model, vocab_size=2000))
    config_of = Layout.of(config, 1 << 30, 1 << 30, "gpu", explicit)
    reserved = temporary_bytes(wide, explicit.features, config_of.buckets, "gpu")
    assert reserved > 2.5 * 64 * 64 * 2000 * 4 > 50_000_000
    assert tokens(explicit, wide) == (130_000_000 - reserved) // a_token
    assert room_beside({"pool": np.zeros(1_000_000, np.int8)}) == 129_000_000
    large = explicit._replace(width=512)
    with pytest.raises(
        ValueError,
        match=r"no memory is left .* 0\.02 of 0\.20 GB .*mem_fraction 0\.5; .* program take 0\.\d+ GB; "
        r"give a higher fraction, .*\(64\).*\(512\)",
    ):
        tokens(large, wide)
    # A size that is given must leave the same room.
    given = replace(config, max_total_tokens=100_000_000 // a_token)
    assert tokens(automatic, config=given) == given.max_total_tokens
    with pytest.raises(
        ValueError, match=r"^EngineConfig.max_total_tokens \d+ takes 0\.10 GB .* 0\.\d+ GB, but 0\.13 GB are free"
    ):
        tokens(large, wide, given)
    too_many = replace(config, max_total_tokens=200_000_000 // a_token)
    with pytest.raises(ValueError, match=r"takes 0\.20 GB .*, but 0\.13 GB are free; give fewer tokens"):
        tokens(automatic, config=too_many)
