"""Draft models of few layers beside the shipped head and n-grams: accept length and decoding speed, interleaved.

    python benchmarks/drafts.py --drafts student=runs/a/head early-exit=runs/b/head [--trees 2,1,3 3,1,4] [--record]

Contenders are the engine on one target: `none`, `ngram`, `eagle3` (the head that comes with specjax, in its measured
tree), and each STANDALONE draft with each tree (steps, top-k, draft tokens). Greedy, so accept lengths do not depend on
what else the machine does; 128 tokens a prompt whatever the text, one request at a time. What is measured and printed
is `decode.py`'s. Texts are compared to `none`'s.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
from accept_length import read_prompts
from decode import engine_contender, load_transformers, measure, read_bandwidth, same_texts, show, summary
from records import DATA, finish, machine

from specjax import Engine, EngineConfig, Ngram, NoDraft, checkpoint
from specjax.drafters import DraftOptions, Eagle3, Standalone


def named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals or not Path(folder, "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FOLDER, the folder one with a config.json")
    return name, folder


def tree(text: str) -> tuple[int, int, int]:
    steps, topk, nodes = map(int, text.split(","))
    return steps, topk, nodes


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draft models beside the shipped head and n-grams.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL)
    parser.add_argument("--drafts", nargs="+", type=named, required=True, metavar="NAME=FOLDER")
    parser.add_argument("--trees", nargs="+", type=tree, default=[(1, 1, 2), (2, 1, 3), (3, 1, 4)], metavar="S,K,N")
    parser.add_argument("--set", default="mt_bench", help="of benchmarks/data")
    parser.add_argument("--limit", type=int, default=10, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/drafts-<date>.json")
    args = parser.parse_args()

    options: dict[str, DraftOptions] = {"none": NoDraft(), "ngram": Ngram(), "eagle3": Eagle3()}
    for name, folder in args.drafts:
        for steps, topk, nodes in args.trees:
            shape = {"steps": steps, "topk": topk, "nodes": nodes}
            options[f"{name} {steps},{topk},{nodes}"] = Standalone(folder, vocabulary="intersection", **shape)
    document = machine("jaxlib")
    engines: dict[str, Engine] = {}
    for name, draft in options.items():
        config = EngineConfig(max_running_requests=1, max_total_tokens=4096, prefix_cache=False)
        engines[name] = Engine.from_pretrained(args.model, draft=draft, config=config, progress=False)
        engines[name].warm_up(engines[name].single_request_keys())
    contenders = {name: engine_contender(engine) for name, engine in engines.items()}
    bandwidth = read_bandwidth()
    prompts = {
        id: engines["none"].encode([{"role": "user", "content": text}])
        for id, text in read_prompts(DATA / f"{args.set}.jsonl", args.limit)
    }
    runs = measure(contenders, prompts, args.max_new_tokens, args.set)
    rows: dict[str, Any] = {}
    texts = {name: [same_texts(runs[name][id], runs["none"][id], prompts[id], None) for id in prompts] for name in runs}
    oracle = None
    if any("different" in found for found in texts.values()):  # are the two best logits close where they part?
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_dequantised(checkpoint.resolve(args.model), Path(folder))
            oracle = load_transformers(Path(folder), "float32")
    for name, engine in engines.items():
        rows[name] = summary(runs[name], contenders[name], bandwidth)
        found = [same_texts(runs[name][id], runs["none"][id], prompts[id], oracle) for id in prompts]
        rows[name]["texts"] = {kind: found.count(kind) for kind in ("equal", "near tie", "different")}
        rows[name]["draft_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params.draft))
    show(rows)
    for name, row in rows.items():
        same = ", ".join(f"{kind} {count}" for kind, count in row["texts"].items() if count)
        print(f"{name:24}draft of {row['draft_bytes'] / 1e6:.1f} MB; texts as none's: {same}")
    document |= {"model": args.model, "drafts": dict(args.drafts), "set": args.set, "limit": args.limit}
    document |= {"max_new_tokens": args.max_new_tokens, "read_gb_per_second": round(bandwidth / 1e9, 2)}
    finish("drafts", document | {"contenders": rows}, record=args.record)


if __name__ == "__main__":
    main()
