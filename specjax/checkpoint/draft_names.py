"""Which tensor of a draft head goes to which part of which leaf, whatever dialect it was saved in.

Tables, as in ``mappings``, whose rules for a decoder layer are used again here. Names are first brought to one form,
that of the published EAGLE-3 heads (``fc``, ``midlayer``, ``norm``, ``lm_head``, ``embed_tokens``, ``d2t``, ``t2d``),
and fused projections are cut into views. The same tables serve to write a head. Knows nothing of files, configs or the
target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from specjax.checkpoint.errors import CheckpointError, listed
from specjax.checkpoint.mappings import (
    ATTENTION_BIAS_RULES,
    LAYER_RULES,
    LEAVES,
    MLP_BIAS_RULES,
    Placement,
    Rule,
    placement,
)
from specjax.config import HeadConfig

LAYER = "midlayer."
Q, K, V, O = (f"{LAYER}self_attn.{part}_proj" for part in "qkvo")
QKV = f"{LAYER}self_attn.qkv_proj"
GATE, UP, GATE_UP, DOWN = (f"{LAYER}mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down"))
FC, EMBED, HEAD = "fc.weight", "embed_tokens.weight", "lm_head.weight"
OFFSETS, MASK = "d2t", "t2d"
TOKEN_NORM = f"{LAYER}token_layernorm.weight"  # only MTP layers have it

# speculators' converter renamed EAGLE-1's fc and layers.0; its EAGLE-3 heads and NeMo's have layers.0.
# MiMo has its MTP layer's two halves, what comes before the decoder layer and the layer itself, under one prefix.
_RENAMED = (
    (r"model\.", ""), (r"layers\.0\.", LAYER), (r"transformer\.", LAYER), (r"fusion_fc\.", "fc."),
    (r"mtp_layers\.0\.input_proj\.", "fc."), (r"mtp_layers\.0\.", LAYER),
)  # fmt: skip
_WRITTEN = {
    "eagle": ((LAYER, "layers.0."),),
    "eagle3": (),
    "mtp": (("fc.", "model.mtp_layers.0.input_proj."), (LAYER, "model.mtp_layers.0.")),
}
_IGNORED = re.compile(re.escape(LAYER) + r"self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq")

# J is the input of q, k and v: 2M for EAGLE-3, else M. F is the input of fc, W the draft vocabulary.
HEAD_LEAVES = LEAVES | {
    "fc": "F M",
    "fc_bias": "M",
    "embedding_norm": "M",
    "feature_norm": "M",
    "qkv": "J K Q E",
    "head": "M W",
}
_FC = Rule(FC, "M F", "fc", "FM")
_FC_BIAS = Rule("fc.bias", "M", "fc_bias", "M")
_NORMS = {
    "eagle": (),
    "eagle3": (
        Rule(f"{LAYER}input_layernorm.weight", "M", "embedding_norm", "M"),
        Rule(f"{LAYER}hidden_norm.weight", "M", "feature_norm", "M"),
        Rule("norm.weight", "M", "final_norm", "M"),
    ),
    "mtp": (
        Rule(TOKEN_NORM, "M", "embedding_norm", "M"),
        Rule(f"{LAYER}hidden_layernorm.weight", "M", "feature_norm", "M"),
        Rule(f"{LAYER}input_layernorm.weight", "M", "attention_norm", "M"),
        Rule(f"{LAYER}final_layernorm.weight", "M", "final_norm", "M"),
    ),
}
_QKV = tuple(
    replace(rule, tensor=LAYER + rule.tensor, split=rule.split.replace("M", "J"), order=rule.order.replace("M", "J"))
    for rule in LAYER_RULES
    if rule.leaf == "qkv"
)
_AFTER_QKV = tuple(
    replace(rule, tensor=LAYER + rule.tensor) for rule in LAYER_RULES if rule.leaf not in ("qkv", "attention_norm")
)
_BIASES = tuple(replace(rule, tensor=LAYER + rule.tensor) for rule in ATTENTION_BIAS_RULES + MLP_BIAS_RULES)
_EMBED = Rule(EMBED, "V M", "embed", "VM")
_HEAD = Rule(HEAD, "W M", "head", "MW")


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of a head under their common names.

    Attributes:
      arrays: read-only views of the files.
      names: common name -> name in the file, for messages.
    """

    arrays: Mapping[str, np.ndarray]
    names: Mapping[str, str]

    def said(self, name: str) -> str:
        """``name`` as the file has it, with its shape."""
        return f"{self.names.get(name, name)} {list(self.arrays[name].shape)}"

    def has(self, *names: str) -> bool:
        """Whether any of ``names`` is there."""
        return any(name in self.arrays for name in names)

    def need(self, *names: str) -> None:
        """Refuse a head that lacks one of ``names``."""
        if missing := [name for name in names if name not in self.arrays]:
            raise CheckpointError(
                f"missing tensors: {listed(missing)}; the files hold {listed(self.names.values()) or 'none'}"
            )

    def matrix(self, name: str) -> np.ndarray:
        """The tensor ``name``, which must be there and have two dimensions."""
        self.need(name)
        if self.arrays[name].ndim != 2 or 0 in self.arrays[name].shape:
            raise CheckpointError(f"{self.said(name)} must have two dimensions")
        return self.arrays[name]


def common_names(tensors: Mapping[str, np.ndarray]) -> HeadTensors:
    """``tensors`` under their common names, without those that carry nothing.

    Raises:
      CheckpointError: there are several layers, or two tensors of one meaning.
    """
    layers = {int(found[1]) for name in tensors if (found := re.match(r"(?:model\.)?(?:mtp_)?layers\.(\d+)\.", name))}
    if len(layers) > 1:
        raise CheckpointError(f"it has {len(layers)} decoder layers; heads of 1 layer are supported")
    arrays: dict[str, np.ndarray] = {}
    names: dict[str, str] = {}
    for given, array in tensors.items():
        name = given
        for pattern, replacement in _RENAMED:
            name = re.sub(f"^{pattern}", replacement, name)
        if name in names:
            raise CheckpointError(f"tensors {names[name]} and {given} mean the same; one of the two must go")
        if not _IGNORED.fullmatch(name):
            arrays[name], names[name] = array, given
    return HeadTensors(arrays, names)


def file_name(kind: str, name: str) -> str:
    """The common name ``name`` as heads of that kind are published; ``common_names`` leads back."""
    for common, published in _WRITTEN[kind]:
        if name.startswith(common):
            return published + name.removeprefix(common)
    return name


def unfused(tensors: HeadTensors, query_rows: int, kv_rows: int) -> HeadTensors:
    """``tensors`` with ``qkv_proj`` (rows of q, then k, then v) and ``gate_up_proj`` (gate, then up) cut apart."""
    arrays, names = dict(tensors.arrays), dict(tensors.names)
    for kind in ("weight", "bias"):
        for fused, parts in ((QKV, (Q, K, V)), (GATE_UP, (GATE, UP))):
            if (array := arrays.pop(f"{fused}.{kind}", None)) is None:
                continue
            given = names.pop(f"{fused}.{kind}")
            if clash := [f"{part}.{kind}" for part in parts if f"{part}.{kind}" in names]:
                raise CheckpointError(f"tensors {given} and {names[clash[0]]} mean the same; one of the two must go")
            cuts = [query_rows, query_rows + kv_rows] if fused == QKV else [array.shape[0] // 2]
            for part, rows in zip(parts, np.split(array, cuts), strict=True):
                arrays[f"{part}.{kind}"], names[f"{part}.{kind}"] = rows, f"{given} ({part.split('.')[-1]})"
    return HeadTensors(arrays, names)


def head_placements(config: HeadConfig, target_vocab_size: int) -> list[Placement]:
    """Every tensor that a head of this description must hold, ``ids`` apart, in the order of its parameters."""
    wide = config.kind == "eagle3"
    rules = [_FC, *([_FC_BIAS] if config.fc_bias else []), *_NORMS[config.kind], *_QKV, *_AFTER_QKV]
    present = {
        "qkv_bias": config.attention_bias,
        "output_bias": config.output_bias,
        "gate_up_bias": config.mlp_bias,
        "down_bias": config.mlp_bias,
    }
    rules += [rule for rule in _BIASES if present[rule.leaf]]
    rules += [_EMBED] if config.own_embedding else []
    rules += [_HEAD] if config.own_head else []
    sizes = {
        "M": config.hidden_size,
        "J": config.hidden_size * (2 if wide else 1),
        "F": config.feature_size if wide else 2 * config.hidden_size,
        "I": config.intermediate_size,
        "K": config.num_kv_heads,
        "G": config.group_size,
        "Q": config.group_size + 2,
        "E": config.head_dim,
        "V": target_vocab_size,
        "W": config.vocab_size,
        "2": 2,
    }
    return [placement(rule, "", (), sizes, HEAD_LEAVES) for rule in rules]


def taken(part: Placement, leaf: np.ndarray) -> np.ndarray:
    """The tensor ``[part.shape]`` that ``part.place`` would write into ``leaf [part.leaf_shape]``: its inverse."""
    return leaf[part.part].transpose(np.argsort(part.axes)).reshape(part.shape)
