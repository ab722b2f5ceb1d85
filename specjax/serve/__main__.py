"""`python -m specjax.serve`; see `specjax.serve.command`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main(argv: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from specjax.serve.command import main as serve  # takes seconds, in which signals must work, too

    return serve(argv)


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun yet. Not by an exception: imports swallow some."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
