"""EAGLE-3.1: norms before `fc` and of the next feature, in each combination, against the oracle."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import eagle_oracle
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_oracle import HeadSpec
from specjax_kernels import CAUSAL, pack_bits
from tiny_heads import save_head
from toy_models import tiny_llama

from specjax.cache import PoolShape, init_cache
from specjax.checkpoint import load_head
from specjax.models.blocks import Past, joined
from specjax.models.draft_head import draft_head

FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
COMBINATIONS = [(*norms, norms.count(True) % 2 == 1) for norms in itertools.product((False, True), repeat=3)]
COMMITTED, LEVELS, ERROR = 6, 4, 2e-4


@functools.cache
def target():
    return tiny_llama(3, num_layers=7)


def levels(folder, flags: dict[str, bool], stated: bool | None = None) -> tuple[Any, np.ndarray, np.ndarray]:
    """A saved head's tensors, and the outputs [LEVELS, M] and logits [LEVELS, W] along a path of fixed tokens."""
    rng, norm = np.random.default_rng(5), functools.partial(np.random.default_rng(1).uniform, 0.5, 1.5)
    norms = {"input_norm.weight": norm(48)} if flags["norm_before_fc"] else {}
    norms |= {f"fc_norm.{i}.weight": norm(16) for i in range(3)} if flags["fc_norm"] else {}
    norms = {name: np.float32(weight) for name, weight in norms.items()}
    raw = save_head(folder, "eagle3", dtype="float32", config=flags, tensors=norms)
    toy = target()
    config, params = load_head(
        str(folder), toy.target.config, kind="eagle3", progress=False, norm_output=stated
    )  # fmt: skip
    assert {flag: getattr(config, flag) for flag in FLAGS} == flags | (
        {} if stated is None else {"norm_output": stated}
    )
    head = draft_head(config, toy.target)
    tokens = jnp.asarray(rng.integers(0, 31, (1, COMMITTED + LEVELS - 1)), jnp.int32)
    features = rng.normal(0, 3, (1, COMMITTED, 48)).astype(np.float32) * np.repeat([1, 9, 40], 16).astype(np.float32)
    embedded = head.embed(toy.params, params, tokens)
    past = Past(init_cache(head.pages, PoolShape(1, 4)), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    positions = jnp.arange(COMMITTED, dtype=jnp.int32)[None]
    feature = head.fuse(params, jnp.asarray(features))
    out, block = head.forward(params, embedded[:, :COMMITTED], feature, positions, CAUSAL, past)
    outs = [out[:, -1:]]
    for level in range(1, LEVELS):
        at, past = COMMITTED + level - 1, past._replace(before=joined(past.before, block))
        mask = jnp.asarray(pack_bits(np.ones((1, 1, at + 1), bool)))
        position = jnp.full((1, 1), at, jnp.int32)
        out, block = head.forward(params, embedded[:, at : at + 1], outs[-1], position, mask, past)
        outs.append(out)
    logits = [head.unembed(toy.params, params, out) for out in outs]
    inputs = {"tensors": raw | norms, "embeddings": np.asarray(embedded[0]), "features": features[0]}
    return inputs, np.concatenate(outs, axis=1)[0], np.concatenate(logits, axis=1)[0]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda flags: "".join("01"[flag] for flag in flags))
def test_outputs_and_logits_of_levels(tmp_path, combination):
    flags = dict(zip(FLAGS, combination, strict=True))
    inputs, outs, logits = levels(tmp_path, flags)
    spec = HeadSpec("eagle3", 4, 8, 1e-5, 10000.0, flags["norm_before_residual"], flags["norm_output"])
    features, tensors = [*inputs["features"]], inputs["tensors"]
    for level in range(LEVELS):
        size = COMMITTED + level
        out = eagle_oracle.head_forward(
            tensors, spec, inputs["embeddings"][:size], features, range(size), np.tri(size, dtype=bool),
            [False] * COMMITTED + [True] * level, np.float64,
        )[-1]  # fmt: skip
        np.testing.assert_allclose(outs[level], out, rtol=ERROR, atol=ERROR)
        expected = eagle_oracle.draft_logits(tensors, spec, out, np.zeros(0))
        np.testing.assert_allclose(logits[level], expected, rtol=ERROR, atol=ERROR)
        features.append(out)


@pytest.mark.parametrize("combination", [(False, True, False, False), (True, False, True, True)])
def test_norm_output_option_overrides_the_file(tmp_path, combination):
    """`norm_output` changes the drafts of the second level and deeper ones only."""
    flags = dict(zip(FLAGS, combination, strict=True))
    logits = {stated: levels(tmp_path, flags, stated)[2] for stated in (None, False, True)}
    np.testing.assert_array_equal(logits[None], logits[flags["norm_output"]])
    np.testing.assert_allclose(logits[False][0], logits[True][0], atol=1e-5)
    assert (np.abs(logits[False][1:] - logits[True][1:]).max(axis=1) > 0.02).all()
