"""Greedy text of the engine against transformers', token for token, in float32.

    python benchmarks/compare_transformers.py --prompts specjax/data/prompts/mt_bench.jsonl --algorithm NONE NGRAM

A matrix product's last bits depend on how many rows it has, so where transformers' two best logits lie closer than
`NEAR` the texts may part. Each parting is printed with that gap; what we emitted from there on is then judged by one
forward of transformers over it: the shortfall is the most by which its best logit exceeds our token's. Exit status 1 if
a gap or a shortfall reaches `NEAR`. The last line is one JSON document with every prompt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from records import DATA, finish, machine, read_prompts
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from specjax import Engine, EngineConfig, SamplingParams, checkpoint
from specjax.drafters import DRAFTERS

NEAR = 1e-3


class Reference(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # between the two best logits, token by token


class Oracle:
    """transformers in float32, greedy, with its KV cache."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, text: str, max_new_tokens: int) -> Reference:
        message = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompt = self.tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            done = self.model.generate(
                **prompt,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
        start = prompt["input_ids"].shape[1]
        best = torch.cat(done.logits).topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        return Reference(prompt["input_ids"][0].tolist(), done.sequences[0, start:].tolist(), gaps)

    def shortfall(self, context: list[int], tokens: list[int]) -> float:
        """The most by which the best logit exceeds that of the token given, over `tokens` after `context`."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return float((logits.max(dim=1).values - chosen).max())


def compare(oracle: Oracle, reference: Reference, tokens: list[int]) -> dict[str, Any]:
    """Equality, or where the texts part and how near a tie that was."""
    expected = reference.tokens
    if tokens == expected:
        return {"tokens": len(tokens), "equal": True, "smallest_gap": min(reference.gaps)}
    pairs = enumerate(zip(tokens, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(expected)))
    # One is a prefix of the other: not a tie, but a stop that one of them missed.
    gap = reference.gaps[at] if at < min(len(tokens), len(expected)) else float("inf")
    rest = oracle.shortfall(reference.prompt + tokens[:at], tokens[at:]) if at < len(tokens) else 0.0
    near = gap < NEAR and rest < NEAR
    return {"tokens": len(tokens), "equal": False, "near_tie": near, "at": at, "gap": gap, "shortfall": rest}


def main() -> int:
    parser = argparse.ArgumentParser(description="Greedy text of the engine against transformers', in float32.")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=DATA / "mt_bench.jsonl",
        help="JSONL with `id` and `turns`; the first turn is used",
    )
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--algorithm", nargs="+", type=str.upper, choices=tuple(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL)
    parser.add_argument("--threads", type=int, default=2, help="of torch; 1 where other work shares the cores")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/compare_transformers-<date>.json"
    )
    args = parser.parse_args()

    document = machine("torch", "transformers")
    torch.set_num_threads(args.threads)
    prompts = read_prompts(args.prompts, args.count)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_dequantised(checkpoint.resolve(args.model), Path(folder))
        oracle = Oracle(Path(folder))
    started = time.perf_counter()
    references = [oracle.generate(text, args.max_new_tokens) for _, text in tqdm(prompts, desc="transformers")]
    document |= {"model": args.model, "prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "near": NEAR}
    document |= {"transformers_seconds": round(time.perf_counter() - started, 1), "results": []}

    failed = False
    for algorithm in args.algorithm:
        config = EngineConfig(max_running_requests=1, prefix_cache=False)
        engine = Engine.from_pretrained(args.model, dtype="float32", draft=algorithm, config=config)
        engine.warm_up(engine.single_request_keys())
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens)
        rows, started, steps, tokens = [], time.perf_counter(), 0, 0
        for (id, text), reference in zip(tqdm(prompts, desc=algorithm), references, strict=True):
            assert engine.encode([{"role": "user", "content": text}]) == reference.prompt, id
            done = engine.generate(reference.prompt, sampling)
            row = {"id": id} | compare(oracle, reference, done.output_ids)
            rows.append(row)
            steps += done.spec_verify_ct
            tokens += done.completion_tokens
            verdict = (
                "equal"
                if row["equal"]
                else f"parts at {row['at']}, gap {row['gap']:.2e}, shortfall {row['shortfall']:.2e}"
            )
            tqdm.write(f"{algorithm:8} {id:16} {row['tokens']:4} tokens   {verdict}")
        engine.check_integrity()
        equal = sum(row["equal"] for row in rows)
        near = sum(row.get("near_tie", False) for row in rows)
        wrong = len(rows) - equal - near
        failed |= wrong > 0
        summary = {"algorithm": algorithm, "equal": equal, "near_ties": near, "different": wrong, "tokens": tokens}
        summary |= {"accept_length": round((tokens - len(rows)) / steps, 4)}
        summary |= {"seconds": round(time.perf_counter() - started, 1)}
        document["results"].append(summary | {"samples": rows})
    for row in document["results"]:
        print({name: value for name, value in row.items() if name != "samples"})
    finish("compare_transformers", document, record=args.record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
