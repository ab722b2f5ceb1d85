"""Attention: every implementation against the reference, the reference against a loop in numpy, arguments, cost."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import TOLERANCE, fixed_pool
from specjax_kernels import (
    CAUSAL,
    attention,
    default_implementation,
    pack_bits,
    tree_attention,
    unpack_bits,
)
from specjax_kernels import xla as xla_path
from specjax_kernels.cpu import attention as cpu_attention
from specjax_kernels.cpu import object_code, runtime
from specjax_kernels.platforms import generation
from specjax_kernels.specs import Spec, named, tagged

COMPARED = ("xla", "operations", "pallas")  # "operations": xla without the CPU kernel; pallas is interpreted on a CPU


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@contextlib.contextmanager
def tracing(implementation: str) -> Iterator[str]:
    """Context for tracing one of `COMPARED`; its name for `tree_attention`."""
    with pytest.MonkeyPatch.context() as patch:
        if implementation == "operations":
            patch.setattr(cpu_attention, "takes", lambda call: False)
        yield "xla" if implementation == "operations" else implementation


@pytest.fixture
def operations() -> Iterator[None]:
    """XLA's operations instead of the CPU kernel."""
    with tracing("operations"):
        yield


def run(args, options, implementation: str) -> np.ndarray:
    with tracing(implementation) as name:
        function = functools.partial(tree_attention, **options, implementation=name)
        return np.asarray(jax.jit(function)(*args), np.float32)


def every(function: Callable[..., jax.Array], names: tuple[str, ...] = ("reference", *COMPARED)):
    """function(*args, implementation=...) of each implementation in one program, which compiles faster than many."""

    def run_all(*args) -> dict[str, jax.Array]:
        outputs = {}
        for implementation in names:
            with tracing(implementation) as name:
                outputs[implementation] = function(*args, implementation=name)
        return outputs

    return jax.jit(run_all)


def oracle(args, options) -> np.ndarray:
    """`tree_attention` one query, one head, one key at a time, in float64."""
    mask = args[9]
    arrays = [None if x is None else np.asarray(x) for x in args[:9]]
    arrays[:5] = [None if x is None else x.astype(np.float64) for x in arrays[:5]]
    q, k_block, v_block, k_pages, v_pages, page_table, prefix_length, q_positions, block_positions = arrays
    B, N, H, _ = q.shape
    P, S, K, _ = k_pages.shape
    window, softcap, v_width = options.get("window"), options.get("softcap"), options.get("v_width")
    sinks = options.get("sinks")
    out = np.zeros((B, N, H, v_width if v_block is None else v_block.shape[-1]))
    for b, i, h in np.ndindex(B, N, H):
        if prefix_length[b] < 0:
            continue
        head = h // (H // K)
        seen = []  # (position, key, value)
        for t in range(prefix_length[b]):
            page = page_table[b, t // S]
            if 0 <= page < P:
                key = k_pages[page, t % S, head]
                seen.append((t, key, key[:v_width] if v_pages is None else v_pages[page, t % S, head]))
        for j in range(k_block.shape[1]):
            word = None if mask is CAUSAL else int(np.asarray(mask)[b, i, j // 32])
            if j <= i if word is None else word >> (j % 32) & 1:
                key = k_block[b, j, head]
                seen.append((block_positions[b, j], key, key[:v_width] if v_block is None else v_block[b, j, head]))
        if window is not None:
            seen = [entry for entry in seen if entry[0] > q_positions[b, i] - window]
        if not seen:
            continue
        scores = np.array([options["scale"] * (q[b, i, h] @ key) for _, key, _ in seen])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights, sink = np.exp(scores), 0.0 if sinks is None else np.exp(float(sinks[h]))
        total = weights.sum() + sink
        out[b, i, h] = sum(w * value for w, (_, _, value) in zip(weights, seen, strict=True)) / total
    return out


def assert_all_agree(outputs: dict[str, jax.Array], expected: np.ndarray | None = None) -> None:
    """Compares the outputs of all implementations with `expected`, or with the reference's."""
    atol = TOLERANCE[str(outputs["reference"].dtype)]
    assert outputs.keys() == {"reference", *COMPARED} and len({out.dtype for out in outputs.values()}) == 1
    if expected is None:
        expected = np.asarray(outputs["reference"], np.float32)
        assert np.isfinite(expected).all()
    for name, out in outputs.items():
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=0, atol=atol, err_msg=name)


ELSEWHERE = ("page-boundary", "inactive-tree", "tree-33", "gqa-3", "width-64", "causal-33")
"""Specs that other tests below run with every implementation, or that resemble another."""
HALF = [spec for spec in tagged("test")[::2] if spec.name not in ELSEWHERE]


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, id=spec.name, marks=() if spec in HALF else pytest.mark.slow) for spec in tagged("test")],
)
def test_implementations_agree(spec: Spec) -> None:
    """Every slot that must not be read holds NaN, so agreement also shows that nothing leaks."""
    args, options = spec.arguments()
    outputs = every(functools.partial(tree_attention, **options))(*args)
    assert outputs["reference"].shape == (spec.B, spec.N, spec.H, spec.v_width)
    assert outputs["reference"].dtype == spec.dtype
    assert_all_agree(outputs)


SMALL = (
    "mixed-prefix", "inactive-tree", "page-size-5", "holes", "beam", "random-mask", "gqa-3", "latent-tree",
    "window-tree-holes", "sinks", "sinks-window-tree-holes",
)  # fmt: skip


@pytest.mark.parametrize("name", [*SMALL, "softcap-window-beam", "window-1"])
def test_reference_is_the_definition(name: str) -> None:
    args, options = named(name).arguments(seed=1)
    np.testing.assert_allclose(run(args, options, "reference"), oracle(args, options), rtol=0, atol=1e-5)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(data=st.data())
def test_random_tables_lengths_and_trees(data: st.DataObject) -> None:
    """Shapes from few values, so that few programs are compiled; lengths, tables, trees and seeds from many."""
    T, (N, C, S) = 7, data.draw(st.sampled_from([(1, 1, 4), (5, 5, 1), (3, 34, 4)]), "N, C, page size")
    window = data.draw(st.sampled_from([None, 6]), "window")
    prefix = tuple(data.draw(st.lists(st.integers(0, T * S), min_size=2, max_size=2), "prefix"))
    mask, holes = data.draw(st.sampled_from(["tree", "random"]), "mask"), data.draw(st.booleans(), "holes")
    spec = Spec("random", prefix, N, C, H=4, K=2, E=8, T=T, S=S, mask=mask, window=window, holes=holes)
    args, options = spec.arguments(data.draw(st.integers(0, 2**16), "seed"))
    args = fixed_pool(args, 2 * T + 3)
    assert_all_agree(_every(8**-0.5, window)(*args), oracle(args, options))


@functools.cache
def _every(scale: float, window: int | None):
    return every(functools.partial(tree_attention, scale=scale, window=window))


def test_a_row_that_sees_nothing_is_zero() -> None:
    args, options = named("random-mask").arguments()
    nothing = (*args[:6], jnp.zeros_like(args[6]), *args[7:9], jnp.zeros_like(args[9]))
    for name, out in every(functools.partial(tree_attention, **options))(*nothing).items():
        assert (out == 0).all(), name


def test_a_mask_shared_by_all_rows() -> None:
    args, options = named("random-mask").arguments()
    rows, shared = args[0].shape[0], args[9][:1]
    assert rows > 1
    expected = run((*args[:9], jnp.repeat(shared, rows, axis=0)), options, "reference")
    assert_all_agree(every(functools.partial(tree_attention, **options))(*args[:9], shared), expected)


def pack(q, key, value) -> jax.Array:
    """The inverse of `unpack`."""
    B, N, H, E = q.shape
    K = key.shape[2]
    return jnp.concatenate([q.reshape(B, N, K, H // K, E), key[:, :, :, None], value[:, :, :, None]], axis=3)


PACKED = (
    "mixed-prefix", "inactive-tree", "tree-33", "gqa-3", "width-80", "window-tree-holes", "sinks", "sinks-bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_queries_keys_and_values(name: str) -> None:
    """The first `queries` queries of a row have the same bits, whatever the number and the content of the others. A CPU
    gives 0 for the others."""
    args, options = named(name).arguments()
    q, k_block, v_block, *pages, q_positions, _, mask = args
    qkv = pack(q, k_block, v_block)
    whole = every(functools.partial(attention, **options))(qkv, *pages, q_positions, mask)
    assert whole["reference"].dtype == q.dtype
    assert_all_agree(whole, run(args, options, "reference"))

    def attend(queries: jax.Array, *args: Any, implementation: str) -> jax.Array:
        return attention(*args, **options, queries=queries, implementation=implementation)

    some, width = every(attend), qkv.shape[1]
    for first in (0, 1, width // 2, width):
        queries = (first + np.arange(qkv.shape[0], dtype=np.int32)) % (width + 1)
        for implementation, out in some(jnp.asarray(queries), qkv, *pages, q_positions, mask).items():
            for row, count in enumerate(queries):
                expected = np.asarray(whole[implementation][row, :count], np.float32)
                np.testing.assert_array_equal(np.asarray(out[row, :count], np.float32), expected, implementation)
                assert implementation in ("reference", "pallas") or not out[row, count:].any()


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("N", "H"), [(129, 4), (256, 6)])
def test_last_queries_of_a_wide_block(N: int, H: int, options: dict) -> None:
    spec = Spec("wide", (300, 0, -1), N=N, C=N, H=H, K=2, E=16, T=20, **options)
    args, options = spec.arguments()
    q, k_block, v_block, *pages, positions, _, mask = args
    qkv = pack(q, k_block, v_block).at[2].set(0)  # without the NaN of the row that is not active

    def attend(qkv: jax.Array, positions: jax.Array, queries: jax.Array | None, implementation: str) -> np.ndarray:
        with tracing(implementation) as name:
            function = functools.partial(attention, **options, implementation=name)
            return np.asarray(jax.jit(function)(qkv, *pages, positions, mask, queries=queries))

    for implementation in ("xla", "operations"):
        output = attend(qkv, positions, jnp.array([N - 9, 70, 3], jnp.int32), implementation)
        for row, count in enumerate((N - 9, 70, 0)):
            shorter = attend(qkv[:, :count], positions[:, :count], None, implementation) if count else output[:, :0]
            np.testing.assert_allclose(output[row, :count], shorter[row], rtol=0, atol=1e-5)
            assert not output[row, count:].any()


def test_wrong_packed_arguments() -> None:
    (q, k_block, v_block, *pages, positions, _, mask), options = named("tree").arguments()
    qkv = pack(q, k_block, v_block)
    for wrong, message in (
        (qkv[:, :, :, :2], r"qkv must be \[B, N, K, G \+ 2, E\] with G at least 1, got shape \(3, 7, 2, 2, 16\)"),
        (qkv[:, :, 0], "qkv must be"),
        (qkv[..., :8], "E is 8 in q but 16 in k_pages"),
        (qkv[:, :, :1], "K is 1 in k_block but 2 in k_pages"),
        (qkv.astype(jnp.bfloat16), "q is bfloat16, k_pages is float32"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(wrong, *pages, positions, mask, **options)
    with pytest.raises(ValueError, match=r"window .* got 0"):
        attention(qkv, *pages, positions, mask, **options | {"window": 0})


@pytest.mark.parametrize("name", ["window-tree-holes", "causal-33"])
def test_with_64_bit_types_enabled(name: str) -> None:
    args, options = named(name).arguments()
    expected = run(args, options, "reference")
    with jax.enable_x64(True):
        assert_all_agree(every(functools.partial(tree_attention, **options))(*args), expected)


# Masks


def test_worked_example_of_packed_bits() -> None:
    visible = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
    bits = pack_bits(visible)
    assert bits.dtype == jnp.uint32
    assert bits.tolist() == [[1], [3], [5], [11]]
    high = jnp.zeros((1, 34), bool).at[0, jnp.array([0, 31, 33])].set(True)
    assert pack_bits(high).tolist() == [[2**31 + 1, 2]]


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(width=st.sampled_from([1, 31, 32, 33, 70]), seed=st.integers(0, 99))
def test_unpack_inverts_pack(width: int, seed: int) -> None:
    visible = np.random.default_rng(seed).random((2, 3, width)) < 0.5
    bits = pack_bits(jnp.asarray(visible))
    assert bits.shape == (2, 3, -(-width // 32))
    assert (np.asarray(unpack_bits(bits, width)) == visible).all()


def test_mask_errors() -> None:
    with pytest.raises(ValueError, match=r"bool .* got int32 \(3,\)"):
        pack_bits(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="uint32, got int32"):
        unpack_bits(jnp.zeros(3, jnp.int32), 3)
    with pytest.raises(ValueError, match="40 bits take 2 words, got 3"):
        unpack_bits(jnp.zeros(3, jnp.uint32), 40)


def test_causal() -> None:
    """A static argument or a pytree without leaves, which equals its bits."""
    copy = pickle.loads(pickle.dumps(CAUSAL))
    assert copy == CAUSAL and hash(copy) == hash(CAUSAL) and jax.tree.leaves(CAUSAL) == []
    args, options = named("causal-33").arguments()
    bits = jnp.broadcast_to(pack_bits(jnp.tril(jnp.ones((33, 33), bool))), (2, 33, 2))
    assert (run(args, options, "xla") == run((*args[:9], bits), options, "xla")).all()


# Arguments

NAMES = tuple(inspect.signature(tree_attention).parameters)[:10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 3, 64))}, r"q must be \[B, N, H, E\], got shape \(2, 3, 64\)"),
        ({"q": jnp.zeros((2, 3, 5, 16))}, "H = 5 query heads and K = 2"),
        ({"q": jnp.zeros((2, 3, 4, 15))}, "E is 15 in q but 16 in k_block"),
        ({"q": jnp.zeros((2, 3, 4, 16), jnp.bfloat16)}, "q is bfloat16, k_block is float32"),
        ({"v_pages": jnp.zeros((20, 4, 2, 8))}, "Ev is 16 in v_block but 8 in v_pages|P is"),
        ({"v_pages": None}, "got v_block, but v_pages is None"),
        ({"v_block": None}, "got v_pages, but v_block is None"),
        ({"v_block": None, "v_pages": None}, "v_width must lie in 1 .. E = 16, got None"),
        ({"v_block": None, "v_pages": None, "v_width": 17}, "E = 16, got 17"),
        ({"v_width": 8}, "v_width is 8, but v_block .* has width 16"),
        ({"page_table": jnp.zeros((3, 8), jnp.int32)}, "B is 2 in q but 3 in page_table"),
        ({"page_table": jnp.zeros((2, 8), jnp.uint32)}, "page_table must be int32, got uint32"),
        ({"page_table": jnp.zeros((2, 0), jnp.int32)}, "T must be at least 1, got 0"),
        ({"prefix_length": jnp.zeros((2, 1), jnp.int32)}, r"prefix_length must be \[B\], got shape \(2, 1\)"),
        ({"q_positions": jnp.zeros((2, 4), jnp.int32)}, "N is 3 in q but 4 in q_positions"),
        ({"block_positions": jnp.zeros((2, 3), jnp.int16)}, "block_positions must be int32, got int16"),
        ({"mask": jnp.zeros((2, 3, 1), jnp.int32)}, "CAUSAL or uint32 bits, got int32"),
        ({"mask": jnp.zeros((2, 3, 3), jnp.bool_)}, "CAUSAL or uint32 bits, got bool"),
        ({"mask": jnp.zeros((2, 3, 2), jnp.uint32)}, r"= \(2, 3, 1\) for C = 3, got \(2, 3, 2\)"),
        ({"q": jnp.zeros((2, 1, 4, 16)), "q_positions": jnp.zeros((2, 1), jnp.int32)}, "C = 3 block keys and N = 1"),
        ({"window": 0}, "window .* got 0"),
        ({"window": 2**31}, r"window .* from 1 to 2\*\*31 - 1 .* got 2147483648"),
        ({"softcap": 0.0}, "softcap must be positive .* got 0.0"),
        ({"sinks": jnp.zeros(2)}, r"sinks must be a float \[H\] = \[4\] .* got float32 \(2,\)"),
        ({"sinks": jnp.zeros(4, jnp.int32)}, r"out of float32, bfloat16, float16, got int32 \(4,\)"),
        ({"implementation": "cuda"}, "'cuda' .* known: reference, xla, pallas, triton"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    spec = Spec("base", (9, 30), N=3, C=3, H=4, K=2, E=16, T=8, S=4)
    args, options = spec.arguments()
    arguments = dict(zip(NAMES, args, strict=True)) | options | change
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arrays: tree_attention(**arrays, **rest), arrays)  # At trace time.


def lacking(*_: object, **__: object) -> jax.Array:
    raise NotImplementedError("not this combination")


def test_only_the_default_implementation_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["specjax_kernels.attention"]
    args, options = named("decode").arguments()

    def without(name: str) -> None:
        known = module.IMPLEMENTATIONS
        monkeypatch.setattr(module, "IMPLEMENTATIONS", {**known, name: known[name]._replace(attend=lacking)})

    without("pallas")
    with pytest.raises(NotImplementedError, match="not this combination"):
        tree_attention(*args, **options, implementation="pallas")
    monkeypatch.setattr(module, "default_implementation", lambda: "pallas")
    assert (np.asarray(tree_attention(*args, **options), np.float32) == run(args, options, "xla")).all()
    without("xla")
    with pytest.raises(NotImplementedError, match="not this combination"):
        tree_attention(*args, **options)


CUDA, ROCM = "PJRT C API\ncuda 12090", "PJRT C API\nrocm 60200"


@pytest.mark.parametrize(
    ("backend", "version", "capability", "expected"),
    [
        ("cpu", "", None, "xla"),
        ("gpu", CUDA, "9.0", "pallas"),
        ("gpu", CUDA, "8.0", "pallas"),
        ("gpu", CUDA, "12.0", "pallas"),
        ("gpu", CUDA, "7.5", "xla"),  # Triton compiles for Ampere and up
        ("gpu", ROCM, "gfx90a", "xla"),
        ("tpu", "", None, "xla"),
    ],
)
@pytest.mark.usefixtures("operations")
def test_default_implementation(monkeypatch, backend: str, version: str, capability, expected: str) -> None:
    """A program for the CPU of a machine with a GPU uses XLA's loop over chunks."""
    device = types.SimpleNamespace(
        client=types.SimpleNamespace(platform_version=version), compute_capability=capability
    )
    args, options = named("decode").arguments()
    plain = run(args, options, "xla")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: backend)
        patch.setattr(jax, "devices", lambda: [device])
        assert default_implementation() == expected
        assert generation() == (capability if version == CUDA else None)
        if expected == "xla" and backend != "cpu":
            with pytest.raises(NotImplementedError, match=r"'pallas' .* of compute capability 8.0 .*Ampere"):
                tree_attention(*args, **options, implementation="pallas")
        lowered = jax.jit(functools.partial(tree_attention, **options)).trace(*args).lower(lowering_platforms=("cpu",))
    assert "while" in lowered.as_text()
    assert (np.asarray(tree_attention(*args, **options)) == plain).all()


# Cost


def shapes(P: int, T: int, B: int = 2, N: int = 4):
    def struct(*shape: int, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    block, pool, positions = struct(B, N, 2, 64), struct(P, 16, 2, 64), struct(B, N, dtype=jnp.int32)
    table, prefix = struct(B, T, dtype=jnp.int32), struct(B, dtype=jnp.int32)
    bits = struct(B, N, 1, dtype=jnp.uint32)
    return (struct(B, N, 4, 64), block, block, pool, pool, table, prefix, positions, positions, bits)


def xla_attention(*arguments):
    return tree_attention(*arguments, scale=0.125, implementation="xla")


both_ways = pytest.mark.parametrize("way", ["xla", "operations"])


@pytest.mark.optimized
@both_ways
def test_temporary_memory_is_independent_of_pool_and_table(way: str) -> None:
    def temporary(P: int, T: int) -> int:
        with tracing(way):
            program = jax.jit(lambda *arguments: xla_attention(*arguments)).lower(*shapes(P, T)).compile()
        return program.memory_analysis().temp_size_in_bytes

    small = temporary(64, 64)
    assert temporary(4096, 64) == small
    assert temporary(4096, 512) <= small + 16 * 2 * 512 * 4  # A few int32 arrays of the page table's shape.


@pytest.mark.parametrize(
    ("prefix", "window", "trips"),
    [
        ((0, 0), None, 0),
        ((128, 3), None, 1),
        ((129, 3), None, 2),
        ((1024, 5), None, 8),
        ((1000, 990), 100, 2),
        ((1000, 0), 100, 8),
    ],
)
def test_trips_follow_the_committed_tokens(prefix: tuple[int, int], window: int | None, trips: int) -> None:
    positions = jnp.asarray(prefix, jnp.int32)[:, None, None]
    oldest = None if window is None else positions - window + 1
    first, last = xla_path.trip_range(jnp.asarray(prefix, jnp.int32), oldest, 128, 8)
    assert int(last - first) == trips


@pytest.mark.usefixtures("operations")
def test_the_number_of_trips_is_computed() -> None:
    """One loop whose bound is data: a fixed count would be a scan."""
    lowered = jax.jit(lambda *arguments: xla_attention(*arguments)).lower(*shapes(64, 64))
    assert lowered.as_text().count("stablehlo.while") == 1
    compiled = lowered.compile().as_text()
    assert len(re.findall(r" while\(", compiled)) == 1
    assert "known_trip_count" not in compiled


@pytest.mark.parametrize(("N", "C"), [(1, 1), (5, 5), (2, 34), (256, 300), (257, 257)])
def test_calls_of_the_cpu_kernel(N: int, C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("counted", (300, -1, 20), N=N, C=C, H=4, K=2, E=16, T=64, mask="random")
    args, options = spec.arguments()

    def calls(*, args=args, **more) -> int:
        function = functools.partial(tree_attention, **(options | more), implementation="xla")
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
        assert ("stablehlo.while" in text) == ("@specjax_tree_attention" not in text)
        return text.count("@specjax_tree_attention")

    assert calls() == calls(sinks=jnp.zeros(4)) == (N <= cpu_attention.MOST_TOKENS)
    half = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in args]
    assert calls(args=half) == calls(window=9) == calls(softcap=9.0) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert calls() == 0, "a process that computes on an accelerator does not compile it"


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("prefix", [0, 1, 127, 128, 129, 300])
def test_the_cpu_kernel_computes_each_row_alone(prefix: int, page_size: int) -> None:
    """The root of a tree has the same bits with and without other nodes, at any boundary of chunks and pages."""
    spec = Spec("beside", (prefix, 40), N=7, C=7, H=6, K=2, E=80, T=64, S=page_size, mask="tree")
    args, options = spec.arguments()
    args = fixed_pool(args, 80)
    q, k_block, v_block, *pools, table, length, at, block_at, _ = args
    alone = (q[:, :1], k_block[:, :1], v_block[:, :1], *pools, table, length, at[:, :1], block_at[:, :1], CAUSAL)
    xla = _xla(tuple(options.items()))
    np.testing.assert_array_equal(xla(*args)[:, :1], xla(*alone))


@functools.cache
def _xla(options: tuple[tuple[str, Any], ...]):
    return jax.jit(functools.partial(tree_attention, **dict(options), implementation="xla"))


def test_the_cpu_kernel_without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter vectors: fewer keys side by side, and widths that are no multiple of two of them."""
    monkeypatch.setattr(object_code, "has", lambda feature: False)
    monkeypatch.setattr(cpu_attention, "NAME", "specjax_tree_attention_elsewhere")
    for E, Ev in ((16, 48), (80, 80)):
        args, options = Spec("short", (300, 0, 9), N=7, C=7, H=6, K=2, E=E, Ev=Ev, T=80, mask="tree").arguments()
        output, expected = (run(args, options, name) for name in ("xla", "reference"))
        np.testing.assert_allclose(output, expected, rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"])
    assert runtime._REGISTERED["specjax_tree_attention_elsewhere"] is None


def test_the_cpu_kernel_with_large_scores_and_unseen_rows() -> None:
    """Exponentials of scores of hundreds overflow unless the largest is subtracted first."""
    args, options = Spec("large", (200, 0), N=3, C=3, H=4, K=2, E=16, T=32).arguments()
    q, *others = args
    args = (q * 300, *others[:8], jnp.zeros_like(pack_bits(jnp.zeros((2, 3, 3), bool))))
    output = run(args, options, "xla")
    # A score of a thousand is known to 6e-5, and so is the logarithm of its weight.
    np.testing.assert_allclose(output, run(args, options, "operations"), rtol=0, atol=5e-4)
    assert np.isfinite(output).all() and (output[1] == 0).all() and (output[0] != 0).any()


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize(
    ("name", "tokens"),
    [(name, 24) for name in SMALL[::2]] + [(name, xla_path.GPU_TOKENS) for name in ("holes", "latent-tree")],
)
def test_xla_operations_of_a_gpu(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of other platforms: all pages at once, or in chunks if these are too many."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda partial, cpu, default: default(partial))
    monkeypatch.setattr(xla_path, "GPU_TOKENS", tokens)
    args, options = named(name).arguments(seed=2)
    loops = "while" in str(jax.make_jaxpr(functools.partial(tree_attention, **options, implementation="xla"))(*args))
    assert not loops or tokens == 24
    outputs = every(functools.partial(tree_attention, **options), ("reference", "xla"))(*args)
    np.testing.assert_allclose(outputs["xla"], outputs["reference"], rtol=0, atol=TOLERANCE[named(name).dtype])
