"""FR-Spec token maps: the target's token ids that a draft head may propose, most frequent first.

A map is a local file, a file on the hub, or the first ids of a map that comes with specjax. Every map is lossless.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specjax.checkpoint.files import CheckpointError, listed, prefixed
from specjax.checkpoint.hub import download
from specjax.checkpoint.torch_files import read_torch_file

FOLDER = Path(__file__).parents[1] / "data"
FORMATS = (".pt", ".json")


def fingerprint(tokens: list[str]) -> str:
    """Sha256 of a vocabulary, whose ``tokens`` are ordered by id."""
    return hashlib.sha256("\0".join(tokens).encode()).hexdigest()


def read_token_map(name: str, *, vocab_size: int, tokens: Callable[[], list[str]] | None = None) -> np.ndarray:
    """The target's ids that may be proposed, int32 ``[W]``, in the order of the map.

    Args:
      name: a file (``.pt`` with a list or a tensor, or ``.json``), local or on the hub as ``repository/file``; or a
        number N, for the N most frequent ids of the map that comes with specjax.
      tokens: returns the target's tokens by id; needed for a number.
    """
    with prefixed(name):
        is_number = re.fullmatch("[0-9]+", name)
        return checked_ids(_shipped(int(name), tokens) if is_number else _contents(_file(name)), vocab_size)


def checked_ids(values: object, vocab_size: int) -> np.ndarray:
    """Check that ``values`` are distinct ids below ``vocab_size``, and return them as int32 ``[W]``."""
    try:
        ids = np.asarray(values)
    except ValueError:  # nested lists
        ids = np.empty(0)
    is_integer = np.issubdtype(ids.dtype, np.integer) or all(type(value) is int for value in ids.ravel().tolist())
    if ids.ndim == 1 and len(ids) and is_integer:
        if len(outside := np.flatnonzero((ids < 0) | (ids >= vocab_size))):
            entry = f"entry {outside[0]} is {ids[outside[0]]}"
            raise CheckpointError(f"{entry}, outside the target's vocabulary 0..{vocab_size - 1}")
        unique, counts = np.unique(ids, return_counts=True)
        if len(unique) < len(ids):
            raise CheckpointError(f"ids must differ; repeated: {listed(unique[counts > 1].tolist())}")
        return ids.astype(np.int32)
    raise CheckpointError(f"it holds {reprlib.repr(values)}; a list or a tensor of token ids is needed")


def _shipped(count: int, tokens: Callable[[], list[str]] | None) -> np.ndarray:
    about = json.loads((FOLDER / "smollm2.json").read_text(encoding="utf-8"))
    if tokens is None or fingerprint(tokens()) != about["fingerprint"]:
        needed = "a number needs a model with SmolLM2's vocabulary, for which a map comes with specjax"
        raise CheckpointError(f"{needed}; give a file ({', '.join(FORMATS)}) made by `specjax train vocab`")
    ids = np.load(FOLDER / about["file"], allow_pickle=False)
    if not 1 <= count <= len(ids):
        raise CheckpointError(f"{count} is not in 1..{len(ids)}, the ids in the map")
    return ids[:count]


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if not name.lower().endswith(FORMATS):
        raise CheckpointError(f"it is neither a number nor a file of a known format: {', '.join(FORMATS)}")
    if path.is_file():
        return path
    parts = name.split("/")
    if len(parts) < 2 or not all(parts) or parts[0].startswith((".", "~")):
        raise CheckpointError("there is no such file; give one, or one on the hub as repository/file")
    split = 1 if len(parts) == 2 else 2
    repository, file = "/".join(parts[:split]), "/".join(parts[split:])
    problem = f"there is no such file, and the Hugging Face hub gave no {file} of {repository!r}"
    return download(repository, problem, file=file, progress=False)


def _contents(file: Path) -> object:
    try:
        return read_torch_file(file) if file.suffix.lower() == ".pt" else json.loads(file.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download or make it again") from error
