"""Which tensor of a Hugging Face checkpoint goes to which part of which parameter leaf.

Tables only: nothing here reads a file. A tensor's axes are products of dimension letters (``"KGE M"`` is the
matrix ``[K*G*E, M]``); splitting the products and transposing to the leaf's order is the whole transformation,
and ``specjax.models`` needs no other knowledge of how torch stores a layer.

Worked example, H = 4 query heads, K = 2 key/value heads, so G = 2: row ``h*E + e`` of ``q_proj.weight`` is
query head ``h = k*G + g``, that is ``(k, g, e)`` of ``"KGE"``; it becomes ``qkv[:, k, g, e]``. Keys go to
``qkv[:, k, G, e]`` and values to ``qkv[:, k, G + 1, e]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.config import ModelConfig

Dims = Mapping[str, int]
Index = Callable[[Dims], Any]

HEAD_TENSOR = "lm_head.weight"
EMBED_TENSOR = "model.embed_tokens.weight"


def _everything(d: Dims) -> Any:
    return ...


@dataclass(frozen=True)
class Rule:
    """One tensor of the checkpoint.

    Attributes:
      tensor: its name in the file, after the layer's prefix if it belongs to a layer.
      split: its axes in the file, letters of one axis written together: ``"KGE M"``.
      leaf: name of the parameter it fills, or a part of which it fills.
      order: the letters in the order the leaf has them.
      part: which part of the leaf, as an index computed from the sizes of the letters.
    """

    tensor: str
    split: str
    leaf: str
    order: str
    part: Index = _everything


# Q = G + 2 is the axis of a key/value group: its query heads, then its key, then its value. Two = gate and up.
LEAVES: dict[str, str] = {
    "embed": "V M",
    "attention_norm": "M",
    "qkv": "M K Q E",
    "qkv_bias": "K Q E",
    "output": "K G E M",
    "output_bias": "M",
    "mlp_norm": "M",
    "gate_up": "M 2 I",
    "gate_up_bias": "2 I",
    "down": "I M",
    "down_bias": "M",
    "final_norm": "M",
    "head": "M V",
}

MODEL_RULES = (
    Rule(EMBED_TENSOR, "V M", "embed", "VM"),
    Rule("model.norm.weight", "M", "final_norm", "M"),
)
HEAD_RULES = (Rule(HEAD_TENSOR, "V M", "head", "MV"),)

LAYER_PREFIX = "model.layers.{}."
LAYER_RULES = (
    Rule("input_layernorm.weight", "M", "attention_norm", "M"),
    Rule("self_attn.q_proj.weight", "KGE M", "qkv", "MKGE", lambda d: np.s_[:, :, : d["G"]]),
    Rule("self_attn.k_proj.weight", "KE M", "qkv", "MKE", lambda d: np.s_[:, :, d["G"]]),
    Rule("self_attn.v_proj.weight", "KE M", "qkv", "MKE", lambda d: np.s_[:, :, d["G"] + 1]),
    Rule("self_attn.o_proj.weight", "M KGE", "output", "KGEM"),
    Rule("post_attention_layernorm.weight", "M", "mlp_norm", "M"),
    Rule("mlp.gate_proj.weight", "I M", "gate_up", "MI", lambda d: np.s_[:, 0]),
    Rule("mlp.up_proj.weight", "I M", "gate_up", "MI", lambda d: np.s_[:, 1]),
    Rule("mlp.down_proj.weight", "M I", "down", "IM"),
)
ATTENTION_BIAS_RULES = (
    Rule("self_attn.q_proj.bias", "KGE", "qkv_bias", "KGE", lambda d: np.s_[:, : d["G"]]),
    Rule("self_attn.k_proj.bias", "KE", "qkv_bias", "KE", lambda d: np.s_[:, d["G"]]),
    Rule("self_attn.v_proj.bias", "KE", "qkv_bias", "KE", lambda d: np.s_[:, d["G"] + 1]),
    Rule("self_attn.o_proj.bias", "M", "output_bias", "M"),
)
MLP_BIAS_RULES = (
    Rule("mlp.gate_proj.bias", "I", "gate_up_bias", "I", lambda d: np.s_[0]),
    Rule("mlp.up_proj.bias", "I", "gate_up_bias", "I", lambda d: np.s_[1]),
    Rule("mlp.down_proj.bias", "M", "down_bias", "M"),
)

# Tensors that a file may hold and that carry nothing: buffers that old versions of transformers saved.
IGNORED_TENSORS = (re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),)


@dataclass(frozen=True)
class Placement:
    """A rule with sizes filled in: ``leaf[part] = tensor.reshape(split).transpose(axes)``."""

    tensor: str
    shape: tuple[int, ...]  # in the file
    leaf: tuple[str, ...]  # path in the parameter tree
    leaf_shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    part: Any

    def place(self, leaf: np.ndarray, tensor: np.ndarray) -> None:
        """Write ``tensor [shape]`` into its part of ``leaf [leaf_shape]``, cast to the leaf's dtype."""
        axis = self.axes.index(0)
        source = np.moveaxis(tensor.reshape(self.split).transpose(self.axes), axis, 0)
        target = np.moveaxis(leaf[self.part], axis, 0)
        # A few rows of the file at a time stay in the cache while they are transposed: 4 times as fast in bfloat16.
        for start in range(0, len(source), 64):
            target[start : start + 64] = source[start : start + 64]


def dimensions(config: ModelConfig) -> dict[str, int]:
    """Sizes of the dimension letters."""
    return {
        "V": config.vocab_size,
        "M": config.hidden_size,
        "I": config.intermediate_size,
        "K": config.num_kv_heads,
        "G": config.group_size,
        "E": config.head_dim,
        "Q": config.group_size + 2,
        "2": 2,
    }


def placements(config: ModelConfig) -> list[Placement]:
    """Every tensor a checkpoint of this model must hold, in the order of the parameter tree.

    Raises:
      CheckpointError: the family has no table.
    """
    if config.family != "llama":
        raise CheckpointError(
            f"no table of tensor names for the model family {config.family!r}; there is one for: llama"
        )
    sizes = dimensions(config)
    return [placement(rule, prefix, path, sizes) for rule, prefix, path in _rules(config)]


def is_ignored(tensor: str, *, tied: bool) -> bool:
    """Whether a tensor that no rule names may be left unread."""
    if tied and tensor == HEAD_TENSOR:
        return True
    return any(pattern.fullmatch(tensor) for pattern in IGNORED_TENSORS)


def _rules(config: ModelConfig) -> Iterator[tuple[Rule, str, tuple[str, ...]]]:
    layer_rules = LAYER_RULES
    if config.attention_bias:
        layer_rules += ATTENTION_BIAS_RULES
    if config.mlp_bias:
        layer_rules += MLP_BIAS_RULES
    for rule in MODEL_RULES:
        yield rule, "", ()
    for layer in range(config.num_layers):
        for rule in layer_rules:
            yield rule, LAYER_PREFIX.format(layer), (f"layers_{layer}",)
    if not config.tied_embeddings:
        for rule in HEAD_RULES:
            yield rule, "", ()


def placement(
    rule: Rule, prefix: str, path: tuple[str, ...], sizes: Dims, leaves: Mapping[str, str] = LEAVES
) -> Placement:
    """``rule`` with the sizes of the letters filled in; ``leaves`` gives the letters of each leaf."""
    letters = rule.split.replace(" ", "")
    return Placement(
        tensor=prefix + rule.tensor,
        shape=tuple(prod(sizes[letter] for letter in axis) for axis in rule.split.split()),
        leaf=(*path, rule.leaf),
        leaf_shape=tuple(sizes[letter] for letter in leaves[rule.leaf].split()),
        split=tuple(sizes[letter] for letter in letters),
        axes=tuple(letters.index(letter) for letter in rule.order),
        part=rule.part(sizes),
    )
