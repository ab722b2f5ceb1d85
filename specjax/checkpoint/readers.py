"""Reading and writing safetensors files one tensor at a time, without torch.

Knows the file format and nothing of models. A tensor is handed out as a view of the memory-mapped file, so what
is resident is what the caller copies out of it. bfloat16 comes as ``ml_dtypes.bfloat16``, which numpy itself lacks.

The format: 8 bytes, little-endian length n; n bytes of JSON ``{name: {dtype, shape, data_offsets}}``; the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.errors import CheckpointError, listed

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
# Never parameters: token ids and masks beside the weights of a draft head.
INTEGERS: dict[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# The largest header the safetensors library accepts; a longer one is a file of another kind.
_MAX_HEADER = 100_000_000
# numpy's limit.
_MAX_AXES = 64


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``stop - start`` bytes of ``file`` from byte ``start``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self, *, integers: bool = False) -> np.ndarray:
        """The tensor as a read-only view of the file.

        Args:
          integers: allow integers and bools too.

        Raises:
          CheckpointError: the file stores it in another type than ``DTYPES`` (and ``INTEGERS``, if allowed) has.
        """
        dtypes = DTYPES | INTEGERS if integers else DTYPES
        if self.dtype not in dtypes:
            quantised = "" if integers else " (quantised checkpoints are not supported)"
            raise CheckpointError(
                f"tensor {self.name} in {self.file} has type {self.dtype}; supported: {listed(dtypes)}{quantised}"
            )
        if self.start == self.stop:  # which cannot be mapped
            return np.empty(self.shape, dtypes[self.dtype])
        # One mapping per tensor: its pages can be reclaimed as soon as the caller has copied them.
        return np.memmap(self.file, dtypes[self.dtype], "r", self.start, self.shape)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, checked against the file's size.

    Refuses what the safetensors library refuses: the tensors' bytes must fill the file without gaps or overlaps.

    Raises:
      CheckpointError: not a safetensors file, a damaged or a truncated one.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size} bytes")
            # Decoded here: `json` would guess UTF-16 from the bytes.
            header = json.loads(
                stream.read(length).decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
            )
        if not isinstance(header, dict):
            raise ValueError(f"its header is {header!r:.60}, not an object")
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"__metadata__ is {metadata!r:.60}, not an object of strings")
        entries = {name: _entry(name, value, file, 8 + length) for name, value in header.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a readable safetensors file ({error}); download or copy it again"
        ) from error
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise CheckpointError(
                f"{file} is damaged: {entry.name!r:.80} begins at byte {entry.start}, and what is before it ends at "
                f"{end}; download or copy it again"
            )
        end = entry.stop
    if end != size:
        what = "truncated" if end > size else "damaged"
        raise CheckpointError(
            f"{file} is {what}: its header describes {end} bytes, it has {size}; download or copy it again"
        )
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in found if names.count(name) > 1)!r:.60} is in its header twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"its header has {name}")


def _entry(name: str, value: Any, file: Path, data: int) -> TensorEntry:
    """One tensor of a header; its data begin at byte ``data`` of the file.

    Raises:
      ValueError: it is malformed.
    """
    name.encode()  # half a surrogate could not be shown
    if not isinstance(value, dict):
        raise ValueError(f"{name!r:.60} is {value!r:.60}, not an object")
    dtype = value.get("dtype")
    if not isinstance(dtype, str):
        raise ValueError(f"{name!r:.60} has dtype {dtype!r:.60}, not a string")
    shape = _counts(name, value, "shape")
    if len(shape) > _MAX_AXES:
        raise ValueError(f"{name!r:.60} has a shape of {len(shape)} axes; at most {_MAX_AXES} are supported")
    offsets = _counts(name, value, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r:.60} has data_offsets {offsets!r:.60}, not a beginning and an end")
    start, stop = (data + offset for offset in offsets)
    item = (DTYPES | INTEGERS).get(dtype)
    if item is not None:
        if prod(shape) * item.itemsize != stop - start:
            raise ValueError(f"{name!r:.60} has shape {shape} of {dtype}, but {stop - start} bytes")
        if prod(filter(None, shape)) * item.itemsize >= 2**63:  # no array has such a shape, empty or not
            raise ValueError(f"{name!r:.60} has shape {shape!r:.60}, which is too large")
    return TensorEntry(name, file, dtype, tuple(shape), start, stop)


def _counts(name: str, entry: Mapping[str, Any], key: str) -> list[int]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{name!r:.60} has {key} {value!r:.60}, not a list of integers of at least 0")
    return value


def read_headers(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """The tensors of all shards of a checkpoint.

    Raises:
      CheckpointError: as ``read_header``, and for a tensor that two shards hold.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name} is in both {tensors[name].file} and {file}; keep one of the two files"
                )
            tensors[name] = entry
    return tensors


def same_content(first: TensorEntry, second: TensorEntry, rows: int = 4096) -> bool:
    """Whether two tensors are equal, compared a few rows at a time."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    a, b = first.read(), second.read()
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


class SafetensorsWriter:
    """Writes float32 tensors of known shapes in order, holding one at a time.

    Args:
      file: where to; overwritten.
      shapes: name -> shape, in the order in which ``write`` will be called.
    """

    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
        offset = 0
        for name, shape in shapes.items():
            size = 4 * prod(shape)
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the data must start at a multiple of 8
        self._pending = dict(shapes)
        self._stream = file.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Append ``tensor``, which must be the next of ``shapes``."""
        expected, shape = next(iter(self._pending.items()))
        assert (name, tuple(tensor.shape)) == (expected, shape), f"{name} {tensor.shape}, not {expected} {shape}"
        del self._pending[name]
        self._stream.write(np.ascontiguousarray(tensor, dtype="<f4").data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stream.close()
        if kind is None:
            assert not self._pending, f"never written: {list(self._pending)}"
