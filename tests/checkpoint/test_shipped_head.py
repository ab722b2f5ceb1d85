"""Shipped draft heads: the models that they match, and the options and trees that AUTO chooses.

The table of heads is replaced by a row for a tiny model, with a head of random weights.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import VOCABULARY, byte_ids, tokenizer
from tiny_checkpoints import byte_level_metadata, save_llama, write_gguf
from tiny_heads import save_head

from specjax import checkpoint, load
from specjax.checkpoint import shipped
from specjax.checkpoint.hub import resolve
from specjax.config import ModelConfig, RopeConfig
from specjax.drafters import Auto, Eagle, Eagle3, Ngram, TreeShape, options_of
from specjax.engine import Engine, EngineConfig, SamplingParams

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "vocab_size": VOCABULARY}
"""EAGLE-3's default auxiliary layers need seven layers."""
LETTERS = byte_ids(b"aei")
"""The tokens that the head proposes."""
SERVING = "[cpu]\nsteps = 2\ntopk = 3\nnodes = 13\n[gpu]\nsteps = 4\ntopk = 2\nnodes = 9\n"
NOTE, SOURCE = "2 steps, top-k 3, 13 draft tokens (automatic)", "of-letters, which comes with specjax"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """`model` with a tokenizer, `sibling` with other weights, and `heads/of-letters`."""
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
def row(saved, monkeypatch) -> shipped.ShippedHead:
    """The only row of the table, which matches `model` by its norm."""
    norm, sizes = str(shipped.final_norm(resolve(str(saved / "model")))), {"vocab_size": VOCABULARY, "num_layers": 7}
    head = shipped.ShippedHead("of-letters", "eagle3", "tiny-instruct", norm, sizes)
    monkeypatch.setattr(shipped, "FOLDER", saved / "heads")
    monkeypatch.setattr(shipped, "HEADS", (head,))
    return head


@pytest.fixture
def heads(saved, tmp_path, monkeypatch) -> Path:
    """A copy of the heads' folder, to be changed."""
    shutil.copytree(saved / "heads", tmp_path / "heads")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "heads")
    return tmp_path / "heads"


def loaded(model: str | Path, algorithm: str = "AUTO", **options: Any) -> load.LoadedModel:
    return load.load(str(model), draft=options_of(algorithm, **options), progress=False)


def head_of(model: str | Path) -> shipped.ShippedHead | None:
    files = resolve(str(model), progress=False)
    return shipped.shipped_head(files, checkpoint.model_config(files.config))


# The models that a head matches.


def test_match_by_final_norm(row, saved, tmp_path, monkeypatch):
    """A norm trained in bfloat16 is equal in every precision and format, and in any folder."""
    shutil.copytree(saved / "model", tmp_path / "elsewhere")
    assert head_of(saved / "model") == row == head_of(tmp_path / "elsewhere")
    assert head_of(saved / "sibling") is None
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    sizes = SIZES | {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}  # Q8_0 has blocks of 32
    for name in ("bfloat16", "float32"):
        tensors = save_llama(tmp_path / name, **sizes, dtype=name)
    write_gguf(tmp_path / "any.gguf", tensors, quantize=True, tokenizer=byte_level_metadata(300), **sizes)
    norm = str(shipped.final_norm(resolve(str(tmp_path / "bfloat16"))))
    other = dataclasses.replace(row, norm=norm, sizes={"hidden_size": 32, "vocab_size": 300})
    monkeypatch.setattr(shipped, "HEADS", (other,))
    for name in ("bfloat16", "float32", "any.gguf"):
        assert head_of(tmp_path / name) == other, name


def test_match_by_name(row, saved, tmp_path):
    for name in ("Tiny-Instruct", "tiny-instruct"):
        shutil.copytree(saved / "sibling", tmp_path / name, dirs_exist_ok=True)
        assert head_of(tmp_path / name) == row
    shutil.copytree(saved / "sibling", tmp_path / "tiny-instruct-2")
    assert head_of(tmp_path / "tiny-instruct-2") is None
    files = dataclasses.replace(resolve(str(saved / "sibling")), name="someone/Tiny-Instruct")
    config = checkpoint.model_config(files.config)
    assert shipped.shipped_head(files, config) == row
    assert shipped.shipped_head(dataclasses.replace(files, name="someone/else"), config) is None
    assert checkpoint.may_have_head("someone/Tiny-Instruct", "eagle3")
    assert not checkpoint.may_have_head("someone/else", "eagle3")
    assert not checkpoint.may_have_head("someone/Tiny-Instruct", "eagle")


def test_no_match_of_other_sizes(row, tmp_path):
    save_llama(tmp_path / "tiny-instruct", **SIZES | {"vocab_size": VOCABULARY + 8}, eos_token_id=2)
    tokenizer().save_pretrained(tmp_path / "tiny-instruct")
    assert head_of(tmp_path / "tiny-instruct") is None
    assert loaded(tmp_path / "tiny-instruct").drafter.name == "NGRAM"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", ""])
def test_absent_head(row, saved, heads, missing):
    if missing:
        (heads / "of-letters" / missing).unlink()
    else:
        shutil.rmtree(heads / "of-letters")
    assert head_of(saved / "model") is None
    assert loaded(saved / "model").drafter.name == "NGRAM"
    with pytest.raises(ValueError, match=r"^Eagle3.path is missing: EAGLE3 needs a draft head"):
        loaded(saved / "model", "EAGLE3")


# The algorithm and its options.


@pytest.mark.parametrize("algorithm", ["auto", "EAGLE3"])
def test_shipped_head_drafts_by_default(row, saved, algorithm):
    model = loaded(saved / "model", algorithm)
    note, *before = model.speculation.note.split("; n-grams first")
    assert (model.drafter.name, note, model.speculation.source) == ("EAGLE3", NOTE, SOURCE)
    on_cpu = jax.default_backend() == "cpu"
    assert bool(before) == (algorithm == "auto" and on_cpu), "n-grams draft before the head where it is AUTO's"
    assert not model.speculation.explicit_width
    np.testing.assert_array_equal(model.params.draft["ids"], LETTERS)
    assert loaded(saved / "model", "NONE").drafter.name == "NONE"
    assert loaded(saved / "model", "NGRAM").drafter.name == "NGRAM"
    with pytest.raises(ValueError, match=r"^Eagle.path is missing: EAGLE needs a draft head"):
        loaded(saved / "model", "EAGLE")


def test_auto_without_a_head_is_ngram(row, saved, caplog):
    model = loaded(saved / "sibling")
    assert model.drafter.name == "NGRAM" and not model.speculation.explicit_width
    assert not caplog.records
    model = loaded(saved / "sibling", capacity=2048, nodes=5)
    assert model.drafter.width == 5 and model.speculation.explicit_width
    with pytest.raises(ValueError, match=r"^Eagle3.path is missing: EAGLE3 needs a draft head"):
        loaded(saved / "sibling", "EAGLE3")


def test_each_kind_has_its_head(row, saved, heads, monkeypatch):
    save_head(heads / "second", "eagle", format="safetensors", target_vocab_size=VOCABULARY)
    (heads / "second" / "serving.toml").write_text(SERVING)
    monkeypatch.setattr(shipped, "HEADS", (row, dataclasses.replace(row, name="second", kind="eagle")))
    sources = [loaded(saved / "model", algorithm).speculation.source for algorithm in ("AUTO", "EAGLE3", "EAGLE")]
    assert [source.partition(",")[0] for source in sources] == ["of-letters", "of-letters", "second"]
    with pytest.raises(ValueError, match=r"^Standalone.path is missing: STANDALONE needs a draft model"):
        loaded(saved / "model", "STANDALONE")


def test_explicit_path_overrides_the_shipped_head(row, saved, tmp_path):
    other = tmp_path / "other"
    save_head(other, "eagle3", target_vocab_size=VOCABULARY)
    model = loaded(saved / "model", "EAGLE3", path=str(other))
    assert model.speculation.note == "5 steps, top-k 4, 8 draft tokens (automatic)"
    assert model.speculation.source == str(other) and len(model.params.draft["ids"]) == 11
    with pytest.raises(TypeError, match="Auto has no option 'path'"):
        loaded(saved / "model", "AUTO", path=str(other))


@pytest.mark.parametrize(
    ("options", "tree"),
    [
        ({"steps": 4}, (4, 1, 5)),
        ({"topk": 2}, (2, 2, 5)),
        ({"steps": 3, "topk": 2, "nodes": 7}, (3, 2, 7)),
    ],
)
def test_explicit_numbers_of_the_tree(row, saved, options, tree, caplog):
    """Absent numbers follow the rules of any EAGLE tree, except steps, which are the measured ones."""
    caplog.set_level(logging.WARNING)  # another test may have lowered it
    speculation = loaded(saved / "model", **options).speculation
    assert speculation.note.startswith(f"{tree[0]} steps, top-k {tree[1]}, {tree[2]} draft tokens (")
    assert speculation.explicit_width and not caplog.records


def test_options_without_effect_are_logged(row, saved, caplog):
    caplog.set_level(logging.WARNING)  # another test may have lowered it
    loaded(saved / "model", capacity=2048, steps=1)
    loaded(saved / "sibling", capacity=2048, steps=1, token_map="64")
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "no effect with EAGLE3, which AUTO chose: capacity"),
        (logging.WARNING, "no effect with NGRAM, which AUTO chose: steps, token_map"),
    ]


def test_values_outside_the_chosen_algorithms_range(row, saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "load_params", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"^Ngram.nodes must be an integer from 2 to 64, got 100"):
        loaded(saved / "sibling", topk=8, nodes=100)


@pytest.mark.parametrize(("platform", "tree"), [("cpu", (2, 3, 13)), ("gpu", (4, 2, 9)), ("cuda", (4, 2, 9))])
def test_measured_tree_of_the_platform(row, saved, monkeypatch, platform, tree):
    files = resolve(str(saved / "model"))
    monkeypatch.setattr("specjax.load.jax.default_backend", lambda: platform)
    chosen = load.choose(Auto(), files, checkpoint.model_config(files.config))
    ngrams = Ngram(min_match=4) if platform == "cpu" else None
    assert chosen == (Eagle3(str(row.folder)), TreeShape(*tree), row, None, ngrams)


# The heads in the package.


def test_table_names_the_built_in_model():
    assert [head.kind for head in shipped.HEADS] == ["eagle3", "eagle"], "AUTO takes the first"
    head = shipped.HEADS[0]
    assert head.model == checkpoint.BUILT_IN_MODEL
    for name in (head.model, "HuggingFaceTB/SmolLM2-135M-Instruct", "models/SmolLM2-135M-Instruct"):
        assert head.is_named(name)
    for name in ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-135m-instruct.gguf"):
        assert not head.is_named(name)


@pytest.mark.real_model
def test_table_matches_the_built_in_model():
    files = resolve(checkpoint.BUILT_IN_MODEL, progress=False)
    config = checkpoint.model_config(files.config)
    for head in shipped.HEADS:
        assert shipped.final_norm(files) == head.norm
        assert {name: getattr(config, name) for name in head.sizes} == dict(head.sizes)


@pytest.mark.parametrize("head", shipped.HEADS, ids=lambda head: head.name)
def test_shipped_files(head):
    assert head.exists and (head.folder / "README.md").is_file()
    assert sum(file.stat().st_size for file in head.folder.iterdir()) <= 40e6
    assert set(tomllib.loads((head.folder / "serving.toml").read_text())) == set(shipped.DEVICES)
    for device in shipped.DEVICES:
        tree = TreeShape(**head.serving(device))
        options = {"eagle3": Eagle3, "eagle": Eagle}[head.kind](steps=tree.steps, topk=tree.topk, nodes=tree.nodes)
        assert options.shape() == tree
    others: Any = {"norm_epsilon": 1e-5, "rope": RopeConfig(1e5), "max_positions": 8192, "tied_embeddings": True}
    target = ModelConfig("llama", **head.sizes | others)
    config, _ = checkpoint.load_head(str(head.folder), target, kind=head.kind, progress=False)
    assert config.aux_layers == {"eagle3": (1, 14, 26), "eagle": ()}[head.kind]


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("draft", "least"),
    [("AUTO", 1.4), (Eagle(), 1.2), (Eagle(token_map="8192"), 1.2)],
    ids=["EAGLE3", "EAGLE", "EAGLE with a token map"],
)
def test_drafts_of_shipped_heads(trim, draft, least):
    """Tokens a step. A head with untrained weights, or with features in another order, has 1 % of its drafts accepted;
    the EAGLE head has 0.36 of its first drafts accepted on unseen prompts."""
    config = EngineConfig(max_running_requests=1, adaptive=False)
    engine = Engine.from_pretrained(draft=draft, progress=False, config=config)
    name = "smollm2-135m-instruct-eagle3, " if draft == "AUTO" else "smollm2-135m-instruct-eagle2, "
    assert engine.speculation.source.startswith(name)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    texts = ("How do I boil an egg?", "Why do cats purr?")
    done = [engine.generate([{"role": "user", "content": text}], sampling) for text in texts]
    del engine
    trim()  # before the next model is loaded
    tokens = sum(len(completion.output_ids) - 1 for completion in done)
    assert tokens / sum(completion.spec_verify_ct for completion in done) > least
