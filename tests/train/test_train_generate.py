"""`specjax train generate` on a tiny random Llama: answers, resumed runs, refusals."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import END, decode, tokenizer
from generate_helpers import saved_model, shared_engines

from specjax.checkpoint.files import try_lock
from specjax.cli import flags
from specjax.engine import Engine, SamplingParams
from specjax.train import generate

FIELDS = ["source", "temperature", "prompt", "response", "prompt_ids", "response_ids", "finish_reason", "seed"]
QUICK = ["--max-new-tokens", "8", "--max-prompt-tokens", "64", "--chunked-prefill-size", "16",
         "--max-running-requests", "4", "--no-progress"]  # fmt: skip
PROMPTS = [{"source": f"s{i % 3}", "prompt": "the " * (i % 4) + f"hell {i}"} for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[dict[str, Engine]]:
    with shared_engines() as shared:
        yield shared


class Files:
    """An input, an output, and the command."""

    def __init__(self, folder: Path, model: str, capsys: pytest.CaptureFixture) -> None:
        self.source, self.target, self.model, self._capsys = folder / "in.jsonl", folder / "out.jsonl", model, capsys

    def write(self, lines: list[Any]) -> None:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        self.source.write_text(text)

    def argv(self, *flags: Any) -> list[str]:
        files = ["--model", self.model, "--input", self.source, "--output", self.target]
        return [str(part) for part in [*files, *QUICK, *flags]]

    def __call__(self, *flags: Any, lines: list[Any] | None = None) -> tuple[int, dict[str, Any] | None, str]:
        """Status, summary, stderr."""
        if lines is not None:
            self.write(lines)
        self._capsys.readouterr()
        status = generate.main(self.argv(*flags))
        printed = self._capsys.readouterr()
        return status, json.loads(printed.out.splitlines()[-1]) if printed.out else None, printed.err

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def files(tmp_path, model, capsys) -> Files:
    return Files(tmp_path, model, capsys)


def test_output_rows(files, engines):
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [*PROMPTS, {"messages": [*conversation, {"role": "user", "content": "é"}], "source": "two turns"}]
    lines += [{"prompt": "no source", "id": 7}]
    status, summary, err = files(lines=lines)
    assert (status, err) == (0, "")
    assert summary is not None and (summary["requests"], summary["failed"], summary["too_long"]) == (14, 0, 0)
    assert summary["algorithm"] == "NONE"
    rows = files.rows
    assert [row.get("prompt") for row in rows] == [line.get("prompt") for line in lines], "in input order"
    assert rows[12]["messages"] == lines[12]["messages"]
    assert [list(row) for row in rows[:12]] == [FIELDS] * 12
    assert list(rows[12]) == [*FIELDS[:2], "messages", *FIELDS[3:]]
    assert list(rows[13]) == FIELDS[1:]
    assert [row["source"] for row in rows[:12]] == [line["source"] for line in PROMPTS]
    rendered = f"<|im_start|>user\n{PROMPTS[0]['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    assert rows[0]["prompt_ids"] == tokenizer()(rendered)["input_ids"]
    for row in rows:
        stopped = row["finish_reason"]["type"] == "stop"
        assert (row["response_ids"][-1] == END) is stopped
        assert len(row["response_ids"]) == 8 or stopped
        assert row["response"] == decode(row["response_ids"])
    assert [row["seed"] for row in rows] == list(range(14))
    for row in rows[:3]:
        params = SamplingParams(max_new_tokens=8, temperature=row["temperature"], seed=row["seed"])
        assert [*engines.values()][-1].generate(row["prompt_ids"], params).output_ids == row["response_ids"]
    assert summary["completion_tokens"] == sum(len(row["response_ids"]) for row in rows)


def test_without_a_chat_template_a_prompt_is_text(files, tmp_path, model):
    plain = tokenizer().__class__.from_pretrained(model)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "tokenizer")
    status, _, _ = files("--tokenizer-path", tmp_path / "tokenizer", lines=[{"prompt": "the hell"}])
    assert status == 0
    assert files.rows[0]["prompt_ids"] == tokenizer()("the hell")["input_ids"]


def test_temperatures_are_drawn_by_line(files):
    def run(*flags: Any, count: int = 60) -> list[tuple]:
        files("--overwrite", *flags, lines=[{"prompt": str(i)} for i in range(count)])
        return [(row["prompt"], row["temperature"], row["response_ids"]) for row in files.rows]

    rows = run("--temperatures", "0.0 1.5 1.5 1.5")
    counts = Counter(temperature for _, temperature, _ in rows)
    assert set(counts) == {0.0, 1.5}
    assert 30 <= counts[1.5] <= 57, "the share is 3 of 4"
    assert run("--temperatures", "0", "1.5", "1.5", "1.5", count=10) == rows[:10]
    assert [row[1] for row in run("--seed", 1, "--temperatures", "0 1.5 1.5 1.5")] != [row[1] for row in rows]


def test_shards_together_equal_a_whole_run(files, tmp_path):
    files(lines=PROMPTS)
    whole, shards = files.rows, []
    for part in ("1/3", "2/3", "3/3"):
        status, summary, _ = files("--overwrite", "--shard", part)
        assert (status, summary["requests"]) == (0, 4)
        shards.append(files.rows)
    assert [row for rows in zip(*shards, strict=True) for row in rows] == whole
    status, _, err = files("--shard", "1/3")
    assert status == 2 and "--shard was '3/3' and is '1/3'" in err
    for text in ("", "0/2", "3/2", "1", "1/0", "-1/2", "1/2/3", "a/b"):
        with pytest.raises(ValueError, match=r"^--shard must be I/N, with I from 1 to N, got"):
            generate.parse_shard(text)


def test_a_folder_is_answered_as_a_file(files, tmp_path):
    """Seeds depend on the line's place among all lines. Other files of the folder are not read."""
    files(lines=PROMPTS)
    whole, folder = files.rows, tmp_path / "shards"
    folder.mkdir()
    lines = [json.dumps(row) + "\n" for row in PROMPTS]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines[:5]).encode()))
    (folder / "b.jsonl").write_text("".join([*lines[5:], "no json\n"]))
    for name in (".c.jsonl", "a.jsonl.gz.meta.json", "notes.txt"):
        (folder / name).write_text("ignored\n")
    files.source = folder
    status, summary, err = files("--overwrite")
    assert (status, summary["failed"]) == (1, 1) and f"{folder / 'b.jsonl'}: " in err
    assert files.rows == whole
    files.source = folder / "deeper"
    files.source.mkdir()
    status, _, err = files("--overwrite")
    assert status == 2 and "deeper has no file that ends in .jsonl or .jsonl.gz" in err


def test_long_prompts_are_skipped_and_bad_lines_named(files):
    long = {"prompt": "x" * 70}
    lines = [PROMPTS[0], long, "", "{", {"prompt": ""}, {"prompt": "a", "messages": []}, {"input_ids": [5]}]
    lines += [
        {"prompt": "\ud800"},
        {"messages": [{"role": "assistant", "content": "a"}]},
        PROMPTS[1] | {"messages": None},
    ]
    status, summary, err = files(lines=lines)
    assert summary is not None
    assert (status, summary["requests"], summary["failed"], summary["too_long"]) == (1, 2, 6, 1)
    assert [re.match(r"line (\d+): ", line)[1] for line in err.splitlines()] == ["4", "5", "6", "7", "8", "9"]
    assert "line 8: prompt holds '\\ud800'" in err and "line 9: messages ends with an answer of the assistant" in err
    assert [row["seed"] for row in files.rows] == [0, 8], "blank lines do not count"
    assert files(lines=[long])[0] == 2, "another input"
    assert files("--overwrite", lines=[long])[0] == 0


@pytest.fixture
def whole(files) -> bytes:
    """The output of an uninterrupted run."""
    lines = [PROMPTS[0], "{", {"prompt": "x" * 70}, *PROMPTS[1:], {"prompt": "y" * 70}]
    files(lines=lines)
    data = files.target.read_bytes()
    assert data.count(b"\n") == 12
    return data


@pytest.mark.parametrize("complete", [0, 5, 11, 12])
def test_an_output_that_was_cut_anywhere_is_completed(files, whole, complete):
    lines = whole.splitlines(keepends=True)
    for torn in (0, 40, -1):
        tail = lines[complete][:torn] if torn and complete < len(lines) else b""
        files.target.write_bytes(b"".join(lines[:complete]) + tail)
        status, summary, _ = files()
        assert status in (0, 1) and summary is not None
        assert files.target.read_bytes() == whole
        assert summary["requests"] == 12 - complete, "only missing lines are answered"


def test_a_complete_run_loads_no_model(files, whole, monkeypatch):
    files("--overwrite", lines=PROMPTS)
    monkeypatch.setattr(Engine, "from_pretrained", lambda **_: pytest.fail("a model was loaded"))
    status, summary, _ = files()
    assert (status, summary) == (0, {"resumed_after": 12, "requests": 0, "failed": 0, "too_long": 0})


CHANGED = [
    (["--max-new-tokens", "9"], "--max-new-tokens was 8 and is 9"),
    (["--max-prompt-tokens", "30"], "--max-prompt-tokens was 64 and is 30"),
    (["--seed", "1"], "--seed was 0 and is 1"),
    (["--temperatures", "0 1"], "--temperatures was '0 0.8' and is '0 1'"),
    (["--dtype", "bfloat16"], "--dtype was 'auto on cpu' and is 'bfloat16'"),
    (["--tokenizer-path", "elsewhere"], "--tokenizer-path was None and is 'elsewhere'"),
]


def test_other_settings_and_input_are_refused(files):
    files(lines=PROMPTS[:4])
    before = files.target.read_bytes()
    for changes, message in CHANGED:
        status, summary, err = files(*changes)
        assert (status, summary) == (2, None)
        (line,) = err.splitlines()
        assert message in line and "--overwrite" in line
        assert files.target.read_bytes() == before
    status, _, err = files(lines=PROMPTS[3:5])
    assert status == 2 and "content of the input was" in err
    assert files("--overwrite")[0] == 0
    assert [row["prompt"] for row in files.rows] == [line["prompt"] for line in PROMPTS[3:5]]
    assert files()[0] == 0, "the settings were replaced, too"


def test_files_of_other_programs_are_refused(files):
    for text in ("a text without an end", "one line\n", '{"prompt": "a"}\n'):
        files.target.write_text(text)
        status, _, err = files(lines=PROMPTS[:1])
        assert status == 2 and "does not have its settings" in err
        assert files.target.read_text() == text
    files("--overwrite", lines=PROMPTS[:2])
    for text in ("zeros\n", '{"seed": 77}\n'):
        before = files.target.read_text() + text
        files.target.write_text(before)
        status, _, err = files()
        assert status == 2 and "ends with a line that is no answer of this command to a line of --input" in err
        assert files.target.read_text() == before


def test_outputs_that_are_in_use(files):
    files(lines=PROMPTS[:3])
    lines = files.target.read_text().splitlines(keepends=True)
    files.target.write_text("".join(lines[:2]))
    lock = try_lock(files.target.with_name(f".{files.target.name}.lock"))
    assert lock
    with lock:
        status, _, err = files()
        assert status == 2 and "is being written by another run" in err
    assert files.target.read_text() == "".join(lines[:2])
    status, _, err = files("--output", files.source)
    assert status == 2 and "is also an input" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--max-new-tokens", "100"], "come to 164 tokens, and the context is 128"),
        (["--context-length", "40"], "come to 72 tokens, and the context is 40"),
        *((["--temperatures", text], "--temperatures") for text in ("hot", "0 -1", "0.8=2", "nan", " ")),
        (["--seed", str(2**64)], "seed must be"),
        (["--input", "-"], "--input must be a file"),
        (["--output", "/no/such/folder/out"], "cannot be written"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--speculative-algorithm", "eagle3"], "needs a draft head"),
    ],
)
def test_refused_at_the_start(files, flags, message):
    status, summary, err = files(*flags, lines=PROMPTS[:1])
    assert (status, summary) == (2, None)
    (line,) = err.splitlines()
    assert line.startswith("specjax train generate: ") and message in line
    assert not files.target.exists()


def test_default_and_chosen_batch(model):
    def batch(lines: int = 1000, **engine: Any) -> tuple[int | None, int | None]:
        settings = flags.Settings(
            model=flags.ModelSettings(model),
            engine=flags.EngineSettings(**{"max_running_requests": None} | engine),
        )
        chosen = generate.with_batch(settings, 48, lines, progress=False).engine
        return chosen.max_running_requests, chosen.context_length

    assert batch() == (generate.MAX_ROWS["cpu"], 48)
    assert batch(lines=3) == (3, 48)
    assert batch(max_running_requests=5) == (5, 48)
    assert batch(context_length=64) == (generate.MAX_ROWS["cpu"], 64)
