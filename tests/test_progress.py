"""Lines about long phases, where stderr is no terminal."""

from __future__ import annotations

import io
import sys

import pytest

from specjax.progress import progress_bar


@pytest.mark.parametrize(
    ("total", "count", "unit", "line"),
    [
        (3, 3, "bucket", "Compiling: 3 buckets in "),
        (4, 1, "bucket", "Compiling: 1 bucket (25%) in "),
        (None, 2048, "B", "Compiling: 2.05kB in "),
    ],
)
def test_one_line_at_the_end(capsys, total, count, unit, line):
    with progress_bar("Compiling", total, unit) as bar:
        bar.update(count)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err.startswith(line)
    with progress_bar("Compiling", total, unit, shown=False) as bar:
        bar.update(count)
    assert capsys.readouterr().err == ""


def test_a_full_disk_ends_no_work(monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    done = 0
    with progress_bar("Loading", 10, "B") as bar:
        bar.update(10)
        done = bar.n
    assert done == 10
