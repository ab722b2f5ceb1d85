"""Memory, bandwidth and arithmetic of GPUs, and the memory of this process's device.

Sources: NVIDIA's data sheets of the HGX B200 (an eighth of its figures), H200 SXM, H100 SXM, A100 80GB SXM and L40S,
and appendix A of its whitepaper on the Ada GPU architecture for the GeForce RTX 4090. Products are dense: bfloat16 or
float16 with sums in float32, and float32 without tensor cores, because results must have float32 precision. A gigabyte
is 10^9 bytes; drivers show a few percent more.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import jax

SHARE_VARIABLES, XLA_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"), 0.75
"""Environment variables for the share of a GPU's memory that JAX reserves, and JAX's default share."""

TEMPORARY_SHARE = 0.1  # of a GPU's memory, for temporaries of programs

MIN_OUTSIDE, SHARE_OUTSIDE = 750 * 10**6, 0.03
"""Minimum memory that JAX does not reserve (CUDA's context, libraries and graphs): bytes, and share of the GPU."""

MAX_POOL_SHARE = 0.93  # maximum share of JAX's reserved memory for weights and pool

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
    """Finds a device by its driver's name, such as "NVIDIA H100 80GB HBM3"; None if the table does not have it."""
    patterns = {name: name.replace("RTX", "RTX ?") for name in DEVICES}
    return next((DEVICES[name] for name, text in patterns.items() if re.search(rf"\b{text}(?![0-9])", kind)), None)


def given_share() -> float | None:
    """Returns the share of a GPU's memory that JAX reserves, if the environment sets it."""
    return next((float(os.environ[name]) for name in SHARE_VARIABLES if os.environ.get(name)), None)


def share_of(mem_fraction: float, memory: int) -> float:
    """Returns the share that JAX must reserve of a GPU, so that weights and pool can take `mem_fraction` of it."""
    return min(mem_fraction + TEMPORARY_SHARE, 1 - max(SHARE_OUTSIDE, MIN_OUTSIDE / memory))


class Memory(NamedTuple):
    """Memory of one device, in bytes."""

    total: int
    limit: int  # reserved by JAX
    used: int  # allocated by JAX

    def budget(self, mem_fraction: float) -> int:
        """Returns the bytes for weights and pool, at most `MAX_POOL_SHARE` of the reserved memory."""
        return int(min(self.total * mem_fraction, self.limit * MAX_POOL_SHARE))


def this_memory(device: Any = None) -> Memory | None:
    """Returns the memory of a device, by default JAX's default device; None for a CPU."""
    set_device = jax.config.values["jax_default_device"]
    default = set_device if isinstance(set_device, jax.Device) else jax.local_devices()[0]
    stats = (device or default).memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    limit = stats["bytes_limit"]
    return Memory(int(limit / (given_share() or XLA_SHARE)), limit, stats.get("bytes_in_use", 0))
