"""`specjax train features`: hidden states of texts, in the files of vLLM's speculators."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from specjax.checkpoint import load_params, model_config, resolve
from specjax.models import make_target
from specjax.models.target import hidden_states
from specjax.train.features import main


def write(model, data, output, *more) -> int:
    return main(["--model", str(model), "--dtype", "float32", "--data", str(data), "--output", str(output), *more])


def test_files_hold_hidden_states(model, data, tmp_path, capsys):
    """tests/models compares `hidden_states` with transformers."""
    assert write(model, data, tmp_path, "--store-dtype", "float32", "--aux-layers", "1", "0", "--max-length", "40") == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert summary["texts"] == len(rows) > 3 and summary["tokens"] == sum(row["seq_len"] for row in rows)
    files = resolve(str(model))
    config = model_config(files.config, dtype="float32")
    target, params = make_target(config), load_params(files, config, progress=False)
    assert summary["layers"] == [1, 0, config.num_layers - 1]
    for number, row in enumerate(rows):
        stored = load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors")
        assert stored["token_ids"].tolist() == row["input_ids"] and len(row["loss_mask"]) == row["seq_len"] <= 40
        states = hidden_states(target, params, jnp.asarray([row["input_ids"]], jnp.int32), tuple(summary["layers"]))
        expected = np.asarray(states).reshape(row["seq_len"], 3, -1)
        np.testing.assert_allclose(stored["hidden_states"], expected, atol=1e-4)


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
