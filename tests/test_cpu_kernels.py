"""`specjax_kernels.cpu`: kernels that XLA:CPU calls share their work among threads, and do without what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import CAUSAL, cpu, cpu_attention, cpu_code, cpu_product, tree_attention

from specjax.models.layers import project, similarities


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_they_can_be_called_where_the_tests_run():
    assert cpu_product.unmet() is None and cpu_product.unmet(transposed=True) is None and cpu_attention.unmet() is None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 5, 8])
@pytest.mark.parametrize(("depth", "columns"), [(8, 1), (576, 960), (40, 4103), (16, 9001), (136, 700)])
def test_the_products_are_the_exact_ones(rows, depth, columns, transposed):
    """Depths with several parts and with one, columns with several tiles and with a part of one."""
    x, matrix = random(rows, depth), random(depth, columns, seed=1)
    product, given = (cpu_product.few_rows_dot, matrix.T.copy()) if transposed else (cpu_product.few_rows, matrix)
    assert cpu_product.takes(rows, depth, columns, x.dtype, transposed=transposed)
    found = np.asarray(jax.jit(product)(x, given))
    exact = x.astype(np.float64) @ matrix.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.sqrt(depth))
    alone = [np.asarray(jax.jit(product)(x[i : i + 1], given)) for i in range(rows)]
    np.testing.assert_array_equal(found, np.concatenate(alone))


def test_what_they_do_not_take():
    takes = cpu_product.takes
    assert takes(8, 16, 9, jnp.float32) and not takes(9, 16, 9, jnp.float32) and not takes(0, 16, 9, jnp.float32)
    assert not takes(1, 12, 9, jnp.float32) and takes(1, 12, 9, jnp.float32, transposed=True)
    assert not takes(1, 16, 9, jnp.bfloat16) and not takes(1, 16, 0, jnp.float32) and not takes(1, 0, 9, jnp.float32)
    assert not takes(1, 16, 9, jnp.float32, jnp.bfloat16) and not takes(1, 0, 9, jnp.float32, transposed=True)
    assert cpu_product.parts_of(576, 960) == 8 and cpu_product.parts_of(1536, 576) == 8
    assert cpu_product.parts_of(576, 2 * cpu_product.WIDE) == 4 and cpu_product.parts_of(576, 49152) == 1
    assert cpu_product.parts_of(40, 10) == 5 and cpu_product.parts_of(12, 10) == 0


def test_weights_of_another_dtype_are_promoted_as_ever():
    x, weight = jnp.ones((1, 2, 16), jnp.float32), jnp.full((16, 9), 2, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        assert (np.asarray(project(x, weight, precision=jax.lax.Precision.HIGHEST)) == 32).all()
        assert (np.asarray(similarities(x, weight.T)) == 32).all()


@pytest.mark.parametrize("broken", ["query", "committed key", "block key", "committed value"])
def test_what_is_not_a_number_is_not_hidden(broken):
    """An overflow in a model must not come out as fluent text."""
    q, block, pages = jnp.ones((1, 2, 2, 8)), jnp.ones((1, 2, 1, 8)), jnp.ones((2, 4, 1, 8))
    nan = {"query": (q.at[0, 1].set(jnp.nan), block, pages, pages), "block key": (q, block * jnp.nan, pages, pages),
           "committed key": (q, block, pages.at[0, 2].set(jnp.nan), pages),
           "committed value": (q, block, pages, pages.at[0, 2].set(jnp.nan))}[broken]  # fmt: skip
    q, keys, k_pages, v_pages = (x.astype(jnp.float32) for x in nan)
    at, table, length = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.full(1, 4, jnp.int32)
    given = (q, keys, block.astype(jnp.float32), k_pages, v_pages, table, length, at, at, CAUSAL)
    found, expected = (
        np.isnan(np.asarray(tree_attention(*given, scale=0.5, implementation=name))) for name in ("xla", "reference")
    )
    assert expected.any() and (found == expected).all()


@pytest.mark.parametrize(("slots", "committed", "token"), [(16, 16, 3), (5, 15, 3), (16, 15, 14), (4, 4, None)])
def test_nor_where_its_weight_is_next_to_nothing(slots, committed, token):
    """A value with a score of -200: of a token in a group of eight, in a page without such, after one, or in the block
    (token None)."""
    q, block, pages = jnp.ones((1, 2, 1, 8)), jnp.zeros((1, 2, 1, 8)), jnp.zeros((4, slots, 1, 8))
    keys, values, k_pages, v_pages = block, block, pages, pages
    if token is None:
        keys, values = keys.at[0, 0].set(-25.0), values.at[0, 0].set(jnp.nan)
    else:
        at = token // slots, token % slots
        k_pages, v_pages = k_pages.at[at].set(-25.0), v_pages.at[at].set(jnp.nan)
    at, table, length = jnp.zeros((1, 2), jnp.int32), jnp.arange(4)[None], jnp.full(1, committed, jnp.int32)
    given = (q, keys, values, k_pages, v_pages, table, length, at, at, CAUSAL)
    for name in ("xla", "reference"):
        assert np.isnan(np.asarray(tree_attention(*given, scale=1.0, implementation=name))).all(), name


def test_several_devices_get_what_can_be_split():
    """A call's arrays would be gathered whole on each of them; and a mapped program would not be traced."""
    said = run_alone("""
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from specjax.models.layers import project, similarities
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        x, weight = jnp.ones((2, 2, 16)), jnp.full((16, 8), 3.0)
        run = lambda x, w: project(x, w, precision=jax.lax.Precision.HIGHEST)
        split = jax.device_put(weight, NamedSharding(mesh, P(None, "d")))
        compiled = jax.jit(run).lower(x, split).compile()
        assert "all-gather" not in compiled.as_text() and (np.asarray(compiled(x, split)) == 48).all()
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        assert (np.asarray(jax.jit(mapped)(x, weight)) == 48).all()
        mapped = jax.shard_map(similarities, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        assert (np.asarray(jax.jit(mapped)(x, weight.T)) == 48).all()
        print("right")
    """)
    assert "right" in said


@pytest.mark.parametrize("name", ["few_rows", "few_rows_dot"])
def test_derivatives_and_batches_are_those_of_the_product(name):
    product = getattr(cpu_product, name)
    plain = (lambda x, matrix: x @ matrix) if name == "few_rows" else (lambda x, matrix: x @ matrix.T)
    x, matrix = jnp.asarray(random(3, 16)), jnp.asarray(random(*((16, 5) if name == "few_rows" else (5, 16)), seed=1))

    def loss(function):
        return lambda x, matrix: jnp.sin(function(x, matrix)).sum()

    for one, other in zip(
        jax.grad(loss(product), argnums=(0, 1))(x, matrix),
        jax.grad(loss(plain), argnums=(0, 1))(x, matrix),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)
    many = jnp.asarray(random(4, 3, 16, seed=2))
    found = jax.jit(jax.vmap(product, in_axes=(0, None)))(many, matrix)
    np.testing.assert_allclose(np.asarray(found), np.asarray(plain(many, matrix)), rtol=1e-5, atol=1e-5)


def test_many_threads_may_call_at_once():
    """More callers than threads that could help: nobody waits for a helper that does not come."""
    x, matrix = random(4, 96), random(96, 5000, seed=1)
    product = jax.jit(cpu_product.few_rows)
    expected = np.asarray(product(x, matrix))

    def call(_: int) -> bool:
        return all((np.asarray(product(x, matrix)) == expected).all() for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(24)))


def run_alone(program: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process is bound to a core through it")
def test_one_core_is_enough():
    said = run_alone("""
        import os
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        import jax, numpy as np
        from specjax_kernels import cpu_product
        assert cpu_product.unmet() is None
        x, matrix = np.full((3, 16), 2, np.float32), np.ones((16, 9000), np.float32)
        assert (np.asarray(jax.jit(cpu_product.few_rows)(x, matrix)) == 32).all()
        print("right")
    """)
    assert "right" in said


def test_without_numba_xla_does_the_work_and_says_so_once():
    said = run_alone("""
        import sys
        sys.modules["numba"] = None
        import jax, jax.numpy as jnp, numpy as np
        from specjax.models.layers import project, similarities
        from specjax_kernels import CAUSAL, cpu_attention, tree_attention
        x, matrix = np.full((1, 2, 16), 2, np.float32), np.ones((16, 9), np.float32)
        for _ in range(2):
            out = jax.jit(lambda x, w: project(x, w, precision=jax.lax.Precision.HIGHEST))(x, matrix)
            assert (np.asarray(out) == 32).all() and out.shape == (1, 2, 9)
            assert (np.asarray(jax.jit(similarities)(x, matrix.T.copy())) == 32).all()
        block, pages = jnp.ones((1, 2, 1, 8), jnp.float32), jnp.full((2, 4, 1, 8), 3, jnp.float32)
        at = jnp.zeros((1, 2), jnp.int32)
        out = tree_attention(block, block, block, pages, pages, jnp.zeros((1, 1), jnp.int32), jnp.full(1, 4, jnp.int32),
                             at, at, CAUSAL, scale=0.0, implementation="xla")
        assert np.allclose(np.asarray(out)[0, :, 0, 0], [13 / 5, 14 / 6]), out
        print("right")
    """)
    assert "right" in said
    for name in ("specjax_few_rows cannot", "specjax_few_rows_dot cannot", "specjax_tree_attention cannot"):
        assert said.count(name) == 1
    assert "numba" in said and "decoding is slower" in said


def test_a_kernel_that_cannot_be_made_is_a_reason(caplog):
    def build(tools):
        def tiles(call):
            return undefined_here

        def tile(call, index):
            return undefined_here

        return tiles, tile

    with caplog.at_level(logging.WARNING):
        reason = cpu.register("specjax_test_of_a_failure", build)
        assert reason == cpu.register("specjax_test_of_a_failure", build)
    assert "specjax_test_of_a_failure cannot be made here" in reason and "undefined_here" in reason
    assert len(caplog.records) == 1


COUNT = """
    import pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    {before}
    from specjax_kernels import cpu_code, cpu_product
    cpu_code.keep_in(pathlib.Path({folder!r}))
    reason = cpu_product.unmet(transposed=True)
    assert reason is None, reason
    out = jax.jit(cpu_product.few_rows_dot)(np.full((2, 16), 2, np.float32), np.ones((700, 16), np.float32))
    assert (np.asarray(out) == 32).all()
    print("numba" if sys.modules.get("numba") else "no numba")
"""


def test_a_kernel_is_compiled_once_and_then_needs_no_numba(tmp_path):
    folder = tmp_path / "new" / "kernels"
    assert run_alone(COUNT.format(folder=str(folder), before="")).strip() == "numba"
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    without = COUNT.format(folder=str(folder), before="sys.modules['numba'] = None")
    assert run_alone(without).strip() == "no numba"

    for damaged in (whole[:-1], whole[:20], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(AssertionError, match="import of numba halted"):  # it must compile, and cannot
            run_alone(without)
    said = run_alone(COUNT.format(folder=str(folder), before=""))
    assert "is damaged" in said and "numba" in said.split()
    assert run_alone(without).strip() == "no numba" and list(folder.iterdir()) == [file]


PREPARE = """
    import pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    from specjax_kernels import cpu_attention, cpu_code, cpu_kernels, cpu_product
    cpu_code.keep_in(pathlib.Path({folder!r}))
    {before}
    cpu_kernels.prepare()
    assert (cpu_product.unmet(), cpu_product.unmet(transposed=True), cpu_attention.unmet()) == (None, None, None)
    out = jax.jit(cpu_product.few_rows)(np.full((3, 16), 2, np.float32), np.ones((16, 900), np.float32))
    assert (np.asarray(out) == 32).all()
    print("numba" if "numba" in sys.modules else "no numba")
"""


def test_kernels_are_compiled_beside_the_loading_of_a_model(tmp_path):
    """By a process of its own; by this one where that cannot be had; by none where they are kept."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_alone(PREPARE.format(folder=str(first), before="")).strip() == "no numba"
    fails = "sys.executable = '/bin/false'"
    assert run_alone(PREPARE.format(folder=str(second), before=fails)).strip() == "numba"
    assert len(list(first.iterdir())) == 3
    assert sorted(file.name for file in first.iterdir()) == sorted(file.name for file in second.iterdir())
    assert run_alone(PREPARE.format(folder=str(first), before=fails)).strip() == "no numba"


def test_who_asks_for_a_kernel_waits_for_that_one():
    """While a thread registers several, one after another."""

    def build(tools: Any) -> Any:
        raise RuntimeError("said of each")

    def wait(name: str) -> None:
        if name == "specjax_test_b":
            assert go_on.wait(60)

    go_on = threading.Event()
    kernels = [(f"specjax_test_{letter}", build) for letter in "abc"]
    with ThreadPoolExecutor(3) as pool:
        all_of_them = pool.submit(cpu.register_in_turn, kernels, wait)
        while "specjax_test_c" not in cpu._REGISTERED:
            time.sleep(0.001)
        for_a, for_b = (pool.submit(cpu.register, *kernels[i]) for i in (0, 1))
        assert "said of each" in (for_a.result(60) or ""), "it comes before the one that is waited for"
        assert not for_b.done() and not all_of_them.done()
        go_on.set()
        assert "said of each" in (for_b.result(60) or "")
        all_of_them.result(60)
    assert "said of each" in (cpu.register(*kernels[2]) or "")


def test_what_interrupts_registering_leaves_nobody_waiting():
    def build(tools: Any) -> Any:
        raise RuntimeError("said of each")

    def wait(name: str) -> None:
        if name == "specjax_test_e":
            started.set()
            assert go_on.wait(60)
            raise KeyboardInterrupt

    started, go_on = threading.Event(), threading.Event()
    kernels = [(f"specjax_test_{letter}", build) for letter in "def"]
    with ThreadPoolExecutor(3) as pool:
        all_of_them = pool.submit(cpu.register_in_turn, kernels, wait)
        assert started.wait(60)
        waiting = cpu._REGISTERED["specjax_test_f"]
        go_on.set()
        for future in (all_of_them, waiting):
            with pytest.raises(KeyboardInterrupt):
                future.result(60)
    for kernel in kernels:  # tried again
        assert "said of each" in (cpu.register(*kernel) or "")


def test_a_process_that_does_not_end_is_not_waited_for(tmp_path):
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    before = f"sys.executable, cpu_kernels.PATIENCE = {str(hangs)!r}, 1.0"
    assert run_alone(PREPARE.format(folder=str(tmp_path / "kernels"), before=before)).strip() == "numba"


@pytest.fixture
def folder(tmp_path):
    """Where machine code is kept meanwhile."""
    before = cpu_code.folder()
    cpu_code.keep_in(tmp_path / "kernels")
    yield tmp_path / "kernels"
    cpu_code.keep_in(before)


def test_what_machine_code_is_kept_under(folder, monkeypatch):
    """Its name, the sources that made it, the versions of what compiled it, and the processor."""
    import llvmlite.binding

    found: list[str] = []

    def times(name: str = "a", build: Any = run_alone) -> int:
        found.clear()

        def compiled() -> bytes:
            found.append("compiled")
            return b"machine code"

        assert cpu_code.kept(name, build, compiled) == b"machine code"
        return len(found)

    assert (times(), times()) == (1, 0)
    assert (times("b"), times("b")) == (1, 0)
    assert (times(build=json.dumps), times(build=json.dumps)) == (1, 0)
    version = importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: version(name) + "1" * (name == "numba"))
        assert (times(), times()) == (1, 0)
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_OPT", "1")
        assert (times(), times()) == (1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(llvmlite.binding, "get_host_cpu_name", lambda: "another")
        assert (times(), times()) == (1, 0)
    assert times() == 0
    assert sorted(folder.glob("new-*")) == []
    cpu_code.keep_in(None)
    assert (times(), times()) == (1, 1)


def test_a_folder_that_cannot_be_written_costs_the_next_start(folder, caplog):
    folder.write_text("a file in the way")
    assert not cpu_code.can_keep()
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            assert cpu_code.kept(name, run_alone, lambda: b"machine code") == b"machine code"
    (record,) = caplog.records
    assert "the next start compiles the CPU's kernels again" in record.message


def test_code_that_may_raise_is_refused():
    def build(tools):
        def tiles(call):
            return 1

        def tile(call, index):
            if index > 3:
                raise ValueError("here is no Python to raise it in")
            return 0

        return tiles, tile

    reason = cpu.register("specjax_test_of_what_raises", build)
    assert reason is not None and "as code does that may raise or allocates" in reason


def test_another_interface_than_the_known_one_is_refused(tmp_path, monkeypatch):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 0\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"version 1\.0; 0 is known"):
        cpu._interface()
