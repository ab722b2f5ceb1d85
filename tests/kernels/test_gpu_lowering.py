"""The draft loop, lowered for a GPU, needs no decision of the host."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp

from specjax import ModelConfig, Params, PoolShape, RopeConfig, StepInput, init_state, make_speculation
from specjax.config import HeadConfig
from specjax.drafters import options_of
from specjax.models import init_params, make_target
from specjax.models.draft_head import init_head_params
from specjax.step import StepConfig, check_phase, commit_phase, draft_phase, speculate_step

ROWS, BATCH, TABLE, POOL = 2, 2, 4, PoolShape(pages=4096, page_size=4)
TREE = {"steps": 3, "topk": 2, "nodes": 6}
ASKS_THE_HOST = re.compile(r"callback|infeed|outfeed|stablehlo\.send|stablehlo\.recv|host", re.IGNORECASE)
CONSTANT = re.compile(r"(%\w+) = stablehlo\.constant")
BRANCH = re.compile(r'(?:(%\w+)(?::\d+)? = )?"stablehlo\.(case|if)"\((%\w+)\)')


def decisions(text: str) -> list[str]:
    """Loops and branches that the host may decide between two kernels. XLA removes branches on constants, such as the
    platform, before it compiles."""
    constants, decided = set(CONSTANT.findall(text)), re.findall(r"stablehlo\.while", text)
    for result, kind, operand in BRANCH.findall(text):
        if operand in constants:
            constants.add(result)
        else:
            decided.append(f"stablehlo.{kind}")
    return decided


def phases():
    """Phases of a step and the shapes of their arguments."""
    config = ModelConfig("llama", 31, 16, 24, 2, 4, 2, 8, 1e-5, RopeConfig(), 256, tied_embeddings=False)
    target = make_target(config)
    head = HeadConfig("eagle3", 16, 32, 24, 4, 2, 8, 1e-5, RopeConfig(), vocab_size=11, aux_layers=(0, 1),
                      own_head=True, mapped=True)  # fmt: skip
    drafter = make_speculation(options_of("EAGLE3", **TREE), target=target, head=head).drafter

    def init() -> Params:
        return Params(init_params(config, jax.random.key(0)), init_head_params(head, target, jax.random.key(1)))

    params = jax.eval_shape(init)
    state = jax.eval_shape(partial(init_state, target=target, drafter=drafter, rows=ROWS, pool=POOL), params)
    shapes = (((BATCH,), jnp.int32), ((BATCH, TABLE), jnp.int32), ((BATCH,), jnp.bool_))
    inputs = StepInput(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    fixed = {"drafter": drafter, "config": StepConfig()}
    draft = partial(draft_phase, **fixed)
    check = partial(check_phase, target=target, **fixed)
    tree, _ = jax.eval_shape(draft, params, state, inputs)
    checked = jax.eval_shape(check, params, state, inputs, tree)
    return {
        "draft": (draft, (params, state, inputs)),
        "check": (check, (params, state, inputs, tree)),
        "commit": (partial(commit_phase, **fixed), (params, state, inputs, tree, checked)),
        "step": (partial(speculate_step, target=target, **fixed), (params, state, inputs)),
    }


def for_gpu(function, arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_the_draft_loop_runs_without_the_host():
    """Drafting and committing have no loop and no branch, and no part of the step transfers data to the host."""
    parts = phases()
    for name in ("draft", "commit"):
        text = for_gpu(*parts[name])
        assert "stablehlo.dot_general" in text, "the head's forward"
        assert not decisions(text), name
        assert not ASKS_THE_HOST.findall(text), name
    # Sampling has loops and branches, so they are recognised.
    text = for_gpu(*parts["step"])
    assert set(decisions(text)) >= {"stablehlo.while", "stablehlo.case"}
    assert not ASKS_THE_HOST.findall(text)
    assert text.count("stablehlo.while") == for_gpu(*parts["check"]).count("stablehlo.while")
