"""Tools that make what drafters read: token maps, data and heads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def run_command(name: str, work: Callable[[], Mapping[str, Any]], *, interrupted: str, failed: str = "") -> int:
    """Do a command's work and print its summary, as JSON; returns the exit status.

    Args:
        interrupted: what is left after Ctrl-C.
        failed: the key of the summary that makes the status 1 if it is not 0.
    """
    try:
        summary = work()
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; {interrupted}", file=sys.stderr)
        return 130
    print(json.dumps(summary))
    return 1 if summary.get(failed) else 0


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """How the settings of a run that is resumed differ from those it began with; empty if they do not."""
    return "; ".join(
        f"{name if ' ' in name else '--' + name.replace('_', '-')} was {known.get(name)!r:.60} and is "
        f"{wanted.get(name)!r:.60}"
        for name in sorted({*known, *wanted})
        if known.get(name) != wanted.get(name)
    )
