"""Compiled programs on disk: found again, and never used where anything that they are made from differs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, outcome, toy

import specjax
from specjax.drafters import Ngram, make_drafter
from specjax.engine import SamplingParams, program_store
from specjax.engine.program_store import Unknown, describe, sources, stored

SHAPE = jax.ShapeDtypeStruct((3,), np.float32)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "programs"
    program_store.keep_in(place)
    yield place
    program_store.keep_in(None)
    program_store.read_ahead("")  # forgets what it was to note


class Compiler:
    """Compiles, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, function: Any) -> jax.stages.Compiled:
        self.calls += 1
        return jax.jit(function, donate_argnums=0).lower(SHAPE).compile()


def adding(number: float) -> Any:
    """A function that adds a number; as far as the store knows one of ours."""

    def add(x: jax.Array) -> jax.Array:
        return x + number

    add.__module__ = "specjax.test"
    return add


def run(compiler: Any, function: Any = None, options: Any = None) -> list[float]:
    return stored(function or adding(1.0), (SHAPE,), compiler, options)(jnp.zeros(3)).tolist()


def never(function: Any) -> Any:
    pytest.fail("it is there")


def test_a_program_is_compiled_once(folder):
    compiler = Compiler()
    for _ in range(3):
        assert run(compiler) == [1.0] * 3
    assert compiler.calls == 1
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600


def test_the_next_start_reads_what_this_one_used(folder, monkeypatch):
    program_store.read_ahead("start")
    for number in range(1, 7):
        run(Compiler(), adding(float(number)))
    assert not program_store._ahead, "nothing was known of an earlier start"
    program_store.read_ahead("start")
    assert len(program_store._ahead) == program_store.AHEAD
    for program in list(program_store._ahead.values()):
        assert program.result() is not None
    monkeypatch.setattr(program_store, "_load", never)
    for number in range(1, 1 + program_store.AHEAD):
        assert run(never, adding(float(number))) == [number] * 3
    assert not program_store._ahead


def test_another_start_reads_nothing(folder, monkeypatch):
    program_store.read_ahead("start")
    run(Compiler())
    program_store.read_ahead("another")
    assert not program_store._ahead
    monkeypatch.setattr(program_store, "sources", lambda: "other")
    program_store.read_ahead("start")
    assert not program_store._ahead


def test_a_start_with_a_plug_in_leaves_nothing(folder):
    program_store.read_ahead(("start", lambda target: None))
    run(Compiler())
    assert not folder.with_name("starts").exists()


def test_a_damaged_program_that_was_read_ahead_is_compiled_again(folder):
    program_store.read_ahead("start")
    run(Compiler())
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    program_store.read_ahead("start")
    compiler = Compiler()
    assert run(compiler) == [1.0] * 3 and compiler.calls == 1


def test_a_loaded_program_donates_as_the_compiled_one_does(folder):
    for _ in range(2):
        given = jnp.zeros(3)
        stored(adding(1.0), (SHAPE,), Compiler())(given)
        assert given.is_deleted()


def test_other_parts_are_other_programs(folder):
    compiler = Compiler()
    assert run(compiler) == [1.0] * 3
    assert run(compiler, adding(2.0)) == [2.0] * 3
    stored(adding(1.0), (jax.ShapeDtypeStruct((4,), np.float32),), compiler)
    run(compiler, options={"xla_flag": "1"})
    assert compiler.calls == 4 and len(list(folder.iterdir())) == 4


def test_what_is_compiled_is_in_no_cache_of_jax(folder):
    """What XLA:CPU has loaded from there could be stored, but not run again."""
    longest = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    cache = Path(jax.config.values["jax_compilation_cache_dir"])
    before = {*cache.glob("jit_stored_*")}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        for _ in range(2):
            assert run(Compiler()) == [1.0] * 3
            assert run(never) == [1.0] * 3
            for file in folder.iterdir():
                file.unlink()
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", longest)
    assert {*cache.glob("jit_stored_*")} == before


@pytest.mark.parametrize("what", ["source", "version", "setting", "flag", "processor"])
def test_another_environment_is_another_program(folder, what, monkeypatch):
    compiler = Compiler()
    run(compiler)
    if what == "source":
        monkeypatch.setattr(program_store, "sources", lambda: "other")
    elif what == "version":
        monkeypatch.setattr(program_store.importlib.metadata, "version", lambda package: "0.0.1")
    elif what == "flag":
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    elif what == "processor":
        monkeypatch.setattr(program_store, "_processor", lambda: "another")
    with jax.default_matmul_precision("tensorfloat32") if what == "setting" else contextlib.nullcontext():
        run(compiler)
    assert compiler.calls == 2


def test_one_byte_of_a_source_matters(tmp_path, monkeypatch):
    source = tmp_path / "step.py"
    monkeypatch.setattr(program_store, "_OURS", (tmp_path,))
    found = []
    for text in ("x = 1", "x = 2"):
        source.write_text(text)
        os.utime(source, (1.0, 1.0))
        found.append(sources.__wrapped__())
    assert found[0] != found[1]
    os.utime(source)
    with pytest.raises(Unknown, match="has changed since this process started"):
        sources.__wrapped__()


def truncated(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def garbage(file: Path, other: Path) -> None:
    file.write_bytes(os.urandom(500))


def empty(file: Path, other: Path) -> None:
    file.write_bytes(b"")


def of_another_key(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("spoil", [truncated, garbage, empty, of_another_key])
def test_a_file_of_no_use_is_compiled_again(folder, spoil, caplog):
    compiler = Compiler()
    run(compiler)
    (file,) = folder.iterdir()
    run(compiler, adding(5.0))
    (other,) = set(folder.iterdir()) - {file}
    spoil(file, other)
    with caplog.at_level(logging.WARNING):
        assert run(compiler) == [1.0] * 3
    assert compiler.calls == 3 and str(file) in caplog.text
    assert run(compiler) == [1.0] * 3 and compiler.calls == 3, "the file is whole again"


def test_others_folders_are_refused(folder, monkeypatch, caplog):
    folder.mkdir(mode=0o777)
    folder.chmod(0o755)
    compiler = Compiler()
    for _ in range(2):
        run(compiler)
    assert compiler.calls == 2 and not list(folder.iterdir())
    assert caplog.text.count("mode 755") == 1 and "chmod 700" in caplog.text
    program_store._usable.cache_clear()
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    run(compiler)
    assert compiler.calls == 3 and not list(folder.iterdir())
    program_store._usable.cache_clear()


def test_a_folder_that_cannot_be_made_costs_nothing(tmp_path, caplog):
    (tmp_path / "file").touch()
    program_store.keep_in(tmp_path / "file" / "programs")
    try:
        assert run(Compiler()) == [1.0] * 3
    finally:
        program_store.keep_in(None)
    assert "are not stored" in caplog.text


def test_the_programs_used_longest_ago_go_first(folder, monkeypatch):
    compiler = Compiler()
    for number in (0.0, 1.0, 2.0):
        run(compiler, adding(number))
        for file in folder.iterdir():
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
    run(never, adding(0.0))
    size = max(file.stat().st_size for file in folder.iterdir())
    monkeypatch.setattr(program_store, "MAX_BYTES", 2 * size + 100)
    run(compiler, adding(3.0))
    assert len(list(folder.iterdir())) == 2
    run(never, adding(0.0))


class Opaque:
    pass


def foreign(x):
    return x


@pytest.mark.parametrize("part", [Opaque(), foreign, functools.partial(foreign), lambda x: x, [{"a": Opaque()}]])
def test_what_has_no_description_is_not_stored(folder, part):
    """A plug-in's functions, say: their sources are not a part of the key."""
    with pytest.raises(Unknown):
        list(describe(part))
    compiler = Compiler()
    for _ in range(2):
        assert run(compiler, options=part) == [1.0] * 3
    assert compiler.calls == 2


DESCRIBED = """
from specjax.drafters import make_drafter
from specjax.engine.program_store import describe, environment
for drafter in (make_drafter("NGRAM"), make_drafter("NONE")):
    print(*describe(drafter))
print(*environment())
"""


@pytest.mark.process
def test_another_process_describes_alike():
    """No address, and no order of a hash table."""
    packages = specjax, program_store.specjax_kernels
    paths = os.pathsep.join(str(Path(package.__file__ or "").parents[1]) for package in packages)
    found = {
        subprocess.run(
            [sys.executable, "-c", DESCRIBED],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            timeout=240,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and " at 0x" not in found.pop()


KERNELS = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from specjax_kernels import linear, quantise
from specjax_kernels.cpu import object_code
from specjax.engine import program_store
folder = pathlib.Path(sys.argv[1])
object_code.keep_in(folder / "kernels")
program_store.keep_in(folder / "programs")
leaf, x = jax.device_put(quantise(np.ones((32, 64), np.float32), "int8")), jnp.ones((1, 2, 64))
product = lambda x, leaf: linear(x, leaf)
product.__module__ = "specjax.test"
compile = lambda function: print("compiles") or jax.jit(function).lower(x, leaf).compile()
assert (program_store.stored(product, (x, leaf), compile)(x, leaf) == 64).all()
"""


@pytest.mark.process
def test_kernels_of_a_stored_program_are_registered(tmp_path):
    """Before anything is traced: only tracing tells which kernels a quantised model needs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KERNELS, str(tmp_path)]
    said = [subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240) for _ in range(2)]
    assert [done.returncode for done in said] == [0, 0], said
    assert ["compiles" in done.stdout for done in said] == [True, False] and "not used" not in said[1].stderr


def test_options_of_a_drafter_are_told_apart():
    few, many = make_drafter(Ngram(nodes=4)), make_drafter(Ngram(nodes=8))
    assert list(describe(few)) == list(describe(make_drafter(Ngram(nodes=4))))
    assert list(describe(few)) != list(describe(many)) != list(describe(make_drafter("NONE")))


def test_an_engine_runs_stored_programs(folder, monkeypatch):
    """The second engine traces nothing, and writes the same text."""
    monkeypatch.setattr(program_store, "_KNOWN_CODE", program_store._KNOWN_CODE | {"toy_models"})
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    first = make_engine(toy(), "NGRAM", max_running_requests=1)
    expected = outcome(first.generate([70, 71, 72], params))
    assert len(list(folder.iterdir())) == len(first.executables.compiled()) + 2, "and those that admit"
    second = make_engine(toy(), "NGRAM", max_running_requests=1, warm=False)
    monkeypatch.setattr(jax.stages.Traced, "lower", lambda *_, **__: pytest.fail("it was traced"))
    second.warm_up(progress=False)
    assert outcome(second.generate([70, 71, 72], params)) == expected
