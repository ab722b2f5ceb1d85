"""Draws the draft tree of one decode step after verification.

specjax viz --prompt "Count from one to twenty." --output tree.svg
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from specjax import Engine, EngineConfig, SamplingParams
from specjax.checkpoint import BUILT_IN_MODEL
from specjax.drafters import Auto, options_of
from specjax.settings import Parser
from specjax.state import StepTree
from specjax.viz.drawing import draw_steps


def most_telling(trees: list[StepTree]) -> int:
    """Selects the step with most accepted drafts, preferring steps with rejected drafts, then larger trees."""
    ranks = [(tree.accepted < len(tree.tokens) - 1, tree.accepted, len(tree.tokens)) for tree in trees]
    return ranks.index(max(ranks))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="specjax viz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompt", required=True, help="a user's message")
    parser.add_argument("--output", required=True, metavar="FILE", help="the SVG file to write")
    target = "the target: alias, folder, .gguf or hub id"
    parser.add_argument("--model", "--model-path", default=BUILT_IN_MODEL, help=target)
    parser.add_argument(
        "--draft", default=Auto.algorithm, metavar="NAME",
        help="an algorithm, or module:function for a drafter of your own (its folder in PYTHONPATH); default: AUTO",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--step", type=int, help="step to draw, from 1 (default: the step with most accepted drafts)")
    parser.add_argument("--tree", type=int, nargs=3, metavar=("STEPS", "TOPK", "NODES"), help="shape of the draft tree")
    args = parser.parse_args(arguments)
    try:
        print(draw(args))
    except (ValueError, NotImplementedError, OSError) as error:
        parser.error(str(error))
    return 0


def draw(args: argparse.Namespace) -> str:
    """Decodes, draws a step and writes the file. Returns the line to print."""
    shape: dict[str, Any] = {} if args.tree is None else dict(zip(("steps", "topk", "nodes"), args.tree, strict=True))
    draft = args.draft if ":" in args.draft else options_of(args.draft)
    if shape:
        if isinstance(draft, str) or not shape.keys() <= set(draft.names()):
            raise ValueError(f"--tree is for algorithms with steps, top-k and nodes; {args.draft} has none of these")
        draft = replace(draft, **shape)
    config = EngineConfig(max_running_requests=1, trace=True)
    engine = Engine.from_pretrained(args.model, draft=draft, config=config)
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=0.0)
    trees = engine.generate([{"role": "user", "content": args.prompt}], sampling).trees
    if not trees:
        raise ValueError("the text ended before a step ran; give another --prompt or more --max-new-tokens")
    number = most_telling(trees) + 1 if args.step is None else args.step
    if not 1 <= number <= len(trees):
        raise ValueError(f"--step {number} is not one of the {len(trees)} steps of this text, 1 to {len(trees)}")
    tree = trees[number - 1]
    draw_steps([tree], engine.tokenizer.decode, first=number).save(args.output)
    return f"wrote step {number} of {len(trees)} to {args.output}"


if __name__ == "__main__":
    sys.exit(main())
