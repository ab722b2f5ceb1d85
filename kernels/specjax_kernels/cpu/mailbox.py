"""Hands words of the host to a program on a CPU that was launched before they were known.

A program takes a ticket among its inputs and reads the words where it needs them, which waits until they are posted. So
the host can launch it, look at the results of the program before it, and calculate the words while it runs.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32, UInt32

from specjax_kernels.cpu.runtime import Tools, callable_here, register

NAME = "specjax_posted"
TICKET = 4  # int32, two int64: the address of the place where the words will be, and the number of the posting
POSTED, READ, HEADER = 0, 1, 2  # int64 of a place, before its words: the last posting, and the last that was read
LOOKS = 2000  # before a program that waits begins to sleep between two looks
SLEEP = 50  # microseconds
SECONDS = 300
"""After which a program gives up and reads zeros, if its words are never posted. The host's error would not be seen
otherwise: it would wait for the program."""


def usable() -> bool:
    """Whether `posted` can be called in this process. The first call loads the kernel or compiles it, which takes
    seconds. It cannot where a launch waits for the program."""
    # XLA:CPU also runs programs of fewer than 1,000 operations in the thread that launches them; a model has more.
    waits = any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs"))
    waits = waits or not jax.config.values.get("jax_cpu_enable_async_dispatch", True)
    return callable_here() and not waits and register(NAME, _kernel) is None


class Posting(NamedTuple):
    place: np.ndarray  # int64: the header, then the words
    number: int
    ticket: np.ndarray  # int32 [TICKET], for the program that reads it


class Mailbox:
    """Postings to programs that each read theirs once."""

    def __init__(self) -> None:
        self._places: list[np.ndarray] = []
        self._number = 0
        self._fence = threading.Lock()

    def open(self, size: int) -> Posting:
        """A new posting of `size` uint32 words."""
        self._number += 1
        place = next((each for each in self._places if _is_free(each) and len(each) >= _length(size)), None)
        if place is None:
            place = np.zeros(_length(size), np.int64)
            self._places.append(place)
            _kept.append(place)
        place[READ] = -1  # until the program has read it
        return Posting(place, self._number, np.array([place.ctypes.data, self._number], np.int64).view(np.int32))

    def post(self, posting: Posting, words: np.ndarray) -> None:
        """Gives the program its words, uint32 of the shape that it reads. Must follow every `open`."""
        place = posting.place
        try:
            flat = np.ascontiguousarray(words, np.uint32).reshape(-1)
            place[HEADER:].view(np.uint32)[: flat.size] = flat
            # Processors may reorder writes, but not what precedes a lock's release with what follows its next taking.
            for _ in range(2):
                with self._fence:
                    pass
        finally:
            place[POSTED] = posting.number


_kept: list[np.ndarray] = []  # until the process ends: a program that nobody waits for any more may still read its own


def _length(size: int) -> int:
    return HEADER + -(-size // 2)


def _is_free(place: np.ndarray) -> bool:
    return bool(place[READ] == place[POSTED])


def posted(ticket: Int32[Array, "4"], after: Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The words of a posting, uint32 of this shape, read once `after` is calculated, whose values do not matter. Waits
    for them. To be called once for each posting."""
    words = jax.ShapeDtypeStruct((math.prod(shape),), jnp.uint32)
    return jax.ffi.ffi_call(NAME, words)(ticket, after.reshape(-1)[:1]).reshape(shape)


def _kernel(tools: Tools) -> tuple[Any, Any]:
    """(ticket [4], anything) -> words. One tile."""
    argument, result, size = tools.argument, tools.result, tools.result_size
    integers, longs, loaded, sleep = tools.integers, tools.longs, tools.loaded, tools.sleep
    most = LOOKS + SECONDS * 1_000_000 // (2 * SLEEP)  # a sleep takes about twice as long as it is asked to

    def tiles(call: int) -> int:
        return 1

    def tile(call: int, index: int) -> int:
        given = longs(argument(call, 0), 2)
        place, number = given[0], given[1]
        count = size(call, 0, 0)
        out = integers(result(call, 0), count)
        looks = 0
        while loaded(place + 8 * POSTED) != number:
            looks += 1
            if looks > most:
                for i in range(count):
                    out[i] = 0
                return 0
            if looks > LOOKS:
                sleep(SLEEP)
        words = integers(place + 8 * HEADER, count)
        for i in range(count):
            out[i] = words[i]
        longs(place + 8 * READ, 1)[0] = number
        return 0

    return tiles, tile
