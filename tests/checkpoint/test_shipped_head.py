"""What AUTO means: which models a head that comes with specjax is for, and the flags and trees that it drafts with.

The table is replaced by a row for a tiny model, with a head of random weights: the texts must be those of plain
decoding, whatever is chosen.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import VOCABULARY, byte_ids, tokenizer
from tiny_checkpoints import byte_level_metadata, save_llama, write_gguf
from tiny_heads import save_head

from specjax import checkpoint, load
from specjax.checkpoint import CheckpointError, shipped
from specjax.checkpoint.hub import resolve
from specjax.cli import flags, generate
from specjax.cli import serve as command
from specjax.drafters import Auto, Eagle, Eagle3, NoDraft, TreeShape
from specjax.drafters.table import options_of
from specjax.engine import Engine, EngineConfig, SamplingParams

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "vocab_size": VOCABULARY}
"""Seven layers are the fewest that have EAGLE-3's default auxiliary layers."""
LETTERS = byte_ids(b"aei")
"""What the head proposes."""
SERVING = """
[cpu]
steps = 2
topk = 3
nodes = 13
[gpu]
steps = 4
topk = 2
nodes = 9
"""
NOTE, SOURCE = "2 steps, top-k 3, 13 draft tokens (automatic)", "of-letters, which comes with specjax"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """`model` with a tokenizer, `sibling` of the same architecture and another training, and `heads/of-letters`."""
    root = tmp_path_factory.mktemp("shipped")
    for name, seed in (("model", 0), ("sibling", 1)):
        save_llama(root / name, **SIZES, initializer_range=0.3, eos_token_id=2, seed=seed)
        tokenizer().save_pretrained(root / name)
    save_head(
        root / "heads" / "of-letters", "eagle3", dtype="bfloat16", target_vocab_size=VOCABULARY,
        draft_vocab_size=len(LETTERS),
        tensors={"d2t": np.array(LETTERS) - np.arange(3), "t2d": np.isin(np.arange(VOCABULARY), LETTERS)},
    )  # fmt: skip
    (root / "heads" / "of-letters" / "serving.toml").write_text(SERVING)
    return root


@pytest.fixture
def row(made, monkeypatch) -> shipped.ShippedHead:
    """The only row of the table: the head is for `model`, by content; no folder has its name."""
    files = resolve(str(made / "model"))
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 7}
    found = shipped.ShippedHead("of-letters", "eagle3", "tiny-instruct", str(shipped.final_norm(files)), sizes)
    monkeypatch.setattr(shipped, "FOLDER", made / "heads")
    monkeypatch.setattr(shipped, "HEADS", (found,))
    return found


def loaded(model: str | Path, algorithm: str = "AUTO", **given: Any) -> load.LoadedModel:
    return load.load(str(model), draft=options_of(algorithm, **given), progress=False)


def head_of(model: str | Path) -> shipped.ShippedHead | None:
    files = resolve(str(model), progress=False)
    return shipped.shipped_head(files, checkpoint.model_config(files.config))


# Which model.


def test_a_folder_is_known_by_its_content(row, made, tmp_path):
    assert head_of(made / "model") == row
    shutil.copytree(made / "model", tmp_path / "elsewhere")
    assert head_of(tmp_path / "elsewhere") == row, "whatever it is called"
    assert head_of(made / "sibling") is None, "another training"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_content_is_the_same_in_every_precision(row, made, tmp_path, monkeypatch, dtype):
    """Trained in bfloat16, a norm is written to the bit by every format that can hold it."""
    for name, saved in (("source", "bfloat16"), ("other", dtype)):
        save_llama(tmp_path / name, **SIZES, dtype=saved)
    norm = shipped.final_norm(resolve(str(tmp_path / "source")))
    monkeypatch.setattr(shipped, "HEADS", (dataclasses.replace(row, norm=norm),))
    assert head_of(tmp_path / "source") and head_of(tmp_path / "other")


def test_a_gguf_is_known_by_its_content(row, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    sizes = SIZES | {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}  # Q8_0 has blocks of 32
    tensors = save_llama(tmp_path / "source", **sizes)
    write_gguf(tmp_path / "any.gguf", tensors, quantize=True, tokenizer=byte_level_metadata(300), **sizes)
    norm = str(shipped.final_norm(resolve(str(tmp_path / "source"))))
    monkeypatch.setattr(
        shipped, "HEADS", (dataclasses.replace(row, norm=norm, sizes={"hidden_size": 32, "vocab_size": 300}),)
    )
    assert head_of(tmp_path / "any.gguf") is not None, "of 8 bits, in a file of any name"
    assert head_of(tmp_path / "source") is not None


@pytest.mark.parametrize("name", ["Tiny-Instruct", "tiny-instruct"])
def test_a_model_is_known_by_its_name(row, made, tmp_path, name):
    shutil.copytree(made / "sibling", tmp_path / name)
    assert head_of(tmp_path / name) == row, "a fine-tune of that name: slower at worst"
    shutil.copytree(made / "sibling", tmp_path / f"{name}-2")
    assert head_of(tmp_path / f"{name}-2") is None


def test_a_hub_id_is_known_by_its_last_part(row, made, monkeypatch):
    files = dataclasses.replace(resolve(str(made / "sibling")), name="someone/Tiny-Instruct")
    config = checkpoint.model_config(files.config)
    assert shipped.shipped_head(files, config) == row
    assert shipped.shipped_head(dataclasses.replace(files, name="someone/else"), config) is None
    assert checkpoint.may_have_head("someone/Tiny-Instruct", "eagle3"), "judged without a download"
    assert not checkpoint.may_have_head("someone/else", "eagle3")
    assert not checkpoint.may_have_head("someone/Tiny-Instruct", "eagle")


def test_a_model_of_other_sizes_is_another_model(row, made, tmp_path, monkeypatch):
    """Tokens were added, for example: the head would not even load."""
    save_llama(tmp_path / "tiny-instruct", **SIZES | {"vocab_size": VOCABULARY + 8}, eos_token_id=2)
    tokenizer().save_pretrained(tmp_path / "tiny-instruct")
    assert head_of(tmp_path / "tiny-instruct") is None
    assert loaded(tmp_path / "tiny-instruct").drafter.name == "NGRAM"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", ""])
def test_a_head_that_is_not_there_ships_for_nothing(row, made, tmp_path, monkeypatch, missing):
    shutil.copytree(made / "heads", tmp_path / "heads")
    if missing:
        (tmp_path / "heads" / "of-letters" / missing).unlink()
    else:
        shutil.rmtree(tmp_path / "heads" / "of-letters")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "heads")
    assert head_of(made / "model") is None
    assert loaded(made / "model").drafter.name == "NGRAM"
    with pytest.raises(ValueError, match=r"^Eagle3.path is missing: EAGLE3 needs a draft head"):
        loaded(made / "model", "EAGLE3")


# What is chosen, with which flags.


@pytest.mark.parametrize("algorithm", ["AUTO", "auto", "EAGLE3", "eagle3"])
def test_the_head_drafts_unless_another_algorithm_is_asked_for(row, made, algorithm):
    found = loaded(made / "model", algorithm)
    assert found.drafter.name == "EAGLE3"
    assert (found.drafter.note, found.drafter.source) == (NOTE, SOURCE)
    assert not found.drafter.explicit_width, "batches that drafting would slow do without"
    np.testing.assert_array_equal(found.params.draft["ids"], LETTERS)
    assert loaded(made / "model", "NONE").drafter.name == "NONE"
    assert loaded(made / "model", "NGRAM").drafter.name == "NGRAM"


def test_without_a_head_auto_is_ngram(row, made, caplog):
    found = loaded(made / "sibling").drafter
    assert found.name == "NGRAM"
    assert not found.explicit_width, "batches that drafting would slow do without"
    assert not caplog.records
    given = loaded(made / "sibling", capacity=2048, nodes=5).drafter
    assert given.width == 5 and given.explicit_width
    with pytest.raises(ValueError, match=r"^Eagle3.path is missing: EAGLE3 needs a draft head"):
        loaded(made / "sibling", "EAGLE3")


def test_each_kind_has_its_head(row, made, tmp_path, monkeypatch):
    shutil.copytree(made / "heads", tmp_path / "heads")
    save_head(tmp_path / "heads" / "second", "eagle", format="safetensors", target_vocab_size=VOCABULARY)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "heads")
    monkeypatch.setattr(shipped, "HEADS", (row, dataclasses.replace(row, name="second", kind="eagle")))
    found = [loaded(made / "model", algorithm).drafter.source for algorithm in ("AUTO", "EAGLE3", "EAGLE")]
    assert [source.partition(",")[0] for source in found] == ["of-letters", "of-letters", "second"]
    with pytest.raises(ValueError, match=r"^Standalone.path is missing: STANDALONE needs a draft model"):
        loaded(made / "model", "STANDALONE")


def test_a_head_of_another_kind_does_not_ship_for_eagle(row, made):
    with pytest.raises(ValueError, match=r"^Eagle.path is missing: EAGLE needs a draft head"):
        loaded(made / "model", "EAGLE")


def test_a_head_that_is_named_comes_first(row, made, tmp_path):
    other = tmp_path / "other"
    save_head(other, "eagle3", target_vocab_size=VOCABULARY)
    found = loaded(made / "model", "EAGLE3", path=str(other))
    assert found.drafter.note == "5 steps, top-k 4, 8 draft tokens (automatic)", "not what was measured for ours"
    assert found.drafter.source == str(other)
    assert len(found.params.draft["ids"]) == 11
    with pytest.raises(TypeError, match="Auto has no option 'path'"):
        loaded(made / "model", "AUTO", path=str(other))


@pytest.mark.parametrize(
    ("given", "tree"),
    [
        ({"steps": 4}, (4, 1, 5)),
        ({"nodes": 3}, (2, 1, 3)),
        ({"topk": 2}, (2, 2, 5)),
        ({"steps": 3, "topk": 2, "nodes": 7}, (3, 2, 7)),
    ],
)
def test_numbers_of_a_tree_are_the_heads(row, made, given, tree, caplog):
    """Those that are not given follow the rules of any EAGLE tree; the automatic steps are the measured ones."""
    drafter = loaded(made / "model", **given).drafter
    assert drafter.note.startswith(f"{tree[0]} steps, top-k {tree[1]}, {tree[2]} draft tokens (")
    assert drafter.explicit_width
    assert not caplog.records


def test_flags_that_have_no_effect_are_named(row, made, caplog):
    loaded(made / "model", capacity=2048, steps=1)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        "no effect with EAGLE3, which AUTO chose: capacity",
    )
    caplog.clear()
    loaded(made / "sibling", capacity=2048, steps=1, token_map="64")
    (record,) = caplog.records
    assert record.getMessage().endswith("NGRAM, which AUTO chose: steps, token_map")


def test_a_value_that_what_was_chosen_cannot_work_with(row, made, monkeypatch):
    monkeypatch.setattr(checkpoint, "load_params", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"^Ngram.nodes must be an integer from 2 to 64, got 100"):
        loaded(made / "sibling", topk=8, nodes=100)


@pytest.mark.parametrize(("platform", "tree"), [("cpu", (2, 3, 13)), ("gpu", (4, 2, 9)), ("cuda", (4, 2, 9))])
def test_each_kind_of_device_has_its_tree(row, made, monkeypatch, platform, tree):
    files = resolve(str(made / "model"))
    config = checkpoint.model_config(files.config)
    monkeypatch.setattr("specjax.load.jax.default_backend", lambda: platform)
    assert load.choose(Auto(), files, config) == (Eagle3(str(row.folder)), TreeShape(*tree), row, None)


@pytest.mark.parametrize(
    ("text", "note"),
    [(None, "5 steps, top-k 4, 8 draft tokens"), ("[gpu]\nsteps = 1\n", "5 steps, top-k 4, 8 draft tokens")],
)
def test_a_device_that_was_not_measured_gets_the_tree_of_the_family(row, made, tmp_path, monkeypatch, text, note):
    (serving(made, tmp_path, monkeypatch)).unlink() if text is None else serving(made, tmp_path, monkeypatch, text)
    assert loaded(made / "model").drafter.note.startswith(note)


def serving(made: Path, folder: Path, monkeypatch, text: str = "") -> Path:
    """A copy of the head with another serving.toml."""
    shutil.copytree(made / "heads", folder / "heads")
    monkeypatch.setattr(shipped, "FOLDER", folder / "heads")
    (folder / "heads" / "of-letters" / "serving.toml").write_text(text)
    return folder / "heads" / "of-letters" / "serving.toml"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[cpu]\nsteps = 1\n", CheckpointError, "all three are needed"),
        (SERVING.replace("[gpu]", "speed = 1\n[gpu]"), CheckpointError, "serving.toml: .* argument 'speed'"),
        (SERVING.replace("[gpu]", "positions = 0\n[gpu]"), CheckpointError, "must be an integer of at least 1, got 0"),
        ("[tpu]\nsteps = 1\n", CheckpointError, "has tpu; it may hold the tables cpu, gpu"),
        ("steps = 1\n", CheckpointError, "it may hold the tables"),
        ("[cpu", CheckpointError, "cannot be read"),
    ],
)
def test_a_wrong_serving_file(row, made, tmp_path, monkeypatch, text, error, message):
    serving(made, tmp_path, monkeypatch, text)
    with pytest.raises(error, match=message):
        loaded(made / "model")


# As users meet it.


def test_the_command_says_what_auto_chose_and_the_text_is_the_models_own(row, made, tmp_path, capsys):
    lines = [{"prompt": "hello"}, {"prompt": "a", "logit_bias": {str(token): 60.0 for token in LETTERS}}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = {}
    for algorithm, name in (("AUTO", "EAGLE3"), ("NONE", "NONE")):
        argv = ["--model", made / "model", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
        argv += ["--speculative-algorithm", algorithm, "--max-total-tokens", 256, "--chunked-prefill-size", 16]
        argv += ["--max-running-requests", 1, "--max-new-tokens", 12, "--ignore-eos", "--no-progress"]
        argv += ["--no-speculative-adaptive"]
        assert generate.main([str(part) for part in argv]) == 0
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert summary["algorithm"] == name
        assert ("comes with specjax" in summary["draft"]) is (name == "EAGLE3")
        rows[name] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        # This tree holds every text of two of the letters that the head proposes, and the second line has no others.
        assert rows[name][1]["spec_verify_ct"] == (4 if name == "EAGLE3" else 11)
    for drafted, plain in zip(rows["EAGLE3"], rows["NONE"], strict=True):
        assert drafted["output_ids"] == plain["output_ids"]


def test_the_server_says_what_auto_chose(row, made, caplog):
    caplog.set_level(logging.INFO, logger="specjax")
    model, engine = flags.ModelSettings(str(made / "model")), flags.EngineSettings(max_total_tokens=128)
    command.load(flags.Settings(model, engine))
    (table,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Speculation:")]
    rows = ["algorithm  EAGLE3", f"tree       up to 13 tokens; {NOTE}", f"head       {SOURCE}", "drafts     in "]
    assert all(found.startswith(f"  {row}") for found, row in zip(table.splitlines()[1:], rows, strict=True)), table


def test_from_python(row, made):
    # The shapes of the command above, whose programs are there.
    config = EngineConfig(max_running_requests=1, max_total_tokens=256, chunked_prefill_size=16)
    engines = [
        Engine.from_pretrained(str(made / "model"), config=config, progress=False, **given)
        for given in ({}, {"draft": "NONE"})
    ]
    assert [engine.drafter.name for engine in engines] == ["EAGLE3", "NONE"]
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)
    drafted, plain = (engine.generate("hello", params) for engine in engines)
    assert drafted.output_ids == plain.output_ids


# What is in the package.


def test_the_table_describes_the_built_in_model():
    """In FORMATS.md's words: 30 layers of 576, 9 heads and 3 for keys and values, 49,152 tokens."""
    assert [head.kind for head in shipped.HEADS] == ["eagle3", "eagle"], "AUTO takes the first"
    head = shipped.HEADS[0]
    assert head.model == checkpoint.BUILT_IN_MODEL
    for name in (head.model, "HuggingFaceTB/SmolLM2-135M-Instruct", "models/SmolLM2-135M-Instruct"):
        assert head.is_named(name)
    for name in ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-135m-instruct.gguf"):
        assert not head.is_named(name)


@pytest.mark.real_model
def test_the_built_in_model_is_the_one_in_the_table():
    files = resolve(checkpoint.BUILT_IN_MODEL, progress=False)
    config = checkpoint.model_config(files.config)
    for head in shipped.HEADS:
        assert shipped.final_norm(files) == head.norm
        assert {name: getattr(config, name) for name in head.sizes} == dict(head.sizes)


@pytest.mark.parametrize("head", shipped.HEADS, ids=lambda head: head.name)
def test_what_ships_is_whole(head):
    """Small enough for a wheel, with a tree for each kind of device."""
    assert head.exists and (head.folder / "README.md").is_file()
    assert sum(file.stat().st_size for file in head.folder.iterdir()) <= 40e6
    assert set(tomllib.loads((head.folder / "serving.toml").read_text())) == set(shipped.DEVICES)
    for device in shipped.DEVICES:
        measured = {"eagle3": Eagle3, "eagle": Eagle}[head.kind](**head.serving(device))
        assert measured.shape(TreeShape(1, 1, 2)) == TreeShape(measured.steps, measured.topk, measured.nodes)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "draft", ["AUTO", pytest.param(Eagle3(steps=3, topk=1, nodes=4), id="chain", marks=pytest.mark.slow)]
)
def test_the_shipped_head_drafts_for_the_built_in_model_and_changes_nothing(draft, trim):
    """Prompts of nobody's evaluation. A head that learnt nothing, or reads features in another order than it was
    trained with, is accepted once in a hundred drafts; a broken depth shows as a chain that is hardly ever longer."""
    prompts = [
        [{"role": "user", "content": text}]
        for text in (
            "How do I boil an egg?",
            "Write a short letter to my landlord about a broken window.",
            "Why do cats purr?",
        )
    ]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)

    def run(draft, name):
        engine = Engine.from_pretrained(draft=draft, progress=False)
        assert engine.drafter.name == name
        # One at a time: on a CPU the automatic tree is not for several requests.
        done = [engine.generate(prompt, sampling) for prompt in prompts]
        del engine
        trim()  # before the next model is loaded
        return done

    done, plain = run(draft, "EAGLE3"), run("NONE", "NONE")
    emitted = sum(len(completion.output_ids) - 1 for completion in done)
    assert emitted / sum(completion.spec_verify_ct for completion in done) > 1.4
    assert [completion.output_ids for completion in done] == [completion.output_ids for completion in plain]


@pytest.mark.real_model
def test_the_shipped_eagle_head_drafts_with_and_without_a_token_map(trim):
    """The head after its last step had 0.36 of its first drafts accepted on prompts that it had not seen."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    texts = {}
    for draft in (NoDraft(), Eagle(), Eagle(token_map="8192")):
        engine = Engine.from_pretrained(draft=draft, progress=False, config=EngineConfig(max_running_requests=1))
        done = engine.generate([{"role": "user", "content": "Why do cats purr?"}], sampling)
        texts[str(draft)] = done.output_ids
        if draft.needs:
            assert engine.drafter.source.startswith("smollm2-135m-instruct-eagle2, ")
            assert (len(done.output_ids) - 1) / done.spec_verify_ct > 1.2
        del engine
        trim()
    assert len({tuple(ids) for ids in texts.values()}) == 1
