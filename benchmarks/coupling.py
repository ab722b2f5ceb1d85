"""Accept lengths of sampled text with and without the target's noise in the drafts.

    python benchmarks/coupling.py [--trees 5,1,6 5,8,32] [--settings 0 0.3 0.7 1 0.7/0.8/20] [--limit 4] [--record]

A setting is a temperature, a top-p and a top-k. The engine decodes each prompt with each tree and the same seed: all
drafters see the same texts (up to near ties). Accept length counts the bonus token; "kept" is its share of the
accept length at the first setting. No time is measured. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from zlib import crc32

from records import DATA, finish, machine
from tqdm import tqdm

from specjax import SamplingParams, checkpoint
from specjax.bench.methods import Method, Source, parse_methods
from specjax.bench.results import accept_length, add_histograms
from specjax.bench.sets import read_sets
from specjax.checkpoint.prompts import encode
from specjax.engine import EngineConfig

COUPLINGS = ("noise", "none")
MAX_TOKENS = 1024  # of a prompt and its answer
SETTING = ("temperature", "top_p", "top_k")


def setting(text: str) -> dict[str, Any]:
    """`0.7/0.8/20` as fields of `SamplingParams`."""
    values: dict[str, Any] = dict(zip(SETTING, map(float, text.split("/")), strict=False))
    return values | ({"top_k": int(values["top_k"])} if "top_k" in values else {})


def methods_of(args: argparse.Namespace) -> list[Method]:
    """Every tree with every coupling."""
    methods = []
    for tree in args.trees:
        steps, topk, nodes = tree.split(",")
        path = [f"path={args.draft}"] if args.draft else []
        options = ",".join([f"steps={steps},topk={topk},nodes={nodes}", *path, *args.options])
        title = tree.replace(",", "/")
        methods += [f"{args.algorithm}:{options},coupling={name},name={title} {name}" for name in COUPLINGS]
    return parse_methods(methods)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each method, set and setting."""
    source, rows = Source({"model": args.model}), []
    config = EngineConfig(max_running_requests=1, max_total_tokens=MAX_TOKENS + 256, prefix_cache=False)
    for method in methods_of(args):
        engine, loaded = source.engine(method, config), source.first
        for prompt_set in read_sets(args.sets, data=args.data, limit=args.limit, turns=1):
            prompts = {
                id: encode([{"role": "user", "content": turn}], loaded.tokenizer, loaded.target.config.vocab_size)
                for id, (turn,) in prompt_set.conversations
            }
            prompts = {id: ids for id, ids in prompts.items() if len(ids) + args.max_new_tokens <= MAX_TOKENS}
            for text in args.settings:
                answers = {}
                for id, ids in tqdm(prompts.items(), desc=f"{method.name}, {prompt_set.name} {text}", disable=None):
                    seed = crc32(id.encode())
                    sampling = SamplingParams(max_new_tokens=args.max_new_tokens, seed=seed, **setting(text))
                    answers[id] = engine.generate(ids, sampling)
                histogram = add_histograms(answer.spec_accept_histogram for answer in answers.values())
                rows.append({
                    "set": prompt_set.name, "setting": text, "method": method.name, "prompts": len(answers),
                    "tokens": sum(len(answer.output_ids) for answer in answers.values()), "histogram": histogram,
                    "samples": {id: answer.spec_accept_histogram for id, answer in answers.items()},
                    "accept_length": round(accept_length(histogram), 4),
                })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], settings: list[str]) -> None:
    """Prints accept lengths over all sets."""
    print("| tree and coupling | " + " | ".join(f"{text} | kept" for text in settings) + " |")
    print("|---|" + "---|---|" * len(settings))
    for method in dict.fromkeys(row["method"] for row in rows):
        parts = [[row["histogram"] for row in rows if (row["method"], row["setting"]) == (method, t)] for t in settings]
        lengths = [accept_length(add_histograms(histograms)) for histograms in parts]
        print(f"| {method} | " + " | ".join(f"{value:.2f} | {value / lengths[0]:.0%}" for value in lengths) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL, help="alias, local folder or hub id")
    parser.add_argument("--algorithm", default="EAGLE3", help="EAGLE, EAGLE3, MTP or STANDALONE")
    parser.add_argument("--draft", help="folder or hub id; default: the head that comes with specjax for the model")
    parser.add_argument("--options", nargs="+", default=[], help="more of the algorithm's: quantization=none")
    parser.add_argument("--trees", nargs="+", default=["5,1,6", "5,8,32"], metavar="STEPS,TOPK,NODES")
    parser.add_argument("--settings", nargs="+", default=["0", "0.3", "0.7", "1"], metavar="T[/TOP_P[/TOP_K]]")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of SET.jsonl files")
    parser.add_argument("--sets", nargs="+", default=["mt_bench", "gsm8k", "humaneval", "spec_bench"])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each set, spread over it; 0 = all")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--record", nargs="?", const=True, metavar="LABEL", help="write benchmarks/results/coupling-…")
    args = parser.parse_args()
    rows = measure(args)
    show(rows, args.settings)
    document = machine("jaxlib", "flax") | {"model": args.model, "algorithm": args.algorithm, "draft": args.draft}
    document |= {"options": args.options}
    finish("coupling", document | {"max_new_tokens": args.max_new_tokens, "results": rows}, record=args.record)


if __name__ == "__main__":
    main()
