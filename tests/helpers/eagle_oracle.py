"""EAGLE and MTP once more, slowly: draft heads and EAGLE-2's tree, after docs/algorithms.md.

Plain Python and numpy, one item, one head and one node at a time, no cache: every node of a tree is computed from the
committed tokens anew. Nothing here imports jax or specjax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import oracle

NO_PARENT = -1
NO_TOKEN = -1

Tensors = Mapping[str, np.ndarray]  # by the names of FORMATS.md, torch's layout [out, in]
TokenPath = tuple[int, ...]  # tokens below the root, target ids
LogProbsFn = Callable[[TokenPath], Sequence[float] | np.ndarray]  # of the token after root + path, over the draft's ids


# The head.


@dataclass(frozen=True)
class HeadSpec:
    """What the tensors do not say themselves."""

    kind: str  # "eagle" (EAGLE-1 and EAGLE-2), "eagle3" or "mtp" (MiMo's)
    num_heads: int
    head_dim: int
    eps: float = 1e-6
    rope_theta: float = 10000.0  # the head's own, whatever the target uses
    norm_before_residual: bool = False  # eagle3 only
    norm_output: bool = False  # eagle3 only: children read the normed output
    window: int | None = None  # positions that an item sees, its own included
    gemma: bool = False  # Gemma 4's layer, and theta 1e6

    @property
    def layer(self) -> str:
        return {"eagle": "layers.0", "eagle3": "midlayer", "mtp": "model.mtp_layers.0"}[self.kind]


def linear(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    """With a bias if there is one: presence of the key decides."""
    result = tensors[f"{name}.weight"].astype(x.dtype) @ x
    return result + tensors[f"{name}.bias"].astype(x.dtype) if f"{name}.bias" in tensors else result


def rms(tensors: Tensors, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + x.dtype.type(eps)) * tensors[f"{name}.weight"].astype(x.dtype)


def rotate(x: np.ndarray, position: int, theta: float, share: float = 1.0) -> np.ndarray:
    """RoPE of one head's vector [E]: dimension i turns together with i + E/2. `share` of the pairs turn."""
    half = len(x) // 2
    turned = x.copy()
    for i in range(int(half * share)):
        angle = position * theta ** (-2 * i / len(x))
        cos, sin = x.dtype.type(math.cos(angle)), x.dtype.type(math.sin(angle))
        turned[i] = x[i] * cos - x[i + half] * sin
        turned[i + half] = x[i + half] * cos + x[i] * sin
    return turned


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    """By tanh, as in Gemma."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def head_forward(
    tensors: Tensors,
    spec: HeadSpec,
    embeddings: Sequence[np.ndarray] | np.ndarray,
    features: Sequence[np.ndarray] | np.ndarray,
    positions: Sequence[int],
    visible: np.ndarray | Sequence[Collection[int]],
    recurrent: Sequence[bool],
    dtype: type = np.float32,
) -> np.ndarray:
    """All items at once: the vectors [n, M] that serve as logits' input and as the children's feature.

    Args:
        embeddings: [n, M], of each item's token.
        features: one vector an item: the target's, or the parent's output where `recurrent`. For eagle3 these differ
            in width, as only the target's go through `fc`: then a list.
        visible: which items each item attends to, itself included: [n, n] of bool, or a set of indices for each.
    """
    at = f"{spec.layer}.self_attn"
    size, num_heads = spec.head_dim, spec.num_heads
    num_kv_heads = tensors[f"{at}.k_proj.weight"].shape[0] // size  # not the target's number
    residuals, queries, keys, values = [], [], [], []
    for embedding, feature, position, again in zip(embeddings, features, positions, recurrent, strict=True):
        e, f = np.asarray(embedding, dtype), np.asarray(feature, dtype)
        if spec.kind == "eagle":  # no norm before attention
            x = residual = linear(tensors, "fc", np.concatenate([e, f]))
        elif spec.kind == "mtp":  # the feature first; an item at position 0 has no embedding
            e = rms(tensors, f"{spec.layer}.token_layernorm", e if position else np.zeros_like(e), spec.eps)
            f = rms(tensors, f"{spec.layer}.hidden_layernorm", f, spec.eps)
            residual = linear(tensors, f"{spec.layer}.input_proj", np.concatenate([f, e]))
            x = rms(tensors, f"{spec.layer}.input_layernorm", residual, spec.eps)
        else:
            if not again and "input_norm.weight" in tensors:  # norm_before_fc
                f = rms(tensors, "input_norm", f, spec.eps)
            if not again and "fc_norm.0.weight" in tensors:  # fc_norm, after the other if there are both
                parts = np.split(f, sum(name.startswith("fc_norm.") for name in tensors))
                f = np.concatenate([rms(tensors, f"fc_norm.{i}", part, spec.eps) for i, part in enumerate(parts)])
            g = f if again else linear(tensors, "fc", f)
            normed = rms(tensors, f"{spec.layer}.hidden_norm", g, spec.eps)
            x = np.concatenate([rms(tensors, f"{spec.layer}.input_layernorm", e, spec.eps), normed])
            residual = normed if spec.norm_before_residual else g
        same = "k" if spec.gemma and f"{at}.v_proj.weight" not in tensors else "v"
        q, k, v = (
            linear(tensors, f"{at}.{name}_proj", x).reshape(heads, size)
            for name, heads in (("q", num_heads), ("k", num_kv_heads), (same, num_kv_heads))
        )
        if spec.gemma:
            v = np.stack([head / np.sqrt(np.mean(head * head) + dtype(spec.eps)) for head in v])
        if f"{at}.q_norm.weight" in tensors:
            q, k = (
                [rms(tensors, f"{at}.{name}_norm", head, spec.eps) for head in x] for name, x in (("q", q), ("k", k))
            )
        residuals.append(residual)
        turn = (position, 1e6, 0.25) if spec.gemma else (position, spec.rope_theta)
        queries.append([rotate(head, *turn) for head in q])
        keys.append([rotate(head, *turn) for head in k])
        values.append(v)

    outs = []
    for item, residual in enumerate(residuals):
        row = visible[item]
        seen = np.flatnonzero(row).tolist() if isinstance(visible, np.ndarray) else sorted(row)
        seen = [key for key in seen if not spec.window or positions[key] > positions[item] - spec.window]
        heads = []
        for head in range(num_heads):
            kv = head // (num_heads // num_kv_heads)
            scores = np.array([queries[item][head] @ keys[key][kv] for key in seen], dtype)
            scores = scores if spec.gemma else scores / dtype(math.sqrt(size))
            weights = np.exp(scores - scores.max())
            weights = weights / weights.sum()
            heads.append(sum(weight * values[key][kv] for weight, key in zip(weights, seen, strict=True)))
        y = linear(tensors, f"{at}.o_proj", np.concatenate(heads))
        if spec.gemma:
            y = rms(tensors, f"{spec.layer}.post_attention_layernorm", y, spec.eps)
        a, before = residual + y, "pre_feedforward_layernorm" if spec.gemma else "post_attention_layernorm"
        x = rms(tensors, f"{spec.layer}.{before}", a, spec.eps)
        gate, up = (linear(tensors, f"{spec.layer}.mlp.{name}_proj", x) for name in ("gate", "up"))
        y = linear(tensors, f"{spec.layer}.mlp.down_proj", (gelu if spec.gemma else silu)(gate) * up)
        if spec.gemma:
            y = rms(tensors, f"{spec.layer}.post_feedforward_layernorm", y, spec.eps)
        out = (a + y) * (tensors[f"{spec.layer}.layer_scalar"] if spec.gemma else 1)
        if spec.kind == "mtp":
            out = rms(tensors, f"{spec.layer}.final_layernorm", out, spec.eps)
        outs.append(rms(tensors, "norm", out, spec.eps) if spec.norm_output else out)
    return np.stack(outs)


def draft_logits(
    tensors: Tensors,
    spec: HeadSpec,
    out: np.ndarray,
    target_head: np.ndarray,
    token_map: Sequence[int] | None = None,
) -> np.ndarray:
    """[W]: logits of one item over the draft's own ids. `target_head` is [V, M].

    EAGLE has no norm after its layer, MTP's is part of it; with a token map (FR-Spec) both score only the map's rows of
    the target's head.
    """
    if spec.kind != "eagle3":
        rows = target_head if token_map is None else target_head[list(token_map)]
        return rows.astype(out.dtype) @ out
    rows = tensors.get("lm_head.weight", target_head)
    return rows.astype(out.dtype) @ (out if spec.norm_output else rms(tensors, "norm", out, spec.eps))


def target_ids(tensors: Tensors, spec: HeadSpec, vocab_size: int, token_map: Sequence[int] | None = None) -> np.ndarray:
    """[W]: the target's id of each of the draft's. EAGLE-3 heads bring their own map, as offsets."""
    if spec.kind != "eagle3":
        return np.arange(vocab_size) if token_map is None else np.asarray(token_map, int)
    size = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab_size
    return np.arange(size) + np.asarray(tensors.get("d2t", 0), int)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


# The tree.


@dataclass(frozen=True)
class Candidate:
    token: int  # the target's id
    parent: int  # index into the pool; NO_PARENT: the root
    depth: int  # 1 for a child of the root
    score: float  # cumulative log-probability, as float32 has it


@dataclass(frozen=True)
class DraftTree:
    """N nodes, parents before children; the invalid ones come last and hold the sentinels."""

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    valid: list[bool]
    scores: list[float]  # 0 for the root, -inf where invalid
    pool: list[Candidate]  # without impossible ones
    chosen: list[int]  # the pool's indices of nodes 1, 2, ...
    gap: float
    """How close a decision was: the smallest difference of scores, over every top-k, beam and rerank, between one
    taken and one left. Exact ties are settled by index and do not count. Above the error of an implementation, that
    implementation has the same set of paths."""
    order_gap: float
    """At most `gap`: also counts neighbours among those taken by a top-k or a beam, whose order is that of the pool.
    Above the error of an implementation, that implementation has the same arrays."""

    @property
    def size(self) -> int:
        """Valid nodes, the root included."""
        return sum(self.valid)

    def path(self, node: int) -> TokenPath:
        """Tokens below the root down to `node`; empty for the root."""
        return () if node == 0 else (*self.path(self.parents[node]), self.tokens[node])

    def paths(self) -> set[TokenPath]:
        """The tree without its node numbers."""
        return {self.path(node) for node in range(1, self.size)}


class _Gaps:
    def __init__(self) -> None:
        self.gap = self.order_gap = math.inf

    def best(self, scores: Sequence[np.float32], count: int, ordered: bool) -> list[int]:
        """Indices of the `count` highest, best first; ties to the lower index (`sorted` is stable)."""
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
        taken, left = ranked[:count], ranked[count:]
        across = [abs(float(scores[i]) - float(scores[j])) for i in taken for j in left]
        among = [abs(float(scores[i]) - float(scores[j])) for i, j in pairwise(taken)] if ordered else []
        self.gap = min([self.gap, *filter(None, across)])
        self.order_gap = min([self.order_gap, *filter(None, across), *filter(None, among)])
        return taken


def grow_tree(
    log_probs: LogProbsFn,
    root: int,
    steps: int,
    topk: int,
    width: int,
    *,
    target_ids: Sequence[int] | np.ndarray | None = None,
) -> DraftTree:
    """EAGLE-2's tree of `width` nodes, the root included, from log-probabilities alone.

    Ties go to the lower draft id within a node's continuations, and to the lower pool index between candidates.
    Continuations of probability 0, and those that a vocabulary smaller than `topk` lacks, are no candidates.

    Args:
        log_probs: path below the root -> log-probabilities [W] of the next token, in the draft's ids.
        target_ids: [W], the target's id of each; None: the same.

    Raises:
        ValueError: more nodes than the pool can ever hold.
    """
    places = topk + (steps - 1) * topk * topk
    if width - 1 > places:
        raise ValueError(f"{width - 1} nodes below the root, but a pool of {places}")
    gaps = _Gaps()
    pool: list[Candidate] = []

    def path_of(index: int) -> TokenPath:
        return () if index == NO_PARENT else (*path_of(pool[index].parent), pool[index].token)

    beam = [NO_PARENT]
    for level in range(1, steps + 1):
        first = len(pool)
        for parent in beam:
            score = np.float32(0) if parent == NO_PARENT else np.float32(pool[parent].score)
            following = np.asarray(log_probs(path_of(parent)), np.float32)
            possible = [i for i in range(len(following)) if following[i] > -np.inf]
            for i in gaps.best([following[i] for i in possible], topk, ordered=True):
                draft_id = possible[i]
                token = draft_id if target_ids is None else int(target_ids[draft_id])
                pool.append(Candidate(token, parent, level, float(score + following[draft_id])))
        if level < steps:
            new = list(range(first, len(pool)))
            beam = [new[i] for i in gaps.best([np.float32(pool[j].score) for j in new], topk, ordered=True)]
    chosen = sorted(gaps.best([np.float32(candidate.score) for candidate in pool], width - 1, ordered=False))

    node_of = {NO_PARENT: 0} | {index: node for node, index in enumerate(chosen, 1)}
    missing = width - 1 - len(chosen)
    parents = [NO_PARENT, *(node_of[pool[i].parent] for i in chosen), *[NO_PARENT] * missing]
    depth = [0, *(pool[i].depth for i in chosen), *[0] * missing]
    return DraftTree(
        tokens=[root, *(pool[i].token for i in chosen), *[NO_TOKEN] * missing],
        parents=parents,
        depth=depth,
        valid=[True] * (width - missing) + [False] * missing,
        scores=[0.0, *(pool[i].score for i in chosen), *[-math.inf] * missing],
        pool=pool,
        chosen=chosen,
        gap=gaps.gap,
        order_gap=gaps.order_gap,
    )


def draft_tree(
    tensors: Tensors,
    spec: HeadSpec,
    tokens: Sequence[int],
    root: int,
    features: np.ndarray,
    *,
    embedding: np.ndarray,
    head: np.ndarray,
    steps: int,
    topk: int,
    width: int,
    token_map: Sequence[int] | None = None,
    cap: float | None = None,
    dtype: type = np.float32,
) -> DraftTree:
    """What the head proposes after `tokens` (committed, x_0..x_{n-1}) and `root` (x_n).

    Slot t is (features[t], embedding of x_{t+1}) at RoPE position t; the last slot predicts the root's children. A node
    of level l is (its parent's output, embedding of its token) at position n + l - 1, and attends to the n slots, its
    ancestors and itself. The parent of a level-1 node is the last slot.

    Args:
        features: [n, F], the target's: after its final norm; for EAGLE-3 the auxiliary layers side by side.
        embedding, head: [V, M]; the target's, as far as the draft has none of its own.
    """
    n = len(tokens)
    shifted = [*tokens[1:], root]
    ids = target_ids(tensors, spec, len(embedding), token_map)
    outputs: dict[TokenPath, np.ndarray] = {}

    def output(path: TokenPath) -> np.ndarray:
        """Of the item that reads the path's last token; of the last slot for the empty path."""
        if path not in outputs:
            above = [output(path[:i]) for i in range(len(path))]
            size = n + len(path)
            outputs[path] = head_forward(
                tensors,
                spec,
                embedding[[*shifted, *path]],
                [*features, *above],
                list(range(size)),
                [set(range(item + 1)) for item in range(size)],  # along one path, the tree is a causal sequence
                [False] * n + [True] * len(path),
                dtype,
            )[-1]
        return outputs[path]

    def log_probs(path: TokenPath) -> np.ndarray:
        logits = draft_logits(tensors, spec, output(path), head, token_map)
        return log_softmax(logits if cap is None else cap * np.tanh(logits / cap))

    return grow_tree(
        log_probs,
        root,
        steps,
        topk,
        width,
        target_ids=ids,
    )


def llama_features(
    params: Mapping, config, tokens: Sequence[int], aux_layers: Sequence[int] | None = None
) -> np.ndarray:
    """[n, F], float32: the outputs of layers `aux_layers` (0-based) side by side, or for None the final norm's output.

    `params` and `config` are the target's, as in `oracle.llama_states`.
    """
    states = oracle.llama_states(params, config, tokens)
    return (states[-1] if aux_layers is None else np.concatenate([states[i + 1] for i in aux_layers], axis=-1)).astype(
        np.float32
    )


# Trees of an implementation against the oracle's.

ERROR = 1e-4
"""Tolerance of scores. Where the oracle's own gap is smaller, a tree may differ."""

TRACED = [
    ([4, 8, 15, 16, 23], oracle.Sampling(max_tokens=20)),
    ([7], oracle.Sampling(max_tokens=20, temperature=1.0, seed=1)),
]
"""Requests of the runs that `check_steps` compares."""


def check_tree(tree: Any, row: int, expected: DraftTree) -> bool:
    """Compares a row of a `specjax.DraftTree`: structure exactly, scores to `ERROR`. False if the oracle's gap is too
    small to decide."""
    if expected.gap <= ERROR:
        return False
    assert tree.valid[row].tolist() == expected.valid
    paths: list[TokenPath] = [()]
    for node in range(1, expected.size):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node
        paths.append((*paths[parent], int(tree.tokens[row, node])))
    assert tree.depth[row, : expected.size].tolist() == [len(path) for path in paths]
    scores = dict(zip(paths, tree.scores[row].tolist(), strict=False))
    assert scores.keys() == {expected.path(node) for node in range(expected.size)}
    wanted = [expected.scores[node] for node in range(expected.size)]
    np.testing.assert_allclose([scores[expected.path(node)] for node in range(expected.size)], wanted, atol=ERROR)
    if expected.order_gap > ERROR:
        assert tree.tokens[row].tolist() == expected.tokens
        assert tree.parents[row].tolist() == expected.parents
    return True


def start(runner: Any, requests: Sequence[tuple[list[int], oracle.Sampling]] = TRACED) -> dict[int, list[int]]:
    """Admits and prefills requests in chunks of two tokens; returns each row's text with its first drawn token."""
    for row, (prompt, request) in enumerate(requests):
        runner.admit(row, prompt, request)
    first = runner.prefill([prompt for prompt, _ in requests], chunk=2)
    return {row: [*prompt, int(first.tokens[row, 0])] for row, (prompt, _) in enumerate(requests)}


def check_steps(
    runner: Any, texts: dict[int, list[int]], expected: Callable[[int, list[int]], DraftTree | None], steps: int = 5
) -> tuple[int, int]:
    """Runs steps of a `toy_models.Runner` with traces, and compares the trees; appends what they emit to `texts`.

    Args:
        texts: the text of each row that runs.
        expected: (row, text) -> the oracle's tree; None: nothing may be drafted.

    Returns:
        The number of trees that were compared, and the number of steps without a tree.
    """
    compared = undrafted = 0
    for _ in range(steps):
        output = runner.step([row in texts for row in range(runner.rows)])
        for row, text in texts.items():
            tree = expected(row, text)
            if tree is None:
                assert output.trace.tree.valid[row].sum() == 1
                undrafted += 1
            else:
                compared += check_tree(output.trace.tree, row, tree)
            text += output.tokens[row, : output.emitted[row]].tolist()
    return compared, undrafted


# Drafts that are a table: log-probabilities given the last token, so that a tree can be checked by eye.
