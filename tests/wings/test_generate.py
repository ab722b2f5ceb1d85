"""`specjax generate` on a tiny random Llama: inputs, outputs, flags and errors."""

import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
from engine_helpers import VOCABULARY, byte_ids, decode, tokenizer
from generate_helpers import QUICK, saved_model, shared_engines
from train_helpers import environment

from specjax import SamplingParams
from specjax.cli import generate

FIELDS = [
    "id", "text", "output_ids", "prompt_tokens", "completion_tokens", "finish_reason", "spec_verify_ct",
    "spec_accept_length", "spec_accept_histogram", "seed",
]  # fmt: skip
SUMMARY = [
    "requests", "failed", "completion_tokens", "seconds", "tokens_per_second", "accept_length", "verify_steps",
    "drafted_steps", "algorithm", "draft", "device",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


def as_bytes(line) -> bytes:
    return line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()


@pytest.fixture(scope="module", autouse=True)
def _share_engines():
    with shared_engines():
        yield


@pytest.fixture
def run(model, tmp_path, capsys):
    """run(lines, *flags) -> status, output lines, summary, stderr. Strings and bytes are written unchanged."""

    def call(lines, *flags, stdin=False):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        data = b"".join(as_bytes(line) + b"\n" for line in lines)
        source.write_bytes(data)
        arguments = ["--model", model, "--input", "-" if stdin else str(source), "--output", str(target)]
        capsys.readouterr()
        with source.open(encoding="utf-8") as file, mock.patch.object(sys, "stdin", file):
            status = generate.main([*arguments, *QUICK, *map(str, flags)])
        printed = capsys.readouterr()
        rows = [json.loads(row) for row in target.read_text(encoding="utf-8").splitlines()]
        summary = json.loads(printed.out.splitlines()[-1]) if printed.out else None
        return status, rows, summary, printed.err

    return call


MESSAGES = [{"role": "user", "content": "hell é"}]
RENDERED = "<|im_start|>user\nhell é<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_results_and_summary(run):
    ids = tokenizer()(RENDERED)["input_ids"]
    lines = [
        {"id": "a", "messages": MESSAGES},
        {"id": 7, "prompt": RENDERED},
        {"input_ids": ids},
        {"id": {"any": ["json", None]}, "prompt": "the end", "max_new_tokens": 3},
    ]
    status, rows, summary, err = run(lines)
    assert (status, err) == (0, "")
    assert [row["id"] for row in rows] == ["a", 7, 2, {"any": ["json", None]}]
    assert rows[0]["output_ids"] == rows[1]["output_ids"] == rows[2]["output_ids"]
    assert [row["prompt_tokens"] for row in rows[:3]] == [len(ids)] * 3
    assert rows[3]["completion_tokens"] == 3
    assert rows[3]["finish_reason"] == {"type": "length", "length": 3}
    for row in rows:
        assert list(row) == FIELDS
        assert row["completion_tokens"] == len(row["output_ids"])
        bins = row["spec_accept_histogram"]
        assert sum(bins) == row["spec_verify_ct"]
        assert sum(n * (drafts + 1) for drafts, n in enumerate(bins)) == row["completion_tokens"] - 1
        if row["finish_reason"]["type"] == "length":
            assert row["text"] == decode(row["output_ids"])
    assert list(summary) == SUMMARY
    assert (summary["requests"], summary["failed"], summary["algorithm"]) == (4, 0, "NGRAM")
    assert isinstance(summary["device"], str) and summary["device"]
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert summary["verify_steps"] == sum(row["spec_verify_ct"] for row in rows)
    assert summary["tokens_per_second"] == pytest.approx(summary["completion_tokens"] / summary["seconds"], rel=0.2)


def test_log_probabilities_and_origins(run):
    lines = [
        {"prompt": "the the the", "logprobs": 2, "origins": True, "max_new_tokens": 9},
        {"prompt": "x", "max_new_tokens": 2},
        {"input_ids": [70, 71, 72, 73], "logprobs": 1, "logprob_start_len": 1, "max_new_tokens": 0},
    ]
    _, (first, second, prompt), _, _ = run(lines)
    assert [entry["token"] for entry in first["logprobs"]] == first["output_ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in first["logprobs"])
    assert [entry["token"] for entry in first["origins"]] == first["output_ids"]
    assert "".join(entry["text"] for entry in first["origins"]) == first["text"]
    assert list(second) == FIELDS
    assert prompt["output_ids"] == [] and [entry["token"] for entry in prompt["prompt_logprobs"]] == [71, 72, 73]
    assert prompt["prompt_logprobs"][0]["logprob"] is None and prompt["prompt_logprobs"][1]["logprob"] < 0


def test_grammars(run):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    forms = [
        {"json_schema": schema},
        {"json_schema": json.dumps(schema)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"regex": "[ab]{3}"},
        {"ebnf": 'root ::= "yes" | "no"'},
        {"response_format": {"type": "text"}},
    ]
    wrong = [{"regex": "("}, {"regex": "a", "ebnf": "b"}, {"response_format": {"type": "json_schema"}}]
    lines = [{"prompt": "hello", "max_new_tokens": 20, **form} for form in (*forms, *wrong)]
    status, rows, _, err = run(lines)
    assert status == 1 and len(rows) == len(forms)
    assert all(json.loads(row["text"])["a"] in (1, 2) for row in rows[:3])
    assert re.fullmatch("[ab]{3}", rows[3]["text"]) and rows[4]["text"] in ("yes", "no")
    for number, message in enumerate(("grammar", "regex and ebnf", "response_format must be"), 7):
        assert f"line {number}: {message}" in err


def test_seeds_and_order_of_lines(run):
    lines = [{"prompt": "a"}, "", {"prompt": "a"}, {"prompt": "a", "seed": 41}, {"prompt": "a", "temperature": 0.0}]
    _, rows, _, _ = run(lines, "--seed", 40, "--temperature", 1.5, "--max-new-tokens", 20)
    assert [row["seed"] for row in rows] == [40, 41, 41, 43], "blank lines are not counted"
    assert rows[1]["text"] == rows[2]["text"] != rows[0]["text"]
    lengths = [20, 1, 12, 2]
    greedy = run([{"id": n, "prompt": "a", "max_new_tokens": n} for n in lengths])[1]
    assert [row["completion_tokens"] for row in greedy] == [row["id"] for row in greedy] == lengths
    assert rows[3]["text"] == greedy[0]["text"]


def test_sampling_of_lines_and_flags(run):
    """A line's fields win over flags. Stop strings and tokens of a flag, which may be repeated, hold for all lines."""
    free = run([{"prompt": "a", "max_new_tokens": 30}], "--ignore-eos")[1][0]
    token, stop = free["output_ids"][4], decode(free["output_ids"])[3:5]
    flags = ["--ignore-eos", "--max-new-tokens", 30]
    lines = [
        {"prompt": "a", "stop_token_ids": [token]},
        {"prompt": "a", "stop": [stop], "no_stop_trim": True},
        {"prompt": "a", "speculate": False},
        {"prompt": "a", "logit_bias": {str(byte_ids(b"x")[0]): 100.0}, "max_new_tokens": 5},
    ]
    by_token, by_text, undrafted, biased = run(lines, *flags)[1]
    assert by_token["output_ids"] == free["output_ids"][: free["output_ids"].index(token) + 1]
    assert by_text["text"] == free["text"][: free["text"].index(stop)] + stop
    assert undrafted["spec_accept_length"] == 1.0
    assert biased["text"] == "xxxxx"
    for given, matched in ((("--stop-token-ids", 250, token), token), (("--stop", "never", "--stop", stop), stop)):
        (row,) = run([{"prompt": "a"}], *given, *flags)[1]
        assert row["finish_reason"] == {"type": "stop", "matched": matched}


GOOD = {"id": "good", "prompt": "the"}
BAD = {
    "not JSON": ("{", ""),
    "not an object": ("[1]", "must be a JSON object"),
    "two prompts": ({"prompt": "a", "input_ids": [5]}, "exactly one of prompt, messages, input_ids"),
    "no prompt": ({"id": 1}, "exactly one of prompt, messages, input_ids; it has none"),
    "unknown field": ({"prompt": "a", "temprature": 1.0}, "unknown sampling parameters: temprature"),
    "bad value": ({"prompt": "a", "top_p": 1.5}, "top_p must be a number above 0"),
    "too long": ({"input_ids": [5] * 200}, "200 tokens, but the context is 128"),
    "too many": ({"input_ids": [5] * 100, "max_new_tokens": 100}, "exceed the context of 128"),
    "empty prompt": ({"prompt": ""}, "prompt must be a string that is not empty"),
    "no tokens": ({"input_ids": []}, "input_ids must be"),
    "prompt of ids": ({"prompt": [5]}, "prompt must be a string"),
    "messages of ids": ({"messages": [5, 6]}, "messages must be"),
    "outside": ({"input_ids": [VOCABULARY]}, f"token {VOCABULARY}"),
    "half a surrogate": ('{"prompt": "a\\ud800"}', "prompt holds '\\ud800': surrogates must come in pairs"),
    "bad message": ({"messages": [{"role": "user"}]}, "role and a content"),
    "bad stop": ({"prompt": "a", "stop": [""]}, "stop must be"),
    "nan": ('{"prompt": "a", "temperature": NaN}', "temperature must be"),
    "not UTF-8": (b'{"prompt": "\xff"}', "utf-8"),
    "id of half a surrogate": (b'{"prompt": "a", "id": "\\ud800"}', "surrogates must come in pairs"),
    "huge number": (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", ""),
    "beyond 64 bits": (b'{"prompt": "a", "max_new_tokens": null, "min_new_tokens": 99999999999}', ""),
}


def test_bad_lines(run):
    lines = [GOOD | {"messages": None}, ""]
    for line, _ in BAD.values():
        lines += [line, GOOD]
    status, rows, summary, err = run(lines)
    assert status == 1
    assert [row["id"] for row in rows] == ["good"] * (len(BAD) + 1)
    assert (summary["requests"], summary["failed"]) == (len(BAD) + 1, len(BAD))
    reports = [report for report in err.splitlines() if report.startswith("line ")]  # type errors have more lines
    assert len(reports) == len(BAD)
    for i, (kind, (_, message)) in enumerate(BAD.items()):
        (report,) = [r for r in reports if r.startswith(f"line {3 + 2 * i}: ")]
        assert message in report, kind


def test_standard_input_and_empty_input(run, model, tmp_path):
    status, rows, summary, _ = run([GOOD, "", "  ", GOOD | {"id": "second"}], stdin=True)
    assert (status, [row["id"] for row in rows], summary["requests"]) == (0, ["good", "second"], 2)
    status, rows, summary, err = run(["", "  "])
    assert (status, rows, err) == (0, [], "")
    assert summary["requests"] == summary["completion_tokens"] == summary["verify_steps"] == 0
    assert summary["accept_length"] == 1.0
    (tmp_path / "in").write_text(json.dumps(GOOD))  # without a newline
    files = ["--model", model, "--input", str(tmp_path / "in"), "--output", str(tmp_path / "o")]
    assert generate.main([*files, *QUICK]) == 0
    assert json.loads((tmp_path / "o").read_text())["id"] == "good"


@pytest.mark.process
def test_as_a_program(model, tmp_path):
    """Values of wrong types (which the import hook would refuse), bars, and only the summary on stdout."""
    wrong = [
        {"prompt": "a", "temperature": "1"},
        {"prompt": "a", "max_new_tokens": 1.5},
        {"prompt": "a", "stop_token_ids": "5"},
        {"prompt": "a", "logit_bias": [1]},
        {"input_ids": [5, 1.5]},
        {"input_ids": ["5"]},
        {"messages": ["hi"]},
    ]
    good = {"prompt": "a", "temperature": 1, "top_p": 1, "seed": 5}, {"prompt": "é🙂", "max_new_tokens": 4}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in (good[0], *wrong, good[1])), encoding="utf-8")
    files = ["--model", model, "--input", str(source), "--output", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "specjax", "generate", *files, *(flag for flag in QUICK if flag != "--no-progress")],
        capture_output=True, encoding="utf-8", timeout=240, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert [json.loads(row)["id"] for row in target.read_text(encoding="utf-8").splitlines()] == [0, 8]
    assert all(f"line {number}: " in done.stderr for number in range(2, 9)) and "Traceback" not in done.stderr
    assert "temperature must be a number from 0 to 10000, got '1'" in done.stderr
    assert "Generating" in done.stderr and "Compiling" in done.stderr
    (line,) = done.stdout.splitlines()
    assert list(json.loads(line)) == SUMMARY and json.loads(line)["requests"] == 2


# Runs that cannot start: exit status 2.


REFUSED = {
    "missing input": ("--input {tmp}/no.jsonl", "{tmp}/no.jsonl"),
    "missing folder": ("--output {tmp}/no/such/out", "no/such/out"),
    "output is the input": ("--output {tmp}/in.jsonl", "is also an input"),
    "missing model": ("--model {tmp}/nowhere", "{tmp}/nowhere"),
    "unknown key": ("--config {tmp}/my.toml", "--config {tmp}/my.toml: unknown key [engine] page-sise; did you mean "),
    "no replicas": ("--dp 0", "specjax generate: --data-parallel-size must be at least 1, got 0"),
    "devices": ("--dp-size 30", "specjax generate: --data-parallel-size 30 needs 30 devices, and JAX has "),
    "suppressed tokens": ("--model {tmp}/suppressing", "suppress_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_runs(case, model, tmp_path, capsys):
    """The exit status is 2, and the file of an earlier run stays."""
    flags, message = (text.replace("{tmp}", str(tmp_path)) for text in REFUSED[case])
    (tmp_path / "in.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "out.jsonl").write_text("earlier run")
    (tmp_path / "my.toml").write_text("[engine]\npage-sise = 4\n")
    shutil.copytree(model, tmp_path / "suppressing")
    (tmp_path / "suppressing" / "generation_config.json").write_text(json.dumps({"suppress_tokens": [5]}))
    files = ["--model", model, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    try:
        status = generate.main([*files, *QUICK, *flags.split()])
    except SystemExit as end:  # argparse
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "") and message in printed.err
    assert (tmp_path / "out.jsonl").read_text() == "earlier run"
    assert (tmp_path / "in.jsonl").read_text() == json.dumps(GOOD)


def test_sampling_flags():
    """Flags that are not given leave the model's defaults."""
    args = generate.build_parser().parse_args(["--input", "a", "--output", "b"])
    assert SamplingParams.from_mapping(generate.sampling_given(args)) == SamplingParams(seed=0)
    assert not set(generate.MODEL_DEFAULTS) & set(generate.sampling_given(args))
    args = generate.build_parser().parse_args(["--input", "a", "--output", "b", "--temperature", "0", "--top-k", "-1"])
    assert generate.sampling_given(args).items() >= {"temperature": 0.0, "top_k": -1}.items()


def test_sampling_defaults_of_the_model(run, model, tmp_path):
    """Values of a line win over flags, and flags over the model's."""
    folder = tmp_path / "sampled"
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.9, "top_k": 30, "do_sample": True}))
    greedy, drawn = {"temperature": 0.0}, {"temperature": 0.9, "top_k": 30}
    lines = [GOOD | {"seed": 3} | own for own in ({}, greedy, drawn)]

    def texts(*flags):
        return [row["output_ids"] for row in run(lines, "--model", folder, *flags)[1]]

    ours, cold, hot = texts()
    assert ours == hot != cold
    assert texts("--sampling-defaults", "openai") == [cold, cold, hot]
