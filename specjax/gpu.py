"""NVIDIA GPUs: their speed and memory, the preparation of JAX before its backend starts, and options of XLA.

JAX reads these settings when its backend starts, and falls back to the CPU almost silently if it cannot use a GPU. So
the commands call `claim` first. The library never does, because other code may own the process.

Sources: NVIDIA's data sheets of the HGX B200 (an eighth of its figures), H200 SXM, H100 SXM, A100 80GB SXM and L40S,
and appendix A of its whitepaper on the Ada GPU architecture for the GeForce RTX 4090. Products are dense: bfloat16 or
float16 with sums in float32, and float32 without tensor cores, because results must have float32 precision. A gigabyte
is 10^9 bytes; drivers show a few percent more.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import shutil
import subprocess
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from specjax_kernels.platforms import on_nvidia

logger = logging.getLogger(__name__)

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


RECOMMENDED_DRIVER = "570"  # older drivers had faults in graphs with branches and loops (XLA's issue 25769)

MIN_VERSIONS = {"jax_cuda12_plugin": ("12", "525.60.13", "5.2"), "jax_cuda13_plugin": ("13", "580.65.06", "7.5")}
"""JAX's plugin -> CUDA version, minimum driver, minimum compute capability. Sources: NVIDIA's CUDA release notes (minor
version compatibility) and JAX's installation guide."""

TRITON = "8.0"  # minimum compute capability for Triton, which compiles `specjax_kernels`

IDLE_BYTES = 0.5 * GB  # maximum memory in use on a GPU without other programs

_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.total", "memory.free")


class GpuError(ValueError):
    """The requested GPUs cannot be used."""


class Card(NamedTuple):
    number: int  # in order of PCI addresses
    uuid: str
    name: str
    driver: str
    capability: str  # "9.0": Hopper
    memory: int  # bytes
    free: int

    def __str__(self) -> str:
        return f"{self.name} (driver {self.driver}, compute capability {self.capability}, {self.memory / GB:.1f} GB)"


def cards() -> list[Card]:
    """Lists the NVIDIA GPUs that CUDA shows this process, in CUDA's order; empty without `nvidia-smi`."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi failed: %s", error)
        return []
    present = [card for line in lines if (card := _card(line)) is not None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = []
    for name in map(str.strip, visible.split(",")):
        match = [card for card in present if name == str(card.number) or (name and card.uuid.startswith(name))]
        if not match:
            break  # CUDA, too, hides all devices after an unknown one
        chosen.append(match[0])
    return chosen


def _card(line: str) -> Card | None:
    values = [value.strip() for value in line.split(",")]
    try:
        index, uuid, name, driver, capability, total, free = values
        return Card(int(index), uuid, name, driver, capability, int(total) << 20, int(free) << 20)
    except ValueError:
        logger.warning("cannot read this line of nvidia-smi: %s", line)
        return None


def claim(mem_fraction: float, gpu: int = 0, count: int = 1) -> Card | None:
    """Prepares JAX for GPUs before its backend starts.

    JAX uses only `count` of the visible GPUs, from number `gpu` on, and reserves a tenth of their memory beyond
    `mem_fraction`, the share for weights and KV pool. Environment variables take precedence. Returns the first GPU, or
    None if JAX runs on the CPU. Raises GpuError if the GPUs cannot be used, or if JAX_PLATFORMS asks for CUDA and JAX
    has none.
    """
    platforms = jax.config.values["jax_platforms"]
    names = set(platforms.split(",")) if platforms else set()
    if names and not {"cuda", "gpu"} & names:
        return None
    plugin = next((name for name in MIN_VERSIONS if importlib.util.find_spec(name)), None)
    if "cuda" in names and plugin is None and "cpu" not in names:
        raise GpuError(
            f"JAX_PLATFORMS={platforms} asks for CUDA, and JAX has none: pip install 'specjax[cuda12]' or, with a "
            f"driver from {MIN_VERSIONS['jax_cuda13_plugin'][1]} on, 'specjax[cuda13]'; or unset the variable, for the "
            "CPU"
        )
    visible = cards()
    if gpu + count > len(visible) and (visible or gpu):
        wanted = f"GPU {gpu} was" if count == 1 else f"{count} GPUs from number {gpu} on were"
        raise GpuError(f"{wanted} asked for; CUDA shows {', '.join(card.name for card in visible) or 'none'}")
    if not visible:
        return None
    chosen = visible[gpu : gpu + count]
    card = min(chosen, key=lambda card: card.free)
    if plugin is None:
        logger.warning(
            "This machine has an %s and JAX no CUDA, so it runs on the CPU: pip install 'specjax[cuda12]' or, with a "
            "driver from %s on, 'specjax[cuda13]'", card, MIN_VERSIONS["jax_cuda13_plugin"][1],
        )  # fmt: skip
        return None
    for selected in chosen:
        _check(selected, *MIN_VERSIONS[plugin])
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
    if jax.config.values["jax_cuda_visible_devices"] == "all":
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(gpu, gpu + count))))
    if not any(name in os.environ for name in SHARE_VARIABLES):
        share = share_of(mem_fraction, card.memory)
        if card.memory - card.free > IDLE_BYTES:
            share = min(share, card.free / card.memory - (1 - share_of(1.0, card.memory)))
            logger.warning(
                "Other programs have %.1f of the GPU's %.1f GB; JAX takes %.1f", (card.memory - card.free) / GB,
                card.memory / GB, max(share, 0) * card.memory / GB,
            )  # fmt: skip
        if share <= 0:
            raise GpuError(f"{card} has {card.free / GB:.1f} GB that no other program has taken, which is too little")
        os.environ[SHARE_VARIABLES[0]] = f"{share:.4f}"
    return chosen[0]


def _check(card: Card, cuda: str, driver: str, capability: str) -> None:
    advice = "; JAX_PLATFORMS=cpu in the environment decodes on the CPU"
    if _version(card.driver) < _version(driver):
        if cuda != "12":
            advice = f" (or pip install 'specjax[cuda12]', from {MIN_VERSIONS['jax_cuda12_plugin'][1]} on){advice}"
        raise GpuError(f"{card}: JAX with CUDA {cuda} needs a driver from {driver} on{advice}")
    if _version(card.capability) < _version(capability):
        raise GpuError(f"{card}: JAX with CUDA {cuda} needs a compute capability from {capability} on{advice}")
    if _version(card.capability) < _version(TRITON):
        logger.warning("%s: kernels need compute capability %s; attention is XLA's, and slower", card, TRITON)
    if _version(card.driver) < _version(RECOMMENDED_DRIVER):
        logger.warning("%s: drivers from %s on are recommended", card, RECOMMENDED_DRIVER)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


# Compilation

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
"""XLA's default list. An option replaces the whole list; only XLA_FLAGS can extend it (`+WHILE`)."""

LOOPS, SCHEDULING = "xla_gpu_enable_command_buffer", "xla_gpu_command_buffer_scheduling_mode"
NVIDIA_OPTIONS = MappingProxyType({LOOPS: f"{IN_GRAPHS},WHILE", SCHEDULING: "CONCURRENT"})
"""XLA's options for steps. A step has about a thousand small kernels and is fast only as one CUDA graph. By default XLA
runs the loops of user-defined drafters and verifiers from the host, which splits the graph; WHILE puts them into it
(compiled for an H200 with jax 0.10.2, 0.11.2 and 0.12.0; needs the driver of CUDA 12.3). CONCURRENT lets independent
nodes overlap, such as the page writes of different layers. Flags in XLA_FLAGS take precedence."""


def compiler_options() -> dict[str, str] | None:
    """Returns ``compiler_options`` for `jax.jit` of a step; None unless JAX's default device is an NVIDIA GPU.

    Options that this XLA rejects are left out.
    """
    if not on_nvidia():
        return None
    in_flags = re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", ""))
    wanted = NVIDIA_OPTIONS.items()
    return {name: value for name, value in wanted if name not in in_flags and accepts(name, value)} or None


@functools.cache
def accepts(name: str, value: str) -> bool:
    """Returns True if this XLA has the option. An unknown option would fail every compilation."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("XLA's option %s=%s is not used, steps may be slower: %s", name, value, error)
        return False
    return True
