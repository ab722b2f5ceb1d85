"""Packages that single features need: imported when a feature is used, and named if they are missing."""

from __future__ import annotations

import importlib
from typing import Any


class MissingPackage(ImportError, ValueError):
    """A package is not installed. As a ValueError it refuses the request or the setting that needs the package."""


def need(module: str, package: str, feature: str) -> Any:
    """Imports a module of a package. Raises MissingPackage, with the command that installs the package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingPackage(f"{feature} need {package}, which is not installed: pip install {package}") from None
