"""What bounds a step on a device: its memory, the memory's speed, that of products. A table of GPUs, and this machine.

Sources: NVIDIA's data sheets of the HGX B200 (an eighth of its figures), H200 SXM, H100 SXM, A100 80GB SXM and L40S,
and appendix A of its whitepaper on the Ada GPU architecture for the GeForce RTX 4090. Products are dense, of bfloat16
or float16 with sums in float32, and of float32 without tensor cores, since float32 is promised. Gigabytes are taken as
10^9 bytes; a driver shows a few percent more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SHARE_VARIABLES, XLA_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"), 0.75
"""The share of a GPU's memory that jax takes: environment variables, of which one may be set, and jax's default."""

REST = 0.1
"""The share of a GPU's memory for what is neither weights nor pool, such as a program's temporaries."""

LEAST_OUTSIDE, SHARE_OUTSIDE = 750 * 10**6, 0.03
"""What is left outside of what jax takes, at least: bytes (CUDA's context, libraries and graphs), and a share."""

ROOM = 0.93
"""The share of what jax has taken that weights and pool may have at most."""

GB = 10**9


class Device(NamedTuple):
    name: str
    memory: int  # bytes
    bandwidth: float  # of the memory, bytes/s
    flops: float  # multiplications and additions a second, of 16-bit numbers
    float32_flops: float
    note: str = "data sheet"

    def speed(self, dtype: str) -> float:
        return self.float32_flops if dtype == "float32" else self.flops


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("B200", 180 * GB, 8e12, 2250e12, 75e12),
        Device("H200", 141 * GB, 4.8e12, 989e12, 67e12),
        Device("H100", 80 * GB, 3.35e12, 989e12, 67e12),
        Device("A100", 80 * GB, 2.039e12, 312e12, 19.5e12),
        Device("L40S", 48 * GB, 864e9, 362e12, 91.6e12),
        Device("RTX4090", 24 * GB, 1008e9, 165.2e12, 82.6e12),
    )
}


def named(kind: str) -> Device | None:
    """The device of the table that a driver's name means, such as "NVIDIA H100 80GB HBM3"; None: it has none."""
    patterns = {name: name.replace("RTX", "RTX ?") for name in DEVICES}
    return next((DEVICES[name] for name, found in patterns.items() if re.search(rf"\b{found}(?![0-9])", kind)), None)


def given_share() -> float | None:
    """The share of a GPU's memory that jax takes, where the environment says it."""
    return next((float(os.environ[name]) for name in SHARE_VARIABLES if os.environ.get(name)), None)


def share_of(mem_fraction: float, memory: int) -> float:
    """The share of a GPU of `memory` bytes that jax should take for weights and pool to have `mem_fraction` of it."""
    return min(mem_fraction + REST, 1 - max(SHARE_OUTSIDE, LEAST_OUTSIDE / memory))


class Memory(NamedTuple):
    """Of one device, in bytes."""

    total: int  # that the device has
    limit: int  # that jax has taken of it
    used: int

    def budget(self, mem_fraction: float) -> int:
        """What weights and pool may have: this share of the device, and no more than `ROOM` of what jax has taken."""
        return int(min(self.total * mem_fraction, self.limit * ROOM))


def this_memory(device: Any = None) -> Memory | None:
    """That of a device, by default the one that `jax.default_device` has set, or this process's first; None: it has
    none of its own, as a CPU."""
    set_device = jax.config.values["jax_default_device"]
    default = set_device if isinstance(set_device, jax.Device) else jax.local_devices()[0]
    stats = (device or default).memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    limit = stats["bytes_limit"]
    return Memory(int(limit / (given_share() or XLA_SHARE)), limit, stats.get("bytes_in_use", 0))


def this_device(dtype: str) -> Device:
    """This process's device. Its speeds are measured in a second, by a copy and by a product of `dtype`."""
    device, memory = jax.local_devices()[0], this_memory()
    total = system_memory() if memory is None else memory.total
    speed = _product_speed(dtype)
    return Device(device.device_kind, total, _copy_speed(), speed, speed, "measured: a copy of 256 MB, a product")


def system_memory() -> int:
    """Bytes of memory that this machine has, or that its control group may use."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).is_file() and (text := Path(file).read_text().strip()).isdecimal():
            memory = min(memory, int(text))
    return memory


def _copy_speed() -> float:
    """Bytes read and written a second."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros(2**26, jnp.float32)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        array = jax.block_until_ready(increment(array))
        best = min(best, time.perf_counter() - start)
    return 2 * array.nbytes / best


def _product_speed(dtype: str) -> float:
    rows, width = 256, 2048
    x, y = jnp.ones((rows, width), dtype), jnp.ones((width, width), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * rows * width * width / _best(lambda: product(x, y))


def _best(call: Callable[[], jax.Array]) -> float:
    """Seconds of the fastest of a few calls."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)
