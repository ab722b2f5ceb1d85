"""The draft heads that come with specjax: which model each is for, and how it drafts best.

A head lies in ``specjax/data/heads/NAME``: ``config.json`` and ``model.safetensors`` as any EAGLE head has them, and
``serving.toml``, the trees that were measured to serve it best. Rows of ``HEADS`` without their folder are ignored, so
that a source tree without the weights still runs.
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

from specjax.checkpoint.files import CheckpointError
from specjax.checkpoint.hub import BUILT_IN_MODEL
from specjax.checkpoint.weights import SINGLE_NAME, ModelFiles
from specjax.config import ModelConfig
from specjax.models.head_spec import ALGORITHMS

FOLDER = Path(__file__).parents[1] / "data" / "heads"
FINAL_NORM = "model.norm.weight"
DEVICES = ("cpu", "gpu")


@dataclass(frozen=True)
class ShippedHead:
    """A head and the model that it was trained with."""

    name: str  # of its folder
    kind: str
    model: str  # its name: the alias, or the last part of its hub id, in lower case
    norm: str  # sha256 of the model's final norm as bfloat16, little-endian, which tells the model by content
    sizes: Mapping[str, int]  # fields of the model's `ModelConfig`

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def is_there(self) -> bool:
        return all((self.folder / file).is_file() for file in ("config.json", SINGLE_NAME))

    def is_named(self, name: str) -> bool:
        """Whether a model's name ends as this model's does: the alias, a hub id, or a folder that is called so."""
        return Path(name).name.lower() == self.model

    def serving(self, device: str) -> dict[str, Any]:
        """What ``serving.toml`` has for one of ``DEVICES``: options such as ``Eagle3``'s, by name. May be empty."""
        file = self.folder / "serving.toml"
        if not file.is_file():
            return {}
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if not set(tables) <= set(DEVICES) or not all(isinstance(table, dict) for table in tables.values()):
            raise CheckpointError(f"{file} has {', '.join(tables)}; it may hold the tables {', '.join(DEVICES)}")
        return tables.get(device, {})


def _for_the_built_in_model(name: str, kind: str) -> ShippedHead:
    return ShippedHead(
        name=name,
        kind=kind,
        model=BUILT_IN_MODEL,
        # The norms of the GGUF are float32 and hold bfloat16's values, as every conversion of this model has them.
        norm="b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4",
        sizes={"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30}
        | {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    )


# The first of a model's heads is the one that accepts the most: AUTO takes it.
HEADS: tuple[ShippedHead, ...] = (
    _for_the_built_in_model(name=f"{BUILT_IN_MODEL}-eagle3", kind=ALGORITHMS["EAGLE3"].kind),
    _for_the_built_in_model(name=f"{BUILT_IN_MODEL}-eagle2", kind=ALGORITHMS["EAGLE"].kind),
)


def shipped_head(files: ModelFiles, config: ModelConfig, kind: str | None = None) -> ShippedHead | None:
    """The first head of a kind that ships for a model; None if there is none. `kind`: as `Algorithm.kind`; None: any.

    The model must have the sizes, and either the name or the final norm of the one that the head was trained with.
    4-bit and 16-bit files of one model have the same norm to the bit, other trainings of the same architecture do not,
    and reading it takes no time. The name is for fine-tunes of the same name, and for files whose norm was rounded
    otherwise. Where either leads to a model that is not quite the head's (an adapter merged into it leaves the norm as
    it was), fewer drafts are accepted; the text cannot be wrong.
    """
    for head in HEADS:
        fits = all(getattr(config, name) == size for name, size in head.sizes.items()) and head.is_there
        fits = fits and (kind is None or kind == head.kind)
        if fits and (head.is_named(files.name) or final_norm(files) == head.norm):
            return head
    return None


def may_have_head(model: str, kind: str) -> bool:
    """Whether ``shipped_head`` can find one of that kind, judged without a download: by a hub id's name; files on this
    disk may be those of any model."""
    is_local = Path(model).expanduser().exists()
    return kind in {head.kind for head in HEADS if head.is_there and (is_local or head.is_named(model))}


def final_norm(files: ModelFiles) -> str | None:
    """What ``ShippedHead.norm`` is compared with; None for a model without that tensor."""
    entry = files.headers.get(FINAL_NORM)
    if entry is None:
        return None
    rounded = np.asarray(entry.read()).astype(ml_dtypes.bfloat16)
    return hashlib.sha256(rounded.view(np.uint16).astype("<u2").tobytes()).hexdigest()
