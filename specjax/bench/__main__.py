"""`python -m specjax.bench [tune-tree]`, which is `specjax bench`."""

from __future__ import annotations

import sys

from specjax.bench import command, tune_tree


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return tune_tree.main(argv[1:]) if argv[:1] == ["tune-tree"] else command.main(argv)


if __name__ == "__main__":
    sys.exit(main())
