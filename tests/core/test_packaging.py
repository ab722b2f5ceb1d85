"""The sdist, its wheel and an editable install, in separate environments."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from wheel_helpers import PROJECT, ROOT, Environment, build, copy_tree, install, run

import specjax


def tracked(*folders: str) -> set[str]:
    """Tracked and new files of folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist and the wheel."""
    root = tmp_path_factory.mktemp("built")
    return build(copy_tree(root / "tree"), root / "out")


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Environment:
    return install(built[1], tmp_path_factory.mktemp("installed"))


def test_packages_and_version():
    """transformers probes for Hugging Face's package `kernels`, so that folder must not be a package."""
    code = {Path(name).parent for name in tracked("specjax", "kernels/specjax_kernels") if name.endswith(".py")}
    assert not [str(folder) for folder in code if not (ROOT / folder / "__init__.py").is_file()]
    assert not list((ROOT / "kernels").glob("*.py"))
    assert PROJECT["project"]["version"] == specjax.__version__


@pytest.mark.process
def test_files_of_wheel_and_sdist(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("kernels/") for name in tracked("specjax", "kernels/specjax_kernels")}
    assert {"specjax/py.typed", "specjax/data/smollm2-token-map.npy", "specjax_kernels/launch_table.json"} <= names
    assert specjax.__version__ in built[1].name

    with tarfile.open(built[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    others = {".gitignore", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"}
    assert names == tracked("specjax", "kernels") | others


@pytest.mark.process
def test_imports_of_the_installed_wheel(installed):
    program = """
import importlib.util, json, sys
import specjax, specjax_kernels, specjax.cli.generate
before = "torch" in sys.modules
from transformers import AutoModelForCausalLM  # probes for a package `kernels`
modules = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("specjax")}
spec = importlib.util.find_spec("kernels")
print(json.dumps([modules, specjax.__version__, before, None if spec is None else str(spec)]))
"""
    modules, version, torch_loaded, kernels = json.loads(run(installed.python, "-c", program, cwd=installed.empty))
    assert {"specjax", "specjax_kernels", "specjax.step", "specjax.engine"} <= set(modules)
    assert all(Path(file).is_relative_to(installed.site) for file in modules.values()), modules
    assert version == specjax.__version__
    assert not torch_loaded, "importing specjax imports torch"
    assert kernels is None, kernels


@pytest.mark.process
def test_commands_of_the_installed_wheel(installed):
    command = installed.bin / "specjax"
    assert run(command, "--version", cwd=installed.empty) == f"specjax {specjax.__version__}\n"
    assert run(installed.python, "-m", "specjax", "--version", cwd=installed.empty).startswith("specjax ")
    for name in ("serve", "generate", "train"):
        shown = run(command, name, "--help", cwd=installed.empty)
        assert shown.startswith(f"usage: specjax {name} ") and "--model" in shown
    assert not list(installed.empty.iterdir())


@pytest.fixture(scope="module")
def editable(tmp_path_factory) -> Environment:
    """An editable install of a clone in a folder `specjax`, a namespace package if its parent is on `sys.path`,
    with metadata of an earlier setuptools install."""
    tree = copy_tree(tmp_path_factory.mktemp("above") / "specjax")
    (tree / "specjax.egg-info").mkdir()
    (tree / "specjax.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: specjax\nVersion: 0.0.1\n")
    root = tmp_path_factory.mktemp("editable")
    return install(tree, root, "--no-build-isolation", "--editable")._replace(empty=tree.parent)


SCRIPT = """
import importlib.metadata
import specjax, specjax_kernels
from specjax import Engine
print(specjax.__file__, specjax_kernels.__file__, importlib.metadata.version("specjax"))
"""


@pytest.mark.process
def test_script_above_an_editable_install(editable):
    script = editable.empty / "script.py"
    script.write_text(SCRIPT)
    tree, version = editable.empty / "specjax", specjax.__version__
    expected = f"{tree}/specjax/__init__.py {tree}/kernels/specjax_kernels/__init__.py {version}\n"
    assert run(editable.python, script, cwd=editable.empty) == expected
    assert run(editable.bin / "specjax", "--version", cwd=editable.empty) == f"specjax {version}\n"


@pytest.mark.process
def test_pyright_resolves_an_editable_install(editable, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + "reveal_type(Engine)\n")
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", editable.python, "script.py"]
    shown = run(*pyright, cwd=tmp_path)
    assert 'Type of "Engine" is "type[Engine]"' in shown and "0 errors, 0 warnings" in shown
