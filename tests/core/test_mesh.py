"""Tensor parallelism on CPU devices: equal texts and log-probabilities, and the number of collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import tokenizer
from mesh_helpers import run
from specjax_kernels.mesh import AXIS, spec
from tiny_checkpoints import save_llama

from specjax.config import HeadConfig, LayerKinds, ModelConfig, MtpConfig, RopeConfig
from specjax.load import declared_models
from specjax.models import make_target
from specjax.models.params import ATTENTION_NORM, attention_leaves
from specjax.parallel.sharding import copies_of, fitted, make_mesh, regrouped

pytestmark = pytest.mark.process

LAYERS = 2
COLLECTIVES = 2 * LAYERS + 4
"""Two sums per layer, the embedding, a pair of numbers for the argmax and, in branches, the logits of a drawn node and
of log-probabilities."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One device, without drafts."""
    return run(["texts", "none", 1])[0]


def check(result: dict[str, Any], alone: dict[str, Any], devices: int) -> None:
    """Texts and reused pages are those of one device; each device has its share of the pools, which are not copied."""
    assert result["texts"] == alone["texts"]
    assert result["pool shares"] == [1 / devices]
    assert result["aliased"] == result["state"], "a pool is copied"
    assert result["cached"] == alone["cached"] > 0
    if result["algorithm"] == "NONE":  # a step with drafts has collectives of the draft, too
        assert len(result["collectives"]) <= COLLECTIVES, result["collectives"]
        assert not any(kind in ("all-to-all", "collective-permute") for *_, kind in result["collectives"])


def check_forward(result: dict[str, Any]) -> None:
    """The logits are those of one device, with two sums per layer and one for the embedding."""
    assert result["difference"] < 1e-4 * result["largest"], result
    assert result["collectives"] == ["all-reduce"] * (2 * LAYERS + 1), result


def test_plain_steps_and_drafts(alone):
    """Biased, sampled and penalised requests, a grammar, and a prompt with reused pages."""
    assert not alone["collectives"] and len({tuple(text) for text in alone["texts"]}) == 4
    two, four, head = run(["texts", "none", 2], ["texts", "none", 4], ["texts", "eagle3", 2])
    for result, devices in ((two, 2), (four, 4), (head, 2)):
        check(result, alone, devices)
    for result in (two, four):
        gathered = [shape for _, shape, kind in result["collectives"] if kind != "all-reduce"]
        assert len(gathered) == 3, gathered
    assert head["accepted"] > 0
    assert two["weights"] < 0.6 * alone["weights"] and four["weights"] < 0.4 * alone["weights"]


@pytest.mark.slow
def test_every_drafter(alone):
    cases = [["texts", case, 2] for case in ("ngram", "eagle", "token_map", "standalone", "mtp", "mtp_map", "block")]
    cases += [["texts", "eagle3", 4], ["texts", "standalone", 4]]
    result = run(*cases)
    for (_, _, devices), one in zip(cases, result, strict=True):
        check(one, alone, devices)
    assert {one["algorithm"] for one in result} == {"NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "MTP", "DFLASH"}
    accepted = {case: one["accepted"] for (_, case, _), one in zip(cases, result, strict=True)}
    assert accepted["standalone"] > 0 and accepted["token_map"] > 0, accepted


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mesh")
    save_llama(root / "llama", num_attention_heads=8, num_key_value_heads=2, initializer_range=0.2, shard="60KB")
    tokenizer().save_pretrained(root / "llama")
    return root


def test_fewer_key_value_heads_than_devices(folder):
    """Two key/value heads on four devices, read by parts from several files; AUTO chooses n-grams."""
    path = str(folder / "llama")
    one, four = run(["from_files", path, 1, "NONE", {}], ["from_files", path, 4, "AUTO", {}])
    assert four["texts"] == one["texts"] and four["algorithm"] == "NGRAM"
    assert four["pool shares"] == [0.25] and four["aliased"] == four["state"]
    assert four["weights"] < 0.4 * one["weights"]


def test_families():
    """Two sums per layer and one for the embedding, also with experts and latent attention, for few and many tokens."""
    names = ("qwen3_moe", "deepseek_v3", "gemma2", "phi3", "qwen3_next", "gpt_oss")
    for result in run(*(["forward", name, 2, width] for name in names for width in (3, 12))):
        check_forward(result)


# Log-probabilities, grammars, reused pages and adaptive drafting.


def numbers(result: dict[str, Any]) -> tuple[list[int], np.ndarray]:
    """Token ids and log-probabilities of all requests, in order."""
    leaves = [leaf for leaf in jax.tree.leaves((result["logprobs"], result["prompts"])) if leaf is not None]
    return [leaf for leaf in leaves if type(leaf) is int], np.asarray([x for x in leaves if type(x) is float])


def check_features(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert result["texts"] == alone["texts"] and result["cached"] == alone["cached"]
    (ids, values), (own_ids, own_values) = numbers(result), numbers(alone)
    assert ids == own_ids and len(values) > 150
    np.testing.assert_allclose(values, own_values, atol=1e-4)
    assert len(result["chosen"]) >= 2 and 1 in result["chosen"], "steps with drafts and steps without"


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return run(["features", "none", 1, False], ["features", "ngram", 2, True])


def test_features_with_adaptive_ngrams(both):
    alone, drafted = both
    check_features(drafted, alone)
    assert [len(result) for result in alone["logprobs"]][:3] == [12, 0, 12] and len(alone["prompts"][1]) == 5
    assert alone["cached"][2] == 16
    assert tokenizer().decode(alone["texts"][3]).lstrip().startswith("{")


@pytest.mark.slow
def test_features_with_adaptive_heads(both):
    for result in run(*(["features", *case, True] for case in (("eagle3", 2), ("mtp", 2), ("standalone", 4)))):
        check_features(result, both[0])
        assert result["accepted"] > 0


# Without devices.

ROPE = RopeConfig()
CONFIG = ModelConfig("llama", 64, 32, 48, 2, 8, 2, 4, 1e-5, ROPE, 128, tied_embeddings=True)


def test_copies_of_heads():
    """Each query head keeps its keys."""
    rng, (qkv, output) = np.random.default_rng(0), attention_leaves(bias=False, output_bias=False)
    leaf = rng.normal(size=(3, 2, 6, 5))  # [M, K, G + 2, E]
    result = regrouped(leaf, qkv, 2)
    assert result.shape == (3, 4, 4, 5) and copies_of(CONFIG, 4) == 2
    wide = fitted(CONFIG, 4)
    assert (wide.num_kv_heads, wide.group_size) == (4, 2)
    for head in range(8):
        (k, g), (copy, place) = divmod(head, 4), divmod(head, 2)
        np.testing.assert_array_equal(result[:, copy, place], leaf[:, k, g])
        np.testing.assert_array_equal(result[:, copy, 2:], leaf[:, k, 4:])
    last = rng.normal(size=(2, 4, 5, 3))
    np.testing.assert_array_equal(regrouped(last, output, 2).reshape(8, 5, 3), last.reshape(8, 5, 3))
    assert regrouped(leaf, ATTENTION_NORM, 2) is leaf


def test_refused_splits():
    assert fitted(CONFIG, 2) is CONFIG
    for count in (3, 16):
        with pytest.raises(ValueError, match=f"tensor_parallel {count} cannot split the 8 query heads on 2 key/value"):
            fitted(CONFIG, count)
    head = HeadConfig("eagle", 32, 32, 48, 3, 3, 8, 1e-5, ROPE, 64)
    with pytest.raises(
        ValueError, match="tensor_parallel 2 cannot split the 3 query heads on 3 key/value heads of the d"
    ):
        fitted(head, 2, "the draft")
    with pytest.raises(ValueError, match="tensor_parallel 9 needs 9 devices, and JAX has"):
        make_mesh(9)
    assert make_mesh(1) is None
    for count, windowed, full in ((3, 3, 1), (3, 1, 2), (2, 2, 3), (3, 3, 6)):
        config = replace(CONFIG, num_kv_heads=windowed, num_heads=6 * windowed, kinds=LayerKinds(8, full))
        if (windowed, full) == (3, 6):
            assert fitted(config, count) is config
            continue
        with pytest.raises(ValueError, match=f"{windowed} key/value heads of layers with a window, and the {full} of"):
            fitted(config, count)


def test_columns_of_a_token_map_in_the_declaration():
    """Loading places the columns, which may be in few bits, by their declared shape."""
    config = MtpConfig("mimo", replace(CONFIG, num_layers=1), target_layers=2, count=1, vocab_size=12, mapped=True)
    assert declared_models(make_target(CONFIG), config).draft.params()["head"].shape == (32, 12)


def test_the_split_axis():
    assert tuple(spec((None, "kv_heads", None), (3, 4, 5), 2)) == (None, AXIS)
    assert tuple(spec((None, "kv_heads", None), (3, 3, 5), 2)) == ()
    assert tuple(spec(("vocab", None), jnp.zeros((6, 2)).shape, 3)) == (AXIS,)
