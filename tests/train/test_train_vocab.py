"""`specjax train vocab` with the tiny tokenizer: files in, maps out, against a Counter; the shipped map."""

import gzip
import io
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import END, VOCABULARY, tokenizer

import specjax
from specjax.checkpoint import BUILT_IN_MODEL, load_tokenizer, resolve
from specjax.checkpoint.token_map import fingerprint, read_token_map
from specjax.cli import lines
from specjax.train import vocab

A = {"a.jsonl": [{"text": "a"}]}
SHIPPED = Path(specjax.__file__).parent / "data"


def encode(text: str) -> list[int]:
    return tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids


def ranked(counter: Counter[int], size: int = VOCABULARY) -> list[int]:
    """Ids by falling count, without the rule for end tokens."""
    return sorted(range(VOCABULARY), key=lambda token: (-counter[token], token))[:size]


def save(path: Path, saved: Any = None) -> Path:
    (saved or tokenizer()).save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tokenizer and a config, no weights."""
    return str(save(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """run(files by name, *flags) -> status, the map in out.json, the summary, stderr. Lists become JSONL."""

    def call(files, *flags, size=VOCABULARY):
        paths = []
        for name, data in files.items():
            if isinstance(data, list):
                data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in data)
            paths.append(name if name == "-" else str(tmp_path / name))
            if name == "-":
                monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
            else:
                (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        output = tmp_path / "out.json"
        arguments = ["--tokenizer", folder, "--input", *paths, "--output", str(output), "--no-progress"]
        arguments += [] if size is None else ["--size", str(size)]
        capsys.readouterr()
        status = vocab.main([*arguments, *map(str, flags)])
        printed = capsys.readouterr()
        assert not list(tmp_path.glob(".out*")), "temporary files are left"
        ids = json.loads(output.read_text()) if output.is_file() else None
        return status, ids, json.loads(printed.out) if printed.out else None, printed.err

    return call


def test_counts_of_files_gzip_and_stdin(run, monkeypatch):
    """In several batches; the gzipped file has a byte order mark."""
    monkeypatch.setattr(lines, "BATCH_BYTES", 50)
    generator = np.random.default_rng(0)
    rows = [{"text": "".join(generator.choice(list("abc é"), n))} for n in generator.integers(0, 15, 200)]
    ids_rows = [{"prompt_ids": [], "response_ids": generator.integers(0, VOCABULARY, 7).tolist()} for _ in range(50)]
    expected = Counter(token for row in rows for token in encode(row["text"]))
    expected.update(token for row in ids_rows for token in row["response_ids"])
    marked = [b"\xef\xbb\xbf" + json.dumps(rows[100]).encode(), *rows[101:]]
    status, ids, summary, err = run({"a.jsonl": rows[:100], "b.jsonl.gz": marked, "-": ids_rows}, size=None)
    assert (status, err) == (0, "")
    assert ids == ranked(expected)
    assert (summary["lines"], summary["bad"], summary["end_ids"]) == (250, 0, [END])
    assert (summary["tokens"], summary["distinct"]) == (expected.total(), len(expected))
    assert (summary["vocabulary"], summary["size"]) == (VOCABULARY, VOCABULARY)
    assert summary["coverage"] == {str(VOCABULARY): 1.0}


MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "user", "content": [{"type": "text", "text": "the end"}]},
]


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        ({"text": "hello", "prompt": "no"}, ["hello"]),
        ({"messages": MESSAGES, "prompt": "no", "response": "the", "text": "no"}, ["hello", "the end", "the"]),
        ({"messages": MESSAGES, "response": "the", "prompt_ids": [3], "response_ids": encode("the")}, [[3], "the"]),
        ({"text": "", "other": 1}, []),
    ],
)
def test_fields_that_are_counted(run, row, counted):
    expected = Counter(encode("zz"))
    for part in counted:
        expected.update(encode(part) if isinstance(part, str) else part)
    status, ids, summary, err = run({"a.jsonl": [row, b"", b"  ", {"text": "zz"}]})
    assert (status, err, summary["lines"]) == (0, "", 2), "blank lines do not count"
    assert ids == ranked(expected)
    assert summary["tokens"] == expected.total()


def test_map_and_coverage_against_a_counter():
    for seed in range(5):
        generator = np.random.default_rng(seed)
        counts = generator.integers(0, 6, 40).astype(np.int64)
        ends = sorted(generator.choice(40, 2, replace=False).tolist())
        order = sorted(range(40), key=lambda token: (-counts[token], token))
        for size in range(2, 41):
            top = order[:size]
            for end in ends:
                if end not in top:
                    top.remove(next(token for token in reversed(top) if token not in ends))
                    top.append(end)
            assert vocab.token_map(counts, size, ends).tolist() == sorted(top, key=order.index)
            share = vocab.coverage(counts, [size], ends)[str(size)]
            assert share == pytest.approx(sum(counts[top]) / counts.sum(), abs=1e-6)


def test_every_end_token_of_a_model_is_in_the_map(run, tmp_path):
    model = save(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 99_999]}))
    files = {"a.jsonl": [{"prompt_ids": [], "response_ids": [9, 9, 8, 8, 7, 1]}]}
    status, ids, summary, _ = run(files, "--tokenizer", model, size=4)
    assert (status, ids, summary["end_ids"]) == (0, [8, 1, 0, 2], [0, 1, 2])
    status, _, _, err = run(files, "--tokenizer", model, size=2)
    assert status == 2 and "--size 2 leaves no room for the 3 end tokens" in err


def test_a_tokenizer_without_an_end_token(run, tmp_path):
    plain = tokenizer().from_pretrained(save(tmp_path / "plain"), eos_token=None)
    plain.eos_token = plain.chat_template = None
    save(tmp_path / "plain", plain)
    (tmp_path / "plain" / "chat_template.jinja").unlink()  # which ends turns with a token
    status, ids, summary, err = run({"a.jsonl": [{"text": "zzy"}]}, "--tokenizer", tmp_path / "plain", size=2)
    assert (status, ids, summary["end_ids"]) == (0, [encode("z")[0], encode("y")[0]], [])
    assert "names no end token" in err


@pytest.mark.parametrize("name", ["m.json", "m.pt"])
def test_every_format_reads_back(run, tmp_path, name):
    import torch

    file = tmp_path / name
    status, _, summary, _ = run({"a.jsonl": [{"text": "hello the end"}]}, "--output", file, size=20)
    assert (status, summary["output"]) == (0, str(file))
    ids = read_token_map(str(file), vocab_size=VOCABULARY).tolist()
    assert ids == ranked(Counter(encode("hello the end")), 20) and END in ids
    if file.suffix == ".pt":
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is list and {type(token) for token in loaded} == {int} and loaded == ids


def test_a_map_is_replaced_through_a_link_and_kept_if_writing_fails(run, tmp_path, monkeypatch):
    real, link = tmp_path / "blob", tmp_path / "out.json"
    real.write_text("[5]")
    link.symlink_to(real)
    with monkeypatch.context() as patch:
        patch.setitem(vocab.WRITERS, ".json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        status, ids, _, err = run(A)
    assert (status, ids) == (2, [5]) and "No space left" in err
    assert run(A, size=3)[0] == 0
    assert link.is_symlink() and len(json.loads(real.read_text())) == 3


BAD = [
    (b'{"text": 5}', "text must be a text, got 5"),
    (b'{"prompt_ids": [5, "a"], "response_ids": []}', "prompt_ids must be a list of ids"),
    (b'{"prompt_ids": [5, 265], "response_ids": []}', "holds the id 265; ids of this model are 0 to 264"),
    (b'{"prompt_ids": [], "response_ids": [40], "response": "hello"}', "the ids are of another tokenizer"),
    (b"[" * 100_000, "recursion"),
    (b"not shown", ""),
]


def test_bad_lines_are_named_and_skipped(run, tmp_path):
    status, ids, summary, err = run({"a.jsonl": [{"text": "zz"}, b"", *(line for line, _ in BAD), {"text": "z"}]})
    assert (status, summary["lines"], summary["bad"], summary["tokens"]) == (1, len(BAD) + 2, len(BAD), 3)
    assert ids[0] == encode("z")[0]
    *shown, last = err.splitlines()
    assert last == "and 1 more bad lines"
    for number, (line, (_, message)) in enumerate(zip(shown, BAD, strict=False), start=3):
        assert line.startswith(f"{tmp_path / 'a.jsonl'}, line {number}: ") and message in line


@pytest.mark.parametrize("rows", [[], [b"", b" "], [{"text": ""}], [b"x"]])
def test_nothing_to_count(run, tmp_path, rows):
    (tmp_path / "out.json").write_text("[5]")
    status, ids, summary, err = run({"a.jsonl": rows})
    assert (status, ids, summary) == (2, [5], None)
    assert f"nothing to count in {tmp_path / 'a.jsonl'}: " in err


REFUSED = [
    (["--size", 266], "--size 266 is more than the 265 ids of the tokenizer"),
    (["--input", "no-such.jsonl"], "No such file or directory: 'no-such.jsonl'"),
    (["--input", "-", "-"], "--input - is given twice"),
    (["--tokenizer", "./no/such"], "looks like a path"),
    (["--output", "no/such/m.json"], "--output no/such/m.json cannot be written: "),
    (["--output", "m.bin"], "--output m.bin must end in .pt, .json"),
    (["--output", "folder.json"], "--output folder.json cannot be written: it is not a file"),
    (["--output", "device.pt"], "--output device.pt cannot be written: it is not a file"),
    (["--output", "a.json"], "--output a.json is also an input"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_before_counting(run, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vocab, "count", lambda *_, **__: pytest.fail("counting started"))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.pt").symlink_to(os.devnull)
    status, ids, summary, err = run({"a.json": [{"a": "a"}]}, *flags)
    assert (status, ids, summary) == (2, None, None)
    assert message in err and len(err.splitlines()) == 1


def test_the_shipped_map_holds_every_id_once():
    about = json.loads((SHIPPED / "smollm2.json").read_text())
    ids = np.load(SHIPPED / about["file"])
    assert ids.dtype == np.uint16 and ids.nbytes < 100_000
    assert sorted(ids.tolist()) == list(range(49152))
    assert ids.tolist().index(2) < 1024, "the end token is in a map of any useful size"
    assert {"fingerprint", "file", "made_by", "corpus", "tokens"} <= set(about)


@pytest.mark.real_model
def test_the_shipped_map_is_for_the_built_in_model():
    about = json.loads((SHIPPED / "smollm2.json").read_text())
    tokens = load_tokenizer(resolve(BUILT_IN_MODEL)).convert_ids_to_tokens(list(range(49152)))
    assert about["fingerprint"] == fingerprint(tokens)
    ids = read_token_map("8192", vocab_size=49152, tokens=lambda: tokens)
    assert ids.tolist() == np.load(SHIPPED / about["file"])[:8192].tolist()
    assert " ".join(tokens[token] for token in ids[:4]) == "Ġthe . Ċ ,"
