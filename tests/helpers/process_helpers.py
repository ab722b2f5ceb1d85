"""Processes of `specjax serve`, started anew or forked from a process that has imported the command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from server_helpers import SECONDS

FORKS = """
import json, os, sys, threading
import transformers, uvicorn
from specjax.cli.serve import main
assert threading.active_count() == 1  # JAX starts no threads before it has a backend
for line in sys.stdin:
    name, value = json.loads(line)
    if name == "poll":
        pid, status = os.waitpid(value, os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    if (pid := os.fork()) == 0:
        for number, file in enumerate((os.devnull, value["out"], value["err"])):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
        os.chdir(value["cwd"])
        os.environ["HOME"] = value["home"]
        sys.exit(main(value["flags"]))
    print(pid, flush=True)
"""


class Forks:
    """A process that has imported the command, and forks for each start: imports take most of a start."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, name: str, value: Any) -> Any:
        assert self._popen.stdin and self._popen.stdout
        print(json.dumps([name, value]), file=self._popen.stdin, flush=True)
        return json.loads(self._popen.stdout.readline())

    def close(self) -> None:
        self._popen.communicate(timeout=SECONDS)


class Forked:
    """The used part of `subprocess.Popen` for a process of `Forks`."""

    def __init__(self, forks: Forks, **options: Any) -> None:
        self._forks, self._status = forks, None
        self.pid: int = forks.ask("start", options)

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._forks.ask("poll", self.pid)
        return self._status

    def wait(self, timeout: float = SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Process:
    """The command, with its output in files: a pipe would have to be read all the time."""

    def __init__(self, folder: Path, flags: list[str], environment: dict[str, str], forks: Forks | None) -> None:
        self._err, self._out, self.cwd, self.home = (folder / name for name in ("err", "out", "cwd", "home"))
        for path in (folder, self.cwd, self.home):
            path.mkdir()
        self.popen: subprocess.Popen | Forked
        if forks is not None:
            files = {"out": self._out, "err": self._err, "cwd": self.cwd, "home": self.home}
            self._out.touch(), self._err.touch()
            self.popen = Forked(forks, flags=flags, **{name: str(file) for name, file in files.items()})
            return
        with self._err.open("wb") as err, self._out.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "specjax.serve", *flags], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                cwd=self.cwd, env=environment | {"HOME": str(self.home)},
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._err.read_text(encoding="utf-8").replace("\r", "\n")

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    def wait_for(self, pattern: str) -> re.Match:
        deadline = time.monotonic() + SECONDS
        while (match := re.search(pattern, self.log, re.MULTILINE)) is None:
            assert self.popen.poll() is None and time.monotonic() < deadline, self.log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.05)
        return match

    def wait_ready(self) -> Process:
        self.wait_for("ready to roll")
        return self

    @property
    def url(self) -> str:
        return self.wait_for(r"Listening on (http://[\w.:]+);")[1]

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=SECONDS, headers=headers, trust_env=False)

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def status(self, seconds: float = SECONDS) -> int:
        return self.popen.wait(seconds)

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
