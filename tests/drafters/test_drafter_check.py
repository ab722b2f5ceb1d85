"""`check_drafter`: its errors for drafters that violate the interface, and where it is called."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, toy
from oracle import Sampling
from test_toy_drafter import known_text, random_trees, replay
from toy_models import Runner, tiny_llama

from specjax import Drafter, DrafterError, Ngram, Params, chain, check_drafter, make_speculation
from specjax.cache import RowSpec, RowState
from specjax.drafters.base import put_rows
from specjax.engine import SamplingParams
from specjax.engine.generation import EngineError

REPLAY = replay(range(40))
PROMPT = [70, 71, 72]


def proposing(change: Callable[..., Any], base: Drafter = REPLAY) -> Drafter:
    """The drafter with what `propose` returns changed by ``change(tree, state, context)``."""
    return base._replace(propose=lambda params, state, context: change(*base.propose(params, state, context), context))


def observing(change: Callable[..., Any]) -> Drafter:
    return REPLAY._replace(observe=lambda params, state, context, seen: change(state, seen))


def branches(tree, state, context):
    if context.root[0] > 3:
        return tree, state
    return tree, state


PROPOSE, OBSERVE = "propose of drafter 'REPLAY\\+0' .*test_drafter_check.py:[0-9]+", "observe of drafter .*"
FAULTS = {
    "no state": (proposing(lambda tree, state, context: tree), f"{PROPOSE}.* must return .DraftTree, state.*DraftTree"),
    "nothing": (proposing(lambda tree, state, context: None), f"{PROPOSE}.* must return .* and returned None"),
    "state None": (proposing(lambda tree, state, context: (tree, None)), f"{PROPOSE}.* return the drafter's state"),
    "swapped": (proposing(lambda tree, state, context: (state, tree)), f"{PROPOSE}.* must return .DraftTree, state"),
    "python if": (proposing(branches), f"{PROPOSE}.* fails while it is traced: TracerBoolConversionError"),
    "float tokens": (
        proposing(lambda tree, state, context: (tree._replace(tokens=tree.tokens.astype(jnp.float32)), state)),
        f"{PROPOSE}.* the tree's tokens must be int32 .B, N., and are float32",
    ),
    "few scores": (
        proposing(lambda tree, state, context: (tree._replace(scores=tree.scores[:, 1:]), state)),
        f"{PROPOSE}.* the tree's scores are .B, N. = .*5.*width=6",
    ),
    "one request": (
        proposing(lambda tree, state, context: (jax.tree.map(lambda leaf: leaf[:1], tree), state)),
        f"{PROPOSE}.* tokens are .B, N. = .1, 6.; B is",
    ),
    "wide": (REPLAY._replace(width=9), "the tree's tokens are .B, N. = .*6.*declares width=9"),
    "too deep": (REPLAY._replace(depth=6), "declares width=6 and depth=6: a tree of 6 nodes"),
    "no depth": (REPLAY._replace(depth=0), "declares width=6 and depth=0: a tree of 6 nodes"),
    "float width": (REPLAY._replace(width=6.0), "width must be an integer of at least 1, got 6.0"),
    "state dtype": (
        proposing(lambda tree, state, context: (tree, state.astype(jnp.float32))),
        "returned state as float32 .64.; init made it int32",
    ),
    "state shape": (observing(lambda state, seen: state[1:]), f"{OBSERVE} returned state as int32 .63.; init made"),
    "observe nothing": (observing(lambda state, seen: None), f"{OBSERVE} must return the drafter's state"),
    "observe bug": (observing(lambda state, seen: state[seen.nothing]), f"{OBSERVE} fails .* AttributeError"),
    "init bug": (REPLAY._replace(init=lambda params, rows, pool: 1 // 0), "init of .* fails .* ZeroDivisionError"),
    "reads tokens": (
        proposing(lambda tree, state, context: (tree, state + context.suffix(2)[0, 0])),
        f"{PROPOSE}.* fails .* return Drafter.*reads_tokens=True",
    ),
    "features": (REPLAY._replace(features=(0, 7)), r"asks for features=\(0, 7\); the target has layers 0 to 0"),
    "layers": (REPLAY._replace(reads_layers=(0, 7)), r"reads_layers=\(0, 7\) must be a tuple of layers from 0 to 0"),
    "list of layers": (REPLAY._replace(reads_layers=[0]), r"reads_layers=\[0\] must be a tuple of layers from 0 to 0"),
    "reads layers": (
        proposing(lambda tree, state, context: (tree, state + context.layers[0].shape[0])),
        f"{PROPOSE}.* fails .* IndexError",
    ),
    "other features": (REPLAY._replace(features="last"), "asks for features='last'; .* 'final'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault):
    drafter, message = FAULTS[fault]
    with pytest.raises(DrafterError, match=message):
        check_drafter(drafter, toy().target, Params(toy().params))


def test_layers_without_pages():
    drafter, target = REPLAY._replace(reads_layers=(0,)), toy().target
    check_drafter(drafter, target, Params(toy().params))
    recurrent = target._replace(pages=(RowState(RowSpec((3,), "float32", (None,)), lambda *given: given[0]),))
    with pytest.raises(DrafterError, match=r"layer 0 of the target has no pages: it has a state for each request$"):
        check_drafter(drafter, recurrent, Params(toy().params))


class Entries(NamedTuple):
    """The last committed token's entry, as `observe` and `propose` read it; in `propose` before the step."""

    observed: jax.Array  # [R, K E]
    proposed: jax.Array


def test_entries_of_layers():
    """In `propose` those of committed tokens, in `observe` those of the observed ones, too; in any order of layers."""

    def entry(context, at):
        page = jnp.take_along_axis(context.page_table, at[:, None] // 4, axis=1)[:, 0]
        both = (layer.value.at[page, at % 4].get(mode="clip") for layer in context.layers)
        return jnp.concatenate([leaf.reshape(len(at), -1) for leaf in both], axis=1)

    def init(params, rows, pool):
        return Entries(*jnp.zeros((2, rows, 32), jnp.float32))

    def propose(params, state, context):
        rows = jnp.where(context.active, context.slots, state.proposed.shape[0])
        now = entry(context, jnp.maximum(context.prefix_length - 1, 0))
        tree, _ = REPLAY.propose(params, jnp.zeros(64, jnp.int32), context)
        return tree, state._replace(proposed=state.proposed.at[rows].set(now, mode="drop"))

    def observe(params, state, context, seen):
        now = entry(context, jnp.maximum(context.prefix_length + seen.length - 1, 0))
        return state._replace(observed=put_rows(state.observed, now, context, seen))

    model = tiny_llama()
    drafter = Drafter("ENTRIES", None, REPLAY.width, REPLAY.depth, init, propose, observe, reads_layers=(1, 0))
    check_drafter(drafter, model.target, Params(model.params), values=True)
    run = Runner(model, drafter, rows=2)
    run.generate([([5, 6, 7, 8, 9], Sampling(max_tokens=1)), ([3], Sampling(max_tokens=1))])
    lengths = np.array([5, 1])

    def values(row, at):
        leaves = [np.asarray(run.state.cache[layer].value)[run.table[row]] for layer in (1, 0)]
        return np.concatenate([leaf.reshape(48, -1)[at] for leaf in leaves])

    for _ in range(3):
        wanted = np.stack([values(row, lengths[row] - 1) for row in range(2)])
        np.testing.assert_array_equal(run.state.draft.observed, wanted)
        run.state = run.state._replace(finished=jnp.zeros(2, bool), rows=run.state.rows._replace(limit=jnp.full(2, 99)))
        lengths += run.step([True, True]).emitted[:2]
        np.testing.assert_array_equal(run.state.draft.proposed, wanted)


def test_faults_are_raised_before_anything_is_compiled(monkeypatch):
    (drafter, message), model = FAULTS["python if"], toy()
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args, **options: pytest.fail("it compiles"))
    for call in (
        lambda: check_drafter(drafter, model.target, Params(model.params)),
        lambda: make_engine(model, drafter, warm=False),
    ):
        with pytest.raises(DrafterError, match=message) as caught:
            call()
        cause = caught.value.__cause__
        assert isinstance(cause, jax.errors.TracerBoolConversionError)
        frames = traceback.extract_tb(cause.__traceback__)
        assert ("branches", "if context.root[0] > 3:") in [(frame.name, frame.line) for frame in frames]


def best_of_the_text(params, state, context):
    """Needs more tokens than a small pool holds."""
    best, _ = jax.lax.top_k(context.committed(jnp.arange(context.room, dtype=jnp.int32)[None]), 5 * 16)
    return chain(context.root, best[:, :5], 0 * context.root + 5, jnp.zeros((context.root.shape[0], 5))), state


GOOD = {
    "replay": REPLAY,
    "random trees": random_trees(range(40)),
    "none": make_speculation("NONE").drafter,
    "n-grams": make_speculation(Ngram()).drafter,
    "numbers of numpy": REPLAY._replace(width=np.int64(6), depth=np.int32(5)),
    "long texts": REPLAY._replace(reads_tokens=True, propose=best_of_the_text),
    "partial": REPLAY._replace(propose=functools.partial(REPLAY.propose)),
    "jitted": REPLAY._replace(propose=jax.jit(REPLAY.propose)),
}


@pytest.mark.parametrize("drafter", GOOD)
def test_valid_drafters(drafter):
    for model in (toy(), tiny_llama()):
        check_drafter(GOOD[drafter], model.target, Params(model.params), values=True)


def at(node: int, **fields: Any) -> Drafter:
    """REPLAY with these fields of a node of each tree."""

    def change(tree, state, context):
        return tree._replace(**{name: getattr(tree, name).at[:, node].set(fields[name]) for name in fields}), state

    return proposing(change)


LIES = {
    "root's parent": (at(0, parents=0), "node 0 must be the root with .tokens, parents, .*, and is .* in request 0"),
    "root's token": (at(0, tokens=7), r"node 0 must be the root .* and is \(7, -1, 0, True, 0.0\) in request"),
    "root's depth": (at(0, depth=1), "node 0 must be the root"),
    "root invalid": (at(0, valid=False), "node 0 must be the root"),
    "root's score": (at(0, scores=np.nan), r"node 0 must be the root .* nan\)"),
    "gap": (at(2, valid=False), r"valid nodes must come first, and are 0 and \[1, 3, 4, 5\].*a parent must be a valid"),
    "forward": (at(2, parents=4), "a parent must be a valid node before its child, got 4 at node 2 of request 0"),
    "itself": (at(2, parents=2), "a parent must be a valid node before its child, got 2 at node 2"),
    "beyond": (at(2, parents=99), "a parent must be a valid node before its child, got 99 at node 2"),
    "no parent": (at(2, parents=-1), "a parent must be a valid node before its child, got -1 at node 2"),
    "depth": (at(2, depth=1), "a depth must be its parent's plus 1, 2, and at most depth=5, got 1 at node 2"),
    "too deep": (at(5, depth=5)._replace(depth=4), "its parent's plus 1, 5, and at most depth=4, got 5 at node 5"),
    "token": (at(2, tokens=-1), "tokens must be from 0 to .*, got -1 at node 2"),
    "large token": (at(2, tokens=99999), "tokens must be from 0 to .*, got 99999 at node 2"),
    "scores": (at(2, scores=1.0), "scores must not grow along a path, got 1.0 at node 2 of request 0 below 0.0"),
    "no number": (at(2, scores=np.nan), "scores must not grow along a path, got nan at node 2"),
    "siblings": (
        proposing(lambda tree, state, context: (
            tree._replace(parents=tree.parents.at[:, 2].set(0), depth=tree.depth.at[:, 2].set(1),
                          tokens=tree.tokens.at[:, 2].set(tree.tokens[:, 1])), state)),
        "siblings must differ, and nodes 1 and 2 of request 0 are both",
    ),
    "no chain": (
        at(2, parents=0, depth=1)._replace(topk=1), "topk=1 declares chains, and the parent is 0 at node 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_values_of_trees(lie):
    (drafter, message), model = LIES[lie], toy()
    params = Params(model.params)
    check_drafter(drafter, model.target, params)
    with pytest.raises(DrafterError, match=f"{PROPOSE}.*{message}"):
        check_drafter(drafter, model.target, params, values=True)


def test_values_of_drafters_that_look_up_tokens():
    """The prompts hold what an n-gram finds, and the check sees trees with drafts."""
    model, ngrams = toy(), make_speculation(Ngram()).drafter

    def change(tree, state, context):
        return tree._replace(parents=jnp.where(tree.parents == 1, 7, tree.parents)), state

    with pytest.raises(DrafterError, match="a parent must be a valid node before its child, got 7"):
        check_drafter(proposing(change, ngrams), model.target, Params(model.params), values=True)


def test_engine_checks_its_own_batch_sizes():
    def change(tree, state, context):
        assert context.root.shape[0] != 4, "four"
        return tree, state

    check_drafter(proposing(change), toy().target, Params(toy().params))
    with pytest.raises(DrafterError, match="fails while it is traced: AssertionError: four"):
        make_engine(toy(), proposing(change), warm=False)


def test_declared_depth_that_is_too_small():
    """The text is right; deeper nodes are not accepted."""
    text = known_text(40)
    drafter = replay(text)

    def change(tree, state, context):
        return tree._replace(depth=tree.depth * jnp.minimum(1, 1 + state[0])), state

    engine = make_engine(toy(), proposing(change, drafter)._replace(depth=2), max_running_requests=1)
    params = SamplingParams(max_new_tokens=21)
    done = engine.generate(text[:4], params)
    assert done.output_ids == text[4:25]
    assert 1 < done.spec_accept_length <= 3


def test_drafter_with_parameters():
    def propose(params, state, context):
        tree, state = REPLAY.propose(params, state, context)
        return tree, state + params.draft["offset"]

    model, drafter = tiny_llama(), REPLAY._replace(propose=propose)
    check_drafter(drafter, model.target, Params(model.params, {"offset": jnp.int32(1)}))
    with pytest.raises(DrafterError, match="fails while it is traced: KeyError: 'offset'"):
        check_drafter(drafter, model.target, Params(model.params, {}))


def test_step_checks_a_drafter_with_parameters():

    def propose(params, state, context):
        tree, state = REPLAY.propose(params, state, context)
        return tree._replace(tokens=tree.tokens.astype(jnp.float32) + params.draft["bias"]), state

    runner = Runner(toy(), REPLAY._replace(propose=propose), rows=1, draft={"bias": jnp.float32(0)})
    with pytest.raises(DrafterError, match=r"the tree's tokens must be int32 .B, N., and are float32"):
        runner.generate([(PROMPT, Sampling(max_tokens=3))])


def test_target_without_features():
    toy_model = toy()
    forward = toy_model.target.forward
    target = toy_model.target._replace(forward=lambda *args, **options: forward(*args, **options | {"features": None}))
    engine = make_engine(toy_model._replace(target=target), REPLAY._replace(features="final"), warm=False)
    with pytest.raises(EngineError, match="asks for features='final', and the target's forward returned none"):
        engine.generate(PROMPT, SamplingParams(max_new_tokens=3))
