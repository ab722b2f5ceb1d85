"""Compiles grammars of clients in a process of its own, within limits of time and memory.

Some schemas take exponential time: a place whose text must match twenty patterns at once takes a minute, one with forty
patterns never ends. So do rules of EBNF that repeat each other, and a chain of thousands of rules takes seconds.
llguidance cannot be interrupted within a process, its limits do not cover these cases, and memory of a grammar that
fails may stay in the allocator. Does not know which grammars a request may use (`specjax.engine.grammar`).
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

SECONDS = 0.5  # limit of processor time for a grammar
MAX_BYTES = 2**26  # memory for a grammar
TIMEOUT = 20.0  # seconds of wall time, for a busy machine
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,  # expressions of a new grammar, and states of the text that it forces: 1 us each
    "step_lexer_fuel": 100_000,  # expressions of a mask
    "step_max_items": 10_000,  # of a mask
    "verbose_errors": False,
}
"""Limits of llguidance. An enum of 4,000 texts takes 49,000 expressions, a mask of 300 optional members 1,200 items."""


class GrammarCheck:
    """The process, started by the first grammar. Thread-safe. `vocab_size`: ids that a grammar may name."""

    def __init__(self, vocab_size: int) -> None:
        self._lock, self._vocab_size = threading.Lock(), vocab_size
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, kind: str, source: str) -> tuple[str | None, str]:
        """Compiles a grammar; `kind` is one of llguidance's `grammar_from`.

        Returns the grammar in the library's form, and why it is refused; "": it is not. Raises OSError if no process
        can be started.
        """
        line = json.dumps([kind, source]).encode() + b"\n"
        with self._lock:
            process = self._started()
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None and stdout is not None
            timer = threading.Timer(TIMEOUT, process.kill)
            timer.start()
            try:
                stdin.write(line)
                stdin.flush()
                answer = stdout.readline()
            finally:
                timer.cancel()
        checked, problem = json.loads(answer) if answer.endswith(b"\n") else (None, f"more than {TIMEOUT:g} s")
        fewer = "to compile: give fewer patterns for one place, fewer repetitions, or fewer rules"
        return (checked, problem) if checked is not None else (None, f"takes {problem} {fewer}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            pipe, command = subprocess.PIPE, [sys.executable, "-P", __file__, str(self._vocab_size)]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            weakref.finalize(self, _end, self._process)
        return self._process


@functools.cache
def grammar_check(vocab_size: int) -> GrammarCheck:
    """The check of all engines in this process with a vocabulary of this size."""
    return GrammarCheck(vocab_size)


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


class Bytes:
    """A tokenizer with a token for each byte, then one that ends a text, then empty ones."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

    def __init__(self, vocab_size: int) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b""] * max(1, vocab_size - 256)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    """Answers each line, a kind and a source, with a line, a source and a problem. A child compiles each grammar."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

    os.nice(19)
    tokenizer, limits = LLTokenizer(TokenizerWrapper(Bytes(int(sys.argv[1])))), LLParserLimits(**LIMITS)
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + MAX_BYTES
    for line in sys.stdin:
        if os.fork():
            status = os.wait()[1]
            if status:
                used = f"{SECONDS:g} s" if status & 127 == signal.SIGPROF else f"{MAX_BYTES >> 20} MB"
                print(json.dumps([None, f"more than {used}"]), flush=True)
            continue
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        kind, source = json.loads(line)
        try:
            source = grammar_from(kind, source)
            matcher, problem = LLMatcher(tokenizer, source, log_level=0, limits=limits), "is refused: "
            if not matcher.is_error():
                matcher.compute_bitmask()
                matcher.try_consume_tokens(matcher.compute_ff_tokens()[:1])  # some errors appear after forced text
                problem = "cannot be followed: "
            problem = problem + matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            problem = f"is refused: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([source, problem]), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
