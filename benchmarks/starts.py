"""How long a start takes: `import specjax`, and a server from its command to ready, cold and warm.

    python benchmarks/starts.py [--rounds 3] [--config configs/smollm2-135m-instruct-eagle3.toml] [--record]

Ready is the log line "The server is fired up". A cold start has an empty cache folder but for the downloaded wheel: it
converts the model and compiles. A warm start has what the cold one left, after all programs were compiled. Each process
also reports the processor time that it took (a cold one's includes the programs that are compiled in the background),
which tells more than seconds where other work shares the machine. The last line is one JSON document.
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
COMPILED = "Compiling in the background:"


def measured(command: list[str], environment: dict[str, str], wanted: tuple[str, ...] = ()) -> dict[str, float]:
    """Seconds until each wanted line on stderr, or until the process ends, and its processor seconds until then."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found: dict[str, float] = {}
    log = []
    for line in process.stderr:
        log.append(line)
        found |= {text: time.perf_counter() - started for text in wanted if text in line and text not in found}
        if wanted and len(found) == len(wanted):
            process.send_signal(signal.SIGINT)
            break
    process.communicate()
    seconds = time.perf_counter() - started
    if len(found) < len(wanted) or (not wanted and process.returncode):
        raise SystemExit("".join(log))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["processor"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": found.get(READY, seconds)} | found


def samples(rows: list[dict[str, float]]) -> dict[str, Any]:
    def of(key: str) -> dict[str, Any]:
        found = [round(row[key], 3) for row in rows]
        return {"median": statistics.median(found), "all": found}

    return {"seconds": of("seconds"), "processor_seconds": of("processor")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", default="configs/smollm2-135m-instruct-eagle3.toml")
    parser.add_argument("--skip-cold", action="store_true", help="measure only the import and warm starts")
    parser.add_argument("--record", nargs="?", const=True, help="write benchmarks/results/starts-<date>.json")
    args = parser.parse_args()
    document = machine("jaxlib") | {"config": args.config}
    serve = [sys.executable, "-m", "specjax.serve", "--config", args.config, "--port", "0"]
    imported = [measured([sys.executable, "-c", "import specjax"], dict(os.environ)) for _ in range(args.rounds)]
    document["import"] = samples(imported)
    print(f"import specjax: {document['import']['seconds']['median']:.3f} s", flush=True)
    cold, warm = [], []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            if (downloads := default_cache_dir() / "downloads").exists():
                shutil.copytree(downloads, Path(folder, "downloads"))
            environment = os.environ | {"SPECJAX_CACHE": folder}
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
            if args.skip_cold:
                environment["SPECJAX_CACHE"] = str(default_cache_dir())
            found = measured(serve, environment, (READY, COMPILED))
            if not args.skip_cold:
                cold.append(found)
                print(f"cold {number + 1}: ready after {found[READY]:.1f} s", flush=True)
            warm.append(measured(serve, environment, (READY,)))
            print(f"warm {number + 1}: ready after {warm[-1][READY]:.1f} s", flush=True)
    if cold:
        document["cold"] = samples(cold)
    document["warm"] = samples(warm)
    finish("starts", document, record=args.record)


if __name__ == "__main__":
    main()
