"""Devices to cross-compile for (no GPU required), and counts of the Pallas kernel's instructions and registers.

`kernels_of` compiles a spec to PTX and machine code: tensor-core and asynchronous-copy instructions in the PTX, and, by
NVIDIA's assembler, registers and bytes spilled to local memory. `tests/kernels/test_gpu_compile.py` checks all specs.

Needs the GPU compiler of the installed version of jax and NVIDIA's assembler (`make gpu-compile` installs them into a
folder of their own), without a driver or CUDA:

    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION nvidia-cuda-nvcc-cu12
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: the device is described, not present

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from specjax_kernels import CAUSAL, mask_words, tree_attention
from specjax_kernels.specs import Spec

GPUS = Path(__file__).parent / "gpu"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


CUDA = "13" if _version("jax-cuda13-plugin") else "12"
WHEELS = (f"jax-cuda{CUDA}-plugin", f"jax-cuda{CUDA}-pjrt")
"""The GPU compiler: CUDA 13's where that is installed."""
ASSEMBLER = "nvidia-cuda-nvcc-cu12"


def missing() -> str | None:
    """The reason why nothing can be compiled; None: the GPU compiler of this jax is installed."""
    versions = {name: _version(name) or "not installed" for name in WHEELS}
    if set(versions.values()) == {jax.__version__}:
        return None
    installed = ", ".join(f"{name} is {version}" for name, version in versions.items())
    wanted = " ".join(f"{name}=={jax.__version__}" for name in WHEELS)
    return (
        f"This needs the GPU compiler of jax {jax.__version__}; {installed}. In an environment of its own:\n"
        f"    pip install --no-deps {wanted}"
    )


class Gpu(NamedTuple):
    """A device to compile for, by its description in `benchmarks/gpu/`."""

    name: str
    kind: str
    architecture: str  # as the assembler calls it
    sharding: NamedSharding  # of every argument

    @classmethod
    def named(cls, name: str) -> Gpu:
        return cls.described(GPUS / f"{name}.txtpb")

    @classmethod
    def described(cls, file: Path) -> Gpu:
        spec = file.read_text()
        topology = topologies.get_topology_desc(platform="cuda", target_config=spec, topology="1x1x1")
        here = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
        capability = re.search(r"cuda_compute_capability \{\s*major: (\d+)(?:\s*minor: (\d+))?", spec)
        assert capability is not None, f"{file} names no compute capability"
        accelerated = "a" if "ACCELERATED_FEATURES" in spec else ""
        number = f"sm_{capability[1]}{capability[2] or 0}{accelerated}"
        return cls(file.stem, topology.devices[0].device_kind, number, here)

    def place(self, tree: Any) -> Any:
        """Shapes that live on this device."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), tree)


def described_device(arguments: Any) -> AbstractContextManager[Any]:
    """Context for lowering: from jax 0.11 on Pallas needs the GPU of the arguments' shardings."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return nullcontext()
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def arguments_of(spec: Spec) -> tuple[Any, ...]:
    """Shapes of the spec's arguments."""
    dtype = jnp.dtype(spec.dtype)
    B, N, C, K, T = spec.B, spec.N, spec.C, spec.K, spec.T

    def struct(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    mask = CAUSAL if spec.mask == "causal" else struct(B, N, mask_words(C), dtype=jnp.uint32)
    values = (None, None)
    if not spec.latent:
        values = tuple(struct(*shape, K, spec.v_width, dtype=dtype) for shape in ((B, C), (spec.P, spec.S)))
    return (
        struct(B, N, spec.H, spec.E, dtype=dtype), struct(B, C, K, spec.E, dtype=dtype), values[0],
        struct(spec.P, spec.S, K, spec.E, dtype=dtype), values[1],
        struct(B, T), struct(B), struct(B, N), struct(B, C), mask,
    )  # fmt: skip


def assembler() -> Path | None:
    """NVIDIA's `ptxas`, from its wheel."""
    try:
        files = distribution(ASSEMBLER).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "ptxas"), None)


def assembled(ptx: str, architecture: str, ptxas: Path) -> dict[str, dict[str, int]]:
    """For each kernel of a PTX text: registers per thread, bytes spilled (stored and loaded), bytes of stack."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", "--gpu-name", architecture, file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    kernels = {}
    for name, text in re.findall(
        r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", done.stderr, re.DOTALL
    ):
        numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        registers = re.search(r"Used (\d+) registers", text)
        assert numbers and registers, f"unknown output for {name}:\n{done.stderr}"
        stack, stores, loads = map(int, numbers.groups())
        kernels[name] = {"registers": int(registers[1]), "spilled_bytes": stores + loads, "stack_bytes": stack}
    return kernels


def kernels_of(spec: Spec, gpu: Gpu, ptxas: Path | None) -> dict[str, dict[str, Any]]:
    """Kernels of one call of `tree_attention` on that GPU: name -> counts."""
    options: dict[str, Any] = {"scale": spec.E**-0.5, "window": spec.window, "softcap": spec.softcap}
    options |= {"v_width": spec.v_width} if spec.latent else {}
    sinks = {"sinks": jax.ShapeDtypeStruct((spec.H,), spec.dtype)} if spec.sinks else {}
    attend = functools.partial(tree_attention, **options, implementation="pallas")
    with tempfile.TemporaryDirectory(prefix="specjax-ptx-") as folder:
        shapes, sinks = gpu.place((arguments_of(spec), sinks))
        with described_device(shapes):
            lowered = jax.jit(attend).trace(*shapes, **sinks).lower()
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        texts = [file.read_text() for file in Path(folder).glob("*.ptx")]
    if not texts:
        raise RuntimeError(f"XLA of jax {jax.__version__} wrote no PTX; jax 0.10.2 does, 0.11.2 does not")
    kernels: dict[str, dict[str, Any]] = {}
    for text in texts:
        numbers = assembled(text, gpu.architecture, ptxas) if ptxas and ".entry" in text else {}
        for name, body in re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", text, re.DOTALL):
            kernels[name] = {
                "mma": len(re.findall(r"\bmma\.sync", body)),
                "wgmma": len(re.findall(r"\bwgmma\.mma_async", body)),
                "tcgen05": len(re.findall(r"\btcgen05\.mma", body)),
                "async_copies": len(re.findall(r"\bcp\.async\.c[ag]", body)),
                "local_memory": bool(re.search(r"\.local\b", body)),
            } | numbers.get(name, {})  # fmt: skip
    return kernels
