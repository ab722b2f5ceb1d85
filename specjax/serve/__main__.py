"""`specjax serve`; see `specjax.cli.serve`."""

from __future__ import annotations

import gc
import os
import signal
import sys


def main(argv: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))  # nothing has begun; imports swallow some exceptions
    # Imports and tracing allocate many long-lived objects, which frequent garbage collection would scan.
    gc.set_threshold(100_000, 20, 100)
    from specjax.cli.serve import main as serve  # takes seconds, in which signals must work, too

    return serve(argv)


if __name__ == "__main__":
    sys.exit(main())
