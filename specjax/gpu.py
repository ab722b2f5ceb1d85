"""An NVIDIA GPU before JAX starts on it: whether JAX can use it, which one it is, and how much of its memory JAX takes.

JAX reads all this from its settings when its backend starts, and says little where it cannot use a card: it runs on the
CPU. So the commands call `claim` first. A library does not: the process is its caller's.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
from typing import NamedTuple

import jax

from specjax.devices import GB, SHARE_VARIABLES, share_of

logger = logging.getLogger(__name__)

RECOMMENDED_DRIVER = "570"
"""Older ones had faults in graphs with branches and loops (XLA's issue 25769)."""

LEAST = {"jax_cuda12_plugin": ("12", "525.60.13", "5.2"), "jax_cuda13_plugin": ("13", "580.65.06", "7.5")}
"""JAX's plugin -> CUDA's version, and the least driver and compute capability that it runs with. Sources: NVIDIA's
release notes of CUDA (minor version compatibility) and JAX's installation guide."""

TRITON = "8.0"
"""The least compute capability that Triton compiles for, and so all kernels of `specjax_kernels`."""

OTHERS = 0.5 * GB
"""Bytes that a card with no other program on it may have in use, for its context."""

_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.total", "memory.free")


class GpuError(ValueError):
    """There is a GPU, and it cannot be used as it was asked for."""


class Card(NamedTuple):
    number: int  # in the order of PCI addresses
    uuid: str
    name: str
    driver: str
    capability: str  # "9.0": Hopper
    memory: int  # bytes
    free: int

    def __str__(self) -> str:
        return f"{self.name} (driver {self.driver}, compute capability {self.capability}, {self.memory / GB:.1f} GB)"


def cards() -> list[Card]:
    """The NVIDIA GPUs that CUDA shows this process, in its order. Empty without one, or without `nvidia-smi`."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi says nothing of this machine's GPUs: %s", error)
        return []
    found = [card for line in lines if (card := _card(line)) is not None]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return found
    chosen = []
    for name in map(str.strip, shown.split(",")):
        match = [card for card in found if name == str(card.number) or (name and card.uuid.startswith(name))]
        if not match:
            break  # as CUDA does: what follows an unknown device is not shown either
        chosen.append(match[0])
    return chosen


def _card(line: str) -> Card | None:
    values = [value.strip() for value in line.split(",")]
    try:
        index, uuid, name, driver, capability, total, free = values
        return Card(int(index), uuid, name, driver, capability, int(total) << 20, int(free) << 20)
    except ValueError:
        logger.warning("nvidia-smi describes a GPU in a way that is not understood: %s", line)
        return None


def claim(mem_fraction: float, gpu: int = 0, count: int = 1) -> Card | None:
    """Prepares JAX, whose backend must not have started, for one GPU or several, of which it returns the first; None:
    JAX runs on the CPU, as without one.

    Only these GPUs are touched. JAX takes the share of its memory that weights and pool may have, and a tenth for the
    rest. What the environment says of these wins.

    Args:
        mem_fraction: the share of the card's memory for weights and KV pool.
        gpu: which one, of those that CUDA shows, from 0; the first of several.
        count: how many, that one included.

    Raises:
        GpuError: there is no such GPU; it, or its driver, is too old for the JAX that is installed; or JAX_PLATFORMS
            asks for CUDA, which this JAX does not have.
    """
    platforms = jax.config.values["jax_platforms"]
    names = set(platforms.split(",")) if platforms else set()
    if names and not {"cuda", "gpu"} & names:
        return None
    plugin = next((name for name in LEAST if importlib.util.find_spec(name)), None)
    if "cuda" in names and plugin is None and "cpu" not in names:
        raise GpuError(
            f"JAX_PLATFORMS={platforms} asks for CUDA, and JAX has none: pip install 'specjax[cuda12]' or, with a "
            f"driver from {LEAST['jax_cuda13_plugin'][1]} on, 'specjax[cuda13]'; or leave the variable out, for the CPU"
        )
    found = cards()
    if gpu >= len(found) and (found or gpu):
        raise GpuError(f"GPU {gpu} was asked for; CUDA shows " + (", ".join(card.name for card in found) or "none"))
    if not found:
        return None
    if gpu + count > len(found):
        raise GpuError(
            f"{count} GPUs from number {gpu} on were asked for; CUDA shows " + ", ".join(card.name for card in found)
        )
    chosen = found[gpu : gpu + count]
    card = min(chosen, key=lambda card: card.free)
    if plugin is None:
        logger.warning(
            "This machine has an %s and JAX no CUDA, so it runs on the CPU: pip install 'specjax[cuda12]' or, with a "
            "driver from %s on, 'specjax[cuda13]'", card, LEAST["jax_cuda13_plugin"][1],
        )  # fmt: skip
        return None
    for each in chosen:
        _check(each, *LEAST[plugin])
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
    if jax.config.values["jax_cuda_visible_devices"] == "all":
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(gpu, gpu + count))))
    if not any(name in os.environ for name in SHARE_VARIABLES):
        share = share_of(mem_fraction, card.memory)
        if card.memory - card.free > OTHERS:
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
    otherwise = "; with JAX_PLATFORMS=cpu in the environment, the CPU decodes"
    if _version(card.driver) < _version(driver):
        other = "" if cuda == "12" else f" (or pip install 'specjax[cuda12]', from {LEAST['jax_cuda12_plugin'][1]} on)"
        raise GpuError(f"{card}: JAX with CUDA {cuda} needs a driver from {driver} on{other}{otherwise}")
    if _version(card.capability) < _version(capability):
        raise GpuError(f"{card}: JAX with CUDA {cuda} needs a compute capability from {capability} on{otherwise}")
    if _version(card.capability) < _version(TRITON):
        logger.warning("%s: kernels need compute capability %s; attention is XLA's, and slower", card, TRITON)
    if _version(card.driver) < _version(RECOMMENDED_DRIVER):
        logger.warning("%s: drivers from %s on are recommended", card, RECOMMENDED_DRIVER)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
