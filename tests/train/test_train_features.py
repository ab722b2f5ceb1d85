"""`specjax train features`: hidden states of texts, in the files of vLLM's speculators."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from train_helpers import save_data, save_model
from transformers import AutoModelForCausalLM

from specjax.train.features import main


def write(model, data, output, *more) -> int:
    return main(["--model", str(model), "--dtype", "float32", "--data", str(data), "--output", str(output), *more])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_data(tmp_path_factory.mktemp("data") / "data.jsonl")


def test_files_equal_transformers(model, data, tmp_path, capsys):
    assert write(model, data, tmp_path, "--store-dtype", "float32", "--aux-layers", "1", "0", "--max-length", "40") == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert summary["texts"] == len(rows) > 3 and summary["tokens"] == sum(row["seq_len"] for row in rows)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    *_, last = layers = summary["layers"]
    assert layers[:2] == [1, 0] and last == reference.config.num_hidden_layers - 1
    outputs = {}
    for number, layer in enumerate(reference.model.layers):  # transformers returns the last state after the norm
        layer.register_forward_hook(
            lambda _, __, out, n=number: outputs.update({n: out[0] if type(out) is tuple else out})
        )
    for number, row in enumerate(rows):
        stored = load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors")
        assert stored["token_ids"].tolist() == row["input_ids"] and len(row["loss_mask"]) == row["seq_len"] <= 40
        with torch.no_grad():
            reference(torch.tensor([row["input_ids"]]))
        expected = np.stack([outputs[layer].reshape(row["seq_len"], -1) for layer in layers], axis=1)
        np.testing.assert_allclose(stored["hidden_states"].numpy(), expected, atol=1e-4)


def test_a_stopped_run_is_resumed(model, data, tmp_path, capsys):
    assert write(model, data, tmp_path) == 0
    kept, gone = (tmp_path / "hidden_states" / f"hs_{number}.safetensors" for number in (0, 1))
    before, time = gone.read_bytes(), kept.stat().st_mtime_ns
    gone.unlink()
    capsys.readouterr()
    assert write(model, data, tmp_path) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["resumed_after"] == summary["texts"] - 1
    assert gone.read_bytes() == before and kept.stat().st_mtime_ns == time


def test_other_settings_are_refused(model, data, tmp_path, capsys):
    assert write(model, data, tmp_path) == 0
    assert write(model, data, tmp_path, "--aux-layers", "0") == 2
    assert "--aux-layers was [] and is ['0']" in capsys.readouterr().err
    assert write(model, data, tmp_path / "new", "--aux-layers", "99") == 2
    assert "--aux-layers must be different layers from 0 to" in capsys.readouterr().err
    assert main(["--model", str(model), "--output", str(tmp_path / "empty")]) == 2
    assert "give --data or --text-data" in capsys.readouterr().err
