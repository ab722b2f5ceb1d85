"""Files that one process writes and that are whole or as they were."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Replaces a file, or leaves it as it was."""
    draft = file.with_name(file.name + ".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)


def hold(descriptor: int) -> bool:
    """Keeps other processes that ask from an open file or folder, until this one closes it or ends, however it ends.

    Returns:
        Whether no other process has it. Where the system has no locks, True.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
