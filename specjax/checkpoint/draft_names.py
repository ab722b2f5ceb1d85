"""The names and layouts in which draft heads were saved, brought to one form, that of ``specjax.models.head_spec``.

Published heads differ in prefixes, and some have fused projections, which are cut into views. Knows nothing of files,
configs or the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specjax.checkpoint.errors import CheckpointError, listed
from specjax.models.head_spec import LAYER, HeadSpec

Q, K, V, O = (f"{LAYER}self_attn.{part}_proj" for part in "qkvo")
QKV = f"{LAYER}self_attn.qkv_proj"
GATE, UP, GATE_UP, DOWN = (f"{LAYER}mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down"))

# speculators' converter renamed EAGLE-1's fc and layers.0; its EAGLE-3 heads and NeMo's have layers.0.
# MiMo has its MTP layer's two halves, what comes before the decoder layer and the layer itself, under one prefix.
_RENAMED = (
    (r"model\.", ""), (r"layers\.0\.", LAYER), (r"transformer\.", LAYER), (r"fusion_fc\.", "fc."),
    (r"mtp_layers\.0\.input_proj\.", "fc."), (r"mtp_layers\.0\.", LAYER),
)  # fmt: skip


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
