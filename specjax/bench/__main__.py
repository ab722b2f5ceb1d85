"""`python -m specjax.bench`; see `specjax.bench.command`."""

import sys

from specjax.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
