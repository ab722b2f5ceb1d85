"""A target whose features say all about it, and heads for it: one built by hand, others distilled in seconds.

The pair model's hidden state is (one-hot of the last token, one-hot of the one before), and its logits are linear in
it. So f_{t+1} is a linear function of f_t and the embedding of x_{t+1}: a head that is perfect can be written down,
and one that is trained finds it. A head that is fed shifted tokens, another's features or the two in the wrong order
cannot be right, since the token before is in the features alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from specjax_kernels import CAUSAL, pack_bits
from toy_models import Toy, table_model

from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.models.blocks import KeyValue, Past, joined
from specjax.models.draft_head import DraftHead, draft_head, init_head_params
from specjax.models.target import ForwardOutput, Target


@functools.cache
def pair_model(seed: int = 0, vocab: int = 48) -> Toy:
    """logits = by_last[x_t] + by_before[x_{t-1}]; before the first token stands token 0."""
    width = 2 * vocab
    weights = np.random.default_rng(seed).normal(0, 2, (width, vocab)).astype(np.float32)
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


def texts(toy: Toy, count: int, length: int, seed: int) -> np.ndarray:
    """[count, length] tokens that the target draws at temperature 1."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, toy.vocab, (count, 1))
    while tokens.shape[1] < length:
        logits = np.stack([toy.logits(row.tolist()) for row in tokens[:, -2:]])
        tokens = np.concatenate([tokens, (logits + rng.gumbel(size=logits.shape)).argmax(1)[:, None]], axis=1)
    return tokens.astype(np.int32)


def _pages(count: int, config: HeadConfig) -> Past:
    """Nothing is committed."""
    empty = jnp.zeros((1, 1, config.num_kv_heads, config.head_dim), jnp.float32)
    return Past(KeyValue(empty, empty), jnp.ones((count, 1), jnp.int32), jnp.zeros(count, jnp.int32))


def _losses(head: DraftHead, toy: Toy, params: Any, tokens: Any, unrolled: int) -> jax.Array:
    """Training-time test: the head reads its own output `unrolled` times, as it will in a tree. Slot t of round j
    stands at position t + j, predicts x_{t+j+2}, and sees the slots up to t of round 0 and its own of the others."""
    count, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length))
    output = toy.target.forward(
        toy.params, toy.target.embed(toy.params, tokens), positions, CAUSAL, _toy_cache(), _table(count), _zeros(count),
        features="final",
    )  # fmt: skip
    target_logits = toy.target.unembed(toy.params, output.hidden)
    feature = head.fuse(params, output.features)
    causal, itself = jnp.tril(jnp.ones((length, length), bool)), jnp.eye(length, dtype=bool)
    before, loss = None, jnp.float32(0)
    for j in range(unrolled):
        shifted = jnp.roll(tokens, -1 - j, axis=1)
        visible = jnp.concatenate([causal, *[itself] * j], axis=1)
        mask = pack_bits(jnp.broadcast_to(visible, (count, *visible.shape)))
        past = _pages(count, head.config)._replace(before=before)
        embedded = head.embed(toy.params, params, shifted)
        feature, block = head.forward(params, embedded, feature, positions + j, mask, past)
        before = joined(before, block)
        inside = (jnp.arange(length) < length - 1 - j)[None, :]
        log_probs = jax.nn.log_softmax(head.unembed(toy.params, params, feature))
        wanted = jax.nn.softmax(jnp.roll(target_logits, -1 - j, axis=1))
        cross_entropy = -jnp.sum(wanted * log_probs, axis=-1)
        distance = jnp.float32(0)
        if head.config.kind == "eagle":
            distance = jnp.mean(optax.huber_loss(feature, jnp.roll(output.hidden, -1 - j, axis=1)), axis=-1) * 10
        loss = loss + 0.8**j * jnp.mean(jnp.where(inside, cross_entropy + distance, 0.0))
    return loss


def _toy_cache() -> Any:
    from specjax.cache import PoolShape, init_cache

    return init_cache(pair_model().target.pages, PoolShape(1, 1))


def _table(count: int) -> jax.Array:
    return jnp.ones((count, 1), jnp.int32)


def _zeros(count: int) -> jax.Array:
    return jnp.zeros(count, jnp.int32)


OPTIMISED: dict[str, str | bool | int] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
}
"""XLA's own settings for a program that is run hundreds of times (see conftest.py)."""


def distil(config: HeadConfig, toy: Toy, *, steps: int = 300, unrolled: int = 3, seed: int = 0) -> dict:
    """Parameters of a head after `steps` batches of texts that the target wrote."""
    head = draft_head(config, toy.target, backend="reference")  # the default has a loop without a derivative
    params = dict(init_head_params(config, toy.target, jax.random.key(seed)))
    params = {name: leaf * 5 if leaf.ndim > 1 else leaf for name, leaf in params.items()}
    data = texts(toy, 256, 33, seed)
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, steps), weight_decay=0.0)
    state = optimizer.init(params)

    @partial(jax.jit, compiler_options=OPTIMISED)
    def update(params, state, tokens):
        loss, gradient = jax.value_and_grad(lambda p: _losses(head, toy, p, tokens, unrolled))(params)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, loss

    rng = np.random.default_rng(seed)
    run: Callable[..., Any] = update
    with jax.numpy_dtype_promotion("standard"):  # optax counts in int32
        for _ in range(steps):
            params, state, _ = run(params, state, jnp.asarray(data[rng.integers(0, len(data), 32)]))
    return params


STORED = Path(__file__).parents[1] / "golden" / "distilled_heads.npz"


def distilled_config(kind: str) -> HeadConfig:
    return small_head(kind, pair_model(), **{"attention_bias": True} if kind == "mtp" else {})


@functools.cache
def distilled(kind: str) -> tuple[HeadConfig, dict]:
    """A head as `distil` makes it in 20 seconds; `python tests/helpers/distil.py` has stored it in float16."""
    with np.load(STORED) as file:
        leaves = {name.removeprefix(f"{kind}/"): file[name] for name in file.files if name.startswith(f"{kind}/")}
    return distilled_config(kind), {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}


if __name__ == "__main__":
    heads = {kind: distil(distilled_config(kind), pair_model()) for kind in ("eagle", "eagle3", "mtp")}
    leaves = {f"{kind}/{name}": np.float16(leaf) for kind, params in heads.items() for name, leaf in params.items()}
    np.savez_compressed(STORED, **leaves)
