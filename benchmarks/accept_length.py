"""Accept length and speed of an algorithm on sets of prompts.

    python benchmarks/accept_length.py --data benchmarks/data --sets gsm8k mt_bench --algorithm NGRAM [--record]

Accept length = tokens that verification emitted / verification forwards: the bonus token counts, the token that prefill
draws does not, so plain decoding is exactly 1. The histogram is the share of forwards by drafts accepted and emitted;
its mean + 1 is the accept length. The first turn of each line is sent as a chat message; between sets, and between
temperatures of a set, the drafter forgets what it has seen. The last line is one JSON document with every request.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from records import DATA, finish, machine
from tqdm import tqdm

from specjax import Completion, Engine, SamplingParams, settings
from specjax.cli import flags
from specjax.engine.buckets import drafting_summary


def read_prompts(file: Path, count: int | None) -> list[tuple[str, str]]:
    """(id, first turn) of the first `count` lines."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(row["id"], row["turns"][0]) for row in rows[:count]]


def spread(rows: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """`count` of the rows from the whole file: sets are ordered by category."""
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))] if count else rows


def run_set(engine: Engine, name: str, prompts: list[tuple[str, str]], sampling: SamplingParams) -> dict[str, Any]:
    messages = [[{"role": "user", "content": text}] for _, text in prompts]
    done: dict[int, Completion] = {}
    with tqdm(total=len(prompts), desc=name, unit="req") as bar:
        started, drafted = time.perf_counter(), engine.counters.drafted_steps
        for chunk in engine.generate(messages, sampling, stream=True):
            if chunk.completion is not None:
                done[chunk.prompt_index] = chunk.completion
                bar.update()
        seconds = time.perf_counter() - started
    histogram = [sum(bins) for bins in zip(*(c.spec_accept_histogram for c in done.values()), strict=True)]
    steps = sum(histogram)
    tokens = sum(c.completion_tokens for c in done.values())
    emitted = sum(count * (drafts + 1) for drafts, count in enumerate(histogram))
    assert (steps, emitted + len(done)) == (sum(c.spec_verify_ct for c in done.values()), tokens), (histogram, tokens)
    return {
        "set": name,
        "temperature": sampling.temperature,
        "requests": len(done),
        "tokens": tokens,
        "verify_steps": steps,
        "accept_length": round(emitted / steps, 4) if steps else 1.0,
        **drafting_summary(engine.drafter, engine.buckets, steps, engine.counters.drafted_steps - drafted),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 2),
        "histogram": histogram,
        "samples": [
            {
                "id": id,
                "prompt_tokens": done[i].prompt_tokens,
                "tokens": done[i].completion_tokens,
                "verify_steps": done[i].spec_verify_ct,
                "accept_length": round(done[i].spec_accept_length, 4),
                "finish": done[i].finish_reason["type"],
            }
            for i, (id, _) in enumerate(prompts)
        ],
    }


def shares(histogram: list[int]) -> str:
    """Percent of forwards by drafts accepted, 0 first; what comes after the last non-zero bin is left out."""
    total = max(sum(histogram), 1)
    last = max((i for i, count in enumerate(histogram) if count), default=0)
    return " ".join(f"{100 * count / total:.1f}" for count in histogram[: last + 1])


def main() -> None:
    parser = settings.Parser(description="Accept length on sets of prompts.", formatter_class=settings.HelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of SET.jsonl files with `id` and `turns`")
    parser.add_argument("--sets", nargs="+", required=True, metavar="SET")
    parser.add_argument("--limit", type=int, help="lines of each set; default: all")
    parser.add_argument("--spread", action="store_true", help="take them from the whole set and not from its beginning")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], metavar="T")
    parser.add_argument("--seed", type=int, default=0, help="of every request, where it is sampled")
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL",
                        help="write benchmarks/results/accept_length-<date>[-LABEL].json")  # fmt: skip
    defaults = flags.Settings(engine=flags.EngineSettings(max_running_requests=1))
    settings.add_flags(parser, defaults, ("model", "engine", "speculative"))
    parser.add_argument(
        "--algorithm", dest="speculative_algorithm", default=argparse.SUPPRESS, metavar="NAME",
        help="short for --speculative-algorithm",
    )  # fmt: skip
    args, chosen = settings.parse(parser, None, defaults)

    whole = {name: read_prompts(args.data / f"{name}.jsonl", None) for name in args.sets}
    prompts = {
        name: spread(rows, args.limit or 0) if args.spread else rows[: args.limit] for name, rows in whole.items()
    }
    document = machine("jaxlib", "flax")
    engine = flags.make_engine(chosen)
    at_once = chosen.engine.max_running_requests
    engine.warm_up(engine.single_request_keys() if at_once == 1 else None)
    document |= {"model": chosen.model.model, "algorithm": engine.drafter.name, "dtype": engine.target.config.dtype}
    document |= {"requests_at_once": at_once, "results": []}
    for name, lines in prompts.items():
        for temperature in args.temperature:
            assert engine.flush_cache(), "a set must not remember the one before"
            sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=args.seed)
            document["results"].append(run_set(engine, name, lines, sampling))
    engine.check_integrity()

    print(f"{document['algorithm']} on {chosen.model.model}, {document['device']}, {at_once} at once")
    header = f"{'set':16}{'T':>5}{'requests':>9}{'tokens':>8}{'steps':>8}{'accept':>8}{'tok/s':>8}"
    print(header + "   % of steps by drafts accepted, from 0")
    for row in document["results"]:
        print(
            f"{row['set']:16}{row['temperature']:5g}{row['requests']:9}{row['tokens']:8}{row['verify_steps']:8}"
            f"{row['accept_length']:8.3f}{row['tokens_per_second']:8.1f}   {shares(row['histogram'])}"
        )
    finish("accept_length", document, record=args.record)


if __name__ == "__main__":
    main()
