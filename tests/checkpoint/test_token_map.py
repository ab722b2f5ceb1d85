"""read_token_map: formats, refusals, and the maps that come with specjax."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoint import CheckpointError, read_token_map, token_map
from specjax.checkpoint.token_map import fingerprint
from specjax.checkpoint.torch_files import write_torch_list

IDS = [7, 0, 29, 3]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(folder: Path, suffix: str, value: Any) -> str:
    file = folder / f"map{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps(value))
    else:
        import torch

        torch.save(value, file)
    return str(file)


def refused(name: str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_token_map(name, **({"vocab_size": 30} | options))
    assert str(caught.value).startswith(f"{name}: ")
    return str(caught.value)


def test_formats(tmp_path):
    import torch

    for suffix, value in (
        (".json", IDS),
        (".pt", IDS),
        (".pt", torch.tensor(IDS)),
        (".pt", torch.tensor(IDS, dtype=torch.int8)),
    ):
        ids = read_token_map(write(tmp_path, suffix, value), vocab_size=30)
        assert ids.dtype == np.int32 and ids.tolist() == IDS
    write_torch_list(tmp_path / "ours.pt", IDS)
    assert read_token_map(str(tmp_path / "ours.pt"), vocab_size=30).tolist() == IDS


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
    ],
)
def test_refused_contents(tmp_path, suffix, value, message):
    assert re.search(message, refused(write(tmp_path, suffix, value)))


def test_refused_files(tmp_path):
    assert "neither a number nor a file of a known format: .pt, .json" in refused("frequent")
    assert "neither a number" in refused("-3")
    for name in ("map.pt", "./maps/map.pt", str(tmp_path / "map.json")):
        assert "there is no such file" in refused(name)
    for suffix in (".json", ".pt"):
        file = tmp_path / f"bad{suffix}"
        file.write_bytes(b"[1, 2")
        assert str(file) in refused(str(file))
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert "cannot be read" in refused(str(deep))


def test_hub(tmp_path, monkeypatch):
    import huggingface_hub

    requests = []

    def download(repository: str, file: str, **options: Any) -> str:
        requests.append((repository, file))
        return write(tmp_path, ".pt", IDS)

    assert re.search("no such file, and the .* hub gave no freq_8.pt of 'org/repo'", refused("org/repo/freq_8.pt"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for name in ("org/repo/freq_8.pt", "repo/freq_8.pt", "org/repo/maps/freq_8.pt"):
        assert read_token_map(name, vocab_size=30).tolist() == IDS
    assert requests == [("org/repo", "freq_8.pt"), ("repo", "freq_8.pt"), ("org/repo", "maps/freq_8.pt")]


# The map that comes with specjax.

TOKENS = [f"t{i}" for i in range(30)]


def test_numbers(tmp_path, monkeypatch):
    np.save(tmp_path / "tiny.npy", np.array([4, 9, 1, 0], np.uint16))
    digest = hashlib.sha256("\0".join(TOKENS).encode("utf-8")).hexdigest()
    (tmp_path / "smollm2.json").write_text(json.dumps({"fingerprint": digest, "file": "tiny.npy"}))
    monkeypatch.setattr(token_map, "FOLDER", tmp_path)
    assert fingerprint(TOKENS) == digest
    for count in (1, 2, 4):
        ids = read_token_map(str(count), vocab_size=30, tokens=lambda: TOKENS)
        assert ids.dtype == np.int32 and ids.tolist() == [4, 9, 1, 0][:count]
    for count in ("0", "5"):
        assert f"{count} is not in 1..4, the ids in the map" in refused(count, tokens=lambda: TOKENS)
    assert "entry 1 is 9, outside" in refused("2", vocab_size=9, tokens=lambda: TOKENS)
    for tokens in (None, lambda: TOKENS[:-1], lambda: [*TOKENS[:-1], "t30"], lambda: TOKENS[::-1]):
        message = refused("2", tokens=tokens)
        assert "needs a model with SmolLM2's vocabulary, for which a map comes with specjax" in message
        assert "give a file (.pt, .json) made by `specjax train vocab`" in message
