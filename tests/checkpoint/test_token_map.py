"""read_token_map: every format, every refusal, and the maps that come with specjax."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoint import CheckpointError, read_token_map, token_map
from specjax.checkpoint.token_map import fingerprint, shipped_maps
from specjax.checkpoint.torch_files import write_torch_list

IDS = [7, 0, 29, 3]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(folder: Path, suffix: str, value: Any) -> str:
    from safetensors.numpy import save_file

    file = folder / f"map{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps(value))
    elif suffix == ".npy":
        np.save(file, np.asarray(value))
    elif suffix == ".safetensors":
        save_file(value if isinstance(value, dict) else {"ids": np.asarray(value)}, file)
    else:
        import torch

        torch.save(value, file)
    return str(file)


def refused(given: str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_token_map(given, **({"vocab_size": 30} | options))
    assert str(caught.value).startswith(f"{given}: ")
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".json", ".npy", ".safetensors"])
def test_files(tmp_path, suffix):
    ids = read_token_map(write(tmp_path, suffix, IDS), vocab_size=30)
    assert ids.dtype == np.int32 and ids.tolist() == IDS


def test_other_contents_of_the_same_formats(tmp_path):
    import torch

    assert read_token_map(write(tmp_path, ".pt", torch.tensor(IDS)), vocab_size=30).tolist() == IDS
    for dtype in (np.int64, np.int32, np.int16, np.uint8, np.int8):
        assert read_token_map(write(tmp_path, ".npy", np.array(IDS, dtype)), vocab_size=30).tolist() == IDS
        assert read_token_map(write(tmp_path, ".safetensors", np.array(IDS, dtype)), vocab_size=30).tolist() == IDS
    for dtype in (np.uint16, np.uint32, np.uint64):
        assert read_token_map(write(tmp_path, ".safetensors", np.array(IDS, dtype)), vocab_size=30).tolist() == IDS
    several = {"token_map": np.array(IDS), "counts": np.array([4, 3])}
    assert read_token_map(write(tmp_path, ".safetensors", several), vocab_size=30).tolist() == IDS
    assert read_token_map(write(tmp_path, ".json", [5]), vocab_size=30).tolist() == [5]
    file = tmp_path / "ours.pt"
    write_torch_list(file, IDS)
    assert read_token_map(str(file), vocab_size=30).tolist() == IDS


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        (".json", [], r"it holds \[\]; a list or a tensor of token ids is needed"),
        (".json", [1, 2.0], r"it holds \[1, 2.0\]; a list"),
        (".json", [True, False], r"it holds \[True, False\]; a list"),
        (".json", [1, "2"], r"it holds \[1, '2'\]; a list"),
        (".json", [[1, 2], [3, 4]], r"it holds \[\[1, 2\], \[3, 4\]\]; a list"),
        (".json", [[1, 2], 3], r"it holds \[\[1, 2\], 3\]; a list"),
        (".json", {"ids": [1]}, "it holds {'ids': \\[1\\]}; a list"),
        (".json", [1, 30, 40], r"entry 1 is 30, outside the target's vocabulary 0\.\.29"),
        (".json", [1, -1], r"entry 1 is -1, outside the target's vocabulary 0\.\.29"),
        (".json", [2**80], "entry 0 is 1208925819614629174706176, outside"),
        (".json", [4, 5, 6, 5, 4], "ids must differ; repeated: 4, 5"),
        (".pt", [1, 31], "entry 1 is 31, outside"),
        (".pt", {"a": 1}, "it holds {'a': 1}"),
        (".npy", [[1, 2]], r"it holds array\(\[\[1, 2\]\]\)"),
        (".npy", 3, r"it holds array\(3\)"),
        (".npy", [1.0, 2.0], r"it holds array\(\[1\., 2\.\]\)"),
        (".npy", [True, False], r"it holds array\(\[ True, False\]\)"),
        (".npy", np.array([3, 300, 2]), "entry 1 is 300, outside"),
        (".npy", np.array([3, 9, 9]), "ids must differ; repeated: 9"),
        (".npy", np.array([], np.int64), r"it holds array\(\[\]"),
        (".npy", np.array([1, 2**63], np.uint64), "entry 1 is 9223372036854775808, outside"),
        (
            ".safetensors",
            {"a": np.array([1]), "b": np.array([2])},
            "holds the tensors a, b; one is needed, or one named",
        ),
        (".safetensors", np.array([1.0]), r"it holds array\(\[1\.\]\)"),
    ],
)
def test_refused_contents(tmp_path, suffix, value, message):
    given = write(tmp_path, suffix, value)
    assert re.search(message, refused(given))


def test_refused_files(tmp_path):
    assert "neither a number nor a file of a known format: .pt, .safetensors, .npy, .json" in refused("frequent")
    assert "neither a number" in refused("-3")
    assert "there is no such file" in refused("map.pt")
    assert "there is no such file" in refused("./maps/map.pt")
    assert "there is no such file" in refused(str(tmp_path / "map.npy"))
    for suffix in (".npy", ".json", ".safetensors", ".pt"):
        file = tmp_path / f"bad{suffix}"
        file.write_bytes(b"[1, 2")
        assert str(file) in refused(str(file))
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    assert "cannot be read" in refused(str(objects))


def test_hub(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repository: str, file: str, **options: Any) -> str:
        asked.append((repository, file))
        return write(tmp_path, ".pt", IDS)

    assert re.search("no such file, and the .* hub gave no freq_8.pt of 'org/repo'", refused("org/repo/freq_8.pt"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for given in ("org/repo/freq_8.pt", "repo/freq_8.pt", "org/repo/maps/freq_8.pt"):
        assert read_token_map(given, vocab_size=30).tolist() == IDS
    assert asked == [("org/repo", "freq_8.pt"), ("repo", "freq_8.pt"), ("org/repo", "maps/freq_8.pt")]


# The maps that come with specjax.

TOKENS = [f"t{i}" for i in range(30)]


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "tiny-token-map.npy", np.array([4, 9, 1, 0], np.uint16))
    mark = hashlib.sha256("\0".join(TOKENS).encode("utf-8")).hexdigest()
    (folder / "tiny.json").write_text(json.dumps({"fingerprint": mark, "file": "tiny-token-map.npy", "model": "x"}))
    (folder / "README.md").write_text("about")
    (folder / "other.json").write_text("[]")
    monkeypatch.setattr(token_map, "FOLDER", folder)
    return folder


def test_numbers(data):
    assert [found.name for found in shipped_maps()] == ["tiny"]
    assert fingerprint(TOKENS) == shipped_maps()[0].fingerprint
    for count in (1, 2, 4):
        ids = read_token_map(str(count), vocab_size=30, tokens=lambda: TOKENS)
        assert ids.dtype == np.int32 and ids.tolist() == [4, 9, 1, 0][:count]
    for count in ("0", "5"):
        message = refused(count, tokens=lambda: TOKENS)
        assert f"{count} is not in 1..4, the ids in the map of tiny" in message
    assert "entry 1 is 9, outside" in refused("2", vocab_size=9, tokens=lambda: TOKENS)


def test_numbers_need_the_vocabulary_of_the_map(data):
    for tokens in (None, lambda: TOKENS[:-1], lambda: [*TOKENS[:-1], "t30"], lambda: TOKENS[::-1]):
        message = refused("2", tokens=tokens)
        assert "needs a model with the vocabulary of a map that comes with specjax (tiny)" in message
        assert "give a file (.pt, .safetensors, .npy, .json)" in message
        assert "specjax train vocab" in message


def test_no_maps_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(token_map, "FOLDER", tmp_path / "absent")
    assert shipped_maps() == ()
    assert "(there is none)" in refused("2", tokens=lambda: TOKENS)


def test_the_data_folder_is_the_packages():
    assert str(token_map.FOLDER).endswith("specjax/data")
    for found in shipped_maps():
        ids = np.load(found.file)
        assert re.fullmatch("[0-9a-f]{64}", found.fingerprint)
        assert ids.ndim == 1 and len(np.unique(ids)) == len(ids) and ids.dtype.kind in "iu"


def test_files_that_ask_for_too_much(tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert "cannot be read" in refused(str(deep))
    huge = tmp_path / "huge.npy"
    with huge.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**15,)})
    assert "cannot be read" in refused(str(huge))
