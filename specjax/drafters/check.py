"""Checks what a drafter declares, and shapes and dtypes of the results of its functions.

`check_drafter` runs before anything is compiled. Each step repeats the checks of results during its trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import PoolShape
from specjax.drafters.base import Context, Drafter, DraftState, Features, Observation, PageSize, Params
from specjax.models.target import Target
from specjax.sampling import sampling_row
from specjax.tree import DraftTree

BATCH, ROWS, TABLE, POOL = 3, 5, 17, PoolShape(pages=37, page_size=16)
"""Sizes of the traced shapes. All differ, to find swapped axes."""
CHUNK = 64  # tokens in a chunk of a prompt

TREE_DTYPES = {"tokens": "int32", "parents": "int32", "depth": "int32", "valid": "bool", "scores": "float32"}


class DrafterError(TypeError):
    """A drafter violates the interface of `specjax.Drafter`. The message states the fault, and file and line of the
    function; `__cause__` is the function's exception, if there is one."""


def check_drafter(drafter: Drafter, target: Target, params: Params, *, batch: int = BATCH) -> None:
    """Checks a drafter by tracing its three functions; nothing is computed.

    The checks cover the declared `width` and `depth`, the requested features, shapes and dtypes of the trees (int32
    tokens, parents and depth, bool valid, float32 scores, each [B, N]), and the state that `propose` and `observe`
    return.

    Args:
        drafter: the drafter.
        target: the model that it drafts for.
        params: parameters of both models, arrays or `jax.ShapeDtypeStruct`s.
        batch: B, number of requests in the traced shapes.

    Raises:
        DrafterError: the drafter violates the interface, or one of its functions fails while it is traced.
    """
    check_declared(drafter, target)

    def trace(what: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return jax.eval_shape(function, params, *args)
        except DrafterError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise DrafterError(
                f"{_name(drafter, what)} fails while it is traced: {type(error).__name__}: {reason}"
            ) from error

    state = trace("init", lambda params: drafter.init(params, ROWS, POOL))
    struct: Any = jax.ShapeDtypeStruct
    number, page_table = struct((batch,), np.int32), struct((batch, TABLE), np.int32)
    active, salt = struct((batch,), np.bool_), struct((batch,), np.uint32)
    rows = jax.tree.map(lambda leaf: struct((batch, *leaf.shape), leaf.dtype), sampling_row(target.config.vocab_size))
    tokens = struct(POOL, np.int32) if drafter.reads_tokens else None
    context = Context(number, number, page_table, number, active, salt, rows, tokens, PageSize(POOL.page_size))
    trace("propose", partial(checked_propose, drafter), state, context)
    size = feature_size(drafter.features, target)
    for width in sorted({drafter.depth + 1, CHUNK}):  # a path of a tree, and a chunk of a prompt
        block = struct((batch, width), np.int32)
        features = None if size is None else struct((batch, width, size), jnp.dtype(target.config.dtype))
        observation = Observation(block, block, features, number)
        trace("observe", partial(checked_observe, drafter), state, context, observation)


def check_custom(drafter: Drafter, target: Target, params: Params, batches: Iterable[int] = (BATCH,)) -> None:
    """`check_drafter` for each number of requests, unless the drafter is from this package, whose tests check it:
    tracing a draft head takes seconds."""
    propose = getattr(drafter, "propose", None)
    if not (getattr(_function(propose), "__module__", None) or "").startswith("specjax."):
        for batch in batches:
            check_drafter(drafter, target, params, batch=batch)


def _function(value: Any) -> Any:
    """Unwraps partials and decorated functions."""
    while isinstance(value, partial):
        value = value.func
    return inspect.unwrap(value)


def checked_propose(
    drafter: Drafter, params: Params, state: DraftState, context: Context
) -> tuple[DraftTree, DraftState]:
    """Calls `drafter.propose`. Raises DrafterError unless the shapes and dtypes of its results are as declared."""
    name, result = _name(drafter, "propose"), drafter.propose(params, state, context)
    if isinstance(result, DraftTree) or not isinstance(result, tuple) or len(result) != 2:
        raise DrafterError(f"{name} must return (DraftTree, state), and returned {_kind(result)}")
    tree, after = result
    if not isinstance(tree, DraftTree):
        raise DrafterError(f"{name} must return (DraftTree, state), and the first is {_kind(tree)}")
    batch = context.root.shape[0]
    for field, dtype in TREE_DTYPES.items():
        leaf = getattr(tree, field)
        if leaf is None or str(jnp.result_type(leaf)) != dtype or len(jnp.shape(leaf)) != 2:
            raise DrafterError(f"{name}: the tree's {field} must be {dtype} [B, N], and are {_array(leaf)}")
        if jnp.shape(leaf) != (batch, drafter.width):
            raise DrafterError(
                f"{name}: the tree's {field} are [B, N] = {list(jnp.shape(leaf))}; B is {batch} here, and the drafter "
                f"declares width={drafter.width} nodes, including the root"
            )
    _check_state(name, state, after)
    return tree, after


def checked_observe(
    drafter: Drafter, params: Params, state: DraftState, context: Context, observation: Observation
) -> DraftState:
    """Calls `drafter.observe`. Raises DrafterError unless the new state has the shapes and dtypes of the old one."""
    if drafter.features is not None and observation.features is None:
        raise DrafterError(
            f"drafter {drafter.name!r} asks for features={drafter.features!r}, and the target's forward returned none"
        )
    after = drafter.observe(params, state, context, observation)
    _check_state(_name(drafter, "observe"), state, after)
    return after


def feature_size(features: Features, target: Target) -> int | None:
    """F, number of features of each token that a drafter reads; None: no features."""
    if features is None:
        return None
    return target.config.hidden_size * (1 if features == "final" else len(features))


def check_declared(drafter: Drafter, target: Target) -> None:
    """Checks the static facts of a drafter. Raises DrafterError."""
    if not isinstance(drafter, Drafter):
        raise DrafterError(f"drafter must be a specjax.Drafter, got {_kind(drafter)}")
    name, layers = f"drafter {drafter.name!r}", target.config.num_layers
    for field, minimum in (("width", 1), ("depth", 0)):
        value = getattr(drafter, field)
        if not _is_integer(value) or value < minimum:
            raise DrafterError(f"{name}: {field} must be an integer of at least {minimum}, got {value!r}")
    if not (drafter.depth < drafter.width and (drafter.depth or drafter.width == 1)):
        raise DrafterError(
            f"{name} declares width={drafter.width} and depth={drafter.depth}: a tree of {drafter.width} nodes, "
            f"including the root of depth 0, has a depth from {min(1, drafter.width - 1)} to {drafter.width - 1}"
        )
    if not all(_is_integer(width) and 1 <= width <= drafter.width for width in drafter.widths):
        raise DrafterError(f"{name}: widths must be integers from 1 to width={drafter.width}, got {drafter.widths!r}")
    features = drafter.features
    if features is None or features == "final":
        return
    listed = isinstance(features, tuple) and len(features) > 0
    if not listed or not all(_is_integer(layer) and 0 <= layer < layers for layer in features):
        raise DrafterError(
            f"{name} asks for features={features!r}; the target has layers 0 to {layers - 1}: give a tuple of layers, "
            "'final' for the last hidden state, or None"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_state(name: str, before: DraftState, after: DraftState) -> None:
    if after is None and before is not None:
        raise DrafterError(f"{name} must return the drafter's state, and returned None")
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise DrafterError(
            f"{name} returned a state with the structure {jax.tree.structure(after)}; init made it "
            f"{jax.tree.structure(before)}"
        )
    paths, _ = jax.tree_util.tree_flatten_with_path(before)
    for (path, old), new in zip(paths, jax.tree.leaves(after), strict=True):
        if _array(old) != _array(new):
            where = f"state{jax.tree_util.keystr(path)}"
            raise DrafterError(f"{name} returned {where} as {_array(new)}; init made it {_array(old)}")


def _name(drafter: Drafter, what: str) -> str:
    """A function's name with its file and line, for errors."""
    code = getattr(_function(getattr(drafter, what)), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{what} of drafter {drafter.name!r}{where}"


def _kind(value: Any) -> str:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _array(value: Any) -> str:
    try:
        return f"{jnp.result_type(value)} {list(jnp.shape(value))}"
    except TypeError:
        return _kind(value)
