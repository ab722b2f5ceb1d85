"""Compiles a grammar in a process of its own first, which ends where that takes too long.

Some schemas take exponential time: a place whose text must match twenty patterns at once takes a minute, one of forty
an age. The compiler cannot be interrupted within a process, and its limits do not hold there.
"""

from __future__ import annotations

import signal
import subprocess
import sys

SECONDS = 0.5  # of the processor
SHORT = 256  # characters of a source up to which a grammar cannot take long
_LATEST = 20.0  # seconds, by the clock, on a machine that does other things

_PROGRAM = f"""
import signal, sys
from llguidance import LLMatcher
signal.setitimer(signal.ITIMER_PROF, {SECONDS})
LLMatcher.validate_grammar(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
"""


def compiles_soon(source: str) -> bool:
    """Whether a grammar in llguidance's form is compiled, or refused, within `SECONDS`. True where no process can be
    started to try it."""
    if len(source) <= SHORT or not sys.executable:
        return True
    command = [sys.executable, "-c", _PROGRAM]
    data = source.encode("utf-8", "surrogatepass")
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_LATEST, check=False)
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True
    return done.returncode not in (-signal.SIGPROF, 128 + signal.SIGPROF)
