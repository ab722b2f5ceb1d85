"""Products of few rows with what goes before and after them: the kernel, its choice, and where models use it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import Norm, choice, launch, linear
from specjax_kernels.choice import ProductBlocks, rule_of_thumb

GELU = functools.partial(jax.nn.gelu, approximate=True)
ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
BLOCKS = ProductBlocks(columns=16, depth=32, warps=2, stages=3)


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of `linear`. M and the outputs are a model's divided by a power of two, unless they are small."""

    name: str
    rows: tuple[int, int]  # B, N
    weight: tuple[int, ...]
    dtype: str = "bfloat16"
    norm: float | None = None  # its offset
    bias: bool = False
    gated: str = ""
    residual: bool = False
    slow: bool = False


CASES = (
    Case("llama-8b-qkv", (1, 1), (256, 8, 6, 8), norm=0.0),
    Case("llama-8b-output", (2, 4), (256, 256), residual=True),
    Case("llama-8b-gate-up", (1, 8), (256, 2, 896), norm=0.0, gated="silu"),
    Case("llama-8b-down", (1, 64), (896, 256), residual=True),
    Case("smollm2-qkv", (1, 3), (576, 3, 5, 8), "float32", norm=0.0),
    Case("smollm2-gate-up", (3, 7), (144, 2, 384), "float32", norm=0.0, gated="silu"),
    Case("qwen2-0.5b-qkv", (1, 8), (224, 2, 9, 16), norm=0.0, bias=True, residual=True),
    Case("qwen2-7b-gate-up", (1, 32), (224, 2, 592), "float16", norm=0.0, gated="silu"),
    Case("gemma2-2b-qkv", (4, 4), (144, 4, 4, 16), norm=1.0),
    Case("gemma3-1b-gate-up", (1, 5), (72, 2, 432), norm=1.0, gated="gelu"),
    Case("deepseek-v3-queries", (1, 8), (96, 8, 24), "float32", norm=0.0),
    Case("odd", (1, 17), (90, 67), "float32", norm=0.0, bias=True, residual=True),
    Case("odd-gated", (1, 33), (100, 2, 37), norm=1.0, bias=True, gated="gelu", residual=True),
    Case("one-of-all", (1, 1), (3, 1), "float16", norm=0.0),
    *(
        Case(f"{dtype}-{rows}-rows", (1, rows), (200, 2, 72), dtype, norm=0.0, gated="silu", residual=True, slow=True)
        for dtype in ULP
        for rows in (1, 2, 15, 16, 31, 64)
    ),
    *(Case(f"{dtype}-plain", (1, 9), (77, 33), dtype, slow=True) for dtype in ULP),
    Case("phi3-gate-up", (1, 16), (192, 2, 512), "float16", norm=0.0, gated="silu", slow=True),
    Case("mimo-7b-down", (2, 8), (688, 256), residual=True, slow=True),
    Case("qwen3-0.6b-qkv", (1, 4), (128, 8, 4, 16), "float16", norm=0.0, slow=True),
)


def arguments(case: Case, seed: int = 0) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), case.dtype)

    depth, *out = case.weight
    arrays = {"norm": normal((depth,))} if case.norm is not None else {}
    arrays |= {"bias": normal((*out,))} if case.bias else {}
    arrays |= {"residual": normal((*case.rows, *(out[1:] if case.gated else out)))} if case.residual else {}
    return (normal((*case.rows, depth), 3.0), normal(case.weight, depth**-0.5)), arrays


def product(case: Case):
    """A new function: nothing of an earlier trace is reused."""

    def run(x: jax.Array, weight: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        norm = None if case.norm is None else Norm(arrays["norm"], 1e-5, case.norm)
        gated = {"silu": jax.nn.silu, "gelu": GELU, "": None}[case.gated]
        others = {name: array for name, array in arrays.items() if name != "norm"}
        return linear(x, weight, norm=norm, gated=gated, **others)

    return jax.jit(run)


def expected(case: Case, x, weight, arrays) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and the scale that errors are relative to."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    arrays = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    if case.norm is not None:
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * (case.norm + arrays["norm"])
    size = np.linalg.norm(x, axis=-1).reshape(*case.rows, *[1] * (weight.ndim - 1)) / np.sqrt(weight.shape[0])
    out = np.tensordot(x, weight, axes=1) + arrays.get("bias", 0.0)
    size = size + np.abs(out)
    if case.gated:
        gate, up = out[:, :, 0], out[:, :, 1]
        cubic = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
        gate = gate / (1 + np.exp(-gate)) if case.gated == "silu" else gate * (1 + cubic) / 2
        out, size = gate * up, size[:, :, 0] * size[:, :, 1]
    return out + arrays.get("residual", 0.0), size + np.abs(arrays.get("residual", 0.0))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case.slow else ()) for case in CASES], ids=lambda c: c.name
)
def test_the_kernel_computes_the_definition(case: Case, monkeypatch) -> None:
    args, arrays = arguments(case)
    forced_to(monkeypatch, "pallas")
    found = product(case)(*args, arrays)
    forced_to(monkeypatch, "xla")
    defined = product(case)(*args, arrays)
    exact, size = expected(case, *args, arrays)
    assert found.shape == defined.shape and found.dtype == defined.dtype == case.dtype
    for result, most in ((found, 8), (defined, 24)):  # the definition rounds after every part
        error = np.abs(np.asarray(result, np.float64) - exact) / size
        assert error.max() < most * ULP[case.dtype], error.max() / ULP[case.dtype]


def forced_to(monkeypatch, name: str) -> None:
    monkeypatch.setenv(choice.VARIABLE, name)


def test_rows_do_not_depend_on_their_neighbours(monkeypatch) -> None:
    """A token gets the same numbers whatever is verified beside it, in a batch of as many rows."""
    forced_to(monkeypatch, "pallas")
    case = Case("neighbours", (1, 9), (90, 2, 40), "bfloat16", norm=0.0, gated="silu")
    (x, weight), arrays = arguments(case)
    run = product(case)
    whole, turned = run(x, weight, arrays), run(x[:, ::-1], weight, arrays)
    np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(turned[:, ::-1], np.float32))


def test_large_activations_of_float16_do_not_overflow(monkeypatch) -> None:
    """x times the norm's weight is beyond float16, the normalised x is not."""
    forced_to(monkeypatch, "pallas")
    x = jnp.full((1, 2, 64), 3e4, jnp.float16).at[0, 1, ::2].set(-6e4)
    norm = Norm(jnp.full((64,), 8.0, jnp.float16), 1e-5)
    found = jax.jit(lambda x, w: linear(x, w, norm=norm))(x, jnp.eye(64, dtype=jnp.float16))
    wide = np.asarray(x, np.float64)
    normed = 8 * wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(found, np.float64), normed, rtol=2**-9)


def test_derivatives_are_the_definitions(monkeypatch) -> None:
    case = Case("derivative", (1, 5), (40, 2, 24), "float32", norm=0.0, gated="silu", residual=True)
    args, arrays = arguments(case)

    def gradients():
        run = product(case)
        return jax.grad(lambda x, w, rest: jnp.sum(run(x, w, rest) ** 2), argnums=(0, 1, 2))(*args, arrays)

    forced_to(monkeypatch, "xla")
    plain = gradients()
    forced_to(monkeypatch, "pallas")
    for found, wanted in zip(jax.tree.leaves(gradients()), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


# The choice


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "TABLE", tmp_path / "choice_table.json")
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice.table.cache_clear()
    yield tmp_path / "choice_table.json"
    choice.table.cache_clear()


MODELS = {
    "llama-8b": (4096, 6144, 14336), "llama-1b": (2048, 3072, 8192), "llama-70b": (8192, 10240, 28672),
    "smollm2-135m": (576, 960, 1536), "qwen2-0.5b": (896, 1152, 4864), "qwen2-7b": (3584, 4608, 18944),
    "qwen3-0.6b": (1024, 4096, 3072), "gemma2-2b": (2304, 4096, 9216), "gemma3-1b": (1152, 1536, 6912),
    "phi3-mini": (3072, 9216, 8192), "mimo-7b": (4096, 6144, 11008), "deepseek-v3": (7168, 1536, 18432),
}  # fmt: skip
"""M, outputs of the first product, I."""


@pytest.mark.parametrize("generation", [*launch.GENERATIONS, None])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_by_rule_of_thumb_fit(model: str, generation: str | None) -> None:
    width, first, inner = MODELS[model]
    for shape in ((width, first), (width, 2, inner), (inner, width)):
        for dtype in ULP:
            for rows in (1, 16, 33, 64):
                blocks = rule_of_thumb(dtype, shape, rows, generation)
                tile, size = launch.padded(rows if dtype != "float32" else 16), 4 if dtype == "float32" else 2
                stage = blocks.depth * (tile + (len(shape) - 1) * blocks.columns) * size
                room = launch.GENERATIONS.get(generation or "", launch.UNKNOWN).shared_memory
                assert stage * blocks.stages <= room and blocks.stages >= 2
                assert shape[0] % blocks.depth == 0, "no mask in the loop"


def test_names_by_hand() -> None:
    assert choice.key("bfloat16", (4096, 6144), 5) == "bfloat16 4096 x 6144 rows 8"
    assert choice.key("float16", (4096, 2, 14336), 64) == "float16 4096 x 2 x 14336 rows 64"


def test_an_entry_is_used_on_its_device_alone(table, monkeypatch) -> None:
    name = choice.key("bfloat16", (96, 40), 8)
    choice.write_table("9.0", {name: BLOCKS, "pages": "pallas"}, table)
    choice.write_table("9.0", {choice.key("bfloat16", (96, 40), 4): "xla"}, table)
    assert sorted(json.loads(table.read_text())["9.0"]) == sorted([name, "bfloat16 96 x 40 rows 4", "pages"])
    assert choice.product_blocks("bfloat16", (96, 40), 8) is None and not choice.pages_in_one_kernel()
    monkeypatch.setattr(launch, "generation", lambda: "9.0")
    assert choice.pages_in_one_kernel()
    chosen = {rows: choice.product_blocks("bfloat16", (96, 40), rows) for rows in range(12)}
    assert chosen == {rows: BLOCKS if 4 < rows <= 8 else None for rows in range(12)}
    assert choice.product_blocks("float16", (96, 40), 8) is None
    monkeypatch.setenv(choice.VARIABLE, "xla")
    assert choice.product_blocks("bfloat16", (96, 40), 8) is None and not choice.pages_in_one_kernel()
    monkeypatch.setenv(choice.VARIABLE, "pallas")
    assert choice.product_blocks("bfloat16", (96, 40), 8) == BLOCKS
    assert choice.product_blocks("bfloat16", (96, 40), 4) == rule_of_thumb("bfloat16", (96, 40), 4, "9.0")
    assert choice.product_blocks("bfloat16", (96, 40), choice.MOST_ROWS + 1) is None


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("a", "pallas", "9.0: a must give the whole numbers columns, depth, warps, stages, got pallas"),
        ("a", vars(BLOCKS) | {"columns": 24}, "a: columns must be a power of two, got 24"),
        ("a", vars(BLOCKS) | {"depth": 8}, "a: depth must be at least 16, got 8"),
        ("pages", vars(BLOCKS), 'pages must be "xla" or "pallas", got'),
    ],
)
def test_a_table_that_cannot_be_used(table, name, entry, message) -> None:
    table.write_text(json.dumps({"9.0": {name: entry}}))
    with pytest.raises(ValueError, match=message):
        choice.table()


def test_the_table_that_ships_can_be_read() -> None:
    choice.table.cache_clear()
    assert all(isinstance(entries, dict) for entries in choice.table().values())


def test_another_value_of_the_variable_is_refused(monkeypatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "triton")
    with pytest.raises(ValueError, match="SPECJAX_GPU_KERNELS is xla, pallas, or not set; got 'triton'"):
        choice.product_blocks("bfloat16", (96, 40), 1)


def test_products_it_lacks_are_the_definition(monkeypatch) -> None:
    """Weights of another dtype than x, and many rows."""
    forced_to(monkeypatch, "pallas")
    for x, weight in (((1, 2, 32), "bfloat16"), ((1, 65, 32), "float32"), ((0, 3, 32), "float32")):
        shapes = jax.ShapeDtypeStruct(x, "float32"), jax.ShapeDtypeStruct((32, 24), weight)
        text = jax.jit(lambda x, w: linear(x, w)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert "few_rows" not in text and math.prod(x) * text.count("dot_general") >= math.prod(x)
