"""Triton and jax-triton, imported where they are installed and recent enough; repairs of versions that need one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
import sys
from typing import Any

import jax
from jax.interpreters import partial_eval

NEEDED = {"Python": "3.12", "jax": "0.11", "jax-triton": "0.4", "triton": "3.7"}


def unmet() -> str | None:
    """What is missing to run Triton from JAX, and what would work; None: nothing is."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for package in list(NEEDED)[1:]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)

    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:2]]

    if all(name in found and numbers(found[name]) >= numbers(least) for name, least in NEEDED.items()):
        return None
    needs = ", ".join(f"{name} >= {least}" for name, least in NEEDED.items())
    there = ", ".join(f"{name} {found[name]}" if name in found else f"no {name}" for name in NEEDED)
    return (
        f"implementation 'triton' of tree_attention needs {needs}; found {there}. "
        f"With Python {NEEDED['Python']} or later: pip install 'specjax[triton]'"
    )


UNMET = unmet()  # why no kernel can be made here; None: one can

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
