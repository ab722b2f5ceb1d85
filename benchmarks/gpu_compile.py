"""Cross-compiles a speculative step for a GPU (no GPU required): number of graphs and kernels, bytes, aliased state.

    python benchmarks/gpu_compile.py [--layers 32] [--batch 1] [--context 4096] [--backend pallas] [--record]
    python benchmarks/gpu_compile.py --start [--layers 32] [--record]
    python benchmarks/gpu_compile.py --block [--layers 4] [--gpu-spec benchmarks/gpu/h100_sxm.txtpb] [--record]
    python benchmarks/gpu_compile.py --assistant [--steps 3 --topk 3 --draft-tokens 8] [--record]

Shapes are Llama-3.1-8B's with an EAGLE-3 head's; no array is allocated. XLA compiles for the device described by
`benchmarks/gpu/h200.txtpb` and dumps its thunk sequence (`thunks.py`). A command buffer is a CUDA graph; the host
decides loops and branches outside of one, and waits for the device. Nothing is timed. Products are not autotuned, so
some kernels differ on a device.

`--start` compiles the first programs of an engine as it does itself, and gives their processor seconds. `--block`
compiles steps of Qwen3-8B's shape with a DFlash head of five layers, and gives the cost model's estimate for all 36
layers beside EAGLE-3's chain of 7. `--assistant` compiles a step of Gemma 4 E4B's shape with its assistant, and gives
the kernels of each kind of layer.

Needs the GPU compiler of the installed version of jax (see `ptx.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: the device is described, not present

import jax
import jax.numpy as jnp
from model_shapes import (
    assistant_head,
    block_head,
    eagle3_head,
    gemma4_e4b,
    head_shapes,
    least_bytes,
    llama_8b,
    nbytes,
    qwen3_8b,
)
from ptx import WHEELS, Gpu, described_device, missing
from records import finish, machine
from thunks import bytes_read, counts, dump_options, read_dump

from specjax import (
    Eagle3,
    EngineConfig,
    ModelConfig,
    Params,
    PoolShape,
    StepInput,
    init_state,
    make_speculation,
    make_target,
)
from specjax.costs import estimated_seconds
from specjax.drafters import options_of
from specjax.drafters.options import candidates
from specjax.engine.device import Resident, packed
from specjax.engine.memory import layout
from specjax.engine.programs import Programs
from specjax.gpu import DEVICES, NVIDIA_OPTIONS, named
from specjax.models import init_params
from specjax.state import PrefillInput
from specjax.step import (
    StepConfig,
    check_phase,
    commit_phase,
    draft_phase,
    prefill_step,
    speculate_step,
    verify_phase,
)
from specjax.tree import DraftTree
from specjax.verify import Verifier, verify_tree

SPEC = Path(__file__).parent / "gpu" / "h200.txtpb"
STRAIGHT = partial(verify_tree, straight=True)  # the verifier of a device with GPU kernels


class Shapes(NamedTuple):
    """Sizes of a step."""

    layers: int
    steps: int
    topk: int
    draft_tokens: int
    batch: int
    page_size: int
    context: int
    pool: PoolShape
    backend: str
    draft_quantization: str | None = None  # of the head's weights; None: the default on a GPU

    @property
    def head_weights(self) -> str:
        return Eagle3(quantization=self.draft_quantization).weights("the head", "bfloat16", "gpu", otherwise="none")


class Program(NamedTuple):
    jitted: Any
    arguments: tuple[Any, ...]
    state: Any  # the donated state; None: nothing is donated


def programs(
    shapes: Shapes, place: Callable[[Any], Any], *, algorithm: str, nodes: int | None = None,
    verify: Verifier = STRAIGHT, config: ModelConfig | None = None, prefill: tuple[int, int] | None = None,
) -> dict[str, Program]:  # fmt: skip
    """The step and its phases. `nodes`: most nodes of a tree; None: whole trees. `config`: the model; None:
    Llama-3.1-8B. `prefill`: prompts and tokens of each, of a prefill beside them; `batch` is at least the prompts."""
    config = llama_8b(shapes.layers) if config is None else config
    target = make_target(config, backend=shapes.backend)
    head = {"DFLASH": block_head, "ASSISTANT": assistant_head}.get(algorithm, eagle3_head)(config)
    if algorithm == "NONE":
        speculation = make_speculation("NONE")
    else:
        tree = options_of(algorithm, steps=shapes.steps, topk=shapes.topk, nodes=shapes.draft_tokens)
        speculation = make_speculation(tree, target=target, head=head, backend=shapes.backend)
    drafter = speculation.drafter

    weights = jax.eval_shape(partial(init_params, config), jax.eval_shape(lambda: jax.random.key(0)))
    drafts = None if algorithm == "NONE" else head_shapes(head, config, shapes.head_weights)
    params = place(Params(weights, drafts))
    begin = partial(init_state, target=target, drafter=drafter, rows=shapes.batch, pool=shapes.pool)
    state = place(jax.eval_shape(begin, params))
    table = -(-shapes.context // shapes.page_size)
    fields = (((), jnp.int32), ((table,), jnp.int32), ((), jnp.bool_))
    inputs = place(StepInput(*(jax.ShapeDtypeStruct((shapes.batch, *shape), kind) for shape, kind in fields)))

    if nodes is not None:
        drafter = speculation.within(nodes)
    step = StepConfig(nodes or drafter.width)
    whole = partial(speculate_step, target=target, drafter=drafter, verify=verify, config=step)
    draft = partial(draft_phase, drafter=drafter, config=step)
    check = partial(check_phase, target=target, drafter=drafter, verify=verify, config=step)
    commit = partial(commit_phase, drafter=drafter, config=step)
    verified = partial(verify_phase, target=target, drafter=drafter, verify=verify, config=step)
    numbers, most = (jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.float32), step.nodes
    tree = place(DraftTree(*(cast(Any, jax.ShapeDtypeStruct((shapes.batch, most), kind)) for kind in numbers)))
    with described_device((params,)):
        checked = place(jax.eval_shape(check, params, state, inputs, tree))
    chunk = {}
    if prefill is not None:
        first = partial(prefill_step, target=target, drafter=drafter, config=step)
        rows, width = prefill
        given = (((), jnp.int32), ((table,), jnp.int32), ((), jnp.bool_), ((width,), jnp.int32), *[((), jnp.int32)] * 2)
        prompts = place(PrefillInput(*(jax.ShapeDtypeStruct((rows, *shape), kind) for shape, kind in given)))
        chunk = {"prefill": Program(jax.jit(first, donate_argnums=1), (params, state, prompts), state)}
    return chunk | {
        "step": Program(jax.jit(whole, donate_argnums=1), (params, state, inputs), state),
        "draft": Program(jax.jit(draft, donate_argnums=1), (params, state, inputs), state),
        "verify": Program(jax.jit(verified, donate_argnums=1), (params, state, inputs, tree), state),
        "check": Program(jax.jit(check), (params, state, inputs, tree), None),
        "commit": Program(jax.jit(commit, donate_argnums=1), (params, state, inputs, tree, checked), state),
    }


def compiled(program: Program, options: dict[str, str], *, weights: bool = True) -> dict[str, Any]:
    """Counts and bytes of a compiled program. `weights`: also the weights that kernels read, except in branches."""
    with tempfile.TemporaryDirectory(prefix="specjax-gpu-") as folder:
        start = time.perf_counter()
        with described_device(program.arguments):
            lowered = program.jitted.trace(*program.arguments).lower()
        executable = lowered.compile(compiler_options=dump_options(folder) | options)
        seconds = time.perf_counter() - start
        dump = read_dump(folder)
    assert dump is not None, "the compiler wrote no thunk sequence"
    memory = executable.memory_analysis()
    record: dict[str, Any] = {"options": options} | counts(*dump)
    if weights:
        record["weights_read"] = bytes_read(executable.as_text())
        record["packed_input_read"] = sum(bytes_read(executable.as_text(), "packed").values())
    record |= {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "seconds_to_compile": round(seconds, 1),
    }
    if program.state is not None:
        record["state_bytes"] = nbytes(program.state)
        record["target_pool_bytes"] = nbytes(program.state.cache)
        record["draft_pool_bytes"] = nbytes(getattr(program.state.draft, "cache", ()))
        record["all_state_aliased"] = memory.alias_size_in_bytes >= record["state_bytes"]
    return record


def show(name: str, record: dict[str, Any]) -> None:
    print(
        f"{name:36} {record['graphs']:3} graphs{' (all in one)' if record['one_graph'] else '':13} "
        f"kernels {record['kernels_every_call']:5} every call, {record['kernels']:5} in all   "
        f"host decides {len(record['host_decides']):2}   "
        f"alias {record['alias_bytes'] / 1e6:8.1f} MB   temporary {record['temp_bytes'] / 1e6:7.1f} MB",
        flush=True,
    )


POOL_TOKENS = 400_000  # that an H100 holds beside Llama-3.1-8B and a head


def started(shapes: Shapes, place: Callable[[Any], Any], document: dict[str, Any]) -> None:
    """Processor seconds to trace and to compile what blocks readiness, then the first programs of the background."""
    config, settings = llama_8b(shapes.layers), EngineConfig()
    target, head, rows = make_target(config, backend=shapes.backend), eagle3_head(config), settings.max_running_requests
    speculation = make_speculation(Eagle3(), target=target, head=head, backend=shapes.backend, platform="gpu")
    drafter = speculation.drafter
    pool, buckets = layout(settings, config.max_positions, POOL_TOKENS, "gpu", speculation)
    weights = jax.eval_shape(partial(init_params, config), jax.eval_shape(lambda: jax.random.key(0)))
    params = Params(weights, head_shapes(head, config, shapes.head_weights))

    def empty(params: Params) -> Resident:
        tables = jnp.full((rows, buckets.tables[-1]), pool.pages, jnp.int32)
        return Resident(init_state(params, target, drafter, rows=rows, pool=pool), tables)

    state, new_pages = jax.eval_shape(empty, params), -(-2 * (drafter.depth + 1) // pool.page_size)
    sizes = {"table": buckets.tables[-1], "new_pages": new_pages}
    programs = Programs(target, speculation, params, state.decode, **sizes, verify=STRAIGHT)
    ready, keys = buckets.ready_keys(), buckets.all_keys()
    document |= {"programs": len(keys), "tree": speculation.note, "tables": buckets.tables, "results": []}
    for key in keys[:5]:
        function, unpack, shape = programs._function(key)

        def step(params: Any, state: Any, inputs: Any, *, function: Any = function, unpack: Any = unpack) -> Any:
            unpacked, tables = unpack(inputs, state.tables)
            decode, output = packed(function, params, state.decode, unpacked)
            return Resident(decode, tables), output

        arguments = place((params, state, jax.ShapeDtypeStruct(shape, jnp.int32)))
        times = [time.process_time()]
        with described_device(arguments):
            lowered = jax.jit(step, donate_argnums=1).trace(*arguments).lower()
        times.append(time.process_time())
        memory = lowered.compile(compiler_options=dict(NVIDIA_OPTIONS)).memory_analysis()
        trace, compilation = times[1] - times[0], time.process_time() - times[1]
        document["results"].append({
            "program": str(key), "blocks": key in ready, "temp_bytes": memory.temp_size_in_bytes,
            "trace_processor_seconds": round(trace, 1), "compile_processor_seconds": round(compilation, 1),
        })  # fmt: skip
        kind = "blocks" if key in ready else "background"
        print(f"{kind:10} {trace:5.1f} s to trace, {compilation:5.1f} s to compile: {key}", flush=True)
    seconds = [row["trace_processor_seconds"] + row["compile_processor_seconds"] for row in document["results"]]
    document["blocking_processor_seconds"] = round(sum(seconds[: len(ready)]), 1)
    print(f"{document['blocking_processor_seconds']} s block readiness; {len(keys)} programs in all")


def blocks(shapes: Shapes, place: Callable[[Any], Any], device: str, document: dict[str, Any]) -> None:
    """Counts of a block head's step by batch, and estimated milliseconds of a step of one request."""
    for batch in (1, 8, 32):
        several = shapes._replace(steps=15, topk=1, draft_tokens=16, batch=batch)
        step = programs(several, place, algorithm="DFLASH", config=qwen3_8b(shapes.layers))["step"]
        document[f"batch {batch}"] = record = compiled(step, dict(NVIDIA_OPTIONS))
        show(f"block of 16, batch {batch}", record)
    model = qwen3_8b(36)
    target, gpu = make_target(model), DEVICES[device]
    weights = jax.eval_shape(partial(init_params, model), jax.eval_shape(lambda: jax.random.key(0)))
    for algorithm, tree, head in (("DFLASH", (15, 1, 16), block_head), ("EAGLE3", (7, 1, 8), eagle3_head)):
        options = options_of(algorithm, **dict(zip(("steps", "topk", "nodes"), tree, strict=True)))
        speculation = make_speculation(options, target=target, head=head(model))
        params = Params(weights, head_shapes(head(model), model, shapes.head_weights))
        milliseconds = 1e3 * estimated_seconds(1, target, speculation, params, gpu)[0]
        document[f"estimated ms of {algorithm} {tree}"] = round(milliseconds, 2)
        print(f"{algorithm} {tree}, one request, {device}: {milliseconds:.2f} ms a step (estimated)")


KINDS = {"window": ("ssf", "sf"), "full": ("sff", "sf"), "shared window": ("sf", "ssf"), "shared full": ("sf", "sff")}
"""Kind of a layer of Gemma 4 -> layers, one of the kind more than "sf", "sf"; see `gemma4_e4b`."""


def assistants(shapes: Shapes, place: Callable[[Any], Any], document: dict[str, Any]) -> None:
    """Counts of the step of all layers and of its phases, and kernels of each kind of layer and of a level."""

    def run(name: str, phase: str, model: ModelConfig, **changes: Any) -> int:
        program = programs(shapes._replace(**changes), place, algorithm="ASSISTANT", config=model)[phase]
        document["results"][name] = record = compiled(program, dict(NVIDIA_OPTIONS))
        show(name, record)
        return record["kernels_every_call"]

    document["results"] = {}
    few = gemma4_e4b("sf", "sf")
    run("step", "step", gemma4_e4b())
    draft, check = (run(f"{phase} phase, 4 layers", phase, few) for phase in ("draft", "check"))
    tokens = min(shapes.draft_tokens, candidates(shapes.steps - 1, shapes.topk) + 1)
    lower = run("draft phase, a level fewer", "draft", few, steps=shapes.steps - 1, draft_tokens=tokens)
    kinds = {kind: run(f"check phase, {kind}", "check", gemma4_e4b(*layers)) for kind, layers in KINDS.items()}
    document["kernels_for_each_further"] = {kind: count - check for kind, count in kinds.items()} | {
        "draft_level": draft - lower
    }
    print(f"kernels for each further: {document['kernels_for_each_further']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles a speculative step for a GPU without having one.")
    parser.add_argument("--layers", type=int, default=32, help="of the target; fewer to be quick")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--draft-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096, help="tokens that a row's page table covers")
    parser.add_argument("--pages", type=int, help="of the pool (default: four times what the batch's tables hold)")
    parser.add_argument("--backend", default="pallas", help="attention implementation (default: pallas)")
    parser.add_argument(
        "--draft-quantization", choices=("int8", "int4", "none"), help="of the head's weights (default: the server's)"
    )
    parser.add_argument("--gpu-spec", type=Path, default=SPEC, help="a GpuTargetConfigProto as text")
    parser.add_argument("--start", action="store_true", help="time the first programs of an engine")
    parser.add_argument("--block", action="store_true", help="steps with a block head, for Qwen3-8B")
    parser.add_argument("--assistant", action="store_true", help="a step of Gemma 4 E4B with its assistant")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/gpu-compile-<date>.json")
    arguments = parser.parse_args()
    if arguments.layers < 4 or arguments.steps < 2:
        parser.error("--layers must be at least 4 and --steps at least 2: differences give the kernels of each")
    if problem := missing():
        sys.exit(problem)
    spec, gpu = arguments.gpu_spec.read_text(), Gpu.described(arguments.gpu_spec)

    table = -(-arguments.context // arguments.page_size)
    shapes = Shapes(
        arguments.layers, arguments.steps, arguments.topk, arguments.draft_tokens, arguments.batch,
        arguments.page_size, arguments.context,
        PoolShape(arguments.pages or 4 * table * arguments.batch, arguments.page_size), arguments.backend,
        arguments.draft_quantization,
    )  # fmt: skip
    document = machine("jaxlib", *WHEELS)
    document |= {"compiled_for": gpu.kind, "gpu_spec": spec.strip().splitlines()}
    if arguments.start:
        started(shapes, gpu.place, document)
        finish("gpu-start", document, record=arguments.record)
        return
    if arguments.block:
        kind = named(gpu.kind)
        assert kind is not None, gpu.kind
        blocks(shapes, gpu.place, kind.name, document)
        finish("gpu-block", document, record=arguments.record)
        return
    if arguments.assistant:
        document["shapes"] = shapes._replace(pool=shapes.pool._asdict())._asdict()
        assistants(shapes, gpu.place, document)
        finish("gpu-assistant", document, record=arguments.record)
        return
    model = llama_8b(shapes.layers)
    floor: dict[str, Any] = dict(least_bytes(model, eagle3_head(model), shapes.steps, quantization=shapes.head_weights))
    if bandwidth := re.search(r"memory_bandwidth: (\d+)", spec):
        floor["milliseconds_to_read_them"] = round(1e3 * sum(floor.values()) / float(bandwidth[1]), 2)
    document |= {
        "shapes": shapes._replace(pool=shapes.pool._asdict())._asdict(),
        "aux_layers": eagle3_head(model).aux_layers,
        "least": floor,
        "aim": {"graphs": 1, "kernels_per_layer": 12},
        "results": {},
    }
    print(f"{document['compiled_for']}, jax {jax.__version__}, {shapes}")
    print(f"weights that a step reads, each once a forward: {floor}")

    def run(name: str, phase: str, *, algorithm: str = "EAGLE3", **changes: Any) -> dict[str, Any]:
        chosen = programs(shapes._replace(**changes), gpu.place, algorithm=algorithm)
        record = compiled(chosen[phase], dict(NVIDIA_OPTIONS))
        document["results"][name] = {"algorithm": algorithm, **changes, **record}
        show(name, record)
        return record

    whole = run("step", "step")
    by_phase = {phase: run(f"{phase} phase", phase) for phase in ("draft", "check", "commit")}
    run("plain step", "step", algorithm="NONE")
    small = min(shapes.draft_tokens, candidates(shapes.steps - 1, shapes.topk) + 1)
    flatter = run("draft phase, a level fewer", "draft", steps=shapes.steps - 1, draft_tokens=small)
    lower = run("check phase, two layers fewer", "check", layers=shapes.layers - 2)
    shorter = run("step, two layers fewer", "step", layers=shapes.layers - 2)
    grows = {
        "draft_level": by_phase["draft"]["kernels_every_call"] - flatter["kernels_every_call"],
        "target_layer": (by_phase["check"]["kernels_every_call"] - lower["kernels_every_call"]) / 2,
        "target_layer_of_a_step": (whole["kernels_every_call"] - shorter["kernels_every_call"]) / 2,  # commit included
    }
    document["kernels_for_each_further"] = grows
    print(f"kernels for each further: {grows}")
    finish("gpu-compile", document, record=arguments.record)


if __name__ == "__main__":
    main()
