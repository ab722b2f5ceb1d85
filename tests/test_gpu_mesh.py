"""What several GPUs that are not there would send each other in a step of tensor parallelism."""

from __future__ import annotations

import pytest
from test_gpu_compile import benchmarks  # noqa: F401 (a fixture)

pytestmark = pytest.mark.gpu_compile

LAYERS, HIDDEN, VOCABULARY = 2, 4096, 128256  # Llama-3.1-8B's


@pytest.mark.parametrize("step", ["plain", "verification"])
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_collectives_of_a_step(devices, step):
    """Two sums a layer and one for the embedding, a pair of numbers for each argmax, and logits in branches. Of the
    chain's commit the head's layer has the same."""
    from gpu_mesh import compiled, described_mesh, program

    mesh = described_mesh("h200", devices)
    record = compiled(mesh, program(mesh, step, LAYERS))
    print(f"{devices} devices, {step}: {record}")
    found = record["collectives"]
    assert set(found) == {"all-reduce", "all-gather"}
    head = {"plain": 0, "verification": 3}[step]
    assert found["all-reduce"] == 2 * LAYERS + 1 + head
    assert found["all-gather"] == 3
    assert record["alias_bytes"] >= record["state_bytes"], "a pool is copied"
    whole_table = 2 * VOCABULARY * HIDDEN
    assert record["temp_bytes"] < whole_table / 8, "the embedding is gathered"
    # Pages of `programs`: 256 of 64 tokens; keys and values of 8 heads of 128 in two layers, and in the head's one.
    pool = 256 * 64 * 2 * 8 * 128 * 2 * (LAYERS + (step != "plain"))
    assert pool / devices < record["state_bytes"] < 1.6 * pool
