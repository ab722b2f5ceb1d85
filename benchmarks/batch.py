"""Throughput of several requests at once, with drafts and without.

    python benchmarks/batch.py [--requests 4 16] [--algorithms AUTO NGRAM] [--sets mt_bench gsm8k] [--record]

Each contender is an engine in a process of its own. It drafts where that is measured to be faster, as a server does
without flags for the tree. In a round every contender completes the same prompts, all at once; contenders take turns,
and their order rotates. A round takes the next prompts of the set, in an order drawn once. The caches are flushed
between rounds. The first `--warm-up` rounds do not count. Background compilation that starts in a round is finished
before the next contender runs. Each request emits exactly `--max-new-tokens` tokens; above `--temperature 0` it has a
seed of its own.

Prints the median tokens / second, the median ratio of tokens / second and of processor seconds to the engine without
drafts, the accept length, and the number of texts that equal those without drafts. `NONE` among the `--algorithms` is
a second engine without drafts: its ratio shows the noise. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from records import DATA, finish, machine, read_prompts

from specjax import Engine, EngineConfig, SamplingParams, checkpoint


class Round(NamedTuple):
    """Results of one contender in one round."""

    seconds: float
    processor_seconds: float  # of all threads
    accept_length: float
    texts: list[list[int]]


engine: Engine
"""A contender's engine, in the contender's process."""


def load(model: str, algorithm: str, config: EngineConfig) -> None:
    global engine
    engine = Engine.from_pretrained(model, draft=algorithm, config=config)
    engine.warm_up_in_background()
    engine.programs.wait()


def encode(texts: list[str]) -> list[list[int]]:
    return [engine.encode([{"role": "user", "content": text}]) for text in texts]


def complete(prompts: list[list[int]], count: int, temperature: float) -> Round:
    """Returns when nothing compiles in the background any more."""
    if not engine.flush_cache():
        raise RuntimeError("requests of the last round still run")
    engine.wait_until_allocated()  # clearing a drafter's state on the device must not count as decoding
    sampling = [
        SamplingParams(max_new_tokens=count, ignore_eos=True, temperature=temperature, seed=index)
        for index in range(len(prompts))
    ]
    started, processor = time.perf_counter(), time.process_time()
    completions = engine.generate(prompts, sampling)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    forwards = sum(completion.spec_verify_ct for completion in completions)
    accept_length = len(prompts) * (count - 1) / forwards
    while engine.programs.pending:
        time.sleep(0.05)
    return Round(seconds, processor, accept_length, [completion.output_ids for completion in completions])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL, help="alias, local folder or hub id")
    parser.add_argument("--algorithms", nargs="+", default=["AUTO", "NGRAM"])
    parser.add_argument("--sets", nargs="+", default=["mt_bench"], help="sets of prompts")
    parser.add_argument("--longest", type=int, default=1200, help="maximum prompt length in tokens; others are skipped")
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of SET.jsonl files")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL", help="write it under benchmarks/results/")
    args = parser.parse_args()
    if min(args.requests) < 1 or args.max_new_tokens < 2 or args.rounds < 1 or args.warm_up < 0:
        parser.error("--requests and --rounds start at 1, --warm-up at 0, and --max-new-tokens at 2")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature}: must be at least 0")

    document = machine("jaxlib", "flax")
    document |= {"model": args.model, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    document |= {"warm_up": args.warm_up, "runs": []}
    print(f"{'set':>10}{'requests':>9}{'contender':>10}{'tok/s':>8}{'to none':>9}{'cpu':>6}{'accept':>8}{'same':>6}")
    spawn = multiprocessing.get_context("spawn")
    for requests in args.requests:
        pool = requests * (args.longest + args.max_new_tokens + 64)
        config = EngineConfig(max_running_requests=requests, max_total_tokens=pool, prefix_cache=False, adaptive=True)
        contenders = {
            name: ProcessPoolExecutor(1, spawn, load, (args.model, name.upper(), config))
            for name in ["none", *args.algorithms]
        }
        for set_name in args.sets:
            texts = [text for _, text in read_prompts(args.data / f"{set_name}.jsonl", None)]
            encoded = contenders["none"].submit(encode, texts).result()
            prompts = [tokens for tokens in encoded if len(tokens) <= args.longest]
            if not prompts:
                parser.error(f"{set_name} has no prompts of up to {args.longest} tokens")
            random.Random(0).shuffle(prompts)  # sets are ordered by category
            rounds: dict[str, list[Round]] = {name: [] for name in contenders}
            cycle = itertools.cycle(prompts)
            for index in range(args.warm_up + args.rounds):
                batch, turn = list(itertools.islice(cycle, requests)), index % len(contenders)
                for name in [*contenders][turn:] + [*contenders][:turn]:
                    result = contenders[name].submit(complete, batch, args.max_new_tokens, args.temperature).result()
                    if index >= args.warm_up:
                        rounds[name].append(result)
            document["runs"] += summarise(set_name, requests, args.max_new_tokens, rounds)
        for contender in contenders.values():
            contender.shutdown()
    finish("batch", document, record=args.record)


def summarise(set_name: str, requests: int, count: int, rounds: dict[str, list[Round]]) -> list[dict[str, object]]:
    """One row a contender, printed as a line of the table."""
    rows = []
    for name, results in rounds.items():
        pairs = list(zip(results, rounds["none"], strict=True))
        rate = statistics.median(requests * count / result.seconds for result in results)
        to_none = statistics.median(none.seconds / result.seconds for result, none in pairs)
        processor = statistics.median(none.processor_seconds / result.processor_seconds for result, none in pairs)
        accept_length = statistics.harmonic_mean([result.accept_length for result in results])
        same = sum(a == b for result, none in pairs for a, b in zip(result.texts, none.texts, strict=True))
        row = {"set": set_name, "requests": requests, "contender": name, "tokens_per_second": round(rate, 2)}
        row |= {"to_none": round(to_none, 3), "processor_to_none": round(processor, 3)}
        row |= {"accept_length": round(accept_length, 4), "same_text": same, "texts": len(pairs) * requests}
        row |= {"each": [round(requests * count / result.seconds, 2) for result in results]}
        rows.append(row)
        line = f"{set_name:>10}{requests:>9}{name:>10}{rate:>8.1f}{to_none:>9.2f}{processor:>6.2f}"
        print(f"{line}{accept_length:>8.2f}{same:>6}", flush=True)
    return rows


if __name__ == "__main__":
    main()
