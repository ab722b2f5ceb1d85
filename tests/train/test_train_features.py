"""Stored features: values do not depend on the order of requests, folders are reused, errors name the flag."""

from __future__ import annotations

import errno
from pathlib import Path
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


def store(teach: Teach, folder: Path, **changes: Any) -> FeatureStore:
    settings: dict[str, Any] = {
        "folder": folder, "widths": (6, 2), "dtype": "float32", "batch": BATCH, "seed": SEED,
        "identity": "a model",
    }  # fmt: skip
    return FeatureStore(teach, changes.pop("rows", rows()), **settings | changes)


def everything(kept: FeatureStore, numbers: list[int]) -> list[np.ndarray]:
    return [np.asarray(part, np.float32) for part in kept.get(np.asarray(numbers))]


def test_values_do_not_depend_on_the_order_of_asking(tmp_path):
    first, second = Teach(), Teach()
    forward = everything(store(first, tmp_path / "a"), list(range(COUNT)))
    other = store(second, tmp_path / "b")
    backward = {}
    for number in reversed(range(COUNT)):
        backward[number] = everything(other, [number])
    for part in range(3):
        np.testing.assert_array_equal(forward[part], np.concatenate([backward[i][part] for i in range(COUNT)]))
    np.testing.assert_array_equal(forward[2], rows().tokens + 1)
    batches = [sorted(batch_rows(step, COUNT, BATCH, SEED).tolist()) for step in range(3)]
    assert sorted(map(sorted, first.asked)) == sorted(batches) == sorted(map(sorted, second.asked))
    assert other.done == COUNT


def test_each_row_is_computed_once(tmp_path):
    teach = Teach()
    kept = store(teach, tmp_path)
    for step in range(10):
        kept.get(batch_rows(step, COUNT, BATCH, SEED))
    assert len(teach.asked) == 3


def test_a_disk_store_is_reused(tmp_path):
    """Also one of a run that was interrupted: what it had is there, the rest is computed."""
    first, second, third = Teach(), Teach(), Teach()
    numbers = batch_rows(0, COUNT, BATCH, SEED)
    found = store(first, tmp_path).get(numbers)
    again = store(second, tmp_path)
    assert again.done == BATCH
    for one, other in zip(found, again.get(numbers), strict=True):
        np.testing.assert_array_equal(one, other)
    assert second.asked == []
    again.get(np.arange(COUNT))
    assert len(second.asked) == 2
    store(third, tmp_path).get(np.arange(COUNT))
    assert third.asked == []


@pytest.mark.parametrize(
    "changes", [{"identity": "another"}, {"rows": rows(1)}, {"dtype": "float16"}, {"batch": 2}, {"seed": 2}], ids=str
)
def test_what_the_values_depend_on_names_the_folder(tmp_path, changes):
    store(Teach(), tmp_path).get(np.arange(COUNT))
    other = store(Teach(), tmp_path, **changes)
    assert other.done == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_bfloat16_keeps_its_bits(tmp_path):
    found = store(Teach(ml_dtypes.bfloat16), tmp_path, dtype="bfloat16").get(np.arange(COUNT))
    assert found.features.dtype == ml_dtypes.bfloat16
    wanted = Teach(ml_dtypes.bfloat16)
    kept = store(wanted, tmp_path / "other", dtype="bfloat16").get(np.arange(COUNT))
    np.testing.assert_array_equal(found.features.view(np.uint16), kept.features.view(np.uint16))
    assert np.ptp(found.features.astype(np.float32)) > 20


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(features.os, "posix_fallocate", full)
    with pytest.raises(FeatureError, match=r"needs 0\.0 GB: No space left on device; give another --feature-folder"):
        store(Teach(), tmp_path)
    monkeypatch.undo()
    store(Teach(), tmp_path).get(np.arange(COUNT))
    assert store(Teach(), tmp_path).done == COUNT


def test_the_room_is_taken_at_once(tmp_path):
    """A mapped file that finds no room when it is written kills the process."""
    store(Teach(), tmp_path)
    for file in tmp_path.rglob("*.bin"):
        if file.name != "done.bin":
            assert file.stat().st_blocks * 512 >= file.stat().st_size > 0


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FeatureError, match=r"--features disk cannot use .*file"):
        store(Teach(), tmp_path / "file")
