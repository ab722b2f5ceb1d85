"""Checkpoint files to the parameter tree, tensor by tensor; and the tokenizer beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.hf_config import DTYPES
from specjax.checkpoint.weights import ModelFiles, read_headers, read_json
from specjax.config import ModelConfig
from specjax.models import table
from specjax.models.mtp_spec import mtp_tensors
from specjax.models.params import HEAD_TENSOR, Placement, dimensions, placements
from specjax.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOST_DTYPES = {name: np.dtype(name) for name in DTYPES}
# Buffers without content that old versions of transformers saved.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def load_params(
    files: ModelFiles, config: ModelConfig, *, progress: bool = True, put: Callable[[np.ndarray], Any] | None = None
) -> dict[str, Any]:
    """Read a model's weights; beyond the parameters themselves, one leaf at a time is in memory.

    Args:
      files: from ``resolve``.
      config: from ``model_config(files.config)``; parameters are cast to ``config.dtype``.
      progress: show a bar on stderr.
      put: moves one finished leaf to the device; ``jax.device_put`` if None.

    Returns:
      The parameter tree that ``specjax.models.table(config)`` declares; layers for multi-token prediction are left
      to ``load_mtp``.

    Raises:
      CheckpointError: a tensor is missing, left over, of the wrong shape or type, or a file is damaged.
    """
    tensors = read_headers(files.weights)
    rules = list(placements(table(config), dimensions(config)))
    others = mtp_tensors(tensors.keys(), config)
    shapes = {name: entry.shape for name, entry in tensors.items() if name not in others}
    optional = {HEAD_TENSOR} if config.tied_embeddings else frozenset()
    if problems := misfits(shapes, rules, f"a {config.family} model", optional):
        raise CheckpointError(
            f"the weights in {files.folder} do not fit its config.json; {problems}. Use the config.json that was saved "
            "with these weights"
        )
    return fill(files.name, rules, lambda name: tensors[name].read(), config.dtype, put, progress)


def fill(
    name: str, rules: list[Placement], read: Callable[[str], np.ndarray], dtype: str,
    put: Callable[[np.ndarray], Any] | None, progress: bool,
) -> dict[str, Any]:  # fmt: skip
    """The parameters of the model ``name``, leaf by leaf; the ``rules`` of a leaf must lie next to one another.

    ``read`` gives a tensor by its name; ``put`` is that of ``load_params``.
    """
    import jax

    params: dict[str, Any] = {}
    size = HOST_DTYPES[dtype].itemsize
    total = sum(rule.size * size for rule in rules)
    with progress_bar(f"Loading {name}", total, "B", shown=progress) as loaded:
        for path, parts in groupby(rules, key=lambda rule: rule.leaf):
            group = list(parts)
            host = np.empty(group[0].leaf_shape, HOST_DTYPES[dtype])
            for rule in group:
                rule.place(host, read(rule.tensor))
                loaded.update(rule.size * size)
            place = params
            for key in path[:-1]:
                place = place.setdefault(key, {})
            # Waiting keeps the transfers, and with them the host buffers, from piling up.
            place[path[-1]] = jax.block_until_ready((put or jax.device_put)(host))
            del host
    return params


def load_tokenizer(
    files: ModelFiles, *, folder: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's tokenizer (a fast one), with its chat template if it has one. Needs no torch.

    Args:
      files: from ``resolve``.
      folder: holds another tokenizer than the model's own.
      chat_template: a file with another Jinja template than the tokenizer's own.

    Raises:
      CheckpointError: the folder has no tokenizer, or one that only exists in Python.
    """
    import transformers

    if folder is not None:
        if not Path(folder).is_dir():
            raise CheckpointError(f"tokenizer_path={folder!r} is not a folder; one with tokenizer.json is needed")
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
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"chat_template={chat_template!r} cannot be read: {error}") from error
    return tokenizer


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
