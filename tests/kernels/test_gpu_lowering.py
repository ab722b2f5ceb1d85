"""What a GPU is asked to do, read from programs that are lowered for one without having it: nothing in the draft loop
needs the host. And the draft's pages, like the target's, are updated where they lie."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from specjax import ModelConfig, Params, PoolShape, RopeConfig, StepInput, init_state, make_drafter
from specjax.config import HeadConfig
from specjax.drafters.options import options_of
from specjax.models import init_params, make_target
from specjax.models.draft_head import init_head_params
from specjax.step import StepConfig, check_phase, commit_phase, draft_phase, speculate_step, tree_widths

ROWS, BATCH, TABLE, POOL = 2, 2, 4, PoolShape(pages=4096, page_size=4)
TREES = {"tree": (3, 2, 6), "chain": (3, 1, 4)}
ASKS_THE_HOST = re.compile(r"callback|infeed|outfeed|stablehlo\.send|stablehlo\.recv|host", re.IGNORECASE)
CONSTANT = re.compile(r"(%\w+) = stablehlo\.constant")
BRANCH = re.compile(r'(?:(%\w+)(?::\d+)? = )?"stablehlo\.(case|if)"\((%\w+)\)')


def decisions(text: str) -> list[str]:
    """What a GPU's host may have to decide between two kernels: loops, and branches on what is computed. A branch on a
    constant (which platform is this?) is gone before anything is compiled."""
    known, found = set(CONSTANT.findall(text)), re.findall(r"stablehlo\.while", text)
    for result, kind, operand in BRANCH.findall(text):
        if operand in known:
            known.add(result)
        else:
            found.append(f"stablehlo.{kind}")
    return found


def tiny(kind: str, shape: str):
    """A target, a drafter, their jitted phases and the shapes of what they are called with: no weights are made."""
    config = ModelConfig("llama", 31, 16, 24, 2, 4, 2, 8, 1e-5, RopeConfig(), 256, tied_embeddings=False)
    target = make_target(config)
    third = {"vocab_size": 11, "aux_layers": (0, 1), "own_head": True, "mapped": True}
    feature, changes = (32, third) if kind == "eagle3" else (16, {"vocab_size": 31})
    head = HeadConfig(kind, 16, feature, 24, 4, 2, 8, 1e-5, RopeConfig(), **changes)
    names = ("steps", "topk", "nodes")
    options = options_of(kind.upper(), **dict(zip(names, TREES[shape], strict=True)))
    drafter = make_drafter(options, target=target, head=head)

    def init() -> Params:
        return Params(init_params(config, jax.random.key(0)), init_head_params(head, target, jax.random.key(1)))

    params = jax.eval_shape(init)
    state = jax.eval_shape(partial(init_state, target=target, drafter=drafter, rows=ROWS, pool=POOL), params)
    shapes = (((BATCH,), jnp.int32), ((BATCH, TABLE), jnp.int32), ((BATCH,), jnp.bool_))
    inputs = StepInput(*(jax.ShapeDtypeStruct(*each) for each in shapes))
    fixed = {"drafter": drafter, "config": StepConfig(tree_widths(drafter))}
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


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
@pytest.mark.parametrize("shape", TREES)
def test_the_draft_loop_runs_without_the_host(kind, shape):
    """Neither drafting nor committing has a loop or a branch, so no compiler can make the host decide one; and no part
    of the step hands anything to the host."""
    phases = tiny(kind, shape)
    for name in ("draft", "commit"):
        text = for_gpu(*phases[name])
        assert "stablehlo.dot_general" in text, "the head's forward is in here"
        assert not decisions(text), name
        assert not ASKS_THE_HOST.findall(text), name
    # The check that this would be seen: sampling has loops and branches.
    text = for_gpu(*phases["step"])
    assert set(decisions(text)) >= {"stablehlo.while", "stablehlo.case"}
    assert not ASKS_THE_HOST.findall(text)
    assert text.count("stablehlo.while") == for_gpu(*phases["check"]).count("stablehlo.while")


@pytest.mark.optimized
def test_both_pools_are_updated_where_they_lie():
    """On the CPU, whose compiler copies a pool when a write could come before a read."""
    function, arguments = tiny("eagle3", "tree")["step"]
    state = arguments[1]
    step = jax.jit(function, donate_argnums=1).lower(*arguments).compile()

    def nbytes(tree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    memory = step.memory_analysis()
    smallest = nbytes(state.draft.cache)
    print(f"aliased {memory.alias_size_in_bytes}, temporary {memory.temp_size_in_bytes}, draft pool {smallest}")
    assert memory.alias_size_in_bytes >= nbytes(state)
    assert memory.temp_size_in_bytes < smallest
