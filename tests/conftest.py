"""Annotations are tests: every function of ours is checked by jaxtyping and beartype while the suite runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import jaxtyping
import pytest

# Before the first import of ours. Subprocesses do not inherit it, nor need to.
jaxtyping.install_import_hook(["specjax", "specjax_kernels"], "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
_cache = Path(tempfile.gettempdir()) / f"specjax-test-cache-{os.getuid()}-jax-{jax.__version__}"
_cache.mkdir(mode=0o700, exist_ok=True)
assert _cache.stat().st_uid == os.getuid(), f"{_cache} holds programs that will be run, and is somebody else's"
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

from specjax_kernels import cpu_code  # noqa: E402 - what it imports must see the settings above

cpu_code.keep_in(_cache / "kernels")

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def getkey():
    """A function that returns a new PRNG key on each call, the same sequence in each test."""
    key = jax.random.key(0)

    def take():
        nonlocal key
        key, taken = jax.random.split(key)
        return taken

    return take
