"""`specjax serve`; see `specjax.cli.serve`."""

from __future__ import annotations

import gc
import os
import signal
import sys

from specjax.packages import MissingPackage, need

PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def main(argv: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))  # nothing has begun; imports swallow some exceptions
    # Imports and tracing allocate many long-lived objects, which frequent garbage collection would scan.
    gc.set_threshold(100_000, 20, 100)
    try:
        for name, package in PACKAGES.items():
            need(name, package, "servers")
    except MissingPackage as error:
        print(f"specjax serve: {error}", file=sys.stderr)
        return 2
    from specjax.cli.serve import main as serve  # takes seconds, in which signals must work, too

    return serve(argv)


if __name__ == "__main__":
    sys.exit(main())
