"""What is kept of the target: values that do not depend on who asked first, folders that survive, early refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from specjax.train import features
from specjax.train.data import Rows, batch_rows
from specjax.train.features import FeatureError, FeatureStore
from specjax.train.unroll import Teacher

COUNT, LENGTH, BATCH, SEED = 7, 4, 3, 1


def rows(shift: int = 0) -> Rows:
    tokens = (np.arange(COUNT * LENGTH, dtype=np.int32) + shift).reshape(COUNT, LENGTH)
    return Rows(tokens, np.zeros_like(tokens), np.ones_like(tokens), np.ones(tokens.shape, bool))


class Teach:
    """Values that depend on the whole batch, as a compiled forward's last bits may. Notes what it was asked."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.asked: list[list[int]] = []
        self.dtype = dtype

    def __call__(self, given: Rows) -> Teacher:
        self.asked.append((given.tokens[:, 0] // LENGTH).tolist())
        values = given.tokens[..., None] + given.tokens.sum() / 1024
        return Teacher(
            np.repeat(values, 6, axis=-1).astype(self.dtype), np.repeat(values, 2, axis=-1).astype(self.dtype),
            given.tokens + 1,
        )  # fmt: skip


def store(teach: Teach, folder: Path, mode: str = "memory", **changes: Any) -> FeatureStore:
    settings: dict[str, Any] = {
        "mode": mode, "folder": folder, "widths": (6, 2), "dtype": "float32", "batch": BATCH, "seed": SEED,
        "identity": "a model",
    }  # fmt: skip
    return FeatureStore(teach, changes.pop("rows", rows()), **settings | changes)


def everything(kept: FeatureStore, numbers: list[int]) -> list[np.ndarray]:
    return [np.asarray(part, np.float32) for part in kept.get(np.asarray(numbers))]


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_values_do_not_depend_on_the_order_of_asking(tmp_path, mode):
    first, second = Teach(), Teach()
    forward = everything(store(first, tmp_path / "a", mode), list(range(COUNT)))
    other = store(second, tmp_path / "b", mode)
    backward = {}
    for number in reversed(range(COUNT)):
        backward[number] = everything(other, [number])
    for part in range(3):
        np.testing.assert_array_equal(forward[part], np.concatenate([backward[i][part] for i in range(COUNT)]))
    np.testing.assert_array_equal(forward[2], rows().tokens + 1)
    batches = [sorted(batch_rows(step, COUNT, BATCH, SEED).tolist()) for step in range(3)]
    assert sorted(map(sorted, first.asked)) == sorted(batches) == sorted(map(sorted, second.asked))
    assert other.done == COUNT


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_each_row_is_computed_once(tmp_path, mode):
    teach = Teach()
    kept = store(teach, tmp_path, mode)
    for step in range(10):
        kept.get(batch_rows(step, COUNT, BATCH, SEED))
    assert len(teach.asked) == 3


def test_a_disk_store_is_reused(tmp_path):
    """Also one of a run that was interrupted: what it had is there, the rest is computed."""
    first, second, third = Teach(), Teach(), Teach()
    numbers = batch_rows(0, COUNT, BATCH, SEED)
    found = store(first, tmp_path, "disk").get(numbers)
    again = store(second, tmp_path, "disk")
    assert again.done == BATCH
    for one, other in zip(found, again.get(numbers), strict=True):
        np.testing.assert_array_equal(one, other)
    assert second.asked == []
    again.get(np.arange(COUNT))
    assert len(second.asked) == 2
    store(third, tmp_path, "disk").get(np.arange(COUNT))
    assert third.asked == []


@pytest.mark.parametrize(
    "changes", [{"identity": "another"}, {"rows": rows(1)}, {"dtype": "float16"}, {"batch": 2}, {"seed": 2}], ids=str
)
def test_what_the_values_depend_on_names_the_folder(tmp_path, changes):
    store(Teach(), tmp_path, "disk").get(np.arange(COUNT))
    other = store(Teach(), tmp_path, "disk", **changes)
    assert other.done == 0
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_bfloat16_keeps_its_bits(tmp_path, mode):
    found = store(Teach(ml_dtypes.bfloat16), tmp_path, mode, dtype="bfloat16").get(np.arange(COUNT))
    assert found.features.dtype == ml_dtypes.bfloat16
    wanted = Teach(ml_dtypes.bfloat16)
    kept = store(wanted, tmp_path / "other", dtype="bfloat16").get(np.arange(COUNT))
    np.testing.assert_array_equal(found.features.view(np.uint16), kept.features.view(np.uint16))
    assert np.ptp(found.features.astype(np.float32)) > 20


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    needed = COUNT * LENGTH * (6 + 2 + 1) * 4
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(FeatureError, match=r"--features disk needs 0\.0 GB more in .*give another --feature-folder"):
        store(Teach(), tmp_path, "disk")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    free.free = needed
    store(Teach(), tmp_path, "disk").get(np.arange(COUNT))
    free.free = 0
    assert store(Teach(), tmp_path, "disk").done == COUNT, "what is there needs no more room"
    monkeypatch.setattr(features.shutil, "disk_usage", shutil.disk_usage)


def test_the_room_is_taken_at_once(tmp_path):
    """A mapped file that finds no room when it is written kills the process."""
    store(Teach(), tmp_path, "disk")
    for file in tmp_path.rglob("*.bin"):
        if file.name != "done.bin":
            assert file.stat().st_blocks * 512 >= file.stat().st_size > 0


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FeatureError, match=r"--features disk cannot use .*file"):
        store(Teach(), tmp_path / "file", "disk")


def test_too_little_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(features.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    with pytest.raises(FeatureError, match=r"--features memory needs .* GB, and .* GB are free; give --features disk"):
        store(Teach(), tmp_path)
