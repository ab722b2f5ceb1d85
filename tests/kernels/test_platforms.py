"""Which implementation runs: branches by platform, and attention implementations inside the engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import make_engine, toy
from specjax_kernels import platforms
from specjax_kernels.platforms import by_platform, of_default_device

from specjax.load import attention_implementation


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


def test_attention_backend_names(caplog):
    assert attention_implementation(None) is attention_implementation("auto") is None
    for name in ("reference", "xla"):
        assert attention_implementation(name) == name
    assert not caplog.records
    assert attention_implementation("pallas") == "pallas"
    assert "interpreted on this CPU" in caplog.text
    with pytest.raises(ValueError, match=r"^backend cuda: unknown .*reference, xla, pallas, triton"):
        attention_implementation("cuda")
    with pytest.raises(ValueError, match=r"^backend triton: implementation 'triton' (needs|of)"):
        attention_implementation("triton")  # another Python, no package, or no GPU
