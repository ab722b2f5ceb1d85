"""Triton and jax-triton, where they are installed: what was found, what is missing, what has to be mended."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from typing import Any

import jax
from jax.interpreters import partial_eval

PYTHON = (3, 12)
PACKAGES = {"jax": (0, 11), "jax-triton": (0, 4), "triton": (3, 7)}


def unmet() -> str | None:
    """What is missing to run Triton from JAX, and what would work. None: nothing is."""

    def dotted(version: tuple[int, ...]) -> str:
        return ".".join(map(str, version))

    python = tuple(sys.version_info[:3])
    found, good = [f"Python {dotted(python)}"], python >= PYTHON
    for package, least in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found, good = [*found, f"no {package}"], False
            continue
        found.append(f"{package} {version}")
        good = good and tuple(map(int, re.findall(r"\d+", version)[:2])) >= least
    if good:
        return None
    needs = [f"Python >= {dotted(PYTHON)}", *(f"{package} >= {dotted(least)}" for package, least in PACKAGES.items())]
    return (
        f"implementation 'triton' of tree_attention needs {', '.join(needs)}; found {', '.join(found)}. "
        f"With Python {dotted(PYTHON)} or later: pip install 'specjax[triton]'"
    )


UNMET = unmet()
"""Why no kernel can be made here; None: one can."""

jax_triton: Any = None
tl: Any = None
INTERPRETED = False
if UNMET is None:
    try:
        jax_triton = importlib.import_module("jax_triton")
        tl = importlib.import_module("triton.language")
        INTERPRETED = bool(importlib.import_module("triton").knobs.runtime.interpret)
    except (ImportError, AttributeError, OSError) as error:
        UNMET = f"implementation 'triton' of tree_attention: its packages are there and cannot be imported: {error}"
if UNMET is None and tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12):
    # jax-triton 0.4.1 registers a rule for dead code with the two arguments of jax 0.11; jax 0.12 passes three and
    # every trace ends in a TypeError. The default rule drops a call whose results nobody uses: right for ours.
    partial_eval.dce_rules.pop(jax_triton.triton_lib.triton_kernel_call_p, None)


def jit(function: Any) -> Any:
    """`triton.jit`, where there is one."""
    return function if UNMET is not None else importlib.import_module("triton").jit(function)
