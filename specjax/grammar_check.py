"""Compiles grammars of clients in a process of its own, within limits of time and memory.

Some schemas take exponential time: a place whose text must match twenty patterns at once takes a minute, one with forty
patterns never ends. So do rules of EBNF that repeat each other, and a chain of thousands of rules takes seconds.
llguidance cannot be interrupted within a process, its limits do not cover these cases, and memory of a grammar that
fails may stay in the allocator. Does not know which grammars a request may use (`specjax.engine.grammar`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

SECONDS = 0.5  # limit of processor time for a grammar
MAX_BYTES = 2**26  # memory for a grammar
TIMEOUT = 20.0  # seconds of wall time, for a busy machine
NICENESS = 10  # a tenth of a core beside two busy ones: `SECONDS` end before `TIMEOUT`, and steps hardly wait
FEWER = "to compile: give fewer patterns for one place, fewer repetitions, or fewer rules"
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
        self._end: Callable[[], Any] = lambda: None  # ends the process

    def __call__(self, kind: str, source: str) -> tuple[str, str]:
        """Compiles a grammar; `kind` is one of llguidance's `grammar_from`.

        Returns the grammar in the library's form, and why it is refused; "": it is not. Raises OSError if no process
        can be started, or if it ends without an answer, even after a restart.
        """
        line = json.dumps([kind, source]).encode() + b"\n"
        with self._lock:
            for _ in range(2):  # the kernel may have killed the process, if memory was short
                started = time.monotonic()
                if (answer := self._answer(line)).endswith(b"\n"):
                    return tuple(json.loads(answer))
                if time.monotonic() - started > TIMEOUT:
                    return "", f"takes more than {TIMEOUT:g} s {FEWER}"
        raise OSError(f"it ends without an answer: {sys.executable} {__file__}")

    def _answer(self, line: bytes) -> bytes:
        """The process's answer to a line; no whole line if it ends before, or is killed after `TIMEOUT`."""
        process, answer = self._started(), b""
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(TIMEOUT, _kill, (process,))
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:
            timer.cancel()
            if not answer.endswith(b"\n"):  # also after Ctrl-C: a late answer must not be read as that of the next line
                self._end()
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            pipe, command = subprocess.PIPE, [sys.executable, "-P", __file__, str(self._vocab_size), str(MAX_BYTES)]
            # Its own process group gets no Ctrl-C while requests end, and can be killed with its children.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
            self._process, self._end = process, weakref.finalize(self, _end, process)
        return self._process


@functools.cache
def grammar_check(vocab_size: int) -> GrammarCheck:
    """The check of all engines in this process with a vocabulary of this size."""
    return GrammarCheck(vocab_size)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError), process:
        _kill(process)


class Bytes:
    """A tokenizer with a token for each byte, then one that ends a text, then empty ones."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

    def __init__(self, vocab_size: int) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b""] * max(1, vocab_size - 256)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    """Answers each line, a kind and a source, with a line, a source and a problem. A child compiles each grammar."""
    import resource  # not on Windows

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

    os.nice(NICENESS)
    vocab_size, max_bytes = map(int, sys.argv[1:])
    limit_of: dict[int, str] = {signal.SIGPROF: f"{SECONDS:g} s", signal.SIGABRT: f"{max_bytes >> 20} MB"}
    tokenizer, limits = LLTokenizer(TokenizerWrapper(Bytes(vocab_size))), LLParserLimits(**LIMITS)
    for line in sys.stdin:
        if os.fork():
            if status := os.wait()[1]:
                limit = limit_of.get(status & 127, f"the compiler can take (wait status {status})")
                print(json.dumps(["", f"takes more than {limit} {FEWER}"]), flush=True)
            continue
        most = _data_bytes() + max_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
        except MemoryError:
            os.abort()
        except Exception as error:
            problem = f"is refused: {error}"
        answer = json.dumps([source, problem])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)
        os._exit(0)


def _data_bytes() -> int:
    """Size of this process's data. `ru_maxrss` would count the memory of the process that started it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
