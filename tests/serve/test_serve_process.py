"""`specjax serve` as users start and end it: a process over a tiny random Llama in a folder."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_helpers import VOCABULARY, tokenizer
from server_helpers import parse_events
from tiny_checkpoints import save_llama
from train_helpers import with_kernels

import specjax
from specjax.cli import serve

pytestmark = pytest.mark.process

SECONDS = 240.0
"""Most that a start, a request or an end may take: a machine may be busy, and a first start compiles."""
PROMPT_END = 20.0
"""Most that an end may take that has nothing to wait for. Far below SECONDS and the time-outs that it must not use."""
CONTEXT = 4096
KEY = "open-sesame-4711"
QUICK = [
    "--max-running-requests", "2", "--speculative-num-draft-tokens", "4", "--decode-log-interval", "10",
    "--speculative-ngram-max-match-window-size", "4", "--speculative-ngram-capacity", "4096",
    "--chunked-prefill-size", "16",
]  # fmt: skip
ALL_COMPILED = "Compiling in the background: "
"""Until then two requests may take turns, and one may end before the other begins."""
LONG = {"prompt": "a", "max_tokens": 3500, "ignore_eos": True}
"""Seconds of decoding: far more than it takes to send a signal."""


FORKS = """
import json, os, sys, threading
import transformers, uvicorn
from specjax.cli.serve import main
assert threading.active_count() == 1  # JAX has none before it has a backend
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
    """A process that has imported the command, and forks one for each start: importing is most of a start."""

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
    """What is used here of a `subprocess.Popen`, for a process of `Forks`."""

    def __init__(self, forks: Forks, **given: Any) -> None:
        self._forks, self._status = forks, None
        self.pid: int = forks.ask("start", given)

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
    """The command, with what it says in files: a pipe would have to be read all the time."""

    def __init__(self, folder: Path, *flags: Any, environment: dict[str, str], forks: Forks | None = None) -> None:
        folder.mkdir()
        self._err, self._out = folder / "err", folder / "out"
        self.cwd, self.home = folder / "cwd", folder / "home"
        self.cwd.mkdir()
        self.home.mkdir()
        self.popen: subprocess.Popen | Forked
        if forks is not None:
            files = {"out": self._out, "err": self._err, "cwd": self.cwd, "home": self.home}
            for file in (self._out, self._err):
                file.touch()
            given = {name: str(file) for name, file in files.items()}
            self.popen = Forked(forks, flags=list(map(str, flags)), **given)
            return
        command = [sys.executable, "-m", "specjax.serve", *map(str, flags)]
        with self._err.open("wb") as err, self._out.open("wb") as out:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.cwd,
                env=environment | {"HOME": str(self.home)},
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._err.read_text(encoding="utf-8").replace("\r", "\n")

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    def logged(self, pattern: str) -> bool:
        return re.search(pattern, self.log, re.MULTILINE) is not None

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.logged(pattern):
            assert self.popen.poll() is None and time.monotonic() < deadline, self.log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.05)

    def wait_ready(self) -> Process:
        self.wait_for("ready to roll")
        return self

    @property
    def url(self) -> str:
        self.wait_for("Listening on ")
        found = re.search(r"Listening on (http://[\w.:]+);", self.log)
        assert found, self.log
        return found[1]

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    """As Hugging Face has it, with a tokenizer and a chat template."""
    save_llama(
        folder / "model",
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        initializer_range=0.3,
        eos_token_id=2,
        max_position_embeddings=CONTEXT,
    )
    tokenizer().save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def environment(folder) -> dict[str, str]:
    """Its own cache folder, without programs, and no other than the default settings of JAX."""
    code = Path(specjax.__file__).parents[1]
    paths = [str(code), str(code / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "XDG_"))}
    kept |= {"SPECJAX_CACHE": str(with_kernels(folder / "cache")), "COLUMNS": "100"}
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def launch(folder, environment) -> Iterator[Callable[..., Process]]:
    """launch(flags) -> the process, which is gone when the tests are through. `forked`: without the imports."""
    processes: list[Process] = []
    forks: list[Forks] = []

    def start(*flags: Any, forked: bool = False) -> Process:
        if forked and not forks:
            forks.append(Forks(environment))
        given = forks[0] if forked else None
        process = Process(folder / f"run{len(processes)}", *QUICK, *flags, environment=environment, forks=given)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
    for each in forks:
        each.close()


@pytest.fixture(scope="module")
def config(folder, model) -> Path:
    file = folder / "my.toml"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file.write_text(
        f'model = "{model}"\nrandom-seed = 7\n[server]\nport = {port}\n'
        f'served-model-name = "from-file"\napi-key = "{KEY}"\n'
    )
    return file


def port_in(config: Path) -> str:
    found = re.search(r"port = (\d+)", config.read_text())
    assert found
    return found[1]


class Shared:
    """The first start over a cache without programs, and what it answered meanwhile."""

    def __init__(self, process: Process) -> None:
        self.process = process
        with process.client() as client:
            self.health = [client.get("/health")]
            process.wait_ready()
            self.health.append(client.get("/health"))
        self.unseeded = [generate(process), generate(process)]

    def client(self, key: str | None = KEY) -> httpx.Client:
        return self.process.client(key)


def generate(process: Process, **sampling: Any) -> list[int]:
    """Tokens for a prompt of tokens: no tokenizer has a say."""
    body = {"input_ids": [70, 71, 72], "sampling_params": {"max_new_tokens": 30, "ignore_eos": True} | sampling}
    with process.client(KEY) as client:
        return client.post("/generate", json=body).json()["output_ids"]


@pytest.fixture(scope="module")
def shared(launch, config) -> Shared:
    return Shared(launch("--config", config, "--port", 0, "--served-model-name", "tiny"))


@pytest.fixture(scope="module")
def second(shared, launch, config, folder, model) -> Process:
    """Beside the first, with everything but its own tokenizer, template and name from the file."""
    words = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    words["model"]["merges"] = []
    shutil.copytree(model, folder / "letters", ignore=shutil.ignore_patterns("*.safetensors", "chat_template*"))
    (folder / "letters" / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    (folder / "short.jinja").write_text("{{ messages[0].content }}")
    shared.process.wait_for(ALL_COMPILED)
    own = ["--chat-template", folder / "short.jinja", "--tokenizer-path", folder / "letters"]
    return launch("--config", config, *own, forked=True)


# While it runs.


def test_the_log_tells_what_a_start_does(shared):
    said = [
        r"Listening on http://127\.0\.0\.1:\d+; requests get a 503 until the model is loaded",
        r"Loading \S+: [\d.]+\wB in [\d.]+ s",
        r"Loaded \S+ on \S+ in [\d.]+ s: float32",
        rf"KV pool: {2 * CONTEXT} tokens in pages of 16, \d+\.\d\d GB for the target, \d+\.\d\d GB for the draft",
        r"Speculation:\n  algorithm  NGRAM\n  tree       up to 4 tokens; .*\n  drafts     in every step",
        r"Compiling: \d+ buckets? in [\d.]+ s",
        r"The server is fired up and ready to roll! http://127\.0\.0\.1:\d+",
    ]
    places = [found.start() for pattern in said if (found := re.search(pattern, shared.process.log))]
    assert len(places) == len(said), shared.process.log
    assert places == sorted(places)
    assert shared.process.out == ""


def test_health_is_503_while_the_model_loads(shared):
    loading, ready = shared.health
    assert (loading.status_code, ready.status_code) == (503, 200)
    assert int(loading.headers["Retry-After"]) > 0
    assert loading.json()["error"]["message"] == "the model is loading"


STAMP = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] "


def test_the_log_lines_of_decoding_are_those_that_scripts_look_for(shared):
    generate(shared.process, max_new_tokens=60)
    shared.process.wait_for(
        STAMP + r"Prefill batch\. #new-seq: 1, #new-token: 3, #cached-token: 0, token usage: 0\.\d\d, "
        r"#running-req: \d, #queue-req: 0$"
    )
    shared.process.wait_for(
        STAMP + r"Decode batch\. #running-req: 1, #token: \d+, token usage: 0\.\d\d, accept len: [1-4]\.\d\d, "
        r"gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0$"
    )


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x"])
def test_without_the_key_nothing_but_health_answers(shared, key):
    with shared.client(key) as client:
        assert client.get("/health").status_code == 200
        for method, path in [("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/flush_cache")]:
            answer = client.request(method, path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_name_it_serves(shared):
    with shared.client() as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == "tiny", "a flag wins over the file"
        assert client.post("/v1/completions", json={"prompt": "a", "model": "tiny"}).json()["model"] == "tiny"
        assert client.post("/v1/completions", json={"prompt": "a", "model": "from-file"}).status_code == 404


# A second one.


def prompt_tokens(process: Process, path: str, **body: Any) -> int:
    with process.client(KEY) as client:
        answer = client.post(path, json=body | {"max_tokens": 1})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]


def test_a_second_server_beside_the_first(shared, second, config, folder):
    def kept() -> dict[Path, int]:
        files = [path for path in (folder / "cache").rglob("*") if "starts" not in path.parts]
        # Of stored programs the time is that of their last use.
        return {path: 0 if path.parent.name == "programs" else path.stat().st_mtime_ns for path in files}

    before = kept()
    assert any(path.is_file() for path in before)
    second.wait_ready()
    second.wait_for(ALL_COMPILED)
    assert kept() == before, "all programs were on disk"

    assert second.url.endswith(f":{port_in(config)}")
    assert not shared.process.url.endswith(f":{port_in(config)}"), "a flag wins over the file"
    assert [generate(second), generate(second)] == shared.unseeded, "--random-seed"
    assert shared.unseeded[0] != shared.unseeded[1]
    assert generate(second, temperature=0) == generate(shared.process, temperature=0)

    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "12345"}]}
    assert prompt_tokens(second, **chat) == 5, "--chat-template and --tokenizer-path"
    assert prompt_tokens(shared.process, **chat) > 5
    text = {"path": "/v1/completions", "prompt": "hell"}
    assert (prompt_tokens(second, **text), prompt_tokens(shared.process, **text)) == (4, 1)

    with second.client(KEY) as idle:
        assert idle.get("/v1/models").json()["data"][0]["id"] == "from-file"
        second.send(signal.SIGTERM)
        assert second.status(PROMPT_END) == 0, "an idle connection holds nothing up"
    assert generate(shared.process, temperature=0), "the first goes on"


def test_a_port_in_use(shared, launch, model):
    port = shared.process.url.rpartition(":")[2]
    refused = launch("--model", model, "--port", port)
    assert refused.status() == 2
    assert refused.log == (
        f"specjax serve: --host 127.0.0.1 --port {port}: Address already in use; "
        "stop what listens there, or choose another --port (0 = any free one)\n"
    ), "and nothing has been loaded"


def test_nothing_is_written_outside_the_cache(shared):
    generate(shared.process)
    assert list(shared.process.cwd.rglob("*")) == []
    assert list(shared.process.home.rglob("*")) == []


def test_the_key_is_never_logged(shared, second):
    assert KEY not in shared.process.log + second.log


# How it ends.


class Background(threading.Thread):
    """Runs a function; `result` is what it returned."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function, self._result = function, []
        self.start()

    def run(self) -> None:
        self._result.append(self._function())

    @property
    def result(self) -> Any:
        self.join(SECONDS)
        return self._result[0]


def complete(process: Process, **body: Any) -> httpx.Response:
    with process.client() as client:
        return client.post("/v1/completions", json=LONG | body)


@contextlib.contextmanager
def streaming(process: Process, **body: Any) -> Iterator[Iterator[bytes]]:
    """A stream that has begun: what is left of it."""
    body = LONG | {"stream": True} | body
    with process.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        rest = answer.iter_bytes()
        yield itertools.chain([next(rest)], rest)


def test_sigterm_lets_requests_finish(launch, model):
    server = launch("--model", model, "--port", 0, "--shutdown-timeout", SECONDS).wait_ready()
    server.wait_for(ALL_COMPILED)
    whole = Background(lambda: complete(server, max_tokens=3000))
    with streaming(server, max_tokens=3500, stream_options={"include_usage": True}) as stream:
        server.wait_for("Decode batch. #running-req: 2")
        server.send(signal.SIGTERM)
        server.wait_for("SIGTERM: shutting down")
        refusals = []
        with contextlib.suppress(httpx.TransportError):
            while True:  # until the end
                refusals.append(complete(server))
                time.sleep(0.05)
        events = parse_events(b"".join(stream))
    assert refusals and {answer.status_code for answer in refusals} == {503}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in refusals)
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 3500
    assert whole.result.json()["usage"]["completion_tokens"] == 3000
    assert server.status(PROMPT_END) == 0
    assert "Traceback" not in server.log


def unread(process: Process) -> socket.socket:
    """A client that asks for a stream and never reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
    sock.connect(("127.0.0.1", int(process.url.rpartition(":")[2])))
    body = json.dumps(LONG | {"stream": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    sock.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "\r\n"]).encode() + body)
    return sock


def test_what_does_not_finish_in_time_is_told_so(launch, model):
    long_name = "x" * 5000  # stands in each event: what is not read piles up
    flags = ["--shutdown-timeout", 1, "--served-model-name", long_name]
    server = launch("--model", model, "--port", 0, *flags, forked=True)
    server.wait_ready().wait_for(ALL_COMPILED)
    with unread(server), streaming(server) as stream:
        server.wait_for("#running-req: 2")
        whole = Background(lambda: complete(server))
        server.wait_for("#queue-req: 1")
        server.send(signal.SIGINT)
        events = b"".join(stream).decode().split("\n\n")
        status = server.status(PROMPT_END)
    assert status == 0, "a client that does not read holds nothing up"
    assert events[-1] == ""
    error = {"message": "the server is shutting down", "type": "server_error", "param": None, "code": "unavailable"}
    assert json.loads(events[-2].removeprefix("data: ")) == {"error": error}
    assert (whole.result.status_code, whole.result.json()) == (503, {"error": error})
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_second_signal_stops_at_once(launch, model, number):
    server = launch("--model", model, "--port", 0, "--shutdown-timeout", SECONDS, forked=True).wait_ready()
    with streaming(server) as stream:
        server.send(signal.SIGINT)
        server.wait_for("SIGINT: shutting down")
        server.send(number)
        assert server.status(PROMPT_END) == 0
        with pytest.raises(httpx.RemoteProtocolError):
            b"".join(stream)
    assert server.logged("1 requests may continue")
    assert server.logged(f"{number.name} again: stopping at once")
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads_or_compiles(launch, model, number):
    # A context that no other test has: its programs are in no cache.
    context = CONTEXT - 64 * number
    server = launch("--model", model, "--port", 0, "--context-length", context, forked=True)
    server.wait_for("Speculation:" if number == signal.SIGTERM else "Listening on ")
    server.wait_for("Started server process")
    server.send(number)
    assert server.status(PROMPT_END) == 0
    assert "Traceback" not in server.log


# What cannot start.


def damaged(model: Path) -> Path:
    folder = model.parent / "damaged"
    shutil.copytree(model, folder)
    (folder / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (lambda model: ["--model", "/no/such/model"], "the model '/no/such/model' looks like a path, and there is no"),
        (lambda model: ["--model", damaged(model)], "config.json"),
        (lambda model: ["--model", model, "--chat-template", "/no/such.jinja"], "/no/such.jinja"),
        (lambda model: ["--model", model, "--context-length", 5000], "--context-length 5000 exceeds the model's 4096"),
        (lambda model: ["--model", model, "--host", "no.such.invalid"], "--host no.such.invalid --port 0: "),
    ],
    ids=["no model", "damaged", "no template", "context", "host"],
)
def test_a_start_that_fails_says_why(launch, model, flags, message):
    failed = launch("--port", 0, *flags(model), forked=True)
    assert failed.status() == 2
    last = failed.log.splitlines()[-1]
    assert last.startswith("specjax serve: ") and message in last
    assert "Traceback" not in failed.log and "fired up" not in failed.log
    assert failed.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "float64"], "--dtype must be one of auto, float32, bfloat16, float16, got 'float64'"),
        (
            ["--speculative-algorithm", "eagle9"],
            "--speculative-algorithm must be one of AUTO, NONE, NGRAM, EAGLE, EAGLE3, MTP, STANDALONE, NEXTN, "
            "got 'eagle9'",
        ),
        (["--log-level", "loud"], "--log-level must be one of debug, info, warning, error, got 'loud'"),
        (["--port", "65536"], "--port must be an integer from 0 to 65535, got 65536"),
        (["--no-such-flag"], "unrecognized argument --no-such-flag; see --help."),
        (["--config", "/no/such.toml"], "--config /no/such.toml cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_told_what_would_work(capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        serve.main(flags)
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


def test_a_wrong_key_in_the_file(capsys, tmp_path):
    (tmp_path / "my.toml").write_text("[server]\nprot = 1\n")
    with pytest.raises(SystemExit) as end:
        serve.main(["--config", str(tmp_path / "my.toml")])
    assert end.value.code == 2
    assert "unknown key [server] prot; did you mean port?" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        serve.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for group in ("configuration file", "model", "engine", "speculative", "server"):
        assert f"\n{group}:\n" in text
    assert "specjax serve" in text


def test_a_log_whose_reader_has_gone_ends_no_request(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    serve._LogHandler().handle(logging.makeLogRecord({"msg": "Decode batch."}))
