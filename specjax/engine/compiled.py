"""The executables of an engine: one for each batch bucket and chunk width, compiled once, before or behind its work."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from specjax_kernels import cpu_code
from tqdm import tqdm

from specjax.checkpoint.files import default_cache_dir
from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter, Params
from specjax.engine.batch import Buckets
from specjax.engine.phases import PhaseTimes, compile_in_phases
from specjax.engine.request import Sequence
from specjax.models.protocol import Target
from specjax.step import (
    DecodeState,
    Logprobs,
    PrefillInput,
    Row,
    StepConfig,
    StepInput,
    StepOutput,
    Trace,
    admit,
    prefill_step,
    speculate_step,
    tree_widths,
)

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Which executable. `width` is the batch bucket of a step, the chunk width of a prefill."""

    kind: str  # "step" or "prefill"
    width: int
    table: int

    def __str__(self) -> str:
        what = "a step of" if self.kind == "step" else "a prefill of"
        unit = "requests" if self.kind == "step" else "tokens"
        return f"{what} {self.width} {unit} with {self.table} pages each"


def use_compilation_cache(folder: Path | None = None) -> None:
    """Keeps compiled programs on disk, so that a second start compiles nothing. Respects JAX's own settings.

    Args:
        folder: of the programs; those that run on a CPU call kernels, which are always kept in `default_cache_dir`.
    """
    cpu_code.keep_in(default_cache_dir() / "kernels")
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder or default_cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


class Read(NamedTuple):
    """A step's output on the host."""

    tokens: np.ndarray  # [B, J]
    emitted: np.ndarray  # [B]
    finish: np.ndarray  # [B]
    logprobs: Logprobs | None  # of numpy arrays


def _packed(output: StepOutput) -> Array:
    """[B, 2 + J] int32: one array, so that a step costs one copy to the host."""
    return jnp.concatenate([output.emitted[:, None], output.finish[:, None], output.tokens], axis=1)


def _packed_logprobs(found: Logprobs) -> Array:
    """[B, (1 + 2 * top) * J] int32, copied to the host only where a request wants them."""
    rows = found.drawn.shape[0]
    floats = [found.drawn, found.top.reshape(rows, -1)]
    bits = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in floats]
    return jnp.concatenate([*bits, found.top_ids.reshape(rows, -1)], axis=1)


def read_output(output: Output, top: int | None) -> Read:
    """A step's output on the host.

    Args:
        top: alternatives of a token in the log-probabilities; None: those are not copied.
    """
    packed = np.asarray(output.packed)
    emitted, finish, tokens = packed[:, 0], packed[:, 1], packed[:, 2:]
    if top is None:
        return Read(tokens, emitted, finish, None)
    width = tokens.shape[1]
    drawn, best, ids = np.split(np.asarray(output.logprobs), np.cumsum([width, width * top]), axis=1)
    shape = (-1, width, top)
    found: Any = (drawn.view(np.float32), best.view(np.float32).reshape(shape), ids.reshape(shape))
    return Read(tokens, emitted, finish, Logprobs(*found))


class Output(NamedTuple):
    """Of a step or a prefill, on the device."""

    packed: Array
    logprobs: Array
    trace: Trace | None


def _finish(output: StepOutput) -> Output:
    return Output(_packed(output), _packed_logprobs(output.logprobs), output.trace)


def _step(params: Params, state: DecodeState, inputs: StepInput, **fixed: Any) -> tuple[DecodeState, Output]:
    state, output = speculate_step(params, state, inputs, **fixed)
    return state, _finish(output)


def _prefill(params: Params, state: DecodeState, inputs: PrefillInput, **fixed: Any) -> tuple[DecodeState, Output]:
    state, output = prefill_step(params, state, inputs, **fixed)
    return state, _finish(output)


class Unavailable(RuntimeError):
    """No executable that could run some requests can be compiled or has room to run."""


class Executables:
    """Compiles on demand, and at most once. Safe to call from several threads.

    A key whose compilation fails, or that runs out of memory, is remembered and logged once; `first_usable` then takes
    another size.

    Attributes:
        turn: held while a program is launched and, on a GPU, while one is compiled: XLA times candidates on the device,
            where nothing else may run meanwhile.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        buckets: Buckets,
        params: Params,
        state: DecodeState,
        *,
        trace: bool = False,
        time_phases: bool = False,
    ) -> None:
        self._target, self._drafter, self._buckets, self._trace = target, drafter, buckets, trace
        self.phase_times = PhaseTimes() if time_phases else None
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
        self._futures: dict[Key, Future[Any]] = {}
        self._failed: dict[Key, str] = {}  # what was wrong; an exception would keep its frames alive
        self._pending: set[Key] = set()  # what `warm_up_in_background` still has to do
        self._closed = threading.Event()
        self._waiting: set[int] = set()  # threads that wait for a compiler in `get`
        self._lock = threading.Lock()
        self.turn = threading.RLock()
        self._compiling = False  # holds `turn`
        self._exclusive = jax.default_backend() != "cpu"

    def is_waiting(self, thread: int | None) -> bool:
        """Whether the thread with this `ident` waits for a program to be compiled, or, on a GPU, any is compiled."""
        return thread in self._waiting or self._compiling

    @cached_property
    def admit(self) -> Callable[[DecodeState, Any, Row], DecodeState]:
        """Puts a row into the state, which it takes over. Compiled at the first use or by `warm_up`."""
        state = self.state_shapes
        row = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), state.rows)
        slot = jax.ShapeDtypeStruct((), np.int32)
        with self.turn:
            return jax.jit(admit, donate_argnums=0).lower(state, slot, row).compile()

    @property
    def state_shapes(self) -> DecodeState:
        return self._shapes[1]

    def all_keys(self) -> list[Key]:
        """Every executable the engine can need, the ones for a single request first."""
        steps = [Key("step", batch, table) for batch in self._buckets.batches for table in self._buckets.tables]
        chunks = [Key("prefill", chunk, table) for chunk in self._buckets.chunks for table in self._buckets.tables]
        first = self._buckets.batches[0]
        return chunks + sorted(steps, key=lambda key: (key.width != first, key.width, key.table))

    def single_request_keys(self) -> list[Key]:
        """Those that one request at a time needs."""
        first = self._buckets.batches[0]
        return [key for key in self.all_keys() if key.kind == "prefill" or key.width == first]

    def first_keys(self, sequences: Iterable[Sequence], page_size: int, rows: int) -> list[Key]:
        """Those that these sequences will certainly need, if they are all that runs."""
        keys: dict[Key, None] = {}
        count, table = 0, self._buckets.tables[0]
        for sequence in sequences:
            table = max(table, self._buckets.table(-(-sequence.most_tokens // page_size)))
            left = len(sequence.context)
            while left > 0:
                width = self._buckets.chunk(left)
                keys[Key("prefill", width, table)] = None
                left -= width
            count += 1
        widths = self._buckets.shrinking(min(count, rows), tree_widths(self._drafter))
        return [*keys, *(Key("step", width, table) for width in widths)]

    def step_keys(self, count: int, table: int) -> Iterator[Key]:
        """Programs that can serve `count` requests, the best first.

        The smallest batch that fits and is compiled: an idle row costs less than waiting for a compiler. But not one
        that would draft less: at the end of a wide run the last requests speculate. While a larger batch compiles
        behind, the largest that is there serves them in parts. Then what must be compiled first, and where no batch
        that fits can be had, smaller ones.
        """
        compiled, least = self.compiled(), table
        for table in self._buckets.tables_for(least):
            fitting = [
                Key("step", batch, table) for batch in self._buckets.substitutes(count, tree_widths(self._drafter))
            ]
            others = [Key("step", batch, table) for batch in self._buckets.batches]
            larger = [key for key in others if key.width >= count and key not in fitting]
            smaller = [key for key in others[::-1] if key.width < count]
            yield from (key for key in fitting if key in compiled)
            if self.is_pending(fitting[0]):
                yield from (key for key in smaller if key in compiled)
            yield from (*fitting, *larger, *smaller)

    def get(self, key: Key) -> Callable[..., tuple[DecodeState, Output]]:
        """The program of a key; compiles it, or waits for the thread that does.

        Raises:
            Unavailable: the key has failed before.
            Exception: whatever the compiler raised.
        """
        with self._lock:
            if key in self._failed:
                raise Unavailable(f"{key}: {self._failed[key]}")
            mine = key not in self._futures
            future = self._futures.setdefault(key, Future())
        if future.done():
            return future.result()
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            if mine:
                try:
                    future.set_result(self._compile(key))
                except BaseException as error:
                    with self._lock:
                        del self._futures[key]
                    if isinstance(error, Exception):
                        self.fail(key, error)
                        future.set_exception(error)
                    else:  # an interrupt is this thread's alone
                        future.set_exception(RuntimeError(f"compiling {key} was interrupted"))
                    raise
            return future.result()
        finally:
            self._waiting.discard(thread)

    def fail(self, key: Key, error: BaseException) -> None:
        """Remembers that a key cannot be used, and logs it the first time."""
        problem = _first_line(error)
        with self._lock:
            known = key in self._failed
            self._failed[key] = problem
        if not known:
            logger.error("There will be no program for %s, other sizes are used instead: %s", key, problem)
            logger.debug("%s", key, exc_info=error)

    def fail_from(self, key: Key, error: BaseException) -> None:
        """`fail` for a program that ran out of memory, and for all that need more.

        Raises:
            Unavailable: there is none that needs less. Nothing is remembered then: memory may come back.
        """
        alike = [other for other in {key, *self.all_keys()} if other.kind == key.kind]
        larger = [other for other in alike if other.width >= key.width and other.table >= key.table]
        if all(other in larger or self.has_failed(other) for other in alike):
            raise Unavailable(f"no memory for {key}, and there is nothing smaller: {_first_line(error)}") from error
        for other in larger:
            self.fail(other, error)

    def has_failed(self, key: Key) -> bool:
        return key in self._failed

    def first_usable(self, keys: Iterable[Key]) -> tuple[Key, Callable[..., tuple[DecodeState, Output]]]:
        """The program of the first of these keys that has one; compiles it where needed.

        Raises:
            Unavailable: none can be had.
        """
        problem = "there is none"
        for key in keys:
            if (known := self._failed.get(key)) is not None:
                problem = f"{key}: {known}"
                continue
            try:
                return key, self.get(key)
            except Exception as error:  # logged by `fail`
                problem = f"{key}: {_first_line(error)}"
        raise Unavailable(f"no size of batch can run ({problem})")

    def compiled(self) -> set[Key]:
        with self._lock:
            return {key for key, future in self._futures.items() if future.done()}

    def warm_up(self, keys: Iterable[Key], *, progress: bool = True, strict: bool = True) -> None:
        """Compiles these and what every request needs, with a progress bar on stderr. On a CPU a second thread helps,
        to which JAX's settings by `with` do not apply.

        Args:
            strict: stop at the first failure, also of a key that failed before, and raise it. False: leave out what
                fails.

        Raises:
            Unavailable: not `strict`, and all programs of a kind have failed.
        """
        _ = self.admit
        keys = list(keys)
        if strict:
            with self._lock:
                for key in keys:
                    self._failed.pop(key, None)
        missing = [key for key in keys if key not in self.compiled()]
        # Steps take longest. Threads share the iterator: each key goes to one of them.
        left = iter(sorted(missing, key=lambda key: key.kind != "step"))
        failed: list[BaseException] = []
        bar = tqdm(total=len(missing), desc="Compiling", unit="bucket", disable=not progress or not missing)

        def work() -> None:
            try:
                for key in left:
                    if failed:
                        return
                    bar.set_postfix_str(f"{key.kind} {key.width}")
                    try:
                        self.get(key)
                    except Exception:
                        if strict:
                            raise
                    bar.update()
            except BaseException as error:
                failed.append(error)

        # While XLA compiles one program on a CPU, or reads it from the disk, Python traces the next. (XLA:GPU times
        # candidates on the device, where nothing else may run then.)
        beside = threading.Thread(target=work, name="specjax-compile-2", daemon=True)
        two = not self._exclusive and len(missing) > 1
        with bar:
            if two:
                beside.start()
            work()
            if two and not any(isinstance(error, KeyboardInterrupt) for error in failed):
                beside.join()
        if failed:
            raise failed[0]
        for kind in {key.kind for key in keys}:
            self.first_usable(sorted((key for key in keys if key.kind == kind), key=self.has_failed))

    def warm_up_in_background(self, keys: Iterable[Key], *, progress: bool = True) -> threading.Thread:
        """Compiles these one by one in a thread of its own, which `close` ends. Leaves out what fails."""
        with self._lock:
            missing = [key for key in keys if key not in self._futures and key not in self._failed]
            self._pending.update(missing)

        def run() -> None:
            try:
                with tqdm(missing, desc="Compiling behind", unit="bucket", disable=not progress or not missing) as bar:
                    for key in bar:
                        bar.set_postfix_str(f"{key.kind} {key.width}")
                        if not self._closed.is_set():
                            with contextlib.suppress(Exception):  # logged by `fail`
                                self.get(key)
                        with self._lock:
                            self._pending.discard(key)
            finally:
                with self._lock:
                    self._pending.difference_update(missing)

        thread = threading.Thread(target=run, name="specjax-compile", daemon=True)
        thread.start()
        return thread

    def is_pending(self, key: Key) -> bool:
        """It is not there yet, but will be without anyone waiting for it."""
        with self._lock:
            return key in self._pending

    @property
    def pending(self) -> int:
        """Executables that are still compiled behind."""
        with self._lock:
            return len(self._pending)

    def close(self) -> None:
        """No more compiling behind, after the program that is being compiled."""
        self._closed.set()

    def _compile(self, key: Key) -> Callable[..., Any]:
        params, state = self._shapes
        fixed: dict[str, Any] = {"target": self._target, "drafter": self._drafter}

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, np.int32)

        def flags(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, np.bool_)

        if key.kind == "prefill":
            inputs = PrefillInput(
                slots=ints(1),
                page_table=ints(1, key.table),
                active=flags(1),
                tokens=ints(1, key.width),
                length=ints(1),
                next_token=ints(1),
            )
            function = partial(_prefill, **fixed, config=StepConfig())
        else:
            batch = key.width
            inputs = StepInput(ints(batch), ints(batch, key.table), flags(batch))
            widths = self._buckets.tree_widths(batch, tree_widths(self._drafter))
            config = StepConfig(widths, self._trace)
            if self.phase_times is not None:
                shapes = (params, state, inputs)
                with self.turn:
                    fixed |= {"config": config, "shapes": shapes, "finish": _finish}
                    return compile_in_phases(**fixed, times=self.phase_times)
            function = partial(_step, **fixed, config=config)
        lowered = jax.jit(function, donate_argnums=1, compiler_options=compiler_options()).lower(params, state, inputs)
        if not self._exclusive:
            return lowered.compile()
        with self.turn:
            jax.block_until_ready(jnp.zeros(()) + 1)  # after all that has been launched; it may be stuck
            self._compiling = True
            try:
                return lowered.compile()
            finally:
                self._compiling = False


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:500]
