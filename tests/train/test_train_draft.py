"""Options of training; configuration, vocabulary, first weights and loss weights of a head."""

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
from specjax.train.export import export_head
from specjax.train.options import RESUMABLE, DraftSettings, LossSettings, TrainOptions


def read(*flags: str) -> TrainOptions:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, TrainOptions())
    return settings.read(parser.parse_args(list(flags)), TrainOptions())


def every_field():
    for table in fields(TrainOptions()):
        for field in fields(getattr(TrainOptions(), table.name)):
            yield table.name, field


def test_every_field_is_a_flag_and_a_key(tmp_path):
    texts = {"tuple": "3", "int": "9", "float": "0.25", "str": "x"}
    for table, field in every_field():
        key, annotation = field.name.replace("_", "-"), str(field.type)
        if choices := field.metadata["setting"].choices:
            text = next(choice for choice in choices if choice != field.default)
        else:
            text = next(text for kind, text in texts.items() if kind in annotation)
        by_flag = getattr(getattr(read(f"--{key}", text), table), field.name)
        assert by_flag != field.default, key
        quoted = f'["{text}"]' if "tuple" in annotation else f'"{text}"' if "str" in annotation else text
        (tmp_path / "a.toml").write_text(f"[{table}]\n{key} = {quoted}\n")
        by_key = getattr(getattr(read("--config", str(tmp_path / "a.toml")), table), field.name)
        assert by_key == by_flag, key
    assert {field.name for _, field in every_field()} >= RESUMABLE


# The head.


def config(layers: int = 8):
    return replace(tiny_llama(3).target.config, num_layers=layers)


@pytest.mark.parametrize(
    ("settings", "expected"),
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
def test_wrong_head_settings(settings, expected):
    with pytest.raises(ValueError, match=expected):
        head.head_config(settings, config(), (2, 5))


def test_head_configurations():
    assert head.head_config(DraftSettings(), config(), (2,)).aux_layers == (1, 3, 4)
    few = head.head_config(DraftSettings(aux_layers=("7", "0"), draft_vocab_size=2), config(), (2, 5))
    assert (few.aux_layers, few.feature_size, few.vocab_size, few.mapped) == ((7, 0), 32, 2, True)
    assert not head.head_config(DraftSettings(draft_vocab_size=31), config()).mapped
    assert head.head_config(DraftSettings(), config(4)).aux_layers == (0, 1, 3)
    with pytest.raises(
        ValueError, match="the target has 2 layers, and --aux-layers are three by default; give --aux-layers"
    ):
        head.head_config(DraftSettings(), config(2))


@pytest.mark.parametrize("size", [1, 2, 5, 9, 30])
def test_draft_vocabulary_is_the_most_frequent_tokens_with_a_loss(size):
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


# --init-from.


def test_init_from(tmp_path):
    toy, folder = tiny_llama(3, num_layers=4), str(tmp_path / "head")
    target = toy.target.config
    described = head.head_config(DraftSettings(draft_vocab_size=3, aux_layers=("0", "2")), target)
    params = dict(head.new_params(described, toy.target, toy.params, np.array([1, 2, 5], np.int32), seed=5))
    export_head(folder, described, params, target, target_name="t", card="", dtype="float32")
    loaded, weights = head.from_head(DraftSettings(init_from=folder), target)
    assert replace(loaded, dtype=described.dtype) == described
    assert weights.keys() == params.keys() and weights["fc"].dtype == jnp.float32
    for name, leaf in params.items():
        np.testing.assert_array_equal(weights[name], leaf, err_msg=name)
    for flag, changes in (
        ("--draft-vocab-size 9", {"draft_vocab_size": 9}),
        ("--aux-layers 1 2", {"aux_layers": ("1", "2")}),
    ):
        with pytest.raises(ValueError, match=f"{flag} differs from --init-from .*leave it out"):
            head.from_head(DraftSettings(init_from=folder, **changes), target)
    save_head(tmp_path / "other", "eagle")
    with pytest.raises(CheckpointError, match="head"):
        head.from_head(DraftSettings(init_from=str(tmp_path / "other")), target)


# First weights and losses.


def test_first_weights_depend_on_the_seed():
    toy = tiny_llama(3, num_layers=4)
    described = head.head_config(DraftSettings(), toy.target.config)
    params = [head.new_params(described, toy.target, toy.params, None, seed=seed) for seed in (0, 0, 1)]
    assert {leaf.dtype.name for leaf in params[0].values()} == {"float32"}
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *params[:2]))
    assert not (params[0]["qkv"] == params[2]["qkv"]).all()
    np.testing.assert_array_equal(params[0]["head"], toy.target.unembed(toy.params, jnp.eye(16)[None])[0])


def test_feature_scale():
    """Features times their scale have unit size, whatever a single enormous token."""
    sizes = np.array([1.0, 100.0, 0.01], np.float32)
    features = np.random.default_rng(0).normal(0, 1, (4, 200, 3)).astype(np.float32) * sizes
    features[0, 0] *= 1e6
    scale = head.feature_scale(features, np.ones((4, 200), np.int32))
    np.testing.assert_allclose(scale * sizes, 1, rtol=0.1)


@pytest.mark.parametrize(
    ("kind", "settings", "weights"),
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
def test_weights_of_rounds(kind, settings, weights):
    assert head.objective(kind, LossSettings(**settings)).weights == pytest.approx(weights)
