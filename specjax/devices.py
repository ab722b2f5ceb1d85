"""What bounds a step on a device: its memory, the memory's speed, that of products. A table of GPUs, and this machine.

Sources: NVIDIA's data sheets of the H200 SXM, H100 SXM, A100 80GB SXM and L40S, and appendix A of its whitepaper on the
Ada GPU architecture for the GeForce RTX 4090. Products are dense, of bfloat16 or float16 with sums in float32, and of
float32 without tensor cores, since float32 is promised. Gigabytes are taken as 10^9 bytes; a driver shows a few percent
more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

XLA_SHARE_VARIABLE, XLA_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75
"""The share of a GPU's memory that jax takes: an environment variable, and its default in jax."""


GB = 10**9


class Device(NamedTuple):
    name: str
    memory: int  # bytes
    bandwidth: float  # of the memory, bytes/s
    flops: float  # multiplications and additions a second, of 16-bit numbers
    float32_flops: float
    note: str = "data sheet"
    measured: bool = False  # the speeds are those that a program reaches

    def speed(self, dtype: str) -> float:
        return self.float32_flops if dtype == "float32" else self.flops


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("H200", 141 * GB, 4.8e12, 989e12, 67e12),
        Device("H100", 80 * GB, 3.35e12, 989e12, 67e12),
        Device("A100", 80 * GB, 2.039e12, 312e12, 19.5e12),
        Device("L40S", 48 * GB, 864e9, 362e12, 91.6e12),
        Device("RTX4090", 24 * GB, 1008e9, 165.2e12, 82.6e12),
    )
}


def xla_share() -> float:
    """The share of a GPU's memory that jax would take in this environment."""
    return float(os.environ.get(XLA_SHARE_VARIABLE, XLA_SHARE))


def this_device(dtype: str) -> Device:
    """This process's device. Its speeds are measured in a second, by a copy and by a product of `dtype`."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") or system_memory()
    speed = _product_speed(dtype)
    return Device(device.device_kind, limit, _copy_speed(), speed, speed, "measured: a copy of 256 MB, a product", True)


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
