"""Accept lengths of sampled text with and without the target's noise in the drafts, from one recorded run of each text.

    python benchmarks/coupling.py [--trees 5,1,6 5,8,32] [--settings 0 0.3 0.7 1 0.7/0.8/20] [--limit 4] [--record]

A setting is a temperature, a top-p and a top-k. Each text is decoded once; at each position every drafter proposes its
tree, and what it would have accepted is replayed (`specjax.bench.replay`), so that all drafters see the same texts.
Accept length counts the bonus token. "Kept" is the share of its accept length at the first setting that a tree keeps.
No time is measured. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from zlib import crc32

from records import DATA, finish, machine
from tqdm import tqdm

from specjax import checkpoint
from specjax.bench.contenders import Source
from specjax.bench.methods import Method, parse_methods
from specjax.bench.replay import Recorder, replay
from specjax.bench.results import accept_length, add_histograms
from specjax.bench.sets import read_sets
from specjax.checkpoint.prompts import encode

COUPLINGS = ("noise", "none")
PAGES = 64
SETTING = ("temperature", "top_p", "top_k")


def setting(text: str) -> dict[str, float]:
    """`0.7/0.8/20` as arguments of `specjax.state.new_row`."""
    given = dict(zip(SETTING, map(float, text.split("/")), strict=False))
    return given | ({"top_k": int(given["top_k"])} if "top_k" in given else {})


def methods_of(args: argparse.Namespace) -> list[Method]:
    """Every tree with every coupling."""
    found = []
    for tree in args.trees:
        steps, topk, nodes = tree.split(",")
        more = [f"path={args.draft}"] if args.draft else []
        options = ",".join([f"steps={steps},topk={topk},nodes={nodes}", *more, *args.options])
        found += [f"{args.algorithm}:{options},coupling={one},name={tree.replace(',', '/')} {one}" for one in COUPLINGS]
    return parse_methods(found)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each set, setting and method."""
    source, methods = Source({"model": args.model}), methods_of(args)
    loaded = [source.load(method) for method in methods]
    first, drafters = loaded[0], [one.drafter for one in loaded]
    recorder = Recorder(first.target, first.params, drafters, pages=PAGES)
    vocab, rows = first.target.config.vocab_size, []
    for each in read_sets(args.sets, data=args.data, limit=args.limit, turns=1):
        prompts = {
            one.id: encode([{"role": "user", "content": one.turns[0]}], first.tokenizer, vocab)
            for one in each.conversations
        }
        fitting = {id: ids for id, ids in prompts.items() if len(ids) + args.max_new_tokens <= PAGES * 16}
        for text in args.settings:
            recordings = [
                recorder(
                    ids, args.max_new_tokens, stop_ids=tuple(first.eos_ids), seed=crc32(id.encode()), **setting(text)
                )
                for id, ids in tqdm(fitting.items(), desc=f"{each.name} {text}", disable=None)
            ]
            for index, (method, drafter) in enumerate(zip(methods, drafters, strict=True)):
                found = [replay(recording, index, drafter.depth, drafter.width) for recording in recordings]
                rows.append({
                    "set": each.name, "setting": text, "method": method.name, "prompts": len(recordings),
                    "tokens": sum(len(recording.tokens) for recording in recordings),
                    "histogram": add_histograms(found), "samples": dict(zip(fitting, found, strict=True)),
                })  # fmt: skip
                rows[-1]["accept_length"] = round(accept_length(rows[-1]["histogram"]), 4)
    return rows


def show(rows: list[dict[str, Any]], settings: list[str]) -> None:
    """The sets together."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    print("| tree and coupling | " + " | ".join(f"{text} | kept" for text in settings) + " |")
    print("|---|" + "---|---|" * len(settings))
    for method in methods:
        lengths = [
            accept_length(
                add_histograms(row["histogram"] for row in rows if (row["method"], row["setting"]) == (method, text))
            )
            for text in settings
        ]
        print(f"| {method} | " + " | ".join(f"{one:.2f} | {one / lengths[0]:.0%}" for one in lengths) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL, help="alias, local folder or hub id")
    parser.add_argument("--algorithm", default="EAGLE3", help="EAGLE, EAGLE3, MTP or STANDALONE")
    parser.add_argument("--draft", help="folder or hub id; default: the head that comes with specjax for the model")
    parser.add_argument("--options", nargs="+", default=[], help="more of the algorithm's: vocabulary=intersection")
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
