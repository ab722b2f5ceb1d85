"""The formats in which draft heads were published, brought to one form, that of ``specjax.models.head_spec``.

Tensors differ in prefixes, and some projections are fused, which are cut into views. ``speculators`` and NeMo nest the
layer's own settings in config.json, in ``transformer_layer_config``. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.hf_config import refuse_unsupported
from specjax.checkpoint.rope_config import ROPE_SECTIONS
from specjax.models.head_spec import LAYER, HeadSpec, default_aux_layers

Q, K, V, O = (f"{LAYER}self_attn.{part}_proj" for part in "qkvo")
QKV = f"{LAYER}self_attn.qkv_proj"
GATE, UP, GATE_UP, DOWN = (f"{LAYER}mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down"))

# speculators' converter renamed EAGLE-1's fc and layers.0; its EAGLE-3 heads and NeMo's have layers.0.
# MiMo has its MTP layer's two halves, what comes before the decoder layer and the layer itself, under one prefix.
_RENAMED = (
    (r"model\.", ""), (r"layers\.0\.", LAYER), (r"transformer\.", LAYER), (r"fusion_fc\.", "fc."),
    (r"mtp_layers\.0\.input_proj\.", "fc."), (r"mtp_layers\.0\.", LAYER),
)  # fmt: skip
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# EAGLE-3.1 and NVIDIA's variants. norm_output has no tensor of its own: it feeds the head with normed outputs.
_UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of a head under their common names."""

    arrays: Mapping[str, np.ndarray]  # read-only views of the files
    names: Mapping[str, str]  # common name -> name in the file, for messages

    def said(self, name: str) -> str:
        """``name`` as the file has it, with its shape."""
        return f"{self.names.get(name, name)} {list(self.arrays[name].shape)}"

    def has(self, *names: str) -> bool:
        """Whether any of ``names`` is there."""
        return any(name in self.arrays for name in names)

    def need(self, *names: str) -> None:
        """Refuse a head that lacks one of ``names``."""
        if missing := set(names) - self.arrays.keys():
            found = listed(self.names.values()) or "none"
            raise CheckpointError(f"missing tensors: {listed(missing)}; the files hold {found}")

    def matrix(self, name: str) -> np.ndarray:
        """The tensor ``name``, which must be there and have two dimensions."""
        self.need(name)
        if self.arrays[name].ndim != 2 or 0 in self.arrays[name].shape:
            raise CheckpointError(f"{self.said(name)} must have two dimensions")
        return self.arrays[name]


def common_names(tensors: Mapping[str, np.ndarray]) -> HeadTensors:
    """``tensors``, which must be those of one layer, under their common names."""
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
        arrays[name], names[name] = array, given
    return HeadTensors(arrays, names)


def file_name(spec: HeadSpec, name: str) -> str:
    """The common name ``name`` as heads of that kind are published; ``common_names`` leads back."""
    for common, published in spec.published:
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


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's settings and the head's own in one mapping; null means absent."""
    nested = _section(config, "transformer_layer_config")
    # The layer's own rotary embedding as a whole: parts of the other's would contradict it.
    ropes = {"rope_theta", *ROPE_SECTIONS}
    hidden = ropes if any(nested.get(key) is not None for key in ropes) else set()
    outer = {key: value for key, value in config.items() if key not in hidden}
    merged = {key: value for part in (outer, nested) for key, value in part.items() if value is not None}
    # Qwen2 configs carry a window that is switched off.
    if not merged.get("use_sliding_window", True):
        merged.pop("sliding_window", None)
    refuse_unsupported(merged)
    for key in _UNSUPPORTED:
        if value := merged.get(key) or _section(merged, "eagle_config").get(key):
            raise CheckpointError(
                f"config.json: {key} is {value!r}; such heads (EAGLE-3.1) are not supported, since engines differ in "
                "what it means; use an EAGLE-3 head without it"
            )
    return merged


def aux_layer_ids(merged: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers, 0-based, whose outputs the head reads, in its order; ``merged`` is from ``layer_config``.

    Two conventions are in use. In ``eagle_config``, id j is the output of layer j. At the top level, where speculators
    puts them for vLLM, id j is the input of layer j, so the output of j - 1: vLLM collects before the layer, and
    NeMo-RL subtracts 1 from the ids of such configs. But speculators' converter copies the ids of older heads
    unchanged ([1, 46, 90] for 94 layers: speculators#142). The first id tells the two apart, as in sglang#25454: it is
    1 only as an output, since no head reads the output of layer 0.
    """
    nested = _section(merged, "eagle_config").get(AUX_LAYERS_KEY)
    where = f"eagle_config.{AUX_LAYERS_KEY}" if nested else AUX_LAYERS_KEY
    if ids := nested or merged.get(AUX_LAYERS_KEY):
        if not isinstance(ids, Sequence) or not all(type(value) is int for value in ids):
            raise CheckpointError(f"config.json: {where} is {ids!r}; a list of integers is needed")
        shift = 0 if nested or ids[0] == 1 else 1
        aux_layers = tuple(value - shift for value in ids)
        problem = f"{list(ids)}, read as the outputs of layers {list(aux_layers)}"
    else:
        aux_layers = default_aux_layers(num_layers)
        problem = f"absent, and its default for a target of {num_layers} layers is {list(aux_layers)}"
    if len(set(aux_layers)) != len(aux_layers) or not all(0 <= layer < num_layers for layer in aux_layers):
        raise CheckpointError(
            f"config.json: {where} is {problem}; different layers of the target's, 0..{num_layers - 1}, are needed: "
            "give them in eagle_config, where id j is the output of layer j, or at the top level, where it is the "
            "output of layer j - 1 unless the first id is 1"
        )
    return aux_layers


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {key} is {section!r:.80}; an object is needed")
    return section
