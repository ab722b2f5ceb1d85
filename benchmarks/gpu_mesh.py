"""Cross-compiles steps of tensor parallelism (no GPU required) and counts their collective operations.

    python benchmarks/gpu_mesh.py [--devices 2 4 8] [--steps plain verification experts] [--gpu h200] [--record [LABEL]]

Shapes are Llama-3.1-8B's with few layers and an EAGLE-3 head in int8, and Qwen3-30B-A3B's with experts over 2 and 4
devices; no array is allocated. Needs the compiler that `make gpu-compile` installs, like `gpu_compile.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: the devices are described, not present

import jax
from gpu_compile import Program, Shapes, programs
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from model_shapes import eagle3_head, llama_8b, qwen3_30b
from ptx import GPUS, WHEELS, missing
from records import finish, machine
from specjax_kernels import Quantised
from specjax_kernels.mesh import AXIS

from specjax import Params, PoolShape, make_target
from specjax.cache import PageSpec
from specjax.config import ModelConfig
from specjax.gpu import NVIDIA_OPTIONS
from specjax.models import table
from specjax.models.blocks import key_value_spec
from specjax.models.head_spec import head_table
from specjax.models.params import Leaf, Table, map_leaves
from specjax.parallel.sharding import everywhere, fitted, group_count, local_bytes, place_of, places_of, split_quantised
from specjax.state import DecodeState
from specjax.verify import Verifier, verify_tree

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
STEPS = {
    "plain": (llama_8b, "NONE", "step"),
    "verification": (llama_8b, "EAGLE3", "verify"),
    "experts": (qwen3_30b, "NONE", "step"),
}
"""Name -> model, algorithm, and the part of `gpu_compile.programs`. A verification is the target's forward over a chain
of eight, the choice of tokens, and the writes to pages; experts: a plain step of a mixture."""
SPREADS = {2: (2,), 4: (2, 4)}
"""Number of devices -> numbers of groups that share experts."""


def described_mesh(name: str, count: int, groups: int = 1) -> Mesh:
    """A mesh of `count` GPUs of one host in `groups` groups. `name`: their description in `benchmarks/gpu/`."""
    text = (GPUS / f"{name}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x1x{count}")
    return topologies.make_mesh(topology, (groups, count // groups), AXIS)


def placed(mesh: Mesh, tree: Any, config: ModelConfig) -> Any:
    """Shapes on the mesh, as an engine places their arrays (`specjax.parallel.sharding`)."""
    if isinstance(tree, Params):
        draft = None if tree.draft is None else _weights(mesh, tree.draft, head_table(eagle3_head(config)))
        return Params(_weights(mesh, tree.target, table(config)), draft)
    shapes = jax.tree.map(lambda x: _struct(x, everywhere(mesh)), tree)
    if isinstance(tree, DecodeState):
        shapes = shapes._replace(cache=_pages(mesh, tree.cache, make_target(config).pages))
        if hasattr(tree.draft, "cache"):
            pages = _pages(mesh, tree.draft.cache, key_value_spec(eagle3_head(config)))
            shapes = shapes._replace(draft=shapes.draft._replace(cache=pages))
    return shapes


def _struct(x: Any, where: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _weights(mesh: Mesh, shapes: Any, declared: Table) -> Any:
    def place(leaf: Leaf, x: Any) -> Any:
        if not isinstance(x, Quantised):
            return _struct(x, place_of(mesh, leaf.axes, x.shape))
        parts = split_quantised(x, leaf, mesh.size, group_count(mesh))
        assert parts is not None, f"{leaf.name} cannot be split over {mesh.size} devices"
        return jax.tree.map(_struct, parts, places_of(mesh, parts, leaf))

    return jax.tree.map(place, map_leaves(declared, lambda leaf: leaf), shapes)


def _pages(mesh: Mesh, cache: Any, specs: Any) -> Any:
    def place(page: PageSpec, x: Any) -> Any:
        return _struct(x, place_of(mesh, page.page_axes, x.shape))

    return jax.tree.map(place, specs, cache, is_leaf=lambda leaf: isinstance(leaf, PageSpec))


def program(mesh: Mesh, step: str, layers: int, verify: Verifier = verify_tree) -> Program:
    """One of `STEPS` on the mesh, with the shapes of its arguments."""
    model, algorithm, part = STEPS[step]
    shapes = Shapes(layers, 7, 1, 8, 1, 64, 4096, PoolShape(256, 64), "pallas")
    config = fitted(model(layers), mesh.size, groups=group_count(mesh))
    whole = programs(shapes, lambda tree: placed(mesh, tree, config), algorithm=algorithm, verify=verify, config=config)
    phase = whole[part]
    where = jax.tree.map(lambda x: x.sharding, phase.state)
    jitted = jax.jit(phase.jitted.__wrapped__, donate_argnums=1, out_shardings=(where, everywhere(mesh)))
    return phase._replace(jitted=jitted)


def compiled(mesh: Mesh, program: Program) -> dict[str, Any]:
    """Collective operations, and bytes on each device."""
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        executable = program.jitted.trace(*program.arguments).lower().compile(compiler_options=dict(NVIDIA_OPTIONS))
    memory = executable.memory_analysis()
    kinds = re.findall(rf" = .* ({'|'.join(KINDS)})(?:-start)?\(", executable.as_text())
    return {
        "collectives": dict(Counter(kinds)),
        "state_bytes": local_bytes(program.state),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "weight_bytes": local_bytes(program.arguments[0]),
        "seconds_to_compile": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts what several GPUs would send each other in a step.")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", nargs="+", default=[*STEPS], choices=STEPS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--gpu", default="h200", choices=sorted(file.stem for file in GPUS.glob("*.txtpb")))
    record = "write benchmarks/results/gpu-mesh-<date>[-LABEL].json"
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL", help=record)
    arguments = parser.parse_args()
    if problem := missing():
        sys.exit(problem)
    document: dict[str, Any] = machine("jaxlib", *WHEELS)
    document |= {"compiled_for": arguments.gpu, "layers": arguments.layers, "results": []}
    cases = [
        (count, groups, step)
        for count in arguments.devices
        for step in arguments.steps
        for groups in (SPREADS.get(count, ()) if step == "experts" else (1,))
    ]
    for count, groups, step in cases:
        mesh = described_mesh(arguments.gpu, count, groups)
        row = {"devices": count, "groups": groups, "step": step}
        row |= compiled(mesh, program(mesh, step, arguments.layers))
        document["results"].append(row)
        print(row, flush=True)
    finish("gpu-mesh", document, record=arguments.record)


if __name__ == "__main__":
    main()
