"""`specjax train vocab` with the tiny tokenizer: files in, maps out, against a Counter; the shipped map."""

import gzip
import io
import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import END, VOCABULARY, tokenizer

import specjax
from specjax.checkpoint import BUILT_IN_MODEL, load_tokenizer, resolve
from specjax.checkpoint.token_map import fingerprint, read_token_map
from specjax.train import corpus, vocab

TEXTS = ["hello hello 12 the end\n", "\n", "the 1122 é🙂\n", "hell\n"]
SHIPPED = Path(specjax.__file__).parent / "data"


def encode(text: str) -> list[int]:
    return tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids


def ranked(counter: Counter[int], size: int = VOCABULARY) -> list[int]:
    """The obvious way. Without the end token's rule."""
    return sorted(range(VOCABULARY), key=lambda token: (-counter[token], token))[:size]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Only tokenizer files: no config.json, no weights."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """run(files by name, *flags) -> status, the map in out.json, the summary, stderr. Rows of a list become JSONL."""

    def call(files, *flags, size=VOCABULARY):
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
        output = tmp_path / "out.json"
        arguments = ["--tokenizer", folder, "--input", *paths, "--output", str(output), "--no-progress"]
        arguments += [] if size is None else ["--size", str(size)]
        capsys.readouterr()
        status = vocab.main([*arguments, *map(str, flags)])
        printed = capsys.readouterr()
        assert not list(tmp_path.glob(".out*")), "no drafts are left"
        found = json.loads(output.read_text()) if output.exists() else None
        return status, found, json.loads(printed.out) if printed.out else None, printed.err

    return call


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "-"])
def test_text_is_tokenised_as_running_text(run, name):
    text = "".join(TEXTS)
    expected = Counter(encode(text))
    status, ids, summary, err = run({name: text}, *(["--format", "text"] if name == "-" else []))
    assert (status, err) == (0, "")
    assert ids == ranked(expected)
    assert (summary["lines"], summary["bad"], summary["end_ids"]) == (len(TEXTS), 0, [END])
    assert (summary["tokens"], summary["distinct"]) == (expected.total(), len(expected))
    assert (summary["vocabulary"], summary["size"]) == (VOCABULARY, VOCABULARY)
    assert summary["coverage"] == {str(VOCABULARY): 1.0}


MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": [{"type": "text", "text": "the end"}, {"type": "image", "url": "x"}]},
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
    form = ["--format", "jsonl"] if name == "-" else []
    status, ids, summary, err = run({name: [row, b"", b"  ", {"text": "zz"}]}, *form)
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
    expected = Counter([*encode("hello"), *encode("the"), *encode("q")] * 2 + encode("bbbbb"))
    status, ids, _, _ = run({"a.jsonl": rows, "b.txt": "bbbbb"}, "--field", "turns=2")
    assert (status, ids) == (0, ranked(expected)), "texts count once"


def test_many_rows_in_several_batches(run, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH", 50)
    monkeypatch.setattr(vocab, "BLOCK", 16)
    generator = np.random.default_rng(0)
    rows = [{"text": "".join(generator.choice(list("abc "), n))} for n in generator.integers(0, 15, 200)]
    ids_rows = [{"input_ids": generator.integers(0, VOCABULARY, 7).tolist()} for _ in range(50)]
    expected = Counter(token for row in rows for token in encode(row["text"]))
    expected.update(token for row in ids_rows for token in row["input_ids"])
    status, ids, summary, _ = run({"a.jsonl": rows, "b.jsonl": ids_rows})
    assert (status, summary["lines"], summary["tokens"]) == (0, 250, expected.total())
    assert ids == ranked(expected)


@pytest.mark.parametrize("text", ["", "a", "ab cd " * 10_000, "x" * 40_000, "é" * 16385])
def test_long_texts_are_cut_and_nothing_is_lost(text):
    parts = list(vocab.pieces(text))
    assert "".join(parts) == text
    assert all(len(part) <= vocab.BLOCK for part in parts)
    if " " in text:
        assert all(part.startswith(" ") for part in parts[1:])


def test_a_text_of_one_long_line(run):
    text = "hello the 12 " * 5000
    status, ids, summary, _ = run({"a.txt": text})
    assert (status, summary["lines"]) == (0, 1)
    assert summary["tokens"] == len(encode(text))
    assert ids == ranked(Counter(encode(text)))


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
    model = tmp_path / "model"
    tokenizer().save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 99_999]}))
    files = {"a.jsonl": [{"input_ids": [9, 9, 8, 8, 7, 1]}]}
    status, ids, summary, _ = run(files, "--tokenizer", model, size=4)
    assert (status, ids, summary["end_ids"]) == (0, [8, 1, 0, 2], [0, 1, 2])
    status, _, _, err = run(files, "--tokenizer", model, size=2)
    assert status == 2
    assert "--size 2 leaves no room for the 3 end tokens" in err


def test_a_tokenizer_without_an_end_token(run, tmp_path):
    plain = tokenizer().from_pretrained(_saved(tmp_path / "plain"), eos_token=None)
    plain.eos_token = None
    plain.save_pretrained(tmp_path / "plain")
    status, ids, summary, err = run({"a.txt": "zzy"}, "--tokenizer", tmp_path / "plain", size=2)
    assert (status, ids, summary["end_ids"]) == (0, [encode("z")[0], encode("y")[0]], [])
    assert "names no end token" in err


def _saved(path: Path) -> Path:
    tokenizer().save_pretrained(path)
    return path


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
    _, ids, summary, _ = run({"a.txt": "a"}, size=None)
    assert len(ids) == summary["size"] == VOCABULARY


# Outputs.


def test_every_output_reads_back(run, tmp_path):
    import torch
    from safetensors.numpy import load_file

    names = ["m.pt", "m.npy", "m.safetensors"]
    flags = [flag for name in names for flag in ("--output", tmp_path / name)]
    status, ids, summary, _ = run({"a.txt": "hello the end"}, *flags, size=20)
    assert status == 0
    assert summary["outputs"] == [str(tmp_path / name) for name in ("out.json", *names)]
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert type(loaded) is list and {type(token) for token in loaded} == {int}
    assert loaded == ids
    array = np.load(tmp_path / "m.npy")
    assert array.dtype == np.uint16 and array.tolist() == ids
    tensors = load_file(tmp_path / "m.safetensors")
    assert list(tensors) == ["token_map"]
    assert tensors["token_map"].dtype == np.int32 and tensors["token_map"].tolist() == ids
    for name in summary["outputs"]:
        assert read_token_map(name, vocab_size=VOCABULARY).tolist() == ids
    modes = {(tmp_path / name).stat().st_mode for name in names}
    assert len(modes) == 1, "all as the umask has it"


def test_numpy_holds_what_a_large_vocabulary_needs(tmp_path):
    vocab.write([tmp_path / "a.npy"], [70_000, 1])
    assert np.load(tmp_path / "a.npy").tolist() == [70_000, 1]
    assert np.load(tmp_path / "a.npy").dtype == np.int32


def test_an_old_map_is_replaced_through_its_link(run, tmp_path):
    real = tmp_path / "blob"
    real.write_bytes(b"old")
    (tmp_path / "link.npy").symlink_to(real)
    assert run({"a.txt": "a"}, "--output", tmp_path / "link.npy", size=3)[0] == 0
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
        ("out.json", "is also an input, or is given twice"),
        ("a.json", "is also an input, or is given twice"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(run, tmp_path, output, message):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.npy").symlink_to(os.devnull)
    status, ids, summary, err = run({"a.json": "text"}, "--format", "text", "--output", tmp_path / output)
    assert (status, ids, summary) == (2, None, None)
    assert f"--output {tmp_path / output} {message}" in err


def test_nothing_is_replaced_if_one_output_fails(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / "out.json").write_text("[5]")
    monkeypatch.setitem(vocab.WRITERS, ".npy", full)
    status, ids, _, err = run({"a.txt": "a"}, "--output", tmp_path / "m.npy")
    assert (status, ids) == (2, [5])
    assert "No space left" in err


# What is wrong with the input.

BAD = {
    "not JSON": (b"{nope", "Expecting property name"),
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
    "no messages": (b'{"messages": [{"value": "a"}]}', "messages must be a text"),
    "odd content": (b'{"messages": [{"content": 5}]}', "messages holds a message whose content is 5"),
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
    status, _, summary, err = run({"a.jsonl": [b"x"] * 12 + [{"text": "a"}], "b.txt": b"ok\n\xfe\nok\n"})
    assert (status, summary["bad"], summary["lines"]) == (1, 13, 16)
    assert summary["tokens"] == 1 + len(encode("ok\nok\n"))
    assert len(err.splitlines()) == corpus.SHOWN_LINES + 1
    assert f"and {13 - corpus.SHOWN_LINES} more bad lines" in err


def test_a_text_line_that_is_not_utf_8(run, tmp_path):
    status, _, summary, err = run({"b.txt.gz": b"\xef\xbb\xbfok\n\xfe\nok\n"})
    assert (status, summary["tokens"]) == (1, len(encode("ok\nok\n"))), "a byte order mark is no text"
    assert f"{tmp_path / 'b.txt.gz'}, line 2: " in err


def test_half_a_gzip_file_counts_as_far_as_it_goes(run, tmp_path):
    whole = gzip.compress(b"".join(b"%d the\n" % n for n in range(20_000)))
    (tmp_path / "half.txt").write_bytes(whole[: len(whole) // 2])
    status, _, summary, err = run({"b.txt": "b"}, "--input", tmp_path / "half.txt")
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
    "no input": (["--input", "no-such.txt"], "No such file or directory: 'no-such.txt'"),
    "unknown format": (["--input", "-"], "--input -: only .txt and .jsonl"),
    "twice": (["--format", "text", "--input", "-", "-"], "--input - is given twice"),
    "weight": (["--field", "a=0"], "--field must be NAME or NAME=WEIGHT, weight from 1 to 1000000, got 'a=0'"),
    "no name": (["--field", "=2"], "got '=2'"),
    "huge weight": (["--field", "a=" + "9" * 5000], "--field must be"),
    "field twice": (["--field", "a", "--field", "a=2"], "--field a is given twice"),
    "field of text": (["--field", "a", "--format", "text"], "--field is about JSONL"),
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
    assert run({"a.txt": "a"}, "--tokenizer", "some/model", size=5)[0] == 0
    assert not any("safetensors" in pattern for pattern in asked["some/model"])


def test_a_hub_id_that_is_not_there(run, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError("gone")))
    status, _, _, err = run({"a.txt": "a"}, "--tokenizer", "some/model")
    assert status == 2
    assert "no tokenizer 'some/model'" in err and "(OSError: gone)" in err


def test_an_interrupt_writes_nothing(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(vocab, "count", interrupted)
    status, ids, summary, err = run({"a.txt": "a"})
    assert (status, ids, summary) == (130, None, None)
    assert err == "specjax train vocab: interrupted; nothing was written\n"


def test_progress_is_on_stderr(run, folder, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    arguments = ["--tokenizer", folder, "--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "a.npy")]
    assert vocab.main(arguments) == 0
    printed = capsys.readouterr()
    assert "Counting: 5.00B in " in printed.err, "one line where stderr is no terminal"
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
