"""`benchmarks/full_table.py` on a small record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def full_table(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import full_table

    return full_table


def row(name, temperature, method, speed_up, batch=1):
    texts = {"equal": 3, "near tie": 1, "different": 0, "other prompt": 0}
    return {"set": name, "temperature": temperature, "batch": batch, "method": method,
            "accept_length": 1.25, "texts": texts,
            "tokens_per_second": {"value": 100 * speed_up, "low": None, "high": None},
            "speed_up": {"value": speed_up, "low": speed_up - 0.1, "high": speed_up + 0.1}}  # fmt: skip


ROWS = [row(name, 0.0, "NONE", 1.0) for name in ("a", "b_c", "all")]
ROWS += [row(name, 0.0, "x", 1.5) for name in ("a", "b_c", "all")] + [row("all", 0.0, "x", 9.0, batch=4)]
ROWS += [row(name, 1.0, "NONE", 1.0) for name in ("a", "b_c", "all")]
RECORD = {"batch_sizes": [1, 4], "results": ROWS, "processor": "p", "cpus": 2, "commit": "0123456789",
          "baseline": "NONE", "command": "specjax bench", "date": "2026-01-02T03:04:05"}  # fmt: skip


def test_a_page_is_filled_and_filled_again(full_table, tmp_path, monkeypatch, capsys):
    source, page, records = tmp_path / "results.json", tmp_path / "page.md", tmp_path / "records"
    source.write_text(json.dumps(RECORD))
    page.write_text("# Before\n<!-- full table -->\nold\n<!-- end -->\nafter\n")
    records.mkdir()
    given = ["full_table.py", str(source), "--page", str(page), "--records", str(records)]
    monkeypatch.setattr(sys, "argv", given)
    full_table.main()
    text = page.read_text()
    assert json.loads((records / "bench-full-2026-01-02.json").read_text()) == RECORD
    assert text.startswith("# Before\n<!-- full table -->\n") and text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text and "9.0" not in text, "the first batch size alone"
    assert "| x | 150.0 | 1.50 (1.40 to 1.60) | 1.25 |  |  |  |" in text, "x did not run at T = 1"
    assert "| speed-up, T = 0 | a | b c |" in text and "| x | 1.50 | 1.50 |" in text
    assert "18 equal, 6 near tie, 0 different" in text, "rows over all sets are no texts of their own"
    full_table.main()
    assert page.read_text() == text


def test_without_marks_or_a_row_over_all_sets(full_table):
    with pytest.raises(ValueError, match="no <!-- full table -->"):
        full_table.put("# Page\n<!-- end -->", "")
    with pytest.raises(ValueError, match="one set"):
        full_table.section(RECORD | {"results": [row("a", 0.0, "NONE", 1.0)]}, "r")
