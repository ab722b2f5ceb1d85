"""Every module of both packages can be imported: all that `make smoke` asks of specjax itself on a newer Python."""

from __future__ import annotations

import importlib
import pkgutil

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
def test_a_module_can_be_imported(name):
    importlib.import_module(name)
