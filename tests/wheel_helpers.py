"""A wheel of a copy of the tree, and a virtual environment with it and nothing of this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed, with nothing of this process's import path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(root: Path) -> Path:
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


def install(wheel: Path, root: Path) -> Environment:
    """A virtual environment with the wheel, and for its dependencies a look into this one's packages.

    A folder named in a .pth file does not have its own .pth files read, so an editable install here is not seen there.
    """
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
