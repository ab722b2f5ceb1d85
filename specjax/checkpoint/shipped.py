"""The draft heads that come with specjax, and their models.

A head is a folder ``specjax/data/heads/NAME`` with ``config.json`` and ``model.safetensors`` of an EAGLE head, and
``serving.toml``, its best measured trees. Rows of ``HEADS`` without a folder are ignored, so a source tree without the
weights works.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.checkpoint.hub import BUILT_IN_MODEL
from specjax.checkpoint.weights import SINGLE_NAME, ModelFiles
from specjax.config import ModelConfig
from specjax.models.head_spec import ALGORITHMS

FOLDER = Path(__file__).parents[1] / "data" / "heads"
DEVICES = ("cpu", "gpu")


@dataclass(frozen=True)
class ShippedHead:
    name: str  # of its folder
    kind: str
    model: str  # alias, or last part of the hub id, in lower case
    sizes: Mapping[str, int]  # fields of the model's `ModelConfig`

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def exists(self) -> bool:
        return all((self.folder / file).is_file() for file in ("config.json", "serving.toml", SINGLE_NAME))

    def is_named(self, name: str) -> bool:
        """True if ``name`` is an alias, a hub id, a folder or a GGUF file that begins with the model's name."""
        return Path(name).name.lower().startswith(self.model)

    def serving(self, device: str) -> dict[str, Any]:
        """Fields of `specjax.drafters.TreeShape` in ``serving.toml`` for one of ``DEVICES``."""
        return tomllib.loads((self.folder / "serving.toml").read_text(encoding="utf-8"))[device]


# AUTO takes a model's first head, which has the longest accept length.
HEADS = tuple(
    ShippedHead(
        name=name,
        kind=ALGORITHMS[flag].kind,
        model=BUILT_IN_MODEL,
        sizes={"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30}
        | {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    )
    for name, flag in ((f"{BUILT_IN_MODEL}-eagle3", "EAGLE3"), (f"{BUILT_IN_MODEL}-eagle2", "EAGLE"))
)


def shipped_head(files: ModelFiles, config: ModelConfig, kind: str | None = None) -> ShippedHead | None:
    """The first head that ships for a model with this name and these sizes, of a `kind` unless None; None if there is
    none. A fine-tuned model of that name accepts fewer drafts; its text is correct."""
    for head in HEADS:
        fits = head.is_named(files.name) and all(getattr(config, name) == size for name, size in head.sizes.items())
        if fits and head.exists and (kind is None or kind == head.kind):
            return head
    return None


def may_have_head(model: str, kind: str) -> bool:
    """True if ``shipped_head`` may find a head of that kind. Reads and downloads nothing of the model."""
    return kind in {head.kind for head in HEADS if head.exists and head.is_named(model)}
