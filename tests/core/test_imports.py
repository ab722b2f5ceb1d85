"""Every module of both packages can be imported (`make smoke` runs this on the newest Python)."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

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
sys.modules["torch"] = None  # as if it were not installed
{first}
import transformers
assert not transformers.is_torch_available()
transformers.logging.get_logger("transformers").warning("a real warning")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.strip().splitlines()[-1].endswith("a real warning") and "PyTorch" not in done.stderr
