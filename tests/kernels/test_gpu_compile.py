"""Kernels, whole steps and drafts, cross-compiled for GPUs: counts, bytes and registers; nothing is run or timed.

Skipped without the GPU compiler, 600 MB, which `make gpu-compile` installs. Tests marked `slow` repeat a case for
another GPU or with more layers (`make gpu-compile-all`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from specjax_kernels import gpu_language
from specjax_kernels import triton as triton_path
from specjax_kernels.specs import SPECS, named, tagged

from specjax.gpu import NVIDIA_OPTIONS, SCHEDULING
from specjax.tree import DraftTree
from specjax.verify import Verdict, find_verdict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPUS = ("h200", "b200", "h100_sxm", "a100_sxm_80")
PAGE_SIZE, PAGES, FEW, MORE, ALL = 64, 4096, 4, 6, 32
KEYS_OF_A_LAYER = PAGES * PAGE_SIZE * 8 * 128 * 2  # bytes

MODULES = ("gpu_check", "gpu_compile", "gpu_mesh", "gpu_steps", "model_shapes", "ptx", "records", "thunks", "timing")


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    """Makes the modules of benchmarks/ importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import ptx

        if problem := ptx.missing():
            pytest.skip(problem)
        if os.environ.get("XLA_FLAGS"):
            pytest.skip("XLA_FLAGS of the suite affect the GPU compiler; `make gpu-compile` leaves them empty")
        # Programs for an absent GPU can be written to the cache, but not read back.
        cached = jax.config.jax_enable_compilation_cache
        jax.config.update("jax_enable_compilation_cache", False)
        yield
        jax.config.update("jax_enable_compilation_cache", cached)
    for name in MODULES:
        sys.modules.pop(name, None)


pytestmark = pytest.mark.gpu_compile
slow, newest = pytest.mark.slow, pytest.mark.newest_jax


@functools.cache
def gpu(name: str):
    from ptx import Gpu

    return Gpu.named(name)


# The kernel

FEW_SPECS = [named(name) for name in ("llama8b-decode-1000", "llama8b-tree-32", "llama8b-prefill-1024", "heads-256")]
QUICK = {*FEW_SPECS, *tagged("bench")}
KERNELS = [pytest.param("h200", spec, marks=() if spec in QUICK else slow) for spec in SPECS]
KERNELS += [pytest.param("a100_sxm_80", spec, marks=slow) for spec in tagged("bench")]
KERNELS += [pytest.param("h100_sxm", spec, marks=slow) for spec in FEW_SPECS]
KERNELS += [pytest.param("b200", spec, marks=() if spec in FEW_SPECS else slow) for spec in SPECS]


@pytest.mark.parametrize(("device", "spec"), KERNELS, ids=lambda x: getattr(x, "name", x))
def test_attention_kernels(device: str, spec) -> None:
    """Tensor cores for half precision, asynchronous copies, and no value spilled to memory."""
    from ptx import assembler, kernels_of
    from specjax_kernels.launch import launch_for

    ptxas = assembler()
    assert ptxas is not None, "make gpu-compile installs the assembler beside the compiler"
    kernels = kernels_of(spec, gpu(device), ptxas)
    launch = launch_for(
        spec.dtype, max(spec.E, spec.v_width), spec.N * spec.H // spec.K, spec.B * spec.K, spec.T * spec.S
    )
    assert set(kernels) - {"tree_attention"} == ({"tree_attention_combine"} if launch.splits > 1 else set())
    attend = kernels["tree_attention"]
    assert (attend["mma"] + attend["wgmma"] + attend["tcgen05"] > 0) == (spec.dtype != "float32")
    assert (attend["async_copies"] > 0) == (launch.stages > 1)
    instruction = {"h200": "wgmma", "h100_sxm": "wgmma", "b200": "tcgen05"}.get(device)
    if instruction and launch.rows == 64:
        assert attend[instruction] > 0, "a tile of 64 rows uses the instruction of its generation"
    for name, counts in kernels.items():
        assert counts["spilled_bytes"] == counts["stack_bytes"] == 0, name
        assert not counts["local_memory"], name
        assert counts["registers"] <= 255


# Whole steps of Llama-3.1-8B's shape

TREES = {
    "plain": ("NONE", (2, 1, 3)),
    "short chain": ("EAGLE3", (3, 1, 4)),
    "chain": ("EAGLE3", (7, 1, 8)),
    "float chain": ("EAGLE3", (7, 1, 8)),
    "int4 short chain": ("EAGLE3", (3, 1, 4)),
    "int4 chain": ("EAGLE3", (7, 1, 8)),
    "short tree": ("EAGLE3", (3, 8, 32)),
    "tree": ("EAGLE3", (5, 8, 32)),
    "block": ("DFLASH", (15, 1, 16)),
}
"""Name -> algorithm and (steps, top-k, draft tokens). Short trees have every kind of level and compile faster."""

FORWARD, COMMIT = 12, 2
"""Kernels of each target layer: norm, qkv, rotation, attention, combine, output, add, norm, gate and up, their product,
down, add; and a scatter each for the keys and the values."""

SAMPLING = 40
"""Most kernels that sample a step's tokens with top-k, top-p, min-p, penalties and biases, for any tree."""

LEVEL = 18
"""Most kernels of each level of a chain: embedding, norms, qkv, rotation with the keys so far, attention, combine,
output, add, norm, gate and up, their product, down, add, norm, logits, the noise of rows that sample, argmax in two.
Mask, positions, keys and scores have none."""


@functools.cache
def step(
    device: str, shape: str, batch: int, layers: int, backend: str | None = "pallas", left_out: str | None = None,
    **changes: Any,
) -> dict:  # fmt: skip
    """A step with the options of a GPU's engine, without the option `left_out`. With "triton", all kernels are."""
    from gpu_compile import compiled

    options = {name: value for name, value in NVIDIA_OPTIONS.items() if name != left_out}
    with pytest.MonkeyPatch.context() as patch:
        if backend is not None:
            patch.setattr(gpu_language, "dialect", lambda: backend)
        jax.clear_caches()
        return compiled(programs_of(device, shape, batch, layers, backend, **changes)["step"], options)


def programs_of(
    device: str, shape: str, batch: int, layers: int, backend: str | None = "pallas", **options: Any
) -> Any:
    from gpu_compile import Shapes, programs

    from specjax import PoolShape

    algorithm, tree = TREES[shape]
    pool, kind = PoolShape(PAGES, PAGE_SIZE), {"float": "none", "int4": "int4"}.get(shape.split()[0])
    shapes = Shapes(layers, *tree, batch, PAGE_SIZE, 8192, pool, backend, kind)
    return programs(shapes, gpu(device).place, algorithm=algorithm, **options)


def greedily(tree: DraftTree, logits: Any, *_: Any, depth: int, allowed: None) -> Verdict:
    """A verifier without a branch for sampling, which dominates the compilation."""
    return find_verdict(tree, jnp.argmax(logits, axis=-1).astype(jnp.int32), depth)


def verification(shape: str, batch: int, layers: int) -> dict:
    """The forward over given trees and the commit, compiled for an H200."""
    from gpu_compile import compiled

    program = programs_of("h200", shape, batch, layers, verify=greedily)["verify"]
    return compiled(program, dict(NVIDIA_OPTIONS))


def check(record: dict, pool: int = 2 * FEW * KEYS_OF_A_LAYER) -> None:
    """`pool`: least bytes of the target's pages."""
    assert record["one_graph"], record["outside_graphs"]
    assert record["host_decides"] == []
    assert record["all_state_aliased"]
    # Sampling is one branch with a fixed number of kernels, for all nodes of a tree at once.
    assert "kWhile" not in record["kinds"]
    branches = {decision["place"].split()[-1]: decision for decision in record["device_decides"]}
    assert set(branches) == {"verify_tree", "path_logprobs"} and len(record["device_decides"]) == 2
    assert all(decision["within"] == 0 for decision in branches.values())
    assert branches["verify_tree"]["kernels"] <= SAMPLING
    assert record["temp_bytes"] < KEYS_OF_A_LAYER
    assert record["target_pool_bytes"] >= pool


KERNELS_OF_A_STEP = {"plain": 76, "observing": 85, "chain": 222, "tree": 222}
"""Most kernels in every call of a step of 4 layers, batch 1, on all versions of jax. "observing": a step that observes
but does not draft, 84 with jax 0.10.2."""

needs_triton = pytest.mark.skipif(triton_path.UNMET is not None, reason=str(triton_path.UNMET))


@pytest.mark.parametrize("device", [pytest.param("h200", marks=newest), pytest.param("h100_sxm", marks=slow)])
@pytest.mark.parametrize("shape", KERNELS_OF_A_STEP)
@pytest.mark.parametrize("backend", ["pallas", pytest.param("triton", marks=needs_triton)])
def test_kernels_of_a_step(backend: str, shape: str, device: str) -> None:
    """The same number in Pallas and in Triton."""
    observing = {"nodes": 1} if shape == "observing" else {}
    record = step(device, "chain" if observing else shape, 1, FEW, backend, **observing)
    check(record)
    print(f"{jax.__version__} {device} {backend} {shape}: {record['kernels_every_call']} kernels, "
          f"{sum(record['weights_read'].values()) / 1e6:.0f} MB of weights")  # fmt: skip
    assert record["kernels_every_call"] <= KERNELS_OF_A_STEP[shape]


@pytest.mark.parametrize("device", ["h200", pytest.param("h100_sxm", marks=slow)])
def test_a_block_head_runs_once(device: str) -> None:
    """Five layers over 16 slots. The layers' products of the same context are not joined: XLA would concatenate their
    matrices, 500 MB, in each step."""
    record = step(device, "block", 1, FEW)
    check(record)
    assert record["kernels_every_call"] <= 200
    assert record["temp_bytes"] < 64e6


STEPS = [pytest.param("plain", 1, FEW, marks=newest), ("plain", 8, FEW),
         pytest.param("short chain", 1, FEW, marks=newest), ("short tree", 1, FEW)]  # fmt: skip
MORE_STEPS = [(shape, batch, ALL) for shape in ("plain", "chain", "tree") for batch in (1, 8)]


@pytest.mark.parametrize(
    ("shape", "batch", "layers"), [*STEPS, *(pytest.param(*case, marks=slow) for case in MORE_STEPS)]
)
def test_a_step_is_one_graph_and_updates_the_pool_in_place(shape: str, batch: int, layers: int) -> None:
    record = step("h200", shape, batch, layers)
    check(record)
    print(f"{shape}, batch {batch}: {record['kernels_every_call']} kernels, {record['copies_every_call']} copies, "
          f"{record['temp_bytes'] / 1e6:.1f} MB of temporaries")  # fmt: skip


@newest
def test_xla_parses_the_options_of_gpu_check() -> None:
    """All but one: each version of jax has another mode of graph updates."""
    from gpu_check import OPTIONS, UPDATE_MODE
    from ptx import described_device

    argument = gpu("h200").place(jax.ShapeDtypeStruct((8,), jnp.float32))

    def parses(options: dict[str, str]) -> bool:
        with described_device(argument):
            lowered = jax.jit(lambda x: x + 1).trace(argument).lower()
        try:
            lowered.compile(compiler_options=dict(NVIDIA_OPTIONS) | options)
        except jax.errors.JaxRuntimeError as error:
            print(f"{options}: {error}")
            return False
        return True

    refused = [options for options in OPTIONS.values() if not parses(options)]
    assert len(OPTIONS) == 10 and [[*options] for options in refused] == [[UPDATE_MODE]]
    assert not parses({"xla_gpu_exhaustive_tiling_search": "true"}), "XLA takes True and False as written"


LAYERS = {("plain", 1): newest, ("chain", 8): ()}
MORE_LAYERS = [(shape, batch) for shape in ("plain", "chain", "tree") for batch in (1, 8)]


@pytest.mark.parametrize(
    ("shape", "batch"), [pytest.param(*case, marks=LAYERS.get(case, slow)) for case in MORE_LAYERS]
)
def test_kernels_of_a_layer(shape: str, batch: int) -> None:
    more, few = (verification(shape, batch, layers) for layers in (MORE, FEW))
    assert more["one_graph"] and more["all_state_aliased"]
    kernels = (more["kernels_every_call"] - few["kernels_every_call"]) / (MORE - FEW)
    print(f"{shape}, batch {batch}: {kernels} kernels a layer")
    assert round(kernels) <= FORWARD + COMMIT


def test_few_kernels_read_the_input_of_a_step() -> None:
    """The packed input is the only array that has a new address in each step, so an update of the graph changes only
    the kernels that read it. Page tables are in the donated state."""
    from gpu_compile import Program, compiled

    from specjax.engine.device import unpack_step

    whole = programs_of("h200", "plain", 1, FEW)["step"]
    params, state, inputs = whole.arguments
    table, new_pages = inputs.page_table.shape[1], 2
    shapes = jax.ShapeDtypeStruct((1, table), "int32"), jax.ShapeDtypeStruct((1, 2 + new_pages), "int32")

    def engine_step(params, state, packed):
        state, tables = state
        inputs, tables = unpack_step(packed, tables, table, PAGES)
        state, output = whole.jitted(params, state, inputs)
        return (state, tables), output

    tables, packed = gpu("h200").place(shapes)
    program = Program(jax.jit(engine_step, donate_argnums=1), (params, (state, tables), packed), state)
    record = compiled(program, dict(NVIDIA_OPTIONS))
    assert record["one_graph"] and record["all_state_aliased"]
    readers = record["packed_input_read"] / (4 * (2 + new_pages))
    print(f"{readers:.0f} of {record['kernels_every_call']} kernels read the input")
    assert 1 <= readers <= 8


def weight_bytes(record: dict, layers: int = ALL) -> int:
    """Bytes of weights that a step of `layers` layers reads, from a record of `FEW`. Embeddings are read by rows."""
    read = {name: size for name, size in record["weights_read"].items() if "__embed__" not in name}
    sizes = [sum(size for name, size in read.items() if f"layers_{i}__" in name) for i in range(FEW)]
    assert len(set(sizes)) == 1 and sizes[0] > 0
    return sum(read.values()) + (layers - FEW) * sizes[0]


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        ("short chain", 1.07, 1.09),
        ("int4 short chain", 1.05, 1.06),
        pytest.param("chain", 1.17, 1.19, marks=slow),
        pytest.param("int4 chain", 1.10, 1.13, marks=slow),
        pytest.param("float chain", 1.35, 1.37, marks=slow),
    ],
)
def test_bytes_of_a_chain_relative_to_a_plain_step(shape: str, least: float, most: float) -> None:
    """Batch 1, 32 layers: draft weights in int8 (the default), int4 and bfloat16. No matrix is dequantised to memory:
    the smallest would take 33.6 MB."""
    chain, plain = step("h200", shape, 1, FEW), step("h200", "plain", 1, FEW)
    assert weight_bytes(plain) == pytest.approx(15.01e9, rel=1e-3)
    print(f"{shape}: {weight_bytes(chain) / weight_bytes(plain):.4f} of a plain step's {weight_bytes(plain)} bytes")
    assert least < weight_bytes(chain) / weight_bytes(plain) < most
    assert chain["temp_bytes"] < 2 * 4096 * 4096


def test_the_default_implementation_is_the_same_program(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["specjax_kernels.attention"], "default_implementation", lambda: "pallas")
    named, default = (step("h200", "plain", 1, FEW, backend) for backend in ("pallas", None))
    check(default)
    for key in ("kernels", "kernels_every_call", "kinds", "temp_bytes"):
        assert default[key] == named[key], key


def test_concurrent_nodes_cost_little_memory() -> None:
    """Concurrent kernels cannot share buffers; these have the size of activations, not of weights or pages."""
    concurrent, serial = step("h200", "plain", 1, FEW), step("h200", "plain", 1, FEW, left_out=SCHEDULING)
    print(f"temporaries {serial['temp_bytes'] / 1e6:.2f} -> {concurrent['temp_bytes'] / 1e6:.2f} MB")
    assert concurrent["options"].keys() - serial["options"].keys() == {SCHEDULING}
    assert concurrent["one_graph"] and serial["one_graph"]
    assert concurrent["kernels_every_call"] == serial["kernels_every_call"]
    assert concurrent["temp_bytes"] - serial["temp_bytes"] < 2**23


@pytest.mark.parametrize(
    ("device", "shape", "batch"),
    [("b200", "plain", 1),
     *(pytest.param(device, *case, marks=slow) for device in GPUS[1:] for case in (("plain", 8), ("tree", 1)))],
)  # fmt: skip
def test_steps_on_other_gpus(device: str, shape: str, batch: int) -> None:
    check(step(device, shape, batch, FEW))


@pytest.mark.parametrize(
    ("dtype", "quantization", "batch"),
    [
        ("float16", "none", 1),
        ("bfloat16", "none", 8),
        ("float16", "int8", 1),
        ("float16", "int4", 8),
        *(pytest.param(*case, marks=slow) for case in (("bfloat16", "none", 1), ("float16", "int8", 8))),
    ],
)
def test_a_t4_widens_no_matrix(monkeypatch, dtype: str, quantization: str, batch: int) -> None:
    """XLA multiplies no codes and no bfloat16 there. The largest temporary is a part of a matrix (`WIDENED` weights in
    float32) or the pages of one layer, not those of all layers."""
    from gpu_compile import STRAIGHT, Shapes, compiled, programs
    from model_shapes import llama_8b, target_shapes
    from specjax_kernels.linear import WIDENED
    from specjax_kernels.xla import GPU_TOKENS

    from specjax import PoolShape

    monkeypatch.setattr(sys.modules["specjax_kernels.linear"], "before_ampere", lambda: True)
    config, context = dataclasses.replace(llama_8b(FEW), dtype=dtype), 4096
    shapes = Shapes(FEW, 1, 1, 2, batch, 16, context, PoolShape(PAGES, 16), "xla")
    verify = functools.partial(STRAIGHT.func, straight=False)
    program = programs(shapes, gpu("t4").place, algorithm="NONE", verify=verify, config=config)["step"]
    params, *others = program.arguments
    params = params._replace(target=gpu("t4").place(target_shapes(config, quantization)))
    record = compiled(program._replace(arguments=(params, *others)), dict(NVIDIA_OPTIONS), weights=False)
    pages = min(batch * context, GPU_TOKENS) * 2 * config.num_kv_heads * config.head_dim * 4
    print(f"{dtype}, {quantization}, batch {batch}: {record['temp_bytes'] / 1e6:.1f} MB of temporaries, of which pages "
          f"{pages / 1e6:.1f}")  # fmt: skip
    assert record["all_state_aliased"] and record["one_graph"], record["outside_graphs"]
    assert record["temp_bytes"] < 4 * WIDENED * 1.5 + pages


TEMPORARIES = [
    ("llama_8b", "plain", 64, None, FEW), ("llama_8b", "short tree", 8, None, FEW),
    ("llama_8b", "plain", 1, (1, 2048), FEW), ("qwen3_5_27b", "plain", 1, (1, 2048), 4),
    *(pytest.param(*case, marks=slow) for case in (
        ("llama_8b", "chain", 32, None, FEW), ("llama_8b", "tree", 8, (1, 2048), 16),
        ("llama_8b", "tree", 8, (8, 256), FEW), ("qwen3_8b", "plain", 1, (1, 2048), FEW),
        ("qwen3_8b", "plain", 64, None, FEW), ("qwen3_5_27b", "short tree", 8, None, 4),
        ("qwen3_5_27b", "plain", 1, (8, 256), 8),
        ("qwen3_30b", "plain", 1, (1, 2048), 2), ("llama_8b", "tree", 8, (1, 2048), ALL),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("model", "shape", "batch", "prefill", "layers"), TEMPORARIES)
def test_estimated_temporaries(
    model: str, shape: str, batch: int, prefill: tuple[int, int] | None, layers: int
) -> None:
    """At most 10% more than the compiled program holds, and never less."""
    import model_shapes
    from gpu_compile import Shapes, compiled, programs

    from specjax import PoolShape, make_target
    from specjax.engine.memory import Devices, temporary_bytes, temporary_terms
    from specjax.engine.plan import Buckets

    algorithm, tree = TREES[shape]
    config = getattr(model_shapes, model)(layers)
    shapes = Shapes(layers, *tree, batch, 16, 8192, PoolShape(PAGES, 16), "pallas")
    chosen = programs(shapes, gpu("h200").place, algorithm=algorithm, config=config, prefill=prefill)
    record = compiled(chosen["step" if prefill is None else "prefill"], dict(NVIDIA_OPTIONS), weights=False)
    features = None if algorithm == "NONE" else model_shapes.eagle3_head(config).aux_layers
    width = 1 if algorithm == "NONE" else tree[2]
    # Buckets with this program alone; the other kind is small.
    buckets = Buckets(
        (1,) if prefill else (batch,), (prefill[1],) if prefill else (1,), 1, prefill and (*prefill, 0), (512,),
        {1 if prefill else batch: 1 if prefill else width}, {}, {},
    )  # fmt: skip
    estimate = temporary_bytes(temporary_terms(make_target(config), features, buckets, Devices("gpu")))
    print(f"{model}, {layers} layers, {shape}, batch {batch}, prefill {prefill}: {record['temp_bytes'] / 1e6:.1f} MB, "
          f"estimate {estimate / 1e6:.1f}")  # fmt: skip
    assert record["temp_bytes"] <= estimate <= 1.1 * record["temp_bytes"]


@pytest.mark.parametrize(("tree", "most"), [((3, 1, 4), 38), ((3, 3, 8), 41)])
def test_a_delta_net_reads_its_weights_once(tree: tuple[int, int, int], most: int) -> None:
    """The step is one graph; a further delta net reads at most 1.1 times its weights and its state, and copies none."""
    import model_shapes
    from gpu_compile import Shapes, compiled, programs

    from specjax import PoolShape

    records, weights = [], []
    for layers in (4, 5):  # layer 3 has attention
        config = model_shapes.qwen3_5_27b(layers)
        shapes = Shapes(layers, *tree, 1, 64, 4096, PoolShape(256, 64), "pallas")
        chosen = programs(shapes, gpu("h200").place, algorithm="EAGLE3", config=config)
        record = compiled(chosen["step"], dict(NVIDIA_OPTIONS))
        assert record["one_graph"] and record["host_decides"] == [] and record["all_state_aliased"]
        assert record["temp_bytes"] < 64e6, "a matrix of a layer has 105 MB"
        records.append(record)
        weights.append(model_shapes.nbytes(model_shapes.target_shapes(config)))
    few, more = records
    layer = weights[1] - weights[0] + 48 * 128 * 128 * 4
    read = sum(more["weights_read"].values()) - sum(few["weights_read"].values())
    other = more["temp_bytes"] - few["temp_bytes"]  # written and read
    kernels = more["kernels_every_call"] - few["kernels_every_call"]
    print(f"{tree}: {kernels} kernels, {read / 1e6:.1f} MB of weights, {other / 1e6:.1f} MB besides, {layer / 1e6:.1f}")
    assert read + 2 * other + 48 * 128 * 128 * 4 <= 1.1 * layer
    assert kernels <= most


@pytest.mark.parametrize("tree", [(3, 3, 8), pytest.param((7, 1, 8), marks=slow)])
def test_an_assistant_reads_the_targets_pages_in_one_graph(tree: tuple[int, int, int]) -> None:
    """E4B's shapes, a layer of each kind, with keys of its own or shared; no copy of pages or of the output matrix."""
    from gpu_compile import Shapes, compiled, programs
    from model_shapes import gemma4_e4b

    from specjax import PoolShape

    shapes = Shapes(4, *tree, 1, PAGE_SIZE, 8192, PoolShape(PAGES, PAGE_SIZE), "pallas")
    chosen = programs(shapes, gpu("h200").place, algorithm="ASSISTANT", config=gemma4_e4b("sf", "sf"))
    record = compiled(chosen["step"], dict(NVIDIA_OPTIONS))
    print(f"{tree}: {record['kernels_every_call']} kernels, {record['temp_bytes'] / 1e6:.1f} MB of temporaries")
    check(record, pool=PAGES * PAGE_SIZE * 2 * (256 + 512) * 2 * 2)  # keys and values of two layers in bfloat16
    assert record["temp_bytes"] < 128e6, "the pages of a layer with a window have 537 MB, the output matrix 134"


def test_log_probabilities_do_not_sort_the_vocabulary() -> None:
    from ptx import described_device

    from specjax.logprobs import LOGPROB_IDS, path_logprobs

    vocab, (rows, levels, nodes) = 128256, (2, 3, 4)
    shape = jax.ShapeDtypeStruct
    path, ids = shape((rows, levels), "int32"), shape((rows, LOGPROB_IDS), "int32")
    arguments = gpu("h200").place((shape((rows, nodes, vocab), "float32"), path, path, shape((), "bool"), ids))
    with described_device(arguments):
        lowered = jax.jit(path_logprobs).trace(*arguments).lower()
    text = lowered.compile().as_text()
    assert " sort(" not in text and text.count("__gpu$TopK") == 2


# Drafts


@functools.cache
def draft(tree: tuple[int, int, int], batch: int, nodes: int | None = None) -> int:
    """Kernels of a step's drafts without their scores."""
    from gpu_compile import Program, Shapes, compiled, programs

    from specjax import PoolShape

    shapes = Shapes(FEW, *tree, batch, PAGE_SIZE, 8192, PoolShape(PAGES, PAGE_SIZE), "pallas")
    whole = programs(shapes, gpu("h200").place, algorithm="EAGLE3", nodes=nodes)["draft"]

    def without_scores(*arguments):
        tree, _ = whole.jitted(*arguments)
        return tree.tokens, tree.parents, tree.depth, tree.valid

    record = compiled(Program(jax.jit(without_scores), whole.arguments, None), dict(NVIDIA_OPTIONS))
    assert record["one_graph"] and not record["copies_every_call"]
    return record["kernels_every_call"]


@pytest.mark.parametrize("batch", [1, 8])
def test_kernels_of_a_level(batch: int) -> None:
    level = draft((3, 1, 4), batch) - draft((2, 1, 3), batch)
    print(f"batch {batch}: {level} kernels a level, {draft((3, 1, 4), batch)} for three")
    assert level <= LEVEL


def test_a_narrow_bucket_runs_fewer_levels() -> None:
    """A chain of 7 levels with 4 nodes runs 3 levels."""
    assert draft((7, 1, 8), 1, nodes=4) == draft((3, 1, 4), 1)
