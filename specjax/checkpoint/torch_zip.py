"""Reading what ``torch.save`` writes (``.bin``, ``.pt``) without torch, and without running anything the file says.

A pickle is a program. This one may call a few names, which are ours, and use the instructions that dicts, lists and
tensors need; all else is refused by name. Tensors are views of the memory-mapped file, as from ``readers``.

The format: a zip of ``<prefix>/data.pkl``, the pickle, and ``<prefix>/data/<key>``, one member for each storage,
stored uncompressed; tensors are (storage, offset, sizes, strides). Knows nothing of models. Does not check the zip's
CRC of mapped members: that would read a file of gigabytes twice.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.errors import CheckpointError, listed

STORAGES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_STORAGE_NAMES = frozenset(f"torch.{name}" for name in STORAGES)
_NAMES = _STORAGE_NAMES | {
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.Size",
}
# What torch.save and pickle write for dicts, lists, numbers, strings and tensors, protocols 2 to 5. BUILD is among
# them for the `_metadata` of a module's state dict; nothing that it could change is ever on the stack.
_OPCODES = re.compile(
    "PROTO|FRAME|STOP|MARK|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|SETITEMS?|APPENDS?|(LONG_)?BIN(PUT|GET)|MEMOIZE|"
    "BININT[12]?|LONG1|BINFLOAT|NEWTRUE|NEWFALSE|NONE|(SHORT_)?BINUNICODE|(STACK_)?GLOBAL|REDUCE|BINPERSID|BUILD"
)
# A state dict's pickle takes some 200 bytes a tensor, a token map's 5 a token.
_MAX_PICKLE = 64 << 20
# torch never compresses; more than this in memory is more likely a bomb than a checkpoint.
_MAX_COMPRESSED = 1 << 30
_MAX_DEPTH = 16
_MAX_RANK = 32


class _Refused(Exception):
    """Carries a message to where the file's name is known."""


class _Forbidden(_Refused):
    """The pickle asks for what no checkpoint needs: nobody should be told how to load it anyway."""


class _Dict(dict):
    """Stands in for OrderedDict; attributes, such as torch's ``_metadata``, are dropped."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _Sealed:
    """What the pickle holds of ours cannot be changed by it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise _Refused(f"it sets attributes of a {type(self).__name__.strip('_').lower()}")


class _Name(_Sealed):
    """A name of the allow-list: a storage type, or a function that the pickle may call."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *given: Any) -> Any:
        if self.name == "torch._utils._rebuild_tensor_v2":
            return _tensor(*given)
        if self.name == "torch._utils._rebuild_parameter" and given and isinstance(given[0], _Tensor):
            return given[0]
        if self.name == "torch.Size" and len(given) == 1 and isinstance(given[0], (tuple, list)):
            return list(given[0])
        raise _Refused(f"it calls {self.name} with {len(given)} arguments of the wrong kinds")


class _Storage(_Sealed):
    __slots__ = ("array", "key")

    def __init__(self, key: str, array: np.ndarray) -> None:
        self.key, self.array = key, array


class _Tensor(_Sealed):
    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def read_torch_zip(file: Path) -> Any:
    """The object that ``torch.save`` wrote to ``file``.

    Returns:
      Dicts, lists, numbers and strings as they are; tensors (and parameters) as read-only numpy arrays that are views
      of the mapped file, bfloat16 as ``ml_dtypes.bfloat16``.

    Raises:
      CheckpointError: the file is not such a zip, is damaged, or holds something else than those; the message says
        what, and how to convert it.
    """
    try:
        with zipfile.ZipFile(_checked(file)) as archive:
            source = _Archive(file, archive)
            program = source.program()
            _check_program(program)
            return _plain(_Unpickler(program, source).load(), {}, 0)
    except _Forbidden as error:
        raise CheckpointError(
            f"{file} is refused: {error}. A file of tensors alone asks for nothing else; get one from its author, or "
            "the same as safetensors"
        ) from None
    except _Refused as error:
        raise CheckpointError(f"{file} is refused: {error}. {_conversion(file)}") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle or zip can end in nearly any of them
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"{file} is damaged or not a file of torch.save ({reason}); download or copy it again"
        ) from error


def write_torch_zip_list(file: Path, values: list[int]) -> None:
    """Write ``values`` as ``torch.save`` would: ``torch.load(file, weights_only=True)`` gives the list back."""
    members = {"data.pkl": pickle.dumps(values, protocol=2), "byteorder": b"little"}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {**members, "version": b"3\n"}.items():
            # A fixed date, so that the same list gives the same bytes.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0)), content)


def _conversion(file: Path) -> str:
    """A command for a shell, so with no name in it that a shell or Python would read as more than a name."""
    plain = re.fullmatch(r"[\w .+-]+", file.name) is not None
    name, stem = (file.name, file.stem) if plain else ("FILE", "FILE")
    load = f"torch.load('{name}', map_location='cpu', weights_only=True)"
    if file.suffix == ".pt":  # a token map, not a checkpoint
        write = f"pathlib.Path('{stem}.json').write_text(json.dumps(torch.as_tensor({load}).tolist()))"
        program = f"import json, pathlib, torch; {write}"
    else:
        state = f"{{name: tensor.clone().contiguous() for name, tensor in {load}.items()}}"
        program = f"import torch; from safetensors.torch import save_file; save_file({state}, 'model.safetensors')"
    return f'Where torch is installed, convert it once: python -c "{program}"'


def _checked(file: Path) -> Path:
    with file.open("rb") as stream:
        start = stream.read(16)
    if start.startswith(b"PK\x03\x04"):
        return file
    if start.startswith(b"version https://"):
        raise CheckpointError(f"{file} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")
    if start.startswith(b"\x80"):
        raise _Refused("it has the format that torch.save wrote before version 1.6, one pickle without a zip")
    raise CheckpointError(
        f"{file} is not a file of torch.save: it starts with {start[:8]!r} and not with b'PK\\x03\\x04'; download or "
        "copy it again"
    )


class _Archive:
    """The members of one file, by their part: the pickle, and storages as arrays."""

    def __init__(self, file: Path, archive: zipfile.ZipFile) -> None:
        self._file, self._archive = file, archive
        names = [info.filename for info in archive.infolist()]
        if len(set(names)) != len(names):
            raise _Refused("two of its members have one name")
        pickles = [name for name in names if re.fullmatch(r"[^/\\]+/data\.pkl", name)]
        if len(pickles) != 1:
            raise _Refused(f"it has {len(pickles)} members <name>/data.pkl, and one is needed")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._members = {info.filename: info for info in archive.infolist()}
        self._storages: dict[str, np.ndarray] = {}
        self._compressed = 0
        order = self._members.get(self._prefix + "byteorder")
        if order is not None and (found := self._read(order, 16)) != b"little":
            raise _Refused(f"its byte order is {found.decode(errors='replace')!r}; only 'little' is read")

    def program(self) -> bytes:
        return self._read(self._members[self._prefix + "data.pkl"], _MAX_PICKLE)

    def storage(self, key: str, dtype: np.dtype, size: int) -> np.ndarray:
        """Storage ``key``, ``size`` elements of ``dtype``; the same array each time."""
        name = f"{self._prefix}data/{key}"
        if size == 0:
            return np.empty(0, dtype)
        if (info := self._members.get(name)) is None:
            raise _Refused(f"it has no member {name}")
        if size * dtype.itemsize != info.file_size:
            raise _Refused(f"{name} has {info.file_size} bytes, and {size} elements of {dtype} take another number")
        if key not in self._storages:
            self._storages[key] = self._load(info, dtype, size)
        if self._storages[key].dtype != dtype:
            raise _Refused(f"{name} is used as {self._storages[key].dtype} and as {dtype}")
        return self._storages[key]

    def _load(self, info: zipfile.ZipInfo, dtype: np.dtype, size: int) -> np.ndarray:
        if info.compress_type != zipfile.ZIP_STORED:
            self._compressed += info.file_size
            if self._compressed > _MAX_COMPRESSED:
                raise _Refused(f"its compressed members take more than {_MAX_COMPRESSED} bytes")
            return np.frombuffer(self._read(info, info.file_size), dtype)
        # The length of the name and of the padding before the data are in the header before the member itself.
        with self._file.open("rb") as stream:
            stream.seek(info.header_offset)
            header = stream.read(30)
            end = stream.seek(0, io.SEEK_END)
        start = (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )
        if header[:4] != b"PK\x03\x04" or info.flag_bits & 1 or start + info.file_size > end:
            raise _Refused(f"{info.filename} is not at its place, or encrypted")
        # One mapping per storage: its pages can be reclaimed as soon as the caller has copied them.
        return np.memmap(self._file, dtype, "r", start, (size,))

    def _read(self, info: zipfile.ZipInfo, limit: int) -> bytes:
        if info.file_size > limit:
            raise _Refused(f"{info.filename} has {info.file_size} bytes, at most {limit} are read")
        with self._archive.open(info) as stream:
            content = stream.read(limit + 1)
        if len(content) != info.file_size:
            raise _Refused(f"{info.filename} has another size than the zip's directory says")
        return content


class _Unpickler(pickle.Unpickler):
    def __init__(self, program: bytes, source: _Archive) -> None:
        super().__init__(io.BytesIO(program))
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        _check_name(full)
        return _Dict if full == "collections.OrderedDict" else _Name(full)

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", _Name(name=kind), str(key), _, int(size)) if kind in _STORAGE_NAMES:
                if not re.fullmatch(r"[0-9A-Za-z_]+", key) or size < 0:
                    raise _Refused(f"it has a storage with key {key[:40]!r} and {size} elements")
                return _Storage(key, self._source.storage(key, STORAGES[kind.removeprefix("torch.")], size))
        raise _Refused(f"it refers to something that is not a storage: {str(pid)[:80]}")


def _check_name(full: str) -> None:
    if full not in _NAMES:
        raise _Forbidden(
            f"its pickle asks for {full}, and what it may ask for is {listed(_NAMES - _STORAGE_NAMES)} and "
            f"torch.<type>Storage with type {', '.join(name.removesuffix('Storage') for name in STORAGES)}"
        )


def _check_program(program: bytes) -> None:
    """Refuse names and instructions that no state dict needs, before any is carried out."""
    strange = None
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in ("GLOBAL", "INST"):
            _check_name(str(argument).replace(" ", "."))  # pickletools has put a space between module and name
        if not _OPCODES.fullmatch(opcode.name):
            strange = strange or opcode.name  # a name, if one follows, says more
        # The C unpickler allocates a memo, and a frame, as long as these say.
        if opcode.name in ("LONG_BINPUT", "FRAME") and int(argument or 0) > len(program):
            raise _Refused(f"its pickle uses {opcode.name} with {argument}")
    if strange is not None:
        raise _Refused(f"its pickle uses the instruction {strange}, which no state dict needs")


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> _Tensor:
    """``torch._utils._rebuild_tensor_v2``: a view of a storage, never reaching outside it."""
    whole = isinstance(storage, _Storage) and type(size) in (tuple, list) and type(stride) in (tuple, list)
    if not whole or not all(type(value) is int and value >= 0 for value in (offset, *size, *stride)):
        raise _Refused("it has a tensor whose storage, offset, size or stride is of the wrong kind")
    if len(size) != len(stride) or len(size) > _MAX_RANK or metadata:
        raise _Refused(f"it has a tensor of size {list(size)[:8]} and stride {list(stride)[:8]}, metadata {metadata}")
    array = storage.array
    if 0 in size:
        return _Tensor(np.empty(size, array.dtype))
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if last >= len(array):
        raise _Refused(
            f"a tensor of size {list(size)}, stride {list(stride)} and offset {offset} reaches element {last} of "
            f"storage {storage.key}, which has {len(array)}"
        )
    steps = tuple(step * array.itemsize for step in stride)
    return _Tensor(np.lib.stride_tricks.as_strided(array[offset:], size, steps, writeable=False))


def _plain(value: Any, done: dict[int, Any], depth: int) -> Any:
    """``value`` with arrays for tensors; ``done`` is what was seen, by id: a pickle can share and nest without end."""
    if isinstance(value, _Tensor):
        return value.array
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) not in (dict, _Dict, list):
        kind = type(value).__name__.strip("_").lower()
        raise _Refused(f"it holds a {kind}, and only dicts, lists, numbers, strings and tensors are read")
    if depth == _MAX_DEPTH:
        raise _Refused(f"its dicts and lists are nested more than {_MAX_DEPTH} deep")
    if id(value) not in done:
        if isinstance(value, dict):
            if wrong := [key for key in value if type(key) not in (str, int)]:
                raise _Refused(f"it has a dict with keys that are no strings: {listed(map(repr, wrong), 3)}")
            done[id(value)] = {key: _plain(item, done, depth + 1) for key, item in value.items()}
        else:
            done[id(value)] = [_plain(item, done, depth + 1) for item in value]
    return done[id(value)]
