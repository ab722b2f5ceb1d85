"""Fuzzes the server with schemathesis from its OpenAPI document: valid and invalid requests, never a 5xx.

    make schemathesis
    python benchmarks/api_fuzz.py --schemathesis .schemathesis/bin/st [--examples 200] [--model MODEL]

Starts `specjax serve` twice: as it is, and with an API key. The document has no rules between fields and no limits of
the served model, so the server may refuse a request that the document allows. Left out: the coverage phase for
/v1/messages (see `PARTS`), and /pause_generation. Without --model the target is a random Llama of one layer. Fails if
there is a finding. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
HELPERS = HERE.parent / "tests" / "helpers"
KEY = "open-sesame"
RUNS = {"open": [], "key": ["--api-key", KEY]}
SMALL = [
    "--context-length", "1024", "--max-running-requests", "16", "--speculative-algorithm", "NGRAM",
    "--speculative-num-draft-tokens", "4", "--speculative-ngram-capacity", "4096",
]  # fmt: skip
SECONDS = 600.0  # longest duration of a start or a request
MAX_BYTES = 2**33  # address space of schemathesis
MESSAGES = "^/v1/messages"
PARTS = (
    (["--exclude-path-regex", MESSAGES], "examples,coverage,fuzzing,stateful"),
    # The coverage phase combines the values of nested blocks without a limit: 3 GB before its first request.
    (["--include-path-regex", MESSAGES], "examples,fuzzing,stateful"),
)
"""Operations, and the phases of schemathesis that test them."""


def tiny_model(folder: Path) -> Path:
    """A random Llama that stops soon, with a byte-level tokenizer and a chat template."""
    sys.path.insert(0, str(HELPERS))
    from engine_helpers import VOCABULARY, tokenizer
    from tiny_checkpoints import save_llama

    save_llama(folder, vocab_size=VOCABULARY, num_hidden_layers=1, eos_token_id=2, max_position_embeddings=1024)
    tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def server(model: str, flags: list[str]) -> Iterator[str]:
    """The address of a server that is ready and has compiled its programs for log-probabilities."""
    command = [sys.executable, "-m", "specjax.serve", "--model", model, "--port", "0", *SMALL, *flags]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen([*command, "--served-model-name", "fuzzed"], stderr=log)
        try:
            base = _address(process, Path(log.name))
            # A server that is busy loading closes idle connections, so each request opens its own.
            while httpx.get(f"{base}/health", timeout=SECONDS).status_code != 200:
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.5)
            with httpx.Client(base_url=base, timeout=SECONDS, headers={"Authorization": f"Bearer {KEY}"}) as client:
                client.post("/v1/completions", json={"prompt": "a", "logprobs": 1, "temperature": 1}).raise_for_status()
            yield base
            assert process.poll() is None, "the server has ended"
        finally:
            process.terminate()
            process.wait(60)


def _address(process: subprocess.Popen, log: Path) -> str:
    while True:
        if found := re.search(r"Listening on (http://\S+);", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


def run(schemathesis: str, base: str, examples: int, operations: list[str], phases: str) -> dict[str, object]:
    """The result of schemathesis for operations of one server; its report goes to stdout."""
    command = [schemathesis, "run", f"{base}/openapi.json", "--checks", "all", "--mode", "all"]
    command += ["--exclude-checks", "positive_data_acceptance"]
    command += ["--max-examples", str(examples), "--continue-on-failure", "--request-timeout", str(SECONDS)]
    command += ["--max-response-time", str(SECONDS), "--header", f"Authorization: Bearer {KEY}"]
    command += [*operations, "--phases", phases, "--exclude-path", "/pause_generation"]  # later requests would wait
    environment = os.environ | {"NO_COLOR": "1"}
    started = time.perf_counter()
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limit)
    print(done.stdout, flush=True)
    cases = re.search(r"(\d+) generated", done.stdout)
    return {
        "operations": " ".join(operations),
        "phases": phases,
        "status": done.returncode,
        "cases": int(cases[1]) if cases else 0,
        "summary": done.stdout.strip().splitlines()[-1].strip("= "),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="st", help="its command")
    parser.add_argument("--examples", type=int, default=100, help="of each operation")
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    results: dict[str, list[dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(tiny_model(Path(folder)))
        for name in args.runs:
            with server(model, RUNS[name]) as base:
                results[name] = [run(args.schemathesis, base, args.examples, *part) for part in PARTS]
    print(json.dumps({"examples": args.examples, "model": args.model or "tiny", "runs": results}))
    return int(any(part["status"] for parts in results.values() for part in parts))


if __name__ == "__main__":
    sys.exit(main())
