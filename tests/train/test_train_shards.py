"""Training on several devices and on a folder of shards: the same as on one device, and as on one file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_helpers import VOCABULARY, tokenizer
from jax.sharding import Mesh, PartitionSpec
from toy_models import tiny_llama
from train_helpers import arguments, save_data, save_model, start

from specjax.cli.generate import read_input
from specjax.train import run, update
from specjax.train.__main__ import main
from specjax.train.generate import parse_shard
from specjax.train.options import PLACEMENTS, DataSettings, TrainOptions
from specjax.train.output import read_metrics

TWO_DEVICES = """
import json, os, sys
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
from specjax.train.__main__ import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return save_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.mark.process
def test_two_devices_train_as_one(data, tmp_path):
    """Rows of a batch are spread over them; the target is on both, or its weights are split over them."""
    model = save_model(tmp_path / "model")
    given = {name: arguments(model, data, tmp_path / name, target_placement=name) for name in PLACEMENTS}
    process = start([json.dumps(list(given.values()))], TWO_DEVICES)
    assert main(arguments(model, data, tmp_path / "one")) == 0
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    alone = read_metrics(tmp_path / "one")
    assert [row["step"] for row in alone] == [2, 3, 4, 6]
    for name in PLACEMENTS:
        assert json.loads((tmp_path / name / "run.json").read_text())["devices"] == 2
        for one, two in zip(alone, read_metrics(tmp_path / name), strict=True):
            assert (one["step"], one["tokens"]) == (two["step"], two["tokens"])
            np.testing.assert_allclose(two["losses"], one["losses"], rtol=2e-3, err_msg=name)
            np.testing.assert_allclose(two["gradient_norm"], one["gradient_norm"], rtol=0.02, err_msg=name)


def test_split_weights_are_the_same_arrays():
    """On a mesh of the devices that are there; an axis that they do not divide stays whole."""
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    tree = {"matrix": np.arange(24.0).reshape(4, 6), "scalar": np.float32(3)}
    placed = update.split(mesh, jax.tree.map(jax.numpy.asarray, tree))
    for name, leaf in tree.items():
        np.testing.assert_array_equal(placed[name], leaf)
    assert placed["matrix"].sharding.spec == PartitionSpec(None, "data"), "its longest"
    assert placed["scalar"].sharding.is_fully_replicated


def shards(folder: Path, data: Path) -> Path:
    """The lines of `data` in two files; what else a folder of answers may hold is not read."""
    folder.mkdir()
    every = data.read_text().splitlines(keepends=True)
    (folder / "b.jsonl").write_text("".join(every[9:]))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(every[:9]).encode()))
    for name in (".c.jsonl", "a.jsonl.gz.meta.json", "notes.txt"):
        (folder / name).write_text("no line of it\n")
    (folder / "deeper").mkdir()
    return folder


def test_a_folder_is_its_files_by_name(data, tmp_path):
    folder = shards(tmp_path / "shards", data)
    config = tiny_llama(vocab_size=VOCABULARY).target.config

    def read(*paths: Path):
        given = DataSettings(data=tuple(map(str, paths)), row_length=64, held_back=4)
        return run.read_data(TrainOptions(data=given), tokenizer(), config)

    (rows, held, facts), (other_rows, other_held, other_facts) = read(data), read(folder)
    for one, two in zip(jax.tree.leaves((rows, held)), jax.tree.leaves((other_rows, other_held)), strict=True):
        np.testing.assert_array_equal(one, two)
    assert other_facts == facts | {"files": ["shards"]}
    with pytest.raises(ValueError, match=r"--data .*b.jsonl is given twice"):
        read(folder, folder / "b.jsonl")
    with pytest.raises(ValueError, match=r"the folder .*deeper has no file that ends in .jsonl or .jsonl.gz"):
        read(folder / "deeper")


def test_each_line_of_a_folder_has_its_own_seed(data, tmp_path):
    """`place` decides the seed of an answer: the shards of one input are answered as one file would be."""
    one, two = read_input(str(data)), read_input(str(shards(tmp_path / "shards", data)))
    assert [(line.place, line.data) for line in one] == [(line.place, line.data) for line in two]
    assert [line.place for line in two] == list(range(24))


@pytest.mark.parametrize("given", ["", "0/2", "3/2", "1", "1/0", "-1/2", "1/2/3", "a/b"])
def test_wrong_shards(given):
    with pytest.raises(ValueError, match=r"^--shard must be I/N, with I from 1 to N, got"):
        parse_shard(given)
