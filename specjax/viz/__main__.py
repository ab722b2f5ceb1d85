"""Draws the draft tree of one decode step after verification.

specjax viz --prompt "Count from one to twenty." --output tree.svg
specjax viz --trees runs/bench/trees/mt_bench-T0-batch1-repeat0.jsonl --output tree.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specjax import Engine, EngineConfig, SamplingParams
from specjax.checkpoint import BUILT_IN_MODEL
from specjax.drafters import Auto, options_of
from specjax.settings import Parser
from specjax.state import StepTree
from specjax.viz.drawing import Text, draw_steps


def most_telling(trees: list[StepTree]) -> int:
    """Selects the step with most accepted drafts, preferring steps with rejected drafts, then larger trees."""
    ranks = [(tree.accepted < len(tree.tokens) - 1, tree.accepted, len(tree.tokens)) for tree in trees]
    return ranks.index(max(ranks))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="specjax viz", description=(__doc__ or "").split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="a user's message, which the model answers")
    source.add_argument(
        "--trees", metavar="FILE", help="trees of `specjax bench --trees`; the flags of models are unused"
    )
    parser.add_argument("--answer", type=int, help="with --trees: line of the file, from 1 (default: the best step's)")
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
        print(draw(args) if args.trees is None else draw_kept(args))
    except (ValueError, NotImplementedError, OSError) as error:
        parser.error(str(error))
    return 0


def draw_kept(args: argparse.Namespace) -> str:
    """Draws a step of a file that `specjax bench --trees` wrote. Returns the line to print."""
    answers = [json.loads(line) for line in Path(args.trees).read_text(encoding="utf-8").splitlines()]
    kept = [[StepTree(**_arrays(tree)) for tree in answer["trees"]] for answer in answers]
    if args.answer is not None and not 1 <= args.answer <= len(answers):
        raise ValueError(f"--answer {args.answer} is not one of the {len(answers)} lines of {args.trees}")
    every = range(len(answers)) if args.answer is None else [args.answer - 1]
    best = [(number, kept[number][most_telling(kept[number])]) for number in every if kept[number]]
    if not best:
        raise ValueError(f"{args.trees} has no steps")
    line, _ = best[most_telling([tree for _, tree in best])]
    answer = answers[line]
    written = write(kept[line], lambda ids: answer["texts"][str(ids[0])], args)
    return f"{written}: {answer['method']}, {answer['conversation']}, turn {answer['turn']} (--answer {line + 1})"


def _arrays(tree: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    return {name: np.array(leaf, np.float32 if name == "scores" else np.int32) for name, leaf in tree.items()}


def write(trees: list[StepTree], text: Text, args: argparse.Namespace) -> str:
    """Draws one of the trees of a text. Returns what was written."""
    number = most_telling(trees) + 1 if args.step is None else args.step
    if not 1 <= number <= len(trees):
        raise ValueError(f"--step {number} is not one of the {len(trees)} steps of this text, 1 to {len(trees)}")
    draw_steps([trees[number - 1]], text, first=number).save(args.output)
    return f"wrote step {number} of {len(trees)} to {args.output}"


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
    return write(trees, engine.tokenizer.decode, args)


if __name__ == "__main__":
    sys.exit(main())
