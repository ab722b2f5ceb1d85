"""A target whose features say all about it, and heads for it: one built by hand, others distilled.

The pair model's hidden state is (one-hot of the last token, one-hot of the one before), and its logits are linear in
it. So f_{t+1} is a linear function of f_t and the embedding of x_{t+1}: a head that is perfect can be written down,
and one that is trained finds it. A head that is fed shifted tokens, another's features or the two in the wrong order
cannot be right, since the token before is in the features alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toy_models import Toy, table_model

from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.models.draft_head import init_head_params
from specjax.models.target import ForwardOutput, Target


@functools.cache
def pair_model(vocab: int = 48) -> Toy:
    """logits = by_last[x_t] + by_before[x_{t-1}]; before the first token stands token 0."""
    width = 2 * vocab
    weights = np.random.default_rng(0).normal(0, 2, (width, vocab)).astype(np.float32)
    weights[vocab:] /= 2  # whoever does not know the last token shall know little
    # Its hidden state is the pair's number: the last token plus V times the one before.
    base = table_model(np.zeros((vocab * vocab, 1), np.float32), stride=vocab - 1)
    config = ModelConfig("pairs", vocab, width, 1, 1, 1, 1, 1, 1e-5, RopeConfig(), 1 << 20, tied_embeddings=False)

    def embed(params, tokens):
        return jax.nn.one_hot(jnp.clip(tokens, 0, vocab - 1), width, dtype=jnp.float32)

    def forward(params, x, *arguments, features=None):
        tokens = jnp.argmax(x, axis=-1).astype(jnp.int32)
        output = base.target.forward({}, base.target.embed({}, tokens), *arguments)
        pair = jnp.argmax(output.hidden, axis=-1)
        last, before = (jax.nn.one_hot(part, vocab, dtype=jnp.float32) for part in (pair % vocab, pair // vocab))
        hidden = jnp.concatenate([last, before], axis=-1)
        return ForwardOutput(hidden, None if features is None else hidden, output.block)

    def unembed(params, hidden, ids=None, *, capped=True):
        del capped  # there is no cap
        head = params["head"] if ids is None else params["head"][:, ids]
        return jnp.einsum("...m,mv->...v", hidden, head, precision=jax.lax.Precision.HIGHEST)

    def logits(tokens):
        before = tokens[-2] if len(tokens) > 1 else 0
        return weights[tokens[-1]] + weights[vocab + before]

    target = base.target._replace(config=config, embed=embed, forward=forward, unembed=unembed)
    return Toy(target, {"head": jnp.asarray(weights)}, logits)


def small_head(kind: str, toy: Toy, **changes: Any) -> HeadConfig:
    width = toy.target.config.hidden_size
    fields: dict[str, Any] = {
        "hidden_size": width, "feature_size": width, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "norm_epsilon": 1e-5, "rope": RopeConfig(), "vocab_size": toy.vocab,
    }  # fmt: skip
    third = {"aux_layers": (0,), "own_head": True} if kind == "eagle3" else {}
    return HeadConfig(kind, **fields | third | changes)


def zero_head(config: HeadConfig, target: Target) -> dict:
    """A head's parameters, all zero."""
    shapes = jax.eval_shape(lambda: dict(init_head_params(config, target, jax.random.key(0))))
    return {name: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) for name, leaf in shapes.items()}


def perfect_head(toy: Toy) -> tuple[HeadConfig, dict]:
    """An eagle head whose output is the target's next feature: the embedding's one-hot, and the feature's first half
    as the second. Attention and MLP add nothing."""
    config = small_head("eagle", toy)
    params = zero_head(config, toy.target)
    vocab, width = toy.vocab, config.hidden_size
    fc = np.zeros((2 * width, width), np.float32)
    fc[:vocab, :vocab] = np.eye(vocab)  # rows: the embedding, whose one-hot is the last token
    fc[width : width + vocab, vocab:] = np.eye(vocab)  # then the feature, whose last token is now the one before
    return config, params | {"fc": jnp.asarray(fc)}


STORED = Path(__file__).parents[1] / "golden" / "distilled_heads.npz"


def distilled_config(kind: str) -> HeadConfig:
    return small_head(kind, pair_model(), **{"attention_bias": True} if kind == "mtp" else {})


@functools.cache
def distilled(kind: str) -> tuple[HeadConfig, dict]:
    """A head that the code of commit 5af8264 trained on texts of the pair model, stored in float16."""
    with np.load(STORED) as file:
        leaves = {name.removeprefix(f"{kind}/"): file[name] for name in file.files if name.startswith(f"{kind}/")}
    return distilled_config(kind), {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}
