"""`specjax_kernels.cpu`: XLA:CPU calls kernels, threads share their work, and without Numba XLA does it."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels.cpu import object_code, runtime
from specjax_kernels.cpu import rows as cpu_rows


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(16, 1), (576, 960), (80, 4103), (16, 9001), (144, 700)])
def test_the_products_are_the_exact_ones(depth, columns, transposed, dtype):
    """Depths with several parts and with one, columns with several tiles and with a part of one."""
    x, matrix = random(8, depth), jnp.asarray(random(depth, columns, seed=1), dtype)
    given = matrix.T if transposed else matrix
    exact = x.astype(np.float64) @ np.asarray(matrix, np.float64)
    product = jax.jit(lambda x, w: cpu_rows.multiply(x, w, transposed=transposed))
    assert cpu_rows.takes(1, *given.shape, given.dtype, transposed=transposed)
    alone = np.concatenate([np.asarray(product(x[i : i + 1], given)) for i in range(8)])
    np.testing.assert_allclose(alone, exact, rtol=0, atol=2e-6 * np.sqrt(depth))
    for rows in (2, 3, 5, 8):
        assert cpu_rows.takes(rows, *given.shape, given.dtype, transposed=transposed)
        np.testing.assert_array_equal(np.asarray(product(x[:rows], given)), alone[:rows])


def test_shapes_without_a_kernel():
    takes = cpu_rows.takes
    assert takes(8, 16, 9, jnp.bfloat16) and not takes(9, 16, 9, jnp.float32) and not takes(0, 16, 9, jnp.float32)
    assert not takes(1, 10, 9, jnp.float32) and takes(1, 10, 16, jnp.float32, transposed=True)
    assert not takes(1, 10, 9, jnp.float32, transposed=True)
    assert (
        takes(1, 16, 9, jnp.float16)
        and not takes(1, 16, 9, jnp.int8)
        and not takes(1, 16, 0, jnp.float32)
        and not takes(1, 0, 9, jnp.float32)
    )
    assert cpu_rows.parts_of(576, 960) == 8 and cpu_rows.parts_of(1536, 576) == 8
    assert cpu_rows.parts_of(576, 2 * cpu_rows.WIDE) == 4 and cpu_rows.parts_of(576, 49152) == 1
    assert cpu_rows.parts_of(40, 10) == 5 and cpu_rows.parts_of(10, 10) == 0


def test_several_devices_get_what_can_be_split():
    """A call's arrays would be gathered whole on each of them; and a mapped program would not be traced."""
    said = run_alone("""
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from specjax_kernels import linear, unembed
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        x, weight = jnp.ones((2, 2, 16)), jnp.full((16, 8), 3.0)
        run = lambda x, w: linear(x, w)
        split = jax.device_put(weight, NamedSharding(mesh, P(None, "d")))
        compiled = jax.jit(run).lower(x, split).compile()
        assert "all-gather" not in compiled.as_text() and (np.asarray(compiled(x, split)) == 48).all()
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        assert (np.asarray(jax.jit(mapped)(x, weight)) == 48).all()
        run = lambda x, w: unembed(x, w, transposed=True)
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        assert (np.asarray(jax.jit(mapped)(x, weight.T)) == 48).all()
        print("right")
    """)
    assert "right" in said


@pytest.fixture
def registered():
    assert cpu_rows.unmet("float32", False) is None


@pytest.mark.usefixtures("registered")
def test_many_threads_may_call_at_once():
    """More callers than threads that could help: nobody waits for a helper that does not come."""
    x, matrix = random(4, 96), random(96, 5000, seed=1)
    product = jax.jit(cpu_rows.multiply)
    expected = np.asarray(product(x, matrix))

    def call(_: int) -> bool:
        return all((np.asarray(product(x, matrix)) == expected).all() for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(24)))


def run_alone(program: str, *arguments: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process is bound to a core through it")
def test_one_core_is_enough():
    said = run_alone(
        """
        import os, pathlib, sys
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        import jax, numpy as np
        from specjax_kernels.cpu import object_code, rows as cpu_rows
        object_code.keep_in(pathlib.Path(sys.argv[1]))  # compiling takes longer than all else
        assert cpu_rows.unmet('float32', False) is None
        x, matrix = np.full((3, 16), 2, np.float32), np.ones((16, 9000), np.float32)
        assert (np.asarray(jax.jit(cpu_rows.multiply)(x, matrix)) == 32).all()
        print("right")
    """,
        str(object_code._folder),
    )
    assert "right" in said


def test_without_numba_xla_does_the_work_and_says_so_once():
    said = run_alone("""
        import sys
        sys.modules["numba"] = None
        import jax, numpy as np
        import jax.numpy as jnp
        from specjax_kernels import CAUSAL, linear, tree_attention, unembed
        x, matrix = np.full((1, 2, 16), 2, np.float32), np.ones((16, 9), np.float32)
        block, pages = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 4, 2, 16))
        table, at = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
        attended = tree_attention(block, block, block, pages, pages, table, jnp.full(1, 4, jnp.int32), at, at, CAUSAL,
                                  scale=1.0)
        assert (np.asarray(attended) == 1).all()
        for _ in range(2):
            out = jax.jit(lambda x, w: linear(x, w))(x, matrix)
            assert (np.asarray(out) == 32).all() and out.shape == (1, 2, 9)
            out = jax.jit(lambda x, w: unembed(x, w, transposed=True))(x, matrix.T.copy())
            assert (np.asarray(out) == 32).all()
        print("right")
    """)
    assert "right" in said
    for name in ("rows_float32", "rows_float32_transposed", "tree_attention"):
        assert said.count(f"specjax_{name} cannot") == 1
    assert "numba" in said and "decoding is slower" in said


def test_a_kernel_that_cannot_be_made_is_a_reason(caplog):
    def build(tools):
        def tiles(call):
            return undefined_here

        def tile(call, index):
            return undefined_here

        return tiles, tile

    with caplog.at_level(logging.WARNING):
        reason = runtime.register("specjax_test_of_a_failure", build)
        assert reason == runtime.register("specjax_test_of_a_failure", build)
    assert "specjax_test_of_a_failure cannot be compiled here" in reason and "undefined_here" in reason
    assert len(caplog.records) == 1


COUNT = """
    import pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    {before}
    from specjax_kernels.cpu import object_code, rows
    object_code.keep_in(pathlib.Path({folder!r}))
    reason = rows.unmet('float32', True)
    assert reason is None, reason
    out = jax.jit(lambda x, w: rows.multiply(x, w, transposed=True))(
        np.full((2, 16), 2, np.float32), np.ones((700, 16), np.float32))
    assert (np.asarray(out) == 32).all()
    print("numba" if sys.modules.get("numba") else "no numba")
"""


REFUSED = """
    import pathlib, os, sys
    sys.modules["numba"] = None
    import jax
    from specjax_kernels.cpu import object_code, rows
    for folder in sys.argv[1:]:
        if (pid := os.fork()) == 0:  # each folder is seen by a process that has seen no other
            object_code.keep_in(pathlib.Path(folder))
            reason = rows.unmet("float32", True)
            print(reason, flush=True)
            os._exit(0 if reason is not None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.process
@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME=generic", "NUMBA_ENABLE_AVX=0"])
def test_codes_of_four_bits_where_numba_leaves_out_features(setting):
    """LLVM ends the process at an instruction that the processor it compiles for lacks."""
    name, value = setting.split("=")
    said = run_alone(
        f"""
        import os
        os.environ[{name!r}] = {value!r}
        import jax.numpy as jnp, numpy as np
        from specjax_kernels import quantise, quantised
        leaf = quantise(np.ones((40, 64), np.float32), "int4")
        assert quantised.cpu_kernels.unmet(3, quantised.layout_of(leaf)) is None
        print(float(quantised.product(jnp.ones((3, 64), jnp.float32), leaf, jnp.float32).min()))
        """
    )
    assert float(said) == pytest.approx(64)


@pytest.mark.process
def test_a_kernel_is_compiled_once_and_then_needs_no_numba(tmp_path):
    folder = tmp_path / "new" / "kernels"
    assert run_alone(COUNT.format(folder=str(folder), before="")).strip() == "numba"
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    without = COUNT.format(folder=str(folder), before="sys.modules['numba'] = None")
    assert run_alone(without).strip() == "no numba"

    all_damaged = (whole[:-1], whole[:20], b"", whole[:-1] + bytes([whole[-1] ^ 1]))
    for number, damaged in enumerate(all_damaged):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / file.name).write_bytes(damaged)
    said = run_alone(REFUSED, *(str(tmp_path / f"{number}") for number in range(len(all_damaged))))
    assert said.count("import of numba halted") >= len(all_damaged)  # it must compile, and cannot
    file.write_bytes(all_damaged[0])
    said = run_alone(COUNT.format(folder=str(folder), before=""))
    assert "is damaged" in said and "numba" in said.split()
    assert run_alone(without).strip() == "no numba" and list(folder.iterdir()) == [file]


@pytest.fixture
def folder(tmp_path):
    """Where machine code is kept meanwhile."""
    before = object_code._folder
    object_code.keep_in(tmp_path / "kernels")
    yield tmp_path / "kernels"
    object_code.keep_in(before)


def test_what_machine_code_is_kept_under(folder, monkeypatch):
    """Its name, the sources that made it, the versions of what compiled it, and the processor."""
    import llvmlite.binding

    found: list[str] = []

    def times(name: str = "a") -> int:
        found.clear()

        def compiled() -> bytes:
            found.append("compiled")
            return b"machine code"

        assert object_code.read_or_compile(name, compiled) == b"machine code"
        return len(found)

    assert (times(), times()) == (1, 0)
    assert (times("b"), times("b")) == (1, 0)
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
    object_code.keep_in(None)
    assert (times(), times()) == (1, 1)


def test_a_folder_that_cannot_be_written_costs_the_next_start(folder, caplog):
    folder.write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            assert object_code.read_or_compile(name, lambda: b"machine code") == b"machine code"
    (record,) = caplog.records
    assert "the next start compiles the CPU kernels again" in record.message


def test_code_that_may_raise_is_refused():
    def build(tools):
        def tiles(call):
            return 1

        def tile(call, index):
            if index > 3:
                raise ValueError("here is no Python to raise it in")
            return 0

        return tiles, tile

    reason = runtime.register("specjax_test_of_what_raises", build)
    assert reason is not None and "as code does that may raise or allocates" in reason


def test_float16_needs_a_processor_that_converts_it(monkeypatch):
    """LLVM would call a function that is not there, and end the process."""
    monkeypatch.setattr(object_code, "_converts_float16", lambda llvm: False)
    with pytest.raises(RuntimeError, match="reads float16, which this processor does not convert"):
        runtime._compile(functools.partial(cpu_rows._transposed, dtype="float16"))
    assert runtime._compile(functools.partial(cpu_rows._transposed, dtype="bfloat16"))


def test_another_interface_than_the_known_one_is_refused(tmp_path, monkeypatch):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 0\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"version 1\.0; only 0\.x is supported"):
        runtime._interface()
