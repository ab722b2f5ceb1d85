"""Flags and keys of the trainer; configuration, vocabulary, first weights and loss weights of a head."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_heads import save_head
from toy_models import tiny_llama

from specjax import settings
from specjax.checkpoint import CheckpointError
from specjax.train import head
from specjax.train.data import Example, pack
from specjax.train.export import export_head, head_tensors
from specjax.train.options import RESUMABLE, DraftSettings, LossSettings, TrainOptions


def read(*flags: str) -> TrainOptions:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, TrainOptions())
    return settings.read(parser.parse_args(list(flags)), TrainOptions())


def every_field():
    for table in fields(TrainOptions()):
        for each in fields(getattr(TrainOptions(), table.name)):
            yield table.name, each


@pytest.mark.parametrize(("table", "field"), list(every_field()), ids=lambda each: getattr(each, "name", each))
def test_every_field_is_a_flag_and_a_key(tmp_path, table, field):
    note, key = field.metadata["setting"], field.name.replace("_", "-")
    annotation = str(field.type)
    if note.choices:
        given = next(each for each in note.choices if each != field.default)
    else:
        texts = {"tuple": "3", "int": "9", "float": "0.25", "str": "x"}
        given = next(text for kind, text in texts.items() if kind in annotation)
    by_flag = getattr(getattr(read(f"--{key}", given), table), field.name)
    assert by_flag != field.default
    quoted = f'["{given}"]' if "tuple" in annotation else f'"{given}"' if "str" in annotation else given
    (tmp_path / "a.toml").write_text(f"[{table}]\n{key} = {quoted}\n")
    by_key = getattr(getattr(read("--config", str(tmp_path / "a.toml")), table), field.name)
    assert by_key == by_flag


def test_settings_that_may_change_exist():
    assert {field.name for _, field in every_field()} >= RESUMABLE


# The head.


def config(**changes):
    return replace(tiny_llama(3).target.config, num_layers=8, **changes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (DraftSettings(draft="EAGLE", draft_vocab_size=4), "--draft-vocab-size is for --draft EAGLE3"),
        (DraftSettings(draft="MTP", aux_layers=("1",)), "--aux-layers is for --draft EAGLE3"),
        (DraftSettings(draft_vocab_size=32), "--draft-vocab-size 32 is more than the target's 31"),
        (DraftSettings(draft_vocab_size=1), "--draft-vocab-size 1 has no room for the model's 2 end tokens"),
        (DraftSettings(aux_layers=("8",)), "--aux-layers must be different layers from 0 to 7, got 8"),
        (DraftSettings(aux_layers=("1", "1")), "--aux-layers must be different layers from 0 to 7, got 1 1"),
        (DraftSettings(aux_layers=("x",)), "--aux-layers must be different layers from 0 to 7, got x"),
    ],
)
def test_a_head_that_does_not_fit(given, expected):
    with pytest.raises(ValueError, match=expected):
        head.head_config(given, config(), (2, 5))


def test_heads_that_fit():
    assert head.head_config(DraftSettings(), config(), (2,)).aux_layers == (1, 3, 4)
    found = head.head_config(DraftSettings(aux_layers=("7", "0"), draft_vocab_size=2), config(), (2, 5))
    assert (found.aux_layers, found.feature_size, found.vocab_size, found.mapped) == ((7, 0), 32, 2, True)
    assert not head.head_config(DraftSettings(draft_vocab_size=31), config()).mapped
    assert head.head_config(DraftSettings(), replace(config(), num_layers=4)).aux_layers == (0, 1, 3)
    with pytest.raises(
        ValueError, match="the target has 2 layers, and --aux-layers are three by default; give --aux-layers"
    ):
        head.head_config(DraftSettings(), replace(config(), num_layers=2))


@pytest.mark.parametrize("size", [1, 2, 5, 9, 30])
def test_the_vocabulary_is_the_most_frequent_under_the_mask(size):
    rng = np.random.default_rng(size)
    examples = []
    for _ in range(20):
        tokens = np.minimum(rng.geometric(0.15, 30), 29).astype(np.int32)
        examples.append(Example(tokens, rng.random(30) < 0.3))
    rows = pack(examples, 64, 0)
    counted: Counter[int] = Counter()
    for example in examples:
        counted.update(example.tokens[example.loss].tolist())
    end = 30  # never seen
    ranked = [token for token in sorted(range(31), key=lambda t: (-counted[t], t)) if token != end]
    ids = head.draft_ids(rows, size, 31, (end,))
    assert ids.tolist() == sorted([*ranked[: size - 1], end])
    share = sum(counted[token] for token in ids.tolist()) / counted.total()
    assert head.coverage(rows, ids) == pytest.approx(share)


def test_the_map_is_exported_as_offsets():
    toy = tiny_llama(3, num_layers=4)
    described = head.head_config(DraftSettings(draft_vocab_size=5), toy.target.config)
    ids = np.array([0, 3, 4, 17, 30], np.int32)
    params = head.new_params(described, toy.target, toy.params, ids, seed=0)
    tensors = head_tensors(described, params, toy.target.config, "float32")
    assert tensors["d2t"].tolist() == [0, 2, 2, 14, 26]
    assert np.flatnonzero(tensors["t2d"]).tolist() == ids.tolist()


# --init-from.


def exported(folder, **changes):
    toy = tiny_llama(3, num_layers=4)
    described = head.head_config(DraftSettings(**changes), toy.target.config)
    ids = np.array([1, 2, 5], np.int32) if described.mapped else None
    params = dict(head.new_params(described, toy.target, toy.params, ids, seed=5))
    export_head(folder, described, params, toy.target.config, target_name="t", card="", dtype="float32")
    return toy.target.config, described, params


def test_a_head_goes_on_from_an_export(tmp_path):
    target, described, params = exported(tmp_path / "head", draft_vocab_size=3, aux_layers=("0", "2"))
    found, weights = head.from_head(DraftSettings(init_from=str(tmp_path / "head")), target)
    assert replace(found, dtype=described.dtype) == described
    assert weights.keys() == params.keys()
    for name, leaf in params.items():
        np.testing.assert_array_equal(weights[name], leaf, err_msg=name)
    assert weights["fc"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--draft-vocab-size 9", {"draft_vocab_size": 9}),
        ("--aux-layers 1 2", {"aux_layers": ("1", "2")}),
    ],
)
def test_settings_that_are_not_those_of_the_head(tmp_path, flag, changes):
    target, _, _ = exported(tmp_path / "head", draft_vocab_size=3, aux_layers=("0", "2"))
    with pytest.raises(ValueError, match=f"{flag} differs from --init-from .*leave it out"):
        head.from_head(DraftSettings(init_from=str(tmp_path / "head"), **changes), target)


def test_a_head_of_another_kind_is_refused(tmp_path):
    save_head(tmp_path / "head", "eagle")
    with pytest.raises(CheckpointError, match="head"):
        head.from_head(DraftSettings(init_from=str(tmp_path / "head")), tiny_llama(3).target.config)


# First weights, and what is minimised.


def test_first_weights_are_the_seeds():
    toy = tiny_llama(3, num_layers=4)
    described = head.head_config(DraftSettings(), toy.target.config)
    one, same, other = (head.new_params(described, toy.target, toy.params, None, seed=seed) for seed in (0, 0, 1))
    assert {leaf.dtype.name for leaf in one.values()} == {"float32"}
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, same))
    assert not (one["qkv"] == other["qkv"]).all()
    logits = toy.target.unembed(toy.params, jnp.eye(16)[None])[0]
    np.testing.assert_array_equal(one["head"], logits)


def test_feature_scale_brings_features_to_unit_size():
    rng = np.random.default_rng(0)
    sizes = np.array([1.0, 100.0, 0.01], np.float32)
    features = rng.normal(0, 1, (4, 200, 3)).astype(np.float32) * sizes
    features[0, 0] *= 1e6  # one enormous token
    scale = head.feature_scale(features, np.ones((4, 200), np.int32))
    np.testing.assert_allclose(scale * sizes, 1, rtol=0.1)


@pytest.mark.parametrize(
    ("kind", "given", "weights"),
    [
        ("EAGLE3", {}, [0.8**j for j in range(7)]),
        ("EAGLE3", {"rounds": 3}, [1, 0.8, 0.64]),
        ("EAGLE3", {"rounds": 9}, [0.8**j for j in range(9)]),
        ("EAGLE", {"rounds": 2}, [0.1, 0.08]),
        ("EAGLE", {}, [0.1]),
        ("EAGLE", {"loss_weight": 0.3}, [0.3]),
        ("MTP", {"rounds": 1}, [0.51]),
        ("MTP", {}, [0.51, 0.31, 0.18]),
    ],
)
def test_weights_of_the_rounds(kind, given, weights):
    assert head.objective(kind, LossSettings(**given)).weights == pytest.approx(weights)
