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
    """Values that depend on the whole batch, as the last bits of a compiled forward may. Records its batches."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.batches: list[list[int]] = []
        self.dtype = dtype

    def __call__(self, batch: Rows) -> Teacher:
        self.batches.append((batch.tokens[:, 0] // LENGTH).tolist())
        values = batch.tokens[..., None] + batch.tokens.sum() / 1024
        features, hidden = (np.repeat(values, width, axis=-1).astype(self.dtype) for width in (6, 2))
        return Teacher(features, hidden, batch.tokens + 1)


def store(teach: Teach, folder: Path, **changes: Any) -> FeatureStore:
    settings: dict[str, Any] = {
        "folder": folder, "widths": (6, 2), "dtype": "float32", "batch": BATCH, "seed": SEED,
        "identity": "a model",
    }  # fmt: skip
    return FeatureStore(teach, changes.pop("rows", rows()), **settings | changes)


def test_values_do_not_depend_on_the_order_of_requests(tmp_path):
    first, second = Teach(), Teach()
    forward = store(first, tmp_path / "a").get(np.arange(COUNT))
    other = store(second, tmp_path / "b")
    backward = {number: other.get(np.array([number])) for number in reversed(range(COUNT))}
    for name, part in forward._asdict().items():
        np.testing.assert_array_equal(part, np.concatenate([getattr(backward[i], name) for i in range(COUNT)]))
    np.testing.assert_array_equal(forward.top, rows().tokens + 1)
    batches = [sorted(batch_rows(step, COUNT, BATCH, SEED).tolist()) for step in range(3)]
    assert sorted(map(sorted, first.batches)) == sorted(batches) == sorted(map(sorted, second.batches))
    assert other.done == COUNT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_store_is_reused(tmp_path, dtype):
    """Each row is computed once, also by runs that were interrupted."""
    first, second = (Teach(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32) for _ in range(2))
    numbers = batch_rows(0, COUNT, BATCH, SEED)
    values = store(first, tmp_path, dtype=dtype).get(numbers)
    again = store(second, tmp_path, dtype=dtype)
    assert again.done == BATCH
    for expected, part, name in zip(values, again.get(numbers), Teacher._fields, strict=True):
        assert part.dtype == (np.int32 if name == "top" else dtype)
        np.testing.assert_array_equal(expected.view(np.uint8), part.view(np.uint8))
    assert second.batches == []
    for step in range(10):
        again.get(batch_rows(step, COUNT, BATCH, SEED))
    assert len(second.batches) == 2


@pytest.mark.parametrize(
    "changes", [{"identity": "another"}, {"rows": rows(1)}, {"dtype": "float16"}, {"batch": 2}, {"seed": 2}], ids=str
)
def test_other_inputs_use_another_folder(tmp_path, changes):
    store(Teach(), tmp_path).get(np.arange(COUNT))
    other = store(Teach(), tmp_path, **changes)
    assert other.done == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(features.os, "posix_fallocate", full)
    with pytest.raises(FeatureError, match=r"needs 0\.0 GB: No space left on device; give another --feature-folder"):
        store(Teach(), tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(FeatureError, match=r"--features disk cannot use .*file"):
        store(Teach(), tmp_path / "file")
    store(Teach(), tmp_path).get(np.arange(COUNT))
    assert store(Teach(), tmp_path).done == COUNT


def test_space_is_reserved(tmp_path):
    """Writing to a mapped file on a full disk would kill the process."""
    store(Teach(), tmp_path)
    (file,) = tmp_path.rglob("rows.bin")
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 0
