"""Files of ``torch.save`` (``.bin``, ``.pt``), read without torch and without running code of the file.

A pickle is a program. This reader allows the instructions in ``_OPCODES``, four functions and the storage types, and
refuses others by name. It restricts the standard library's unpickler in Python, whose memory is bounded by the pickle's
length. The file is a zip of ``<prefix>/data.pkl``, the pickle, and ``<prefix>/data/<key>``, a member for each storage.
CRCs of storages, which can have gigabytes, are not checked.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import reprlib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import ml_dtypes
import numpy as np

from specjax.checkpoint.files import CheckpointError, listed

STORAGES: dict[str, np.dtype] = {
    f"torch.{name}Storage": np.dtype(kind)
    for name, kind in {
        "Double": "<f8", "Float": "<f4", "Half": "<f2", "BFloat16": ml_dtypes.bfloat16,
        "Long": "<i8", "Int": "<i4", "Short": "<i2", "Char": "i1", "Byte": "u1", "Bool": "?",
    }.items()
}  # fmt: skip
# Written for dicts, lists, numbers, strings and tensors, by protocols 2 to 5.
_OPCODES = re.compile(
    "PROTO|FRAME|STOP|MARK|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|SETITEMS?|APPENDS?|(LONG_)?BIN(PUT|GET)|MEMOIZE|"
    "BININT[12]?|LONG1|BINFLOAT|NEWTRUE|NEWFALSE|NONE|(SHORT_)?BINUNICODE|(STACK_)?GLOBAL|REDUCE|BINPERSID|BUILD"
)
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_FUNCTIONS = (
    "collections.OrderedDict", "torch.Size", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
)  # fmt: skip
_MAX_PICKLE = 64 << 20  # bytes; a state dict has about 200 a tensor, a token map 5 a token


class _Refused(Exception):
    """Its message lacks the file's name."""


def read_torch_file(file: Path) -> object:
    """The object in ``file``: dicts, lists, tuples, numbers, strings, and tensors as read-only views of the mapped file
    (bfloat16 as ``ml_dtypes.bfloat16``). Containers may be nested deeply, and may contain themselves."""
    with file.open("rb") as stream:
        start = stream.read(16)
    if start.startswith(b"version https://"):
        raise CheckpointError(f"{file} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")
    if start.startswith(b"\x80"):
        convert = "torch.save(torch.load(FILE, map_location='cpu', weights_only=True), FILE)"
        raise CheckpointError(f"{file} has the format of torch before version 1.6; convert it with torch: {convert}")
    if not start.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{file} is not a file of torch.save: it starts with {start[:8]!r}")
    try:
        with zipfile.ZipFile(file) as archive:
            return _Unpickler(file, archive).load()
    except _Refused as error:
        raise CheckpointError(f"{file} is refused: {error}. Get a file of tensors alone, or safetensors") from None
    except Exception as error:  # damaged pickles and zips raise errors of many kinds
        raise CheckpointError(f"{file} is damaged or not a file of torch.save ({error!r:.300})") from error


def write_torch_list(file: Path, values: list[int]) -> None:
    """Write ``values`` in the format of ``torch.save``; ``torch.load(file, weights_only=True)`` reads it."""
    members = {"data.pkl": pickle.dumps(values, protocol=2), "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            # With a fixed date, equal lists give equal bytes.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0)), content)


@dataclass(frozen=True)
class _Name:
    name: str  # an allowed storage type or function


@dataclass(frozen=True)
class _Storage:
    key: str
    array: np.ndarray


def _tensor(storage: _Storage, offset: object, size: Sequence[object], stride: Sequence[object]) -> np.ndarray:
    """``torch._utils._rebuild_tensor_v2``: a view of a storage, within its bounds."""
    array, numbers = storage.array, (offset, *size, *stride)
    try:
        if len(size) > 32 or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("wrong numbers")
        at, sizes, steps = cast(int, offset), cast(list[int], size), cast(list[int], stride)
        if 0 in sizes:
            return np.empty(sizes, array.dtype)
        in_bytes = [step * array.itemsize for step in steps]
        return np.ndarray(sizes, array.dtype, array, at * array.itemsize, in_bytes)  # checks the bounds
    except ValueError as error:
        place = f"a tensor of size {size[:8]}, stride {stride[:8]} and offset {offset!r:.80}"
        raise _Refused(f"{place} is not part of storage {storage.key}, which has {len(array)} elements") from error


class _Instructions(dict[int, Callable[..., None]]):
    def __missing__(self, code: int) -> Callable[..., None]:
        raise _Refused(f"its pickle uses the instruction {_NAMES.get(code, code)}, which no state dict needs")


def _reduce(unpickler: _Unpickler) -> None:
    """REDUCE: call an allowed function after checking the types of its arguments."""
    arguments, function = unpickler.stack.pop(), unpickler.stack.pop()
    name = function.name if isinstance(function, _Name) else type(function).__name__
    match name, arguments:
        case "collections.OrderedDict", ():
            result: object = {}
        case "torch.Size", (tuple() | list() as sizes,):
            result = list(sizes)
        case "torch._utils._rebuild_parameter", (np.ndarray() as result, *_):
            pass
        case "torch._utils._rebuild_tensor_v2", (
            _Storage() as storage, offset, tuple() | list() as size, tuple() | list() as stride, _, _, *metadata
        ) if not any(metadata):  # fmt: skip
            result = _tensor(storage, offset, size, stride)
        case _:
            raise _Refused(f"it calls {name} with arguments of the wrong kinds")
    unpickler.stack.append(result)


def _build(unpickler: _Unpickler) -> None:
    """BUILD, which torch writes for the ``_metadata`` of a state dict: drop the attributes."""
    unpickler.stack.pop()
    if type(target := unpickler.stack[-1]) is not dict:
        raise _Refused(f"it sets attributes of a {type(target).__name__.strip('_').lower()}")


class _Unpickler(pickle._Unpickler):
    stack: list[object]
    dispatch = _Instructions(
        {code: pickle._Unpickler.dispatch[code] for code, name in _NAMES.items() if _OPCODES.fullmatch(name)}
        | {ord("R"): _reduce, ord("b"): _build}
    )

    def __init__(self, file: Path, archive: zipfile.ZipFile) -> None:
        members = {info.filename: info for info in archive.infolist()}
        if len(members) != len(archive.infolist()):
            raise _Refused("two of its members have one name")
        if any(info.compress_type for info in members.values()):
            raise _Refused("it has compressed members, which torch never writes")
        pickles = [name for name in members if re.fullmatch(r"[^/\\]+/data\.pkl", name)]
        if len(pickles) != 1:
            raise _Refused(f"it has {len(pickles)} members <name>/data.pkl; exactly one is needed")
        prefix = pickles[0].removesuffix("data.pkl")
        for name, limit in ((f"{prefix}byteorder", 16), (pickles[0], _MAX_PICKLE)):
            if name in members and (size := members[name].file_size) > limit:
                raise _Refused(f"{name} has {size} bytes, at most {limit} are read")
        if f"{prefix}byteorder" in members and (order := archive.read(f"{prefix}byteorder")) != b"little":
            raise _Refused(f"its byte order is {order.decode(errors='replace')!r}; only 'little' is read")
        self._file, self._archive, self._prefix, self._members = file, archive, prefix, members
        self._arrays: dict[str, np.ndarray] = {}
        super().__init__(io.BytesIO(archive.read(pickles[0])))

    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full not in (*_FUNCTIONS, *STORAGES):
            types = ", ".join(kind[6:-7] for kind in STORAGES)
            allowed = f"{listed(_FUNCTIONS)} and torch.<type>Storage with type {types}"
            raise _Refused(f"its pickle asks for {full}; allowed: {allowed}")
        return _Name(full)

    def persistent_load(self, pid: object) -> _Storage:
        match pid:
            case ("storage", _Name(name), str(key), _, int(size)) if name in STORAGES:
                if not re.fullmatch(r"[0-9A-Za-z_]+", key) or size < 0:
                    raise _Refused(f"it has a storage with key {key[:40]!r} and {size} elements")
                return _Storage(key, self._storage(f"{self._prefix}data/{key}", STORAGES[name], size))
        raise _Refused(f"it refers to something that is not a storage: {reprlib.repr(pid)}")

    def _storage(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        """The member ``name`` as ``size`` elements of ``dtype``, mapped once."""
        if size == 0:
            return np.empty(0, dtype)
        if (info := self._members.get(name)) is None:
            raise _Refused(f"it has no member {name}")
        if size * dtype.itemsize != info.file_size:
            raise _Refused(f"{name} has {info.file_size} bytes; {size} elements of {dtype} have another size")
        if name not in self._arrays:
            self._arrays[name] = self._mapped(info, dtype)
        if self._arrays[name].dtype != dtype:
            raise _Refused(f"{name} is used as {self._arrays[name].dtype} and as {dtype}")
        return self._arrays[name]

    def _mapped(self, info: zipfile.ZipInfo, dtype: np.dtype) -> np.ndarray:
        with self._archive.open(info), self._file.open("rb") as file:  # the archive checks the member's header
            file.seek(info.header_offset + 26)
            lengths = np.frombuffer(file.read(4), "<u2")  # of the name, and of the padding before the data
        # One mapping a storage, whose pages can be reclaimed after copying.
        start = info.header_offset + 30 + int(lengths.sum())
        return np.memmap(self._file, dtype, "r", start, (info.file_size // dtype.itemsize,))
