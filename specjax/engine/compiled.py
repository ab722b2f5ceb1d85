"""The executables of an engine: one for each batch bucket and chunk width, compiled once, before or behind its work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
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

from specjax.checkpoint.cache import default_cache_dir
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
    ladder,
    prefill_step,
    speculate_step,
)

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Which executable. `width` is the batch bucket of a step, the chunk width of a prefill."""

    kind: str  # "step" or "prefill"
    width: int
    table: int
    logprobs: bool = False  # variants that only requests for log-probabilities need


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
    """[B, 2 + J] int32, with log-probabilities [B, 2 + J + (1 + 2 * top) * J]: one array, so that a step costs one copy
    to the host."""
    parts = [output.emitted[:, None], output.finish[:, None], output.tokens]
    if (found := output.logprobs) is not None:
        rows = output.tokens.shape[0]
        floats = [found.drawn, found.top.reshape(rows, -1)]
        parts += [jax.lax.bitcast_convert_type(part, jnp.int32) for part in floats]
        parts.append(found.top_ids.reshape(rows, -1))
    return jnp.concatenate(parts, axis=1)


def unpack(packed: np.ndarray, top: int | None) -> Read:
    """The reverse of what the step did. `top`: how many alternatives a token has; None: no log-probabilities."""
    emitted, finish, rest = packed[:, 0], packed[:, 1], packed[:, 2:]
    if top is None:
        return Read(rest, emitted, finish, None)
    width = rest.shape[1] // (2 + 2 * top)
    tokens, drawn, best, ids = np.split(rest, np.cumsum([width, width, width * top]), axis=1)
    shape = (-1, width, top)
    found: Any = (drawn.view(np.float32), best.view(np.float32).reshape(shape), ids.reshape(shape))
    return Read(tokens, emitted, finish, Logprobs(*found))


class Output(NamedTuple):
    """Of a step or a prefill, on the device."""

    packed: Array
    trace: Trace | None


def _finish(output: StepOutput) -> Output:
    return Output(_packed(output), output.trace)


def _step(params: Params, state: DecodeState, inputs: StepInput, **fixed: Any) -> tuple[DecodeState, Output]:
    state, output = speculate_step(params, state, inputs, **fixed)
    return state, _finish(output)


def _prefill(params: Params, state: DecodeState, inputs: PrefillInput, **fixed: Any) -> tuple[DecodeState, Output]:
    state, output = prefill_step(params, state, inputs, **fixed)
    return state, _finish(output)


class Executables:
    """Compiles on demand, and at most once. Safe to call from several threads."""

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
        self._coming: set[Key] = set()  # what `warm_up_behind` still has to do
        self._asked: set[Key] = set()
        self._closed = threading.Event()
        self._waiting: set[int] = set()  # threads that wait for a compiler in `get`
        self._lock = threading.Lock()

    def is_waiting(self, thread: int | None) -> bool:
        """Whether the thread with this `ident` waits for a program to be compiled."""
        return thread in self._waiting

    @cached_property
    def admit(self) -> Callable[[DecodeState, Any, Row], DecodeState]:
        """Puts a row into the state, which it takes over. Compiled at the first use or by `warm_up`."""
        state = self.state_shapes
        row = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), state.rows)
        slot = jax.ShapeDtypeStruct((), np.int32)
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
        widths = self._buckets.shrinking(min(count, rows), ladder(self._drafter))
        return [*keys, *(Key("step", width, table) for width in widths)]

    def get(self, key: Key) -> Callable[..., tuple[DecodeState, Output]]:
        """The program of a key; compiles it, or waits for the thread that does.

        Raises:
            Exception: whatever the compiler raised.
        """
        with self._lock:
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
                    future.set_exception(error)
                    raise
            return future.result()
        finally:
            self._waiting.discard(thread)

    def has(self, key: Key) -> bool:
        """False: a variant for log-probabilities that is being compiled behind, so that other requests go on.

        Plain executables are waited for: nobody could go on without.
        """
        with self._lock:
            future = self._futures.get(key)
            if not key.logprobs or (future is not None and future.done()):
                return True
            if key in self._coming:
                return False
            if key in self._asked:  # it has failed: whoever calls `get` is told why
                return True
            self._asked.add(key)
        self.warm_up_behind([key], progress=False)
        return False

    def compiled(self) -> set[Key]:
        with self._lock:
            return {key for key, future in self._futures.items() if future.done()}

    def warm_up(self, keys: Iterable[Key], *, progress: bool = True) -> None:
        """Compiles these and what every request needs, with a progress bar on stderr. On a CPU a second thread helps,
        to which JAX's settings by `with` do not apply."""
        _ = self.admit
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
                    self.get(key)
                    bar.update()
            except BaseException as error:
                failed.append(error)

        # While XLA compiles one program on a CPU, or reads it from the disk, Python traces the next. (XLA:GPU times
        # candidates on the device, where nothing else may run then.)
        beside = threading.Thread(target=work, name="specjax-compile-2", daemon=True)
        two = jax.default_backend() == "cpu" and len(missing) > 1
        with bar:
            if two:
                beside.start()
            work()
            if two and not any(isinstance(error, KeyboardInterrupt) for error in failed):
                beside.join()
        if failed:
            raise failed[0]

    def warm_up_behind(self, keys: Iterable[Key], *, progress: bool = True) -> threading.Thread:
        """Compiles these one by one in a thread of its own, which `close` ends."""
        with self._lock:
            missing = [key for key in keys if key not in self._futures]
            self._coming.update(missing)

        def run() -> None:
            try:
                with tqdm(missing, desc="Compiling behind", unit="bucket", disable=not progress or not missing) as bar:
                    for key in bar:
                        bar.set_postfix_str(f"{key.kind} {key.width}")
                        if not self._closed.is_set():
                            self.get(key)
                        with self._lock:
                            self._coming.discard(key)
            except Exception:
                logger.exception("compiling ahead failed: what is missing is compiled when it is needed")
            finally:
                with self._lock:
                    self._coming.difference_update(missing)

        thread = threading.Thread(target=run, name="specjax-compile", daemon=True)
        thread.start()
        return thread

    def is_coming(self, key: Key) -> bool:
        """It is not there yet, but will be without anyone waiting for it."""
        with self._lock:
            return key in self._coming

    @property
    def coming(self) -> int:
        """Executables that are still compiled behind."""
        with self._lock:
            return len(self._coming)

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
            function = partial(_prefill, **fixed, config=StepConfig(logprobs=key.logprobs))
        else:
            batch = key.width
            inputs = StepInput(ints(batch), ints(batch, key.table), flags(batch))
            widths = self._buckets.tree_widths(batch, ladder(self._drafter))
            config = StepConfig(widths, key.logprobs, self._trace)
            if self.phase_times is not None:
                shapes = (params, state, inputs)
                return compile_in_phases(**fixed, config=config, shapes=shapes, times=self.phase_times, finish=_finish)
            function = partial(_step, **fixed, config=config)
        jitted = jax.jit(function, donate_argnums=1, compiler_options=compiler_options())
        return jitted.lower(params, state, inputs).compile()
