"""The one error a user of ``specjax.checkpoint`` has to catch."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(ValueError):
    """A model that cannot be found, read or understood.

    The message names the value that was met, what would work, and where the value was set.
    """


def listed(names: Iterable[object], limit: int = 12) -> str:
    """``names`` sorted and joined for a message, shortened after ``limit``."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
