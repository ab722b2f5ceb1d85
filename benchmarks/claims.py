"""Processes that share a run by `--claim`, and are killed at random: is every line there exactly once?

    python benchmarks/claims.py [--prompts 20000] [--processes 4] [--kill-every 8] [--record LABEL]

A tiny random model answers numbered prompts (`specjax.train.generate`). About every `--kill-every` seconds (drawn from
an exponential distribution) one of the processes is killed with SIGKILL and another one is started, until all shards
are finished. Then the files, read by name, must hold each prompt once, in the order of the input and with its own seed.
The exit status is 1 if they do not. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from records import finish, machine
from serving import HERE

sys.path.insert(0, str(HERE / "tests"))
from generate_helpers import saved_model

FLAGS = ["--max-new-tokens", "4", "--max-prompt-tokens", "64", "--max-running-requests", "64", "--no-progress",
         "--chunked-prefill-size", "64", "--temperatures", "0.0 1.0"]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill processes that share a run, and count its lines.")
    parser.add_argument("--prompts", type=int, default=20000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--shard-lines", type=int, default=250)
    parser.add_argument("--kill-every", type=float, default=8.0, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--record", nargs="?", const="", help="write a record under results/")
    return parser.parse_args()


def prompts(folder: Path, count: int) -> list[str]:
    """Written to ten files of a folder."""
    folder.mkdir()
    found = [f"{i} the hell" for i in range(count)]
    each = -(-count // 10)
    for part in range(10):
        lines = found[part * each : (part + 1) * each]
        text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in lines)
        (folder / f"{part}.jsonl").write_text(text)
    return found


def work(command: list[str], folder: Path, log: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Runs and kills processes until the run is complete."""
    draw, kills, began = random.Random(args.seed), 0, time.perf_counter()
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with log.open("ab") as file:
            running.append(subprocess.Popen(command, stdout=file, stderr=file))

    for _ in range(args.processes):
        start()
    next_kill = time.perf_counter() + draw.expovariate(1 / args.kill_every)
    left = 0  # processes that ended because no shard was free
    while running:
        time.sleep(0.01)
        for process in [each for each in running if each.poll() is not None]:
            if process.returncode:
                raise SystemExit(f"a process ended with status {process.returncode}:\n{log.read_text()[-2000:]}")
            running.remove(process)
            left += 1
        # None before the first line: the time of a start would decide how many kills there can be.
        if running and time.perf_counter() >= next_kill and any(folder.glob(".claims/*.partial")):
            victim = draw.choice(running)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            running.remove(victim)
            kills += 1
            start()
            next_kill = time.perf_counter() + draw.expovariate(1 / args.kill_every)
    return {"kills": kills, "seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        (place / "model").mkdir()
        model, folder = saved_model(place / "model"), place / "run"
        expected = prompts(place / "in", args.prompts)
        command = [sys.executable, "-m", "specjax.train.generate", "--model", model, "--input", str(place / "in"),
                   "--claim", str(folder), "--shard-lines", str(args.shard_lines), *FLAGS]  # fmt: skip
        found = work(command, folder, place / "log", args)
        rows = [json.loads(line) for file in sorted(folder.glob("part-*")) for line in file.open(encoding="utf-8")]
    texts = [row["prompt"] for row in rows]
    result = {
        "lines": len(rows),
        "lost": len(set(expected) - set(texts)),
        "doubled": len(texts) - len(set(texts)),
        "in_order": texts == expected and [row["seed"] for row in rows] == list(range(len(rows))),
        **found,
    }
    print(", ".join(f"{name} {value}" for name, value in result.items()))
    document = machine() | {"prompts": args.prompts, "processes": args.processes, "shard_lines": args.shard_lines}
    finish("claims", document | result, record=args.record)
    return 0 if result["in_order"] and len(rows) == args.prompts else 1


if __name__ == "__main__":
    sys.exit(main())
