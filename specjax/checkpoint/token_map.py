"""FR-Spec token maps: the ids of the target's vocabulary that a draft head may propose, most frequent first.

From a file of the user's, a file on the hub, or the head of a map that comes with specjax. Any map is lossless. Knows
nothing of what a map is used for.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.hub import download
from specjax.checkpoint.unpickle import read_torch_zip
from specjax.checkpoint.weights import read_header

FOLDER = Path(__file__).parents[1] / "data"
FORMATS = (".pt", ".safetensors", ".npy", ".json")


class ShippedMap(NamedTuple):
    """A map in ``specjax/data``: ``file`` holds ids by descending frequency, ``.npy``."""

    name: str  # of the vocabulary
    fingerprint: str  # of the vocabulary, see `fingerprint`
    file: Path


def fingerprint(tokens: list[str]) -> str:
    """Sha256 of a vocabulary, whose tokens are given by id."""
    return hashlib.sha256("\0".join(tokens).encode()).hexdigest()


def shipped_maps() -> tuple[ShippedMap, ...]:
    """The maps that come with specjax."""
    found = ((file, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(FOLDER.glob("*.json")))
    return tuple(
        ShippedMap(file.stem, about["fingerprint"], FOLDER / about["file"])
        for file, about in found
        if isinstance(about, dict) and {"fingerprint", "file"} <= about.keys()
    )


def read_token_map(given: str, *, vocab_size: int, tokens: Callable[[], list[str]] | None = None) -> np.ndarray:
    """The target's ids that may be proposed, int32 ``[W]``, in the order of the map.

    Args:
      given: a file (``.pt`` with a list or a tensor, ``.safetensors``, ``.npy``, ``.json``), here or on the hub as
        ``repository/file``; or a number N, for the N most frequent ids of the map that comes with specjax.
      vocab_size: of the target.
      tokens: the tokens of the target's tokenizer by id; needed for a number.

    Raises:
      CheckpointError: no such file, not a list of different ids of the target, or a number and another vocabulary;
        the message begins with what was given.
    """
    try:
        is_number = re.fullmatch("[0-9]+", given)
        return checked_ids(_shipped(int(given), tokens) if is_number else _values(_found(given)), vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{given}: {error}") from error


def checked_ids(values: object, vocab_size: int) -> np.ndarray:
    """``values``, which must be a list or an array of different ids below ``vocab_size``, as int32 ``[W]``."""
    if isinstance(values, list):
        # One by one: numpy would make numbers of bools and floats of large integers.
        for index, value in enumerate(values):
            if type(value) is not int:
                raise CheckpointError(f"entry {index} is {reprlib.repr(value)}, not an integer")
        values = np.array(values, object)
    if not isinstance(values, np.ndarray):
        raise CheckpointError(f"it holds a {type(values).__name__}; a list or a tensor of ids is needed")
    if values.ndim != 1:
        raise CheckpointError(f"it has the shape {list(values.shape)}; one dimension is needed")
    if not len(values):
        raise CheckpointError("it is empty; at least one id is needed")
    if values.dtype.kind not in "iuO":
        raise CheckpointError(f"entry 0 is {values[0]!r}, of {values.dtype}, not an integer")
    if len(outside := np.flatnonzero((values < 0) | (values >= vocab_size))):
        index = outside[0]
        raise CheckpointError(f"entry {index} is {values[index]}, outside the target's vocabulary 0..{vocab_size - 1}")
    values = values.astype(np.int32)
    first = np.unique(values, return_index=True)[1]
    if len(first) != len(values):
        again = np.setdiff1d(np.arange(len(values)), first)[0]
        before = np.flatnonzero(values == values[again])[0]
        raise CheckpointError(f"entry {again} is {values[again]}, as is entry {before}; ids must differ")
    return values


def _shipped(count: int, tokens: Callable[[], list[str]] | None) -> np.ndarray:
    own, maps = fingerprint(tokens()) if tokens is not None else None, shipped_maps()
    if (chosen := next((found for found in maps if found.fingerprint == own), None)) is None:
        known = listed(found.name for found in maps) or "there is none"
        raise CheckpointError(
            f"a number needs a model with the vocabulary of a map that comes with specjax ({known}), and this model's "
            f"is another; give a file ({', '.join(FORMATS)}) instead, made for this model by "
            "`specjax train vocab`"
        )
    ids = np.load(chosen.file, allow_pickle=False)
    if not 1 <= count <= len(ids):
        raise CheckpointError(
            f"{count} ids are asked for, and the map of {chosen.name} has {len(ids)}; give 1..{len(ids)}"
        )
    return ids[:count]


def _found(given: str) -> Path:
    """The local file, or one fetched from the hub."""
    path = Path(given).expanduser()
    if not given.lower().endswith(FORMATS):
        raise CheckpointError(f"it is neither a number nor a file of a known format: {', '.join(FORMATS)}")
    if path.is_file():
        return path
    parts = given.split("/")
    if len(parts) < 2 or not all(parts) or parts[0].startswith((".", "~")):
        raise CheckpointError("there is no such file; give one, or one on the hub as repository/file")
    split = 1 if len(parts) == 2 else 2
    repository, file = "/".join(parts[:split]), "/".join(parts[split:])
    problem = f"there is no such file, and the Hugging Face hub gave no {file} of {repository!r}"
    return download(repository, problem, file=file, progress=False)


def _values(file: Path) -> object:
    """What ``file`` holds, unchecked."""
    try:
        match file.suffix.lower():
            case ".pt":
                return read_torch_zip(file)
            case ".npy":
                return np.load(file, allow_pickle=False)
            case ".json":
                return json.loads(file.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (OSError, ValueError, EOFError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download or make it again") from error
    tensors = read_header(file)
    name = next(iter(tensors)) if len(tensors) == 1 else "token_map"
    if name not in tensors:
        raise CheckpointError(
            f"{file} holds the tensors {listed(tensors) or '(none)'}; one is needed, or one named token_map"
        )
    return tensors[name].read(integers=True)
