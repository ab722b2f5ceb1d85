"""The rules of docs/design.md in plain Python and numpy: one request at a time, one function per rule.

Nothing here imports jax or specjax. Tests compare the real modules with this file, so it favours the obvious
over the fast: dicts, lists, loops, and the whole sequence recomputed for every token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

RUNNING, STOP, LENGTH = 0, 1, 2
NO_PARENT = -1

Tokens = Sequence[int]
Mask = np.ndarray | None
LogitsFn = Callable[[Tokens], np.ndarray]  # tokens so far -> logits [V] of the next one


# Noise: threefry2x32, keyed by (seed, position) as `jax.random.fold_in` keys it, counted by token id.

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key: tuple[int, int], x0: np.ndarray, x1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011) on uint32 counters."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x0 = np.asarray(x0, np.uint64) + keys[0] & _MASK
    x1 = np.asarray(x1, np.uint64) + keys[1] & _MASK
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1 & _MASK
            x1 = (x1 << np.uint64(rotation) | x1 >> np.uint64(32 - rotation)) & _MASK
            x1 = x1 ^ x0
        x0 = x0 + keys[(block + 1) % 3] & _MASK
        x1 = x1 + (keys[(block + 2) % 3] + block + 1) & _MASK
    return x0.astype(np.uint32), x1.astype(np.uint32)


def key_words(seed: int) -> tuple[int, int]:
    """(high, low) 32-bit words of the seed as a 64-bit integer, two's complement when it is negative."""
    return seed >> 32 & _MASK, seed & _MASK


def fold_in(key: tuple[int, int], position: int) -> tuple[int, int]:
    high, low = threefry2x32(key, np.zeros(1), np.array([position & _MASK]))
    return int(high[0]), int(low[0])


def gumbel(key: tuple[int, int], size: int) -> np.ndarray:
    """Uniform numbers from the first 48 bits of each token's 64, the middle of the interval; float64."""
    high, low = threefry2x32(key, np.zeros(size), np.arange(size))
    bits = (high.astype(np.uint64) << np.uint64(16)) + (low.astype(np.uint64) >> np.uint64(16))
    return -np.log(-np.log1p(-(bits + 0.5) / 2**48))


def noise(seed: int, position: int, size: int) -> np.ndarray:
    """The noise of the token drawn at ``position``, float32 [V]."""
    return gumbel(fold_in(key_words(seed), position), size).astype(np.float32)


# The draw.


@dataclass(frozen=True)
class Sampling:
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0  # <= 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    max_tokens: int = 16


@dataclass(frozen=True)
class Draw:
    token: int
    gap: float  # best minus second best perturbed logit, or the distance to a truncation boundary if that is smaller


def edited_logits(
    logits: np.ndarray, params: Sampling, prompt: Tokens, generated: Tokens, allowed: Mask = None
) -> np.ndarray:
    """Applies the rule before the temperature: bias, penalties, masks. float32."""
    edited = np.array(logits, np.float32)
    for token, bias in params.bias.items():
        edited[token] += np.float32(bias)
    for token in {*prompt, *generated}:
        penalty = np.float32(params.repetition_penalty)
        edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
    for token, count in Counter(generated).items():
        edited[token] -= np.float32(params.frequency_penalty) * np.float32(count) + np.float32(params.presence_penalty)
    if len(generated) < params.min_tokens:
        edited[list(params.stop_ids)] = -np.inf
    if allowed is not None:
        edited[~allowed] = -np.inf
    return edited


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def truncated_logits(edited: np.ndarray, params: Sampling) -> tuple[np.ndarray, float]:
    """Applies temperature, top-k, top-p, min-p (-inf for removed tokens). Also returns the distance to a boundary."""
    scaled = np.asarray(edited, np.float32) / np.float32(params.temperature)
    order, margin = [int(i) for i in np.argsort(-scaled, kind="stable") if scaled[i] > -np.inf], math.inf
    if 0 < params.top_k < len(order):
        margin = min(margin, _nonzero(scaled[order[params.top_k - 1]] - scaled[order[params.top_k]]))
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = np.cumsum(softmax(scaled[order]))
        keep = max(1, int(np.sum(mass < params.top_p)) + 1)
        margin = min(margin, float(np.min(np.abs(mass - params.top_p))))
        if keep < len(order):  # exact ties go by id; near-ties by rounding
            margin = min(margin, _nonzero(scaled[order[keep - 1]] - scaled[order[keep]]))
        order = order[:keep]
    if params.min_p > 0:
        relative = softmax(scaled[order]) / softmax(scaled[order]).max()
        margin = min(margin, float(np.min(np.abs(relative - params.min_p))))
        order = [token for token, ratio in zip(order, relative, strict=True) if ratio >= params.min_p]
    kept = np.full_like(scaled, -np.inf)
    kept[order] = scaled[order]
    return kept, margin


def _nonzero(gap: float) -> float:
    """Distance of two values; infinite for exact ties, which go by id in all implementations."""
    return float(gap) if gap else math.inf


def distribution(logits: np.ndarray, params: Sampling, prompt: Tokens, generated: Tokens) -> np.ndarray:
    """Distribution of the next token, float64 [V]."""
    edited = edited_logits(logits, params, prompt, generated)
    if params.temperature == 0:
        return np.eye(len(edited))[int(np.argmax(edited))]
    return softmax(truncated_logits(edited, params)[0])


def draw(logits: np.ndarray, params: Sampling, prompt: Tokens, generated: Tokens, allowed: Mask = None) -> Draw:
    """The token at position ``len(prompt) + len(generated)``; ties go to the lower id."""
    scores, margin = edited_logits(logits, params, prompt, generated, allowed), math.inf
    if params.temperature > 0:
        scores, margin = truncated_logits(scores, params)
        scores = scores + noise(params.seed, len(prompt) + len(generated), len(scores))
    token = int(np.argmax(scores))
    gap = _nonzero(scores[token] - np.delete(scores, token).max())
    return Draw(token, min(gap, margin))


def raw_logprobs(logits: np.ndarray) -> np.ndarray:
    return np.log(softmax(logits))


# Trees. Node 0 is the root; a parent is an index of an earlier node.


@dataclass(frozen=True)
class Tree:
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] = ()


def chain_tree(root: int, tokens: Tokens) -> Tree:
    return Tree((root, *tokens), tuple(range(-1, len(tokens))))


def path_nodes(tree: Tree, node: int) -> list[int]:
    """Nodes from the root to ``node``, inclusive."""
    return [0] if node == 0 else [*path_nodes(tree, tree.parents[node]), node]


def path_tokens(tree: Tree, node: int) -> list[int]:
    """Tokens from below the root to ``node``; empty for the root."""
    return [tree.tokens[i] for i in path_nodes(tree, node)[1:]]


def paths(tree: Tree) -> set[tuple[int, ...]]:
    """The token paths of all nodes except the root."""
    return {tuple(path_tokens(tree, node)) for node in range(1, len(tree.tokens))}


def depths(tree: Tree) -> list[int]:
    return [len(path_nodes(tree, node)) - 1 for node in range(len(tree.tokens))]


def ancestor_matrix(tree: Tree) -> np.ndarray:
    """[i, j]: node j is node i or an ancestor."""
    size = len(tree.tokens)
    return np.array([[j in path_nodes(tree, i) for j in range(size)] for i in range(size)])


def pack_bits(matrix: np.ndarray) -> np.ndarray:
    """bool [N, C] -> uint32 [N, ceil(C / 32)]: bit ``j % 32`` of word ``j // 32``."""
    words = np.zeros((matrix.shape[0], -(-matrix.shape[1] // 32)), np.uint32)
    for i, j in np.argwhere(matrix):
        words[i, j // 32] |= np.uint32(1 << (int(j) % 32))
    return words


def problems(tree: Tree) -> list[str]:
    """Lists violations: one root, parents before children, distinct siblings."""
    errors = []
    if tree.parents[0] != NO_PARENT:
        errors.append("node 0 is not the root")
    for node, parent in list(enumerate(tree.parents))[1:]:
        if not 0 <= parent < node:
            errors.append(f"node {node} has parent {parent}")
    siblings = Counter(zip(tree.parents[1:], tree.tokens[1:], strict=True))
    errors += [f"token {token} twice under node {parent}" for (parent, token), count in siblings.items() if count > 1]
    return errors


# Verification.


def walk(tree: Tree, drawn: Tokens) -> list[int]:
    """Accepted nodes, root first: each next node is the child with the drawn token."""
    node, accepted = 0, [0]
    while True:
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        node = next((child for child in children if tree.tokens[child] == drawn[node]), None)
        if node is None:
            return accepted
        accepted.append(node)


def truncate(tokens: Tokens, stop_ids: Tokens, budget: int) -> tuple[list[int], int]:
    """Emitted tokens among the accepted ones and the bonus, and the finish reason."""
    first_stop = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    emitted = list(tokens[: min(len(tokens), first_stop + 1, budget)])
    if emitted and emitted[-1] in stop_ids:
        return emitted, STOP
    return emitted, LENGTH if len(emitted) == budget else RUNNING


def expected_accepted(tree: Tree, probabilities: Callable[[list[int]], np.ndarray]) -> float:
    """E[accepted drafts]: the sum over nodes of the product of probabilities along the node's path."""
    runs = [path_tokens(tree, node) for node in range(1, len(tree.tokens))]
    return sum(math.prod(float(probabilities(run[:i])[token]) for i, token in enumerate(run)) for run in runs)


# Decoding.


@dataclass
class Generation:
    tokens: list[int]
    finish: int
    gaps: list[float]  # of each token's draw
    accepted: list[int] = field(default_factory=list)  # drafts that the walk accepted, per verification
    emitted: list[int] = field(default_factory=list)  # tokens emitted, per verification


def _prefill(logits_fn: LogitsFn, prompt: Tokens, params: Sampling) -> Generation:
    first = draw(logits_fn(list(prompt)), params, prompt, [])
    tokens, finish = truncate([first.token], params.stop_ids, params.max_tokens)
    return Generation(tokens, finish, [first.gap])


def generate_plain(logits_fn: LogitsFn, prompt: Tokens, params: Sampling) -> Generation:
    """Decodes one token at a time."""
    result = _prefill(logits_fn, prompt, params)
    while result.finish == RUNNING:
        drawn = draw(logits_fn([*prompt, *result.tokens]), params, prompt, result.tokens)
        tokens, result.finish = truncate([drawn.token], params.stop_ids, params.max_tokens - len(result.tokens))
        result.tokens += tokens
        result.gaps.append(drawn.gap)
    return result


def generate_speculative(
    logits_fn: LogitsFn, propose: Callable[[list[int]], Tree], prompt: Tokens, params: Sampling
) -> Generation:
    """``propose(prompt + emitted) -> tree`` whose root is the last emitted token; every node is drawn from."""
    result = _prefill(logits_fn, prompt, params)
    while result.finish == RUNNING:
        tree = propose([*prompt, *result.tokens])
        draws = []
        for node in range(len(tree.tokens)):
            generated = result.tokens + path_tokens(tree, node)
            draws.append(draw(logits_fn([*prompt, *generated]), params, prompt, generated))
        nodes = walk(tree, [d.token for d in draws])
        budget = params.max_tokens - len(result.tokens)
        emitted, result.finish = truncate([draws[node].token for node in nodes], params.stop_ids, budget)
        result.tokens += emitted
        result.gaps += [draws[node].gap for node in nodes[: len(emitted)]]
        result.accepted.append(len(nodes) - 1)
        result.emitted.append(len(emitted))
    return result


# A dense Llama: no cache, no pages, float64.


def rope_frequencies(head_dim: int, rope) -> np.ndarray:
    """[E/2]. ``rope`` has the fields of ``specjax.config.RopeConfig``."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.scaling != "llama3":
        return frequencies / (rope.factor if rope.scaling == "linear" else 1)
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # within the original context
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """[n, ..., E]: dimension i is paired with i + E/2."""
    angles = (positions[:, None] * frequencies).reshape(len(positions), *(1,) * (x.ndim - 2), -1)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def llama_states(params: Mapping, config, tokens: Tokens) -> list[np.ndarray]:
    """[embedding, output of layer 0, ..., output of the last layer, after the final norm], each [n, M]."""
    params = _as_float64(params)
    n, size = len(tokens), config.head_dim
    positions, frequencies = np.arange(n), rope_frequencies(size, config.rope)
    x = params["embed"][list(tokens)]
    states = [x]
    for index in range(config.num_layers):
        layer = params[f"layers_{index}"]
        qkv = np.einsum("nm,mkge->nkge", rms_norm(x, layer["attention_norm"], config.norm_epsilon), layer["qkv"])
        qkv = qkv + layer.get("qkv_bias", 0)
        query, key, value = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        query, key = rotate(query, positions, frequencies), rotate(key, positions, frequencies)
        scores = np.einsum("nkge,cke->nkgc", query, key) / math.sqrt(size)
        scores = np.where(np.tri(n, dtype=bool)[:, None, None, :], scores, -np.inf)
        attended = np.einsum("nkgc,cke->nkge", softmax(scores), value)
        x = x + np.einsum("nkge,kgem->nm", attended, layer["output"]) + layer.get("output_bias", 0)
        gate, up = np.einsum("nm,mti->tni", rms_norm(x, layer["mlp_norm"], config.norm_epsilon), layer["gate_up"])
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]
        states.append(x)
    return [*states, rms_norm(x, params["final_norm"], config.norm_epsilon)]


def llama_logits(params: Mapping, config, tokens: Tokens) -> np.ndarray:
    """[n, V], float64."""
    head = params["embed"].T if config.tied_embeddings else params["head"]
    return llama_states(params, config, tokens)[-1] @ np.asarray(head, np.float64)


def _as_float64(tree):
    return {k: _as_float64(v) for k, v in tree.items()} if isinstance(tree, Mapping) else np.asarray(tree, np.float64)
