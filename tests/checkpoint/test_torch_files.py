"""specjax.checkpoint.torch_files against torch, and against malicious and damaged files."""

from __future__ import annotations

import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from specjax.checkpoint import CheckpointError, torch_files
from specjax.checkpoint.torch_files import read_torch_file, write_torch_list

DTYPES = {
    torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16, torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16,
    torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip


def saved(folder: Path, value: Any, **options: Any) -> Path:
    file = folder / "x.bin"
    torch.save(value, file, **options)
    return file


def refused(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


# A pickle written opcode by opcode, in protocol 2.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def storage(kind: str, key: str, size: int) -> bytes:
    return b"(" + text("storage") + global_("torch", kind) + text(key) + text("cpu") + number(size) + b"tQ"


def tensor(stored: bytes, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    def items(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    rest = b"\x89" + global_("collections", "OrderedDict") + b")R"
    call = global_("torch._utils", "_rebuild_tensor_v2")
    return call + b"(" + stored + number(offset) + items(size) + items(stride) + rest + b"tR"


def crafted(folder: Path, program: bytes, members: dict[str, bytes] | None = None, compress: bool = False) -> Path:
    """A zip with the pickle ``program`` (without PROTO and STOP)."""
    file = folder / "crafted.bin"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program + b".")
        for name, content in ({"byteorder": b"little"} | (members or {})).items():
            archive.writestr(f"archive/{name}", content)
    return file


FLOATS = np.arange(6, dtype=np.float32)
SIX = {"data/0": FLOATS.tobytes()}


# Files that torch writes.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_read_as_views(tmp_path, dtype):
    value = (torch.arange(12) % 2 if dtype == torch.bool else torch.arange(12)).reshape(3, 4).to(dtype)
    read = read_torch_file(saved(tmp_path, {"a": value}))["a"]
    assert read.dtype == DTYPES[dtype] and read.shape == (3, 4)
    np.testing.assert_array_equal(np.float64(read), value.double().numpy())
    assert not read.flags.writeable
    base = read
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert base is not None


def test_strides_offsets_and_shared_storages(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": whole.T, "rows": whole[1:3], "every_other": whole[:, ::2], "corner": whole[2:, 3:].T,
        "expanded": torch.arange(3.0)[:, None].expand(3, 2), "scalar": torch.tensor(7.0), "empty": torch.zeros(0, 4),
    }  # fmt: skip
    file = saved(tmp_path, state)
    assert sum(name.startswith("x/data/") for name in zipfile.ZipFile(file).namelist()) == 4
    read = read_torch_file(file)
    assert list(read) == list(state)
    for name, value in state.items():
        assert read[name].shape == tuple(value.shape)
        np.testing.assert_array_equal(read[name], value.numpy())
    assert np.shares_memory(read["transposed"], read["rows"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_state_dict_of_a_module(tmp_path, protocol):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict(keep_vars=True)  # an OrderedDict of Parameters, with `_metadata`
    assert hasattr(state, "_metadata")
    read = read_torch_file(saved(tmp_path, state, pickle_protocol=protocol))
    assert type(read) is dict and list(read) == list(state)
    for name, value in state.items():
        np.testing.assert_array_equal(read[name], value.detach().numpy())


def test_plain_values_and_nesting(tmp_path):
    value = {"epoch": 3, "loss": 0.5, "name": "é", "none": None, "on": True, "big": 2**40, "size": torch.Size([2, 3]),
             "state": OrderedDict(a=[torch.ones(2), {"b": 1}]), "pair": (1, 2), (1, 2): 3}  # fmt: skip
    read = read_torch_file(saved(tmp_path, value))
    np.testing.assert_array_equal(read["state"]["a"].pop(0), [1, 1])
    assert read == value | {"size": [2, 3], "state": {"a": [{"b": 1}]}}
    assert read_torch_file(saved(tmp_path, [5, 0, 70000])) == [5, 0, 70000]
    np.testing.assert_array_equal(read_torch_file(saved(tmp_path, torch.arange(4))), np.arange(4))


def test_write_torch_list(tmp_path):
    for values in ([], [7], list(range(70000, 0, -1)), [2**31, 2**40, 255, 256, 65535, 65536]):
        file = tmp_path / "freq.pt"
        write_torch_list(file, values)
        read = torch.load(file, weights_only=True)
        assert type(read) is list and read == values == read_torch_file(file)
        assert all(type(value) is int for value in read)
    first = file.read_bytes()
    write_torch_list(file, values)
    assert file.read_bytes() == first


# Refused instructions, calls and objects.


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch harmed"), rf"{os.system.__module__}\.system"),
        ((eval, "1"), r"builtins\.eval"),
        ((getattr, os, "system"), r"builtins\.getattr"),
        ((np.frombuffer, "ab"), r"numpy[.\w]*\.frombuffer"),
        ((pickle.loads, "I1"), r"_?pickle\.loads"),
        ((torch.load, "x"), r"torch\.serialization\.load"),
        ((type, "x", (), {}), r"builtins\.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_calls_are_refused(tmp_path, monkeypatch, call, name, protocol):
    monkeypatch.chdir(tmp_path)
    if call[0] is getattr:  # a module cannot be pickled, but an attacker can name it
        file = crafted(tmp_path, global_("builtins", "getattr") + b"(" + global_("os", "path") + text("os") + b"tR")
    else:
        file = tmp_path / "x.bin"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x/data.pkl", pickle.dumps({"a": Calls(*call)}, protocol=protocol))
    message = refused(file)
    name = name.replace("builtins", "__builtin__") if protocol == 2 and "getattr" not in name else name
    assert re.search(rf"asks for {name}; allowed: collections\.OrderedDict, ", message), message
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.arange(3), r"numpy[.\w]+\._reconstruct"),
        ({1, 2}, "set"),
        (torch.float16, "torch.float16"),
        (torch.nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
        (torch.zeros(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_other_objects_are_refused(tmp_path, value, name):
    message = refused(saved(tmp_path, {"a": value}))
    assert re.search(rf"asks for [\w.]*{name}", message), message


STORED, BUILD = storage("FloatStorage", "0", 6), b"}" + text("array") + number(1) + b"sb"
ORDERED, SIZE, KIND = global_("collections", "OrderedDict"), global_("torch", "Size"), global_("torch", "FloatStorage")
# A tensor that repeats a number 2**59 times must not be expanded as arguments.
ENDLESS = tensor(STORED, 0, (2**31 - 1, 2**28), (0, 0))
ONE = (1,), (1,)
PROGRAMS: list[tuple[bytes, str]] = [
    # Instructions that no state dict needs.
    (b"(S'x'\nios\nsystem\n", "the instruction STRING"),
    (b"(" + text("x") + b"ios\nsystem\n", "the instruction INST"),
    (b"(" + ORDERED + b"o", "the instruction OBJ"),
    (ORDERED + b")\x81", "the instruction NEWOBJ"),
    (b"Pstorage\n", "the instruction PERSID"),
    (b"\x82\x01", "the instruction EXT1"),
    (b"0", "the instruction POP"),
    # Attributes and arguments.
    *((target + BUILD, "sets attributes of") for target in (STORED, tensor(STORED, 0, (2,), (1,)), KIND, SIZE)),
    (SIZE + b")R", "calls torch.Size with"),
    (KIND + number(5) + b"\x85R", "calls torch.FloatStorage"),
    (global_("torch._utils", "_rebuild_parameter") + b")R", "_rebuild_parameter"),
    (SIZE + ENDLESS + b"R", "calls torch.Size"),
    (SIZE + ENDLESS + b"\x85R", "calls torch.Size"),
    # Bounds of tensors.
    *((tensor(STORED, *bounds), "of storage 0, which has 6") for bounds in (
        (0, (7,), (1,)), (5, (2,), (1,)), (6, *ONE), (0, (2, 3), (4, 1)), (0, (2,), (6,)), (2**30, *ONE),
        (0, (2**31 - 1, 2**31 - 1), (1, 1)), (6, (), ()),
    )),
    *((tensor(STORED, *bounds), "not part of storage 0, which has 6") for bounds in (
        (-1, *ONE), (5, (2,), (-1,)), (0, (-2,), (1,)), (0, (2,), (1, 1)), (0, (1,) * 40, (1,) * 40),
        (0, (2**31 - 1,) * 3, (0, 0, 0)),
    )),
    # Storages.
    *((storage(kind, "0", size), f"data/0 has 24 bytes; {size} elements") for kind, size in (
        ("FloatStorage", 7), ("FloatStorage", 5), ("DoubleStorage", 6),
    )),
    (storage("FloatStorage", "0", -6), "a storage with key '0'"),
    (storage("FloatStorage", "1", 6), "has no member archive/data/1"),
    *((storage("FloatStorage", key, 6), "a storage with key") for key in ("../byteorder", "/etc/passwd", "0/../0", "")),
    (b"]" + STORED + b"a" + storage("IntStorage", "0", 6) + b"a", "used as float32 and as int32"),
    (b"(" + text("module") + number(1) + b"tQ", "not a storage: ('module'"),
    (number(3) + b"Q", "not a storage: 3"),
    # Broken pickles.
    *((program, "damaged") for program in (b"", b"t", b"K", b"s", b"X\xff\xff\xff\x7fa", b"(((", b"R")),
]  # fmt: skip


@pytest.mark.parametrize(("program", "message"), PROGRAMS)
def test_refused_programs(tmp_path, program, message):
    assert message in refused(crafted(tmp_path, program, SIX))


def test_replaced_types_stay_unchanged(tmp_path):
    refused(crafted(tmp_path, ORDERED + BUILD, SIX))
    np.testing.assert_array_equal(read_torch_file(crafted(tmp_path, tensor(STORED, 0, (2,), (1,)), SIX)), [0, 1])


# Files of other formats.


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_damaged_and_foreign_files(tmp_path):
    file = saved(tmp_path, {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    message = refused(file)
    assert "before version 1.6" in message and "torch.save(torch.load(FILE" in message
    file = saved(tmp_path, {"a": torch.ones(2000)})
    whole = file.read_bytes()
    for content, message in (
        *((whole[:length], "damaged") for length in (len(whole) - 1, len(whole) // 2, 100)),
        (b"", "starts with b''"),
        (b"<html>not found</html>", "starts with b'<html>no'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ):
        file.write_bytes(content)
        assert message in refused(file)
    pickled = b"\x80\x02]."
    for members, message in (
        ([("readme", b"no pickle")], "0 members <name>/data.pkl"),
        ([("a/data.pkl", pickled), ("b/data.pkl", pickled)], "2 members <name>/data.pkl"),
        ([("a/data.pkl", pickled), *[("a/byteorder", b"little")] * 2], "two of its members have one name"),
        ([("a/data.pkl", pickled), ("a/byteorder", b"big")], "byte order is 'big'; only 'little'"),
    ):
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members:
                archive.writestr(name, content)
        assert message in refused(file)
    assert "has compressed members" in refused(crafted(tmp_path, tensor(STORED, 0, *ONE), SIX, compress=True))


def test_memory_is_bounded_by_the_pickle(tmp_path, monkeypatch):
    tracemalloc.start()
    assert read_torch_file(crafted(tmp_path, b"]r\xff\xff\xff\xff")) == []
    read_torch_file(crafted(tmp_path, b"\x95" + struct.pack("<Q", 1 << 40) + b"]"))
    refused(crafted(tmp_path, b"X\xff\xff\xff\x7fa"))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    itself = read_torch_file(crafted(tmp_path, b"]q\x00h\x00a"))
    assert itself[0] is itself
    # Ten lists, each ten times in the next: ten objects, or 10**10 if they were copied.
    lists = b"]q\x00" + b"".join(b"]q" + bytes([i]) + (b"h" + bytes([i - 1]) + b"a") * 10 for i in range(1, 11))
    read = read_torch_file(crafted(tmp_path, b"](" + lists + b"e"))[10]
    assert len(read) == 10 and read[0] is read[9]
    monkeypatch.setattr(torch_files, "_MAX_PICKLE", 10)
    assert "at most 10 are read" in refused(crafted(tmp_path, b"]" * 30 + b"a" * 29))
