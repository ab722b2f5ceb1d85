"""`specjax_kernels.cpu`: products of few rows, calls from XLA by several threads, compilation and stored code."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import logging
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels.cpu import object_code, runtime
from specjax_kernels.cpu import quantised as cpu_quantised
from specjax_kernels.cpu import rows as cpu_rows


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(16, 1), (576, 960), (80, 4103), (16, 9001), (144, 700)])
def test_products_of_few_rows(depth, columns, transposed, dtype):
    """Depths of several parts and of one, columns of several tiles and of a part of one. A token that is verified
    beside drafts has the same bits as alone."""
    x, matrix = random(8, depth), jnp.asarray(random(depth, columns, seed=1), dtype)
    weight, layout = matrix.T if transposed else matrix, cpu_quantised.Layout.of_weights(dtype)
    exact = x.astype(np.float64) @ np.asarray(matrix, np.float64)

    def takes(rows: int) -> bool:
        return cpu_quantised.takes(rows, layout) if transposed else cpu_rows.takes(rows, depth, columns, dtype)

    assert takes(1)
    product = jax.jit(lambda x, w: cpu_quantised.multiply(x, layout, w) if transposed else cpu_rows.multiply(x, w))
    alone = np.concatenate([np.asarray(product(x[i : i + 1], weight)) for i in range(8)])
    np.testing.assert_allclose(alone, exact, rtol=0, atol=2e-6 * np.sqrt(depth))
    for rows in (2, 3, 5, 8):
        assert takes(rows)
        np.testing.assert_array_equal(np.asarray(product(x[:rows], weight)), alone[:rows])


def test_no_kernel_on_several_devices():
    """A call would gather its arrays on each device, and a mapped program could not be traced."""
    run_alone("""
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
    """)


def test_calls_of_many_threads():
    """With more callers than helping threads no caller may block on a helper."""
    assert cpu_rows.unmet("float32") is None
    x, matrix = random(4, 96), random(96, 5000, seed=1)
    product = jax.jit(cpu_rows.multiply)
    expected = np.asarray(product(x, matrix))

    def call(_: int) -> bool:
        return all((np.asarray(product(x, matrix)) == expected).all() for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(24)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads names of threads in /proc")
def test_tiles_run_in_the_pool(monkeypatch):
    """XLA starts programs in threads outside of its pool, with which more threads than cores would compute."""
    monkeypatch.setattr(object_code, "_folder", None)  # the code has an address of this process
    call = runtime._instructions(importlib.import_module("numba"))[4]
    this_thread = ctypes.cast(ctypes.CDLL(None).gettid, ctypes.c_void_p).value

    def build(tools: runtime.Tools):
        result, integers = tools.result, tools.integers

        def tiles(frame: int) -> int:
            return 40

        def tile(frame: int, index: int) -> int:
            integers(result(frame, 0))[index] = call(this_thread, 0, 0)
            return 0

        return tiles, tile

    assert runtime.register("specjax_test_threads", build) is None
    kernel = jax.ffi.ffi_call("specjax_test_threads", jax.ShapeDtypeStruct((40,), jnp.int32))
    first = jax.jit(lambda x: (kernel(x), x + 1))
    several = jax.jit(lambda x: functools.reduce(lambda ids, _: jnp.maximum(kernel(ids), 0 * ids), range(20), x))
    x, threads = jnp.zeros(40, jnp.int32), set[int]()
    for _ in range(20):
        threads.update(np.asarray(first(x)[0]).tolist(), np.asarray(several(x)).tolist())
    names = {Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads}
    assert names == {"tf_XLAEigen"}


def run_alone(program: str, *arguments: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be bound to a core")
def test_one_core():
    program = """
        import os, pathlib, sys
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        import jax, numpy as np
        from specjax_kernels.cpu import object_code, rows as cpu_rows
        object_code.keep_in(pathlib.Path(sys.argv[1]))  # compiling takes longer than all else
        assert cpu_rows.unmet('float32') is None
        x, matrix = np.full((3, 16), 2, np.float32), np.ones((16, 9000), np.float32)
        assert (np.asarray(jax.jit(cpu_rows.multiply)(x, matrix)) == 32).all()
    """
    run_alone(program, str(object_code._folder))


def test_without_numba():
    """XLA's operations run, and each kernel that is missing is reported once."""
    output = run_alone("""
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
    """)
    for name in ("rows_float32", "quantised_float32_none_none_0_16_0_0", "tree_attention"):
        assert output.count(f"specjax_{name} cannot") == 1
    assert "numba" in output and "decoding is slower" in output


def undefined_name(tools):
    def tile(call, index):
        return undefined_here

    return lambda call: 1, tile


def raising(tools):
    def tile(call, index):
        if index > 3:
            raise ValueError("no Python to raise it in")
        return 0

    return lambda call: 1, tile


@pytest.mark.parametrize(
    ("build", "problem"), [(undefined_name, "undefined_here"), (raising, "as code does that may raise or allocates")]
)
def test_a_kernel_that_cannot_be_compiled(build, problem, caplog):
    name = f"specjax_test_{build.__name__}"
    with caplog.at_level(logging.WARNING):
        reason = runtime.register(name, build)
        assert reason == runtime.register(name, build)
    assert f"{name} cannot be compiled here" in reason and problem in reason
    assert len(caplog.records) == 1


COUNT = """
    import pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    {before}
    from specjax_kernels.cpu import object_code, rows
    object_code.keep_in(pathlib.Path({folder!r}))
    reason = rows.unmet('float32')
    assert reason is None, reason
    out = jax.jit(rows.multiply)(np.full((2, 16), 2, np.float32), np.ones((16, 700), np.float32))
    assert (np.asarray(out) == 32).all()
    print("numba" if sys.modules.get("numba") else "no numba")
"""


REFUSED = """
    import pathlib, os, sys
    sys.modules["numba"] = None
    import jax
    from specjax_kernels.cpu import object_code, rows
    for folder in sys.argv[1:]:
        if (pid := os.fork()) == 0:  # a fresh process for each folder
            object_code.keep_in(pathlib.Path(folder))
            reason = rows.unmet("float32")
            print(reason, flush=True)
            os._exit(0 if reason is not None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.process
@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME=generic", "NUMBA_ENABLE_AVX=0"])
def test_codes_of_four_bits_without_processor_features(setting):
    """LLVM ends the process at an instruction that its target lacks."""
    name, value = setting.split("=")
    output = run_alone(
        f"""
        import os
        os.environ[{name!r}] = {value!r}
        import jax.numpy as jnp, numpy as np
        from specjax_kernels import quantise
        from specjax_kernels.cpu import quantised
        from specjax_kernels.linear import quantised_product
        leaf = quantise(np.ones((40, 64), np.float32), "int4")
        assert quantised.unmet(3, quantised.layout_of(leaf)) is None
        print(float(quantised_product(jnp.ones((3, 64), jnp.float32), leaf, jnp.float32).min()))
        """
    )
    assert float(output) == pytest.approx(64)


@pytest.mark.process
def test_stored_kernels_need_no_numba(tmp_path):
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
    output = run_alone(REFUSED, *(str(tmp_path / f"{number}") for number in range(len(all_damaged))))
    assert output.count("import of numba halted") >= len(all_damaged)  # it must compile, and cannot
    file.write_bytes(all_damaged[0])
    output = run_alone(COUNT.format(folder=str(folder), before=""))
    assert "is damaged" in output and "numba" in output.split()
    assert run_alone(without).strip() == "no numba" and list(folder.iterdir()) == [file]


@pytest.fixture
def folder(tmp_path):
    """An empty folder for machine code."""
    before = object_code._folder
    object_code.keep_in(tmp_path / "kernels")
    yield tmp_path / "kernels"
    object_code.keep_in(before)


def test_keys_of_stored_machine_code(folder, monkeypatch):
    """Name, sources, versions of the compiler, and processor."""
    import llvmlite.binding

    def compilations(name: str = "a") -> list[int]:
        """Of two reads."""
        counts = []
        for _ in range(2):
            calls = []
            assert object_code.read_or_compile(name, lambda calls=calls: calls.append(1) or b"machine code")
            counts.append(len(calls))
        return counts

    assert compilations() == compilations("b") == [1, 0]
    version = importlib.metadata.version
    changes = (
        lambda patch: patch.setattr(importlib.metadata, "version", lambda name: version(name) + "1"),
        lambda patch: patch.setenv("NUMBA_OPT", "1"),
        lambda patch: patch.setattr(llvmlite.binding, "get_host_cpu_name", lambda: "another"),
    )
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            assert compilations() == [1, 0]
    assert compilations() == [0, 0]
    assert sorted(folder.glob("new-*")) == []
    object_code.keep_in(None)
    assert compilations() == [1, 1]


def test_a_folder_that_cannot_be_written(folder, caplog):
    folder.write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            assert object_code.read_or_compile(name, lambda: b"machine code") == b"machine code"
    (record,) = caplog.records
    assert "the next start compiles the CPU kernels again" in record.message


def test_float16_on_a_processor_without_conversions(monkeypatch):
    """LLVM would call a missing function and end the process."""
    monkeypatch.setattr(object_code, "_converts_float16", lambda llvm: False)
    with pytest.raises(RuntimeError, match="reads float16, which this processor does not convert"):
        runtime._compile(functools.partial(cpu_rows._product, dtype="float16"))
    assert runtime._compile(functools.partial(cpu_rows._product, dtype="bfloat16"))


def test_another_version_of_the_ffi_is_refused(tmp_path, monkeypatch):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 0\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"version 1\.0; only 0\.x is supported"):
        runtime._interface()
