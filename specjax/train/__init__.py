"""Tools that make what drafters read: token maps, data, heads and models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """How the settings of a run that is resumed differ from those it began with; empty if they do not."""
    return "; ".join(
        f"{name if ' ' in name else '--' + name.replace('_', '-')} was {known.get(name)!r:.60} and is "
        f"{wanted.get(name)!r:.60}"
        for name in sorted({*known, *wanted})
        if known.get(name) != wanted.get(name)
    )
