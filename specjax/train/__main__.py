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

With --dry-run nothing is trained: memory and hours are estimated from the target's config.json.

The last line of stdout is one JSON object. Exit status: 0 done, 1 with --dry-run the run does not fit into the memory,
2 an error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from specjax import settings
from specjax.cli import run_command
from specjax.gpu import DEVICES
from specjax.train import plan
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
    group = parser.add_argument_group("dry run", "Reads config.json only; status 1 if the run does not fit.")
    group.add_argument("--dry-run", action="store_true", help="print estimates of memory and hours, and end")
    text = f"estimate for one of {', '.join(DEVICES)}; default: this machine's device"
    group.add_argument("--assume-device", type=str.upper, choices=tuple(DEVICES), metavar="NAME", help=text)
    args, options = settings.parse(parser, argv, TrainOptions())
    if args.assume_device and not args.dry_run:
        parser.error("--assume-device needs --dry-run")
    if args.dry_run:
        work = partial(plan.dry_run, options, args.assume_device)
        return run_command("specjax train", work, interrupted="nothing was written", failed="missing")
    command = shlex.join(["specjax", "train", *(sys.argv[1:] if argv is None else argv)])
    work, after = partial(train, options, command=command), "the same command resumes from the last checkpoint"
    return run_command("specjax train", work, interrupted=after)


if __name__ == "__main__":
    sys.exit(main())
