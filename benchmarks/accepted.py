"""Records which drafts of the shipped head are accepted, for simulations.

    python benchmarks/accepted.py [--limit 8] [--max-new-tokens 160] [--record]

The built-in model answers prompts at temperature 0 with its EAGLE-3 head, once for each of `TREES`. Recorded are the
ranks of the accepted nodes in each step: a smaller tree has the best nodes of a larger one, so of these it accepts
those with a rank below its N (`specjax.engine.draft_policy`). A step starts where the large tree's step before it
ended: a record has fewer easy steps than a smaller tree would see. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

from records import RESULTS, finish, machine
from tqdm import tqdm

from specjax import Eagle3, Engine, EngineConfig, SamplingParams
from specjax.bench.sets import read_sets
from specjax.engine import runtime
from specjax.state import RUNS

SPEC_BENCH = "translation", "summarization", "qa", "math_reasoning", "rag"
SETS = "mt_bench", "gsm8k", "humaneval", *(f"spec_bench/{category}" for category in SPEC_BENCH)
TREES = {"chain": (7, 1, 8), "tree": (5, 4, 16)}  # steps, top-k, nodes
MAX_TOKENS = 1024  # of a prompt and its answer
DIGITS = "0123456789abcdef"

Texts = list[list[tuple[int, ...]]]
"""Ranks of the accepted nodes in each step of each text."""


def read_accepted(tree: str) -> dict[str, Texts]:
    """The latest record of a tree, by set."""
    *_, file = sorted(RESULTS.glob("accepted-*.json"))
    return {
        name: [[tuple(DIGITS.index(digit) for digit in word.strip("-")) for word in text.split()] for text in texts]
        for name, texts in json.loads(file.read_text())["accepted"][tree].items()
    }


def measure(limit: int, max_new_tokens: int) -> dict[str, dict[str, list[str]]]:
    """Tree -> set -> texts. A text has a word for each step: a digit of base 16 for each accepted node, or "-"."""
    config = EngineConfig(max_running_requests=1, max_total_tokens=MAX_TOKENS + 256, prefix_cache=False, adaptive=False)
    accepted = {tree: defaultdict[str, list[str]](list) for tree in TREES}
    steps = list[str]()

    def record(_: Any, flight: runtime.InFlight, read: Any, seconds: float | None) -> None:
        if flight.batch.key.verifies and read.finish[0] == RUNS and read.tokens[0]:
            steps.append("".join(DIGITS[rank] for rank in read.ranks[0]) or "-")

    runtime._record_step = record
    for tree, (levels, topk, nodes) in TREES.items():
        draft = Eagle3(steps=levels, topk=topk, nodes=nodes)
        engine = Engine.from_pretrained(draft=draft, config=config, progress=False)
        for prompts in read_sets(SETS, limit=limit, turns=1):
            for _, (turn,) in tqdm(prompts.conversations, desc=f"{tree} {prompts.name}", disable=None):
                ids = engine.encode([{"role": "user", "content": turn}])
                if len(ids) + max_new_tokens <= MAX_TOKENS:
                    steps.clear()
                    engine.generate(ids, SamplingParams(max_new_tokens=max_new_tokens))
                    accepted[tree][prompts.name].append(" ".join(steps))
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each set (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="of each text (default: %(default)s)")
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL")
    args = parser.parse_args()
    document = machine() | {"trees": TREES, "accepted": measure(args.limit, args.max_new_tokens)}
    finish("accepted", document, record=args.record)


if __name__ == "__main__":
    main()
