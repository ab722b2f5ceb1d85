"""A copy of the tree, wheels of it, and virtual environments with these and nothing of this checkout."""

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
    """Output of a command that must succeed, with nothing of this process's import path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


FOLDERS = ("specjax", "kernels", "deploy")  # the last must not get into what is built


def copy_tree(target: Path) -> Path:
    """What a build reads, and a folder that it must leave alone, as they are here: with bytecode, for example."""
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE", "CHANGELOG.md"):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name)
    return target


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from the unpacked sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=tree.parent)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


class Environment(NamedTuple):
    bin: Path
    site: Path
    empty: Path

    @property
    def python(self) -> Path:
        return self.bin / "python"


def install(what: Path, root: Path, *options: str) -> Environment:
    """A virtual environment with the wheel or tree, and for its dependencies a look into this one's packages.

    A folder named in a .pth file does not have its own .pth files read, so an editable install here is not seen there.
    """
    run(sys.executable, "-m", "venv", "--without-pip", root / "env", cwd=root)
    binaries = root / "env" / ("Scripts" if os.name == "nt" else "bin")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(binaries / "python", "-c", where, cwd=root).strip())
    here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(here) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", *options, what, cwd=root)
    empty = root / "empty"
    empty.mkdir()
    return Environment(binaries, site, empty)
