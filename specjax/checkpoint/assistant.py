"""Gemma 4's assistants in folders of their own: config.json, checks against the target, and parameters.

K and E of each kind of layer must be the target's, whose keys the layers read. H follows from the tensors.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint.files import CheckpointError, Settings, listed, read_json, unsupported
from specjax.checkpoint.hf_config import at_most, model_config, refuse_unsupported
from specjax.checkpoint.hub import is_cached, resolve_head
from specjax.checkpoint.parameters import fill_parameters, misfits, shared_tensors
from specjax.checkpoint.quantised import Entries, matrices
from specjax.checkpoint.weights import ModelFiles, read_folder
from specjax.config import AssistantConfig, ModelConfig
from specjax.models.mtp_spec import TOKEN_ORDERING, misfit, mtp_sizes, mtp_table
from specjax.models.params import HEAD_TENSOR, placements

if TYPE_CHECKING:
    from jax.sharding import Mesh

ARCHITECTURES = {
    "Gemma4AssistantForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForCausalLM",
}
"""Architecture of an assistant -> that of its layers."""
_ONLY = {
    "hidden_size_per_layer_input": (0, "0"), "enable_moe_block": (False, "false"),
    "use_double_wide_mlp": (False, "false"),
}  # fmt: skip
SUFFIX = "-assistant"
"""What publishers add to a model's name."""


def is_assistant(name: str, revision: str | None = None) -> bool:
    """True if config.json of a folder or a hub id describes an assistant; False if there is none."""
    try:
        folder = resolve_head(name, revision=revision, progress=False, outline=True)
        return _architecture(read_json(folder / "config.json", name)) is not None
    except CheckpointError:  # which loading raises again
        return False


def assistant_beside(files: ModelFiles) -> str | None:
    """The assistant of a model: the folder beside the model's with ``SUFFIX`` in its name, or the hub id, if it has
    been downloaded. None: there is none. Downloads nothing."""
    path = Path(files.name).expanduser()
    name = f"{path.absolute() if path.is_dir() else files.name}{SUFFIX}"
    return name if (path.is_dir() or is_cached(name, "config.json")) and is_assistant(name) else None


def wanted(kind: str, name: str, folder: Path) -> bool:
    """True if ``kind`` is an assistant's. Raises CheckpointError if it is another, and the folder has an assistant."""
    if kind == AssistantConfig.kind:
        return True
    if (architecture := _architecture(read_json(folder / "config.json", name))) is not None:
        raise CheckpointError(f"config.json: architectures is {architecture}; its algorithm is MTP or ASSISTANT")
    return False


def describe_assistant(name: str, folder: Path, target: ModelConfig) -> AssistantConfig:
    """The description of an assistant, from config.json and the headers of weights if present."""
    files = read_folder(name, folder, outline=True)
    return _described(files, target, matrices(files) if files.weights else None)


def load_assistant(
    name: str, folder: Path, target: ModelConfig, *, quantization: str, mesh: Mesh | None, progress: bool
) -> tuple[AssistantConfig, dict[str, Any]]:  # fmt: skip
    """The description and the parameters that ``mtp_table`` declares."""
    import jax

    files = read_folder(name, folder)
    tensors = matrices(files)
    config = _described(files, target, tensors)
    declared, sizes = mtp_table(config), mtp_sizes(config)
    params = fill_parameters(
        name, declared, sizes, tensors, config, target.dtype, quantization, mesh=mesh, progress=progress
    )
    if config.centroids:
        params["clusters"] = jax.device_put(_clusters(files, config))
    return config, params


def _architecture(settings: Settings) -> str | None:
    named = settings.get("architectures")
    return next((name for name in ARCHITECTURES if isinstance(named, list) and name in named), None)


def _described(files: ModelFiles, target: ModelConfig, tensors: Entries | None) -> AssistantConfig:
    settings = Settings(files.config)
    if (architecture := _architecture(settings)) is None:
        raise unsupported("architectures", settings.get("architectures"), listed(ARCHITECTURES))
    text = settings.section("text_config")
    refuse_unsupported(text, _ONLY)
    own = {"num_kv_shared_layers": 0, "architectures": [ARCHITECTURES[architecture]], "tie_word_embeddings": True}
    layer = model_config({"hidden_size_per_layer_input": 0, **text, **own}, dtype=target.dtype)
    kinds = layer.kinds
    assert kinds is not None
    if tensors is not None and (query := tensors.get("model.layers.0.self_attn.q_proj.weight")):
        heads, rest = divmod(query.shape[0], kinds.head_dim if layer.window(0) is None else layer.head_dim)
        if heads and not rest and not heads % layer.num_kv_heads and not heads % kinds.kv_heads:
            layer = replace(layer, num_heads=heads)
    centroids = best = 0
    if settings.boolean("use_ordered_embeddings"):
        centroids, best = settings.integer("num_centroids", 2048), settings.integer("centroid_intermediate_top_k", 32)
        at_most(best, centroids, "centroid_intermediate_top_k", "num_centroids")
        if layer.vocab_size % centroids:
            raise unsupported("num_centroids", centroids, f"a divisor of vocab_size ({layer.vocab_size})")
    layer = replace(layer, kinds=replace(kinds, shared=layer.num_layers))
    config = AssistantConfig(
        layer=layer, target_layers=target.num_layers, count=1, vocab_size=layer.vocab_size,
        backbone_size=settings.integer("backbone_hidden_size"), centroids=centroids, best=best,
    )  # fmt: skip
    if problem := misfit(config, target):
        raise CheckpointError(f"config.json: {problem}")
    if tensors is not None:
        optional = shared_tensors(layer, "model.layers.{}.self_attn.{}.weight", ("k_proj", "v_proj", "k_norm"))
        optional |= {HEAD_TENSOR, *([TOKEN_ORDERING] if centroids else [])}
        if problems := misfits(tensors, placements(mtp_table(config), mtp_sizes(config)), "assistants", optional):
            raise CheckpointError(f"unsupported assistant; {problems}")
    return config


def _clusters(files: ModelFiles, config: AssistantConfig) -> np.ndarray:
    """The ids of each cluster's tokens, int32 ``[C, t]``. Converters store them as floats, too."""
    if (entry := files.headers.get(TOKEN_ORDERING)) is None:
        raise CheckpointError(f"missing tensors: {TOKEN_ORDERING}, which use_ordered_embeddings needs")
    order = entry.read(integers=True)
    if not np.array_equal(np.sort(order.reshape(-1)), np.arange(config.vocab_size)):
        raise CheckpointError(f"{entry.source} must hold each of the {config.vocab_size} token ids once")
    return order.astype(np.int32).reshape(config.centroids, -1)
