"""P-EAGLE in NumPy, float64: one slot, layer, head and key at a time.

Weights are a checkpoint's tensors, [out, in], with the first layer under "midlayer.". Slot t reads the token x_{t+1}
and the target's features at position t, and names x_{t+2}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from eagle_oracle import rotate


@dataclass(frozen=True)
class Spec:
    """What config.json says of a P-EAGLE head."""

    layers: int
    mask: int
    theta: float = 10000.0
    heads: int = 4
    kv_heads: int = 2
    eps: float = 1e-5
    norm_before_residual: bool = False
    windows: tuple[int | None, ...] = (None,) * 4


class Head:
    def __init__(self, tensors: Mapping[str, np.ndarray], spec: Spec, embedding: np.ndarray):
        self.w, self.spec, self.embedding = tensors, spec, embedding.astype(float)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + self.spec.eps) * self.w[f"{name}.weight"]

    def fuse(self, f: np.ndarray) -> np.ndarray:
        if "input_norm.weight" in self.w:
            f = self.norm("input_norm", f)
        if "fc_norm.0.weight" in self.w:
            parts = np.split(f, sum(name.startswith("fc_norm.") for name in self.w))
            f = np.concatenate([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)])
        return self.w["fc.weight"] @ f

    def slot(self, token: int, f: np.ndarray, position: int, cache: list[list[Any]]) -> np.ndarray:
        """One slot through every layer, after all slots in the cache; appends its keys and values. Returns the output
        before the final norm."""
        spec, g, x = self.spec, self.fuse(f), np.zeros(0)
        for i in range(spec.layers):
            at = f"layers.{i}" if i else "midlayer"
            if i:
                a = self.norm(f"{at}.input_layernorm", x)
            else:
                feature = self.norm(f"{at}.hidden_norm", g)
                a = np.concatenate([self.norm(f"{at}.input_layernorm", self.embedding[token]), feature])
                x = feature if spec.norm_before_residual else g
            q, k, v = (self.w[f"{at}.self_attn.{part}_proj.weight"] @ a for part in "qkv")
            q, k, v = q.reshape(spec.heads, -1), k.reshape(spec.kv_heads, -1), v.reshape(spec.kv_heads, -1)
            if f"{at}.self_attn.q_norm.weight" in self.w:
                q = np.stack([self.norm(f"{at}.self_attn.q_norm", head) for head in q])
                k = np.stack([self.norm(f"{at}.self_attn.k_norm", head) for head in k])
            q, k = (np.stack([rotate(head, position, spec.theta) for head in heads]) for heads in (q, k))
            cache[i].append((position, k, v))
            seen = [entry for entry in cache[i] if not spec.windows[i] or entry[0] > position - spec.windows[i]]
            heads = []
            for h in range(spec.heads):
                m = h // (spec.heads // spec.kv_heads)
                scores = np.array([q[h] @ key[m] for _, key, _ in seen]) / np.sqrt(q.shape[1])
                weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                heads.append(sum(w * value[m] for w, (_, _, value) in zip(weights, seen, strict=True)))
            x = x + self.w[f"{at}.self_attn.o_proj.weight"] @ np.concatenate(heads)
            z = self.norm(f"{at}.post_attention_layernorm", x)
            gate, up = (self.w[f"{at}.mlp.{part}_proj.weight"] @ z for part in ("gate", "up"))
            x = x + self.w[f"{at}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return x

    def block(self, features: np.ndarray, tokens: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Normalised outputs [count, M] and logits [count, W] naming x_{n+1} .. x_{n+count}, after features of
        positions 0 .. n-1 and tokens x_1 .. x_n."""
        n, cache = len(tokens), [[] for _ in range(self.spec.layers)]
        outs = [self.slot(tokens[t], features[t].astype(float), t, cache) for t in range(n)][-1:]
        mask = self.w["mask_hidden"].ravel().astype(float)
        outs += [self.slot(self.spec.mask, mask, n - 1 + j, cache) for j in range(1, count)]
        normed = np.stack([self.norm("norm", out) for out in outs])
        return normed, normed @ self.w["lm_head.weight"].T
