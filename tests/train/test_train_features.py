"""`specjax train features`: hidden states of texts, in the files of vLLM's speculators."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.checkpoint import load_params, model_config, resolve
from specjax.models import make_target
from specjax.models.target import hidden_states
from specjax.train.features import main

FLAGS = ("--store-dtype", "float32", "--aux-layers", "1", "0", "--max-length", "40")


def write(model, data, output, *more) -> int:
    return main(["--model", str(model), "--dtype", "float32", "--data", str(data), "--output", str(output), *more])


@pytest.fixture(scope="module")
def written(model, data, tmp_path_factory) -> Path:
    """The files of a run with `FLAGS`."""
    output = tmp_path_factory.mktemp("features")
    assert write(model, data, output, *FLAGS) == 0
    return output


def test_files_hold_hidden_states(model, written):
    """tests/models compares `hidden_states` with transformers."""
    rows = [json.loads(line) for line in (written / "data.jsonl").read_text().splitlines()]
    files = resolve(str(model))
    config = model_config(files.config, dtype="float32")
    target, params = make_target(config), load_params(files, config, progress=False)
    layers = (1, 0, config.num_layers - 1)
    assert len(rows) > 3
    for number, row in enumerate(rows):
        stored = load_file(written / "hidden_states" / f"hs_{number}.safetensors")
        assert stored["token_ids"].tolist() == row["input_ids"] and len(row["loss_mask"]) == row["seq_len"] <= 40
        if number < 3:
            states = hidden_states(target, params, jnp.asarray([row["input_ids"]], jnp.int32), layers)
            expected = np.asarray(states).reshape(row["seq_len"], 3, -1)
            np.testing.assert_allclose(stored["hidden_states"], expected, atol=1e-4)


def test_a_stopped_run_is_resumed(model, data, written, capsys):
    kept, gone = (written / "hidden_states" / f"hs_{number}.safetensors" for number in (0, 1))
    before, time = gone.read_bytes(), kept.stat().st_mtime_ns
    gone.unlink()
    capsys.readouterr()
    assert write(model, data, written, *FLAGS) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (written / "data.jsonl").read_text().splitlines()]
    assert (summary["texts"], summary["resumed_after"]) == (len(rows), len(rows) - 1)
    assert summary["tokens"] == sum(row["seq_len"] for row in rows) and summary["layers"][:2] == [1, 0]
    assert gone.read_bytes() == before and kept.stat().st_mtime_ns == time


def test_refused(model, data, written, tmp_path, capsys):
    assert write(model, data, written, *FLAGS[:2], "--aux-layers", "0", *FLAGS[5:]) == 2
    assert "--aux-layers was ['1', '0'] and is ['0']" in capsys.readouterr().err
    assert write(model, data, tmp_path / "new", "--aux-layers", "99") == 2
    assert "--aux-layers must be different layers from 0 to" in capsys.readouterr().err
    assert main(["--model", str(model), "--output", str(tmp_path / "empty")]) == 2
    assert "give --data or --text-data" in capsys.readouterr().err
