"""STANDALONE drafts that are trained: layers and vocabulary of their own, the loss, runs, and what is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import MERGES, SPECIAL, VOCABULARY, tokenizer
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models
from toy_models import tiny_llama
from train_helpers import arguments, draft_source, save_data, save_model
from transformers import PreTrainedTokenizerFast

from specjax import Engine, EngineConfig, SamplingParams, checkpoint
from specjax.checkpoint import VocabularyMap
from specjax.drafters import NoDraft, Standalone
from specjax.train.__main__ import main
from specjax.train.checkpoints import read_metrics
from specjax.train.data import Example, Rows, pack
from specjax.train.features import teach, training_target
from specjax.train.options import DraftSettings, LossSettings, RunSettings, TrainOptions
from specjax.train.pruning import pruned_tokenizer
from specjax.train.student import StudentDraft, kept_layers, with_layers

BYTES = VOCABULARY - len(MERGES)  # special tokens and single characters: the least that a vocabulary has


# Which layers, which tokens.


@pytest.mark.parametrize(
    ("given", "layers", "wanted"),
    [
        (("first:3",), 30, (0, 1, 2)),
        (("spaced:4",), 30, (0, 10, 19, 29)),
        (("spaced:1",), 30, (0,)),
        (("spaced:2",), 2, (0, 1)),
        (("0", "1", "29"), 30, (0, 1, 29)),
    ],
)
def test_layers_that_are_kept(given, layers, wanted):
    assert kept_layers(given, layers) == wanted


@pytest.mark.parametrize("given", ["first:5", "first:0", "last:2", "first:x", "4", "1 0", "1 1", "first:1 2", "-1"])
def test_layers_that_cannot_be_kept(given):
    with pytest.raises(ValueError, match=r"--keep-layers must be first:K.*got " + given):
        kept_layers(given.split(), 4)


def test_windows_and_experts_move_with_their_layers():
    config = replace(tiny_llama(num_layers=4).target.config, windows=(3, None, 5, None))
    assert with_layers(config, (1, 2)).windows == (None, 5)
    assert with_layers(config, (1, 3)).windows == ()


def test_a_pruned_tokenizer():
    """MERGES are he, ll, hell, 12, " t", " the". With two more tokens than bytes hell, which needs he and ll, has no
    room, though it is the most frequent; with three it has, and takes them all."""
    given = tokenizer()
    counts = np.zeros(VOCABULARY, np.int64)
    counts[BYTES:] = [3, 0, 9, 2, 1, 0]
    for more, wanted in ((0, set()), (2, {"he", "12"}), (3, {"he", "ll", "hell"}), (6, {a + b for a, b in MERGES})):
        small = pruned_tokenizer(given, counts, BYTES + more)
        vocabulary = small.get_vocab()
        assert sorted(vocabulary.values()) == list(range(BYTES + more))
        assert {name for name in vocabulary if len(name) > 1} - {*SPECIAL} == wanted
        assert all(vocabulary[name] == given.get_vocab()[name] for name in SPECIAL)
        text = "<|im_start|>hello there 12 é<|im_end|>"
        ids = small(text).input_ids
        assert small.decode(ids) == given.decode(given(text).input_ids) == text
        found = checkpoint.match_vocabularies(given, small, VOCABULARY, BYTES + more, intersection=True)
        names = given.convert_ids_to_tokens(list(range(VOCABULARY)))
        if found.ids is not None:
            assert small.convert_ids_to_tokens(list(range(BYTES + more))) == [names[i] for i in found.ids]
    assert (small.eos_token, small.chat_template) == (given.eos_token, given.chat_template)


def test_tokenizers_that_cannot_be_pruned():
    with pytest.raises(ValueError, match=f"--draft-vocab-size {BYTES - 1} has no room for the {BYTES} special tokens"):
        pruned_tokenizer(tokenizer(), np.zeros(VOCABULARY, np.int64), BYTES - 1)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="needs a target with a BPE tokenizer; this one is WordLevel"):
        pruned_tokenizer(words, np.zeros(1, np.int64), 1)


# The loss.


@pytest.mark.parametrize("trainable", ["all", "output"])
def test_the_loss_is_the_oracles(trainable):
    """Cross-entropy with the target's distribution over the draft's tokens, at every token with a loss whose likeliest
    successor the draft has; several examples a row, each computed alone."""
    toy, kept = tiny_llama(3, num_layers=3), (0, 2)
    settings = DraftSettings(draft="STANDALONE", keep_layers=tuple(map(str, kept)), trainable=trainable)
    options = TrainOptions(
        draft=settings, run=RunSettings(compute_dtype="float32"), loss=LossSettings(teacher_temperature=2.0)
    )
    draft = StudentDraft(options, draft_source(toy, tokenizer()))
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(31, 20, replace=False)).astype(np.int32)
    reads = rng.integers(0, 20, 31).astype(np.int32)
    reads[ids] = np.arange(20)
    draft._vocabulary, draft.config = VocabularyMap(ids, reads, 20), replace(draft.config, vocab_size=20)
    examples = [Example(rng.integers(0, 31, n).astype(np.int32), rng.random(n) < 0.7) for n in (5, 9, 12, 7)]
    rows = pack(examples, 16, 0)
    batch = Rows(*map(jnp.asarray, rows))
    weights, frozen = draft.split(draft.first_params(toy.params), lambda: pytest.fail("features are not needed"))
    assert (set(weights) == {"final_norm", "head"}) == (trainable == "output") and frozen == {}
    target = training_target(toy.target.config, "float32")
    teacher = jax.jit(teach(target, "final"))(toy.params, batch)
    total, sums = draft.loss(target)(weights, toy.params, batch, teacher, jax.random.key(0))

    ours = jax.tree.map(np.asarray, draft.served(draft.exported(weights, frozen)).model)
    theirs = jax.tree.map(np.asarray, toy.params)
    assert {name.split("/")[0] for name in flatten_dict(ours, sep="/")} >= {"embed", "layers_0", "layers_1", "head"}
    np.testing.assert_array_equal(ours["layers_1"]["down"], theirs["layers_2"]["down"])
    wanted = matched = counted = slots = 0
    for example in examples:
        tokens = example.tokens.tolist()
        teaching = oracle.llama_logits(theirs, toy.target.config, tokens)
        found = oracle.llama_logits(ours, draft.config, [int(reads[t]) for t in tokens])
        for t in range(len(tokens) - 1):
            if not example.loss[t + 1]:
                continue
            best = int(np.argmax(teaching[t]))
            slots += 1
            matched += int(ids[np.argmax(found[t])]) == best
            if best in ids:
                counted += 1
                wanted -= float(oracle.softmax(teaching[t][ids] / 2) @ np.log(oracle.softmax(found[t])))
    assert float(total) == pytest.approx(wanted, rel=1e-4)
    assert [float(part[0]) for part in sums[1:]] == [matched, counted, slots] and 0 < counted < slots


# Runs.


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    # Weights large enough for a distribution that is far from uniform.
    return save_model(tmp_path_factory.mktemp("target") / "model", tie_word_embeddings=True, initializer_range=0.2)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return save_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture
def train(model, data, tmp_path, capfd):
    """train(**flags) -> status, the summary, stderr; in `output`, by default run/."""

    def call(output: str = "run", **changes: Any):
        capfd.readouterr()
        given = {"draft": "STANDALONE", "rounds": None, "steps": 10, "log_every": 1} | changes
        status = main(arguments(model, data, tmp_path / output, **given))
        printed = capfd.readouterr()
        return status, json.loads(printed.out.splitlines()[-1]) if printed.out else None, printed.err

    return call


KINDS: dict[str, dict[str, Any]] = {
    "student": {"keep_layers": ("0", "3"), "draft_vocab_size": BYTES + 3},
    "self-speculation": {"keep_layers": "first:2", "trainable": "output", "regression_weight": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_lower_the_loss_and_the_folder_drafts(train, model, tmp_path, kind):
    measure = {"measure_prompts": 1, "measure_tokens": 6, "measure_steps": 2, "measure_every": 0}
    status, summary, err = train(**KINDS[kind], **measure, export_dtype="float32")
    assert status == 0, err
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert len(losses) == 10 and np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.08
    assert 1 <= summary["accept_length"] <= 3
    head = Path(summary["head"])
    described = json.loads((head / "config.json").read_text())
    assert (described["num_hidden_layers"], described["architectures"]) == (2, ["LlamaForCausalLM"])
    assert "final norm" in (head / "README.md").read_text() if kind != "student" else "head" not in described

    vocabulary = "intersection" if "draft_vocab_size" in KINDS[kind] else "same"
    drafted = Standalone(str(head), steps=2, topk=2, nodes=4, vocabulary=vocabulary)
    config = EngineConfig(max_running_requests=1, max_total_tokens=128, context_length=64, chunked_prefill_size=16)
    engines = [Engine.from_pretrained(str(model), draft=draft, config=config) for draft in (NoDraft(), drafted)]
    wanted = SamplingParams(max_new_tokens=12, temperature=0.0)
    texts = [[one.output_ids for one in each.generate(["the hello", "12 end cat"], wanted)] for each in engines]
    assert texts[0] == texts[1]

    tensors, original = load_file(head / "model.safetensors"), load_file(model / "model.safetensors")
    last = 3 if kind == "student" else 1
    same = {
        name: np.array_equal(tensor, original[name.replace("layers.1.", f"layers.{last}.")])
        for name, tensor in tensors.items()
        if ".layers." in name
    }
    assert len(same) == 18 and set(same.values()) == {kind != "student"}, "the layers are trained, or the target's"


def test_a_stopped_run_goes_on_bit_for_bit(train, tmp_path):
    """A run that is stopped after each step is the one that is not, to the last bit."""
    given = {"keep_layers": "spaced:2", "steps": 3, "features": "memory"}
    assert train("whole", **given)[0] == 0
    for step in (1, 2, 3):
        status, summary, err = train("parts", **given, stop_after=1e-9)
        assert (status, summary["step"]) == (0, step), err
    one, two = (
        [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in read_metrics(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert one == two
    weights = [(tmp_path / name / "head" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    status, _, err = train("parts", **given | {"keep_layers": "first:2"})
    assert status == 2 and "--keep-layers was ['spaced:2'] and is ['first:2']" in err


def test_a_draft_of_all_layers_is_always_right(train, model, tmp_path):
    """Nothing is learnt: what is exported, read and mapped must be the target. From its folder training goes on."""
    whole = {"keep_layers": "first:4", "steps": 1, "learning_rate": 1e-12, "export_dtype": "float32"}
    measure = {"measure_prompts": 1, "measure_tokens": 13, "measure_steps": 2}
    status, summary, err = train(**whole, **measure)
    assert (status, summary["accept_length"], summary["by_depth"]) == (0, 3.0, [1.0, 1.0]), err
    again = {"keep_layers": None, "init_from": summary["head"]}
    status, summary, err = train("again", **whole | again, **measure)
    assert (status, summary["by_depth"]) == (0, [1.0, 1.0]), err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"keep_layers": "first:5"}, "--keep-layers must be first:K"),
        ({"draft_vocab_size": 9999}, f"--draft-vocab-size 9999 is more than the target's {VOCABULARY}"),
        ({"draft_vocab_size": 40}, "--draft-vocab-size 40 has no room"),
        ({"rounds": 2}, "--rounds: not for --draft STANDALONE, which reads tokens alone, in one round"),
        ({"aux_layers": ("0", "1", "2"), "feature_noise": 0.1}, "--aux-layers, --feature-noise: not for"),
        ({"trainable": "output", "init_from": "/x"}, "begins with the target's own layers; leave out --init-from"),
        ({"keep_layers": "first:2", "init_from": "/x"}, "--keep-layers is that of --init-from /x; leave it out"),
        ({"init_from": "/no/such/model"}, "/no/such/model"),
        ({"draft": "EAGLE3", "keep_layers": "first:2"}, "--keep-layers is for --draft STANDALONE"),
        ({"draft": "EAGLE3", "trainable": "output"}, "--trainable output is for --draft STANDALONE"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_before_the_weights_are_read(train, tmp_path, monkeypatch, changes, expected):
    def read(*_: object, **__: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(checkpoint, "load_params", read)
    status, summary, err = train(**changes)
    assert (status, summary) == (2, None)
    assert expected in err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()
