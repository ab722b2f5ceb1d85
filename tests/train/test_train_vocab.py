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
    """The obvious way. Without the end token's rule."""
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
    """run(files by name, *flags) -> status, the map of a .json output, the summary, stderr. Lists become JSONL."""

    def call(files, *flags, size=VOCABULARY, output="out.json"):
        paths = []
        for name, data in files.items():
            if isinstance(data, list):
                data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in data)
            data = data.encode() if isinstance(data, str) else data
            paths.append(name if name == "-" else str(tmp_path / name))
            if name == "-":
                monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
            else:
                (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        output = tmp_path / output
        arguments = ["--tokenizer", folder, "--input", *paths, "--output", str(output), "--no-progress"]
        arguments += [] if size is None else ["--size", str(size)]
        capsys.readouterr()
        status = vocab.main([*arguments, *map(str, flags)])
        printed = capsys.readouterr()
        assert not list(tmp_path.glob(".out*")), "no drafts are left"
        found = json.loads(output.read_text()) if output.suffix == ".json" and output.is_file() else None
        return status, found, json.loads(printed.out) if printed.out else None, printed.err

    return call


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "-"])
def test_summary(run, name):
    texts = ["hello hello 12 the end\n", "the 1122 é🙂\n", "hell"]
    expected = Counter(token for text in texts for token in encode(text))
    status, ids, summary, err = run({name: [{"text": text} for text in texts]})
    assert (status, err) == (0, "")
    assert ids == ranked(expected)
    assert (summary["lines"], summary["bad"], summary["end_ids"]) == (len(texts), 0, [END])
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
        ({"text": "hello", "output_ids": [9, 9]}, ["hello"]),
        ({"messages": MESSAGES, "prompt": "no"}, ["hello", "the end"]),
        ({"messages": MESSAGES, "prompt": "no", "response": "the", "text": "no"}, ["hello", "the end", "the"]),
        (
            {"messages": MESSAGES, "response": "the", "prompt_ids": [30], "response_ids": encode("the")},
            [[30], encode("the")],
        ),
        ({"messages": MESSAGES, "response_ids": [40, 41]}, ["hello", "the end", [40, 41]]),
        ({"prompt": "hell", "prompt_ids": [30], "response_ids": [40]}, [[30], [40]]),
        ({"prompt": "hell", "prompt_ids": [30], "response": "the"}, ["hell", "the"]),
        ({"input_ids": [30], "response": "the"}, [[30], "the"]),
        ({"output_ids": [40, 41]}, [[40, 41]]),
        ({"tokens": [7, 9], "id": 1}, [[7, 9]]),
        ({"response": "the", "prompt": None}, ["the"]),
        ({"prompt_ids": [3, 4], "response_ids": [4, 2]}, [[3, 4], [4, 2]]),
        ({"input_ids": [7, 7, 7], "id": 1}, [[7, 7, 7]]),
        ({"text": "", "other": 1}, []),
        ({"input_ids": []}, []),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "-"])
def test_what_is_counted_of_a_row(run, row, counted, name):
    expected = Counter(encode("zz"))
    for part in counted:
        expected.update(encode(part) if isinstance(part, str) else part)
    status, ids, summary, err = run({name: [row, b"", b"  ", {"text": "zz"}]})
    assert (status, err, summary["lines"]) == (0, "", 2), "blank lines are no lines"
    assert ids == ranked(expected)
    assert summary["tokens"] == expected.total()


def test_ids_of_another_tokenizer_are_not_counted(run):
    rows = [{"text": "zz"}, {"prompt_ids": [30], "response_ids": [40, 41], "response": "hello"}]
    status, ids, summary, err = run({"a.jsonl": rows})
    assert (status, summary["bad"], ids) == (1, 1, ranked(Counter(encode("zz"))))
    assert "a.jsonl, line 2: response_ids decodes to" in err and "the ids are of another tokenizer" in err


def test_chosen_fields_and_their_weights(run):
    rows = [{"turns": ["hello", "the"], "response_ids": [40, 41], "text": "zzz"}, {"turns": ["q"]}]
    expected = Counter([*encode("hello"), *encode("the"), *encode("q"), *[40, 41] * 3])
    status, ids, summary, _ = run({"a.jsonl": rows}, "--field", "turns", "--field", "response_ids=3")
    assert status == 0
    assert ids == ranked(expected)
    assert summary["tokens"] == expected.total() - 4, "tokens are counted once"


def test_many_rows_in_several_batches(run, monkeypatch):
    monkeypatch.setattr(lines, "BATCH_BYTES", 50)
    generator = np.random.default_rng(0)
    rows = [{"text": "".join(generator.choice(list("abc "), n))} for n in generator.integers(0, 15, 200)]
    ids_rows = [{"input_ids": generator.integers(0, VOCABULARY, 7).tolist()} for _ in range(50)]
    expected = Counter(token for row in rows for token in encode(row["text"]))
    expected.update(token for row in ids_rows for token in row["input_ids"])
    status, ids, summary, _ = run({"a.jsonl": rows, "b.jsonl": ids_rows})
    assert (status, summary["lines"], summary["tokens"]) == (0, 250, expected.total())
    assert ids == ranked(expected)


# The map.


def test_ties_go_to_the_lower_id_and_absent_ids_come_last(run):
    _, ids, _, _ = run({"a.jsonl": [{"input_ids": [9, 8, 7, 7, 30, 30]}]})
    assert ids is not None
    assert ids[:6] == [7, 30, 8, 9, 0, 1]
    assert ids[6:] == [token for token in range(2, VOCABULARY) if token not in (7, 8, 9, 30)]


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        ([[9, 9, 9, 8, 8, 7]], 2, [9, END]),
        ([[9, 9, 9, 8, 8, 7, END]], 3, [9, 8, END]),
        ([[9, 9, 8, END, END, END]], 2, [END, 9]),
        ([[9, 9, 9, 8, 8, 7]], 5, [9, 8, 7, 0, END]),
        ([[9]], 1, [END]),
    ],
)
def test_the_end_token_is_always_there(run, rows, size, expected):
    status, ids, _, _ = run({"a.jsonl": [{"input_ids": row} for row in rows]}, size=size)
    assert (status, ids) == (0, expected)


def test_every_end_token_of_a_model(folder, run, tmp_path):
    model = save(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 99_999]}))
    files = {"a.jsonl": [{"input_ids": [9, 9, 8, 8, 7, 1]}]}
    status, ids, summary, _ = run(files, "--tokenizer", model, size=4)
    assert (status, ids, summary["end_ids"]) == (0, [8, 1, 0, 2], [0, 1, 2])
    status, _, _, err = run(files, "--tokenizer", model, size=2)
    assert status == 2
    assert "--size 2 leaves no room for the 3 end tokens" in err


def test_a_tokenizer_without_an_end_token(run, tmp_path):
    plain = tokenizer().from_pretrained(save(tmp_path / "plain"), eos_token=None)
    plain.eos_token = None
    save(tmp_path / "plain", plain)
    status, ids, summary, err = run({"a.jsonl": [{"text": "zzy"}]}, "--tokenizer", tmp_path / "plain", size=2)
    assert (status, ids, summary["end_ids"]) == (0, [encode("z")[0], encode("y")[0]], [])
    assert "names no end token" in err


@pytest.mark.parametrize("seed", range(5))
def test_map_and_coverage_against_a_counter(seed):
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
        expected = sorted(top, key=order.index)
        assert vocab.token_map(counts, size, ends).tolist() == expected
        share = vocab.coverage(counts, [size], ends)[str(size)]
        assert share == pytest.approx(sum(counts[top]) / counts.sum(), abs=1e-6)


def test_the_default_size_is_all_of_a_small_vocabulary(run):
    _, ids, summary, _ = run(A, size=None)
    assert len(ids) == summary["size"] == VOCABULARY


# Outputs.


@pytest.mark.parametrize("name", ["m.json", "m.pt", "m.npy", "m.safetensors"])
def test_every_output_reads_back(run, tmp_path, name):
    import torch
    from safetensors.numpy import load_file

    file = tmp_path / name
    status, _, summary, _ = run({"a.jsonl": [{"text": "hello the end"}]}, size=20, output=name)
    assert (status, summary["output"]) == (0, str(file))
    ids = read_token_map(str(file), vocab_size=VOCABULARY).tolist()
    expected = ranked(Counter(encode("hello the end")), 20)
    assert ids == expected and END in ids
    if file.suffix == ".pt":
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is list and {type(token) for token in loaded} == {int} and loaded == ids
    if file.suffix == ".npy":
        assert np.load(file).dtype == np.uint16 and np.load(file).tolist() == ids
    if file.suffix == ".safetensors":
        tensors = load_file(file)
        assert list(tensors) == ["token_map"] and tensors["token_map"].dtype == np.int32


def test_numpy_holds_what_a_large_vocabulary_needs(tmp_path):
    vocab.WRITERS[".npy"](tmp_path / "a.npy", [70_000, 1])
    assert np.load(tmp_path / "a.npy").tolist() == [70_000, 1]
    assert np.load(tmp_path / "a.npy").dtype == np.int32


def test_an_old_map_is_replaced_through_its_link(run, tmp_path):
    real = tmp_path / "blob"
    real.write_bytes(b"old")
    (tmp_path / "link.npy").symlink_to(real)
    assert run(A, output="link.npy", size=3)[0] == 0
    assert (tmp_path / "link.npy").is_symlink()
    assert len(np.load(real)) == 3


@pytest.fixture
def untouched(monkeypatch):
    """The work must not start."""
    monkeypatch.setattr(vocab, "load_tokenizer", lambda *_: pytest.fail("the work started"))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/such/m.json", "cannot be written: "),
        ("m.bin", "must end in .pt, .safetensors, .npy, .json"),
        ("folder.json", "cannot be written: it is not a file"),
        ("device.npy", "cannot be written: it is not a file"),
        ("a.json", "is also an input"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(run, tmp_path, output, message):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.npy").symlink_to(os.devnull)
    status, _, summary, err = run({"a.json": [{"text": "text"}]}, output=output)
    assert (status, summary) == (2, None)
    assert f"--output {tmp_path / output} {message}" in err


def test_a_failed_write_keeps_the_old_map(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / "out.json").write_text("[5]")
    monkeypatch.setitem(vocab.WRITERS, ".json", full)
    status, ids, _, err = run(A)
    assert (status, ids) == (2, [5])
    assert "No space left" in err


# What is wrong with the input.

BAD = {
    "not JSON": (b"{nope", "the line is not JSON: Expecting property name"),
    "not UTF-8": (b'{"text": "\xff"}', "can't decode byte 0xff"),
    "half a surrogate": (
        b'{"prompt": "fine", "response": "\\ud800"}',
        "response holds '\\ud800': surrogates must come in pairs",
    ),
    "completion": (b'{"prompt": "a", "completion": "b"}', "completion is not read; give the answer as response"),
    "text and response": (b'{"text": "a", "response": "b"}', "text is running text, and response an answer"),
    "padding": (b'{"input_ids": [5, 0], "attention_mask": [1, 0]}', "attention_mask must be 1 for every token"),
    "no object": (b"[1]", "a line must be a JSON object, got [1]"),
    "no field": (b'{"a": 1, "b": 2}', "none of the fields response_ids, output_ids, response, messages, "),
    "a number": (b'{"text": 5}', "text must be a text, a list of ids, of texts or of messages, got 5"),
    "bools": (b'{"input_ids": [true]}', "input_ids must be a text"),
    "mixed": (b'{"input_ids": [5, "a"]}', "input_ids must be a text"),
    "no messages": (b'{"messages": [{"value": "a"}]}', "messages[0] must be an object with role and content"),
    "odd content": (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content must be a text, got 5"),
    "id too large": (b'{"input_ids": [5, 265]}', "holds the id 265; ids of this model are 0 to 264"),
    "id below 0": (b'{"input_ids": [-100]}', "holds the id -100"),
    "nested": (b"[" * 100_000, "recursion"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_and_skipped(run, tmp_path, line, message):
    status, ids, summary, err = run({"a.jsonl": [{"text": "zz"}, b"", line, {"text": "z"}]})
    assert (status, summary["lines"], summary["bad"], summary["tokens"]) == (1, 3, 1, 3)
    assert ids[0] == encode("z")[0]
    assert f"{tmp_path / 'a.jsonl'}, line 3: " in err
    assert message in err


def test_only_the_first_bad_lines_are_named(run):
    status, _, summary, err = run({"a.jsonl": [b"x"] * 12 + [{"text": "a"}], "b.jsonl": [b"\xfe", {"text": "a"}]})
    assert (status, summary["bad"], summary["lines"]) == (1, 13, 15)
    assert summary["tokens"] == 2
    assert len(err.splitlines()) == lines.SHOWN_LINES + 1
    assert f"and {13 - lines.SHOWN_LINES} more bad lines" in err


def test_byte_order_mark(run):
    status, _, summary, _ = run({"b.jsonl.gz": b"\xef\xbb\xbf" + b'{"text": "ok"}\n'})
    assert (status, summary["tokens"]) == (0, len(encode("ok")))


def test_half_a_gzip_file_counts_as_far_as_it_goes(run, tmp_path):
    whole = gzip.compress(b"".join(b'{"text": "%d the"}\n' % n for n in range(20_000)))
    (tmp_path / "half.jsonl").write_bytes(whole[: len(whole) // 2])
    status, _, summary, err = run(A, "--input", tmp_path / "half.jsonl")
    assert (status, summary["bad"]) == (1, 1)
    assert summary["tokens"] > 1000
    assert "the file cannot be read on from here: Compressed file ended" in err


@pytest.mark.parametrize("rows", [[], [b"", b" "], [{"text": ""}], [b"x"]])
def test_nothing_to_count(run, tmp_path, rows):
    (tmp_path / "out.json").write_text("[5]")
    status, ids, summary, err = run({"a.jsonl": rows})
    assert (status, ids, summary) == (2, [5], None)
    assert f"nothing to count in {tmp_path / 'a.jsonl'}: " in err


REFUSED = {
    "size": (["--size", 266], "--size 266 is more than the 265 ids of the tokenizer"),
    "no size": (["--size", 0], "--size must be at least 1, got 0"),
    "no input": (["--input", "no-such.jsonl"], "No such file or directory: 'no-such.jsonl'"),
    "twice": (["--input", "-", "-"], "--input - is given twice"),
    "weight": (["--field", "a=0"], "--field must be NAME or NAME=WEIGHT, weight from 1 to 1000000, got 'a=0'"),
    "no name": (["--field", "=2"], "got '=2'"),
    "huge weight": (["--field", "a=" + "9" * 5000], "--field must be"),
    "field twice": (["--field", "a", "--field", "a=2"], "--field a is given twice"),
    "no tokenizer": (["--tokenizer", "./no/such"], "looks like a path"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused(run, flags, message):
    status, ids, summary, err = run({"a.jsonl": [{"a": "a"}]}, *flags)
    assert (status, ids, summary) == (2, None, None)
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_hub_id_fetches_no_weights(run, folder, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot(name, **options):
        asked[name] = options["allow_patterns"]
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert run(A, "--tokenizer", "some/model", size=5)[0] == 0
    assert not any("safetensors" in pattern for pattern in asked["some/model"])


def test_a_hub_id_that_is_not_there(run, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError("gone")))
    status, _, _, err = run(A, "--tokenizer", "some/model")
    assert status == 2
    assert "no model 'some/model'" in err and "(OSError: gone)" in err


def test_an_interrupt_writes_nothing(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(vocab, "count", interrupted)
    status, ids, summary, err = run(A)
    assert (status, ids, summary) == (130, None, None)
    assert err == "specjax train vocab: interrupted; nothing was written\n"


def test_progress_is_on_stderr(run, folder, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}')
    arguments = ["--tokenizer", folder, "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "a.npy")]
    assert vocab.main(arguments) == 0
    printed = capsys.readouterr()
    assert "Counting: 17.0B in " in printed.err, "one line where stderr is no terminal"
    assert len(printed.out.splitlines()) == 1


# The map that comes with the package.


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
    found = read_token_map("8192", vocab_size=49152, tokens=lambda: tokens)
    assert found.tolist() == np.load(SHIPPED / about["file"])[:8192].tolist()
    assert " ".join(tokens[token] for token in found[:4]) == "Ġthe . Ċ ,"
