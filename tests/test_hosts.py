"""Several processes that share a model write what one writes, and end together."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engine_helpers import tokenizer
from mesh_helpers import environment, run
from server_helpers import SECONDS, wait_until
from tiny_checkpoints import save_llama

from specjax.cli import build, flags
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.hosts import Address, Follower, Group, Leader, Place
from specjax.settings import Parser, add_flags, parse

PROGRAM = Path(__file__).parent / "hosts_program.py"
ALGORITHMS = {
    "none": "NONE", "ngram": "NGRAM", "eagle": "EAGLE", "eagle3": "EAGLE3", "standalone": "STANDALONE", "mtp": "MTP"
}  # fmt: skip
MOST = 900.0  # seconds for all that a pair computes: only what hangs takes so long, however busy the machine is
ENDS = 60.0
"""Seconds in which a process must have ended after another; on an idle machine it takes less than one."""


def free_address() -> str:
    """Of which the next port is free as well."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return f"127.0.0.1:{port}"


class Pair:
    """Two processes, rank 0 first."""

    def __init__(self, folder: Path, command: Callable[[int, str], list[str]]) -> None:
        folder.mkdir()
        self.folder, address = folder, free_address()
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in (0, 1):
            with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
                arguments = [sys.executable, *command(rank, address)]
                self.processes.append(subprocess.Popen(arguments, stdout=out, stderr=err, env=environment()))

    def log(self, rank: int) -> str:
        return (self.folder / f"err{rank}").read_text(errors="replace")

    def lines(self) -> list[Any]:
        """JSON that the leader has printed; other libraries print, too."""
        found = (self.folder / "out0").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in found if line.startswith("{") and line.endswith("\n")]

    def running(self) -> None:
        for rank, process in enumerate(self.processes):
            assert process.poll() is None, self.log(rank)

    def wait_for(self, true: Callable[[], Any]) -> None:
        def done() -> Any:
            found = true()
            if not found:
                self.running()
            return found

        wait_until(done, MOST)

    def kill(self, rank: int) -> tuple[int, str, float]:
        """Status, log and seconds of the other process after one was killed."""
        self.running()
        started = time.monotonic()
        self.processes[rank].kill()
        other = 1 - rank
        status = self.processes[other].wait(ENDS)
        return status, self.log(other), time.monotonic() - started


@pytest.fixture
def pair(tmp_path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(command: Callable[[int, str], list[str]]) -> Pair:
        made.append(Pair(tmp_path / f"pair{len(made)}", command))
        return made[-1]

    yield make
    for each in made:
        for process in each.processes:
            process.kill()
            process.wait()


@pytest.mark.process
@pytest.mark.parametrize(
    "cases",
    [("none", "eagle3"), pytest.param(("ngram", "eagle", "standalone", "mtp"), marks=pytest.mark.slow)],
    ids=["plain and EAGLE-3", "others"],
)
def test_algorithms_then_a_dead_leader(pair, cases):
    """Biased, sampled and penalised requests, a grammar, and a prompt of which pages are reused."""
    (alone,) = run(["none", 1])
    both = pair(lambda rank, address: [str(PROGRAM), str(rank), address, "agrees", *cases])
    both.wait_for(lambda: len(both.lines()) == len(cases))
    for found, case in zip(both.lines(), cases, strict=True):
        assert found["algorithm"] == ALGORITHMS[case]
        assert found["texts"] == alone["texts"], case
        assert found["pool shares"] == [0.5] and found["aliased"] == found["state"]
        assert found["cached"] == alone["cached"] > 0
    status, log, _ = both.kill(0)
    assert status != 0
    assert "Node rank 0 of 2 is gone" in log or "JAX distributed service" in log, log


@pytest.mark.process
def test_a_divergence_ends_both(pair):
    both = pair(lambda rank, address: [str(PROGRAM), str(rank), address, "diverges", "none"])
    assert [process.wait(MOST) for process in both.processes] == [1, 1]
    assert "Node rank 1 has diverged: a step of 1 requests" in both.log(0)
    assert "The leader has ended the group: Node rank 1 has diverged" in both.log(1)
    assert not both.lines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("hosts") / "llama"
    save_llama(path, num_attention_heads=8, num_key_value_heads=2, initializer_range=0.2, shard="60KB")
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.process
def test_servers(pair, folder):
    """The leader answers what one process does, with adaptive n-grams; SIGTERM to a follower ends both with 0, and a
    dead one ends the leader."""
    given = ["--model", folder, "--tp", 2, "--nnodes", 2, "--max-running-requests", 2, "--context-length", 128]
    given += ["--chunked-prefill-size", 64, "--port", 0, "--shutdown-timeout", 1]

    def command(rank: int, address: str) -> list[str]:
        return ["-m", "specjax.serve", *map(str, given), "--dist-init-addr", address, "--node-rank", str(rank)]

    sampling = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.7, "seed": 5}
    config = EngineConfig(max_running_requests=2, context_length=128, chunked_prefill_size=64)
    alone = Engine.from_pretrained(folder, config=config, compilation_cache=False, progress=False)
    prompts = ["hello hello hello", "a b a b a"]
    expected = [alone.generate(prompt, SamplingParams(**sampling)).output_ids for prompt in prompts]

    def url(both: Pair) -> str:
        both.wait_for(lambda: "ready to roll" in both.log(0))
        return both.log(0).partition("ready to roll! ")[2].split()[0]

    both = pair(command)
    with httpx.Client(base_url=url(both), timeout=SECONDS) as client:
        answer = client.post("/generate", json={"text": prompts, "sampling_params": sampling})
        assert [one["output_ids"] for one in answer.json()] == expected, answer.text
        assert client.post("/flush_cache").status_code == 200
        answer = client.post("/generate", json={"text": prompts[0], "sampling_params": sampling})
        assert answer.json()["output_ids"] == expected[0]
    both.processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(MOST) for process in both.processes] == [0, 0]

    both = pair(command)
    url(both)
    status, log, _ = both.kill(1)
    assert status == 1
    assert "Node rank 1 of 2 is gone: " in log


# What needs no processes.


def group_of(*given: Any) -> Any:
    parser = Parser(prog="program")
    add_flags(parser, flags.Settings())
    return build.make_group(parse(parser, list(map(str, given)), flags.Settings())[1])


ADDRESS = ("--dist-init-addr", "127.0.0.1:5000")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ADDRESS, "--dist-init-addr 127.0.0.1:5000 is for several processes: give --nnodes"),
        (("--node-rank", 1), "--node-rank 1 is for several processes: give --nnodes"),
        (("--nnodes", 2, "--tp", 2), "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        (("--nnodes", 2, "--tp", 2, "--node-rank", 2, *ADDRESS), "--node-rank 2 must be from 0 to 1, with --nnodes 2"),
        (
            ("--nnodes", 2, "--node-rank", 1, *ADDRESS),
            "--tensor-parallel-size 1 must be the number of devices of all 2",
        ),
        (("--nnodes", 2, "--node-rank", 1, "--tp", 3, *ADDRESS), "--tensor-parallel-size 3 must be"),
        (("--nnodes", 2, "--tp", 2, "--dist-init-addr", "here"), "--dist-init-addr 'here' is not HOST:PORT"),
        (("--nnodes", 2, "--tp", 2, "--dist-init-addr", "203.0.113.1:5000"), "the leader cannot listen at 203.0.113.1"),
    ],
)
def test_flags_that_are_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        group_of(*given)


def test_flags():
    assert group_of("--tp", 2) is None
    found = group_of("--tp", 4, "--nnodes", 2, "--node-rank", 1, *ADDRESS)
    assert isinstance(found, Follower) and found.place == (("127.0.0.1", 5000), 2, 1)


def test_addresses():
    assert Address.parse("host-0.pods:5000") == ("host-0.pods", 5000)
    six = Address.parse("[fd00::1]:80")
    assert six == ("fd00::1", 80) and str(six) == "[fd00::1]:80" and str(six.next) == "[fd00::1]:81"
    for wrong in ("", ":5", "host", "host:", "host:0", "host:65535", "host:x", "host:-1", "fd00::1", "a:b:5", "host:٣"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            Address.parse(wrong)


@pytest.fixture
def joined(monkeypatch) -> Iterator[tuple[Leader, Follower, list[str]]]:
    """A leader and a follower in this process, without devices, and the messages with which they would end it."""
    ends: list[str] = []

    def end(self: Group, message: str) -> None:
        ends.append(message)
        raise SystemExit

    monkeypatch.setattr(Group, "_connect_devices", lambda self: None)
    monkeypatch.setattr(Group, "end", end)
    monkeypatch.setattr("specjax.hosts.JOIN", SECONDS)
    address = Address.parse(free_address())
    leader, follower = Leader(Place(address, 2, 0)), Follower(Place(address, 2, 1))
    joining = threading.Thread(target=follower.join)
    with socket.create_connection(address.next) as stray:  # it is turned away
        stray.sendall(b"GET / HTTP/1.1\r\n\r\n")
        joining.start()
        leader.join()
    joining.join()
    yield leader, follower, ends
    leader._leaving = follower._leaving = True
    for group in (leader, follower):
        for connection in group._connections.values():
            connection.close()


def test_agreement(joined):
    leader, follower, ends = joined
    for own, other in ((7, 5), (5, 7)):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(follower.agree, {"model": "a"}, other)
            assert leader.agree({"model": "a"}, own) == found.result() == 5
    with ThreadPoolExecutor(1) as pool:
        pool.submit(follower.agree, {"model": "a", "weights": "x"}, 1)
        with pytest.raises(SystemExit):
            leader.agree({"model": "a", "weights": "y"}, 1)
        leader.send("agree", number=1)
    assert ends == ["Node rank 1 differs from the leader: weights x there, y here"]


def test_messages_and_digests(joined):
    leader, follower, ends = joined
    sent = np.arange(6, dtype=np.int32).reshape(2, 3)
    leader.send("run", sent, key=["step", 1])
    kind, fields, array = follower.receive()
    assert (kind, fields) == ("run", {"key": ["step", 1]})
    assert array is not None and array.dtype == np.int32
    np.testing.assert_array_equal(array, sent)
    for each in ("a", "b", "c"):
        follower.report(each)
    leader.compare("a", "a step")
    leader.compare("b", "a step")
    with pytest.raises(SystemExit):
        leader.compare("d", "a prefill")
    assert ends == ["Node rank 1 has diverged: a prefill gave other tokens there (digest c) than on the leader (d)"]


def test_silence(joined, monkeypatch):
    """A connection that stays open, and on which nothing comes."""
    assert joined
    lost: list[tuple[int, str]] = []
    monkeypatch.setattr(Group, "_lost", lambda self, rank, reason: lost.append((rank, reason)))
    monkeypatch.setattr("specjax.hosts.SILENCE", 2.5)
    time.sleep(4)
    assert not lost
    monkeypatch.setattr("specjax.hosts._Connection.send", lambda *_, **__: None)
    wait_until(lambda: len(lost) == 2)
    assert sorted(lost) == [(rank, "no sign of life for 2.5 s") for rank in (0, 1)]
