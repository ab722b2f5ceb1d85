"""Rows of a drafter's state begin with each request as `init` made them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, toy

from specjax import Drafter, PoolShape, SamplingParams, chain
from specjax.drafters.base import Params, have_rows, put_rows, take_rows

ROWS, START, DEPTH = 2, 7, 2


def counter() -> Drafter:
    """Drafts the root again. The state counts, for each request, steps and chunks of a prompt from `START` on."""

    def init(params, rows, pool):
        return {
            "steps": jnp.full(rows, START, jnp.int32),
            "chunks": jnp.full((rows, 2), START, jnp.int32),
            "names": jnp.arange(rows, dtype=jnp.float32),  # differs by row
            "pages": jnp.zeros((pool.pages, 1), jnp.int32),
            "total": jnp.zeros((), jnp.int32),
        }

    def propose(params, state, context):
        tokens = jnp.broadcast_to(context.root[:, None], (context.root.shape[0], DEPTH))
        length = jnp.where(context.active, DEPTH, 0)
        return chain(context.root, tokens, length, jnp.zeros(tokens.shape, jnp.float32)), state

    def observe(params, state, context, seen):
        name = "chunks" if context.in_prompt else "steps"
        rows = put_rows(state[name], take_rows(state[name], context) + 1, context, seen)
        names = put_rows(state["names"], take_rows(state["names"], context) + 100, context, seen)
        return state | {name: rows, "names": names, "total": state["total"] + 1}

    return Drafter("COUNTER", None, DEPTH + 1, DEPTH, init, propose, observe)


def state_of(engine) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, engine.state.draft)


def test_which_leaves_have_rows():
    found = have_rows(counter(), Params(None), PoolShape(4, 4))
    shapes = dict(zip(("chunks", "names", "pages", "steps", "total"), found, strict=True))
    assert shapes == {"chunks": True, "names": True, "pages": False, "steps": True, "total": False}


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"prefix_cache": False}], ids=str)
def test_each_request_finds_the_initial_state(options):
    """Also one that starts with another's pages."""
    engine = make_engine(toy(), counter(), max_running_requests=ROWS, **options)
    total, row, prompt = 0, 0, "hello hello hello hello"
    for count in (12, 5, 9):  # the same prompt: its pages are in the prefix cache
        done = engine.generate(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        state = state_of(engine)
        chunks = state["chunks"][row] - START
        assert state["steps"][row] - START == done.spec_verify_ct
        assert (chunks > 0).all() and state["names"][row] == row + 100 * (done.spec_verify_ct + chunks[0])
        assert (state["steps"][1 - row], state["names"][1 - row]) == (START, 1 - row)
        total += done.spec_verify_ct + int(chunks[0])
        assert state["total"] >= total, "leaves without rows stay"


def test_state_of_requests_that_are_retracted_begins_again():
    engine = make_engine(toy(), counter(), max_running_requests=ROWS, retract_every=5)
    prompts, params = ["hello", "world hello"], SamplingParams(max_new_tokens=40, ignore_eos=True)
    done = engine.generate(prompts, [params] * 2)
    assert engine.scheduler.retractions > 0
    plain = make_engine(toy(), "NONE").generate(prompts, [params] * 2)
    assert [each.output_ids for each in done] == [each.output_ids for each in plain]
    steps, whole = state_of(engine)["steps"] - START, np.array([each.spec_verify_ct for each in done])
    assert ((steps >= 0) & (steps <= whole)).all() and (steps < whole).any()
