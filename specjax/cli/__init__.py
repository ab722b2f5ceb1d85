"""What a command line needs. `flags` is the only module that knows the flags' names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def run_command(name: str, work: Callable[[], Mapping[str, Any]], *, interrupted: str, failed: str = "") -> int:
    """Do a command's work and print its summary, as JSON; returns the exit status. `interrupted` says what is left
    after Ctrl-C. `failed` is the key of the summary that makes the status 1 if it is not 0."""
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
