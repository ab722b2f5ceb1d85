"""Every module of both packages can be imported (`make smoke` runs this on the newest Python)."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import specjax_kernels

import specjax

MODULES = sorted(
    module.name
    for package in (specjax, specjax_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_import(name):
    importlib.import_module(name)


@pytest.mark.parametrize("first", ["import specjax", "from specjax.checkpoint import load_tokenizer"])
def test_warnings_of_transformers(first):
    program = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None  # as if it were not installed
{first}
import transformers
assert not transformers.is_torch_available()
transformers.logging.get_logger("transformers").warning("a real warning")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.strip().splitlines()[-1].endswith("a real warning") and "PyTorch" not in done.stderr


# Circles of imports. Imports in functions and under TYPE_CHECKING count, and so do names of modules in strings, as
# arguments of `import_module`; those of an `__init__.py` are names that load a module on first use.


def sources() -> dict[str, Path]:
    """Name of a module -> its file."""
    files = {}
    for package in (specjax, specjax_kernels):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            *folders, name = path.relative_to(root).with_suffix("").parts
            files[".".join([package.__name__, *folders, *([] if name == "__init__" else [name])])] = path
    return files


def imported(name: str, files: dict[str, Path]) -> set[str]:
    """The modules that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(files[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in files else node.module)
        elif isinstance(node, ast.Constant) and files[name].name != "__init__.py":
            found |= {node.value} if isinstance(node.value, str) and "." in node.value else set()
    return found & set(files) - {name}


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes of a graph that can be reached from themselves."""
    reached = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return {name for name, others in reached.items() if name in others}


def test_no_circle_of_imports():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}
    files = sources()
    graph = {name: imported(name, files) for name in files}
    assert "specjax_kernels.call" in graph["specjax_kernels.xla"], "an import of names"
    assert "specjax_kernels.triton" in graph["specjax_kernels.gpu_language"], "an import by a string"
    assert not circles(graph)
