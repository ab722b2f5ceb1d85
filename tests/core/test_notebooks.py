"""Notebooks: both files agree, the first cell installs for the machine, and short forms run on a tiny random model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
import nbformat
import pytest
from engine_helpers import VOCABULARY, tokenizer
from packaging.requirements import Requirement
from tiny_checkpoints import save_llama
from tiny_heads import save_head
from train_helpers import environment
from wheel_helpers import PROJECT, Environment, build, copy_tree, install

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

RUN = """
import ast, json, sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
import matplotlib.pyplot as plt
import specjax

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

names = {"__name__": "__main__"}
for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree, last = ast.parse("".join(cell["source"])), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:  # which a notebook shows
        shown = eval(compile(last, "cell", "eval"), names)
        pictures += hasattr(shown, "_repr_svg_")
show()
print(json.dumps([specjax.__file__, figures, pictures]))
"""
"""Runs a notebook like Jupyter, without its packages."""


PROGRESS = re.compile(r"[A-Z].*: \S+.* in \d+\.\d s")


def cells(name: str) -> list[str]:
    return [cell.source for cell in jupytext.read(FOLDER / f"{name}.ipynb").cells if cell.cell_type == "code"]


def test_first_cell_and_list_of_notebooks():
    assert {cells(name)[0] for name in NOTEBOOKS} == {FIRST}
    (bounds,) = re.findall(r'^JAX = "(.+?)"', FIRST, flags=re.M)
    assert f"jax{bounds}" in PROJECT["project"]["dependencies"]
    assert {"cuda12", "cuda13"} <= PROJECT["project"]["optional-dependencies"].keys()
    assert sorted(SHOWN) == NOTEBOOKS == sorted(file.stem for file in FOLDER.glob("*.ipynb"))
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"{name}.ipynb" in listed for name in NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_script_equals_notebook(name):
    """`jupytext --sync notebooks/*.py` updates them."""
    script, notebook = (jupytext.read(FOLDER / f"{name}{suffix}") for suffix in (".py", ".ipynb"))
    nbformat.validate(notebook)
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


GIT = "git+https://example.com/specjax.git"
T4 = "570.86.10, 7.5"


@pytest.fixture
def first(monkeypatch, capsys):
    """first(folder) -> (arguments of `pip install` or None, output) of the first cell, run in a folder by a Python
    without specjax and with the packages of `versions`."""
    monkeypatch.delenv("SPECJAX_SOURCE", raising=False)
    commands, real, versions = [], subprocess.Popen, {}

    def start(command: list[str], **options: Any) -> Any:
        if command[0] != sys.executable:
            return real(command, **options)
        commands.append(command)
        return contextlib.nullcontext(SimpleNamespace(stdout=["Collecting", "done"], returncode=call.status))

    def version_of(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def call(folder: Path) -> tuple[list[str] | None, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr("subprocess.Popen", start)
        monkeypatch.setattr("importlib.metadata.version", version_of)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: call.specs.get(name))
        exec(compile(FIRST, "first cell", "exec"), {})
        if commands and "--python" not in commands[0]:
            (command,) = commands
            assert command[:4] == [sys.executable, "-m", "pip", "install"]
        return (commands[0][8:] if commands else None), capsys.readouterr().out

    call.versions, call.specs, call.status, call.commands = versions, {}, 0, commands
    return call


@pytest.mark.parametrize(
    ("source", "card", "packages", "wanted"),
    [
        (GIT, None, {}, GIT),
        (GIT, T4, {}, f"specjax[cuda12] @ {GIT}"),
        (GIT, "580.65.06, 8.9", {}, f"specjax[cuda13] @ {GIT}"),
        (GIT, "580.65.06, 7.0", {}, f"specjax[cuda12] @ {GIT}"),
        (GIT, "470.10.01, 7.5", {}, GIT),
        (GIT, "", {}, GIT),  # nvidia-smi without a card
        # Colab's JAX is updated if it is too old, for the same CUDA.
        (GIT, "580.65.06, 8.9", {"jax": "0.10.2", "jax-cuda12-plugin": "0.10.2"}, GIT),
        (GIT, "580.65.06, 8.9", {"jax": "0.7.2", "jax-cuda12-plugin": "0.7.2"}, f"specjax[cuda12] @ {GIT}"),
        (GIT, T4, {"jax": "0.11.0"}, f"specjax[cuda12] @ {GIT}"),
        ("dist/specjax.whl", T4, {}, "dist/specjax.whl[cuda12]"),
    ],
)
def test_packages_for_a_machine(source, card, packages, wanted, tmp_path, monkeypatch, first):
    smi = tmp_path / "nvidia-smi"
    if card is not None:
        smi.write_text(f"#!/bin/sh\necho '{card}'\n")
        smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.setenv("SPECJAX_SOURCE", source)
    first.versions.update(packages)
    installed, printed = first(tmp_path)
    assert installed == [wanted, "matplotlib>=3.8", "ipywidgets"]
    assert f"pip install {wanted} " in printed and "done" in printed


def test_colabs_packages_stay(tmp_path, monkeypatch, first):
    """pip installs into an environment of its own, which has Colab's packages, too."""
    monkeypatch.setenv("SPECJAX_SOURCE", GIT)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.7.2"))
    first.versions.update({"google-colab": "1.0", "jax": "0.7.2"})
    first(tmp_path)
    beside = tmp_path / "specjax-packages"
    assert first.commands[0][2:6] == ["pip", "--python", str(beside / "bin" / "python"), "install"]
    assert "include-system-site-packages = true" in (beside / "pyvenv.cfg").read_text()
    assert Path(sys.path[0]).parts[-4:-2] == ("specjax-packages", "lib")
    assert os.environ["PYTHONPATH"] == f"{sys.path[0]}{os.pathsep}before"
    # The cell's own process has another JAX: a new session is needed, and finds the packages.
    sys.path.pop(0)
    first.versions["jax"] = "0.10.2"
    with pytest.raises(SystemExit, match=r"^JAX 0\.7\.2 was imported before JAX 0\.10\.2 .*Restart session"):
        first(tmp_path)


COLAB = {
    "jax": "0.7.2", "flax": "0.11.2", "numba": "0.61.2", "llvmlite": "0.44.0", "numpy": "2.1.3", "optax": "0.2.8",
    "orbax-checkpoint": "0.12.4", "transformers": "5.15.0", "tokenizers": "0.22.2", "safetensors": "0.8.0",
    "huggingface-hub": "1.27.0", "jinja2": "3.1.6", "fastapi": "0.141.1", "uvicorn": "0.52.3", "pydantic": "2.13.4",
    "prometheus-client": "0.26.0", "filelock": "3.32.3", "tqdm": "4.67.3", "torch": "2.11.0", "triton": "3.6.0",
}  # fmt: skip
"""Versions on Colab's GPU machines, 2026-08-19: pip-freeze.gpu.txt of github.com/googlecolab/backend-info, a724079."""


def test_requirements_against_colabs_packages():
    needed = {each.name: each.specifier for each in map(Requirement, PROJECT["project"]["dependencies"])}
    assert {"torch", "triton"}.isdisjoint(needed), "torch pins its triton"
    newer = {name for name, version in COLAB.items() if name in needed and version not in needed[name]}
    assert newer == {"jax", "flax", "numba", "llvmlite"}, "these are installed beside Colab's"
    assert needed.keys() - COLAB.keys() == {"gguf", "jaxtyping", "llguidance", "google-re2"}, "these are added"


def checkout(folder: Path) -> None:
    (folder / "kernels" / "specjax_kernels").mkdir(parents=True)
    (folder / "pyproject.toml").touch()


@pytest.mark.parametrize(
    ("holds", "wanted"),
    [
        (["specjax-0.2.0-py3-none-any.whl", "specjax-0.1.0-py3-none-any.whl"], "{here}/specjax-0.1.0-py3-none-any.whl"),
        (["specjax-0.1.0-py3-none-any (1).whl"], "specjax-0.1.0-py3-none-any.whl"),  # uploaded twice
        (["../..", "other-1.0-py3-none-any.whl"], "{here}/../.."),
        (["specjax"], "{here}/specjax"),  # a clone
        (["..", "specjax-0.1.0-py3-none-any.whl"], "{here}/specjax-0.1.0-py3-none-any.whl"),
    ],
    ids=["newest wheel", "renamed wheel", "two above", "below", "wheel before checkout"],
)
def test_search_for_specjax(holds, wanted, tmp_path, monkeypatch, first):
    here = tmp_path / "some" / "notebooks"
    here.mkdir(parents=True)
    for age, name in enumerate(holds):
        if name.endswith(".whl"):
            (here / name).touch()
            os.utime(here / name, (1e9 + age, 1e9 + age))
        else:
            checkout(here / name)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    first.specs["specjax"] = SimpleNamespace(origin=None)  # the clone's folder
    (source, *_), _ = first(here)
    assert Path(source).exists()
    if "{here}" in wanted:
        assert Path(source).resolve() == Path(wanted.format(here=here)).resolve()
    else:
        assert Path(source).name == wanted


def test_errors_of_the_first_cell(tmp_path, monkeypatch, first):
    with pytest.raises(SystemExit, match=r"^specjax is not installed: [^.]*`make wheel`[^.]*SOURCE[^.]*\.$"):
        first(tmp_path)
    monkeypatch.setenv("SPECJAX_SOURCE", GIT)
    first.status = 1
    with pytest.raises(SystemExit, match="done"):  # the last lines of pip
        first(tmp_path)


def test_first_cell_with_specjax_installed(tmp_path, first):
    first.specs.update(dict.fromkeys(("specjax", "specjax_kernels"), SimpleNamespace(origin="there")))
    assert first(tmp_path) == (None, "")


# Run.


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Environment:
    _, wheel = build(copy_tree(tmp_path_factory.mktemp("wheel") / "tree"), tmp_path_factory.mktemp("out"))
    return install(wheel, tmp_path_factory.mktemp("installed"))


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
    settings = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    settings |= {"MPLBACKEND": "Agg", "SPECJAX_NOTEBOOK_SHORT": "1", "TMPDIR": str(tmp_path), **tiny}
    command = [str(installed.python), "-c", RUN, str(FOLDER / f"{name}.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
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
