"""The notebooks: the two files of each are one, and it runs from top to bottom on a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from train_helpers import environment

pytestmark = pytest.mark.process

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(file.stem for file in FOLDER.glob("*.py"))
FIGURES = {"01_draft_trees": 1}

RUN = """
import json, runpy, sys
import matplotlib.pyplot as plt
plt.rcParams["savefig.bbox"] = "tight"
names = runpy.run_path(sys.argv[1])
figures = [plt.figure(number) for number in plt.get_fignums()]
for number, figure in enumerate(figures):
    figure.savefig(f"{sys.argv[2]}/{number}.png")
print(json.dumps([sum(len(ax.texts) + len(ax.collections) for ax in figure.axes) for figure in figures]))
"""


def test_each_is_there_twice_and_listed():
    assert sorted(FIGURES) == NOTEBOOKS == sorted(file.stem for file in FOLDER.glob("*.ipynb"))
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"{name}.ipynb" in listed for name in NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_two_files_are_one_notebook(name):
    """`jupytext --sync notebooks/*.py` makes them so."""
    script, notebook = (jupytext.read(FOLDER / f"{name}{suffix}") for suffix in (".py", ".ipynb"))
    nbformat.validate(notebook)
    assert [(cell.cell_type, cell.source) for cell in script.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]
    for metadata in (script.metadata, notebook.metadata):
        assert metadata["jupytext"]["formats"] == "ipynb,py:percent"
        assert metadata["kernelspec"]["name"] == "python3"
    for cell in notebook.cells:  # pictures would be new in every commit
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_can_be_opened_in_colab(name):
    """It installs what is missing before it imports it, from a place that one line names."""
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert 'find_spec("specjax") is None' in first and "pip" in first and "source = " in first
    assert "import jax" not in first


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name, tmp_path):
    settings = environment() | {
        "MPLBACKEND": "Agg",
        "SPECJAX_NOTEBOOK_TINY": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-c", RUN, str(FOLDER / f"{name}.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    drawn = json.loads(done.stdout.splitlines()[-1])
    assert len(drawn) == FIGURES[name] and all(drawn), "things in each figure"
    assert len(list(tmp_path.glob("*.png"))) == FIGURES[name]
    assert "missing from font" not in done.stderr
