"""The draft heads that come with specjax, and their models.

A head is a folder ``specjax/data/heads/NAME`` with ``config.json`` and ``model.safetensors`` of an EAGLE head, and
``serving.toml``, its best measured trees. Rows of ``HEADS`` without a folder are ignored, so a source tree without the
weights works.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.hub import BUILT_IN_MODEL
from specjax.checkpoint.weights import SINGLE_NAME, ModelFiles
from specjax.config import ModelConfig
from specjax.models.head_spec import ALGORITHMS

FOLDER = Path(__file__).parents[1] / "data" / "heads"
FINAL_NORM = "model.norm.weight"
DEVICES = ("cpu", "gpu")


@dataclass(frozen=True)
class ShippedHead:
    name: str  # of its folder
    kind: str
    model: str  # alias, or last part of the hub id, in lower case
    norm: str  # sha256 of the model's final norm as little-endian bfloat16, which identifies the model
    sizes: Mapping[str, int]  # fields of the model's `ModelConfig`

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def exists(self) -> bool:
        return all((self.folder / file).is_file() for file in ("config.json", "serving.toml", SINGLE_NAME))

    def is_named(self, name: str) -> bool:
        """True if ``name`` is the model's alias, or a hub id or folder that ends in the model's name."""
        return Path(name).name.lower() == self.model

    def serving(self, device: str) -> dict[str, Any]:
        """Fields of `specjax.drafters.TreeShape` in ``serving.toml`` for one of ``DEVICES``."""
        return tomllib.loads((self.folder / "serving.toml").read_text(encoding="utf-8"))[device]


# AUTO takes a model's first head, which has the longest accept length.
HEADS = tuple(
    ShippedHead(
        name=name,
        kind=ALGORITHMS[flag].kind,
        model=BUILT_IN_MODEL,
        # The GGUF file's norms are float32 with values of bfloat16, as in every conversion of this model.
        norm="b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4",
        sizes={"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30}
        | {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    )
    for name, flag in ((f"{BUILT_IN_MODEL}-eagle3", "EAGLE3"), (f"{BUILT_IN_MODEL}-eagle2", "EAGLE"))
)


def shipped_head(files: ModelFiles, config: ModelConfig, kind: str | None = None) -> ShippedHead | None:
    """The first head that ships for a model, of a `kind` unless None; None if there is none.

    The model must have the sizes, and the name or the final norm of the head's model. Conversions of one model have
    equal norms, other trainings do not. The name matches fine-tunes, and files with differently rounded norms. A
    slightly different model accepts fewer drafts; its text is correct.
    """
    for head in HEADS:
        fits = all(getattr(config, name) == size for name, size in head.sizes.items()) and head.exists
        fits = fits and (kind is None or kind == head.kind)
        if fits and (head.is_named(files.name) or final_norm(files) == head.norm):
            return head
    return None


def may_have_head(model: str, kind: str) -> bool:
    """True if ``shipped_head`` may find a head of that kind. Downloads nothing: a hub id must have the model's name,
    and local files may be the model."""
    is_local = Path(model).expanduser().exists()
    return kind in {head.kind for head in HEADS if head.exists and (is_local or head.is_named(model))}


def final_norm(files: ModelFiles) -> str | None:
    """``ShippedHead.norm`` of a model; None if it has no such tensor."""
    entry = files.headers.get(FINAL_NORM)
    if entry is None:
        return None
    rounded = np.asarray(entry.read()).astype(ml_dtypes.bfloat16)
    return hashlib.sha256(rounded.view(np.uint16).astype("<u2").tobytes()).hexdigest()
