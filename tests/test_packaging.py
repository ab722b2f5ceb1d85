"""The wheel: built from a copy of the tree, installed in an environment of its own, imported from an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import specjax

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = {"specjax": ROOT / "specjax", "specjax_kernels": ROOT / "kernels" / "specjax_kernels"}


DATA = {
    f"specjax/{file.relative_to(ROOT / 'specjax').as_posix()}"
    for file in (ROOT / "specjax" / "data").rglob("*")
    if file.is_file()
}


def source_files(suffix: str = ".py") -> set[str]:
    """Files of both packages, as a wheel names them."""
    return {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for file in folder.rglob(f"*{suffix}")
    }


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed, with nothing of this process's import path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    tree, out = root / "tree", root / "out"
    tree.mkdir()
    for name in ("pyproject.toml", PROJECT["project"]["readme"]):
        shutil.copy(ROOT / name, tree)
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("specjax", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    # Old environments hold an old setuptools; pip then fetches the one that pyproject.toml asks for.
    current = int(version("setuptools").partition(".")[0]) >= 77
    isolation = ["--no-build-isolation"] if current else []
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", out, tree, cwd=root)
    (built,) = out.glob("*.whl")
    return built


class Environment(NamedTuple):
    bin: Path
    site: Path
    empty: Path

    @property
    def python(self) -> Path:
        return self.bin / "python"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    """A virtual environment with the wheel, and for its dependencies a look into this one's packages.

    A folder named in a .pth file does not have its own .pth files read, so an editable install here is not seen there.
    """
    root = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", root / "env", cwd=root)
    binaries = root / "env" / ("Scripts" if os.name == "nt" else "bin")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(binaries / "python", "-c", where, cwd=root).strip())
    here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(here) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel, cwd=root)
    empty = root / "empty"
    empty.mkdir()
    return Environment(binaries, site, empty)


def test_every_package_is_listed():
    found = {str(Path(name).parent).replace("/", ".") for name in source_files()}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found
    without = {name for name in found if f"{name.replace('.', '/')}/__init__.py" not in source_files()}
    assert not without, "folders with Python files but no __init__.py"


def test_kernels_is_a_bare_folder():
    """`kernels` is a package of Hugging Face's that transformers probes for: ours must not be found under that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "kernels").glob("*.py"))


def test_one_version():
    assert PROJECT["project"]["version"] == specjax.__version__


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    tables = {"specjax_kernels/launch_table.json", "specjax_kernels/choice_table.json"}
    others = {"specjax/py.typed", "specjax_kernels/py.typed", "specjax/serve/playground.html", *tables}
    assert names == source_files() | DATA | others
    assert "specjax/data/smollm2-token-map.npy" in names
    assert specjax.__version__ in wheel.name


def test_it_is_imported_from_where_it_was_installed(installed):
    program = """
import importlib.util, json, sys
import specjax, specjax_kernels, specjax.generate
before = "torch" in sys.modules
from transformers import AutoModelForCausalLM  # probes for a package named `kernels`
modules = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("specjax")}
spec = importlib.util.find_spec("kernels")
print(json.dumps([modules, specjax.__version__, before, None if spec is None else str(spec)]))
"""
    modules, found, torch_loaded, kernels = json.loads(run(installed.python, "-c", program, cwd=installed.empty))
    assert {"specjax", "specjax_kernels", "specjax.step", "specjax.engine"} <= set(modules)
    assert all(Path(file).is_relative_to(installed.site) for file in modules.values()), modules
    assert found == specjax.__version__
    assert not torch_loaded, "importing specjax imports torch"
    assert kernels is None, kernels


def test_the_command_runs_there(installed):
    for command in ([installed.python, "-m", "specjax.generate"], [installed.bin / "specjax-generate"]):
        shown = run(*command, "--help", cwd=installed.empty, COLUMNS="200")
        assert "--speculative-algorithm" in shown
        assert "--model" in shown
    assert not list(installed.empty.iterdir())
