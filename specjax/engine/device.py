"""The state on the device, and the launch of programs that take it over. Knows nothing of requests."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from specjax.checkpoint import ModelFiles
from specjax.drafters.base import Drafter, Params
from specjax.engine.arrays import Output, Resident
from specjax.engine.config import EngineConfig
from specjax.engine.keys import Key
from specjax.models.target import Target

Program: TypeAlias = Callable[[list[Any], list[Any], np.ndarray], tuple[list[Any], Output]]
"""(leaves of params, leaves of the state, packed input) -> (leaves of the next state, output). Donates the state."""

Flat: TypeAlias = tuple[list[jax.Array], Any]  # the leaves of a `Resident`, and their tree


@runtime_checkable
class Group(Protocol):
    """Processes whose devices share one model, of which this is one (`specjax.fleet.hosts`)."""

    leads: bool

    def agree_on_files(self, files: ModelFiles) -> None: ...
    def agree_on_pool(
        self, target: Target, drafter: Drafter, params: Params, config: EngineConfig, context_length: int, tokens: int
    ) -> int: ...


@runtime_checkable
class Leader(Group, Protocol):
    """The process of a group that serves requests: what it changes on its devices the others change, too."""

    def send(self, kind: str, array: np.ndarray | None = None, **fields: Any) -> None: ...
    def compare(self, digest: str, what: str) -> None: ...
    def fail(self, message: str) -> NoReturn: ...


class Unavailable(MemoryError):
    """A program does not fit into the memory, or no program that could run some requests does."""


class OutOfMemory(Exception):
    """A program had no room to run; smaller ones may have."""

    def __init__(self, key: Key, error: Exception) -> None:
        super().__init__(f"out of memory: {key}")
        self.key, self.error = key, error


def is_out_of_memory(error: BaseException) -> bool:
    """True for exceptions of the compiler or of a program that mean that memory has run out."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError)


@contextlib.contextmanager
def memory_checked(key: Key) -> Iterator[None]:
    """Raises `OutOfMemory` where the launch or the output of a program raises XLA's error that means it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise OutOfMemory(key, error) from error
        raise


class Device:
    """One donated state. Each program takes it over and gives the next; `params` are never donated.

    Both are kept as flat lists of leaves, in which a program takes them: with hundreds of leaves a call that flattens
    trees takes clearly longer (benchmarks/results/host-2026-11-24-after.json).

    `new_state` allocates an empty state. It is called at once, in a thread of its own: zeroing the pool takes seconds
    on a CPU, during which programs can be compiled for its shapes. `launch_lock` is held while one is launched.

    leader: of processes that share the devices: all that changes the state is told to the others first, which do the
        same (`specjax.fleet.following`); None: there are none, or this is one of them.
    """

    def __init__(
        self, params: Params, new_state: Callable[[], Resident], launch_lock: AbstractContextManager[Any],
        leader: Leader | None = None,
    ) -> None:  # fmt: skip
        self._leader, self._unchecked = leader, deque[tuple[Key, Output]]()
        self._params, self._new_state, self._launch_lock = jax.tree.leaves(params), new_state, launch_lock
        pool = ThreadPoolExecutor(1)
        self._state: Future[Flat] = pool.submit(lambda: jax.tree.flatten(new_state()))
        pool.shutdown(wait=False)  # its thread ends with the allocation

    def replace_params(self, params: Params) -> None:
        """The parameters of the programs that are launched from now on, of the same shapes and dtypes."""

        def described(leaf: Any) -> tuple[Any, ...]:
            return jax.numpy.shape(leaf), jax.numpy.result_type(leaf)

        leaves = jax.tree.leaves(params)
        if [*map(described, leaves)] != [*map(described, self._params)]:
            raise ValueError("the parameters have other shapes or dtypes than those that the programs are compiled for")
        self._params = leaves

    @property
    def state(self) -> Resident:
        """Waits for the allocation; raises what made it fail."""
        leaves, tree = self._state.result()
        return jax.tree.unflatten(tree, leaves)

    def _set(self, state: Flat | Exception) -> None:
        """Sets what `state` returns or raises. After an interrupt just before, the donated state counts as lost."""
        future: Future[Flat] = Future()
        if isinstance(state, Exception):
            future.set_exception(state)
        else:
            future.set_result(state)
        self._state = future

    def renew(self) -> None:
        """Allocates an empty state in place of the old one, which is freed first. Raises the error of a failed
        allocation, as `state` does from then on, until `renew` succeeds."""
        self._set(RuntimeError("there is no state"))
        try:
            with self._launch_lock:
                self._tell("renew")
                self._set(jax.tree.flatten(jax.block_until_ready(self._new_state())))
        except Exception as error:
            self._set(error)
            raise

    @property
    def lost(self) -> bool:
        """Whether there is no state: a program took it over and gave none back, or its allocation failed."""
        if not self._state.done():
            return False
        return self._state.exception() is not None or any(leaf.is_deleted() for leaf in self._state.result()[0])

    @property
    def poisoned(self) -> bool:
        """Whether the state is lost, or the program that computes it has failed. Waits for that program."""
        try:
            return self.lost or not jax.block_until_ready(self._state.result()[0])
        except Exception:
            return True

    def run(self, key: Key, program: Program, inputs: np.ndarray) -> Output:
        """Launches a step or a prefill. Raises OutOfMemory if XLA has no room for it."""
        with memory_checked(key), self._launch_lock:
            leaves, tree = self._state.result()
            self._tell("run", inputs, key=key)
            try:
                leaves, output = program(self._params, leaves, inputs)
            except Exception as error:
                if self._leader is not None:  # the others have launched it, and wait for this process
                    self._leader.fail(f"{key} could not be launched: {error}")
                raise
            self._set((leaves, tree))
            if self._leader is not None:
                self._unchecked.append((key, output))
        return output

    def check(self, output: Output) -> None:
        """Before a program's output is used: waits for it, and until all processes that share the devices have the
        same. They end if one has another. The programs launched before it are checked, too."""
        if self._leader is None or not any(each is output for _, each in self._unchecked):
            return
        found = None
        while found is not output:
            key, found = self._unchecked.popleft()
            try:
                own = digest(found)
            except Exception as error:  # the others may wait for this process
                self._leader.fail(f"{key} failed: {error}")
            self._leader.compare(own, str(key))

    def update(self, change: Callable[..., Resident], *arguments: np.ndarray, kind: str = "", **fields: Any) -> None:
        """Replaces the state by ``change(state, *arguments)``. `kind` and `fields`: how the followers are told of the
        change, with its argument."""
        with self._launch_lock:
            state = self.state
            self._tell(kind, *arguments, **fields)
            self._set(jax.tree.flatten(change(state, *arguments)))

    def _tell(self, kind: str, *array: np.ndarray, **fields: Any) -> None:
        if self._leader is not None:
            self._leader.send(kind, *array, **fields)


def digest(output: Output) -> str:
    """Of the tokens that a program has drawn or drafted; waits for it."""
    first = np.asarray(jax.tree.leaves(output)[0])
    return hashlib.blake2b(first.tobytes(), digest_size=8).hexdigest()
