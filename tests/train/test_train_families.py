"""Heads for every family: the target's features in packed rows, first weights, and ten steps of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import END, NEAR, VOCABULARY, tokenizer
from family_helpers import FAMILIES, RECURRENT, WINDOW, save_family
from train_helpers import arguments

from specjax.checkpoint import load_head, load_params, model_config, resolve
from specjax.config import ModelConfig
from specjax.models import make_target
from specjax.models.draft_head import draft_head, init_head_params, with_token_map
from specjax.models.target import hidden_states
from specjax.train.__main__ import main
from specjax.train.data import Example, pack
from specjax.train.features import teach, training_target
from specjax.train.head import head_config, new_params
from specjax.train.options import DraftSettings
from specjax.train.output import read_metrics


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """Family to a model of three layers, of Gemma 4 of four, with tied embeddings where published models have them."""
    root = tmp_path_factory.mktemp("families")

    def save(family: str) -> Path:
        tied, kinds = family.startswith("gemma"), FAMILIES[family][1].get("layer_types")
        sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "eos_token_id": END, "tie_word_embeddings": tied}
        if kinds:
            sizes |= {"num_hidden_layers": 4, "layer_types": kinds[:2] * 2}
        folder = save_family(root / family, family, **sizes)
        tokenizer().save_pretrained(folder)
        return folder

    return functools.cache(save)


def read(folder: Path) -> tuple[ModelConfig, Any]:
    files = resolve(str(folder), progress=False)
    config = model_config(files.config, dtype="float32")
    return config, load_params(files, config, progress=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_packed_rows(folders, family):
    """Two examples in a row, both longer than a window, equal texts alone, which tests/models compares with
    transformers."""
    config, params = read(folders(family))
    texts = np.random.default_rng(0).integers(3, VOCABULARY, (2, WINDOW + 9)).astype(np.int32)
    rows = pack([Example(text, np.ones(len(text), bool)) for text in texts], texts.size, 0)
    teacher = jax.jit(teach(training_target(config, "float32"), (0, 1)))(params, jax.tree.map(jnp.asarray, rows))
    target = make_target(config)
    both = [hidden_states(target, params, jnp.asarray(texts), kind) for kind in ((0, 1), "final")]
    for text, *alone in zip(texts, *both, strict=True):
        logits = np.asarray(target.unembed(params, alone[1]))
        segment = next(n for n in (1, 2) if (rows.tokens[0][rows.segments[0] == n]).tolist() == text.tolist())
        slots = rows.segments[0] == segment
        for part, expected in zip((teacher.features, teacher.hidden), alone, strict=True):
            np.testing.assert_allclose(part[0, slots], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        best = np.sort(logits)[:, -2:]
        sure = best[:, 1] - best[:, 0] > NEAR
        assert sure.any()
        np.testing.assert_array_equal(np.asarray(teacher.top[0, slots])[sure], logits.argmax(-1)[sure])


@pytest.mark.parametrize("lengths", [(5, 70, 64, 90, 1, 2, 30), (63, 2, 110), (120,), (1, 3, 50)], ids=str)
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_states_end_with_their_text(folders, family, lengths):
    """Texts that begin and end inside and at the ends of a delta net's chunks, and a row that is one chunk."""
    config, params = read(folders(family))
    texts = [np.random.default_rng(n).integers(3, VOCABULARY, n).astype(np.int32) for n in lengths]
    rows = pack([Example(text, np.ones(len(text), bool)) for text in texts], sum(lengths) + 9, 0)
    assert rows.segments.max() == len(lengths) and len(rows.tokens) == 1
    teacher = jax.jit(teach(training_target(config, "float32"), (0, 2)))(params, jax.tree.map(jnp.asarray, rows))
    target = make_target(config)
    for number in range(1, len(lengths) + 1):
        slots = rows.segments[0] == number
        for part, kind in ((teacher.features, (0, 2)), (teacher.hidden, "final")):
            expected = np.asarray(hidden_states(target, params, jnp.asarray(rows.tokens[:, slots]), kind)[0])
            atol = 1e-4 * np.abs(expected).max()
            np.testing.assert_allclose(part[0, slots], expected, rtol=0, atol=atol, err_msg=f"text {number}")


TRAINED = [
    ("gemma2", "EAGLE3"), *((family, "EAGLE3") for family in FAMILIES if family != "gemma2"), ("gemma2", "EAGLE"),
    ("phi3", "EAGLE"), ("mimo", "MTP"), ("gemma3", "MTP"),
]  # fmt: skip
"""The first one has soft caps, offsets of norms, windows, tied embeddings and a token map. A run of a Llama is in
test_train_run.py."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "algorithm"), TRAINED)
def test_ten_steps(folders, data, tmp_path, capfd, family, algorithm):
    """The loss falls, and the head that is written can be read."""
    flags = {"draft": algorithm, "steps": 10, "batch_size": 4, "checkpoint_every": 10, "log_every": 1}
    flags |= {"draft_vocab_size": 60} if (family, algorithm) == TRAINED[0] else {}
    assert main(arguments(folders(family), data, tmp_path / "run", **flags)) == 0, capfd.readouterr().err
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert len(losses) == 10 and np.isfinite(losses).all()
    assert losses[-1] < 0.98 * losses[0], losses
    config, _ = load_head(str(tmp_path / "run" / "head"), read(folders(family))[0], kind=algorithm.lower())
    if algorithm == "MTP":
        assert config == head_config(DraftSettings(draft=algorithm), read(folders(family))[0])


def test_a_copied_output_layer_has_no_soft_cap(folders):
    """With a token map, EAGLE's logits equal those of the target's output layer."""
    config, params = read(folders("gemma2"))
    target = make_target(config)
    head = head_config(DraftSettings(draft="EAGLE"), config)
    weights, ids = init_head_params(head, target, jax.random.key(0)), np.arange(5, 45, 3, dtype=np.int32)
    mapped, few = with_token_map(head, weights, target, params, ids)
    hidden = jax.random.normal(jax.random.key(1), (1, 9, head.hidden_size)) * 4
    expected = draft_head(head, target).unembed(params, weights, hidden)[..., ids]
    assert np.abs(expected).max() > 0.7 * config.logit_softcap, "the cap must change some logits"
    np.testing.assert_allclose(draft_head(mapped, target).unembed(params, few, hidden), expected, rtol=1e-5, atol=1e-5)


def test_a_new_head_starts_from_the_targets_norm_and_output_layer(folders):
    """Their most likely tokens are equal, though Gemma's norms have an offset and the head's has none."""
    for family in ("gemma2", "qwen3"):
        config, params = read(folders(family))
        target = make_target(config)
        head = head_config(DraftSettings(), config)
        weights = new_params(head, target, params, None, seed=0)
        stream = jax.random.normal(jax.random.key(2), (1, 20, config.hidden_size))
        offset = 1 if family == "gemma2" else 0
        normed = stream / jnp.sqrt(jnp.mean(stream**2, axis=-1, keepdims=True) + config.norm_epsilon)
        expected = target.unembed(params, normed * (offset + params["final_norm"])[None, None])
        logits = draft_head(head, target).unembed(params, weights, stream)
        np.testing.assert_array_equal(np.argmax(logits, axis=-1), np.argmax(expected, axis=-1))


def test_head_of_a_latent_target_fills_its_width(folders):
    config, _ = read(folders("deepseek_v3"))
    head = head_config(DraftSettings(), config)
    assert config.latent is not None
    assert (head.num_heads, head.num_kv_heads, head.head_dim) == (3, 3, config.latent.value_dim)
    assert (head.vocab_size, head.mapped) == (VOCABULARY, False)
