"""The memory plan of an engine on a fake GPU: the pool's size beside weights and temporaries, and what does not fit."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from toy_models import tiny_llama

from specjax.cache import PoolShape
from specjax.drafters import Ngram, Params, Speculation, make_speculation
from specjax.engine import EngineConfig
from specjax.engine.memory import Devices, Held, MemoryPlan, held_by, plan_memory
from specjax.gpu import Memory
from specjax.models.target import Target
from specjax.state import init_state

MB = 10**6
CONFIG = EngineConfig(max_running_requests=64, page_size=16, mem_fraction=0.5)


def with_width(width: int) -> Speculation:
    made = make_speculation(Ngram(capacity=1024))
    return made._replace(drafter=made.drafter._replace(width=width), explicit_width=False)


NGRAM = with_width(64)
TREES, LARGE_TREES = (with_width(nodes)._replace(explicit_width=True) for nodes in (64, 512))  # 64 in a batch

TOY = tiny_llama(5)
MODEL = replace(TOY.target.config, max_positions=8192)
TARGET, WIDE = (TOY.target._replace(config=replace(MODEL, vocab_size=size)) for size in (MODEL.vocab_size, 2000))
A_TOKEN = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 4
NGRAM_TOKEN = 6 * 4 // 16
PAGE_TABLES = 64 * 4 * 8192 // 16


def held(speculation: Speculation, target: Target) -> Held:
    params = Params(TOY.params)

    def state(pool: PoolShape):
        return jax.eval_shape(lambda: init_state(params, target, speculation.drafter, rows=64, pool=pool))

    return held_by(params, state, 16)


@pytest.fixture
def plan(monkeypatch):
    """A GPU of 200 MB. JAX has taken three quarters, and weights and pool may use half."""
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 150 * MB, "bytes_in_use": 20 * MB})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])

    def make(speculation: Speculation, target: Target = TARGET, **changes: int) -> MemoryPlan:
        config, devices = replace(CONFIG, **changes), Devices.of("gpu", None)
        return plan_memory(config, target, speculation, devices, held(speculation, target))

    return make


def test_terms_of_a_plan(plan):
    """The terms, the room of programs and the total agree. Arrays beside the weights are in use, too."""
    made = plan(NGRAM).checked()
    always, state = made.always, held(NGRAM, TARGET)
    assert (state.token, state.draft_token) == (A_TOKEN, NGRAM_TOKEN) and state.rows > 64 * MODEL.vocab_size
    assert always["weights"] == state.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(TOY.params))
    assert always["weights"] + always["draft_weights"] + always["other"] == 20 * MB
    assert made.pool.pages == (80 * MB // (A_TOKEN + NGRAM_TOKEN)) // 16
    assert always["pool"] == made.pool.pages * 16 * A_TOKEN and always["page_tables"] == PAGE_TABLES
    assert made.limit == 150 * MB and made.room == 150 * MB - sum(always.values()) >= made.temporaries
    assert made.total == sum(always.values()) + made.temporaries
    programs = {when: sum(term.bytes for term in made.terms if term.when == when) for when in ("step", "prefill")}
    assert made.temporaries == max(programs.values()) > min(programs.values()) > 0


def test_pool_leaves_room_for_temporaries(plan):
    """The largest program's temporaries need more than the half of the device that is not for weights and pool."""
    made, state = plan(TREES, WIDE).checked(), held(TREES, WIDE)
    assert made.temporaries > 2.5 * 64 * 64 * 2000 * 4 > 50 * MB
    tokens = (130 * MB - made.temporaries - state.rows - PAGE_TABLES) // (A_TOKEN + NGRAM_TOKEN)
    assert made.pool.pages == tokens // 16 < plan(NGRAM).pool.pages


FREE, LARGE = 100 * MB // A_TOKEN, 200 * MB // A_TOKEN


@pytest.mark.parametrize(
    ("speculation", "target", "tokens", "problem"),
    [
        (NGRAM, TARGET, FREE, None),
        (NGRAM, TARGET, LARGE, r"EngineConfig.max_total_tokens \d+ takes 0\.20 GB .*, but 0\.13 GB are free; give few"),
        (LARGE_TREES, WIDE, FREE, r"max_total_tokens \d+ takes 0\.10 GB .* 0\.\d+ GB, but 0\.13 GB are"),
        (
            LARGE_TREES, WIDE, None,
            r"no memory is left .* 0\.02 of 0\.20 GB .*mem_fraction 0\.5; .* program take 0\.\d+ GB; "
            r"give a higher fraction, .*\(64\).*\(512\)",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit(plan, speculation, target, tokens, problem):
    """A size that is given must leave the same room."""
    made = plan(speculation, target, max_total_tokens=tokens)
    if problem is None:
        assert made.checked().pool.pages == tokens // 16
        return
    assert made.pool.pages == 0
    with pytest.raises(ValueError, match=problem):
        made.checked()


def test_shared_memory():
    """On a CPU the pool has a fixed size, and only a plan with a limit can be too large."""
    state = Held(weights=3 * MB, draft_weights=0, token=A_TOKEN, draft_token=0, rows=MB)
    made = plan_memory(CONFIG, TARGET, NGRAM, Devices("cpu"), state)
    assert (made.problem, made.limit, made.room) == (None, None, None) and made.pool.pages == 32768 // 16
    small = plan_memory(CONFIG, TARGET, NGRAM, Devices("cpu", memory=Memory(10 * MB, 8 * MB, 0)), state)
    assert small.pool == made.pool and small.total > 8 * MB
    assert str(small.problem) == f"{small.total / 1e9:.2f} GB are needed and there are 0.01 GB"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, r"fewer max_running_requests \(64\)$"),
        ({"max_batch": 8}, r"fewer max_batch \(8\) or max_prefill_tokens \(2048\)$"),
        ({"max_running_requests": 1}, r"fewer max_prefill_tokens \(2048\)$"),
        ({"max_running_requests": 1, "max_prefill_tokens": 256}, "or smaller weights$"),
    ],
)
def test_advice_names_what_can_be_reduced(plan, changes, advice):
    with pytest.raises(ValueError, match=advice):
        plan(with_width(1), WIDE, max_total_tokens=LARGE, **changes).checked()
