"""The GPU kernels of attention beyond the specs: random shapes, splits, tiles, refusals, and programs for a GPU.

A CPU interprets the Pallas kernel. Triton decides once in a process whether it compiles or interprets: a plain run
lowers its kernels for GPUs and starts a process with TRITON_INTERPRET=1 for its cases here.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from kernel_helpers import TOLERANCE, fixed_pool, launched
from quantised_leaves import IN_FEW_BITS, leaf_of, shapes_of
from specjax_kernels import (
    INACTIVE,
    Quantised,
    attention,
    dequantise,
    gpu_attention,
    gpu_language,
    gpu_quantised,
    pack_bits,
    tree_attention,
)
from specjax_kernels import triton as triton_path
from specjax_kernels.call import Call
from specjax_kernels.sampling import in_prefix
from specjax_kernels.specs import Spec, named, tagged

REASON = triton_path.UNMET or ""
INTERPRETED = triton_path.INTERPRETED
PLUGIN = any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13))
NOT_INTERPRETED = REASON or "needs TRITON_INTERPRET=1; test_the_triton_interpreter sets it"
NOT_COMPILED = REASON or ("TRITON_INTERPRET=1: nothing is compiled" if INTERPRETED else "")
NOT_LOWERED = NOT_COMPILED or ("" if PLUGIN else "JAX's CUDA plugin is not installed")

compiled = pytest.mark.skipif(bool(NOT_COMPILED), reason=NOT_COMPILED)
lowered = pytest.mark.skipif(bool(NOT_LOWERED), reason=NOT_LOWERED)
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED))
interpreted = pytest.mark.parametrize("implementation", ["pallas", TRITON])


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


# Interpreted kernels. Every slot that must not be read holds NaN, and results of Triton's interpreter begin as NaN.


def interpret(kernel, inputs, outputs, *, grid, warps, stages, s) -> dict[str, jax.Array]:
    """Replaces `triton.run`: runs a kernel over numpy arrays in Triton's interpreter."""

    # The interpreter loses the carry into an odd exponent: it rounds 1.9999 to the bfloat16 1.0.
    def wide(out) -> np.dtype:
        return np.dtype(np.float32) if jnp.issubdtype(out.dtype, jnp.floating) else out.dtype

    def call(*arrays) -> tuple[np.ndarray, ...]:
        arguments = dict(zip(inputs, map(np.ascontiguousarray, arrays), strict=True))
        empty = {name: np.empty(out.shape, wide(out)) for name, out in outputs.items()}
        results = {n: np.full_like(x, np.nan if x.dtype == np.float32 else -7) for n, x in empty.items()}
        memory = {name: Memory(array) for name, array in (arguments | results).items()}
        triton_path.bound(kernel)[grid](**memory, s=s)
        return tuple(result.astype(outputs[name].dtype) for name, result in results.items())

    results = jax.pure_callback(call, tuple(outputs.values()), *inputs.values())
    return dict(zip(outputs, results, strict=True))


class Memory:
    """The parts of a torch.Tensor that Triton's interpreter uses to copy a tensor to the host, where this one is."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        kind, bits = array.dtype.name.rstrip("0123456789"), 8 * array.itemsize
        names = {"float": "fp", "bfloat": "bf", "int": "i", "uint": "u"}
        self.dtype = "fp8e4nv" if array.dtype == jnp.float8_e4m3fn else names[kind] + str(bits)

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


def interpreting(patch: pytest.MonkeyPatch, implementation: str) -> None:
    """Triton's kernels run in its interpreter."""
    if implementation == "triton":
        patch.setattr(triton_path, "refuse", lambda: None)
        patch.setattr(triton_path, "run", interpret)


@functools.cache
def _kernel(implementation: str, launch: tuple[int, int, int] | None, **options):
    def attend(*args, sinks):
        with pytest.MonkeyPatch.context() as patch:
            interpreting(patch, implementation)
            if launch is not None:
                patch.setattr(gpu_attention, "launch_for", launched(*launch))
            return gpu_attention.attend(Call(*args, **options, sinks=sinks), dialect=implementation)

    return jax.jit(attend)


@functools.cache
def _reference(**options):
    return jax.jit(functools.partial(tree_attention, **options, implementation="reference"))


def _parted(options):
    """The static options, and the sinks."""
    return {name: value for name, value in options.items() if name != "sinks"}, options.get("sinks")


def run(implementation: str, args, options, launch: tuple[int, int, int] | None = (16, 16, 1)) -> np.ndarray:
    static, sinks = _parted(options)
    return np.asarray(_kernel(implementation, launch, **static)(*args, sinks=sinks))


def assert_agrees(implementation: str, args, options, launch: tuple[int, int, int] | None) -> None:
    static, sinks = _parted(options)
    expected = np.asarray(_reference(**static)(*args, sinks=sinks))
    output, again = (run(implementation, args, options, launch) for _ in range(2))
    assert output.shape == expected.shape and output.dtype == expected.dtype
    np.testing.assert_array_equal(output, again)
    atol = TOLERANCE[str(args[0].dtype)]
    np.testing.assert_allclose(output.astype(np.float32), expected.astype(np.float32), rtol=0, atol=atol)


@pytest.mark.parametrize("implementation", [TRITON])  # test_kernels.py has Pallas
@pytest.mark.parametrize("launch", [None, (16, 16, 4)], ids=["as launched", "in splits"])
@pytest.mark.parametrize("spec", tagged("test"), ids=lambda spec: spec.name)
def test_specs_agree_with_the_reference(implementation, spec, launch) -> None:
    assert_agrees(implementation, *spec.arguments(), launch)


SHAPES = (
    {"N": 1, "C": 1, "mask": "causal"},
    {"N": 9, "C": 9, "mask": "tree"},
    {"N": 4, "C": 37, "mask": "tree", "latent": True, "Ev": 5},
    {"N": 20, "C": 20, "mask": "causal", "window": 7},
    {"N": 5, "C": 40, "mask": "random", "window": 9, "softcap": 3.0},
    {"N": 5, "C": 40, "mask": "random", "window": 9, "sinks": True},
)


@interpreted
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(data=st.data())
def test_random_shapes_lengths_and_splits(implementation: str, data: st.DataObject) -> None:
    """Few shapes, so that few programs are compiled; many lengths, tables, trees and holes."""
    shape = data.draw(st.sampled_from(SHAPES), "shape")
    launch = data.draw(st.sampled_from([(16, 16, 1), (16, 16, 4), (32, 32, 2)]), "rows, tokens, splits")
    lengths = st.one_of(st.just(INACTIVE), st.integers(0, 64))
    prefix = tuple(data.draw(st.lists(lengths, min_size=2, max_size=2), "prefix"))
    fixed = {"H": 4, "K": 2, "E": 8, "T": 16, "S": 4} | shape
    spec = Spec("random", prefix, holes=data.draw(st.booleans(), "holes"), **fixed)
    args, options = spec.arguments(data.draw(st.integers(0, 2**16), "seed"))
    assert_agrees(implementation, fixed_pool(args, 40), options, launch)


LENGTHS = (0, 5, 130, 512)
TREE = {"N": 5, "C": 5, "H": 6, "E": 24, "mask": "tree"}
SPLIT_SPECS = (
    *(Spec(dtype, LENGTHS, **TREE, K=2, T=32, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")),
    Spec("as-wide", (60, 3), **TREE, K=1, Ev=20, T=16, S=4, latent=True),
    *(Spec(f"softcap-{cap}", (9, 200), **TREE, K=2, T=52, S=4, softcap=cap) for cap in (0.01, 1e5)),
)


@interpreted
@pytest.mark.parametrize("spec", SPLIT_SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("splits", [1, 8])
def test_splits_agree(implementation: str, spec: Spec, splits: int) -> None:
    """Soft caps of any size: a large one is nearly no cap, and its tangent must not cancel near 0."""
    assert_agrees(implementation, *spec.arguments(), (16, 16, splits))


@pytest.mark.parametrize("implementation", [TRITON])
def test_many_splits_of_a_wide_head(implementation: str) -> None:
    """The combine reads them in parts."""
    spec = Spec("wide", (500,), N=1, C=1, H=2, K=1, E=500, T=32, S=16, dtype="bfloat16")
    assert_agrees(implementation, *spec.arguments(), (16, 16, 32))


@interpreted
def test_a_wide_prefill_chunk(implementation: str) -> None:
    """Several tiles of rows, each with fewer trips over the block than the next."""
    spec = Spec("chunk", (33, 0), N=70, C=70, H=4, K=2, E=16, T=10, S=4)
    assert_agrees(implementation, *spec.arguments(), (32, 16, 1))


@interpreted
def test_a_length_beyond_the_table_reads_no_further(implementation: str) -> None:
    """An error of the caller; pages of other rows stay unread."""
    args, options = Spec("beyond", (16,), N=1, C=1, H=2, K=1, E=16, T=4, S=4).arguments()
    longer = (*args[:6], args[6] + 100, *args[7:])
    np.testing.assert_array_equal(run(implementation, longer, options), run(implementation, args, options))


@interpreted
def test_wide_heads_are_refused(implementation: str) -> None:
    args, options = Spec("wide", (4,), N=1, C=1, H=1, K=1, E=300, T=1, S=4).arguments()
    with pytest.raises(NotImplementedError, match="up to 256 wide for keys and 256 for values in float32, got E = 300"):
        run(implementation, args, options)
    half, more = Spec("wide", (4,), N=1, C=1, H=1, K=1, E=520, T=1, S=4, dtype="bfloat16").arguments()
    with pytest.raises(NotImplementedError, match=r"1024 wide for keys and 512 for values in bfloat16, got .*520"):
        run(implementation, half, more)
    assert np.isfinite(np.asarray(tree_attention(*args, **options, implementation="xla"))).all()


@pytest.fixture
def chosen(implementation: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation, for attention and for the other kernels; Triton's in its interpreter."""
    interpreting(monkeypatch, implementation)
    monkeypatch.setattr(gpu_language, "dialect", lambda: implementation)
    jax.clear_caches()
    return implementation


@interpreted
@pytest.mark.parametrize(("queries", "window"), [(1, None), (2, None), (2, 9)])
def test_packed_queries_with_earlier_keys(chosen: str, queries: int, window: int | None) -> None:
    """A level of a draft: the packed array begins with tokens of upper levels, which have keys and values alone."""
    rng = np.random.default_rng(queries)
    batch, earlier, kv_heads, group, size = 2, 3, 2, 2, 16

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    qkv = normal(batch, queries, kv_heads, group + 2, size)
    before = normal(batch, earlier, kv_heads, size), normal(batch, earlier, kv_heads, size)
    pages = normal(6, 4, kv_heads, size), normal(6, 4, kv_heads, size)
    table, length = jnp.array([[0, 2, 4], [5, 1, 6]], jnp.int32), jnp.array([11, 6], jnp.int32)
    positions = length[:, None] + earlier + jnp.arange(queries, dtype=jnp.int32)[None, :]
    where = length[:, None] + jnp.arange(earlier, dtype=jnp.int32)[None, :]
    itself = np.broadcast_to(np.eye(queries, dtype=bool), (batch, queries, queries))
    visible = np.concatenate([rng.random((batch, queries, earlier)) < 0.6, itself], axis=2)
    outputs = [
        attention(
            qkv, *pages, table, length, positions, pack_bits(jnp.asarray(visible)), before=before,
            before_positions=where, scale=0.25, window=window, implementation=name,
        )
        for name in (chosen, "reference")
    ]  # fmt: skip
    np.testing.assert_allclose(*outputs, atol=1e-5)
    np.testing.assert_array_equal(pack_bits(visible), pack_bits(jnp.asarray(visible)))


@pytest.mark.parametrize("implementation", [TRITON])  # tests/core/test_truncated_draws.py has Pallas
def test_top_k_and_top_p(chosen: str) -> None:
    """The tokens are a prefix of the sorted ones. Rounded logits have ties."""
    rng, vocab = np.random.default_rng(0), 1100
    logits = np.round(rng.normal(0, 2, (6, vocab)), 1).astype(np.float32)
    top_k, top_p = np.array([0, 1, 20, 0, 40, vocab], np.int32), np.array([1, 1, 1, 0.6, 0.95, 1e-9], np.float32)
    inside = np.asarray(jax.jit(in_prefix)(logits, top_k, top_p))
    for row in range(len(logits)):
        order = np.argsort(-logits[row], kind="stable")[: top_k[row] or vocab]
        sums = np.cumsum(np.exp(logits[row, order].astype(np.float64) - logits[row].max()))
        kept = order if top_p[row] == 1 else order[: 1 + np.sum(sums < top_p[row] * sums[-1])]
        np.testing.assert_array_equal(np.flatnonzero(inside[row]), np.sort(kept), err_msg=str(row))


def on_device(leaf: Quantised) -> Quantised:
    """Without an order of inputs, which the kernels do not read."""
    return jax.tree.map(jnp.asarray, dataclasses.replace(leaf, order=None))


@interpreted
@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [(name, 3, "float32") for name in IN_FEW_BITS] + [(name, 17, "bfloat16") for name in ("Q4_1", "fp8 blocks")],
)
def test_quantised_products(chosen: str, name: str, rows: int, dtype: str) -> None:
    """Codes are exact in both dtypes, and scales are applied to float32 sums."""
    leaf = on_device(leaf_of(name, (48,), 512))
    x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 512)), dtype)
    output = jax.jit(gpu_quantised.multiply)(x, leaf)
    expected = np.asarray(x, np.float64) @ np.asarray(dequantise(leaf), np.float64).T
    terms = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(dequantise(leaf), np.float64)).T
    assert output.dtype == jnp.float32 and (np.abs(output - expected) <= 1e-5 * terms).all()


@pytest.mark.parametrize("implementation", [TRITON])  # test_quantised.py has Pallas
def test_rows_with_their_own_matrices(chosen: str) -> None:
    leaf = on_device(leaf_of("MXFP4", (3 * 40,), 512))
    x, ids = jnp.asarray(np.random.default_rng(4).standard_normal((4, 512)), jnp.float32), jnp.array([2, 0, 2, 1])
    output = jax.jit(lambda x, leaf, ids: gpu_quantised.multiply(x, leaf, ids=ids, out=40))(x, leaf, ids)
    weights = np.asarray(dequantise(leaf), np.float64).reshape(3, 40, 512)[np.asarray(ids)]
    expected = np.einsum("rm,rom->ro", np.asarray(x, np.float64), weights)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5 * np.abs(weights).sum(-1).max())


@compiled
def test_the_triton_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    command += ["-k", "triton]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 2 * len(tagged("test")), done.stdout[-2000:]


# The choice of a compiler, and refusals.

CHOICE = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it were not installed
from specjax_kernels import attention, gpu_language
attention_module = sys.modules["specjax_kernels.attention"]
attention_module.has_kernels = lambda: True
try:
    print(attention_module.default_implementation(), gpu_language.lowers())
except NotImplementedError as error:
    print(error)
"""


def choice(*blocked: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(specjax_kernels.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CHOICE, *blocked]
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.strip()


def test_the_compiler_is_chosen_by_what_is_installed() -> None:
    """Pallas while JAX has it, else Triton, else an error that names what to install. Triton needs a device."""
    assert choice() == "pallas True"
    pallas = "jax.experimental.pallas.triton"
    error = choice(pallas, "jax_triton")
    assert "0.10.2 to 0.12" in error and "pip install -e '.[triton]'" in error and pallas in error
    without_pallas = choice(pallas)
    assert without_pallas == "triton False" if not REASON else "pip install -e '.[triton]'" in without_pallas


def test_triton_is_imported_on_demand() -> None:
    check = "import specjax_kernels, sys; assert not {'triton', 'jax_triton'} & set(sys.modules), 'imported'"
    environment = os.environ | {"PYTHONPATH": str(Path(specjax_kernels.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)


def attend_by_triton(*args, **options) -> jax.Array:
    return tree_attention(*args, **options, implementation="triton")


def test_triton_is_refused_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_path, "UNMET", "found no triton")
    args, options = named("decode").arguments()
    with pytest.raises(NotImplementedError, match="found no triton"):
        attend_by_triton(*args, **options)


@pytest.mark.skipif(jax.default_backend() == "gpu" or INTERPRETED, reason="it can run here")
def test_triton_is_refused_without_a_gpu() -> None:
    """While tracing, before anything is compiled."""
    args, options = named("decode").arguments()
    with pytest.raises(NotImplementedError, match=r"implementation 'triton' (needs|of .* runs on)") as error:
        jax.eval_shape(functools.partial(attend_by_triton, **options), *args)
    advice = ("default backend is 'cpu'", "AbstractDevice", "'xla' runs everywhere")
    assert triton_path.UNMET or all(words in str(error.value) for words in advice)


# Programs for a GPU that is not there.


def described(gpu: str):
    """From jax 0.11 on, lowering for an absent GPU needs its name."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    device = AbstractDevice(gpu, None, "cuda")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


def lower(function, args, gpu: str = "NVIDIA H200") -> str:
    """The program, which has no operation that costs beside its kernels: no gather, no loop, no copy of pages."""
    with described(gpu):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for operation in ("gather", "while", "dot_general", "concatenate", "reduce", "transpose"):
        assert f"stablehlo.{operation}" not in text, operation
    return text


@pytest.mark.parametrize("name", ["decode", "tree", "latent-tree", "window-tree-holes", "bfloat16", "many-chunks"])
def test_pallas_is_lowered_to_its_kernels(name: str) -> None:
    args, options = named(name).arguments()
    text = lower(functools.partial(tree_attention, **options, implementation="pallas"), args)
    assert text.count("__gpu$xla.gpu.triton") == (2 if name == "many-chunks" else 1)


def llama(name: str, N: int, **change) -> Spec:
    shape = {"C": N, "H": 8, "K": 2, "E": 128, "T": 256, "mask": "tree", "dtype": "bfloat16"}
    return Spec(name, (100,), N, **(shape | change))


LOWERED_SPECS = (
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
SHARED_MEMORY = {"NVIDIA A100": 163 * 1024, "NVIDIA H200": 227 * 1024}  # bytes that one program may have


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Name, bytes of shared memory and PTX of each Triton kernel that the test compiles. jax-triton writes them into an
    opaque attribute of the program, so they are recorded when it makes that."""
    library = importlib.import_module("jax_triton.triton_lib")
    real, recorded = library.triton_kernel_call_lib, []

    class Library:
        def __getattr__(self, name: str):
            return getattr(real, name)

        def TritonKernel(self, name, warps, blocks, shared, ptx, *rest):
            recorded.append((name, shared, ptx))
            return real.TritonKernel(name, warps, blocks, shared, ptx, *rest)

    monkeypatch.setattr(library, "triton_kernel_call_lib", Library())
    triton_path.bound.cache_clear()  # and the programs that jax-triton keeps on its result
    return recorded


@lowered
@pytest.mark.parametrize("gpu", SHARED_MEMORY)
@pytest.mark.parametrize("spec", LOWERED_SPECS, ids=lambda spec: spec.name)
def test_triton_uses_what_the_gpu_has(spec: Spec, gpu: str, kernels, tmp_path: Path) -> None:
    args, options = spec.arguments(poison=False)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    program = lower(functools.partial(attend_by_triton, **options), shapes, gpu)
    assert program.count("@triton_kernel_call_ffi") == len(kernels) in (1, 2)
    assert [name for name, _, _ in kernels] == ["tree_attention", "tree_attention_combine"][: len(kernels)]
    check_resources(kernels, gpu, tmp_path)
    ptx = kernels[0][2]
    if spec.dtype != "float32":
        assert re.search(r"mma\.sync|wgmma", ptx), "tensor cores"
    if spec.name != "latent":  # one tile of 576 numbers a key is all that fits: nothing is in flight
        assert "cp.async" in ptx


PRODUCTS = [
    ("NVIDIA H200", name, 8, "bfloat16") for name in ("Q4_0", "Q4_1", "Q4_K", "MXFP4", "GPTQ", "Q8_0", "fp8 blocks")
]
PRODUCTS += [("NVIDIA H200", "Q4_1", 64, "bfloat16"), ("NVIDIA H200", "Q4_1", 8, "float32")]
PRODUCTS += [("NVIDIA A100", "Q4_1", 8, "bfloat16")]


@lowered
@pytest.mark.parametrize(("gpu", "name", "rows", "dtype"), PRODUCTS)
def test_quantised_products_in_triton(
    gpu: str, name: str, rows: int, dtype: str, kernels, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(gpu_language, "dialect", lambda: "triton")
    leaf = shapes_of(name, (4096,), 4096, rows=16)
    lower(gpu_quantised.multiply, (jax.ShapeDtypeStruct((rows, 4096), dtype), leaf), gpu)
    ((_, _, ptx),) = kernels
    check_resources(kernels, gpu, tmp_path)
    assert bool(re.search(r"mma\.sync|wgmma", ptx)) == (dtype == "bfloat16") and "cp.async" in ptx


@lowered
def test_truncation_in_triton(kernels, tmp_path: Path, monkeypatch) -> None:
    """A kernel for each 4 bits of two searches over logits and one over ids, and one at the end of each."""
    monkeypatch.setattr(gpu_language, "dialect", lambda: "triton")
    jax.clear_caches()
    shapes = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((8, 128256), "float32"), ((8,), "int32"), ((8,), "float32"))
    ]
    with described("NVIDIA H200"):
        text = jax.jit(in_prefix).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"call @_pass", text)) == 9 + 9 + 6 and "stablehlo.while" not in text
    check_resources(kernels, "NVIDIA H200", tmp_path)


def check_resources(kernels: list[tuple[str, int, str]], gpu: str, folder: Path) -> None:
    """Shared memory fits, and nothing is spilled."""
    assert kernels
    for name, shared, ptx in kernels:
        assert shared <= SHARED_MEMORY[gpu], name
        assert ".local" not in ptx, name
        assert spilled_bytes(ptx, folder) == 0, name


def spilled_bytes(ptx: str, folder: Path) -> int:
    """By the assembler of CUDA 12 in Triton's wheel. JAX's is not newer, so this also shows that JAX can read it."""
    triton = importlib.import_module("triton")
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", str(file), "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True)
    assert log.returncode == 0, log.stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", log.stderr)))
