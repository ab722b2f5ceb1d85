"""Checkpoint files to the parameter tree, tensor by tensor; and the tokenizer beside them."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.hf_config import DTYPES, QUANTIZATIONS
from specjax.checkpoint.quantised import Entries, QuantisedEntry, matrices
from specjax.checkpoint.stored import empty, filled, make_leaf, output_major_leaf, quantised_leaf
from specjax.checkpoint.weights import ModelFiles, read_json
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
    from transformers import PreTrainedTokenizerBase

    from specjax.parallel.sharding import Widened

T = TypeVar("T")
U = TypeVar("U")

LARGE = 2**22  # bytes of a leaf
LANES = 16  # the inputs of a matrix in 16 bits are a multiple of this, or it is stored as declared
HOST_DTYPES = {name: np.dtype(name) for name in DTYPES}
# Buffers without content that old versions of transformers saved.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def load_params(
    files: ModelFiles, config: ModelConfig, *, quantization: str = "auto", progress: bool = True,
    put: Callable[[np.ndarray], Any] | None = None, mesh: Mesh | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read a model's weights; beyond the parameters themselves, a few leaves at a time are in memory.

    Args:
      files: from ``resolve``.
      config: from ``model_config(files.config)``; parameters are cast to ``config.dtype``.
      quantization: auto: matrices that the files hold in few bits stay so, as ``specjax_kernels.Quantised``, and on a
        CPU beside float32 activations those in 16 bits; none: all are of ``config.dtype``; fp8, int8 or int4: matrices
        of float weights are quantised (``specjax_kernels.quantise``).
      progress: show a bar on stderr.
      put: moves one finished array to the device; ``jax.device_put`` if None.
      mesh: devices that share the model; each reads its part of the files, and matrices in 16 bits are of
        ``config.dtype``. The parameters are then those of ``specjax.parallel.sharding.fitted(config, ...)``.

    Returns:
      The parameter tree that ``specjax.models.table(config)`` declares; layers for multi-token prediction are left
      to ``load_mtp``.

    Raises:
      CheckpointError: a tensor is missing, left over, of the wrong shape or type, or a file is damaged; weights that
        are to be quantised are so already.
    """
    tensors = matrices(files)
    declared, sizes = table(config), dimensions(config)
    others = mtp_tensors(tensors.keys(), config)
    shapes = {name: entry.shape for name, entry in tensors.items() if name not in others}
    optional = ({HEAD_TENSOR} if config.tied_embeddings else set()) | zero_biases(tensors)
    if problems := misfits(shapes, placements(declared, sizes), f"a {config.family} model", optional):
        raise CheckpointError(
            f"the weights in {files.folder} do not fit its config.json; {problems}. "
            + (
                "They look quantised, and config.json has no quantization_config that says how"
                if any(name.endswith(QUANTISED_NAMES) for name in tensors)
                else "Use the config.json that was saved with these weights"
            )
        )
    if quantization not in QUANTIZATIONS:
        raise CheckpointError(f"quantization {quantization!r} is not one of: {', '.join(QUANTIZATIONS)}")
    stored = [name for name, entry in tensors.items() if isinstance(entry, QuantisedEntry)]
    if stored and quantization not in ("auto", "none"):
        raise CheckpointError(
            f"quantization {quantization} is for float weights, and {files.name} has quantised ones, such as "
            f"{stored[0]}; auto keeps them as they are, none dequantises them"
        )

    few_bits = reduced(tensors, sizes, config.dtype, quantization, tied=config.tied_embeddings, spread=mesh is not None)
    return fill(
        files.name, declared, sizes, lambda name: tensors[name].read(), config.dtype, put, progress, few_bits,
        stored=lambda name: tensors[name].size, spread=spread_over(mesh, config),
    )  # fmt: skip


QUANTISED_NAMES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.absmax")


def zero_biases(tensors: Entries) -> set[str]:
    """Biases of quantised matrices that are all zero, which AutoGPTQ wrote for matrices without one."""
    return {
        name
        for name, entry in tensors.items()
        if name.endswith(".bias")
        and isinstance(tensors.get(f"{name.removesuffix('bias')}weight"), QuantisedEntry)
        and not np.any(entry.read())
    }


FewBits = Callable[[Scope, Leaf, list[Placement]], Any]
"""A quantised leaf, or None."""


def reduced(
    tensors: Entries, sizes: Sizes, dtype: str, quantization: str, *, tied: bool, spread: bool = False
) -> FewBits:
    """What `quantization` makes of leaves; `tied`: whether the embedding is also the output matrix; `spread`: whether
    several devices share them."""
    import jax

    # Whose kernels widen them as they read.
    keeps_half = dtype == "float32" and jax.default_backend() == "cpu" and not spread

    def few_bits(scope: Scope, leaf: Leaf, rules: list[Placement]) -> Any | None:
        if quantization == "none" or not is_product(leaf):
            return None
        entries = [tensors[rule.tensor] for rule in rules]
        if quantization == "auto":
            found = [entry for entry in entries if isinstance(entry, QuantisedEntry)]
            if len(found) == len(entries):
                return make_leaf([entry.load() for entry in found], scope, leaf, sizes)
            # One that is dequantised is float32, so beside it nothing stays in 16 bits.
            if found or not keeps_half:
                return None
            return half_leaf([entry.read() for entry in entries], scope, leaf, sizes, rules)
        if leaf.name == "embed" and not tied:
            return None  # rows are looked up, and read once a token
        return quantised_leaf([np.asarray(entry.read()) for entry in entries], scope, leaf, sizes, quantization)

    return few_bits


def half_leaf(
    arrays: Sequence[np.ndarray], scope: Scope, leaf: Leaf, sizes: Sizes, rules: Sequence[Placement]
) -> Any | None:
    """The leaf of tensors in one 16-bit type, in that type; None: they have another, or several. Output-major where the
    CPU's kernel takes their inputs."""
    if {array.dtype for array in arrays} not in ({HOST_DTYPES["bfloat16"]}, {HOST_DTYPES["float16"]}):
        return None
    if arrays[0].shape[1] % LANES:
        return filled(leaf.shape(sizes), arrays[0].dtype, rules, arrays)
    return output_major_leaf(arrays, scope, leaf, sizes)


def spread_over(mesh: Mesh | None, config: ModelConfig | HeadConfig | MtpConfig) -> Spread | None:
    """For a model or draft head of this description. Raises ValueError: its heads or experts cannot be split."""
    if mesh is None:
        return None
    from specjax.parallel.sharding import Widened, copies_of, fitted, group_count

    fitted(config, mesh.size, groups=group_count(mesh))
    return Spread(mesh, copies_of(config, mesh.size), Widened())


class Spread(NamedTuple):
    """Devices that share a model, and how many of them have a copy of each key/value head."""

    mesh: Mesh
    copies: int
    widened: Widened

    def made(
        self, leaf: Leaf, shape: tuple[int, ...], dtype: Any, rules: Sequence[Placement],
        read: Callable[[str], np.ndarray],
    ) -> Any:  # fmt: skip
        """A leaf on these devices, of each its part of the tensors; all of them where heads are copied."""
        from specjax.parallel.sharding import made, put, regrouped

        if self.copies > 1 and "K" in leaf.dims:
            tensors = [read(rule.tensor) for rule in rules]
            return put(self.mesh, regrouped(filled(shape, dtype, rules, tensors), leaf, self.copies), leaf)
        return made(self.mesh, leaf, shape, partial(_filled_part, shape, dtype, rules, cache(read)))

    def quantised(self, host: Any, leaf: Leaf, shape: tuple[int, ...], dtype: str) -> Any:
        """A quantised leaf on these devices, of a declared `shape`; `dtype`: of its floats, if it has to be those."""
        from specjax_kernels.quantised import BY_OUTPUT

        from specjax.parallel.sharding import put_quantised, regrouped

        major = output_major(leaf)
        copied = {
            name: regrouped(array, major, self.copies)
            for name in BY_OUTPUT
            if (array := getattr(host, name)) is not None
        }

        def shaped(floats: np.ndarray) -> np.ndarray:
            return regrouped(floats.reshape(shape), leaf, self.copies)

        return put_quantised(self.mesh, replace(host, **copied), leaf, shaped, dtype, self.widened)


def _filled_part(
    shape: tuple[int, ...], dtype: Any, rules: Iterable[Placement], read: Callable[[str], np.ndarray],
    index: Sequence[slice],
) -> np.ndarray:  # fmt: skip
    """`filled` for some indices of each axis. Tensors outside of them, such as those of other experts, are not read."""
    bounds = [some.indices(size)[:2] for some, size in zip(index, shape, strict=True)]
    found = empty(tuple(end - begin for begin, end in bounds), dtype)
    some = {axis: slice(*bounds[axis]) for axis, size in enumerate(shape) if found.shape[axis] < size}
    for whole in rules:
        rule, cut = whole, {}
        for axis, indices in some.items():
            if isinstance(whole.part[axis], slice):
                cut[axis] = indices
            elif rule is not None:
                rule = rule.within(axis, indices)
        if rule is not None:
            rule.place(found, read(rule.tensor), cut)
    return found


def fill(
    name: str, declared: Table, sizes: Sizes, read: Callable[[str], np.ndarray], dtype: str,
    put: Callable[[np.ndarray], Any] | None, progress: bool,
    few_bits: FewBits = lambda scope, leaf, rules: None, *, stored: Callable[[str], int], spread: Spread | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The parameters of the model ``name``, leaf by leaf, those without tensors left out.

    ``read`` gives a tensor by its name and ``stored`` its bytes in the files, ``few_bits`` a quantised leaf or None;
    ``put`` is that of ``load_params``. ``spread``: over which devices; then ``put`` is not used.
    """
    import jax

    from specjax.parallel.sharding import local_bytes

    params: dict[str, Any] = {}
    size = HOST_DTYPES[dtype].itemsize
    leaves = [
        (scope, leaf, list(placements((scope._replace(leaves=(leaf,)),), sizes)))
        for scope in declared
        for leaf in scope.leaves
        if leaf.tensors
    ]
    # What making a large leaf takes beside it is free again before the others take their memory.
    leaves.sort(key=lambda item: prod(item[1].shape(sizes)), reverse=True)

    def made(item: tuple[Scope, Leaf, list[Placement]]) -> tuple[Any, int]:
        scope, leaf, rules = item
        count = sum(stored(rule.tensor) for rule in rules)
        host, shape = few_bits(scope, leaf, rules), leaf.shape(sizes)
        if spread is not None:
            if host is not None:
                return spread.quantised(host, leaf, shape, dtype), count
            return spread.made(leaf, shape, leaf.dtype or HOST_DTYPES[dtype], rules, read), count
        if host is None:
            tensors = (read(rule.tensor) for rule in rules)
            host = filled(shape, leaf.dtype or HOST_DTYPES[dtype], rules, tensors)
        return host, count

    total = sum(stored(rule.tensor) for _, _, rules in leaves for rule in rules)
    made_bytes = sum(rule.size * size for _, _, rules in leaves for rule in rules)
    # Threads that make small leaves mostly wait for each other, as these are more Python's work than numpy's.
    each = ahead if made_bytes > len(leaves) * LARGE else map
    with progress_bar(f"Loading {name}", total, "B", shown=progress) as loaded:
        for (scope, leaf, _), (host, count) in zip(leaves, each(made, leaves), strict=True):
            place = params.setdefault(scope.name, {}) if scope.name else params
            # Waiting keeps the transfers, and with them the host buffers, from piling up.
            if spread is None:
                host = jax.tree.map(put, host) if put else jax.device_put(host)
            place[leaf.name] = jax.block_until_ready(host)
            loaded.update(count)
            del host
        held = tqdm.format_sizeof(local_bytes(params), "B", 1000)
        loaded.set_postfix_str(f"bytes read; {held} held" + " by each device" * (spread is not None))
    if spread is not None:
        spread.widened.tell(name)
    return params


def ahead(function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
    """``map(function, items)`` in threads, which are ahead by as many items as there are threads."""
    count = min(4, os.cpu_count() or 1)
    running: deque[Future[U]] = deque()
    with ThreadPoolExecutor(count, thread_name_prefix="specjax-load") as pool:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > count:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def load_tokenizer(
    files: ModelFiles, *, folder: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's tokenizer (a fast one), with its chat template if it has one. Needs no torch.

    Args:
      files: from ``resolve``.
      folder: holds another tokenizer than the model's own.
      chat_template: a file with another Jinja template than the tokenizer's own.

    Raises:
      CheckpointError: the folder has no tokenizer, or one that only exists in Python; or as `check_tokenizer_paths`.
    """
    import transformers

    template = check_tokenizer_paths(folder, chat_template)
    if folder is not None:
        files = replace(files, folder=Path(folder))
    file = files.folder / "tokenizer_config.json"
    try:
        declared = read_json(file, files.name).get("tokenizer_class") if file.is_file() else None
        is_plain = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
        # AutoTokenizer would choose the same; importing it takes seconds, and torch where that is installed.
        kind: Any = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
        tokenizer = kind.from_pretrained(str(files.folder), local_files_only=True)
    except Exception as error:  # transformers raises whatever its backends raise
        raise CheckpointError(
            f"no usable tokenizer in {files.folder} ({type(error).__name__}: {error}); the folder needs tokenizer.json "
            "and tokenizer_config.json as transformers saves them"
        ) from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"the tokenizer in {files.folder} is a {type(tokenizer).__name__}, which has no tokenizer.json; convert it "
            "with transformers' convert_slow_tokenizer and save it there"
        )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def check_tokenizer_paths(folder: str | None, chat_template: str | None) -> str | None:
    """Refuses early what `load_tokenizer` cannot use. Returns the template's text; None: there is no such file.

    Args:
      folder: holds another tokenizer than the model's own.
      chat_template: a file with another Jinja template than the tokenizer's own.

    Raises:
      CheckpointError: ``folder`` is none, or the template cannot be read or has a syntax error.
    """
    if folder is not None and not Path(folder).is_dir():
        problem = f"the tokenizer {folder!r} (tokenizer_path, --tokenizer-path) is not a folder"
        raise CheckpointError(f"{problem}; one with tokenizer.json is needed")
    if chat_template is None:
        return None
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    named = f"the template {chat_template!r} (chat_template, --chat-template)"
    try:
        text = Path(chat_template).read_text(encoding="utf-8")
        render_jinja_template(conversations=[], chat_template=text)  # compiles it, and renders nothing
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{named} cannot be read: {getattr(error, 'strerror', None) or error}; give a text file of Jinja"
        ) from error
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{named} has a syntax error in line {error.lineno}: {error.message}") from error
    return text


def misfits(
    found: Mapping[str, tuple[int, ...]], rules: Iterable[Placement], kind: str, optional: Set[str] = frozenset()
) -> str:
    """What is wrong with tensors of the shapes ``found`` in a checkpoint of ``kind``; empty if they fit ``rules``."""
    expected = {rule.tensor: rule.shape for rule in rules}
    extra = {name for name in found.keys() - expected.keys() - optional if not _IGNORED.fullmatch(name)}
    wrong = {name for name in found.keys() & expected.keys() if found[name] != expected[name]}
    problems = {
        "missing tensors": expected.keys() - found.keys(),
        f"tensors with no place in {kind}": {f"{name} {list(found[name])}" for name in extra},
        "wrong shapes": {f"{name} is {list(found[name])}, not {list(expected[name])}" for name in wrong},
    }
    return "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
