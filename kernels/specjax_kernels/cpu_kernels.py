"""All kernels for a CPU, made ready while a model is loaded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

from specjax_kernels import cpu, cpu_attention, cpu_code, cpu_product

_LOG = logging.getLogger(__name__)

KERNELS = (*cpu_product.KERNELS, *cpu_attention.KERNELS)

PATIENCE = 120.0
"""Seconds for a process of its own to compile them all in; on 2 cores it takes a tenth of that."""

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
    missing = [file for file in files.values() if file is None or not os.path.exists(file)]
    child = _child() if missing and None not in missing else None
    deadline = time.monotonic() + PATIENCE

    def wait(name: str) -> None:
        file = files[name]
        while file and child and child.poll() is None and not os.path.exists(file) and time.monotonic() < deadline:
            time.sleep(0.05)

    try:
        cpu.register_in_turn(KERNELS, wait)
    finally:
        if child is not None:
            child.kill()  # it has ended, or is of no use
            child.wait()


def _child() -> subprocess.Popen[bytes] | None:
    """Compiles all, if it can: what goes wrong there goes wrong here again, and is told of then."""
    if not sys.executable or getattr(sys, "frozen", False) or not cpu_code.can_keep():
        return None
    # -P: what lies in the current folder is not to be imported.
    command = [sys.executable, "-P", "-c", _IN_A_CHILD, str(cpu_code.folder())]
    environment, quiet = os.environ | {"JAX_PLATFORMS": "cpu"}, subprocess.DEVNULL
    try:
        cpu.known_outside()  # else it would compile for nothing
        return subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
    except Exception as error:
        _LOG.info("kernels are not compiled in a process of their own: %s", error)
        return None
