"""Damaged headers of safetensors files give a CheckpointError, or the tensors that the library reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from specjax.checkpoint import CheckpointError
from specjax.checkpoint.weights import read_header

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.ones((0, 5), "f4"),
}
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F32", "shape": [0, 5], "data_offsets": [32, 32]},
}
DATA = b"".join(tensor.tobytes() for tensor in TENSORS.values())

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([2**31, 2**63, 2**64, 10**30, -(10**30)]),
    st.floats(), st.text(max_size=3), st.sampled_from(["F32", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "\ud800"]),
    st.lists(st.one_of(st.integers(-1, 40), st.booleans(), st.floats(), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
)  # fmt: skip


@st.composite
def headers(draw) -> str:
    """The header with one to three entries, or keys of entries, replaced or removed."""
    header = copy.deepcopy(HEADER)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*HEADER, "d", "\ud800"]))
        part, key = header, name
        if isinstance(header.get(name), dict) and draw(st.booleans()):
            part, key = header[name], draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
            if isinstance(part.get(key), list) and part[key] and draw(st.booleans()):
                part, key = part[key], draw(st.integers(0, len(part[key]) - 1))
        if isinstance(part, dict) and draw(st.integers(0, 4)) == 0:
            part.pop(key, None)
        else:
            # A copy: a later round may change what this one has put in.
            part[key] = copy.deepcopy(draw(st.one_of(ODD, st.sampled_from([HEADER["a"], HEADER["b"], HEADER["c"]]))))
    return json.dumps(header)


def write(folder: Path, header: bytes, data: bytes = DATA) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return file


def check(file: Path) -> None:
    try:
        tensors = {name: entry.read(integers=True) for name, entry in read_header(file).items()}
    except CheckpointError as error:
        if str(file) not in str(error).encode().decode():
            raise
        return
    with safe_open(file, "np") as opened:
        assert set(opened.keys()) == set(tensors)
        for name, tensor in tensors.items():
            if str(tensor.dtype).startswith(("bfloat16", "float8")):
                continue  # numpy has no such dtype
            expected = opened.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert tensor.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("headers")


def test_undamaged_file(folder):
    entries = read_header(write(folder, json.dumps(HEADER).encode()))
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(entries.pop(name).read(), tensor)
    assert not entries


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(headers())
@example(json.dumps(HEADER | {"c": HEADER["c"] | {"dtype": "F8_E4M3"}}))
def test_changed_parts(folder, header):
    check(write(folder, header.encode()))


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 4))
@example((2**63).to_bytes(8, "little") + b"{}", 0, 0)
@example(b"\x02" + bytes(7) + b"{}", 0, 0)
def test_changed_bytes(folder, data, at, removed):
    text = json.dumps(HEADER).encode()
    check(write(folder, text[:at] + data + text[at + removed :]))
    (folder / "any.safetensors").write_bytes(data)
    check(folder / "any.safetensors")


def changed(name: str, **parts) -> bytes:
    return json.dumps(HEADER | {name: HEADER[name] | parts}).encode()


@pytest.mark.parametrize(
    ("header", "message"),
    {
        "overlap": (changed("b", data_offsets=[20, 28]), "invalid offset for tensor `b`"),
        "twice": ((text := json.dumps(HEADER))[:-1].encode() + b", " + text[text.index('"c"') :].encode(), "twice"),
        "twice inside": (b'{"a": {"dtype": "F32", "dtype": "F16", "shape": []}}', "duplicate field"),
        "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    }.values(),
)  # fmt: skip
def test_messages(folder, header, message):
    with pytest.raises(CheckpointError, match=message):
        [entry.read() for entry in read_header(write(folder, header)).values()]
