"""The Triton kernel: refused, with what would work, where it cannot run; checked without a GPU where Triton is there.

Triton decides once in a process whether it compiles or interprets. So a plain run lowers for GPUs, and runs the tests
of the interpreter in a process of their own; TRITON_INTERPRET=1 runs those alone.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import specjax_kernels
from kernel_helpers import launched
from specjax_kernels import INACTIVE, tree_attention
from specjax_kernels import triton as triton_path
from specjax_kernels.attention import Call
from specjax_kernels.specs import Spec, named, tagged

TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}  # as in test_kernels.py

REASON = triton_path.UNMET or ""
INTERPRETED = triton_path.INTERPRETED
PLUGIN = any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13))

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason=REASON or "needs TRITON_INTERPRET=1; test_the_interpreter_in_its_own_process sets it"
)
compiled = pytest.mark.skipif(bool(REASON) or INTERPRETED, reason=REASON or "TRITON_INTERPRET=1: nothing is compiled")
lowered = pytest.mark.skipif(
    bool(REASON) or INTERPRETED or not PLUGIN,
    reason=REASON
    or ("TRITON_INTERPRET=1: nothing is lowered" if INTERPRETED else "JAX's CUDA plugin is not installed"),
)


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def attend(*args, **options) -> jax.Array:
    return triton_path.tree_attention(Call(*args, **options))


# Refusals: these run everywhere.


def test_triton_is_imported_by_nobody_else() -> None:
    check = "import specjax_kernels, sys; assert not {'triton', 'jax_triton'} & set(sys.modules), 'imported'"
    environment = os.environ | {"PYTHONPATH": str(Path(specjax_kernels.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)


def test_refused_where_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_path, "UNMET", "found no triton")
    args, options = named("decode").arguments()
    with pytest.raises(NotImplementedError, match="found no triton"):
        attend(*args, **options)


@pytest.mark.skipif(jax.default_backend() == "gpu" or INTERPRETED, reason="it can run here")
def test_refused_without_a_gpu() -> None:
    """By a trace too: nobody waits for a compilation to be told."""
    args, options = named("decode").arguments()
    with pytest.raises(
        NotImplementedError, match=r"implementation 'triton' of tree_attention (needs|runs on)"
    ) as error:
        jax.eval_shape(functools.partial(attend, **options), *args)
    assert triton_path.UNMET or all(
        word in str(error.value) for word in ("default backend is 'cpu'", "AbstractDevice", "'xla' runs everywhere")
    )


# In Triton's interpreter. Results begin as NaN there, and every slot that must not be read holds NaN.


@compiled
def test_the_interpreter_in_its_own_process() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 2 * len(tagged("test")), done.stdout[-2000:]
    print(done.stdout.splitlines()[-1])


def interpret(kernel, inputs, outputs, *, grid, warps, stages, **constants) -> dict[str, jax.Array]:
    """Stands in for `triton._call`: runs a kernel over numpy arrays in Triton's interpreter."""

    def call(*arrays) -> tuple[np.ndarray, ...]:
        arguments = dict(zip(inputs, map(np.ascontiguousarray, arrays), strict=True))
        results = {name: np.full(out.shape, np.nan, out.dtype) for name, out in outputs.items()}
        kernel[grid](**{name: Memory(array) for name, array in (arguments | results).items()}, **constants)
        return tuple(results.values())

    results = jax.pure_callback(call, tuple(outputs.values()), *inputs.values())
    return dict(zip(outputs, results, strict=True))


class Memory:
    """The parts of a torch.Tensor that Triton's interpreter uses to copy a tensor to the host and back. This one is on
    the host already."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        kind, bits = array.dtype.name.rstrip("0123456789"), 8 * array.itemsize
        self.dtype = {"float": "fp", "bfloat": "bf", "int": "i", "uint": "u"}[kind] + str(bits)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def _itself(self, *_: Any, **__: Any) -> Memory:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = _itself

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


@functools.cache
def _jitted(launch: tuple[int, int, int] | None, **options):
    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_path, "refuse", lambda: None)
            patch.setattr(triton_path, "_call", interpret)
            if launch is not None:
                patch.setattr(triton_path, "launch_for", launched(*launch))
            return attend(*args, **options)

    return jax.jit(run)


def run(args, options, launch: tuple[int, int, int] | None = None) -> np.ndarray:
    return np.asarray(_jitted(launch, **options)(*args))


@functools.cache
def _reference(**options):
    return jax.jit(functools.partial(tree_attention, **options, implementation="reference"))


def agrees(args, options, launch: tuple[int, int, int] | None) -> None:
    expected = np.asarray(_reference(**options)(*args))
    got = run(args, options, launch)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    atol = TOLERANCE[str(args[0].dtype)]
    np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=0, atol=atol)


@interpreted
@pytest.mark.parametrize("launch", [None, (16, 16, 4)], ids=["as launched", "in splits"])
@pytest.mark.parametrize("spec", tagged("test"), ids=lambda spec: spec.name)
def test_agrees_with_the_reference(spec: Spec, launch: tuple[int, int, int] | None) -> None:
    agrees(*spec.arguments(), launch)


@interpreted
@pytest.mark.parametrize(
    "spec",
    [
        Spec("splits", (0, 5, 130, 512), N=5, C=5, H=6, K=2, E=24, T=32, S=16, mask="tree"),
        Spec("bfloat16", (0, 5, 130, 512), N=5, C=5, H=6, K=2, E=24, T=32, S=16, mask="tree", dtype="bfloat16"),
        Spec("as-wide", (60, 3), N=5, C=5, H=6, K=1, E=24, Ev=20, T=16, S=4, latent=True, mask="tree"),
        Spec("softcap", (60, 3), N=5, C=5, H=6, K=1, E=24, T=16, S=4, softcap=0.01),
    ],
    ids=lambda spec: spec.name,
)
@pytest.mark.parametrize("splits", [1, 8, 16])
def test_splits_agree(spec: Spec, splits: int) -> None:
    agrees(*spec.arguments(), (16, 16, splits))


@interpreted
def test_many_splits_of_a_wide_head() -> None:
    """The combine takes them in parts."""
    wide = Spec("wide", (500,), N=1, C=1, H=2, K=1, E=500, T=32, S=16, dtype="bfloat16")
    agrees(*wide.arguments(), (16, 16, 32))


@interpreted
def test_a_wide_chunk_of_a_prefill() -> None:
    """Several tiles of rows, each with fewer trips over the block than the next."""
    agrees(*Spec("chunk", (33, 0), N=70, C=70, H=4, K=2, E=16, T=10, S=4).arguments(), (32, 16, 1))


@interpreted
def test_inactive_rows_read_nothing_and_write_zeros() -> None:
    spec = Spec("inactive", (INACTIVE, 40, INACTIVE), N=3, C=3, H=4, K=2, E=16, T=12, S=4)
    args, options = spec.arguments()
    for launch in ((16, 16, 1), (16, 16, 4)):
        out = run(args, options, launch)
        assert (out[0] == 0).all() and (out[2] == 0).all() and (out[1] != 0).all()


@interpreted
def test_a_length_beyond_the_table_reads_no_further() -> None:
    args, options = Spec("beyond", (16,), N=1, C=1, H=2, K=1, E=16, T=4, S=4).arguments()
    longer = (*args[:6], args[6] + 100, *args[7:])
    assert (run(longer, options) == run(args, options)).all()


@interpreted
def test_what_is_too_wide_is_refused() -> None:
    args, options = Spec("wide", (4,), N=1, C=1, H=1, K=1, E=300, T=1, S=4).arguments()
    with pytest.raises(NotImplementedError, match=r"up to 256 wide .* in float32, got E = 300"):
        run(args, options)


@interpreted
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(data=st.data())
def test_random_shapes_lengths_and_splits(data: st.DataObject) -> None:
    shape = data.draw(
        st.sampled_from(
            [
                {"N": 1, "C": 1, "mask": "causal"},
                {"N": 9, "C": 9, "mask": "tree"},
                {"N": 4, "C": 37, "mask": "tree", "latent": True, "Ev": 5},
                {"N": 20, "C": 20, "mask": "causal", "window": 7},
                {"N": 5, "C": 40, "mask": "random", "window": 9, "softcap": 3.0},
            ]
        ),
        "shape",
    )
    launch = data.draw(st.sampled_from([(16, 16, 1), (16, 16, 4), (32, 32, 2)]), "rows, tokens, splits")
    lengths = st.one_of(st.just(INACTIVE), st.integers(0, 64))
    prefix = tuple(data.draw(st.lists(lengths, min_size=2, max_size=2), "prefix"))
    fixed = {"H": 4, "K": 2, "E": 8, "T": 16, "S": 4} | shape
    spec = Spec("random", prefix, holes=data.draw(st.booleans(), "holes"), **fixed)
    args, options = spec.arguments(data.draw(st.integers(0, 2**16), "seed"))
    # One pool size, so that the reference is compiled once a shape.
    room = ((0, 40 - spec.P), (0, 0), (0, 0), (0, 0))
    pool = [None if pages is None else jnp.pad(pages, room, constant_values=np.nan) for pages in args[3:5]]
    agrees((*args[:3], *pool, jnp.where(args[5] >= spec.P, 40, args[5]), *args[6:]), options, launch)


# Lowered for a GPU that is not there. Triton compiles to PTX while lowering.


def on(gpu: str):
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh  # not in jax 0.10

    return use_abstract_mesh(
        AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=AbstractDevice(gpu, None, "cuda"))
    )


def llama(name: str, N: int, **change) -> Spec:
    shape = {"C": N, "H": 8, "K": 2, "E": 128, "T": 256, "mask": "tree", "dtype": "bfloat16"}
    return Spec(name, (100,), N, **(shape | change))


SHAPES = (
    llama("decode", 1, mask="causal"),
    llama("tree-8", 8),
    llama("tree-64", 64),
    llama("tree-float16", 8, dtype="float16"),
    llama("beam", 8, C=100),
    llama("prefill", 256, mask="causal"),
    llama("heads-64-float32", 8, dtype="float32", E=64),
    llama("heads-80", 8, E=80),
    llama("heads-256", 8, E=256),
    llama("latent", 8, K=1, E=576, Ev=512, latent=True),
    llama("window-softcap", 8, window=50, softcap=30.0),
    llama("page-size-1", 8, S=1),
)

SHARED_MEMORY = {"NVIDIA A100": 163 * 1024, "NVIDIA H200": 227 * 1024}
"""Bytes that one program may have."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Of each kernel compiled in the test: name, bytes of shared memory, PTX. jax-triton writes them into an opaque
    attribute of the program, so they are taken where it makes that."""
    library = importlib.import_module("jax_triton.triton_lib")
    real, made = library.triton_kernel_call_lib, []

    class Library:
        def __getattr__(self, name: str):
            return getattr(real, name)

        def TritonKernel(self, name, warps, blocks, shared, ptx, *rest):
            made.append((name, shared, ptx))
            return real.TritonKernel(name, warps, blocks, shared, ptx, *rest)

    monkeypatch.setattr(library, "triton_kernel_call_lib", Library())
    for kernel in (triton_path.attend, triton_path.combine):
        monkeypatch.setattr(kernel, "_jT_kernel_cache", {}, raising=False)
    return made


@lowered
@pytest.mark.parametrize("gpu", SHARED_MEMORY)
@pytest.mark.parametrize("spec", SHAPES, ids=lambda spec: spec.name)
def test_lowered_for_a_gpu(spec: Spec, gpu: str, kernels: list[tuple[str, int, str]], tmp_path: Path) -> None:
    args, options = spec.arguments(poison=False)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    function = jax.jit(functools.partial(attend, **options))
    with on(gpu):
        program = function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    # The kernels, and nothing else that costs: no gather, no loop, no copy of pages.
    assert program.count("@triton_kernel_call_ffi") == len(kernels) in (1, 2)
    for operation in ("gather", "while", "dot_general", "concatenate", "reduce", "transpose"):
        assert f"stablehlo.{operation}" not in program, operation

    assert [name for name, _, _ in kernels] == ["attend", "combine"][: len(kernels)]
    for name, shared, ptx in kernels:
        assert shared <= SHARED_MEMORY[gpu], name
        assert ".local" not in ptx, name
        assert registers_spilt(ptx, tmp_path) == 0, name
    ptx = kernels[0][2]
    if spec.dtype != "float32":
        assert re.search(r"mma\.sync|wgmma", ptx), "tensor cores"
    if spec.name != "latent":  # One tile of 576 numbers a key is all that fits: nothing is in flight.
        assert "cp.async" in ptx


def registers_spilt(ptx: str, tmp_path: Path) -> int:
    """Bytes, by the assembler of CUDA 12 that comes with Triton: JAX's is not newer, so this shows too that it can
    read what was written."""
    triton = importlib.import_module("triton")
    file = tmp_path / "kernel.ptx"
    file.write_text(ptx)
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", str(file), "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True)
    assert log.returncode == 0, log.stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", log.stderr)))
