"""The state on the device, the launch of programs, and the arrays that host and device exchange.

Each array that is sent costs a copy, and page tables hardly change between steps. So the device keeps all page tables,
[R, T], a step's input has only new pages, and inputs and outputs are packed in one array each, int32 or bytes:

    step        [B, 2 + K]           slot, number of pages that the device has, K new pages (NO_PAGE: none)
    prefill     [B, 6 + C + T']      slot, length, next token, three numbers of `RowMoves`, C tokens, all T' <= T pages
    admission   bytes                slot, the fields of a `Row`
    output      [B, 2 + 2 J]         of a step or a prefill: emitted, finish, J tokens and the ranks of their nodes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32, UInt8

from specjax.drafters.base import Params
from specjax.engine.plan import Key
from specjax.engine.sequence import Sequence
from specjax.logprobs import Logprobs
from specjax.state import (
    NO_DRAFT_LIMIT,
    NO_FORCED_TOKEN,
    DecodeState,
    PrefillInput,
    Row,
    StepInput,
    StepOutput,
    Trace,
    admit_row,
    new_row,
)

NO_PAGE = -1

# Input


class Resident(NamedTuple):
    """State that stays on the device between programs."""

    decode: DecodeState
    tables: Int32[Array, "R T"]  # page tables of the rows; holes are P


def step_input(sequences: list[Sequence], batch: int, new_pages: int, rows: int) -> np.ndarray:
    """Input of a decode step, int32 [batch, 2 + new_pages], for a bucket of `batch` entries.

    Empty entries get slots from R = `rows` on. New pages are counted as sent.
    """
    packed = np.full((batch, 2 + new_pages), NO_PAGE, np.int32)
    packed[:, 0] = range(rows, rows + batch)
    for i, slot in enumerate(sequence.active_slot for sequence in sequences):
        packed[i, 0] = slot.index
        if new := slot.pages[slot.placed :]:
            packed[i, 1] = slot.placed
            packed[i, 2 : 2 + len(new)] = new
            slot.placed = len(slot.pages)
    return packed


def unpack_step(packed: Int32[Array, "B X"], tables: Int32[Array, "R T"], width: int, pages: int) -> Any:
    """Returns the `StepInput` with page tables of `width`, and the tables of all rows with the new pages."""
    slots, placed, new = packed[:, 0], packed[:, 1], packed[:, 2:]
    rows, size = tables.shape
    ahead = jnp.arange(new.shape[1], dtype=jnp.int32)
    columns = jnp.where(new == NO_PAGE, size, placed[:, None]) + ahead[None]  # from T on: distinct, and dropped
    tables = tables.at[slots[:, None], columns].set(new, mode="drop", unique_indices=True)
    active = slots < rows
    page_table = jnp.where(active[:, None], tables[jnp.minimum(slots, rows - 1), :width], pages)
    return StepInput(slots, page_table, active), tables


PREFILL_NUMBERS = 6  # of a row: slot, tokens, next token; source, snapshot and its length of `PrefillInput`


def prefill_input(
    key: Key, sequences: list[Sequence], chunks: Iterable[tuple[int, tuple[int, int, int]]], rows: int, pages: int
) -> np.ndarray:
    """Input of a prefill of the next chunk of each sequence's context, int32 [B, PREFILL_NUMBERS + C + T'].

    The last chunk of a context draws a token unless the next token is known. Empty entries get slots from R = `rows`
    on. `pages` is P; `chunks` are the tokens of each chunk, and its `Scheduler.snapshot`.
    """
    first, width = PREFILL_NUMBERS, key.width
    packed = np.zeros((key.rows, first + width + key.table), np.int32)
    packed[:, 0] = range(rows, rows + key.rows)
    packed[:, 4] = -1  # no snapshot
    packed[:, first + width :] = pages
    for i, (sequence, (length, snapshot)) in enumerate(zip(sequences, chunks, strict=True)):
        context, slot = sequence.context, sequence.active_slot
        end = slot.length + length
        after = context[end] if end < len(context) else sequence.forced_token
        packed[i, :3] = slot.index, length, NO_FORCED_TOKEN if after is None else after
        packed[i, 3:first] = snapshot
        packed[i, first : first + length] = context[slot.length : end]
        packed[i, first + width : first + width + len(slot.pages)] = slot.pages
        slot.placed = len(slot.pages)
    return packed


def unpack_prefill(packed: Int32[Array, "B X"], tables: Int32[Array, "R T"], width: int, pages: int) -> Any:
    """Returns the `PrefillInput` with page tables of `width`, and the tables of all rows with these."""
    slots, length, after, *states = (packed[:, i] for i in range(PREFILL_NUMBERS))
    tokens, page_table = packed[:, PREFILL_NUMBERS:-width], packed[:, -width:]
    whole = jnp.pad(page_table, ((0, 0), (0, tables.shape[1] - width)), constant_values=pages)
    active = slots < tables.shape[0]
    tables = tables.at[slots].set(whole, mode="drop", unique_indices=True)
    return PrefillInput(slots, page_table, active, tokens, length, after, *states), tables


def admission(sequence: Sequence, vocab_size: int, drafts: List[np.ndarray]) -> np.ndarray:
    """A sequence's slot and its row of the state, as bytes. Penalties count the output of a resumed sequence.

    Args:
        drafts: [R, ...] leaves of the drafter's state that have a row for each request, as `Drafter.init` makes them.
    """
    params = sequence.params
    same = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    limit = NO_DRAFT_LIMIT if params.draft_limit is None else params.draft_limit
    row = new_row(
        vocab_size,
        limit=sequence.limit,
        prompt=sequence.prompt,
        output=sequence.output.tokens,
        draft_limit=limit if sequence.drafts and params.speculate else 0,
        logprobs=params.logprobs is not None,
        logprob_ids=params.logprob_ids,
        salt=sequence.salt,
        prefix_length=sequence.active_slot.length,
        top_k=min(params.top_k, vocab_size),
        min_tokens=params.min_new_tokens,
        stop_ids=sequence.device_stops,
        seed=sequence.seed,
        logit_bias=dict(params.logit_bias),
        **{name: getattr(params, name) for name in same},
    )
    slot = sequence.active_slot.index
    leaves = np.int32(slot), *jax.tree.leaves(row), *(leaf[slot] for leaf in drafts)
    return np.concatenate([np.ravel(leaf).view(np.uint8) for leaf in leaves])


def admission_size(rows: Row, drafts: List[Any]) -> int:
    """Number of bytes of an `admission`. Arguments: shapes of the rows of the state and of its drafter's state."""
    return 4 + sum(prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves((rows, drafts)))


def admit_packed(
    rows: Row, finished: Bool[Array, "R"], drafts: list[Array], packed: UInt8[Array, "X"]
) -> tuple[Row, Bool[Array, "R"], list[Array]]:
    """`specjax.state.admit_row` of an `admission`, which also sets the request's row of the drafter's state."""
    at = 0

    def read(shape: tuple[int, ...], dtype: Any) -> Array:
        nonlocal at
        size = np.dtype(dtype).itemsize
        part = packed[at : (at := at + prod(shape) * size)]
        if dtype == np.bool_:
            return part.reshape(shape) != 0
        return jax.lax.bitcast_convert_type(part.reshape(*shape, size), dtype)

    slot = read((), np.int32)
    row, fresh = jax.tree.map(lambda leaf: read(leaf.shape[1:], leaf.dtype), (rows, drafts))
    drafts = [leaf.at[slot].set(values) for leaf, values in zip(drafts, fresh, strict=True)]
    return *admit_row(rows, finished, slot, row), drafts


# Output


class Output(NamedTuple):
    """Output of a step or a prefill, on the device. Every step copies `packed`; other fields are copied on request."""

    packed: Array  # [B, 2 + 2 J] int32: emitted, finish, tokens, ranks
    logprobs: Logprobs | None = None
    trace: Trace | None = None
    prompt: Logprobs | None = None  # of a prefill's C tokens, if the program computes them


def packed(
    function: Callable[..., tuple[DecodeState, StepOutput]], *arguments: Any, **fixed: Any
) -> tuple[DecodeState, Output]:
    """Traces a step or a prefill, and packs its output."""
    state, output = function(*arguments, **fixed)
    numbers = [output.emitted[:, None], output.finish[:, None], output.tokens, output.ranks]
    return state, Output(jnp.concatenate(numbers, axis=1), output.logprobs, output.trace, output.prompt)


class Read(NamedTuple):
    """A step's output on the host."""

    tokens: list[list[int]]  # [B][emitted]
    finish: list[int]  # [B]
    ranks: list[list[int]]  # of the accepted drafts, [B][emitted - 1]; see `specjax.tree.ranks`
    logprobs: Logprobs | None  # of numpy arrays


def read_output(device: Device, output: Output, *, logprobs: bool) -> Read:
    """Waits for a step and copies its output to the host, the log-probabilities only on request."""
    packed = device.read(output)
    width, rows = packed.shape[1] // 2 - 1, packed.tolist()
    tokens = [row[2 : 2 + row[0]] for row in rows]
    ranks = [row[3 + width : 2 + width + row[0]] for row in rows]
    read = jax.tree.map(np.asarray, output.logprobs) if logprobs else None
    return Read(tokens, packed[:, 1].tolist(), ranks, read)


# Launch

Program: TypeAlias = Callable[[list[Any], list[Any], np.ndarray], tuple[list[Any], Output]]
"""(leaves of params, leaves of the state, packed input) -> (leaves of the next state, output). Donates the state."""

Flat: TypeAlias = tuple[list[jax.Array], Any]  # the leaves of a `Resident`, and their tree


def is_out_of_memory(error: BaseException) -> bool:
    """True for exceptions of the compiler or of a program that report a lack of memory."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError)


class Device:
    """The donated state. Each program takes it and returns the next one; `params` are never donated.

    Both are flat lists of leaves: a call that flattens trees of hundreds of leaves takes clearly longer
    (benchmarks/results/host-2026-11-24-after.json).

    Args:
        new_state: allocates an empty state. Called at once in a thread: zeroing the pool takes seconds on a CPU, during
            which programs compile for its shapes.
        launch_lock: held during each change of the state; reentrant.
    """

    def __init__(
        self, params: Params, new_state: Callable[[], Resident], launch_lock: AbstractContextManager[Any]
    ) -> None:  # fmt: skip
        self._params, self._new_state, self._launch_lock = jax.tree.leaves(params), new_state, launch_lock
        pool = ThreadPoolExecutor(1)
        self._state: Future[Flat] = pool.submit(lambda: jax.tree.flatten(new_state()))
        pool.shutdown(wait=False)  # its thread ends with the allocation

    def replace_params(self, params: Params) -> None:
        """Sets the parameters of later launches, which must have the same shapes and dtypes."""

        def described(leaf: Any) -> tuple[Any, ...]:
            return jnp.shape(leaf), jnp.result_type(leaf)

        leaves = jax.tree.leaves(params)
        if [*map(described, leaves)] != [*map(described, self._params)]:
            raise ValueError("the parameters have other shapes or dtypes than those that the programs are compiled for")
        self._params = leaves

    @property
    def state(self) -> Resident:
        """Waits for the allocation; raises its error."""
        leaves, tree = self._state.result()
        return jax.tree.unflatten(tree, leaves)

    def _set(self, state: Flat | Exception) -> None:
        """Sets the state, or the error that `state` raises. An interrupt just before leaves the donated state lost."""
        future: Future[Flat] = Future()
        if isinstance(state, Exception):
            future.set_exception(state)
        else:
            future.set_result(state)
        self._state = future

    def renew(self) -> None:
        """Frees the state and allocates an empty one. If that fails, this call and `state` raise the error until
        `renew` succeeds."""
        self._set(RuntimeError("there is no state"))
        try:
            with self._launch_lock:
                self._set(jax.tree.flatten(jax.block_until_ready(self._new_state())))
        except Exception as error:
            self._set(error)
            raise

    def wait(self) -> None:
        """Waits for the allocation; raises its error."""
        self._state.result()

    @property
    def lost(self) -> bool:
        """True without a state: a program took it and returned none, or its allocation failed."""
        if not self._state.done():
            return False
        return self._state.exception() is not None or any(leaf.is_deleted() for leaf in self._state.result()[0])

    @property
    def poisoned(self) -> bool:
        """True if the state is lost, or the program that computes it failed. Waits for that program."""
        try:
            return self.lost or not jax.block_until_ready(self._state.result()[0])
        except Exception:
            return True

    def run(self, key: Key, program: Program, inputs: np.ndarray) -> Output:
        """Launches a step or a prefill."""
        with self._launch_lock:
            leaves, tree = self._state.result()
            leaves, output = program(self._params, leaves, inputs)
            self._set((leaves, tree))
        return output

    def read(self, output: Output) -> np.ndarray:
        """Waits for a program and copies `Output.packed` to the host."""
        return np.asarray(output.packed)

    def update(self, change: Callable[..., Resident], *arguments: np.ndarray) -> None:
        """Replaces the state by ``change(state, *arguments)``."""
        with self._launch_lock:
            self._set(jax.tree.flatten(change(self.state, *arguments)))
