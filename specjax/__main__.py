"""The command `specjax`, also `python -m specjax`: runs the subcommand that its first words name.

Subcommands are imported lazily, so that `--version` and `--help` are immediate.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from itertools import takewhile

from specjax import __version__
from specjax.settings import Parser, nearest

COMMANDS = {
    "serve": ("specjax.serve.__main__:main", "serve a model behind OpenAI's interface"),
    "generate": ("specjax.cli.generate:run_as_program", "complete the prompts of a JSONL file"),
    "bench": ("specjax.bench.command:main", "compare ways of drafting on sets of prompts"),
    "bench tune-tree": ("specjax.bench.tune_tree:main", "find the draft tree that decodes fastest"),
    "train": ("specjax.train.__main__:main", "train a draft for a target"),
    "train generate": ("specjax.train.generate:main", "let the target write training data"),
    "train features": ("specjax.train.features:main", "write hidden states of texts, for other trainers"),
    "train vocab": ("specjax.train.vocab:main", "count tokens: the vocabulary of a draft head"),
    "viz": ("specjax.viz.__main__:main", "draw a draft tree as SVG"),
}
"""Maps a subcommand to its function and its line in `--help`. No subcommand takes positional arguments."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="specjax",
        usage="specjax COMMAND [flags]",
        description="Lossless speculative decoding for JAX. COMMAND --help lists the flags of a command.",
        epilog="commands:\n" + "\n".join(f"  {name:16}  {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"specjax {__version__}")
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    if not words:
        parser.parse_args(argv)
        parser.error(f"a command is missing: {', '.join(COMMANDS)}")
    name = " ".join(words)
    if name not in COMMANDS:
        near = nearest(name, COMMANDS) or nearest(words[0], COMMANDS)
        near += f" --model {' '.join(words[1:])}" if near == words[0] else ""
        parser.error(f"unknown command {name!r}; {f'did you mean {near!r}?' if near else 'see --help.'}")
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)(argv[len(words) :])


if __name__ == "__main__":
    sys.exit(main())
