"""What every test shares: checked annotations, cheap compilation, bounded memory.

Annotations are tests: every function of ours is checked by jaxtyping and beartype while the suite runs.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import importlib.metadata
import inspect
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
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the tests need no network, and would wait for an absent one
# The suite spends its time on compiling toy programs, which these settings make four times cheaper. Subprocesses
# inherit them. With XLA_FLAGS in the environment, even an empty one, XLA's own settings apply: `make test` does that
# for tests marked `optimized` or `real_model`, `make test-all` for all.
# JAX 0.12 has removed the setting of the fusion emitters, and XLA ends the process at one that it does not know.
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

# Tracing makes many objects that live on: Python would look for garbage among them all the time.
gc.set_threshold(100_000, 20, 100)

# A function inside of another is new in each call of that one: its annotations are checked the first times.
CHECKED_TIMES = 3
_made: collections.Counter[types.CodeType] = collections.Counter()
_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_at_first(**options: Any) -> Callable[[Any], Any]:
    def decorate(code: Any) -> Any:
        if inspect.isfunction(code) and "<locals>" in code.__qualname__:
            _made[code.__code__] += 1
            if _made[code.__code__] > CHECKED_TIMES:
                return code
        return _jaxtyped(**options)(code)

    return decorate


jaxtyping.jaxtyped = _jaxtyped_at_first
# Before the first import of ours. Subprocesses do not inherit it, nor need to.
jaxtyping.install_import_hook(["specjax", "specjax_kernels"], "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
_cache = Path(tempfile.gettempdir()) / f"specjax-test-cache-{os.getuid()}-jax-{jax.__version__}"
_cache.mkdir(mode=0o700, exist_ok=True)
assert _cache.stat().st_uid == os.getuid(), f"{_cache} holds programs that will be run, and is somebody else's"
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # reading the smallest takes half the time

from program_names import Unknown, name_of  # noqa: E402
from specjax_kernels.cpu import object_code  # noqa: E402 - what it imports must see the settings above

from specjax.engine.programs import Programs  # noqa: E402

object_code.keep_in(_cache / "kernels")

# No limit of time: a busy machine may stop anywhere.
hypothesis.settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

MOST_MEMORY = 3e9
"""Bytes of resident memory that a test process should stay below; the summary says whether it did."""

SLOWEST_FIRST = (
    # With the real model, which the second part of `make test` loads.
    "test_real_model.py",
    "test_shipped_head.py",
    "test_memory.py",
    "test_readme.py",
    # In the first part.
    "test_train_run.py",
    "test_train_families.py",
    "test_family_matrix.py",
    "test_configs.py",
    "test_serve_process.py",
    "test_eagle_lossless.py",
    "test_eagle_serving.py",
    "test_kernels.py",
    "test_eagle.py",
    "test_step.py",
    "test_mtp.py",
    "test_eagle_cache.py",
    "test_pallas_kernel.py",
    "test_train_generate.py",
    "test_engine.py",
    "test_trace.py",
    "test_train_step.py",
    "test_cpu_kernels.py",
    "test_generate.py",
    "test_engine_failures.py",
    "test_attention_backends.py",
    "test_parity.py",
)
"""Files that take long, so that none of them is left to one worker at the end."""


@pytest.fixture
def getkey():
    """A function that returns a new PRNG key on each call, the same sequence in each test."""
    key = jax.random.key(0)

    def take():
        nonlocal key
        key, taken = jax.random.split(key)
        return taken

    return take


# Programs.

MOST_PROGRAMS = 100  # that a process keeps for engines to come

_programs: collections.OrderedDict[str, Any] = collections.OrderedDict()
_replaced: set[int] = set()  # every MonkeyPatch that has replaced a part of a module or a class
_compile = Programs._compile
_setattr, _undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo


def _shared(self: Programs, key: Any) -> Any:
    """`Programs._compile`, but engines of the same model, drafter and shapes share their programs in this process.

    Not while a test has replaced a part of a module, which a program may depend on.
    """
    if _replaced or self.phase_times is not None:
        return _compile(self, key)
    try:
        function, unpack, shape = self._function(key)
        drafter = function.keywords["drafter"]._replace(resize=None, source="")
        function = functools.partial(function, drafter=drafter)
        fixed = self._room, sorted(jax.config.values.items(), key=str), dict(os.environ)
        name = name_of((key.kind, function, unpack, shape, self._params, self._state, fixed))
    except (Unknown, RecursionError):
        return _compile(self, key)
    if name not in _programs:
        _programs[name] = _compile(self, key)
        if len(_programs) > MOST_PROGRAMS:
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


_least = math.inf  # resident memory since the last time that programs were freed


def _forget() -> None:
    """Free what has been compiled."""
    _programs.clear()
    jax.clear_caches()


def _trim() -> None:
    """Return freed memory to the system: glibc keeps most of what compilation had."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(scope="session")
def trim() -> Callable[[], None]:
    """A function that returns freed memory to the system, for tests that load one large model after another."""
    return _trim


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request: pytest.FixtureRequest):
    """Free a module's cached engines at its end, and all programs if the process has grown: some are used again."""
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    if _resident() > MOST_MEMORY / 3:
        _forget()
    _trim()


@pytest.fixture(autouse=True)
def _bounded_memory(request: pytest.FixtureRequest):
    """Frees programs where memory has grown. A default pool of the built-in model takes 1.5 GB, and an engine lives
    until the garbage collector finds it."""
    if request.node.get_closest_marker("real_model") is None:
        yield
        global _least
        _least = min(_least, _resident())
        if _resident() > max(MOST_MEMORY / 2, _least + MOST_MEMORY / 4):  # much more than after the last time
            _forget()
            _trim()
            _least = _resident()
        return
    from specjax.engine import memory

    usual, memory.DEFAULT_POOL_TOKENS = memory.DEFAULT_POOL_TOKENS, 2048
    yield
    memory.DEFAULT_POOL_TOKENS = usual
    _forget()
    _trim()


def _resident() -> float:
    """Resident memory of this process now, in bytes."""
    statistics = Path("/proc/self/statm")
    return int(statistics.read_text().split()[1]) * resource.getpagesize() if statistics.exists() else math.inf


def _peak() -> float:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_peaks: dict[str, float] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    if found := getattr(node, "workeroutput", {}).get("peak"):
        _peaks[node.gateway.id] = found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session) -> None:
    """A worker reports its peak."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["peak"] = _peak()
        return
    _peaks.setdefault("main", _peak())


def pytest_terminal_summary(terminalreporter) -> None:
    shown = ", ".join(f"{name} {peak / 1e9:.1f} GB" for name, peak in sorted(_peaks.items()))
    large = max(_peaks.values(), default=0) > MOST_MEMORY
    verdict = f"more than {MOST_MEMORY / 1e9:.0f} GB is too much" if large else "ok"
    terminalreporter.write_line(f"peak memory: {shown}; {verdict}", red=large)


# Order.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    order = {name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later garbage collection."""
    gc.collect()
    gc.freeze()
