"""What a step's phases cost with an EAGLE head, and what a smaller draft vocabulary (FR-Spec) saves.

    python benchmarks/draft_cost.py [--trees 5,4,8 3,1,4] [--maps 0 16384 4096] [--record]

The head has random weights of the model's own widths: what a step costs does not depend on them (the accept length
does, and is not looked at). One request at a time; engines take turns, each figure is the median over the rounds, in
milliseconds a step. A map of 0 tokens is the whole vocabulary. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import numpy as np
from records import finish, machine

from specjax import Eagle, Engine, EngineConfig, Params, SamplingParams, checkpoint, make_drafter, make_target
from specjax.config import HeadConfig, ModelConfig
from specjax.engine.executables import PhaseTimes
from specjax.models.draft_head import init_head_params, with_token_map

PROMPT = "The lighthouse keeper wrote in her diary that the storm"


def head_like(model: ModelConfig) -> HeadConfig:
    """An EAGLE-2 head as wide as its target, as published heads are."""
    return HeadConfig(
        "eagle",
        hidden_size=model.hidden_size,
        feature_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        norm_epsilon=model.norm_epsilon,
        rope=model.rope,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
    )


def size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL)
    parser.add_argument("--trees", nargs="+", default=["5,4,8", "3,1,4"], help="steps,top-k,draft tokens")
    parser.add_argument("--maps", nargs="+", type=int, default=[0, 16384, 4096], help="most frequent tokens; 0 = all")
    parser.add_argument("--tokens", type=int, default=33, help="of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/draft-cost-DATE.json")
    args = parser.parse_args()

    files = checkpoint.resolve(args.model)
    config = checkpoint.model_config(files.config)
    tokenizer = checkpoint.load_tokenizer(files)
    weights = checkpoint.load_params(files, config, quantization="none")
    target = make_target(config)
    head = head_like(config)
    draft = init_head_params(head, target, jax.random.key(0))
    ranked = checkpoint.read_token_map(
        str(max(args.maps) or 1),
        vocab_size=config.vocab_size,
        tokens=lambda: [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))],
    )
    print(
        f"the target's weights: {size(weights) / 1e6:.0f} MB; the head's, without the LM head: "
        f"{size(draft) / 1e6:.1f} MB"
    )

    engines: dict[tuple[str, int], Engine] = {}
    for tree in args.trees:
        options = Eagle(None, None, *map(int, tree.split(",")))
        for count in args.maps:
            mapped, params = (
                with_token_map(head, draft, target, weights, np.asarray(ranked[:count])) if count else (head, draft)
            )
            drafter = make_drafter(options, target=target, head=mapped)
            engines[tree, count] = Engine(
                target, Params(weights, params), tokenizer, drafter,
                config=EngineConfig(1, max_total_tokens=1024, context_length=512, time_phases=True, prefix_cache=False),
            )  # fmt: skip
    sampling = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    samples: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in engines}
    for turn in range(args.rounds + 1):  # the first compiles
        for key, engine in engines.items():
            times = engine.executables.phase_times
            assert times is not None
            before = replace(times)
            engine.generate(PROMPT, sampling)
            if turn:
                samples[key].append(times.since(before))

    rows = []
    lm_head = config.hidden_size * config.vocab_size * np.dtype(np.float32).itemsize
    print("tree      map     draft  verify  commit   draft phase against the whole vocabulary")
    for (tree, count), found in samples.items():
        cost = {name: round(median(sample[name] for sample in found), 2) for name in PhaseTimes().since(PhaseTimes())}
        whole = median(sample["draft"] for sample in samples.get((tree, 0), found))
        share = cost["draft"] / whole
        rows.append({"tree": tree, "map": count, "ms": cost, "draft_share_of_whole": round(share, 3), "samples": found})
        figures = "  ".join(f"{cost[name]:6.2f}" for name in ("draft", "verify", "commit"))
        print(f"{tree:8s} {count or config.vocab_size:6d}  {figures}   {share:.2f}x")
    document = machine("jaxlib") | {
        "model": args.model,
        "dtype": config.dtype,
        "rows": rows,
        "bytes": {"target": size(weights), "head": size(draft), "lm_head_float32": lm_head},
    }
    finish("draft-cost", document, record=args.record)


if __name__ == "__main__":
    main()
