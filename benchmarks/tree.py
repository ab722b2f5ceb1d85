"""Which draft tree decodes fastest with a draft head on this device: what its `serving.toml` should say.

    python benchmarks/tree.py [--head FOLDER] [--trees 1,1,2,0.3 2,1,3,0.4 5,1,6,0] [--limit 20] [--record]

A tree is steps, top-k, draft tokens and the least probability of a draft's path (0: any), as the flags of
`--speculative-algorithm EAGLE3` have them. One request at a time: every tree completes every prompt, and so do the
engine without drafts and, with `--ngram`, the one with n-grams, one after another and in an order that rotates. Each
emits exactly `--max-new-tokens` tokens. Printed, best first, for each: tokens / second end to end, its ratio to the
engine without drafts (over all prompts, and the median over them), accept length and the median step. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decode import Contender, engine_contender, measure, ratio, same_texts, summary
from records import DATA, finish, machine, read_prompts, spread

from specjax import Engine, EngineConfig, Ngram, NoDraft, checkpoint
from specjax.drafters import DraftOptions
from specjax.drafters.options import options_of

NONE, NGRAM = "none", "ngram"
CONFIG = EngineConfig(max_running_requests=1, max_total_tokens=4096, prefix_cache=False)


def options(algorithm: str, head: str | None, tree: str) -> DraftOptions:
    """Options of an algorithm with a draft head and a tree such as '3,1,4,0.4'."""
    steps, topk, nodes, least = tree.split(",")
    numbers = {"steps": int(steps), "topk": int(topk), "nodes": int(nodes), "min_probability": float(least)}
    return options_of(algorithm, path=head, **numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL, help="alias, local folder or hub id")
    parser.add_argument("--algorithm", default="EAGLE3", help="that drafts with the head")
    parser.add_argument("--head", help="folder or hub id; default: the one that comes with specjax for the model")
    parser.add_argument("--trees", nargs="+", default=["1,1,2,0.3", "2,1,3,0.4", "3,1,4,0.4"], metavar="TREE")
    parser.add_argument("--ngram", action="store_true", help="n-grams too")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of SET.jsonl files")
    parser.add_argument("--set", default="mt_bench")
    parser.add_argument("--limit", type=int, default=10, help="prompts, spread over the set; 0 = all")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/tree-<date>.json")
    args = parser.parse_args()

    rows = spread(read_prompts(args.data / f"{args.set}.jsonl", None), args.limit)
    document = machine("jaxlib", "flax")
    document |= {"model": args.model, "head": args.head, "set": args.set, "prompts": len(rows)}
    wanted: dict[str, DraftOptions] = {NONE: NoDraft()} | ({NGRAM: Ngram()} if args.ngram else {})
    wanted |= {tree: options(args.algorithm, args.head, tree) for tree in args.trees}

    contenders: dict[str, Contender] = {}
    for name, draft in wanted.items():
        engine = Engine.from_pretrained(args.model, draft=draft, config=CONFIG)
        engine.warm_up(engine.single_request_keys())
        contenders[name] = engine_contender(engine)
        print(f"{name}: {engine.drafter.note or draft.algorithm}", flush=True)
    prompts = {id: engine.encode([{"role": "user", "content": text}]) for id, text in rows}
    for contender in contenders.values():
        contender.run(next(iter(prompts.values())), 16)

    runs = measure(contenders, prompts, args.max_new_tokens, args.set)
    table = {name: summary(runs[name], contenders[name], float("inf")) for name in contenders}
    for name, row in table.items():
        row |= {"to_none": ratio(row, table[NONE])}
        row["same_text"] = sum(
            same_texts(runs[name][id], runs[NONE][id], prompts[id], None) == "equal" for id in prompts
        )
    print(f"\n{'tree':26}{'tok/s':>8}{'to none':>9}{'median':>8}{'accept':>8}{'step ms':>9}{'same':>6}")
    for name, row in sorted(table.items(), key=lambda item: -item[1]["tokens_per_second"]):
        print(
            f"{name:26}{row['tokens_per_second']:8.1f}{row['to_none']['total']:9.3f}{row['to_none']['median']:8.3f}"
            f"{row['accept_length']:8.3f}{row['step_ms']['median']:9.1f}{row['same_text']:6}"
        )
    finish("tree", document | {"results": table}, record=args.record)


if __name__ == "__main__":
    main()
