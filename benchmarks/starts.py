"""How long a start takes: `import specjax`, and a server from its command to ready, cold and warm.

    python benchmarks/starts.py [--rounds 3] [--config configs/smollm2-135m-instruct-eagle3.toml] [--record]

Ready is the log line "The server is fired up". A cold start has an empty cache folder but for the downloaded wheel: it
converts the model and compiles. A warm start has what the cold one left, after all programs were compiled. Processor
seconds, which tell more where other work shares the machine, are those of the server's process until it is ready, and
of a cold one also from then until all programs are compiled. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from records import finish, machine

from specjax.checkpoint.files import default_cache_dir

READY = "The server is fired up"
COMPILED = " programs in the background in "


def measured(
    command: list[str], environment: dict[str, str], wanted: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """Seconds and the process's processor seconds until each wanted line on stderr."""
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found: dict[str, tuple[float, float]] = {}
    log = []
    for line in process.stderr:
        log.append(line)
        now = time.perf_counter() - started, processor_seconds(process.pid)
        found |= {text: now for text in wanted if text in line and text not in found}
        if len(found) == len(wanted):
            process.send_signal(signal.SIGINT)
            break
    process.communicate()
    if len(found) < len(wanted):
        raise SystemExit("".join(log))
    return found


def processor_seconds(pid: int) -> float:
    """User and system time of a running process. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def imported(environment: dict[str, str]) -> tuple[float, float]:
    """Seconds and processor seconds of a process that imports specjax."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", "import specjax"], env=environment, check=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def described(seconds: float, processor: float) -> str:
    return f"{seconds:.1f} s, {processor:.1f} s of processor time"


def samples(rows: list[tuple[float, float]]) -> dict[str, Any]:
    columns = zip(("seconds", "processor_seconds"), zip(*rows, strict=True), strict=True)
    return {name: {"median": statistics.median(values), "all": [*values]} for name, values in columns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", default="configs/smollm2-135m-instruct-eagle3.toml")
    parser.add_argument("--record", nargs="?", const=True, help="write benchmarks/results/starts-<date>.json")
    args = parser.parse_args()
    document = machine("jaxlib") | {"config": args.config}
    serve = [sys.executable, "-m", "specjax.serve", "--config", args.config, "--port", "0"]
    document["import"] = samples([imported(dict(os.environ)) for _ in range(args.rounds)])
    print(f"import specjax: {document['import']['seconds']['median']:.3f} s", flush=True)
    cold, background, warm = [], [], []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            if (downloads := default_cache_dir() / "downloads").exists():
                shutil.copytree(downloads, Path(folder, "downloads"))
            environment = os.environ | {"SPECJAX_CACHE": folder}
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
            found = measured(serve, environment, (READY, COMPILED))
            cold.append(found[READY])
            background.append((found[COMPILED][0] - found[READY][0], found[COMPILED][1] - found[READY][1]))
            print(f"cold {number + 1}: {described(*cold[-1])}, background {described(*background[-1])}", flush=True)
            warm.append(measured(serve, environment, (READY,))[READY])
            print(f"warm {number + 1}: {described(*warm[-1])}", flush=True)
    document |= {"cold": samples(cold), "background": samples(background), "warm": samples(warm)}
    finish("starts", document, record=args.record)


if __name__ == "__main__":
    main()
