"""Settings of all tests: checked annotations (jaxtyping and beartype), cheap compilation, bounded memory."""

from __future__ import annotations

import collections
import ctypes
import gc
import importlib.metadata
import inspect
import logging
import math
import os
import resource
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests need no network
# These flags make the compilation of toy programs four times cheaper; subprocesses inherit them. XLA_FLAGS in the
# environment, even an empty one, replaces them: `make test` does so for tests marked `optimized` or `real_model`,
# `make test-all` for all. JAX 0.12 has no flag of the fusion emitters, and XLA exits at an unknown flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false" * (importlib.metadata.version("jaxlib") < "0.12")
    + " --xla_cpu_parallel_codegen_split_count=1",
)

import hypothesis
import jax
import jaxtyping
import pytest

# Tracing makes many long-lived objects, which slow garbage collection.
gc.set_threshold(100_000, 20, 100)

# Inner functions are new in each call of the outer one: their annotations are checked in the first calls.
MAX_CHECKS = 3
_checks: collections.Counter[types.CodeType] = collections.Counter()
_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_at_first(**options: Any) -> Callable[[Any], Any]:
    def decorate(code: Any) -> Any:
        if inspect.isfunction(code) and "<locals>" in code.__qualname__:
            _checks[code.__code__] += 1
            if _checks[code.__code__] > MAX_CHECKS:
                return code
        return _jaxtyped(**options)(code)

    return decorate


jaxtyping.jaxtyped = _jaxtyped_at_first
# Before the first import of specjax. Subprocesses do not inherit the hook.
jaxtyping.install_import_hook(["specjax", "specjax_kernels"], "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
_cache = Path(tempfile.gettempdir()) / f"specjax-test-cache-{os.getuid()}-jax-{jax.__version__}"
_cache.mkdir(mode=0o700, exist_ok=True)
assert _cache.stat().st_uid == os.getuid(), f"{_cache} holds executables of another user"
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # also caches small programs

from program_names import Unknown, name_of  # noqa: E402
from specjax_kernels.cpu import object_code  # noqa: E402 - after the settings above

from specjax.engine.programs import Programs  # noqa: E402

object_code.keep_in(_cache / "kernels")

# No deadline: a busy machine may stop anywhere.
hypothesis.settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

MAX_MEMORY = 3e9
"""Limit of resident memory of a test process in bytes; the summary reports it."""

SLOWEST_FIRST = (
    # Second part of `make test`, with the real model.
    "test_real_model.py",
    "test_shipped_head.py",
    "test_memory.py",
    "test_readme.py",
    # First part.
    "test_train_block.py",
    "test_lossless.py",
    "test_block.py",
    "test_parity.py",
    "test_eagle.py",
    "test_dry_run.py",
    "test_kernels.py",
    "test_call_values.py",
    "test_quantised.py",
    "test_gpu_kernels.py",
    "test_train_run.py",
    "test_thresholds.py",
    "test_configs.py",
    "test_thinking_budget.py",
    "test_harmony.py",
    "test_tune_tree.py",
    "test_step.py",
    "test_serve_process.py",
)
"""Slow files, which start first to keep all workers busy."""


@pytest.fixture
def getkey():
    """getkey() -> a new PRNG key; the sequence is the same in each test."""
    key = jax.random.key(0)

    def take():
        nonlocal key
        key, subkey = jax.random.split(key)
        return subkey

    return take


# Programs.

MAX_PROGRAMS = 100  # compiled programs kept for later engines

_programs: collections.OrderedDict[str, Any] = collections.OrderedDict()
_replaced: set[int] = set()  # MonkeyPatches that have replaced a member of a module or class
_compile = Programs._compile
_setattr, _undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo


def _shared(self: Programs, key: Any) -> Any:
    """`Programs._compile` that shares programs between engines of the same model, drafter and shapes.

    Disabled while a test has replaced a member of a module, which a program may depend on.
    """
    if _replaced:
        return _compile(self, key)
    try:
        function, unpack, shape = self._function(key)
        fixed = self._room, sorted(jax.config.values.items(), key=str), dict(os.environ)
        name = name_of((key.kind, function, unpack, shape, self._params, self._state, fixed))
    except (Unknown, RecursionError):
        return _compile(self, key)
    if name not in _programs:
        _programs[name] = _compile(self, key)
        if len(_programs) > MAX_PROGRAMS:
            _programs.popitem(last=False)
    _programs.move_to_end(name)
    return _programs[name]


Programs._compile = _shared


def _noted_setattr(self: pytest.MonkeyPatch, target: Any, *arguments: Any, **options: Any) -> None:
    if isinstance(target, str | type | types.ModuleType):
        _replaced.add(id(self))
    _setattr(self, target, *arguments, **options)


def _noted_undo(self: pytest.MonkeyPatch) -> None:
    _undo(self)
    _replaced.discard(id(self))


pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo = _noted_setattr, _noted_undo


# Memory.


_lowest = math.inf  # resident memory since programs were last freed


def _forget() -> None:
    """Frees compiled programs."""
    _programs.clear()
    jax.clear_caches()


def _trim() -> None:
    """Returns freed memory to the system; glibc keeps most memory of the compiler."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(scope="session")
def trim() -> Callable[[], None]:
    """trim() returns freed memory to the system, for tests that load several large models."""
    return _trim


@pytest.fixture(scope="module", autouse=True)
def _own_log():
    """Takes back what a module's commands set of the log."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    root.handlers[:] = [handler for handler in root.handlers if type(handler).__module__.startswith("_pytest")]


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request: pytest.FixtureRequest):
    """Frees a module's cached engines at its end, and all programs if the process has grown."""
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    if _resident() > MAX_MEMORY / 3:
        _forget()
    _trim()


@pytest.fixture(autouse=True)
def _bounded_memory(request: pytest.FixtureRequest):
    """Frees programs if memory has grown. The built-in model gets a small pool; the default takes 1.5 GB."""
    if request.node.get_closest_marker("real_model") is None:
        yield
        global _lowest
        _lowest = min(_lowest, _resident())
        if _resident() > max(MAX_MEMORY / 2, _lowest + MAX_MEMORY / 4):
            _forget()
            _trim()
            _lowest = _resident()
        return
    from specjax.engine import memory

    usual, memory.DEFAULT_POOL_TOKENS = memory.DEFAULT_POOL_TOKENS, 2048
    yield
    memory.DEFAULT_POOL_TOKENS = usual
    _forget()
    _trim()


def _resident() -> float:
    """Resident memory of this process in bytes."""
    statistics = Path("/proc/self/statm")
    return int(statistics.read_text().split()[1]) * resource.getpagesize() if statistics.exists() else math.inf


def _peak() -> float:
    """Largest resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_peaks: dict[str, float] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    if peak := getattr(node, "workeroutput", {}).get("peak"):
        _peaks[node.gateway.id] = peak


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session) -> None:
    """A worker reports its peak."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["peak"] = _peak()
        return
    _peaks.setdefault("main", _peak())


def pytest_terminal_summary(terminalreporter) -> None:
    shown = ", ".join(f"{name} {peak / 1e9:.1f} GB" for name, peak in sorted(_peaks.items()))
    large = max(_peaks.values(), default=0) > MAX_MEMORY
    verdict = f"more than {MAX_MEMORY / 1e9:.0f} GB is too much" if large else "ok"
    terminalreporter.write_line(f"peak memory: {shown}; {verdict}", red=large)


# Order.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    order = {name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """Excludes imported modules from garbage collection."""
    gc.collect()
    gc.freeze()
