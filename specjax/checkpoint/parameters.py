"""Tensors of a checkpoint to the parameter tree, leaf by leaf: cast, quantised, and placed on one device or a mesh."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.hf_config import DTYPES
from specjax.checkpoint.quantised import Entries, QuantisedEntry, matrices
from specjax.checkpoint.quantised_matrix import (
    aligned_empty,
    fill_leaf,
    make_leaf,
    output_major_leaf,
    quantise_leaf,
)
from specjax.checkpoint.weights import ModelFiles, TensorEntry
from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.models import table
from specjax.models.mtp_spec import mtp_tensors
from specjax.models.params import (
    HEAD_TENSOR,
    Leaf,
    Placement,
    Scope,
    Sizes,
    Table,
    dimensions,
    is_product,
    output_major,
    placements,
)
from specjax.progress import progress_bar

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from specjax.parallel.sharding import Widened

T = TypeVar("T")
U = TypeVar("U")

LARGE_LEAF = 2**22  # bytes
LANES = 16  # a 16-bit matrix is stored output-major if its inputs are a multiple of this
HOST_DTYPES = {name: np.dtype(name) for name in DTYPES}
# Buffers that old versions of transformers saved.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
_QUANTISED_NAMES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.absmax")


class ArrayEntry(NamedTuple):
    """A tensor that is mapped already."""

    array: np.ndarray

    @property
    def size(self) -> int:
        return self.array.nbytes

    def read(self) -> np.ndarray:
        return self.array


Source = TensorEntry | QuantisedEntry | ArrayEntry


def load_params(
    files: ModelFiles,
    config: ModelConfig,
    *,
    quantization: str = "auto",
    progress: bool = True,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Read a model's weights. Beside the parameters, a few leaves at a time are in memory.

    Args:
      files: from ``resolve``.
      config: from ``model_config(files.config)``; parameters are cast to ``config.dtype``.
      quantization: auto: quantised matrices stay so, as ``specjax_kernels.Quantised``, and so do 16-bit matrices on a
        CPU with float32 activations; none: all matrices are of ``config.dtype``; fp8, int8 or int4: matrices of float
        weights are quantised (``specjax_kernels.quantise``); see ``effective_quantization``.
      progress: show a bar on stderr.
      mesh: devices that share the model. Each reads its part of the files, and the parameters are those of
        ``specjax.parallel.sharding.fitted(config, ...)``.

    Returns:
      The parameter tree that ``specjax.models.table(config)`` declares; without MTP layers, see ``load_mtp``.

    Raises:
      CheckpointError: a tensor is missing, left over, of the wrong shape or type, or a file is damaged.
    """
    tensors = matrices(files)
    declared, sizes = table(config), dimensions(config)
    mtp = mtp_tensors(tensors.keys(), config)
    shapes = {name: entry.shape for name, entry in tensors.items() if name not in mtp}
    optional = ({HEAD_TENSOR} if config.tied_embeddings else set()) | _zero_biases(tensors)
    if problems := misfits(shapes, placements(declared, sizes), f"a {config.family} model", optional):
        advice = "Use the config.json that was saved with these weights"
        if any(name.endswith(_QUANTISED_NAMES) for name in tensors):
            advice = "They look quantised, and config.json has no quantization_config that says how"
        raise CheckpointError(f"the weights in {files.folder} do not fit its config.json; {problems}. {advice}")
    return fill_parameters(
        files.name, declared, sizes, tensors, config, config.dtype, quantization, tied=config.tied_embeddings,
        mesh=mesh, progress=progress,
    )  # fmt: skip


def _zero_biases(tensors: Entries) -> set[str]:
    """Biases of zeros, which AutoGPTQ wrote for quantised matrices that have none."""
    return {
        name
        for name, entry in tensors.items()
        if name.endswith(".bias")
        and isinstance(tensors.get(f"{name.removesuffix('bias')}weight"), QuantisedEntry)
        and not np.any(entry.read())
    }


def misfits(
    shapes: Mapping[str, tuple[int, ...]], rules: Iterable[Placement], kind: str, optional: Set[str] = frozenset()
) -> str:
    """The differences between tensors of these shapes and the rules of a model of ``kind``; empty if they fit."""
    expected = {rule.tensor: rule.shape for rule in rules}
    extra = {name for name in shapes.keys() - expected.keys() - optional if not _IGNORED.fullmatch(name)}
    wrong = {name for name in shapes.keys() & expected.keys() if shapes[name] != expected[name]}
    problems = {
        "missing tensors": expected.keys() - shapes.keys(),
        f"tensors with no place in {kind}": {f"{name} {list(shapes[name])}" for name in extra},
        "wrong shapes": {f"{name} is {list(shapes[name])}, not {list(expected[name])}" for name in wrong},
    }
    return "; ".join(f"{problem}: {listed(names)}" for problem, names in problems.items() if names)


def fill_parameters(
    name: str, declared: Table, sizes: Sizes, tensors: Mapping[str, Source],
    config: ModelConfig | HeadConfig | MtpConfig, dtype: str, quantization: str, *, tied: bool = False,
    mesh: Mesh | None, progress: bool,
) -> dict[str, Any]:  # fmt: skip
    """The parameters of the model ``name``, without the leaves that no tensor fills. ``config`` decides how a mesh
    shares the model; ``tied``: the embedding is the output matrix, too; otherwise as `load_params`. Raises ValueError
    if heads or experts cannot be split."""
    import jax

    from specjax.parallel.sharding import local_bytes

    on_mesh = MeshPlacement.of(config, mesh)
    # Only the CPU's kernels widen 16-bit matrices as they read them.
    keeps_half = dtype == "float32" and jax.default_backend() == "cpu" and mesh is None
    itemsize = HOST_DTYPES[dtype].itemsize
    leaves = [
        (scope, leaf, list(placements((scope._replace(leaves=(leaf,)),), sizes)))
        for scope in declared
        for leaf in scope.leaves
        if leaf.tensors
    ]
    # Largest first: their temporary arrays are freed before the other leaves take memory.
    leaves.sort(key=lambda item: prod(item[1].shape(sizes)), reverse=True)

    def make(item: tuple[Scope, Leaf, list[Placement]]) -> tuple[Any, int]:
        scope, leaf, rules = item
        entries = [tensors[rule.tensor] for rule in rules]
        count, shape = sum(entry.size for entry in entries), leaf.shape(sizes)
        host = _quantised_leaf(entries, scope, leaf, sizes, rules, quantization, keeps_half, tied)
        if on_mesh is not None:
            if host is not None:
                return on_mesh.place_quantised(host, leaf, shape, dtype), count
            return on_mesh.place(leaf, shape, leaf.dtype or HOST_DTYPES[dtype], rules, tensors), count
        if host is None:
            host = fill_leaf(shape, leaf.dtype or HOST_DTYPES[dtype], rules, (entry.read() for entry in entries))
        return host, count

    total = sum(tensors[rule.tensor].size for _, _, rules in leaves for rule in rules)
    made_bytes = sum(rule.size * itemsize for _, _, rules in leaves for rule in rules)
    # Small leaves are mostly Python's work, in which threads block each other.
    parallel_map = ahead if made_bytes > len(leaves) * LARGE_LEAF else map
    params: dict[str, Any] = {}
    with progress_bar(f"Loading {name}", total, "B", shown=progress) as loaded:
        for (scope, leaf, _), (host, count) in zip(leaves, parallel_map(make, leaves), strict=True):
            group = params.setdefault(scope.name, {}) if scope.name else params
            # Blocking keeps transfers, and with them host buffers, from piling up.
            if on_mesh is None:
                host = jax.device_put(host)
            group[leaf.name] = jax.block_until_ready(host)
            loaded.update(count)
            del host
        held = tqdm.format_sizeof(local_bytes(params), "B", 1000)
        loaded.set_postfix_str(f"bytes read; {held} held" + " by each device" * (mesh is not None))
    if on_mesh is not None:
        on_mesh.widened.tell(name)
    return params


def _quantised_leaf(
    entries: Sequence[Source], scope: Scope, leaf: Leaf, sizes: Sizes, rules: Sequence[Placement], quantization: str,
    keeps_half: bool, tied: bool,
) -> Any | None:  # fmt: skip
    """The quantised or 16-bit leaf that `quantization` makes of these tensors; None: a leaf of the model's dtype."""
    if quantization == "none" or not is_product(leaf):
        return None
    if quantization != "auto":
        if leaf.name == "embed" and not tied:
            return None  # a token reads one row
        return quantise_leaf([np.asarray(entry.read()) for entry in entries], scope, leaf, sizes, quantization)
    quantised = [entry for entry in entries if isinstance(entry, QuantisedEntry)]
    if len(quantised) == len(entries):
        return make_leaf([entry.load() for entry in quantised], scope, leaf, sizes)
    if quantised or not keeps_half:  # dequantised matrices are float32, so others of the leaf are, too
        return None
    arrays = [entry.read() for entry in entries]
    if {array.dtype for array in arrays} not in ({HOST_DTYPES["bfloat16"]}, {HOST_DTYPES["float16"]}):
        return None
    if arrays[0].shape[1] % LANES:
        return fill_leaf(leaf.shape(sizes), arrays[0].dtype, rules, arrays)
    from specjax_kernels import Quantised

    return Quantised(codes=output_major_leaf(arrays, scope, leaf, sizes), scale=None)


class MeshPlacement(NamedTuple):
    """Devices that share a model."""

    mesh: Mesh
    copies: int  # devices with a copy of the same key/value head
    widened: Widened

    @staticmethod
    def of(config: ModelConfig | HeadConfig | MtpConfig, mesh: Mesh | None) -> MeshPlacement | None:
        """Raises ValueError if heads or experts cannot be split."""
        if mesh is None:
            return None
        from specjax.parallel.sharding import Widened, copies_of, fitted, group_count

        fitted(config, mesh.size, groups=group_count(mesh))
        return MeshPlacement(mesh, copies_of(config, mesh.size), Widened())

    def place(
        self, leaf: Leaf, shape: tuple[int, ...], dtype: Any, rules: Sequence[Placement], tensors: Mapping[str, Source]
    ) -> Any:
        """A float leaf on the devices. Each reads its part of the tensors, or all of them if heads are copied."""
        from specjax.parallel.sharding import made, put, regrouped

        if self.copies > 1 and "K" in leaf.dims:
            arrays = [tensors[rule.tensor].read() for rule in rules]
            return put(self.mesh, regrouped(fill_leaf(shape, dtype, rules, arrays), leaf, self.copies), leaf)
        read = cache(lambda name: tensors[name].read())
        return made(self.mesh, leaf, shape, partial(_fill_part, shape, dtype, rules, read))

    def place_quantised(self, host: Any, leaf: Leaf, shape: tuple[int, ...], dtype: str) -> Any:
        """A quantised leaf of a declared `shape` on the devices; `dtype` if it has to be widened."""
        from specjax_kernels.quantised import BY_OUTPUT

        from specjax.parallel.sharding import put_quantised, regrouped

        arrays = {name: array for name in BY_OUTPUT if (array := getattr(host, name)) is not None}
        copied = {name: regrouped(array, output_major(leaf), self.copies) for name, array in arrays.items()}

        def shaped(floats: np.ndarray) -> np.ndarray:
            return regrouped(floats.reshape(shape), leaf, self.copies)

        return put_quantised(self.mesh, replace(host, **copied), leaf, shaped, dtype, self.widened)


def _fill_part(
    shape: tuple[int, ...], dtype: Any, rules: Iterable[Placement], read: Callable[[str], np.ndarray],
    index: Sequence[slice],
) -> np.ndarray:  # fmt: skip
    """`fill_leaf` for some indices of each axis. Tensors that fill none of them (other experts) are not read."""
    bounds = [indices.indices(size)[:2] for indices, size in zip(index, shape, strict=True)]
    array = aligned_empty(tuple(end - begin for begin, end in bounds), dtype)
    cut_axes = {axis: slice(*bounds[axis]) for axis, size in enumerate(shape) if array.shape[axis] < size}
    for whole in rules:
        rule, cut = whole, {}
        for axis, indices in cut_axes.items():
            if isinstance(whole.part[axis], slice):
                cut[axis] = indices
            elif rule is not None:
                rule = rule.within(axis, indices)
        if rule is not None:
            rule.place(array, read(rule.tensor), cut)
    return array


def ahead(function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
    """``map(function, items)`` in threads, which run ahead by one item each."""
    count = min(4, os.cpu_count() or 1)
    running: deque[Future[U]] = deque()
    with ThreadPoolExecutor(count, thread_name_prefix="specjax-load") as pool:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > count:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
