"""Compiles a speculative step for a GPU that is not there: is it one CUDA graph, is the cache updated where it lies?

    python benchmarks/gpu_compile.py [--layers 32] [--batch 1] [--context 4096] [--backend xla] [--record]

Shapes are Llama-3.1-8B's with an EAGLE-3 head's; no array is made. XLA compiles for the device that a text file
describes (`benchmarks/gpu/h200.txtpb`) and writes down what it would launch: the thunk sequence, which this reads. A
command buffer is a CUDA graph; a loop or a branch outside of one is decided by the host, which waits for the device.

Counted here: graphs, kernels, bytes. Nothing is timed, and such a build must not be: its products are not autotuned, so
on the device some kernels are others (and a split product is two). That a driver takes such a graph, loops and
branches nested in it, only a device can show.

Needs the GPU compiler of the very version of jax, about 180 MB, without a driver or CUDA:

    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax: what is compiled for is described, not found

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from records import finish, machine

from specjax import ModelConfig, Params, PoolShape, RopeConfig, StepInput, init_state, make_drafter, make_target
from specjax.config import HeadConfig
from specjax.drafters.shape import pool_size
from specjax.models import FAMILIES
from specjax.models.eagle_head import init_head_params
from specjax.step import StepConfig, check_phase, commit_phase, draft_phase, ladder, speculate_step

SPEC = Path(__file__).parent / "gpu" / "h200.txtpb"
WHEELS = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
ROPE = RopeConfig(theta=500000.0, scaling="llama3", factor=8.0)
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
"""What XLA puts into CUDA graphs by default. A compiler option must name all of it; only XLA_FLAGS knows `+WHILE`."""

OPTIONS: dict[str, dict[str, str]] = {
    "default": {},
    "loops": {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE"},
}


def need_compiler() -> None:
    """Ends the program where the wheels are missing, or are for another jax."""
    found = {}
    for name in WHEELS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if set(found.values()) != {jax.__version__}:
        told = ", ".join(f"{name} is {what}" for name, what in found.items())
        wanted = " ".join(f"{name}=={jax.__version__}" for name in WHEELS)
        sys.exit(f"This needs the GPU compiler of jax {jax.__version__}; {told}. Into an environment of its own:\n"
                 f"    pip install --no-deps {wanted}")  # fmt: skip


class Shapes(NamedTuple):
    """Everything that is not an array's content."""

    layers: int
    steps: int
    topk: int
    draft_tokens: int
    batch: int
    page_size: int
    context: int
    pool: PoolShape
    backend: str


class Program(NamedTuple):
    jitted: Any
    arguments: tuple[Any, ...]
    state: Any  # what is donated, None: nothing


def llama_8b(layers: int) -> ModelConfig:
    return ModelConfig(
        "llama", 128256, 4096, 14336, layers, 32, 8, 128, 1e-5, ROPE, 131072, tied_embeddings=False, dtype="bfloat16"
    )


def eagle3_head(target: ModelConfig) -> HeadConfig:
    last = target.num_layers - 1
    taps = (min(1, last), max(target.num_layers // 2 - 1, 0), max(last - 3, 0))
    return HeadConfig(
        "eagle3", 4096, 3 * 4096, 14336, 32, 8, 128, 1e-5, ROPE, 32000, taps=taps, own_head=True, mapped=True,
        dtype="bfloat16",
    )  # fmt: skip


def programs(shapes: Shapes, place: Callable[[Any], Any], *, algorithm: str, with_ladder: bool) -> dict[str, Program]:
    """The step and its phases, as jitted functions and the shapes they are called with."""
    config = llama_8b(shapes.layers)
    target, head = make_target(config, backend=shapes.backend), eagle3_head(config)
    if algorithm == "NONE":
        drafter = make_drafter("NONE")
    else:
        tree = {"num_steps": shapes.steps, "eagle_topk": shapes.topk, "num_draft_tokens": shapes.draft_tokens}
        drafter = make_drafter(algorithm, tree, target=target, head=head, backend=shapes.backend)

    def init(key: jax.Array) -> Params:
        weights = FAMILIES["llama"].init_params(config, key)
        return Params(weights, None if algorithm == "NONE" else init_head_params(head, target, key))

    key = jax.eval_shape(lambda: jax.random.key(0))
    params = place(jax.eval_shape(init, key))
    begin = partial(init_state, target=target, drafter=drafter, rows=shapes.batch, pool=shapes.pool)
    state = place(jax.eval_shape(begin, params))
    table = -(-shapes.context // shapes.page_size)
    fields = (((), jnp.int32), ((table,), jnp.int32), ((), jnp.bool_))
    inputs = place(StepInput(*(jax.ShapeDtypeStruct((shapes.batch, *shape), kind) for shape, kind in fields)))

    step = StepConfig(ladder(drafter) if with_ladder else (drafter.width,))
    whole = partial(speculate_step, target=target, drafter=drafter, config=step)
    draft = partial(draft_phase, drafter=drafter, config=step)
    check = partial(check_phase, target=target, drafter=drafter, config=step)
    commit = partial(commit_phase, drafter=drafter, config=step)
    tree, _ = place(jax.eval_shape(draft, params, state, inputs))
    checked = place(jax.eval_shape(check, params, state, inputs, tree))
    return {
        "step": Program(jax.jit(whole, donate_argnums=1), (params, state, inputs), state),
        "draft": Program(jax.jit(draft, donate_argnums=1), (params, state, inputs), state),
        "check": Program(jax.jit(check), (params, state, inputs, tree), None),
        "commit": Program(jax.jit(commit, donate_argnums=1), (params, state, inputs, tree, checked), state),
    }


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# What XLA writes down.

CONTROL = ("kCommandBuffer", "kConditional", "kWhile")
COPIES = ("kCopy", "kMemzero", "kMemset32BitValue", "kDeviceToDeviceCopy")


@dataclass
class Thunk:
    kind: str
    number: int
    above: tuple[str, ...]  # kinds of the thunks it is part of, outermost first

    @property
    def in_graph(self) -> bool:
        return "kCommandBuffer" in (*self.above, self.kind)

    @property
    def always(self) -> bool:
        """Whether every call runs it, exactly once."""
        return "kConditional" not in self.above and "kWhile" not in self.above


def read_thunks(text: str) -> list[Thunk]:
    """The thunk sequence: `<indentation><number>: <kind> ...`; what belongs to another is indented deeper."""
    thunks, stack = [], []
    for found in re.finditer(r"^( *)(?:\w+:)?( *)(\d+): (k\w+)", text, re.MULTILINE):
        depth = len(found[1]) + len(found[2])
        while stack and stack[-1][0] >= depth:
            stack.pop()
        thunks.append(Thunk(found[4], int(found[3]), tuple(kind for _, kind in stack)))
        stack.append((depth, found[4]))
    return thunks


class Places:
    """From a thunk's number to the line of ours that it comes from, by the tables at the head of an HLO text."""

    def __init__(self, metadata: str, hlo: str) -> None:
        pairs = re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', metadata)
        self._names = {int(number): name for name, number in pairs}
        self._hlo = hlo
        self._files = self._table("FileNames", r'"(.*)"')
        self._functions = self._table("FunctionNames", r'"(.*)"')
        self._locations = self._table("FileLocations", r"\{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
        self._frames = self._table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

    def _table(self, title: str, row: str) -> dict[int, Any]:
        part = re.search(rf"^{title}\n((?:\d+ .*\n)*)", self._hlo, re.MULTILINE)
        found = re.findall(rf"^(\d+) {row}", part[1] if part else "", re.MULTILINE)
        return {int(number): rest[0] if len(rest) == 1 else rest for number, *rest in found}

    def of(self, thunk: Thunk) -> dict[str, Any]:
        """The innermost line in specjax or its kernels, and the number of trips if it is a loop with a known one."""
        name = self._names.get(thunk.number, "")
        line = re.search(rf"^ *(?:ROOT )?%?{re.escape(name)} = .*$", self._hlo, re.MULTILINE)
        if not name or line is None:
            return {}
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line[0])
        found: dict[str, Any] = {"trips": int(trips[1])} if trips else {}
        frame = re.search(r"stack_frame_id=(\d+)", line[0])
        number = int(frame[1]) if frame else 0
        while number in self._frames:
            location, parent = self._frames[number]
            file, function, at = self._locations[int(location)]
            path = Path(self._files[int(file)])
            package = next((part for part in ("specjax_kernels", "specjax") if part in path.parts), None)
            if package:
                inside = path.parts[path.parts.index(package) :]
                return found | {"place": f"{'/'.join(inside)}:{at} {self._functions[int(function)]}"}
            number = int(parent or 0) - 1  # the text counts parents from 1, 1 being none
        return found


def compiled(program: Program, options: dict[str, str]) -> dict[str, Any]:
    """Compiles one program and reads what came of it."""
    with tempfile.TemporaryDirectory(prefix="specjax-gpu-") as folder:
        start = time.perf_counter()
        lowered = program.jitted.trace(*program.arguments).lower()
        executable = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **options})
        seconds = time.perf_counter() - start

        def read(ending: str) -> str:
            (file,) = Path(folder).glob(f"*{ending}")
            return file.read_text()

        thunks = read_thunks(read(".thunk_sequence_after_thunk_passes.txt"))
        places = Places(read(".thunk_metadata.txt"), read("gpu_after_optimizations.txt"))
    memory = executable.memory_analysis()
    work = [thunk for thunk in thunks if thunk.kind not in CONTROL]
    kernels = [thunk for thunk in work if thunk.kind not in COPIES]
    outside = [thunk for thunk in thunks if not thunk.in_graph]
    decisions = [thunk for thunk in thunks if thunk.kind in ("kConditional", "kWhile")]

    def described(thunk: Thunk) -> dict[str, Any]:
        within = sum(kind in ("kConditional", "kWhile") for kind in thunk.above)
        return {"kind": thunk.kind[1:], "within": within, **places.of(thunk)}

    record: dict[str, Any] = {
        "options": options,
        "graphs": sum(thunk.kind == "kCommandBuffer" for thunk in thunks),
        "one_graph": [thunk.kind for thunk in thunks if not thunk.above] == ["kCommandBuffer"],
        "kernels": len(kernels),
        "kernels_every_call": sum(thunk.always for thunk in kernels),
        "copies": len(work) - len(kernels),
        "copies_every_call": sum(thunk.always for thunk in work) - sum(thunk.always for thunk in kernels),
        "outside_graphs": dict(Counter(thunk.kind for thunk in outside)),
        "kinds": dict(Counter(thunk.kind for thunk in thunks)),
        # The host reads a branch's condition back, and a loop's before each trip unless it knows their number.
        "host_decides": [described(thunk) for thunk in decisions if not thunk.in_graph],
        "device_decides": [described(thunk) for thunk in decisions if thunk.in_graph],
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


def least_bytes(shapes: Shapes) -> dict[str, float]:
    """Weights that a step must read, each once a forward: what bounds it however few kernels there are."""
    m, i, w, v = 4096, 14336, 32000, 128256
    attention, mlp = (32 + 2 * 8) * 128, 3 * i
    target = shapes.layers * (m * (attention + mlp) + 32 * 128 * m) + m * v
    layer = 2 * m * attention + 32 * 128 * m + m * mlp
    head = shapes.steps * (layer + m * w) + 3 * m * m  # levels 2 .. D and the observed tokens; D times the vocabulary
    return {"target_bytes": 2 * target, "head_bytes": 2 * head}


def bandwidth_of(spec: str) -> float | None:
    found = re.search(r"memory_bandwidth: (\d+)", spec)
    return float(found[1]) if found else None


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
    parser.add_argument("--backend", default="xla", help="attention implementation (default: xla)")
    parser.add_argument("--gpu-spec", type=Path, default=SPEC, help="a GpuTargetConfigProto as text")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/gpu-compile-<date>.json")
    arguments = parser.parse_args()
    if arguments.layers < 4 or arguments.steps < 2:
        parser.error("at least 4 layers and 2 steps: what each further one costs is found by leaving some out")
    need_compiler()

    spec = arguments.gpu_spec.read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=spec, topology="1x1x1")
    here = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())

    def place(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), tree)

    table = -(-arguments.context // arguments.page_size)
    shapes = Shapes(
        arguments.layers, arguments.steps, arguments.topk, arguments.draft_tokens, arguments.batch,
        arguments.page_size, arguments.context,
        PoolShape(arguments.pages or 4 * table * arguments.batch, arguments.page_size), arguments.backend,
    )  # fmt: skip
    wanted = machine("jaxlib", *WHEELS)
    wanted |= {"compiled_for": topology.devices[0].device_kind, "gpu_spec": spec.strip().splitlines()}
    floor: dict[str, Any] = dict(least_bytes(shapes))
    if bandwidth := bandwidth_of(spec):
        floor["milliseconds_to_read_them"] = round(1e3 * sum(floor.values()) / bandwidth, 2)
    document = wanted | {
        "shapes": shapes._replace(pool=shapes.pool._asdict())._asdict(),
        "taps": eagle3_head(llama_8b(shapes.layers)).taps,
        "least": floor,
        "aim": {"graphs": 1, "kernels_per_layer": 12},
        "results": {},
    }
    print(f"{document['compiled_for']}, jax {jax.__version__}, {shapes}")
    print(f"weights that a step reads, each once a forward: {floor}")

    def run(
        name: str, phase: str, options: str = "default", *, algorithm: str = "EAGLE3", with_ladder: bool = False,
        **changes: Any,
    ) -> dict[str, Any]:  # fmt: skip
        chosen = programs(shapes._replace(**changes), place, algorithm=algorithm, with_ladder=with_ladder)
        record = compiled(chosen[phase], OPTIONS[options])
        document["results"][name] = {"algorithm": algorithm, "ladder": with_ladder, **changes, **record}
        show(name, record)
        return record

    run("step", "step", "loops")
    by_phase = {phase: run(f"{phase} phase", phase, "loops") for phase in ("draft", "check", "commit")}
    run("plain step", "step", "loops", algorithm="NONE")
    # How it grows: one level and two layers fewer.
    small = min(shapes.draft_tokens, pool_size(shapes.steps - 1, shapes.topk) + 1)
    flatter = run("draft phase, a level fewer", "draft", "loops", steps=shapes.steps - 1, draft_tokens=small)
    lower = run("check phase, two layers fewer", "check", "loops", layers=shapes.layers - 2)
    grows = {
        "draft_level": by_phase["draft"]["kernels_every_call"] - flatter["kernels_every_call"],
        "target_layer": (by_phase["check"]["kernels_every_call"] - lower["kernels_every_call"]) / 2,
    }
    document["kernels_for_each_further"] = grows
    print(f"kernels for each further: {grows}")
    # What breaks it up.
    run("step, XLA's defaults", "step")
    run("step, XLA's defaults, ladder", "step", with_ladder=True)
    run("step, ladder", "step", "loops", with_ladder=True)
    run("plain step, XLA's defaults", "step", algorithm="NONE")
    run("draft phase, XLA's defaults", "draft")
    other = "xla" if shapes.backend != "xla" else "reference"
    run(f"step, {other}, XLA's defaults", "step", backend=other)
    run(f"step, {other}", "step", "loops", backend=other)
    run(f"draft phase, {other}, XLA's defaults", "draft", backend=other)
    finish("gpu-compile", document, record=arguments.record)


if __name__ == "__main__":
    main()
