"""Collective operations of tensor-parallel steps, cross-compiled for several GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from specjax_kernels import Quantised, linear
from specjax_kernels.mesh import on_axis
from specjax_kernels.quantised import shared, split_axes
from test_gpu_compile import benchmarks  # noqa: F401 (a fixture)

pytestmark = pytest.mark.gpu_compile

LAYERS, HIDDEN, VOCABULARY = 2, 4096, 128256  # Llama-3.1-8B's


@pytest.mark.parametrize("step", ["plain", "verification"])
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_collectives_of_a_step(devices, step):
    """Two sums a layer and one for the embedding, a pair of numbers for each argmax, and logits in branches. A draft
    head embeds the committed tokens: one more sum."""
    from gpu_mesh import compiled, described_mesh, program

    mesh = described_mesh("h200", devices)
    record = compiled(mesh, program(mesh, step, LAYERS))
    print(f"{devices} devices, {step}: {record}")
    head = {"plain": 0, "verification": 1}[step]
    assert record["collectives"] == {"all-reduce": 2 * LAYERS + 1 + head, "all-gather": 3}
    assert record["alias_bytes"] >= record["state_bytes"], "a pool is copied"
    whole_table = 2 * VOCABULARY * HIDDEN
    assert record["temp_bytes"] < whole_table / 8, "the embedding is gathered"
    # Pages of `programs`: 256 of 64 tokens; keys and values of 8 heads of 128 in two layers, and in the head's one.
    pool = 256 * 64 * 2 * 8 * 128 * 2 * (LAYERS + (step != "plain"))
    assert pool / devices < record["state_bytes"] < 1.6 * pool


@pytest.mark.parametrize(("devices", "groups"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), (4, 4)])
def test_collectives_of_experts(devices, groups):
    """The collectives of a dense model: no token or expert is sent to another device."""
    from gpu_mesh import compiled, described_mesh, program

    mesh = described_mesh("h200", devices, groups)
    record = compiled(mesh, program(mesh, "experts", LAYERS))
    print(f"{devices} devices, {groups} groups: {record}")
    assert record["collectives"] == {"all-reduce": 2 * LAYERS + 1, "all-gather": 3}
    assert record["alias_bytes"] >= record["state_bytes"], "a pool is copied"
    expert = 2 * 3 * 2048 * 768
    assert record["temp_bytes"] < 8 * expert, "weights of the chosen experts are copied"


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_product_in_four_bits(axis):
    """Each device runs the kernel on its part: no weight is dequantised to memory, and only sums of inputs are sent."""
    from gpu_mesh import KINDS, described_mesh

    from specjax.gpu import NVIDIA_OPTIONS
    from specjax.parallel.sharding import everywhere

    mesh, out, depth = described_mesh("h200", 2), 4096, 14336
    codes = jax.ShapeDtypeStruct((out, depth // 2), jnp.uint8)
    scales = jax.ShapeDtypeStruct((out, depth // 128), jnp.float16)
    leaf = shared(Quantised(codes, scales, scales), axis, 2)
    assert leaf is not None

    def place(axis: int, x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, on_axis(axis)))

    x = jax.ShapeDtypeStruct((1, 8, depth), jnp.bfloat16, sharding=everywhere(mesh))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(linear).trace(x, jax.tree.map(place, split_axes(leaf), leaf)).lower()
    program = lowered.compile(compiler_options=dict(NVIDIA_OPTIONS))
    text = program.as_text()
    sent = [kind for kind in KINDS if f" {kind}(" in text or f" {kind}-start(" in text]
    assert sent == ["all-reduce"] * (axis == -1)
    assert "custom-call" in text
    assert program.memory_analysis().temp_size_in_bytes < out * depth / 8
