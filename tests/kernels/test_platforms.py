"""Branches by platform, and the generation of the default device."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import make_engine, toy
from specjax_kernels import platforms
from specjax_kernels.platforms import by_platform, of_default_device


def branching(traced: list[str]):
    """x + 1 on a CPU, x * 3 elsewhere. Appends to `traced` the name of each branch that is traced."""

    def branch(name: str, function):
        def run(x):
            traced.append(name)
            return function(x)

        return run

    branches = {"cpu": branch("cpu", lambda x: x + 1), "default": branch("default", lambda x: x * 3)}
    return lambda x: by_platform(x, **branches)


def test_all_branches_are_traced() -> None:
    traced: list[str] = []
    function = jax.jit(branching(traced)).trace(jnp.ones(4))
    texts = [function.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")]
    assert sorted(traced) == ["cpu", "default"]
    assert ["multiply" in text for text in texts] == [False, True]


def test_one_branch_is_traced_for_the_default_device() -> None:
    traced: list[str] = []
    with of_default_device():
        assert jax.jit(branching(traced))(jnp.ones(())) == 2
    assert traced == ["cpu"]
    jax.jit(branching(traced)).trace(jnp.ones(()))  # the context has ended
    assert sorted(traced) == ["cpu", "cpu", "default"]


def test_an_engine_traces_the_branch_of_its_platform(monkeypatch) -> None:
    compile_, seen = jax.stages.Lowered.compile, []

    def recording(lowered, *arguments, **options):
        seen.append(platforms._only.get())
        return compile_(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", recording)
    engine = make_engine(toy(), "NONE", warm=False)
    engine.programs.get(engine.buckets.all_keys()[0])
    assert seen == [jax.default_backend()]


@pytest.mark.parametrize(
    ("backend", "version", "expected"),
    [("cpu", "", None), ("gpu", "PJRT C API\ncuda 12090", "9.0"), ("gpu", "PJRT C API\nrocm 60200", None)],
)
def test_generation(monkeypatch, backend, version, expected):
    device = types.SimpleNamespace(client=types.SimpleNamespace(platform_version=version), compute_capability="9.0")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert platforms.generation() == expected
