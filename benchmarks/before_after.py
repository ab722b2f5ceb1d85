"""Compares the speed of two source trees, one request at a time, in turns within one run.

    git worktree add ../before REV
    python benchmarks/before_after.py --before ../before --data FOLDER [--algorithms NONE AUTO] [--limit 20] [--record]

    python benchmarks/before_after.py --before ../before --forward 1 2 4 8 [--dtype bfloat16] [--record LABEL]

    python benchmarks/before_after.py --before . --before-env SPECJAX_CPU_KERNELS=0 [--forward 1 2 4 8]

Each tree and algorithm has a process of its own with an engine of that tree. One process works at a time, in rotating
order. Decoding is greedy. The ratio of an algorithm is the time after over the time before, for the same prompt: the
median over all prompts and rounds, with its 95% interval (binomial). Texts of both trees are compared. `--forward`
times the target's forward of that many new tokens after 300 committed tokens, for the built-in model: minimum and
median of many short runs in turns. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def one_request() -> Any:
    """Settings for one request at a time, without a prefix cache, because every round has the same prompts."""
    from specjax import EngineConfig

    return EngineConfig(max_running_requests=1, prefix_cache=False, adaptive=False)


def work(algorithm: str, tokens: int) -> None:
    """Reads prompts, one JSON object a line, and writes seconds and token ids."""
    from specjax import Engine, SamplingParams

    engine = Engine.from_pretrained(draft=algorithm, config=one_request(), progress=False)
    engine.warm_up(progress=False)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    print(json.dumps({"ready": engine.drafter.name}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        done = engine.generate(json.loads(line)["messages"], params)
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "ids": done.output_ids}), flush=True)


def work_forward(dtype: str) -> None:
    """Reads numbers of tokens, one a line, and writes the seconds of one forward of that many tokens."""
    import jax
    import jax.numpy as jnp
    from specjax_kernels import CAUSAL

    from specjax import Engine, PoolShape, init_state

    config = one_request()
    engine = Engine.from_pretrained(draft="NONE", dtype=dtype, config=config, progress=False)
    target, params = engine.target, engine.params.target
    cache = init_state(engine.params, target, engine.drafter, rows=1, pool=PoolShape(40, 16)).cache
    table = jnp.arange(40, dtype=jnp.int32)[None]

    @jax.jit
    def forward(params: Any, cache: Any, tokens: jax.Array) -> jax.Array:
        start = jnp.full(1, 300, jnp.int32)
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        output = target.forward(params, target.embed(params, tokens), positions, CAUSAL, cache, table, start)
        return jnp.argmax(target.unembed(params, output.hidden), axis=-1)

    print(json.dumps({"ready": dtype}), flush=True)
    for line in sys.stdin:
        tokens = jnp.ones((1, json.loads(line)["rows"]), jnp.int32)
        forward(params, cache, tokens).block_until_ready()
        begun = time.perf_counter()
        forward(params, cache, tokens).block_until_ready()
        print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)


Side = tuple[Path, dict[str, str]]
"""A source tree and its environment variables."""


class Worker:
    def __init__(self, side: Side, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        tree, settings = side
        environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")])}
        self._process = subprocess.Popen(
            command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.drafter = self._read()["ready"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)

    def run(self, **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% interval of the median, by order statistics."""
    count, ordered = len(ratios), sorted(ratios)
    reach = int(0.98 * count**0.5) + 1
    return ordered[max(count // 2 - reach, 0)], ordered[min(count // 2 + reach, count - 1)]


def heading(before: Side, machine: Any) -> dict[str, Any]:
    """Head of the record, with the other tree's commit and environment, and the settings of XLA and Numba."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=before[0], capture_output=True, text=True)
    settings = {name: text for name, text in os.environ.items() if name == "XLA_FLAGS" or name.startswith("NUMBA_")}
    heads = {"before": done.stdout.strip(), "before_environment": before[1], "environment": settings}
    return machine("jaxlib") | heads


def compare_forwards(trees: dict[str, Side], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a forward of each width in both trees, in turns."""
    workers = {name: Worker(tree, "--forward", "--dtype", args.dtype) for name, tree in trees.items()}
    rows = []
    for width in args.forward:
        samples: dict[str, list[float]] = {name: [] for name in trees}
        for turn in range(args.runs):
            for name in (list(trees), list(trees)[::-1])[turn % 2]:
                samples[name].append(workers[name].run(rows=width)["seconds"])
        row: dict[str, Any] = {"tokens": width, "dtype": args.dtype}
        figures = []
        for kind, of in (("least", min), ("median", statistics.median)):
            row[kind] = {name: of(seconds) for name, seconds in samples.items()}
            before, after = row[kind].values()
            figures.append(f"{kind} {1e3 * before:.1f} ms before, {1e3 * after:.1f} after, ratio {after / before:.3f}")
        print(f"{args.dtype}, {width} tokens: {'; '.join(figures)}", flush=True)
        rows.append(row | {"seconds": samples})
    for worker in workers.values():
        worker.close()
    return rows


def compare_texts(trees: dict[str, Side], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and texts of the prompts by each algorithm in both trees, in turns."""
    lines = (args.data / "mt_bench.jsonl").read_text().splitlines()[: args.limit]
    prompts = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    workers = {
        (name, algorithm): Worker(tree, "--work", algorithm, "--max-new-tokens", str(args.max_new_tokens))
        for algorithm in args.algorithms
        for name, tree in trees.items()
    }
    keys = list(workers)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
    equal = dict.fromkeys(args.algorithms, 0)
    for number, messages in enumerate(prompts * args.rounds):
        first = number % len(keys)
        answers = {key: workers[key].run(messages=messages) for key in (*keys[first:], *keys[:first])}
        for key in keys:
            seconds[key].append(answers[key]["seconds"])
        for algorithm in args.algorithms:
            equal[algorithm] += answers["before", algorithm]["ids"] == answers["after", algorithm]["ids"]
    rows = []
    for algorithm in args.algorithms:
        samples = {name: seconds[name, algorithm] for name in trees}
        ratios = [after / before for before, after in zip(*samples.values(), strict=True)]
        ratio, (low, high) = statistics.median(ratios), interval(ratios)
        speeds = {name: args.max_new_tokens * len(ratios) / sum(times) for name, times in samples.items()}
        row = {"algorithm": algorithm, "drafter": workers["after", algorithm].drafter, "time_after_by_before": ratio}
        row |= {"interval": [low, high], "tokens_per_second": speeds, "equal_texts": equal[algorithm]}
        rows.append(row | {"texts": len(ratios), "seconds": samples})
        print(
            f"{algorithm}: {speeds['before']:.1f} tok/s before, {speeds['after']:.1f} after; time after / before "
            f"{ratio:.4f} ({low:.3f} to {high:.3f}); {equal[algorithm]} of {len(ratios)} texts equal"
        )
    for worker in workers.values():
        worker.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a source tree; after is the one of this file")
    parser.add_argument("--before-env", nargs="+", default=[], metavar="NAME=VALUE", help="environment of before")
    data = HERE / "specjax/data/prompts"
    parser.add_argument("--data", type=Path, default=data, metavar="FOLDER", help="folder with mt_bench.jsonl")
    parser.add_argument("--algorithms", nargs="+", default=["NONE", "AUTO"])
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--forward", nargs="*", type=int, metavar="TOKENS", help="time a forward of so many new tokens")
    parser.add_argument("--runs", type=int, default=60, help="of each forward and tree")
    parser.add_argument("--dtype", default="float32", help="of the forward")
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL",
                        help="write benchmarks/results/before-after-DATE[-LABEL].json")  # fmt: skip
    parser.add_argument("--work", metavar="ALGORITHM", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.work, args.max_new_tokens)
        return
    if args.forward == []:
        work_forward(args.dtype)
        return
    if args.before is None:
        parser.error("--before is required")
    from records import finish, machine

    settings = dict(item.split("=", 1) for item in args.before_env)
    trees: dict[str, Side] = {"before": (args.before.resolve(), settings), "after": (HERE, {})}
    rows = (compare_texts if args.forward is None else compare_forwards)(trees, args)
    finish("before-after", heading(trees["before"], machine) | {"rows": rows}, record=args.record)


if __name__ == "__main__":
    main()
