"""Tensors of a checkpoint to the leaves of the parameter tree: cast, quantised, and placed on one device or a mesh.

In order: loading, float leaves, quantised leaves (16-bit leaves on a CPU have their layout), leaves on a mesh.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from tqdm import tqdm

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.hf_config import DTYPES
from specjax.checkpoint.quantised import (
    Entries,
    QuantisedEntry,
    by_rows,
    matrices,
    one_element_a_block,
    quantised,
)
from specjax.checkpoint.weights import ModelFiles, TensorEntry, is_finite
from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.models import params as declarations
from specjax.models import table
from specjax.models.mtp_spec import mtp_tensors
from specjax.models.params import Leaf, Placement, Scope, Sizes, Table, output_major, placements
from specjax.progress import progress_bar

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from specjax_kernels import Quantised

    from specjax.parallel.sharding import Widened

T = TypeVar("T")
U = TypeVar("U")

LARGE_LEAF = 2**22  # bytes
LANES = 16  # a 16-bit matrix is stored output-major if its inputs are a multiple of this
HOST_DTYPES = {name: np.dtype(name) for name in DTYPES}
LARGEST_CODE = {"int8": (127, np.int8), "fp8": (448, ml_dtypes.float8_e4m3fn)}
# Buffers that old versions of transformers saved.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
_QUANTISED_NAMES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.absmax")


class ArrayEntry(NamedTuple):
    """A tensor that is an array already, with the members of a `TensorEntry` that loading needs."""

    array: np.ndarray
    source: str

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
    checked: tuple[Table, Sizes, Entries] | None = None,
) -> dict[str, Any]:
    """Read the parameters that ``specjax.models.table(config)`` declares. Host memory holds a few leaves at a time.

    Args:
      quantization: auto: quantised matrices stay so, as ``specjax_kernels.Quantised``, and so do 16-bit matrices on a
        CPU with float32 activations; none: all matrices are of ``config.dtype``; fp8, int8 or int4: matrices of float
        weights are quantised (``specjax_kernels.quantise``); see ``effective_quantization``.
      mesh: devices that share the model. Each reads its part of the files, and the parameters have the shapes of
        ``specjax.parallel.sharding.fitted(config, ...)``.
      checked: the result of ``check_tensors``; None: it is called here.

    Raises CheckpointError if a tensor is missing, left over, of the wrong shape or type, or a file is damaged.
    """
    declared, sizes, tensors = checked or check_tensors(files, config)
    return fill_parameters(
        files.name, declared, sizes, tensors, config, config.dtype, quantization, tied=config.tied_embeddings,
        mesh=mesh, progress=progress,
    )  # fmt: skip


def check_tensors(files: ModelFiles, config: ModelConfig) -> tuple[Table, Sizes, Entries]:
    """The declared parameters of a model and its tensors. Raises CheckpointError if a tensor is missing, left over or
    of another shape than the config's numbers imply. Reads headers."""
    tensors = matrices(files)
    declared, sizes = table(config), declarations.dimensions(config)
    mtp = mtp_tensors(tensors.keys(), config)
    others = {name: entry for name, entry in tensors.items() if name not in mtp}
    optional = ({declarations.HEAD_TENSOR} if config.tied_embeddings else set()) | _zero_biases(tensors)
    optional |= shared_tensors(config, "model.layers.{}.self_attn.{}.weight", ("k_proj", "v_proj", "k_norm"))
    if problems := misfits(others, placements(declared, sizes), f"a {config.family} model", optional):
        advice = "Use the config.json that was saved with these weights"
        if any(name.endswith(_QUANTISED_NAMES) for name in tensors):
            advice = "They look quantised, and config.json has no quantization_config that says how"
        raise CheckpointError(f"the weights in {files.folder} do not fit its config.json; {problems}. {advice}")
    return declared, sizes, tensors


def _zero_biases(tensors: Entries) -> set[str]:
    """Biases of zeros, which AutoGPTQ wrote for quantised matrices without a bias."""
    return {
        name
        for name, entry in tensors.items()
        if name.endswith(".bias")
        and isinstance(tensors.get(f"{name.removesuffix('bias')}weight"), QuantisedEntry)
        and not np.any(entry.read())
    }


def shared_tensors(config: ModelConfig, form: str, names: Iterable[str]) -> set[str]:
    """Tensors of keys and values that published files have in layers that share those of another layer."""
    shared = (layer for layer in range(config.num_layers) if config.owner(layer) != layer)
    return {form.format(layer, name) for layer in shared for name in names}


def misfits(tensors: Mapping[str, Any], rules: Iterable[Placement], kind: str, optional: Set[str] = frozenset()) -> str:
    """The differences between the shapes of arrays or entries and the rules of a model of ``kind``; empty if there are
    none."""
    expected = {rule.tensor: rule.shape for rule in rules}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
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
    """The parameters of the model ``name``, without leaves that no tensor fills. ``config`` decides how a mesh shares
    the model. ``tied``: the embedding is also the output matrix."""
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
    leaves.sort(key=lambda item: math.prod(item[1].shape(sizes)), reverse=True)

    def load(item: tuple[Scope, Leaf, list[Placement]]) -> tuple[Any, int]:
        scope, leaf, rules = item
        entries = [tensors[rule.tensor] for rule in rules]
        count, shape = sum(entry.size for entry in entries), leaf.shape(sizes)
        if quantization not in ("auto", "none"):
            refuse_not_finite([entry.read() for entry in entries], entries)
        host = _quantised_leaf(entries, scope, leaf, sizes, rules, quantization, keeps_half, tied)
        leaf_dtype = leaf.dtype or HOST_DTYPES[dtype]
        if on_mesh is not None and host is not None:
            host = on_mesh.place_quantised(host, leaf, shape, dtype)
        elif on_mesh is not None:
            host = on_mesh.place(leaf, shape, leaf_dtype, rules, tensors)
        elif host is None:
            host = fill_leaf(shape, leaf_dtype, rules, (entry.read() for entry in entries))
        refuse_not_finite(host, entries)
        return host, count

    total = sum(tensors[rule.tensor].size for _, _, rules in leaves for rule in rules)
    leaf_bytes = sum(rule.size * itemsize for _, _, rules in leaves for rule in rules)
    # Small leaves are mostly Python's work, in which threads block each other.
    parallel_map = ahead if leaf_bytes > len(leaves) * LARGE_LEAF else map
    params: dict[str, Any] = {}
    with progress_bar(f"Loading {name}", total, "B", shown=progress) as loaded:
        for (scope, leaf, _), (host, count) in zip(leaves, parallel_map(load, leaves), strict=True):
            group = params.setdefault(scope.name, {}) if scope.name else params
            # Blocking limits the number of pending transfers, and with them of host buffers.
            if on_mesh is None:
                host = jax.device_put(host)
            group[leaf.name] = jax.block_until_ready(host)
            loaded.update(count)
            del host
        size = tqdm.format_sizeof(local_bytes(params), "B", 1000)
        loaded.set_postfix_str(f"bytes read; {size} held" + " by each device" * (mesh is not None))
    if on_mesh is not None:
        on_mesh.widened.tell(name)
    return params


def refuse_not_finite(leaf: Any, entries: Sequence[Source]) -> None:
    """Raise CheckpointError if a leaf has NaN or infinity, as one of its tensors has. Scales are contiguous in a leaf,
    and not in the blocks of a file, where their check takes three times as long."""
    import jax
    from jax import numpy as jnp

    def finite(array: Any) -> bool:
        if not isinstance(array, jax.Array):
            return is_finite(array)
        shards = array.addressable_shards if jnp.issubdtype(array.dtype, jnp.inexact) else ()
        return all(bool(jnp.isfinite(shard.data).all()) for shard in shards)

    if all(map(finite, jax.tree.leaves(leaf))):
        return
    for entry in entries:
        if isinstance(entry, QuantisedEntry):
            parts = list(entry.parts.values())
            refuse_not_finite([part.read(integers=True) for part in parts], parts)
        if not is_finite(entry.read(integers=True) if isinstance(entry, TensorEntry) else entry.read()):
            problem = "has NaN or infinity; copy or download it again, or convert it again"
            raise CheckpointError(f"{entry.source} {problem}")


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


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes, which XLA:CPU uses without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    space = np.empty(size + 64, np.uint8)
    start = -space.ctypes.data % 64
    return space[start : start + size].view(dtype).reshape(shape)


def fill_leaf(
    shape: tuple[int, ...], dtype: Any, rules: Iterable[Placement], tensors: Iterable[np.ndarray]
) -> np.ndarray:
    array = aligned_empty(shape, dtype)
    for rule, tensor in zip(rules, tensors, strict=True):
        rule.place(array, tensor)
    return array


def _fill_part(
    shape: tuple[int, ...], dtype: Any, rules: Iterable[Placement], read: Callable[[str], np.ndarray],
    index: Sequence[slice],
) -> np.ndarray:  # fmt: skip
    """`fill_leaf` for some indices of each axis. Reads only tensors with such indices (not other experts)."""
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


def _quantised_leaf(
    entries: Sequence[Source], scope: Scope, leaf: Leaf, sizes: Sizes, rules: Sequence[Placement], quantization: str,
    keeps_half: bool, tied: bool,
) -> Any | None:  # fmt: skip
    """The quantised or 16-bit leaf of these tensors. None: the leaf has the model's dtype."""
    if quantization == "none" or not declarations.is_product(leaf):
        return None
    if quantization != "auto":
        if leaf.name == "embed" and not tied:
            return None  # a token reads one row
        return quantise_leaf([outputs_first(entry.read()) for entry in entries], scope, leaf, sizes, quantization)
    stored = [entry for entry in entries if isinstance(entry, QuantisedEntry)]
    if len(stored) == len(entries):
        return make_leaf([entry.load() for entry in stored], scope, leaf, sizes)
    if stored or not keeps_half:  # dequantised matrices are float32, so all matrices of the leaf are
        return None
    arrays = [entry.read() for entry in entries]
    if {array.dtype for array in arrays} not in ({HOST_DTYPES["bfloat16"]}, {HOST_DTYPES["float16"]}):
        return None
    if arrays[0].shape[1] % LANES:  # its inputs
        return fill_leaf(leaf.shape(sizes), arrays[0].dtype, rules, arrays)
    return quantised(output_major_placer(scope, leaf, sizes)([*map(outputs_first, arrays)]), None)


def outputs_first(tensor: Any) -> np.ndarray:
    """A tensor [out, in], or [experts, in, out] as [experts * out, in]."""
    tensor = np.asarray(tensor)
    return tensor if tensor.ndim == 2 else tensor.swapaxes(1, 2).reshape(-1, tensor.shape[1])


def output_major_placer(scope: Scope, leaf: Leaf, sizes: Sizes) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """A function that places arrays [out, n] of a leaf's tensors in one array [*outputs of the leaf, n]. Arrays
    [out, blocks, m] are copied a block at a time, to [*outputs, blocks * m]."""
    declared = output_major(leaf)

    @cache
    def rules(width: int) -> list[Placement]:
        return list(placements((scope._replace(leaves=(declared,)),), {**sizes, "@": width}))

    def place(arrays: Sequence[np.ndarray]) -> np.ndarray:
        dtype = arrays[0].dtype
        if arrays[0].ndim == 3:
            arrays = [one_element_a_block(array) for array in arrays]
        width = arrays[0].shape[1]
        shape = declared.shape({**sizes, "@": width})
        return fill_leaf(shape, arrays[0].dtype, rules(width), arrays).view(dtype)

    return place


def make_leaf(parts: Sequence[Quantised], scope: Scope, leaf: Leaf, sizes: Sizes) -> Quantised | None:
    """The leaf of the matrices of its tensors; None if they fit no common format."""
    from specjax_kernels.quantised import BY_OUTPUT

    matrices = _in_one_format(parts)
    if matrices is None:
        return None
    place = output_major_placer(scope, leaf, sizes)
    present = [name for name in BY_OUTPUT if getattr(matrices[0], name) is not None]
    return replace(matrices[0], **{name: place([getattr(matrix, name) for matrix in matrices]) for name in present})


def _in_one_format(matrices: Sequence[Quantised]) -> Sequence[Quantised] | None:
    """The matrices unchanged if they have one format, else in 8 bits with float32 scales of the smallest groups. None:
    the order of columns differs, or only some codes are fp8."""
    from specjax_kernels.quantised import SCALES, scales, unpack

    orders: list[Any] = [matrix.order for matrix in matrices]
    if any(order is not orders[0] and not np.array_equal(order, orders[0]) for order in orders):
        return None

    def format_of(matrix: Quantised) -> tuple[Any, ...]:
        arrays = [getattr(matrix, name) for name in SCALES]
        shapes = [None if array is None else (array.dtype, array.shape[1]) for array in arrays]
        return matrix.codes.dtype, matrix.codes.ndim, matrix.shift, *shapes

    if len({format_of(matrix) for matrix in matrices}) == 1:
        return matrices
    if not all(np.issubdtype(matrix.codes.dtype, np.integer) for matrix in matrices):
        return None
    groups = math.lcm(*(matrix.scale.shape[1] for matrix in matrices))
    has_offset = any(matrix.offset is not None for matrix in matrices)

    def in_eight_bits(matrix: Quantised) -> Quantised:
        codes = unpack(matrix.codes) if matrix.bits == 4 else matrix.codes
        codes = codes.reshape(len(codes), -1).astype(np.int8) - np.int8(matrix.shift)

        def expand(numbers: Any) -> np.ndarray:
            rows = np.asarray(numbers).reshape(len(codes), -1)
            return rows.repeat(groups // rows.shape[1], axis=1)

        scale, offset = scales(matrix)
        if has_offset and offset is None:
            offset = np.zeros((len(codes), 1), np.float32)
        added = None if offset is None else expand(offset)
        return quantised(codes, expand(scale), offset=added, order=matrix.order)

    return [in_eight_bits(matrix) for matrix in matrices]


def quantise_leaf(tensors: Sequence[np.ndarray], scope: Scope, leaf: Leaf, sizes: Sizes, kind: str) -> Any:
    """The leaf of float tensors [out, in], quantised to `kind`."""
    from specjax_kernels import quantise

    def matrix_of(tensor: np.ndarray) -> Quantised:
        if (matrix := _quantise_compiled(tensor, kind)) is not None:
            return matrix
        return by_rows(len(tensor), 4 * tensor.shape[1], lambda rows: quantise(np.asarray(tensor[rows]), kind))

    try:
        return make_leaf([matrix_of(tensor) for tensor in tensors], scope, leaf, sizes)
    except ValueError as error:
        raise CheckpointError(f"quantization {kind} of {scope.prefix}{leaf.tensors[0].name}: {error}") from error


def _quantise_compiled(tensor: np.ndarray, kind: str) -> Quantised | None:
    """`specjax_kernels.quantise` in compiled code; None if that is unavailable, or a number is not finite."""
    from specjax_kernels.cpu import repacking

    scale = np.empty(len(tensor), np.float32)
    if kind not in LARGEST_CODE or not tensor.flags.c_contiguous or not repacking.magnitudes(tensor, scale):
        return None
    largest, dtype = LARGEST_CODE[kind]
    scale /= np.float32(largest)
    if not np.isfinite(scale).all():
        return None
    codes = np.empty(tensor.shape, dtype)
    repacking.codes(tensor, scale, codes)
    return quantised(codes, scale[:, None])


class MeshPlacement(NamedTuple):
    mesh: Mesh
    copies: int  # devices with a copy of the same key/value head
    widened: Widened

    @staticmethod
    def of(config: ModelConfig | HeadConfig | MtpConfig, mesh: Mesh | None) -> MeshPlacement | None:
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
        """A quantised leaf on the devices. If it has to be widened, it gets the declared `shape` and `dtype`."""
        from specjax_kernels.quantised import BY_OUTPUT

        from specjax.parallel.sharding import put_quantised, regrouped

        arrays = {name: array for name in BY_OUTPUT if (array := getattr(host, name)) is not None}
        copied = {name: regrouped(array, output_major(leaf), self.copies) for name, array in arrays.items()}

        def shaped(floats: np.ndarray) -> np.ndarray:
            return regrouped(floats.reshape(shape), leaf, self.copies)

        return put_quantised(self.mesh, replace(host, **copied), leaf, shaped, dtype, self.widened)
