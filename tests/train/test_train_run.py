"""Whole runs on a tiny target: outputs, resuming after kills, devices, and refusals that change no file."""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from engine_helpers import VOCABULARY, tokenizer
from safetensors.numpy import load_file
from toy_models import tiny_llama
from train_helpers import arguments, start

from specjax.train import run
from specjax.train.__main__ import main
from specjax.train.options import PLACEMENTS, DataSettings, OptimizerSettings, TrainOptions
from specjax.train.output import RunError, RunFolder, plot, read_metrics


@pytest.fixture
def train(model, data, tmp_path, capfd):
    """train(**flags) -> status, summary, stderr of a run in `output`."""

    def call(output: str | Path = "run", **changes: Any):
        capfd.readouterr()
        status = main(arguments(model, changes.pop("data", data), tmp_path / output, **changes))
        printed = capfd.readouterr()
        return status, json.loads(printed.out.splitlines()[-1]) if printed.out else None, printed.err

    return call


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """whole(features) -> the folder of an uninterrupted run."""
    folders: dict[str, Path] = {}

    def get(features: str) -> Path:
        if features not in folders:
            folders[features] = tmp_path_factory.mktemp("whole") / "run"
            assert main(arguments(model, data, folders[features], features=features)) == 0
        return folders[features]

    return get


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return shutil.copytree(whole("none"), tmp_path / "run")


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without tokens/s."""
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in read_metrics(folder)]


def arrays(folder: Path, step: int = 6) -> list[np.ndarray]:
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(manager.restore(step, args=ocp.args.StandardRestore()))]


def check_same(folder: Path, other: Path) -> None:
    """Equal metrics, and equal bits in the last checkpoint."""
    assert lines(folder) == lines(other)
    for expected, resumed in zip(arrays(folder), arrays(other), strict=True):
        np.testing.assert_array_equal(expected, resumed)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


KINDS: dict[str, dict[str, Any]] = {
    "EAGLE3": {"draft_vocab_size": 30}, "EAGLE": {"rounds": None, "accumulate": 2},
    "MTP": {"compute_dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["EAGLE3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("EAGLE", "MTP"))])
def test_a_whole_run(train, tmp_path, kind):
    # One prompt: each batch size is another program to compile.
    flags = KINDS[kind] | {"draft": kind, "measure_prompts": 1, "measure_tokens": 6, "measure_steps": 2}
    status, summary, err = train(**flags, measure_every=4)
    assert status == 0, err
    folder = tmp_path / "run"
    assert (summary["step"], summary["steps"], summary["head"]) == (6, 6, str(folder / "head"))
    rows = lines(folder)
    trained, measured = [row for row in rows if "loss" in row], [row for row in rows if "accept_length" in row]
    assert [row["step"] for row in trained] == [2, 3, 4, 6]
    assert [row["step"] for row in measured] == [4, 6]
    for row in trained:
        assert len(row["matched"]) == len(row["losses"]) == (1 if kind == "EAGLE" else 2)
        assert np.isfinite(row["loss"]) and row["learning_rate"] > 0
    assert 1 <= measured[-1]["accept_length"] == summary["accept_length"] <= 3
    for row in measured:  # of a chain of --measure-steps, also for a head that is trained in one round
        assert len(row["simulated_by_depth"]) == 2 and row["simulated"] <= 3
        assert row["simulated"] == pytest.approx(1 + np.cumprod(row["simulated_by_depth"]).sum(), abs=1e-3)
    assert "loss" in err and "tok/s" in err and "accept length" in err and "simulated" in err
    assert "step 6" in (folder / "head" / "README.md").read_text()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 3.0}\n[4]\n5\n\n{"st')
    assert lines(folder) == rows, "incomplete lines are ignored"


def test_eagle31_heads(train, tmp_path):
    """Norms follow from flags, are trained, and are read from the head that a further run starts from."""
    status, _, err = train(steps=2, fc_norm=(), norm_output=(), measure_prompts=1, measure_tokens=6, measure_steps=2)
    assert status == 0, err
    first = tmp_path / "run" / "head"
    assert "fc_norm, norm_output" in (first / "README.md").read_text()
    status, _, err = train("next", steps=2, init_from=first)
    assert status == 0, err
    for folder in (first, tmp_path / "next" / "head"):
        config = json.loads((folder / "config.json").read_text())
        assert config["fc_norm"] and config["norm_output"] and "norm_before_fc" not in config
        tensors = load_file(folder / "model.safetensors")
        assert all(np.ptp(np.float32(tensors[f"fc_norm.{i}.weight"])) > 0 for i in range(3)), "no longer ones"


def test_stored_features_train_alike(whole):
    """Not bit for bit: with `none` the target's forward is compiled into the step."""
    for computed, stored in zip(arrays(whole("none")), arrays(whole("disk")), strict=True):
        np.testing.assert_allclose(computed, stored, rtol=0.02, atol=2e-3)


TWO_DEVICES = """
import json, os, sys
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
from specjax.train.__main__ import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


@pytest.mark.process
def test_two_devices_train_as_one(model, data, whole, tmp_path):
    """The rows of a batch are spread over both; the target is on both, or its weights are split."""
    commands = {name: arguments(model, data, tmp_path / name, target_placement=name) for name in PLACEMENTS}
    process = start([json.dumps(list(commands.values()))], TWO_DEVICES)
    single = read_metrics(whole("none"))
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    for name in PLACEMENTS:
        assert json.loads((tmp_path / name / "run.json").read_text())["devices"] == 2
        for expected, row in zip(single, read_metrics(tmp_path / name), strict=True):
            assert (expected["step"], expected["tokens"]) == (row["step"], row["tokens"])
            np.testing.assert_allclose(row["losses"], expected["losses"], rtol=2e-3, err_msg=name)
            np.testing.assert_allclose(row["gradient_norm"], expected["gradient_norm"], rtol=0.02, err_msg=name)


INTERRUPTED = [("disk", "logged:3"), ("disk", "during:2"), ("none", "interrupted:4"), ("none", "full:4")]
"""Features, and the step at which a run ends: after its metrics are logged, while its checkpoint is written, or with a
full disk."""

ENDED = """
import os, resource, signal, sys
from specjax.train import output
from specjax.train.__main__ import main
save, log = output.RunFolder.save, output.RunFolder.log
moment, _, step = sys.argv[1].partition(":")

def end():
    os.kill(os.getpid(), signal.SIGINT if moment == "interrupted" else signal.SIGKILL)
def patched_save(self, at, state):
    now = at == int(step)
    if moment == "during" and now:
        rename = os.rename
        def renamed(source, *others, **options):
            if "checkpoints" in str(source) and "tmp" in str(source):  # orbax's temporary folder is complete
                end()
            return rename(source, *others, **options)
        os.rename = renamed
    if moment == "full" and now:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    save(self, at, state)
def patched_log(self, row):
    log(self, row)
    if moment in ("logged", "interrupted") and row["step"] == int(step):
        end()
output.RunFolder.save, output.RunFolder.log = patched_save, patched_log
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def ended(model, data, tmp_path_factory) -> dict[tuple[str, str], SimpleNamespace]:
    def run(features: str, moment: str) -> SimpleNamespace:
        folder = tmp_path_factory.mktemp("ended") / "run"
        process = start([moment, *arguments(model, data, folder, features=features)], ENDED)
        out, err = process.communicate(timeout=400)
        return SimpleNamespace(output=folder, status=process.returncode, err=err, out=out)

    return {interrupted: run(*interrupted) for interrupted in INTERRUPTED}


@pytest.mark.process
@pytest.mark.parametrize(("features", "moment"), INTERRUPTED[:2])
def test_a_killed_run_resumes_bit_for_bit(train, whole, ended, features, moment):
    killed = ended[features, moment]
    assert killed.status == -signal.SIGKILL, killed.err
    assert not (killed.output / "head").exists()
    status, _, err = train(killed.output, features=features)
    assert status == 0, err
    assert ("Resuming" in err) == (moment != "during:2")
    check_same(whole(features), killed.output)
    head = "head/model.safetensors"
    assert (killed.output / head).read_bytes() == (whole(features) / head).read_bytes()


@pytest.mark.parametrize("count", [1, 60])
def test_curves_are_visible(tmp_path, count):
    """Each panel of the picture has coloured pixels, with few points or many."""
    from matplotlib.image import imread

    rows = [{"step": i, "tokens": 90 * i, "loss": 12 / i, "matched": [0.2, 0.1]} for i in range(1, count + 1)]
    rows += [{"step": count, "accept_length": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = imread(plot(tmp_path))[..., :3]
    coloured = np.ptp(picture[: len(picture) * 4 // 5], axis=-1) > 0.3
    assert [part.sum() > 20 for part in np.array_split(coloured, 3, axis=1)] == [True] * 3


@pytest.mark.process
def test_ctrl_c(train, whole, ended):
    interrupted = ended["none", "interrupted:4"]
    assert (interrupted.status, interrupted.out) == (130, ""), interrupted.err
    assert "interrupted; the same command resumes" in interrupted.err and "Traceback" not in interrupted.err
    status, summary, err = train(interrupted.output)
    assert (status, summary["step"]) == (0, 6)
    assert "Resuming" in err and "at step 5 of 6" in err, "the step after the signal, though every second one is saved"
    for expected, resumed in zip(arrays(whole("none")), arrays(interrupted.output), strict=True):
        np.testing.assert_array_equal(expected, resumed)


@pytest.mark.process
def test_a_full_disk(train, whole, ended):
    full = ended["none", "full:4"]
    assert (full.status, full.out) == (2, ""), full.err
    # Orbax's threads also write to stderr.
    _, name, message = full.err.partition("specjax train: ")
    message = message.partition("\n")[0]
    assert name and "the checkpoint of step 4 cannot be written" in message, full.err
    assert "the checkpoint of step 2 is whole" in message
    status, _, err = train(full.output)
    assert status == 0 and "at step 2 of 6" in err
    check_same(whole("none"), full.output)


def test_a_damaged_checkpoint(train, whole, copied):
    newest = copied / "checkpoints" / "6"
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    status, _, err = train()
    assert status == 2
    assert f"the checkpoint of step 6 in {copied / 'checkpoints'} cannot be read" in err
    shutil.rmtree(newest)
    assert train()[0] == 0
    check_same(whole("none"), copied)


def test_a_run_is_extended(train, copied):
    """Further steps use the next data, and the learning rates of a run of the new length."""
    before = lines(copied)
    status, summary, err = train(steps=9)
    assert (status, summary["step"], summary["steps"]) == (0, 9, 9), err
    assert "at step 6 of 9" in err
    after = lines(copied)
    assert after[: len(before)] == before and [row["step"] for row in after[len(before) :]] == [8, 9]
    assert after[-2]["tokens"] > before[-1]["tokens"], "tokens of all steps"
    assert "step 9" in (copied / "head" / "README.md").read_text()
    rate = run.schedule(OptimizerSettings(learning_rate=0.01, warmup_steps=2), 9)
    assert after[-2]["learning_rate"] == pytest.approx(float(rate(7)), rel=1e-5)
    status, summary, err = train(steps=8)
    assert (status, summary) == (2, None)
    assert "--steps 8 is less than the 9 steps that the run" in err


def test_settings_of_a_resumed_run(train, copied):
    before = content(copied)
    for changes, flag in (
        ({"learning_rate": 0.5}, "--learning-rate was 0.01 and is 0.5"),
        ({"held_back": 5}, "--held-back was 4 and is 5"),
        ({"aux_layers": ("2", "0", "1")}, "--aux-layers was"),
    ):
        status, summary, err = train(**changes)
        assert (status, summary) == (2, None)
        last = err.strip().splitlines()[-1]
        assert flag in last and "another --output to start a new run" in last
        assert content(copied) == before
    status, _, _ = train(checkpoint_every=1, log_every=1, license="mit")
    assert status == 0


def test_run_folders(train, tmp_path):
    """Locked for a process; settings may change before the first checkpoint; other folders are not used."""
    for steps in (77, 78):
        with RunFolder(tmp_path / "run", {"steps": steps}):
            assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"steps": steps}
            status, _, err = train()
            assert status == 2 and "is in use by another process" in err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("text")
    with pytest.raises(RunError, match="so it is no run; give another folder"):
        RunFolder(tmp_path / "other", {})
    assert content(tmp_path / "other") == {"mine.txt": b"text"}


BLOCK: dict[str, Any] = {
    "draft": "DFLASH", "rounds": None, "block_size": 4, "draft_layers": 1, "measure_steps": 3, "mask_token": 3
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"aux_layers": ("9",)}, "--aux-layers must be different layers"),
        ({"held_back": 24}, "--held-back 24 must be less than the 24 usable examples of --data"),
        ({"data": None}, "nothing to learn from: give --data or --text-data"),
        ({"data": "missing.jsonl"}, "missing.jsonl"),
        ({"init_from": "/no/such/head"}, "/no/such/head"),
        ({"output": "/proc/nowhere"}, "--output /proc/nowhere cannot be used"),
        ({"lines": '{"text": ""}\nnot json\n'}, "none of the 2 lines is usable.* line 1: text is empty"),
        ({"lines": "\n"}, "none of the 0 lines is usable"),
        ({"lines": '{"prompt": "the"}\n'}, "none of the 1 lines is usable.*line 1: .*`specjax train generate` writes"),
        ({"quantization": "int8"}, "--quantization int8 does not apply to training"),
        ({"batch_size": 3}, "--batch-size 3 cannot be spread over 2 devices"),
        (BLOCK | {"mask_token": None}, "--mask-token 265 is not one of the model's 265 ids"),
        (BLOCK | {"rounds": 2}, "--loss and --rounds are for --draft EAGLE, EAGLE3, MTP; DFLASH has its own loss"),
        ({"draft": "EAGLE", "fc_norm": ()}, "--fc-norm is for --draft EAGLE3, not EAGLE"),
        (BLOCK | {"norm_output": ()}, "--norm-output is for --draft EAGLE3, not DFLASH"),
        ({"block_size": 4}, r"the settings of \[block\] are for --draft DFLASH, DSPARK, DFLASH2, not EAGLE3"),
        (BLOCK | {"walk_rank": 4}, "--walk-rank is for --draft DSPARK and DFLASH2; DFLASH has no walk"),
        (BLOCK | {"measure_steps": 4}, "--measure-steps 4 is more than the 3 tokens that a block drafts"),
        (BLOCK | {"aux_layers": ("3",)}, "--aux-layers must be different layers from 0 to 2, got 3"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_before_weights_are_read(train, tmp_path, monkeypatch, changes, expected):
    monkeypatch.setattr(run.checkpoint, "load_params", lambda *_, **__: pytest.fail("weights are read"))
    if "batch_size" in changes:
        monkeypatch.setattr(run.jax, "local_device_count", lambda: 2)
    if "lines" in changes:  # of the data
        (tmp_path / "bad.jsonl").write_text(changes["lines"])
        changes = {"data": tmp_path / "bad.jsonl", "held_back": 0}
    status, summary, err = train(**changes)
    assert (status, summary) == (2, None)
    assert re.search(expected, err.strip().splitlines()[-1]), err
    assert not (tmp_path / "run").exists()


CONFIG = tiny_llama(vocab_size=VOCABULARY).target.config


def read(**settings: Any):
    return run.read_data(TrainOptions(data=DataSettings(row_length=64, **settings)), tokenizer(), CONFIG)


def test_text_skip_and_text_examples(tmp_path):
    """--text-skip leaves out exactly the examples that --text-examples would use."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"text {i} of these"}) + "\n" for i in range(40)))

    def used(**settings: Any) -> set[bytes]:
        rows, _, facts = read(text_data=(str(texts),), data_seed=3, **settings)
        examples = {
            tokens[segments == segment].tobytes()
            for tokens, segments in zip(rows.tokens, rows.segments, strict=True)
            for segment in range(1, segments.max() + 1)
        }
        assert facts["texts"] == facts["examples"] == len(examples)
        return examples

    everything, first, rest = used(), used(text_examples=15), used(text_skip=15)
    assert len(everything) == 40 and len(first) == 15 and first | rest == everything and not first & rest
    assert used(text_skip=15, text_examples=10) < rest
    with pytest.raises(ValueError, match="--text-skip 40 leaves none of the 40 examples of --text-data"):
        used(text_skip=40)
    with pytest.raises(ValueError, match="--held-back 4 must be less than the 0 usable examples of --data"):
        used(held_back=4)


def test_number_of_held_back_examples(tmp_path):
    def held_back(lines: int, chosen: int | None = None) -> int:
        file = tmp_path / "rows.jsonl"
        file.write_text('{"prompt_ids": [5], "response_ids": [6]}\n' * lines)
        _, examples, facts = read(data=(str(file),), held_back=chosen)
        assert facts["held_back"] == len(examples) and facts["examples"] == lines - len(examples)
        return len(examples)

    assert [held_back(lines) for lines in (1, 2, 10, 11, 150, 900)] == [0, 1, 1, 2, 15, 64]
    assert held_back(24, 6) == 6 and held_back(150, 64) == 64


def test_truncated_checkpoint_is_one_error(tmp_path, capfd, monkeypatch):
    """Several arrays of the checkpoint cannot be read."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # takes it back
    state = {f"a{i}": jax.random.normal(jax.random.key(i), (300, 400)) for i in range(12)}
    with RunFolder(tmp_path / "run", {}) as folder:
        folder.save(3, state)
    whole = (tmp_path / "run" / "checkpoints" / "3" / "default").rglob("*")
    largest = max((file for file in whole if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with (
        RunFolder(tmp_path / "run", {}) as folder,
        pytest.raises(RunError, match=r"step 3 .* cannot be read .*; remove its folder"),
    ):
        folder.restore(state)
    gc.collect()
    assert capfd.readouterr().err == ""
