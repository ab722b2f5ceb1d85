"""`specjax bench`; see `specjax.bench.command`, and for `tune-tree` `specjax.bench.tune_tree`."""

from __future__ import annotations

import sys

from specjax.bench import command, tune_tree

TUNE_TREE = "tune-tree"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return tune_tree.main(argv[1:]) if argv[:1] == [TUNE_TREE] else command.main(argv)


if __name__ == "__main__":
    sys.exit(main())
