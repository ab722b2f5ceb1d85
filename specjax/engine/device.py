"""The state on the device, and the launching of programs that take it over. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax

from specjax.drafters.base import Params
from specjax.engine.compiled import Key, Output
from specjax.step import DecodeState


class OutOfMemory(Exception):
    """A program had no room to run."""

    def __init__(self, key: Key, error: Exception) -> None:
        super().__init__(f"out of memory: {key}")
        self.key, self.error = key, error


class Device:
    """One donated state. Each program takes it and gives the next.

    Args:
        params: of the target and the draft; never donated.
        new_state: allocates an empty state. It is called at once, in a thread of its own: zeroing the pool takes
            seconds on a CPU, in which programs can be compiled for its shapes.
        turn: held while a program is launched.
    """

    def __init__(self, params: Params, new_state: Callable[[], DecodeState], turn: AbstractContextManager[Any]) -> None:
        self._params, self._new_state, self._turn = params, new_state, turn
        beside = ThreadPoolExecutor(1)
        self._state = beside.submit(new_state)
        beside.shutdown(wait=False)  # its thread ends with that

    @property
    def state(self) -> DecodeState:
        """Waits for the allocation; raises what made it fail."""
        return self._state.result()

    @state.setter
    def state(self, state: DecodeState) -> None:
        future: Future[DecodeState] = Future()
        future.set_result(state)
        self._state = future  # at last: after an interrupt before, the state that was given away counts as lost

    def renew(self) -> None:
        """An empty state in place of the old one, which goes first.

        Raises:
            Exception: it cannot be allocated. `state` raises the same from now on, until `renew` succeeds.
        """
        gone: Future[DecodeState] = Future()
        gone.set_exception(RuntimeError("there is no state"))
        self._state = gone
        try:
            with self._turn:
                self.state = jax.block_until_ready(self._new_state())
        except Exception as error:
            failed: Future[DecodeState] = Future()
            failed.set_exception(error)
            self._state = failed
            raise

    @property
    def lost(self) -> bool:
        """There is no state to go on from: a program took it and gave none back, or its allocation failed."""
        if not self._state.done():
            return False
        return self._state.exception() is not None or self.state.root.is_deleted()

    @property
    def poisoned(self) -> bool:
        """`lost`, or the program that computes the state has failed. Waits for it."""
        try:
            return self.lost or not jax.block_until_ready(self.state)
        except Exception:
            return True

    def run(self, key: Key, program: Callable[..., tuple[DecodeState, Output]], inputs: Any) -> Output:
        """Launches a step or a prefill.

        Raises:
            OutOfMemory: XLA has no room for it.
        """
        try:
            with self._turn:
                self.state, output = program(self._params, self.state, inputs)
        except jax.errors.JaxRuntimeError as error:
            raise classified(error, key) from error
        return output

    def update(self, change: Callable[..., DecodeState], *arguments: Any) -> None:
        """Replaces the state by ``change(state, *arguments)``."""
        with self._turn:
            self.state = change(self.state, *arguments)


def classified(error: Exception, key: Key) -> Exception:
    """What a program's error means: no memory, which smaller programs may have, or anything else."""
    return OutOfMemory(key, error) if "RESOURCE_EXHAUSTED" in str(error) else error
