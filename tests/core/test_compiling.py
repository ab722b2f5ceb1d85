"""XLA options of steps on NVIDIA GPUs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import pytest

from specjax import compiling
from specjax.compiling import NVIDIA_OPTIONS, SCHEDULING, compiler_options


@pytest.fixture
def on(monkeypatch):
    """Simulates a GPU. Programs are compiled for the CPU, where XLA accepts the same options."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    compiling.accepts.cache_clear()

    def become(version: str) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        client = SimpleNamespace(platform_version=f"PJRT C API\n{version}")
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(client=client)])

    yield become
    compiling.accepts.cache_clear()


def test_no_options_for_other_platforms(on):
    assert compiler_options() is None
    on("rocm 70100")
    assert compiler_options() is None


def test_options_of_nvidia_gpus_and_xla_flags(on, monkeypatch):
    on("cuda 12090")
    assert compiler_options() == dict(NVIDIA_OPTIONS)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_gpu_enable_command_buffer=FUSION")
    assert compiler_options() == {SCHEDULING: NVIDIA_OPTIONS[SCHEDULING]}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert compiler_options() == dict(NVIDIA_OPTIONS)


@pytest.mark.parametrize(
    "wrong", [{"xla_gpu_gone": "1"}, {SCHEDULING: "GONE"}, {"xla_gpu_enable_command_buffer": "FUSION,GONE"}]
)
def test_rejected_options_are_left_out_with_a_warning(on, monkeypatch, caplog, wrong):
    on("cuda 13000")
    monkeypatch.setattr(compiling, "NVIDIA_OPTIONS", wrong | {"xla_gpu_graph_min_graph_size": "5"})
    with caplog.at_level(logging.WARNING):
        assert compiler_options() == {"xla_gpu_graph_min_graph_size": "5"}
    assert next(iter(wrong)) in caplog.text
    caplog.clear()
    compiler_options()
    assert not caplog.text, "warned twice"
