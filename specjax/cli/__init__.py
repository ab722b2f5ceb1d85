"""Command lines. In reading order:

flags     flags and keys of configuration files, as dataclasses
build     settings to `Engine` arguments, with errors that name flags
lines     reads JSONL files and folders
generate  the command `specjax generate`
serve     the command `specjax serve`, with the routes of wings
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def run_command(name: str, work: Callable[[], Mapping[str, Any]], *, interrupted: str, failed: str = "") -> int:
    """Runs a command, prints its summary as JSON and returns the exit status.

    Args:
        interrupted: message after Ctrl-C about the results so far.
        failed: key of the summary; the status is 1 if its value is not 0.
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
