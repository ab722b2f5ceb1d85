"""The state on the device, and the launch of programs that take it over. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax

from specjax.drafters.base import Params
from specjax.engine.executables import Key, Program
from specjax.engine.outputs import Output
from specjax.state import DecodeState


class OutOfMemory(Exception):
    """A program had no room to run."""

    def __init__(self, key: Key, error: Exception) -> None:
        super().__init__(f"out of memory: {key}")
        self.key, self.error = key, error


class Device:
    """One donated state. Each program takes it over and gives the next.

    Args:
        params: of the target and the draft; never donated.
        new_state: allocates an empty state. It is called at once, in a thread of its own: zeroing the pool takes
            seconds on a CPU, during which programs can be compiled for its shapes.
        launch_lock: held while a program is launched.
    """

    def __init__(
        self, params: Params, new_state: Callable[[], DecodeState], launch_lock: AbstractContextManager[Any]
    ) -> None:
        self._params, self._new_state, self._launch_lock = params, new_state, launch_lock
        pool = ThreadPoolExecutor(1)
        self._state = pool.submit(new_state)
        pool.shutdown(wait=False)  # its thread ends with the allocation

    @property
    def state(self) -> DecodeState:
        """Waits for the allocation; raises what made it fail."""
        return self._state.result()

    @state.setter
    def state(self, state: DecodeState) -> None:
        future: Future[DecodeState] = Future()
        future.set_result(state)
        self._state = future  # last: after an interrupt before, the donated state counts as lost

    def _lose(self, error: Exception) -> None:
        """From now on `state` raises this."""
        future: Future[DecodeState] = Future()
        future.set_exception(error)
        self._state = future

    def renew(self) -> None:
        """Allocates an empty state in place of the old one, which is freed first.

        Raises:
            Exception: it cannot be allocated. `state` raises the same from now on, until `renew` succeeds.
        """
        self._lose(RuntimeError("there is no state"))
        try:
            with self._launch_lock:
                self.state = jax.block_until_ready(self._new_state())
        except Exception as error:
            self._lose(error)
            raise

    @property
    def lost(self) -> bool:
        """Whether there is no state: a program took it over and gave none back, or its allocation failed."""
        if not self._state.done():
            return False
        return self._state.exception() is not None or self.state.root.is_deleted()

    @property
    def poisoned(self) -> bool:
        """Whether the state is lost, or the program that computes it has failed. Waits for that program."""
        try:
            return self.lost or not jax.block_until_ready(self.state)
        except Exception:
            return True

    def run(self, key: Key, program: Program, inputs: Any) -> Output:
        """Launches a step or a prefill.

        Raises:
            OutOfMemory: XLA has no room for it.
        """
        try:
            with self._launch_lock:
                self.state, output = program(self._params, self.state, inputs)
        except jax.errors.JaxRuntimeError as error:
            raise classified(error, key) from error
        return output

    def update(self, change: Callable[..., DecodeState], *arguments: Any) -> None:
        """Replaces the state by ``change(state, *arguments)``."""
        with self._launch_lock:
            self.state = change(self.state, *arguments)


def classified(error: Exception, key: Key) -> Exception:
    """An `OutOfMemory`, which smaller programs may avoid, where a program's error means that; else the error itself."""
    return OutOfMemory(key, error) if "RESOURCE_EXHAUSTED" in str(error) else error
