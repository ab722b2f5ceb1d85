"""`specjax tune`; see `specjax.cli.tune`."""

import sys

from specjax.cli.tune import main

if __name__ == "__main__":
    sys.exit(main())
