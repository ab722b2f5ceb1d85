"""Notebooks: both files agree, the first cell installs specjax, and short forms run on a tiny random model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jupytext
import nbformat
import pytest
from engine_helpers import VOCABULARY, tokenizer
from tiny_checkpoints import save_llama
from tiny_heads import save_head
from train_helpers import environment
from wheel_helpers import Environment, build, copy_tree, create

pytestmark = pytest.mark.process

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(file.stem for file in FOLDER.glob("*.py"))

SHOWN: dict[str, tuple[int, int, dict[str, int]]] = {
    "01_draft_trees": (2, 4, {r"tokens a step with EAGLE-3|with EAGLE-3; the same text": 3, "another text": 0}),
    "02_write_a_drafter": (1, 0, {r"2 of 2 greedy texts equal those of NONE, 2 sampled ones": 3}),
    "03_train_a_head": (
        2,
        0,
        {r"this head: accept length .*; 1 of 1 texts equal": 1, "accept length .* in the engine": 2},
    ),
    "04_find_the_best_tree": (2, 0, {r"accept length .*; (\d+) of \1 texts equal$": 6, r"^Round 1: 5 trees": 2}),
    "05_spec_bench": (3, 0, {r"(\d+) of \1 texts equal those without drafts": 4}),
    "06_gpu": (1, 0, {r"float32 .* 1 of 1$": 1, "the CPU decodes": 1, "attention: xla": 1}),
}
"""For each: figures, pictures of trees, and how often a pattern is in what it prints."""

PIP = r"""
import re, subprocess, sys

def pip(line):
    subprocess.run(f'"{sys.executable}" -m pip {line}', shell=True, check=True)

def to_python(source):
    return re.sub("^( *)%pip (.+)$", r"\1pip(f'\2')", source, flags=re.M)
"""
"""IPython's `%pip`: a shell runs pip of this Python with the line, in which variables in braces are replaced."""

RUN = (
    PIP
    + """
import ast, json
from pathlib import Path
import matplotlib.pyplot as plt

figures, pictures = [], 0
def show():
    for number in plt.get_fignums():
        figure = plt.figure(number)
        figure.savefig(f"{number}-{len(figures)}.png")
        drawn = [[len(ax.lines) + len(ax.collections) + len(ax.patches), ax.get_xlabel() or len(ax.get_xticks()) < 5 and
                  [label.get_text() for label in ax.get_xticklabels()], ax.get_ylabel() or
                  [label.get_text() for label in ax.get_yticklabels()]] for ax in figure.axes]
        figures.append(drawn)
    plt.close("all")
plt.show = show

names = {"__name__": "__main__", "pip": pip}
for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree, last = ast.parse(to_python("".join(cell["source"]))), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:  # which a notebook shows
        shown = eval(compile(last, "cell", "eval"), names)
        pictures += hasattr(shown, "_repr_svg_")
show()
import specjax
print(json.dumps([specjax.__file__, figures, pictures]))
"""
)
"""Runs a notebook like Jupyter, without its packages."""


PROGRESS = re.compile(r"[A-Z].*: \S+.* in \d+\.\d s")


def cells(name: str) -> list[str]:
    return [cell.source for cell in jupytext.read(FOLDER / f"{name}.ipynb").cells if cell.cell_type == "code"]


def test_list_of_notebooks():
    assert sorted(SHOWN) == NOTEBOOKS == sorted(file.stem for file in FOLDER.glob("*.ipynb"))
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"{name}.ipynb" in listed for name in NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_script_equals_notebook(name):
    """`jupytext --sync notebooks/*.py` updates them."""
    script, notebook = (jupytext.read(FOLDER / f"{name}{suffix}") for suffix in (".py", ".ipynb"))
    nbformat.validate(notebook)
    compile((FOLDER / f"{name}.py").read_text(encoding="utf-8"), name, "exec")  # jupytext comments `%pip` out
    assert [(cell.cell_type, cell.source) for cell in script.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]
    for metadata in (script.metadata, notebook.metadata):
        assert metadata["jupytext"]["formats"] == "ipynb,py:percent"
        assert metadata["kernelspec"]["name"] == "python3"
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


# The first cell.

FIRST = cells(NOTEBOOKS[0])[0]
NAMED = 'SOURCE = "specjax"'


def test_first_cell_is_short_and_the_same():
    assert {cells(name)[0] for name in NOTEBOOKS} == {FIRST}
    assert FIRST.startswith(NAMED)
    assert len(FIRST.splitlines()) <= 6


GIT = "git+https://example.com/specjax.git"


@pytest.mark.parametrize(
    "source",
    ["specjax", "specjax[cuda12]", "..", "..[cuda13]", GIT, f"specjax[cuda12] @ {GIT}", "a folder/specjax.whl"],
)
@pytest.mark.parametrize("missing", [True, False])
def test_pip_arguments_of_first_cell(source, missing, monkeypatch, capsys):
    """A shell passes the source as one argument. pip is not called if specjax is installed."""
    monkeypatch.setitem(sys.modules, "specjax_kernels", None if missing else ModuleType("specjax_kernels"))
    names, lines = {}, []
    exec(PIP, names)
    cell = FIRST.replace(NAMED, f"SOURCE = {source!r}")
    exec(compile(names["to_python"](cell), "first cell", "exec"), {"pip": lines.append})
    wanted = ["install", "--find-links", ".", source, "matplotlib", "ipywidgets"]
    assert [shlex.split(line) for line in lines] == [wanted] * missing
    assert capsys.readouterr().out == f"specjax is missing: pip install {source}\n" * missing


# Run.


def settings(folder: Path) -> dict[str, str]:
    """Environment of a process outside of a checkout. pip finds only local files, and builds with this environment's
    hatchling: "0" is how pip reads "no isolation" from a variable."""
    kept = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return kept | pip | {"MPLBACKEND": "Agg", "TMPDIR": str(folder)}


def run_first_cell(folder: Path, root: Path, source: str = "specjax") -> Environment:
    """An environment where the first cell, run in a folder, has installed specjax."""
    without = create(root)
    (without.site / "ipywidgets-8.1.5.dist-info").mkdir()  # tests do without it
    metadata = "Metadata-Version: 2.1\nName: ipywidgets\nVersion: 8.1.5\n"
    (without.site / "ipywidgets-8.1.5.dist-info" / "METADATA").write_text(metadata)
    notebook = {"cells": [{"cell_type": "code", "source": FIRST.replace(NAMED, f"SOURCE = {source!r}")}]}
    (root / "first.ipynb").write_text(json.dumps(notebook))
    command = [str(without.python), "-c", RUN, str(root / "first.ipynb")]
    done = subprocess.run(command, cwd=folder, env=settings(root), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    first, *_, last = done.stdout.splitlines()
    assert first == f"specjax is missing: pip install {source}"
    assert "Successfully installed specjax" in done.stdout, "Colab reads this line"
    assert Path(json.loads(last)[0]).is_relative_to(without.site)
    return without


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("wheel") / "tree")


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    return build(tree, tmp_path_factory.mktemp("out"))[1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    """The first cell installed the wheel that lies beside it. A folder that is named specjax does not stop it."""
    folder = tmp_path_factory.mktemp("content")
    shutil.copy(wheel, folder)
    (folder / "specjax").mkdir()
    return run_first_cell(folder, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, str]:
    """A random model of four layers, and an EAGLE-3 head that reads three of them."""
    root = tmp_path_factory.mktemp("tiny")
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "max_position_embeddings": 1024, "eos_token_id": 2}
    save_llama(root / "model", initializer_range=0.3, **sizes)
    tokenizer().save_pretrained(root / "model")
    width = json.loads((root / "model" / "config.json").read_text())["hidden_size"]
    reads = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}}
    wide = {"target_hidden_size": width, "hidden_size": width, "target_vocab_size": VOCABULARY}
    save_head(root / "head", "eagle3", config=reads | {"max_position_embeddings": 1024}, **wide)
    return {"SPECJAX_NOTEBOOK_MODEL": str(root / "model"), "SPECJAX_NOTEBOOK_HEAD": str(root / "head")}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_run(name, installed, tiny, tmp_path):
    variables = settings(tmp_path) | {"SPECJAX_NOTEBOOK_SHORT": "1"} | tiny
    command = [str(installed.python), "-c", RUN, str(FOLDER / f"{name}.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(PROGRESS.match(line) for line in done.stderr.splitlines()), f"no warnings\n{done.stderr}"
    printed = done.stdout.splitlines()
    module, figures, pictures = json.loads(printed.pop())
    assert Path(module).is_relative_to(installed.site)
    count, trees, said = SHOWN[name]
    assert (len(figures), pictures) == (count, trees)
    assert all(drawn and x and y for figure in figures for drawn, x, y in figure), "an axis without a label"
    assert len(list(tmp_path.glob("*.png"))) == count
    for pattern, times in said.items():
        assert sum(bool(re.search(pattern, line)) for line in printed) == times, f"{pattern}\n{done.stdout}"
