"""`specjax train`: trains a draft head (EAGLE-3, EAGLE-1/2, MTP, DFlash, DSpark, DFlash2) for a target.

    specjax train --config configs/train/smollm2-135m-instruct-eagle3-1.toml

The frozen target runs with the head; the only data needed is text. Ctrl-C writes a checkpoint after the current step.
The same command resumes a stopped run; a killed run loses the steps since its last checkpoint. A larger --steps extends
a run. The folder --output then has

    checkpoints/     to resume from
    metrics.jsonl    loss, accuracy by round (of blocks by slot), tokens seen and tokens/s; accept lengths: `simulated`
                     on the training text and on held-back answers, and measured in the engine
    best/, head/     for the server: the head with the best accept length, and the last head
    curves.png       with matplotlib

The last line of stdout is one JSON object. Exit status: 0 done, 2 an error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from specjax import settings
from specjax.cli import run_command
from specjax.train.options import TrainOptions
from specjax.train.run import train


def main(argv: list[str] | None = None) -> int:
    parser = settings.Parser(
        prog="specjax train",
        description="Train a draft head for a target: EAGLE-3, EAGLE-1/2, MTP, DFlash, DSpark or DFlash2.",
        epilog=(__doc__ or "").split("\n\n", 2)[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings.add_flags(parser, TrainOptions())
    _, options = settings.parse(parser, argv, TrainOptions())
    command = shlex.join(["specjax", "train", *(sys.argv[1:] if argv is None else argv)])
    work, after = partial(train, options, command=command), "the same command resumes from the last checkpoint"
    return run_command("specjax train", work, interrupted=after)


if __name__ == "__main__":
    sys.exit(main())
