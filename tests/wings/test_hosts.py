"""Several processes that share a model give the texts of one process, and end together."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engine_helpers import tokenizer
from mesh_helpers import environment, run
from server_helpers import SECONDS, in_background, wait_until
from tiny_checkpoints import save_llama

from specjax.checkpoint.weights import read_folder
from specjax.cli import flags
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.fleet.agreement import file_facts, make_group
from specjax.fleet.following import shared_by
from specjax.fleet.hosts import Address, Follower, Group, Leader, Place
from specjax.settings import Parser, add_flags, parse

PROGRAM = Path(__file__).parents[1] / "helpers" / "hosts_program.py"
ALGORITHMS = {
    "none": "NONE", "ngram": "NGRAM", "eagle": "EAGLE", "eagle3": "EAGLE3", "standalone": "STANDALONE", "mtp": "MTP"
}  # fmt: skip
MOST = 900.0  # time limit of all work of a group in seconds; even on a busy machine only a hang takes so long
ENDS = 60.0
"""Time limit in seconds from the end of one process to the end of the others; usually less than one."""


def free_address() -> str:
    """An address whose port and next port are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return f"127.0.0.1:{port}"


class Together:
    """Processes of one group, rank 0 first."""

    def __init__(self, folder: Path, count: int, command: Callable[[int, str], list[str]]) -> None:
        folder.mkdir()
        self.folder, address = folder, free_address()
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(count):
            with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
                arguments = [sys.executable, *command(rank, address)]
                self.processes.append(subprocess.Popen(arguments, stdout=out, stderr=err, env=environment()))

    def log(self, rank: int) -> str:
        return (self.folder / f"err{rank}").read_text(errors="replace")

    def lines(self) -> list[Any]:
        """The JSON lines that the leader has printed; other libraries print text."""
        lines = (self.folder / "out0").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def running(self) -> None:
        for rank, process in enumerate(self.processes):
            assert process.poll() is None, self.log(rank)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        def done() -> Any:
            result = condition()
            if not result:
                self.running()
            return result

        wait_until(done, MOST)

    def kill(self, rank: int) -> dict[int, str]:
        """Kills a process, and waits until the others have failed. Returns their logs by rank."""
        self.running()
        self.processes[rank].kill()
        others = {other: process for other, process in enumerate(self.processes) if other != rank}
        for other, process in others.items():
            assert process.wait(ENDS) != 0, self.log(other)
        return {other: self.log(other) for other in others}


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Together]]:
    """Starts `count` processes; `command` gets the rank and the address."""
    groups: list[Together] = []

    def start(command: Callable[[int, str], list[str]], count: int = 2) -> Together:
        groups.append(Together(tmp_path / f"group{len(groups)}", count, command))
        return groups[-1]

    yield start
    for process in (process for group in groups for process in group.processes):
        process.kill()
        process.wait()


def program(count: int, devices: int, *mode_and_cases: str) -> Callable[[int, str], list[str]]:
    """The command of a process, for `start`."""
    return lambda rank, address: [str(PROGRAM), str(rank), address, str(count), str(devices), *mode_and_cases]


def check_texts(together: Together, cases: Sequence[str], devices: int) -> None:
    """Waits until the leader has printed the texts of one process, for each case."""
    (alone,) = run(["texts", "none", 1])
    together.wait_for(lambda: len(together.lines()) == len(cases))
    for line, case in zip(together.lines(), cases, strict=True):
        assert line["algorithm"] == ALGORITHMS[case]
        assert line["texts"] == alone["texts"], case
        assert line["pool shares"] == [1 / devices] and line["aliased"] == line["state"]
        assert line["cached"] == alone["cached"] > 0


def names_the_leader(log: str) -> bool:
    """True if a follower's log reports that the leader is gone. JAX may report it first."""
    return bool(re.search("Node rank 0 of . is gone", log)) or "JAX distributed service" in log


@pytest.mark.process
@pytest.mark.parametrize(
    "cases",
    [("none", "eagle3"), pytest.param(("ngram", "eagle", "standalone", "mtp"), marks=pytest.mark.slow)],
    ids=["plain and EAGLE-3", "others"],
)
def test_algorithms_and_a_killed_leader(start, cases):
    """Biased, sampled and penalised requests, a grammar, and a prompt with cached pages."""
    both = start(program(2, 1, "agrees", *cases))
    check_texts(both, cases, 2)
    log = both.kill(0)[1]
    assert names_the_leader(log), log


@pytest.mark.process
def test_divergence_ends_both(start):
    both = start(program(2, 1, "diverges", "none"))
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


SIZES: dict[str, Any] = {"max_running_requests": 2, "context_length": 128, "chunked_prefill_size": 64}
SAMPLED = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.7, "seed": 5}


def served(folder: str) -> Callable[[int, str], list[str]]:
    """The command of a server on two processes, for `start`."""
    arguments = ["--model", folder, "--tp", 2, "--nnodes", 2, "--port", 0, "--shutdown-timeout", 1]
    arguments += [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", value)]

    def command(rank: int, address: str) -> list[str]:
        return ["-m", "specjax.serve", *map(str, arguments), "--dist-init-addr", address, "--node-rank", str(rank)]

    return command


def url(both: Together) -> str:
    both.wait_for(lambda: "ready to roll" in both.log(0))
    return both.log(0).partition("ready to roll! ")[2].split()[0]


@pytest.mark.process
def test_servers(start, folder):
    """With adaptive n-grams. The answers equal those of one process, also with cached pages. SIGTERM to a follower ends
    both with status 0; a killed follower ends the leader."""
    command, prompts = served(folder), ["hello hello hello", "a b a b a"]
    both = start(command)
    alone = Engine.from_pretrained(folder, config=EngineConfig(**SIZES), compilation_cache=False, progress=False)
    expected = [alone.generate(prompt, SamplingParams(**SAMPLED)).output_ids for prompt in prompts]
    with httpx.Client(base_url=url(both), timeout=SECONDS) as client:
        answer = client.post("/generate", json={"text": prompts, "sampling_params": SAMPLED})
        assert [row["output_ids"] for row in answer.json()] == expected, answer.text
        assert client.post("/flush_cache").status_code == 200
        answer = client.post("/generate", json={"text": prompts[0], "sampling_params": SAMPLED})
        assert answer.json()["output_ids"] == expected[0]
    both.processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(MOST) for process in both.processes] == [0, 0]

    both = start(command)
    url(both)
    assert "Node rank 1 of 2 is gone: " in both.kill(1)[0]
    assert both.processes[0].returncode == 1


# Groups within one process.


def group_of(*arguments: Any) -> Any:
    parser = Parser(prog="program")
    add_flags(parser, flags.Settings())
    return make_group(parse(parser, list(map(str, arguments)), flags.Settings())[1])


ADDRESS = ("--dist-init-addr", "127.0.0.1:5000")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ADDRESS, "--dist-init-addr 127.0.0.1:5000 needs --nnodes of at least 2"),
        (("--node-rank", 1), "--node-rank 1 needs --nnodes of at least 2"),
        (("--nnodes", 2, "--tp", 2), "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        (("--nnodes", 2, "--tp", 2, "--node-rank", 2, *ADDRESS), "--node-rank 2 must be from 0 to 1, with --nnodes 2"),
        (("--nnodes", 2, *ADDRESS), "--tensor-parallel-size 1 must be the number of devices of all 2"),
        (("--nnodes", 2, "--node-rank", 1, "--tp", 3, *ADDRESS), "--tensor-parallel-size 3 must be"),
        (("--nnodes", 2, "--tp", 2, "--dist-init-addr", "here"), "--dist-init-addr 'here' is not HOST:PORT"),
        (("--nnodes", 2, "--tp", 2, "--dist-init-addr", "203.0.113.1:5000"), "the leader cannot listen at 203.0.113.1"),
    ],
)
def test_refused_flags(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        group_of(*arguments)


def test_flags_and_addresses():
    assert group_of("--tp", 2) is None
    group = group_of("--tp", 4, "--nnodes", 2, "--node-rank", 1, *ADDRESS)
    assert isinstance(group, Follower) and group.place == (("127.0.0.1", 5000), 2, 1)
    assert group.settings["--tensor-parallel-size"] == "4" and group.settings["--context-length"] == "not set"
    assert group.settings["--speculative-adaptive"] == "not set" and "--model" not in group.settings
    assert Address.parse("host-0.pods:5000") == ("host-0.pods", 5000)
    six = Address.parse("[fd00::1]:80")
    assert six == ("fd00::1", 80) and str(six) == "[fd00::1]:80" and str(six.next) == "[fd00::1]:81"
    for wrong in ("", ":5", "host", "host:", "host:0", "host:65535", "host:x", "host:-1", "fd00::1", "a:b:5", "host:٣"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            Address.parse(wrong)


@pytest.fixture
def ends(monkeypatch) -> list[str]:
    """Messages of groups that would end this process; they have no devices."""
    messages: list[str] = []

    def end(self: Group, message: str) -> None:
        messages.append(message)
        raise SystemExit

    monkeypatch.setattr(Group, "_connect_devices", lambda self: None)
    monkeypatch.setattr(Group, "end", end)
    monkeypatch.setattr("specjax.fleet.hosts.JOIN", SECONDS)
    return messages


def new_group(size: int, ranks: Sequence[int] = (1,), leader: Any = None, follower: Any = None) -> tuple[Leader, list]:
    """A leader and followers at a free address, with these settings."""
    address = Address.parse(free_address())
    followers = [Follower(Place(address, size, rank), follower or {}) for rank in ranks]
    return Leader(Place(address, size, 0), leader or {}), followers


@contextlib.contextmanager
def closing(*groups: Group) -> Iterator[None]:
    yield
    for group in groups:
        group._leaving = True
    for connection in (connection for group in groups for connection in group._connections.values()):
        connection.close()


@pytest.fixture
def joined(ends) -> Iterator[tuple[Leader, Follower, list[str]]]:
    """A leader and a follower in this process, and `ends`."""
    leader, (follower,) = new_group(2)
    joining = threading.Thread(target=follower.join)
    with socket.create_connection(leader.place.address.next) as stray:  # refused
        stray.sendall(b"GET / HTTP/1.1\r\n\r\n")
        joining.start()
        leader.join()
    joining.join()
    with closing(leader, follower):
        yield leader, follower, ends


def test_refused_followers(ends):
    """Before a model is loaded."""
    plain = {"--page-size": "16", "--context-length": "not set"}
    for ranks, settings, message in (
        ([1], plain | {"--page-size": "32"}, "other settings than the leader: --page-size 32 there, 16 on the leader"),
        ([1, 1], plain, "two processes were started with --node-rank 1"),
    ):
        leader, followers = new_group(3, ranks, plain, settings)
        for follower in followers:
            follower.join()
        with closing(leader, *followers), pytest.raises(SystemExit):
            leader.join()
        assert ends.pop().endswith(message)


def test_missing_processes(ends, monkeypatch):
    monkeypatch.setattr("specjax.fleet.hosts.JOIN", 1.0)
    address = Address.parse(free_address())
    with pytest.raises(TimeoutError, match=f"no leader at {address.next} within 1 s: .*refused"):
        Follower(Place(address, 3, 1)).join()
    leader, (follower,) = new_group(3)
    follower.join()
    with closing(leader, follower):
        with pytest.raises(TimeoutError, match="--node-rank 2 did not join within 1 s"):
            leader.join()
        assert leader._connections.keys() == {1}
    assert not ends


def test_leader_that_accepts_late(ends, monkeypatch):
    """It listens before it prepares its device, so a follower connects and then waits."""
    leader, (follower,) = new_group(2)
    monkeypatch.setattr("specjax.fleet.hosts.SILENCE", 1.5)
    with closing(leader, follower):
        follower.join()
        time.sleep(3)
        leader.join()
    assert not ends


def test_files_are_compared_before_weights_are_read(folder, tmp_path, monkeypatch):
    """Two models of one shape with equal norms differ in any tensor."""

    def compared(self: Group, facts: Mapping[str, str], number: int) -> int:
        raise KeyError(*facts)

    monkeypatch.setattr("specjax.engine.engine.load", None)
    monkeypatch.setattr(Follower, "agree", compared)
    with pytest.raises(KeyError, match="files of the weights"):
        shared_by(Follower(Place(Address("", 1), 2, 1))).from_pretrained(folder, compilation_cache=False)

    for name in "ab":
        shutil.copytree(folder, tmp_path / name)
    first, second = (read_folder(name, tmp_path / name) for name in "ab")
    assert len(first.weights) > 1 and file_facts(first) == file_facts(second)
    entry = first.headers["model.layers.1.mlp.up_proj.weight"]
    with (tmp_path / "b" / entry.file.name).open("r+b") as file:
        file.seek(entry.start + 100)
        file.write(b"\x77")
    assert file_facts(second).keys() == file_facts(first).keys() == {"files of the weights"}
    assert file_facts(second) != file_facts(first)


def test_agreement(joined):
    leader, follower, ends = joined
    for numbers in ((7, 5), (5, 7)):
        number = in_background(follower.agree, {"model": "a"}, numbers[1])
        assert leader.agree({"model": "a"}, numbers[0]) == number.result(SECONDS) == 5
    number = in_background(follower.agree, {"model": "a", "weights": "x"}, 1)
    with pytest.raises(SystemExit):
        leader.agree({"model": "a", "weights": "y"}, 1)
    leader.send("agree", number=1)
    assert number.result(SECONDS) == 1
    assert ends == ["Node rank 1 differs from the leader: weights x there, y on the leader"]


def test_messages_and_digests(joined):
    leader, follower, ends = joined
    sent = np.arange(6, dtype=np.int32).reshape(2, 3)
    leader.send("run", sent, key=["step", 1])
    kind, fields, array = follower.receive()
    assert (kind, fields) == ("run", {"key": ["step", 1]})
    assert array is not None and array.dtype == np.int32
    np.testing.assert_array_equal(array, sent)
    for digest in ("a", "b", "c"):
        follower.report(digest)
    leader.compare("a", "a step")
    leader.compare("b", "a step")
    with pytest.raises(SystemExit):
        leader.compare("d", "a prefill")
    assert ends == ["Node rank 1 has diverged: a prefill gave other tokens there (digest c) than on the leader (d)"]


def test_silent_connections_are_lost(joined, monkeypatch):
    assert joined
    lost: list[tuple[int, str]] = []
    monkeypatch.setattr(Group, "_lost", lambda self, rank, reason: lost.append((rank, reason)))
    monkeypatch.setattr("specjax.fleet.hosts.SILENCE", 2.5)
    time.sleep(3)
    assert not lost
    monkeypatch.setattr("specjax.fleet.hosts._Connection.send", lambda *_, **__: None)
    wait_until(lambda: len(lost) == 2)
    assert sorted(lost) == [(rank, "no sign of life for 2.5 s") for rank in (0, 1)]
