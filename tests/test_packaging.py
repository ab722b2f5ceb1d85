"""The wheel: built from a copy of the tree, installed in an environment of its own, imported from an empty folder."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from wheel_helpers import PROJECT, ROOT, Environment, build_wheel, install, run

import specjax

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    return install(wheel, tmp_path_factory.mktemp("installed"))


def test_every_package_is_listed():
    """With the folders of data that could be imported, of which setuptools warns if they are not."""
    found = {str(Path(name).parent).replace("/", ".") for name in source_files()}
    data = {str(Path(name).parent).replace("/", ".") for name in DATA}
    data = {name for name in data if all(map(str.isidentifier, name.split(".")))} | {"specjax.data.heads"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | data
    without = {name for name in found if f"{name.replace('.', '/')}/__init__.py" not in source_files()}
    assert not without, "folders with Python files but no __init__.py"


def test_kernels_is_a_bare_folder():
    """`kernels` is a package of Hugging Face's that transformers probes for: ours must not be found under that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "kernels").glob("*.py"))


def test_one_version():
    assert PROJECT["project"]["version"] == specjax.__version__


@pytest.mark.process
def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    tables = {"specjax_kernels/launch_table.json", "specjax_kernels/choice_table.json"}
    others = {"specjax/py.typed", "specjax_kernels/py.typed", "specjax/serve/playground.html", *tables}
    assert names == source_files() | DATA | others
    assert "specjax/data/smollm2-token-map.npy" in names
    assert specjax.__version__ in wheel.name


@pytest.mark.process
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


@pytest.mark.process
def test_the_command_runs_there(installed):
    for command in ([installed.python, "-m", "specjax.generate"], [installed.bin / "specjax-generate"]):
        shown = run(*command, "--help", cwd=installed.empty, COLUMNS="200")
        assert "--speculative-algorithm" in shown
        assert "--model" in shown
    assert not list(installed.empty.iterdir())
