"""Block drafts in NumPy, float64, one slot, head and key at a time: the forward, the walks and the trees.

Weights are a checkpoint's tensors under z-lab's names, [out, in]. Nothing here has a batch, pages or a cache: a
proposal is computed from all features of the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from eagle_oracle import ERROR, TokenPath, check_tree, gelu, grow_tree, log_softmax, rotate, silu

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Spec:
    """What config.json says of a block head."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    mask: int
    from_anchor: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    candidates: int = 0  # of the selector; 0: there is none
    input_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None
    gemma: bool = False  # Gemma 4's layers, and theta 1e6


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.stack([row / np.sqrt(np.mean(row**2) + eps) * weight for row in x])


def times(w: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    out = x @ w[f"{name}.weight"].T.astype(float)
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def heads_of(w: Tensors, spec: Spec, layer: int, kind: str, x: np.ndarray, first: int) -> np.ndarray:
    """Queries (q), keys (k) or values (v) of rows at positions first, first + 1, ...: [n, heads, E]."""
    at = f"layers.{layer}.self_attn."
    name = "k" if spec.gemma and f"{at}{kind}_proj.weight" not in w else kind
    heads = times(w, f"{at}{name}_proj", x).reshape(len(x), -1, spec.head_dim)
    if kind == "v":
        return np.stack([normed(row, np.ones(1), spec.eps) for row in heads]) if spec.gemma else heads
    turn = (1e6, 0.25) if spec.gemma else (spec.theta,)
    weight = w[f"{at}{kind}_norm.weight"]
    return np.stack(
        [[rotate(head, first + i, *turn) for head in normed(row, weight, spec.eps)] for i, row in enumerate(heads)]
    )


def mixed(w: Tensors, name: str, side: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """DFlash2's convolution of y, whose kernel depends on x; y if the head has none."""
    if f"{name}.base_kernel" not in w:
        return y
    base = w[f"{name}.base_kernel"]
    _, taps, width = base.shape
    change = times(w, f"{name}.kernel_projection", x).reshape(len(x), 2, taps, -1)
    size = width // change.shape[3]
    out = np.zeros_like(y)
    for i in range(len(y)):
        for c in range(width):
            for t in range(min(taps, i + 1)):
                out[i, c] += (base[side, t, c] + change[i, side, t, c // size]) * y[i - t, c]
    return out


def block_outputs(w: Tensors, spec: Spec, embedding: np.ndarray, features: np.ndarray, anchor: int, width: int):
    """[width, M]: outputs of a block after `features` [n, F], after the final norm."""
    n = len(features)
    context = normed(times(w, "fc", features.astype(float)), w["hidden_norm.weight"], spec.eps) if n else None
    x = embedding[[anchor, *[spec.mask] * (width - 1)]].astype(float) * spec.input_scale
    for layer in range(spec.layers):
        at = f"layers.{layer}"
        a = normed(x, w[f"{at}.input_layernorm.weight"], spec.eps)
        m = mixed(w, f"{at}.attention_conv", 0, a, a)
        queries, keys, values = (heads_of(w, spec, layer, kind, m, n) for kind in "qkv")
        if context is not None:
            keys, values = (
                np.concatenate([heads_of(w, spec, layer, kind, context, 0), own])
                for kind, own in (("k", keys), ("v", values))
            )
        out = np.zeros((width, spec.heads, spec.head_dim))
        window = spec.windows[layer]
        for i in range(width):
            seen = [
                j
                for j in range(n + width)
                if (j <= n + i or not spec.causal[layer]) and (window is None or j > n + i - window)
            ]
            for h in range(spec.heads):
                kv = h * spec.kv_heads // spec.heads
                scores = np.array([queries[i, h] @ keys[j, kv] for j in seen])
                scores = scores if spec.gemma else scores / np.sqrt(spec.head_dim)
                weights = np.exp(scores - scores.max())
                out[i, h] = sum(p * values[j, kv] for p, j in zip(weights / weights.sum(), seen, strict=True))
        y = times(w, f"{at}.self_attn.o_proj", out.reshape(width, -1))
        if spec.gemma:
            y = normed(y, w[f"{at}.post_attention_layernorm.weight"], spec.eps)
        x = x + mixed(w, f"{at}.attention_conv", 1, y, a)
        before = "pre_feedforward_layernorm" if spec.gemma else "post_attention_layernorm"
        a = normed(x, w[f"{at}.{before}.weight"], spec.eps)
        m = mixed(w, f"{at}.mlp_conv", 0, a, a)
        gate, up = (times(w, f"{at}.mlp.{part}_proj", m) for part in ("gate", "up"))
        y = times(w, f"{at}.mlp.down_proj", (gelu if spec.gemma else silu)(gate) * up)
        if spec.gemma:
            y = normed(y, w[f"{at}.post_feedforward_layernorm.weight"], spec.eps)
        x = (x + mixed(w, f"{at}.mlp_conv", 1, y, a)) * (w[f"{at}.layer_scalar"] if spec.gemma else 1)
    return normed(x, w["norm.weight"], spec.eps)


def slot_logits(spec: Spec, outputs: np.ndarray, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and logits [D, W] of the slots that predict. `head`: [W, M]."""
    outputs = outputs if spec.from_anchor else outputs[1:]
    logits = outputs @ head.T.astype(float) * spec.output_scale
    return outputs, logits if spec.softcap is None else spec.softcap * np.tanh(logits / spec.softcap)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def walker(w: Tensors, spec: Spec, outputs: np.ndarray, logits: np.ndarray, anchor: int, ids: Sequence[int]):
    """path -> log-probabilities [W] of the token after it, over the head's own ids; `ids` are the target's.

    A path is of the target's ids, without the anchor. Without a walk the path decides the slot alone.
    """

    def after(path: TokenPath) -> np.ndarray:
        slot, words = len(path), logits.shape[1]
        tokens = [anchor, *path]
        if spec.candidates:
            best = sorted(range(words), key=lambda i: (-logits[slot, i], i))[: spec.candidates]
            query = w["candidate_selector.predecessor_codebook"][tokens[-1]] * times(
                w, "candidate_selector.hidden_projection", outputs[slot]
            )
            scores = np.full(words, -np.inf)
            for i in best:
                scores[i] = logits[slot, i] + w["candidate_selector.successor_codebook"][i] @ query
            return log_softmax(scores)
        if "markov_head.markov_w1.weight" not in w:
            return log_softmax(logits[slot])
        state = np.zeros(w["markov_head.markov_w1.weight"].shape[1])
        vector = state
        for i, token in enumerate(tokens):
            vector = w["markov_head.markov_w1.weight"][token]
            if "markov_head.gate_proj.weight" in w:
                vector = sigmoid(times(w, "markov_head.gate_proj", np.concatenate([outputs[i], vector]))) * vector
            if "markov_head.joint_proj.weight" in w:
                joint = times(w, "markov_head.joint_proj", np.concatenate([state, vector, outputs[i]]))
                gate, new, out = np.split(joint, 3)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(new)
                vector = np.tanh(out)
        return log_softmax(logits[slot] + w["markov_head.markov_w2.weight"] @ vector)

    assert len(ids) == logits.shape[1]
    return after


def best_paths(
    log_probs: Callable[[TokenPath], np.ndarray], depth: int, width: int, count: int, ids: Sequence[int]
) -> tuple[dict[TokenPath, float], float]:
    """DDTree with a heap: the `count` most probable paths with the `width` best tokens of each slot, and the distance
    between the last one and the next, below which another implementation may differ."""
    heap: list[tuple[float, TokenPath]] = []

    def push(path: TokenPath, score: float) -> None:
        following = log_probs(path)
        best = sorted(range(len(following)), key=lambda i: (-following[i], i))[:width]
        for i in best:
            heapq.heappush(heap, (-(score + float(following[i])), (*path, int(ids[i]))))

    push((), 0.0)
    chosen: dict[TokenPath, float] = {}
    while heap and len(chosen) < count:
        score, path = heapq.heappop(heap)
        chosen[path] = -score
        if len(path) < depth:
            push(path, -score)
    gap = min(chosen.values()) + heap[0][0] if heap else np.inf
    return chosen, float(gap)


def paths_of(tree: Any, row: int) -> dict[tuple[int, ...], float]:
    """The paths below the root of the valid nodes, with their scores."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.valid[row].sum())):
        paths.append((*paths[tree.parents[row, node]], int(tree.tokens[row, node])))
        assert tree.depth[row, node] == len(paths[node])
    assert len({*paths}) == len(paths)
    return dict(zip(paths, tree.scores[row].tolist(), strict=False))


def check_paths(
    tree: Any, row: int, log_probs: Callable[[TokenPath], np.ndarray], root: int, shape: Any, ids: np.ndarray, *,
    grown: bool,
) -> bool:  # fmt: skip
    """Compare a row of a `DraftTree` with the tree that is grown level by level, or with the best paths of all. False
    if the choice is near a tie, where nothing is compared."""
    if grown:
        expected = grow_tree(log_probs, root, shape.steps, shape.topk, shape.nodes, target_ids=ids)
        return check_tree(tree, row, expected)
    chosen, gap = best_paths(log_probs, shape.steps, shape.topk, shape.nodes - 1, ids.tolist())
    if gap <= ERROR:
        return False
    drafted = paths_of(tree, row)
    assert drafted.keys() == {(), *chosen}
    np.testing.assert_allclose([drafted[path] for path in chosen], [*chosen.values()], atol=ERROR)
    return True
