"""Whole runs on a tiny target: what comes out, what a kill loses (nothing), what is refused and leaves all as is."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from engine_helpers import END, VOCABULARY, tokenizer
from toy_models import tiny_llama
from train_helpers import arguments, save_data, save_model, start

from specjax import Engine, SamplingParams
from specjax.drafters.options import options_of
from specjax.train import run
from specjax.train.__main__ import main
from specjax.train.options import DataSettings, OptimizerSettings, TrainOptions
from specjax.train.output import plot, read_metrics
from specjax.train.update import schedule


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return save_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture
def train(model, data, tmp_path, capfd):
    """train(**flags) -> status, the summary, stderr; in `output`, by default run/."""

    def call(output: str | Path = "run", **changes: Any):
        capfd.readouterr()
        status = main(arguments(model, changes.pop("data", data), tmp_path / output, **changes))
        printed = capfd.readouterr()
        return status, json.loads(printed.out.splitlines()[-1]) if printed.out else None, printed.err

    return call


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the one number that a clock makes."""
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in read_metrics(folder)]


def arrays(folder: Path, step: int) -> list[np.ndarray]:
    """Every leaf of a checkpoint."""
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(manager.restore(step, args=ocp.args.StandardRestore()))]


def check_same(folder: Path, other: Path, step: int = 6) -> None:
    """Bit for bit."""
    assert lines(folder) == lines(other)
    for one, two in zip(arrays(folder, step), arrays(other, step), strict=True):
        np.testing.assert_array_equal(one, two)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# What comes out.

KINDS: dict[str, dict[str, Any]] = {
    "EAGLE3 mapped": {"draft": "EAGLE3", "draft_vocab_size": 30},
    "EAGLE3": {"draft": "EAGLE3"},
    "EAGLE": {"draft": "EAGLE", "rounds": None, "accumulate": 2},
    "MTP": {"draft": "MTP", "compute_dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    "kind", ["EAGLE3 mapped", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("EAGLE3", "EAGLE", "MTP"))]
)
def test_a_whole_run(train, model, data, tmp_path, kind):
    # One prompt at a time, here and below: each size of a batch is a program more to compile.
    measure = {"measure_prompts": 1, "measure_tokens": 6, "measure_steps": 2, "measure_every": 4}
    status, summary, err = train(**KINDS[kind] | measure)
    assert status == 0, err
    folder = tmp_path / "run"
    assert (summary["step"], summary["steps"], summary["head"]) == (6, 6, str(folder / "head"))
    rows = read_metrics(folder)
    trained, measured = [row for row in rows if "loss" in row], [row for row in rows if "accept_length" in row]
    assert [row["step"] for row in trained] == [2, 3, 4, 6]
    assert [row["step"] for row in measured] == [4, 6]
    for row in trained:
        rounds = 1 if kind == "EAGLE" else 2
        assert len(row["matched"]) == len(row["losses"]) == rounds
        assert np.isfinite(row["loss"]) and row["tokens_per_second"] > 0 and row["learning_rate"] > 0
    assert 1 <= measured[-1]["accept_length"] == summary["accept_length"] <= 3
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "loss" in err and "tok/s" in err and "accept length" in err
    assert "step 6" in (folder / "head" / "README.md").read_text()

    algorithm = kind.split()[0]
    if algorithm == "MTP":
        return  # tests/drafters/test_eagle_serving.py serves an MTP head
    config = {"max_running_requests": 1, "max_total_tokens": 128, "context_length": 64, "chunked_prefill_size": 16}
    plain = engine(model, "NONE", config)
    drafted = engine(model, algorithm, config, path=str(folder / "head"), steps=2, topk=1, nodes=3)
    wanted = SamplingParams(max_new_tokens=12, temperature=0.0)
    prompts = ["the hello", "12 end cat"]
    found = [each.generate(prompts, wanted) for each in (plain, drafted)]
    assert [one.output_ids for one in found[0]] == [one.output_ids for one in found[1]]
    if "mapped" in kind:
        ids = np.flatnonzero(offsets(folder / "head")[1])
        counted = Counter(token for row in held_in(data) for token in row)
        assert len(ids) == 30 and END in ids
        others = [t for t in sorted(range(265), key=lambda t: (-counted[t], t)) if t != END]
        assert set(ids) <= {*others[:40], END}
        assert {token for token, _ in counted.most_common(8)} <= set(ids)


def engine(model: Path, algorithm: str, config: dict[str, Any], **options: Any) -> Engine:
    from specjax.engine import EngineConfig

    return Engine.from_pretrained(str(model), draft=options_of(algorithm, **options), config=EngineConfig(**config))


def offsets(head: Path) -> tuple[np.ndarray, np.ndarray]:
    from safetensors.numpy import load_file

    tensors = load_file(head / "model.safetensors")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (np.arange(len(d2t)) + d2t).tolist() == np.flatnonzero(t2d).tolist()
    return d2t, t2d


def held_in(data: Path) -> list[list[int]]:
    """Ids of the responses, with the end that the template puts there."""
    core = tokenizer().backend_tokenizer
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    return [[*core.encode(row["response"], add_special_tokens=False).ids, END] for row in rows]


@pytest.mark.parametrize("count", [1, 3, 60])
def test_curves_are_visible(tmp_path, count):
    """Each panel of the picture holds coloured pixels, however few points there are."""
    from matplotlib.image import imread

    rows = [{"step": i, "tokens": 90 * i, "loss": 12 / i, "matched": [0.2, 0.1]} for i in range(1, count + 1)]
    rows += [{"step": count, "accept_length": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = imread(plot(tmp_path))[..., :3]
    coloured = np.ptp(picture[: len(picture) * 4 // 5], axis=-1) > 0.3
    assert [part.sum() > 20 for part in np.array_split(coloured, 3, axis=1)] == [True] * 3


# Killed and resumed.

KILLED = [("disk", "logged:3"), ("disk", "during:2")]

ENDED = """
import json, os, pathlib, resource, signal, sys, threading
from specjax.train import output
from specjax.train.__main__ import main
save, log = output.RunFolder.save, output.RunFolder.log

def run(moment, step, arguments):
    \"\"\"Trains, and comes to grief at this step.\"\"\"
    def end():
        os.kill(os.getpid(), signal.SIGINT if moment == "interrupted" else signal.SIGKILL)
    def patched_save(self, state):
        now = int(state.step) == step
        if moment == "during" and now:
            rename = os.rename
            def renamed(source, *others, **options):
                if "checkpoints" in str(source) and "tmp" in str(source):  # orbax has written beside
                    end()
                return rename(source, *others, **options)
            os.rename = renamed
        if moment == "full" and now:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        save(self, state)
        if moment == "after" and now:
            end()
    def patched_log(self, row):
        log(self, row)
        if moment in ("logged", "interrupted") and row["step"] == step:
            end()
    output.RunFolder.save, output.RunFolder.log = patched_save, patched_log
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return main(arguments)

import orbax.checkpoint, matplotlib.pyplot, transformers
assert threading.active_count() == 1
found = []
# Each in a process of its own, which is forked: a start takes longer than such a run. JAX has no threads yet.
for moment, arguments in json.loads(sys.argv[1]):
    (out, new_out), (err, new_err) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(new_out, 1)
        os.dup2(new_err, 2)
        name, _, step = moment.partition(":")
        sys.exit(run(name, int(step), arguments))
    os.close(new_out)
    os.close(new_err)
    said = [open(end, encoding="utf-8").read() for end in (err, out)]  # of the latter it is a line
    found.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *said])
print(json.dumps(found))
"""


class Ended(NamedTuple):
    """What a run left that has ended before its time: its folder, what it printed, and its status."""

    output: Path
    status: int
    err: str
    out: str


@pytest.fixture(scope="module")
def ended(model, data, tmp_path_factory):
    """ended(features, moment) -> such a run. The first call makes all that `make test` needs."""
    made: dict[tuple[str, str], Ended] = {}

    def get(*case: str) -> Ended:
        if case not in made:
            cases = (
                [case] if made else list(dict.fromkeys([*KILLED, ("none", "interrupted:3"), ("none", "full:4"), case]))
            )
            folders = [tmp_path_factory.mktemp("ended") / "run" for _ in cases]
            given = [
                (moment, arguments(model, data, folder, features=features))
                for (features, moment), folder in zip(cases, folders, strict=True)
            ]
            process = start([json.dumps(given)], ENDED)
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err
            for one, folder, found in zip(cases, folders, json.loads(out), strict=True):
                made[one] = Ended(folder, *found)
        return made[case]

    return get


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """whole(features) -> the folder of a run that nothing interrupted."""
    made: dict[str, Path] = {}

    def get(features: str) -> Path:
        if features not in made:
            made[features] = tmp_path_factory.mktemp("whole") / "run"
            assert main(arguments(model, data, made[features], features=features)) == 0
        return made[features]

    return get


@pytest.mark.process
@pytest.mark.parametrize(
    ("features", "moment"),
    [
        *KILLED,
        pytest.param("none", "after:2", marks=pytest.mark.slow),
        pytest.param("none", "logged:3", marks=pytest.mark.slow),
        pytest.param("none", "during:4", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(train, whole, ended, features, moment):
    found = ended(features, moment)
    assert found.status == -signal.SIGKILL, found.err
    assert not (found.output / "head").exists()
    status, _, err = train(found.output, features=features)
    assert status == 0, err
    assert ("Resuming" in err) == (moment != "during:2")
    check_same(whole(features), found.output)
    head = "head/model.safetensors"
    assert (found.output / head).read_bytes() == (whole(features) / head).read_bytes()


@pytest.mark.slow
def test_a_measurement_that_a_kill_prevented_is_made(train, tmp_path):
    """Between the checkpoint of a step and its measurement."""
    measure = {"measure_prompts": 2, "measure_tokens": 6, "measure_steps": 2, "measure_every": 0}
    assert train(**measure)[0] == 0
    there = lines(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    kept = [line for line in file.read_text().splitlines() if "accept_length" not in line]
    file.write_text("\n".join([*kept, '{"st']))
    status, summary, _ = train(**measure)
    assert (status, lines(tmp_path / "run")) == (0, there)
    assert summary["accept_length"] == there[-1]["accept_length"]


@pytest.mark.process
def test_ctrl_c_and_stop_after(train, whole, ended):
    found = ended("none", "interrupted:3")
    assert (found.status, found.out) == (130, ""), found.err
    assert "interrupted; the same command resumes" in found.err and "Traceback" not in found.err
    status, summary, err = train(found.output, stop_after=1e-9)
    assert (status, summary["step"], summary["head"]) == (0, 3, None), err
    status, summary, _ = train(found.output)
    assert (status, summary["step"]) == (0, 6)
    for one, two in zip(arrays(whole("none"), 6), arrays(found.output, 6), strict=True):
        np.testing.assert_array_equal(one, two)


def test_lines_that_are_no_measurements_do_not_count(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"loss": 3.0}\n[4]\n5\n\n{"step": 2}\n{"st')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2}]


def test_features_train_alike(whole):
    """Not in bits: in `none` the target's forward is compiled into the step."""
    runs = [arrays(whole(features), 6) for features in ("none", "disk")]
    for computed, stored in zip(*runs, strict=True):
        np.testing.assert_allclose(computed, stored, rtol=0.02, atol=2e-3)


# What is refused.


def test_other_settings_are_refused(train, whole, tmp_path):
    shutil.copytree(whole("none"), tmp_path / "run")
    before = content(tmp_path / "run")
    for changes, flag in (
        ({"learning_rate": 0.5}, "--learning-rate was 0.01 and is 0.5"),
        ({"held_back": 5}, "--held-back was 4 and is 5"),
        ({"aux_layers": ("0", "1", "2")}, "--aux-layers was"),
    ):
        status, summary, err = train(**changes)
        assert (status, summary) == (2, None)
        last = err.strip().splitlines()[-1]
        assert flag in last and "another --output to start a new run" in last
        assert content(tmp_path / "run") == before
    status, summary, _ = train(checkpoint_every=1, log_every=1, license="mit", export=str(tmp_path / "out"))
    assert (status, summary["head"]) == (0, str(tmp_path / "out"))


def test_a_run_is_extended(train, whole, tmp_path):
    """The learning rate of the further steps is that of a run of the new length, and its data go on where they were."""
    shutil.copytree(whole("none"), tmp_path / "run")
    before = lines(tmp_path / "run")
    status, summary, err = train(steps=9)
    assert (status, summary["step"], summary["steps"]) == (0, 9, 9), err
    assert "at step 6 of 9" in err
    after = lines(tmp_path / "run")
    assert after[: len(before)] == before and [row["step"] for row in after[len(before) :]] == [8, 9]
    assert after[-2]["tokens"] > before[-1]["tokens"], "tokens of all steps"
    assert "step 9" in (tmp_path / "run" / "head" / "README.md").read_text()
    rate = schedule(OptimizerSettings(learning_rate=0.01, warmup_steps=2), 9)
    assert after[-2]["learning_rate"] == pytest.approx(float(rate(7)), rel=1e-5)
    status, summary, err = train(steps=8)
    assert (status, summary) == (2, None)
    assert "--steps 8 is less than the 9 steps that the run" in err


def test_settings_of_a_run_without_a_checkpoint_may_change(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"steps": 77}')
    assert train(steps=1, checkpoint_every=1)[0] == 0


def test_a_damaged_checkpoint(train, whole, tmp_path):
    shutil.copytree(whole("none"), tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "6"
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    status, _, err = train()
    assert status == 2
    assert f"the checkpoint of step 6 in {tmp_path / 'run' / 'checkpoints'} cannot be read" in err
    shutil.rmtree(newest)
    assert train()[0] == 0
    check_same(whole("none"), tmp_path / "run")


@pytest.mark.process
def test_a_full_disk(train, whole, ended):
    found = ended("none", "full:4")
    assert (found.status, found.out) == (2, ""), found.err
    # Orbax's threads tell of it, too: they may have the last word, and the beginning of the line.
    _, name, mine = found.err.partition("specjax train: ")
    mine = mine.partition("\n")[0]
    assert (
        name and "the checkpoint of step 4 cannot be written" in mine and "the checkpoint of step 2 is whole" in mine
    ), found.err
    status, _, err = train(found.output)
    assert status == 0 and "at step 2 of 6" in err
    check_same(whole("none"), found.output)


def test_two_processes_do_not_share_a_folder(train, model, data, tmp_path):
    from specjax.train.output import RunFolder

    with RunFolder(tmp_path / "run", {}, keep=1):
        status, _, err = train()
    assert status == 2 and "is in use by another process" in err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"aux_layers": ("9",)}, "--aux-layers must be different layers"),
        ({"draft_vocab_size": 266}, "--draft-vocab-size 266 is more than"),
        ({"draft": "EAGLE", "draft_vocab_size": 9}, "--draft-vocab-size is for"),
        ({"held_back": 24}, "--held-back 24 must be less than the 24 usable examples of --data"),
        ({"data": None}, "nothing to learn from: give --data or --text-data"),
        ({"data": "missing.jsonl"}, "missing.jsonl"),
        ({"text_data": "missing.jsonl"}, "missing.jsonl"),
        ({"init_from": "/no/such/head"}, "/no/such/head"),
        ({"export": "/dev/null/head"}, "--export /dev/null/head cannot be written"),
        ({"output": "/proc/nowhere"}, "--output /proc/nowhere cannot be used"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_before_the_weights_are_read(train, tmp_path, monkeypatch, changes, expected):
    def read(*_: object, **__: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(run.checkpoint, "load_params", read)
    status, summary, err = train(**changes)
    assert (status, summary) == (2, None)
    assert expected in err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_later_texts_are_others(tmp_path):
    """--text-skip leaves out what --text-examples had, and nothing else."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"text {i} of these"}) + "\n" for i in range(40)))
    config = tiny_llama(vocab_size=VOCABULARY).target.config

    def used(**settings: Any) -> set[bytes]:
        given = DataSettings(text_data=(str(texts),), data_seed=3, row_length=64, **settings)
        rows, _, facts = run.read_data(TrainOptions(data=given), tokenizer(), config)
        found = {
            tokens[segments == segment].tobytes()
            for tokens, segments in zip(rows.tokens, rows.segments, strict=True)
            for segment in range(1, segments.max() + 1)
        }
        assert facts["texts"] == facts["examples"] == len(found)
        return found

    everything, first, rest = used(), used(text_examples=15), used(text_skip=15)
    assert len(everything) == 40 and len(first) == 15 and first | rest == everything and not first & rest
    assert used(text_skip=15, text_examples=10) < rest
    with pytest.raises(ValueError, match="--text-skip 40 leaves none of the 40 examples of --text-data"):
        used(text_skip=40)
    with pytest.raises(ValueError, match="--held-back 4 needs --data: nothing of --text-data is held back"):
        used(held_back=4)


def test_a_run_that_cannot_be_measured_says_so(train, data, caplog):
    def warned(output: str, measure_prompts: int) -> bool:
        caplog.clear()
        given = {"data": None, "text_data": data, "held_back": None, "steps": 1, "measure_prompts": measure_prompts}
        given |= {"rounds": 1, "features": "disk"}  # least to compile
        status, summary, _ = train(output, **given)
        assert status == 0 and summary["accept_length"] is None
        return "no accept length will be measured" in caplog.text

    assert warned("one", 2) and not warned("other", 0)


def test_batches_that_do_not_divide_and_empty_data(train, tmp_path, monkeypatch):
    monkeypatch.setattr(run.jax, "local_device_count", lambda: 4)
    assert "--batch-size 2 cannot be spread over 4 devices" in train()[2]
    monkeypatch.undo()
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\nnot json\n')
    status, _, err = train(data=tmp_path / "bad.jsonl", held_back=0)
    assert status == 2 and "none of the 2 lines is usable" in err and "line 1: text is empty" in err
    (tmp_path / "empty.jsonl").write_text("\n")
    status, _, err = train(data=tmp_path / "empty.jsonl", held_back=0)
    assert status == 2 and "contain no example to learn from" in err


@pytest.mark.parametrize("row", [{"prompt": "the"}, {"messages": [{"role": "user", "content": "the"}]}], ids=str)
def test_prompts_without_answers_are_one_error(train, data, tmp_path, row):
    file = tmp_path / "prompts.jsonl"
    file.write_text((json.dumps(row) + "\n") * 9)
    for given in ({"data": file}, {"data": file, "text_data": data}):
        status, summary, err = train(**given)
        (line,) = [each for each in err.splitlines() if "prompts.jsonl" in each]
        assert (status, summary) == (2, None) and line == err.strip().splitlines()[-1]
        assert "--data: none of the 9 lines is usable" in line and f"{file}, line 1: " in line
        assert "`specjax train generate` writes answers" in line


def test_how_much_is_held_back(tmp_path):
    config = tiny_llama(vocab_size=VOCABULARY).target.config

    def held(lines: int, held_back: int | None = None) -> int:
        given = DataSettings(data=(str(save_data(tmp_path / "rows.jsonl", lines)),), held_back=held_back)
        _, kept, facts = run.read_data(TrainOptions(data=given), tokenizer(), config)
        assert facts["held_back"] == len(kept) and facts["examples"] == lines - len(kept)
        return len(kept)

    assert [held(lines) for lines in (1, 2, 10, 11, 150, 900)] == [0, 1, 1, 2, 15, 64]
    assert held(24, 6) == 6 and held(150, 64) == 64


def test_a_folder_that_is_no_run(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("text")
    status, _, err = train()
    assert status == 2 and "so it is no run; give another folder" in err
    assert content(tmp_path / "run") == {"mine.txt": b"text"}
