"""Gemma 4's assistant once more, slowly: numpy, one node of a tree at a time, over the target's whole keys and values.

Weights by the checkpoint's names, [out, in]; the config is that of config.json. Nothing here imports jax or specjax.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

SLIDING, FULL = "sliding_attention", "full_attention"


class Given(NamedTuple):
    """What the target leaves to the assistant."""

    hidden: np.ndarray  # [M], after the final norm, at the token before the root
    shared: Mapping[str, tuple[np.ndarray, np.ndarray]]  # by kind: keys and values [n, K, E] of the committed tokens


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rotate(x: np.ndarray, rope: Mapping[str, Any], position: int) -> np.ndarray:
    """x [H, E]; channel i turns with channel i + E/2. "proportional": only the first pairs turn."""
    half = x.shape[1] // 2
    frequency = rope["rope_theta"] ** (-np.arange(half) / half)
    if rope["rope_type"] == "proportional":
        frequency[int(rope["partial_rotary_factor"] * half) :] = 0
    cos, sin = np.cos(position * frequency), np.sin(position * frequency)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """queries [H, E], keys and values [n, K, E]. Scores are not scaled."""
    outputs = []
    for head, query in enumerate(queries):
        group = head // (len(queries) // keys.shape[1])
        scores = keys[:, group] @ query
        weights = np.exp(scores - scores.max()) if len(scores) else scores
        outputs.append(weights @ values[:, group] / max(weights.sum(), 1e-30))
    return np.concatenate(outputs)


class Assistant:
    """An assistant in a folder. `offset`: position of its nodes relative to the root's."""

    def __init__(self, folder: Path, embedding: np.ndarray, offset: int = 0) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.text, self.embedding, self.offset = self.config["text_config"], embedding.astype(float), offset
        tensors = load_file(folder / "model.safetensors").items()
        self.weights = {name.removeprefix("model."): array.astype(np.float64) for name, array in tensors}

    def node(self, given: Given, token: int, feature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The feature of the node's children, and logits [V]."""
        w, n = self.weights, len(given.shared[FULL][0])
        position = n + self.offset
        embedded = self.embedding[token] * np.sqrt(len(feature))
        x = w["pre_projection.weight"] @ np.concatenate([embedded, feature])
        for i, kind in enumerate(self.text["layer_types"]):
            of = {
                name.removeprefix(f"layers.{i}."): leaf for name, leaf in w.items() if name.startswith(f"layers.{i}.")
            }
            keys, values = given.shared[kind]
            first = max(position - self.text["sliding_window"] + 1, 0) if kind == SLIDING else 0
            queries = of["self_attn.q_proj.weight"] @ rms(x, of["input_layernorm.weight"])
            queries = rms(queries.reshape(-1, keys.shape[2]), of["self_attn.q_norm.weight"])
            queries = rotate(queries, self.text["rope_parameters"][kind], position)
            out = of["self_attn.o_proj.weight"] @ attend(queries, keys[first:], values[first:])
            x = x + rms(out, of["post_attention_layernorm.weight"])
            h = rms(x, of["pre_feedforward_layernorm.weight"])
            gate, up = (of[f"mlp.{name}_proj.weight"] @ h for name in ("gate", "up"))
            out = of["mlp.down_proj.weight"] @ (gelu(gate) * up)
            x = (x + rms(out, of["post_feedforward_layernorm.weight"])) * of["layer_scalar"]
        out = rms(x, w["norm.weight"])
        return w["post_projection.weight"] @ out, self.logits(out)

    def logits(self, out: np.ndarray) -> np.ndarray:
        """-inf: a token of a cluster that is not among the best."""
        w = self.weights
        logits = w["embed_tokens.weight"] @ out
        if not self.config["use_ordered_embeddings"]:
            return logits
        best = np.argsort(-(w["masked_embedding.centroids.weight"] @ out))[: self.config["centroid_intermediate_top_k"]]
        clusters = w["masked_embedding.token_ordering"].astype(int).reshape(self.config["num_centroids"], -1)
        known = np.isin(np.arange(len(logits)), clusters[best])
        return np.where(known, logits, -np.inf)

    def path(self, given: Given, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`node` of the last of these tokens, the root and those below it."""
        feature, logits = given.hidden, np.zeros(0)
        for token in tokens:
            feature, logits = self.node(given, token, feature)
        return feature, logits


def given_by(model: Any, tokens: Sequence[int]) -> Given:
    """What transformers' target has computed of these tokens."""
    import torch

    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)]), output_hidden_states=True, return_shared_kv_states=True)
    shared = {kind: tuple(leaf[0].transpose(0, 1).double().numpy() for leaf in out.shared_kv_states[kind])
              for kind in (SLIDING, FULL)}  # fmt: skip
    return Given(out.hidden_states[-1][0, -1].double().numpy(), shared)
