"""The multi-token prediction layers in a target's own shards: a description and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint.files import CheckpointError
from specjax.checkpoint.load import fill, misfits, reduced, spread_over
from specjax.checkpoint.quantised import QuantisedEntry, matrices
from specjax.checkpoint.values import given, require
from specjax.checkpoint.weights import ModelFiles, same_content
from specjax.config import ModelConfig, MtpConfig
from specjax.models import mtp_spec
from specjax.models.mtp_spec import STYLES, mtp_sizes, mtp_table, mtp_tensors
from specjax.models.params import EMBED_TENSOR, HEAD_TENSOR, placements

if TYPE_CHECKING:
    from jax.sharding import Mesh

COUNT = "num_nextn_predict_layers"  # of config.json


def mtp_config(files: ModelFiles, config: ModelConfig) -> MtpConfig | None:
    """The MTP layers of a model, as its tensors show or, where only config.json is there, as such models are published;
    None if it has none. Reads headers only."""
    if not files.weights:
        if not given(files.config, COUNT, 0):
            return None
        architecture, count = files.config["architectures"][0], require(files.config, COUNT)
        return mtp_spec.published_mtp_config(architecture, config, count)
    return mtp_spec.mtp_config(matrices(files).keys(), config)


def mtp_method(files: ModelFiles, config: ModelConfig) -> str | None:
    """The `quant_method` by which a model's MTP layers are stored in few bits; None: their weights are float. Reads
    headers only; where only config.json is there, they are taken to be stored as the model."""
    method = given(files.config, "quantization_config", {}).get("quant_method")
    if not files.weights or method is None:
        return method
    tensors = matrices(files)
    names = mtp_tensors(tensors.keys(), config)
    return method if any(isinstance(tensors[name], QuantisedEntry) for name in names) else None


def load_mtp(
    files: ModelFiles, target: ModelConfig, config: MtpConfig, *, quantization: str = "auto", progress: bool = True,
    put: Callable[[np.ndarray], Any] | None = None, mesh: Mesh | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read the layers that ``mtp_config`` found. Embedding and output matrix are the target's own.

    Arguments as for ``load_params``.

    Returns:
      The parameters that ``specjax.models.mtp_spec.mtp_table`` declares.

    Raises:
      CheckpointError: a tensor is missing, left over or of the wrong shape, or a copy of the embedding or the output
        matrix differs from the target's.
    """
    tensors, style = matrices(files), STYLES[config.style]
    names = mtp_tensors(tensors.keys(), target)
    declared, sizes = mtp_table(config), mtp_sizes(config)
    prefixes = [style.layer_prefix(i, target.num_layers) for i in range(config.count)]
    copies = {prefix + name: original for prefix in prefixes for name, original in style.copies.items()}
    found = {name: tensors[name].shape for name in names}
    if problems := misfits(found, placements(declared, sizes), f"{config.style} MTP layers", copies.keys()):
        raise CheckpointError(
            f"the MTP layers in {files.folder} do not fit their model; {problems}. Copy the weights again, or draft "
            "with another algorithm"
        )
    for copy in names & copies.keys():
        original = copies[copy]
        if original == HEAD_TENSOR and HEAD_TENSOR not in tensors:
            original = EMBED_TENSOR
        if not same_content(tensors[copy].read(), tensors[original].read()):
            raise CheckpointError(
                f"{copy} in {files.folder} differs from {original}; MTP layers with an embedding or an output matrix "
                "of their own are not supported"
            )
    name = f"MTP layers of {files.name}"
    few_bits = reduced(tensors, sizes, target.dtype, quantization, tied=False, spread=mesh is not None)
    return fill(
        name, declared, sizes, lambda name: tensors[name].read(), target.dtype, put, progress, few_bits,
        stored=lambda name: tensors[name].size, spread=spread_over(mesh, config),
    )  # fmt: skip
