"""Processes that share a run: what a kill leaves, who gets which shard, and `--claim` of both commands."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import Any

import pytest
from generate_helpers import QUICK, saved_model
from train_helpers import environment

from specjax.cli import claims, generate
from specjax.cli.claims import ClaimedRun, last_place, whole_lines
from specjax.train import corpus
from specjax.train import generate as train_generate

SETTINGS = {"model": "tiny", "seed": 0}


def open_run(folder: Path, lines: int = 10, shard_lines: int = 4, **changes: Any) -> ClaimedRun:
    return ClaimedRun(folder, lines, shard_lines, SETTINGS | changes)


def work(run: ClaimedRun, most: int = 10**9, bad: tuple[int, ...] = ()) -> list[int]:
    """Settles up to `most` lines; returns their places. Line i has the row {"i": i}, or none if it is bad."""
    done = []
    places = run.places()
    while len(done) < most and (place := next(places, None)) is not None:
        run.write(None if place in bad else {"i": place, "text": "é\r\u2028 7 {"})
        done.append(place)
    return done


def rows(folder: Path) -> list[int]:
    """Of all finished shards, in the order of their names."""
    files = corpus.shards([str(folder)])
    return [json.loads(line)["i"] for file in files for line in Path(file).read_bytes().split(b"\n")[:-1]]


# A shard.


def test_a_partial_file_that_was_cut_anywhere_says_where_to_go_on(tmp_path):
    run = open_run(tmp_path / "run", lines=20, shard_lines=6)
    work(run, most=6)
    work(run, most=5, bad=(7, 9))
    run.release()
    file = run.partial(1)
    data = file.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    assert len(ends) == 5
    for cut in range(len(data) + 1):
        kept = sum(end <= cut for end in ends)
        assert whole_lines(data[:cut], 6, 12) == ((0, *ends)[kept], 6 + kept)
        (tmp_path / "cut").write_bytes(data[:cut])
        assert last_place(tmp_path / "cut") == (5 + kept if kept else None)
    for cut in (0, 1, ends[1] - 1, ends[1], ends[1] + 3, len(data)):
        file.write_bytes(data[:cut])
        with open_run(tmp_path / "run", lines=20, shard_lines=6) as again:
            kept = sum(end <= cut for end in ends)
            assert work(again, most=5 - kept, bad=(7, 9)) == list(range(6 + kept, 11))
        assert file.read_bytes() == data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'6 {"a": 1}\n6 {"a": 1}\n', 7),  # written twice
        (b'6 {"a": 1}\n8 {"a": 1}\n', 7),
        (b"6 \n7 \x00\x00\x00\n", 7),  # of a machine that lost its power
        (b"6 \n\x00\x00\x00", 7),
        (b"7 \n", 6),
        (b"06 \n", 6),
        (b"6\n", 6),
        (b"6 \n7 \n8 \n", 8),  # more than the shard has
        (b"", 6),
    ],
)
def test_what_does_not_continue_a_partial_file_is_dropped(data, expected):
    size, place = whole_lines(data, 6, 8)
    assert place == expected
    assert whole_lines(data[:size], 6, 8) == (size, place)


def test_the_last_place_of_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "TAIL", 16)
    file = tmp_path / "long"
    file.write_text("".join(f'{i} {{"text": "{"x" * (i * 7 % 100)}"}}\n' for i in range(50)) + "50 {")
    assert last_place(file) == 49
    assert last_place(tmp_path / "none") is None


@pytest.mark.parametrize("step", ["whole", "replaced"])
def test_killed_while_it_publishes(tmp_path, monkeypatch, step):
    """Before the rename and after it; the next process ends what is left, and writes no line again."""
    run = open_run(tmp_path)

    class Killed(Exception):
        pass

    replace = Path.replace

    def killed(self: Path, target: Path) -> None:
        if step == "replaced":
            replace(self, target)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            work(run)
    run.release()
    again = open_run(tmp_path)
    assert work(again) == list(range(4, 10))
    assert rows(tmp_path) == list(range(10))


# Sharing.


def test_a_shard_has_one_owner_and_the_lines_come_in_order(tmp_path):
    runs = [open_run(tmp_path, lines=23, shard_lines=3) for _ in range(3)]
    places = [run.places() for run in runs]
    draw, seen = random.Random(0), []
    live = [0, 1, 2]
    while live:
        one = draw.choice(live)
        if (place := next(places[one], None)) is None:
            live.remove(one)
            continue
        seen.append(place)
        runs[one].write({"i": place})
    assert sorted(seen) == list(range(23)) == rows(tmp_path)
    assert runs[0].summary() == {"shards": 8, "finished_shards": 8}
    assert sorted(os.listdir(tmp_path / ".claims")) == sorted(["run.lock", *(f"{i:05d}.lock" for i in range(8))])


def test_what_is_claimed_is_left_alone_until_it_is_freed(tmp_path):
    one, two = open_run(tmp_path), open_run(tmp_path)
    assert one.begin() and two.begin()
    assert work(one, most=1) == [0]
    assert work(two) == [4, 5, 6, 7, 8, 9]
    assert two.settled() == 7 and not two.begin()
    one.release()
    assert work(two) == [1, 2, 3]
    assert two.settled() == 10 and not one.begin()


def test_lines_of_other_processes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "SCAN_SECONDS", 0.0)
    one, two = open_run(tmp_path, lines=12), open_run(tmp_path, lines=12)
    for run, most, total in ((one, 3, 3), (two, 2, 5), (one, 2, 7), (two, 5, 12)):
        work(run, most)
        run.release()
        assert (one.settled(), two.settled()) == (total, total)


def test_nothing_to_do(tmp_path):
    run = open_run(tmp_path, lines=0)
    assert not run.begin() and run.settled() == 0 and run.summary() == {"shards": 0, "finished_shards": 0}
    all_bad = open_run(tmp_path / "bad", lines=3)
    assert work(all_bad, bad=(0, 1, 2)) == [0, 1, 2]
    assert all_bad.finished(0).read_bytes() == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "--seed was 0 and is 1"),
        ({"shard_lines": 5}, "--shard-lines was 4 and is 5"),
        ({"shard_lines": 0}, "--shard-lines must be at least 1, got 0"),
        ({"top_p": 0.5}, "--top-p was None and is 0.5"),
    ],
)
def test_other_settings_are_refused(tmp_path, changes, message):
    open_run(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_run(tmp_path, **changes)


def test_a_folder_that_is_not_a_runs_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        open_run(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        open_run(tmp_path / "notes.txt")


def test_a_process_that_begins_while_another_does(tmp_path, monkeypatch):
    """The other makes its first folder between this one's looks: that is no file of somebody else's."""
    exists = Path.exists

    def and_then_the_other_begins(self: Path, **options: Any) -> bool:
        found = exists(self, **options)
        if self.name == ".claims":
            self.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(Path, "exists", and_then_the_other_begins)
    assert work(open_run(tmp_path)) == list(range(10))


FULL = """
import resource, sys
from pathlib import Path
from specjax.cli.claims import ClaimedRun
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
with ClaimedRun(Path(sys.argv[1]), 10, 4, {"model": "tiny", "seed": 0}) as run:
    places = [place for place, _ in zip(run.places(), range(6))]
    for place in places:
        run.write({"i": place, "text": "x" * 30})
"""


def test_a_disk_that_is_full(tmp_path):
    """The second line is written in part, and the claims of two shards are freed: the next process loses no line."""
    folder = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", FULL, folder], capture_output=True, text=True, env=environment())
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"OSError: --claim {folder} cannot be written: [Errno 27]") and "the same command" in last
    partial = (folder / ".claims" / "00000.partial").read_bytes()
    assert partial.count(b"\n") == 1 and len(partial) == 100
    assert work(open_run(folder)) == list(range(1, 10))
    assert rows(folder) == list(range(10))


def test_a_full_disk_frees_every_claim(tmp_path):
    """Of a process that lives on: each file is closed and each lock freed, though none can be written."""
    one = open_run(tmp_path)
    places = one.places()
    for _ in range(6):
        next(places)

    close = BufferedRandom.close

    def full(self: BufferedRandom) -> None:
        close(self)
        raise OSError(28, "No space left on device")

    for shard in one._open:
        shard._file.close()
        shard._file = type("Full", (BufferedRandom,), {"close": full})(FileIO(shard._partial, "a+"))
    one.release()
    assert work(open_run(tmp_path)) == list(range(10))


# The commands.


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


LINES = [{"prompt": f"{i} the hell", "source": f"s{i % 3}"} for i in range(240)]
COMMANDS = {
    "specjax.generate": (generate.main, [*QUICK, "--temperature", "1.0"]),
    "specjax.train.generate": (
        train_generate.main,
        ["--max-new-tokens", "8", "--max-prompt-tokens", "64", "--chunked-prefill-size", "16",
         "--max-running-requests", "4", "--no-progress", "--temperatures", "0.0 1.0"],
    ),
}  # fmt: skip


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """In two files of a folder."""
    folder.mkdir()
    for name, part in (("a.jsonl", lines[:100]), ("b.jsonl", lines[100:])):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in part))
    return folder


def answers(data: bytes) -> list[dict[str, Any]]:
    """Without what depends on the batch that a line was in."""
    found = [json.loads(line) for line in data.split(b"\n")[:-1]]
    return [{name: value for name, value in row.items() if not name.startswith("spec_")} for row in found]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_claimed_run_is_the_run_of_one_process(command, model, tmp_path, capsys):
    main, flags = COMMANDS[command]
    lines = [{k: v for k, v in line.items() if k == "prompt" or "train" in command} for line in LINES[:95]]
    given = ["--model", model, "--input", str(write_lines(tmp_path / "in", [*lines, {}, *lines[:9]])), *flags]
    assert main([*given, "--output", str(tmp_path / "one.jsonl")]) == 1
    claimed = [*given, "--claim", str(tmp_path / "run"), "--shard-lines", "40"]
    assert main(claimed) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["requests"], summary["failed"]) == (104, 1)
    assert (summary["shards"], summary["finished_shards"]) == (3, 3)
    files = sorted((tmp_path / "run").glob("part-*"))
    assert [file.name for file in files] == [f"part-0000{i}-of-00003.jsonl" for i in range(3)]
    together = b"".join(file.read_bytes() for file in files)
    assert answers(together) == answers((tmp_path / "one.jsonl").read_bytes())
    assert main(claimed) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["requests"] == 0 and printed.err == ""
    assert main([*claimed, "--seed", "4"]) == 2
    assert "--seed was 0 and is 4" in capsys.readouterr().err
    assert main([*claimed, "--quantization", "int8"]) == 2
    assert "--quantization was None and is 'int8'" in capsys.readouterr().err
    assert main([*given, "--input", "-", "--claim", str(tmp_path / "run")]) == 2


@pytest.mark.parametrize("flags", [["--count", "3"], ["--overwrite"], ["--shard", "1/2"]])
def test_what_a_claimed_run_does_not_have(flags, model, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    given = ["--model", model, "--input", str(tmp_path / "in.jsonl"), "--claim", str(tmp_path / "run"), *flags]
    assert train_generate.main(given) == 2
    assert f"leave out {flags[0]}" in capsys.readouterr().err


def start(flags: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specjax.train.generate", *flags]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment())


@pytest.mark.process
def test_killed_processes_lose_and_double_no_line(model, tmp_path):
    """Two processes, of which one after another is killed while it writes; the other, and new ones, end its shards."""
    _, flags = COMMANDS["specjax.train.generate"]
    given = ["--model", model, "--input", str(write_lines(tmp_path / "in", LINES)), *flags, "--max-new-tokens", "16"]
    assert train_generate.main([*given, "--output", str(tmp_path / "one.jsonl")]) == 0
    folder, log, draw = tmp_path / "run", tmp_path / "log", random.Random(1)
    claimed = [*given, "--claim", str(folder), "--shard-lines", "20"]
    processes = [start(claimed, log) for _ in range(2)]

    def written() -> int:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".jsonl", ".partial"))

    try:
        limit = time.monotonic() + 240
        for _ in range(2):
            before = written() if folder.exists() else 0
            while time.monotonic() < limit and (not folder.exists() or written() < before + 3000):
                time.sleep(0.002)
            victim = processes.pop(draw.randrange(2))
            victim.send_signal(signal.SIGKILL)
            assert victim.wait() == -signal.SIGKILL, "it was done before it was killed: give it more lines"
            processes.append(start(claimed, log))
        assert [process.wait(timeout=240) for process in processes] == [0, 0], log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    together = b"".join(file.read_bytes() for file in sorted(folder.glob("part-*")))
    assert together == (tmp_path / "one.jsonl").read_bytes()
