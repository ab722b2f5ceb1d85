"""Hands words of the host to a program on a CPU that was launched before they were known.

A program takes a ticket among its inputs and reads the words where it needs them, which waits until they are posted. So
the host can launch it, look at the results of the program before it, and calculate the words while it runs.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32, UInt32

from specjax_kernels.cpu.runtime import Tools, callable_here, register

NAME = "specjax_posted"
TICKET = 4  # int32: where the words will be and the number of the posting, the low half of each first
HEADER = 8  # bytes before the words: the number of the last posting
LOOKS = 2000  # before a program that waits begins to sleep between two looks
SLEEP = 50  # microseconds
SECONDS = 300
"""After which a program gives up, and has zeros: a host that has died in between is not waited for without end."""


def usable() -> bool:
    """Whether `posted` can be called in this process, and a program that calls it is launched without waiting for it.
    The first call loads the kernel or compiles it, which takes seconds."""
    # XLA:CPU runs a program of fewer than 1,000 operations at once, too; those that call a model have more.
    return callable_here() and jax.config.values["jax_cpu_enable_async_dispatch"] and register(NAME, _kernel) is None


class Mailbox:
    """Of the programs of one state, which run one after another.

    Args:
        size: uint32 words of a posting, at most.
        places: postings that may be open at once. A place is used again after as many.
    """

    def __init__(self, size: int, places: int = 4) -> None:
        # Never freed before the process ends: a program that was given up may read it late.
        self._places = [np.zeros(HEADER + 4 * size, np.uint8) for _ in range(places)]
        _kept.extend(self._places)
        self._number = 0
        self._fence = threading.Lock()

    def open(self) -> tuple[int, np.ndarray]:
        """The number of a new posting, and int32 [TICKET] for the program that reads it."""
        self._number += 1
        place = self._places[self._number % len(self._places)]
        return self._number, np.array([place.ctypes.data, self._number], np.int64).view(np.int32)

    def post(self, number: int, words: np.ndarray) -> None:
        """Gives the program its words, uint32 of the shape that it reads. Must follow every `open`."""
        place = self._places[number % len(self._places)]
        place[HEADER : HEADER + words.nbytes] = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
        # Processors may reorder writes, but not what comes before a lock's release with what follows its next taking.
        for _ in range(2):
            with self._fence:
                pass
        place[:HEADER].view(np.int64)[0] = number


_kept: list[np.ndarray] = []


def posted(ticket: Int32[Array, "4"], after: Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The words of a posting, uint32 of this shape, read once `after` is calculated, whose values do not matter. Waits
    for them."""
    words = jax.ShapeDtypeStruct((math.prod(shape),), jnp.uint32)
    return jax.ffi.ffi_call(NAME, words)(ticket, after.reshape(-1)[:1]).reshape(shape)


def _kernel(tools: Tools) -> tuple[Any, Any]:
    """(ticket [4], anything) -> words. One tile."""
    argument, size, result, loaded, sleep = (
        tools.argument, tools.result_size, tools.result, tools.loaded, tools.sleep,
    )  # fmt: skip
    integers, longs = tools.integers, tools.longs
    most = LOOKS + SECONDS * 1_000_000 // (2 * SLEEP)  # a sleep takes twice as long as was asked for

    def tiles(call: int) -> int:
        return 1

    def tile(call: int, index: int) -> int:
        given = longs(argument(call, 0), 2)
        place, number = given[0], given[1]
        count = size(call, 0, 0)
        out = integers(result(call, 0), count)
        looks = 0
        while loaded(place) < number:
            looks += 1
            if looks > most:
                for i in range(count):
                    out[i] = 0
                return 0
            if looks > LOOKS:
                sleep(SLEEP)
        words = integers(place + HEADER, count)
        for i in range(count):
            out[i] = words[i]
        return 0

    return tiles, tile
