"""Checks what a drafter declares, shapes and dtypes of the results of its functions, and the values of its trees.

`check_drafter` runs before anything is compiled. Each step repeats the checks of results during its trace. A step does
not check values: nodes that cannot be verified are left out of the tree, which costs acceptance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from specjax_kernels import CAUSAL

from specjax.cache import PoolShape, RowMoves, commit, init_cache, read_rows, row_states
from specjax.drafters.base import Context, Drafter, DraftState, Features, Observation, PageSize, Params
from specjax.models.target import Target
from specjax.sampling import sampling_row
from specjax.tree import NO_PARENT, DraftTree

BATCH, ROWS, TABLE, POOL = 3, 5, 17, PoolShape(pages=37, page_size=16)
"""Sizes of the traced shapes. All differ, to find swapped axes."""
CHUNK = 64  # tokens in a chunk of a prompt

TREE_DTYPES = {"tokens": "int32", "parents": "int32", "depth": "int32", "valid": "bool", "scores": "float32"}


class DrafterError(TypeError):
    """A drafter violates the interface of `specjax.Drafter`. The message states the fault, and file and line of the
    function; `__cause__` is the function's exception, if there is one."""


def check_drafter(
    drafter: Drafter, target: Target, params: Params, *, batch: int = BATCH, values: bool = False
) -> None:
    """Checks a drafter by tracing its three functions; nothing is computed, except with `values`.

    The checks cover the declared `width` and `depth`, the requested features, shapes and dtypes of the trees (int32
    tokens, parents and depth, bool valid, float32 scores, each [B, N]), and the state that `propose` and `observe`
    return.

    Args:
        drafter: the drafter.
        target: the model that it drafts for.
        params: parameters of both models, arrays or, without `values`, `jax.ShapeDtypeStruct`s.
        batch: B, number of requests in the traced shapes.
        values: also run one step: `observe` prompts in which a few tokens repeat, `propose`, and check the trees. A
            step of the engine leaves out the nodes that this check names.

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
    pages = [target.pages[layer] for layer in drafter.reads_layers]
    context = Context(
        number, number, page_table, number, active, salt, rows, tokens, PageSize(POOL.page_size),
        layers=tuple(jax.eval_shape(partial(init_cache, pages, POOL))),
    )  # fmt: skip
    trace("propose", partial(checked_propose, drafter), state, context)
    size = feature_size(drafter.features, target)
    for width in sorted({drafter.depth + 1, CHUNK}):  # a path of a tree, and a chunk of a prompt
        block = struct((batch, width), np.int32)
        features = None if size is None else struct((batch, width, size), jnp.dtype(target.config.dtype))
        observation = Observation(block, block, features, number)
        trace("observe", partial(checked_observe, drafter), state, context, observation)
    if values:
        faults = dict[str, str]()  # the first of each kind
        for kind, text in _faults(drafter, target, *_proposed(drafter, target, params)):
            faults.setdefault(kind, text)
        if faults:
            raise DrafterError(f"{_name(drafter, 'propose')}: " + "; ".join(faults.values()))


def _proposed(drafter: Drafter, target: Target, params: Params) -> tuple[DraftTree, np.ndarray]:
    """The drafter's trees for `BATCH` prompts, and the prompts' last tokens, which are the roots."""
    vocab, rng = target.config.vocab_size, np.random.default_rng(0)
    after = int(drafter.depth) + 1  # may be numpy's
    length = min(CHUNK, target.config.max_positions - after)
    words = rng.integers(0, vocab, (BATCH, 5), np.int32)
    prompts = np.tile(words, length)[:, : length + 1]
    table = -(-(length + after) // POOL.page_size)
    pool = PoolShape(BATCH * table, POOL.page_size)
    batch = jnp.arange(BATCH, dtype=jnp.int32)
    pages = jnp.arange(pool.pages, dtype=jnp.int32).reshape(BATCH, table)
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (BATCH, *leaf.shape)), sampling_row(vocab))

    def context(prefix_length: int, root: np.ndarray, tokens: Any, cache: Any) -> Context:
        lengths = jnp.full(BATCH, prefix_length, jnp.int32)
        active, salt = jnp.ones(BATCH, bool), jnp.zeros(BATCH, jnp.uint32)
        return Context(
            batch, lengths, pages, jnp.asarray(root), active, salt, rows, tokens, PageSize(pool.page_size),
            layers=tuple(cache[layer] for layer in drafter.reads_layers),
        )  # fmt: skip

    @jax.jit
    def run(params: Params) -> DraftTree:
        tokens, following = jnp.asarray(prompts[:, :-1]), jnp.asarray(prompts[:, 1:])
        text = jnp.zeros(pool, jnp.int32) if drafter.reads_tokens else None
        cache = init_cache(target.pages, pool, BATCH)
        start, moves = context(0, prompts[:, 0], text, cache), RowMoves(batch, batch)
        embedded = target.embed(params.target, tokens)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        past = read_rows(cache, moves, start.prefix_length), pages, start.attended
        output = target.forward(params.target, embedded, positions, CAUSAL, *past, features=drafter.features)
        lengths = jnp.full(BATCH, length, jnp.int32)
        blocks = output.block, None if text is None else tokens
        where = pages, start.prefix_length, lengths
        cache, text = commit((cache, text), blocks, *where, after=tokens, rows=moves)
        start = context(0, prompts[:, 0], text, cache)
        seen = Observation(tokens, following, output.features, lengths)
        state = checked_observe(drafter, params, drafter.init(params, BATCH, pool), start, seen)
        return checked_propose(drafter, params, state, context(length, prompts[:, -1], text, cache))[0]

    return jax.tree.map(np.asarray, run(params)), prompts[:, -1]


def _faults(drafter: Drafter, target: Target, trees: DraftTree, roots: np.ndarray) -> Iterator[tuple[str, str]]:
    """Yields the kind and the description of each fault of a tree."""
    for row, root in enumerate(roots):
        tree: Any = DraftTree(*cast(Any, (field[row].tolist() for field in trees)))
        first = tuple(field[0] for field in tree)
        if first != (wanted := (int(root), NO_PARENT, 0, True, 0.0)):
            names = ", ".join(TREE_DTYPES)
            yield "root", f"node 0 must be the root with ({names}) = {wanted}, and is {first} in request {row}"
        valid = [node for node in range(1, drafter.width) if tree.valid[node]]
        if valid != [*range(1, len(valid) + 1)]:
            yield "order", f"valid nodes must come first, and are 0 and {valid} in request {row}"
        siblings = dict[tuple[int, int], int]()
        for node in valid:
            token, parent, depth, score = tree.tokens[node], tree.parents[node], tree.depth[node], tree.scores[node]
            here = f"at node {node} of request {row}"
            if not 0 <= token < target.config.vocab_size:
                yield "token", f"tokens must be from 0 to {target.config.vocab_size - 1}, got {token} {here}"
            if not 0 <= parent < node or not (parent == 0 or tree.valid[parent]):
                yield "parent", f"a parent must be a valid node before its child, got {parent} {here}"
                continue
            above = tree.depth[parent] if parent else 0
            if depth != above + 1 or depth > drafter.depth:
                wanted = f"its parent's plus 1, {above + 1}, and at most depth={drafter.depth}"
                yield "depth", f"a depth must be {wanted}, got {depth} {here}"
            if (twin := siblings.setdefault((parent, token), node)) != node:
                yield "sibling", f"siblings must differ, and nodes {twin} and {node} of request {row} are both {token}"
            if not score <= (tree.scores[parent] if parent else 0.0):
                yield "score", f"scores must not grow along a path, got {score} {here} below {tree.scores[parent]}"
            if drafter.topk == 1 and parent != node - 1:
                yield "chain", f"topk=1 declares chains, and the parent is {parent} {here}"


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
    features, pages = drafter.features, drafter.reads_layers

    def listed(value: object) -> bool:
        return isinstance(value, tuple) and all(_is_integer(layer) and 0 <= layer < layers for layer in value)

    if features not in (None, "final") and not (features and listed(features)):
        raise DrafterError(
            f"{name} asks for features={features!r}; the target has layers 0 to {layers - 1}: give a tuple of layers, "
            "'final' for the last hidden state, or None"
        )
    if not listed(pages):
        raise DrafterError(f"{name}: reads_layers={pages!r} must be a tuple of layers from 0 to {layers - 1}")
    for layer in pages:
        owner, specs = target.config.owner(layer), target.pages[layer]
        if row_states(specs) or not jax.tree.leaves(specs):
            reason = f"it reads those of layer {owner}" if owner != layer else "it has a state for each request"
            raise DrafterError(f"{name}: reads_layers={pages!r}; layer {layer} of the target has no pages: {reason}")


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
