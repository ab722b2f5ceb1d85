"""All kernels for a CPU, made ready while a model is loaded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import suppress

from specjax_kernels import cpu, cpu_attention, cpu_code, cpu_product

_LOG = logging.getLogger(__name__)

KERNELS = (*cpu_product.KERNELS, *cpu_attention.KERNELS)

_IN_A_CHILD = (
    "import pathlib, sys; from specjax_kernels import cpu_code, cpu_kernels; "
    "cpu_code.keep_in(pathlib.Path(sys.argv[1])); cpu_kernels.register()"
)


def register() -> None:
    """Tells XLA of all kernels, compiled or as they were kept."""
    for kernel in KERNELS:
        cpu.register(*kernel)


def prepare() -> None:
    """`register`, made fast: for a thread beside the one that loads a model. Who traces a program that calls a kernel
    waits for that one.

    If any must be compiled and can be kept, a process of its own does that: Numba compiles in Python, so that loading
    and tracing would go on only in turns with it.
    """
    files = {name: cpu_code.file_of(name, build) for name, build in KERNELS}
    child = None if all(file and file.exists() for file in files.values()) else _child()

    def wait(name: str) -> None:
        file = files[name]
        while file and child and child.poll() is None and not file.exists():
            time.sleep(0.05)

    cpu.register_in_turn(KERNELS, wait)
    if child is not None and child.wait():
        _LOG.info("kernels were not compiled in a process of their own: exit status %d", child.returncode)


def _child() -> subprocess.Popen[bytes] | None:
    """Compiles all, if it can: what goes wrong there goes wrong here again, and is told of then."""
    folder, quiet = cpu_code.folder(), subprocess.DEVNULL
    if folder is not None and sys.executable:
        with suppress(OSError):
            command = [sys.executable, "-c", _IN_A_CHILD, str(folder)]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            return subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
    return None
