"""Progress bars on terminals and in notebooks, lines elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest
from generate_helpers import saved_model

from specjax import Engine, EngineConfig, SamplingParams
from specjax.progress import progress_bar


@pytest.mark.parametrize(
    ("total", "count", "unit", "line"),
    [
        (3, 3, "bucket", "Compiling: 3 buckets in "),
        (4, 1, "bucket", "Compiling: 1 bucket (25%) in "),
        (None, 2048, "B", "Compiling: 2.05kB in "),
    ],
)
def test_line_without_terminal(capsys, total, count, unit, line):
    with progress_bar("Compiling", total, unit) as bar:
        bar.update(count)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err.startswith(line)
    with progress_bar("Compiling", total, unit, shown=False) as bar:
        bar.update(count)
    assert capsys.readouterr().err == ""


def test_bar_in_notebooks(monkeypatch):
    for kind, shown in (("ipykernel.iostream", True), ("io", False)):
        stream = type("Stream", (io.StringIO,), {"__module__": kind})()
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar("Loading", 2, "B"):
            assert ("Loading:   0%" in stream.getvalue()) == shown


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.mark.parametrize(("progress", "stream"), [(True, True), (False, False)])
def test_progress_of_compilation(model, capsys, progress, stream):
    config, sampling = EngineConfig(max_running_requests=1, page_size=4), SamplingParams(max_new_tokens=4)
    engine = Engine.from_pretrained(model, draft="NONE", config=config, progress=progress)
    capsys.readouterr()
    for lines in (r"Compiling prefill \d+: 1 program in .* s\nCompiling step 1: 1 program in .* s\n", ""):
        actual = engine.generate("1 2 1 2", sampling, stream=stream)
        assert list(actual) if stream else actual
        assert re.fullmatch(lines if progress else "", capsys.readouterr().err)
    engine.warm_up([key for key in engine.buckets.all_keys() if key.width == engine.buckets.chunks[-1]])
    assert re.fullmatch(r"Compiling: \d bucket.*\n(\[.*\n)?", capsys.readouterr().err), "one bar for all, and the log"
