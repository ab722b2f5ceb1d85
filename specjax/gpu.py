"""NVIDIA GPUs: their speed and memory, the preparation of JAX before its backend starts, and options of XLA.

JAX reads these settings when its backend starts, and falls back to the CPU almost silently if it cannot use a GPU. So
the commands call `claim` before the start and raise the `problem` that they find after it. The library never claims,
because other code may own the process; it logs the problem.

Sources: NVIDIA's data sheets of the HGX B200 (an eighth of its figures), H200 SXM, H100 SXM, A100 80GB SXM, L40S, L4,
A10G (as the A10, with half the products) and T4, and appendix A of its whitepaper on the Ada GPU architecture for the
GeForce RTX 4090. Products are dense: bfloat16 or float16 with sums in float32, and float32 without tensor cores,
because results must have float32 precision. A gigabyte is 10^9 bytes; drivers show a few percent more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from specjax_kernels.platforms import before_ampere, on_nvidia

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
    before_ampere: bool = False

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
        Device("L4", 24 * GB, 300e9, 121e12, 30.3e12),
        Device("A10G", 24 * GB, 600e9, 70e12, 31.2e12),
        Device("T4", 16 * GB, 320e9, 65e12, 8.1e12, "data sheet; float16 for models in bfloat16", True),
    )
}


def named(kind: str) -> Device | None:
    """Finds a device by its driver's name, such as "NVIDIA H100 80GB HBM3"; None if the table does not have it."""
    patterns = {name: name.replace("RTX", "RTX ?") for name in DEVICES}
    return next((DEVICES[name] for name, text in patterns.items() if re.search(rf"\b{text}(?![0-9])", kind)), None)


def given_share() -> float | None:
    """Returns the share of a GPU's memory that JAX reserves, if the environment sets it. Raises GpuError for a wrong
    one, and for two variables, which JAX refuses."""
    given = [(name, value) for name in SHARE_VARIABLES if (value := os.environ.get(name))]
    if not given:
        return None
    text = " and ".join(map("=".join, given))
    if len(given) > 1:
        raise GpuError(f"{text} are both set, and JAX takes one: unset {SHARE_VARIABLES[1]}, the older name")
    with contextlib.suppress(ValueError):
        if (share := float(given[0][1])) > 0:
            return share
    raise GpuError(f"{text} must be the share of a GPU's memory that JAX reserves, such as 0.9")


def share_of(mem_fraction: float, memory: int) -> float:
    """Returns the share that JAX must reserve of a GPU, so that weights and pool can take `mem_fraction` of it.
    `memory` is in bytes, 0 if unknown."""
    most = 1 - max(SHARE_OUTSIDE, MIN_OUTSIDE / memory) if memory else XLA_SHARE
    return min(mem_fraction + TEMPORARY_SHARE, most)


class Memory(NamedTuple):
    """Memory of one device, in bytes."""

    total: int
    limit: int  # reserved by JAX
    used: int  # allocated by JAX
    before_ampere: bool = False

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
    return Memory(int(limit / (given_share() or XLA_SHARE)), limit, stats.get("bytes_in_use", 0), before_ampere())


RECOMMENDED_DRIVER = "570"  # older drivers had faults in graphs with branches and loops (XLA's issue 25769)

MIN_VERSIONS = {"jax_cuda12_plugin": ("12", "525.60.13", "5.2"), "jax_cuda13_plugin": ("13", "580.65.06", "7.5")}
"""JAX's plugin -> CUDA version, minimum driver, minimum compute capability. Sources: NVIDIA's CUDA release notes (minor
version compatibility) and JAX's installation guide."""

NO_CUDA = (
    "JAX has no CUDA: in specjax's folder, pip install -e '.[cuda12]' or, with a driver from "
    f"{MIN_VERSIONS['jax_cuda13_plugin'][1]} on, '.[cuda13]'"
)
ON_CPU = "; JAX_PLATFORMS=cpu in the environment decodes on the CPU"
CONTAINER = "start the container with `docker run --gpus all` (NVIDIA Container Toolkit)"
DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # JAX looks for a GPU only if it finds one of these

TRITON = "8.0"  # minimum compute capability for Triton, which compiles `specjax_kernels`

IDLE_BYTES = 0.5 * GB  # maximum memory in use on a GPU without other programs

_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.total", "memory.free", "mig.mode.current")
_PART = re.compile(r"GPU (?P<gpu>\d+):|MIG (?P<name>\S+?(?P<gb>\d+)gb\S*) .*UUID: (?P<uuid>MIG-[^)]+)")


class GpuError(ValueError):
    """The requested GPUs cannot be used."""


class Card(NamedTuple):
    number: int  # in order of PCI addresses
    uuid: str
    name: str
    driver: str
    capability: str  # "9.0": Hopper
    memory: int  # bytes; 0: unknown
    free: int

    def __str__(self) -> str:
        memory = f"{self.memory / GB:.1f} GB" if self.memory else "unknown memory"
        return f"{self.name} (driver {self.driver}, compute capability {self.capability}, {memory})"


def cards() -> list[Card]:
    """Lists the NVIDIA GPUs that CUDA shows this process, in CUDA's order; empty without `nvidia-smi`. Of a GPU that is
    split (MIG), CUDA shows the instance that CUDA_VISIBLE_DEVICES names, or the first."""
    visible, present = os.environ.get("CUDA_VISIBLE_DEVICES"), list[Card]()
    split = visible is not None and "MIG-" in visible
    for line in _nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"):
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_FIELDS) or not values[0].isdecimal():
            logger.warning("cannot read this line of nvidia-smi: %s", line)
            continue
        index, uuid, name, driver, capability, total, free, mode = values
        memory = int(total) << 20 if total.isdecimal() else 0
        unused = int(free) << 20 if free.isdecimal() else memory
        present.append(Card(int(index), uuid, name, driver, capability, memory, unused))
        split |= mode == "Enabled"
    parts, parent = list[Card](), None
    for match in filter(None, map(_PART.search, _nvidia_smi("-L") if split else ())):
        if match["gpu"]:
            parent = next((card for card in present if card.number == int(match["gpu"])), None)
        elif parent is not None:
            name, size = f"{parent.name} MIG {match['name']}", int(match["gb"]) * GB
            parts.append(parent._replace(uuid=match["uuid"], name=name, memory=size, free=size))
    first = {part.number: part for part in reversed(parts)}
    present = [first.get(card.number, card) for card in present]
    if visible is None:
        return present
    chosen = []
    for name in map(str.strip, visible.split(",")):
        match = [c for c in (*present, *parts) if name == str(c.number) or (name and c.uuid.startswith(name))]
        if not match:
            break  # CUDA, too, hides all devices after an unknown one
        chosen.append(match[0])
    return chosen


def _nvidia_smi(*arguments: str) -> list[str]:
    """Lines that nvidia-smi prints; none, with a warning, if it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", None) or ""
        logger.warning("nvidia-smi failed: %s %s", error, said.strip())
        return []


def _may_use_cuda() -> bool:
    """False if JAX_PLATFORMS leaves CUDA out."""
    platforms = jax.config.values["jax_platforms"]
    return not platforms or bool({"cuda", "gpu"} & set(platforms.split(",")))


def claim(mem_fraction: float, gpu: int = 0, count: int = 1) -> Card | None:
    """Prepares JAX for GPUs before its backend starts; `problem` checks the start.

    JAX uses only `count` of the visible GPUs, from number `gpu` on, and reserves a tenth of their memory beyond
    `mem_fraction`, the share for weights and KV pool. Environment variables take precedence. Returns the first GPU, or
    None if JAX runs on the CPU. Raises GpuError if the GPUs cannot be used, or if JAX_PLATFORMS asks for CUDA and JAX
    has none.
    """
    if not _may_use_cuda():
        return None
    cuda, platforms = plugin(), jax.config.values["jax_platforms"] or ""
    if cuda is None and "cuda" in platforms and "cpu" not in platforms:
        raise GpuError(f"JAX_PLATFORMS={platforms} asks for CUDA, and {NO_CUDA}{ON_CPU}")
    visible = cards()
    if gpu + count > len(visible) and (visible or gpu):
        wanted = f"GPU {gpu} was" if count == 1 else f"{count} GPUs from number {gpu} on were"
        raise GpuError(f"{wanted} asked for; CUDA shows {', '.join(card.name for card in visible) or 'none'}")
    if not visible or cuda is None:
        return None
    chosen = visible[gpu : gpu + count]
    card = min(chosen, key=lambda card: card.free)
    for selected in chosen:
        _check(selected, *MIN_VERSIONS[cuda])
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
    if jax.config.values["jax_cuda_visible_devices"] == "all":
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(gpu, gpu + count))))
    if given_share() is None:
        share = share_of(mem_fraction, card.memory)
        if not card.memory:
            logger.warning("%s: JAX takes %.0f%%; %s sets another share", card, 100 * share, SHARE_VARIABLES[0])
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


def plugin() -> str | None:
    """The module of JAX's plugin for CUDA, if it is installed."""
    return next((name for name in MIN_VERSIONS if importlib.util.find_spec(name)), None)


def problem(card: Card | None = None) -> str | None:
    """Starts JAX's backend. Returns why it does not use the claimed `card`, or without one a GPU of this machine, and
    what mends it. None: it does, JAX_PLATFORMS leaves CUDA out, or there is no GPU and JAX has no plugin for CUDA."""
    if not _may_use_cuda():
        return None
    name, cause = plugin(), "its messages say why"
    if name is None:
        found = cards() if jax.default_backend() == "cpu" else []
        return f"JAX runs on the CPU: this machine has an {found[0]}, and {NO_CUDA}{ON_CPU}" if found else None
    cuda, jaxlib = f"jax-cuda{MIN_VERSIONS[name][0]}", _installed("jaxlib")
    install = f"pip install 'jax[{cuda[4:]}]=={jax.__version__}'"
    for package in (f"{cuda}-plugin", f"{cuda}-pjrt"):
        if (version := _installed(package)) and _version(version) != _version(str(jaxlib)):
            return f"{package} {version} does not fit jaxlib {jaxlib}: {install}"
    try:
        device = jax.local_devices()[0]
        if device.platform != "cpu":
            kind = device.device_kind
            if card is None or kind == card.name or kind not in {other.name for other in cards()}:
                return None
            return f"{card} was claimed, and JAX uses {kind}: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    except (RuntimeError, AssertionError) as error:  # asserts that some platform of JAX_PLATFORMS has started
        cause = str(error).partition("\n")[0] or cause
    requires = importlib.metadata.requires(f"{cuda}-plugin") if _installed(f"{cuda}-plugin") else None
    needed = [re.split(r"[^\w-]", text)[0] for text in requires or ()]
    if not any(map(os.path.exists, DEVICE_FILES)):
        advice = f"This machine or container has none of {', '.join(DEVICE_FILES)}: {CONTAINER}"
    elif not _loads("libcuda.so.1"):
        advice = f"The driver's libcuda.so.1 is missing: install NVIDIA's driver, or {CONTAINER}"
    elif missing := [package for package in needed if _installed(package) is None]:
        advice = f"Not installed: {', '.join(missing)}. {install}"
    else:
        advice = f"{install}, and unset LD_LIBRARY_PATH if it names another CUDA"
    return f"JAX has a plugin for CUDA and does not use {card or 'a GPU'} ({cause}). {advice}{ON_CPU}"


@functools.cache
def warn_of_problem() -> None:
    """Logs the `problem` of a library's user, once in a process."""
    if (text := problem()) is not None:
        logger.warning("%s", text)


def _installed(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _loads(library: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL(library))
    return False


def _check(card: Card, cuda: str, driver: str, capability: str) -> None:
    advice = ON_CPU
    if () < _version(card.driver) < _version(driver):
        if cuda != "12":
            advice = f" (or pip install -e '.[cuda12]', from {MIN_VERSIONS['jax_cuda12_plugin'][1]} on){advice}"
        raise GpuError(f"{card}: JAX with CUDA {cuda} needs a driver from {driver} on{advice}")
    if () < _version(card.capability) < _version(capability):
        raise GpuError(f"{card}: JAX with CUDA {cuda} needs a compute capability from {capability} on{advice}")
    if () < _version(card.capability) < _version(TRITON):
        text = "%s: kernels need compute capability %s; XLA's are used, and float16 for models in bfloat16"
        logger.warning(text, card, TRITON)
    if () < _version(card.driver) < _version(RECOMMENDED_DRIVER):
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
