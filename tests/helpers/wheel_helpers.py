"""A copy of the source tree, its wheels, and virtual environments without this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed, without this process's import path."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


FOLDERS = ("specjax", "kernels", "deploy")  # builds must not contain the last one


def copy_tree(target: Path) -> Path:
    """A copy of the files that a build reads, with bytecode, and of a folder that it must not read."""
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE", "CHANGELOG.md"):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name)
    return target


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel built from the unpacked sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=tree.parent)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


class Environment(NamedTuple):
    bin: Path
    site: Path
    empty: Path

    @property
    def python(self) -> Path:
        return self.bin / "python"


def create(root: Path) -> Environment:
    """A virtual environment without specjax, whose other packages are links to those of this environment.

    Python does not read .pth files in a folder that a .pth file names, so editable installs here are not found.
    """
    run(sys.executable, "-m", "venv", "--without-pip", root / "env", cwd=root)
    binaries = root / "env" / ("Scripts" if os.name == "nt" else "bin")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(binaries / "python", "-c", where, cwd=root).strip())
    links, empty = root / "dependencies", root / "empty"
    links.mkdir()
    empty.mkdir()
    for folder in {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}:
        for package in Path(folder).iterdir():
            if not package.name.startswith("specjax"):
                (links / package.name).symlink_to(package)
    (site / "dependencies.pth").write_text(f"{links}\n")
    return Environment(binaries, site, empty)


def install(what: Path, root: Path, *options: str) -> Environment:
    """An environment of `create` with the wheel or tree."""
    created = create(root)
    pip = [sys.executable, "-m", "pip", "--python", created.python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *options, what, cwd=root)
    return created
