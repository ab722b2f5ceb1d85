"""A trained draft head as a folder that engines read: config.json, model.safetensors and a model card.

Tensors have the names and layouts of published heads, from the tables that reading uses; config.json has what the
engines look at:

- SGLang, `models/llama_eagle3.py` and `llama_eagle.py`: the class by `architectures`; `target_hidden_size`, the width
  of each of the three features, by default `hidden_size`; `draft_vocab_size`, null for the target's head; d2t as
  offsets; no embedding; `bias`, of fc, which EAGLE-3 lacks where nothing is said (EAGLE's always has one there). The
  target's side reads
  `eagle_config.eagle_aux_hidden_state_layer_ids`, where id j is the output of layer j.
- vLLM, `models/llama_eagle3.py`: the same, and `norm_before_residual` and `eagle_config.use_aux_hidden_state`. Before
  `eagle_config` it reads the layers at the top level, where id j is the input of layer j; so both are written. It adds
  `Eagle` before the architecture of an EAGLE-1 head: give it `LlamaForCausalLM` instead.
- SafeAILab/EAGLE, `cnets.py`: the target's embedding only where there is no `target_hidden_size` (with it, it drafts
  from a random one), so the key is left out where the two widths are equal; `type` in `rope_scaling`.
- SGLang and vLLM, `models/mimo_mtp.py`: `model.mtp_layers.0.*`, with Qwen2's biases of q, k and v; a head without them
  is only for engines that decide by the tensors, as ours does. transformers knows this layer by the `model_type` qwen2.

Sources: sgl-project/sglang 03d5a77, 034b3be, 0564b52 and `set_eagle3_layers_to_capture`; vllm-project/vllm 00bd149,
0bb55d6 and `_get_eagle3_aux_layers_from_config`; SafeAILab/EAGLE `cnets.py` and `cnets1.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint import CheckpointError
from specjax.checkpoint.draft_head import AUX_LAYERS_KEY, published_name
from specjax.checkpoint.files import listed, replacing_folder
from specjax.checkpoint.hf_config import hf_rope_scaling
from specjax.checkpoint.parameters import HOST_DTYPES
from specjax.checkpoint.weights import SINGLE_NAME, save_tensors
from specjax.config import HeadConfig, ModelConfig
from specjax.models.head_spec import MASK, OFFSETS, head_sizes, head_spec, head_table
from specjax.models.params import map_leaves, placements, tensors_of

CONFIG_NAME, CARD_NAME = "config.json", "README.md"
HEAD_FILES = frozenset({CONFIG_NAME, CARD_NAME, SINGLE_NAME})
MODEL_FILES = HEAD_FILES | {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
"""What the folder of an exported head may hold, and that of a model."""


def export_head(
    folder: Path | str, config: HeadConfig, params: Mapping[str, Any], target: ModelConfig, *,
    target_name: str, card: str, extra: Mapping[str, Any] = {}, dtype: str = "bfloat16", license: str | None = None,
) -> Path:  # fmt: skip
    """Write a head. Everything is written beside `folder` first, which is then replaced: it is always a whole one.

    Args:
        folder: made if need be; an export that is there is replaced.
        params: as `specjax.models.head_spec.head_table` declares them, of any float type, on any device; rounded once.
        target: the model that the head drafts for; `target_name` is for the card, where a hub id makes a link.
        card: Markdown, the model card below its front matter.
        extra: more keys of config.json, which must not be among those written anyway.
        dtype: of the parameters as written: bfloat16, float16 or float32.
        license: of the head, as the hub spells it; None: the card names none.

    Raises:
        ValueError: the parameters are not those of such a head or not finite in `dtype`; a key of `extra` is taken.
        CheckpointError: the folder cannot be written, or holds other things than an export.
    """
    tensors, described = head_tensors(config, params, target, dtype), head_description(config, target, dtype)
    if both := described.keys() & extra.keys():
        raise ValueError(f"extra has the keys {listed(both)}, which config.json has anyway")
    return write_draft(
        Path(folder), {**described, **extra}, tensors, card=card, target_name=target_name, kind=config.kind,
        license=license,
    )  # fmt: skip


def write_draft(
    folder: Path, described: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, card: str, target_name: str,
    kind: str, license: str | None, allowed: frozenset[str] = HEAD_FILES,
    more: Callable[[Path], Any] = lambda folder: None,
) -> Path:  # fmt: skip
    """Write a draft's folder as `export_head` does; `described` is config.json, `more` writes what else is `allowed`.

    Raises CheckpointError: the folder cannot be written, or holds other things than such an export.
    """
    tags = ["speculative-decoding", "draft-model", kind, "jax"]
    front: dict[str, Any] = {} if license is None else {"license": license}
    front |= {"base_model": target_name, "library_name": "specjax", "tags": tags}
    # JSON is YAML, and quotes what must be quoted.
    matter = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    try:
        if others := other_files(folder, allowed):
            raise CheckpointError(
                f"{folder} holds {listed(others)}, which is no part of an exported draft and would be lost; choose "
                "another folder, or move that away"
            )
        with replacing_folder(folder) as draft:
            (draft / CONFIG_NAME).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
            (draft / CARD_NAME).write_text(f"---\n{matter}\n---\n\n{card.strip()}\n", encoding="utf-8")
            save_tensors(draft / SINGLE_NAME, tensors)
            more(draft)
    except OSError as error:
        raise CheckpointError(
            f"cannot write a draft to {folder} ({error}); free some space or choose another folder"
        ) from error
    return folder


def other_files(folder: Path, allowed: frozenset[str] = HEAD_FILES) -> list[str]:
    """What a folder holds besides an exported draft of the `allowed` files."""
    there = {file.name for file in folder.iterdir()} if folder.exists() else set()
    return sorted(there - allowed)


def rounded(leaves: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The leaves in a dtype. Raises ValueError: some are not finite in it."""
    if dtype not in HOST_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; a draft can be written as: {', '.join(HOST_DTYPES)}")
    found: dict[str, np.ndarray] = {}
    for name, leaf in leaves.items():
        with np.errstate(over="ignore"):  # found below
            found[name] = leaf.astype(HOST_DTYPES[dtype])
        if not np.isfinite(found[name].astype(np.float32)).all():
            raise ValueError(f"parameter {name} has numbers that are not finite in {dtype}; the training diverged")
    return found


def head_tensors(
    config: HeadConfig, params: Mapping[str, Any], target: ModelConfig, dtype: str = "bfloat16"
) -> dict[str, np.ndarray]:
    """The tensors by the names in the file: parameters as `dtype`, `d2t` int64 [W] and `t2d` bool [V]."""
    spec = head_spec(config.kind)
    if config.mapped and not spec.own_ends:
        raise ValueError(
            f"{config.kind} heads with a vocabulary of their own have no format; write it as it is without a token map"
        )
    table, sizes = head_table(config), head_sizes(config, target.vocab_size)
    shapes = map_leaves(table, lambda leaf: leaf.shape(sizes))
    if wrong := sorted(shapes.keys() ^ params.keys()):
        raise ValueError(f"{config.kind} heads have the parameters {listed(shapes)}; missing or more: {listed(wrong)}")
    leaves: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        leaf = np.asarray(params[name])
        if leaf.shape != shape:
            raise ValueError(f"parameter {name} is {list(leaf.shape)}; the head's description implies {list(shape)}")
        leaves[name] = leaf
    leaves |= rounded({name: leaf for name, leaf in leaves.items() if name != "ids"}, dtype)
    tensors = tensors_of(placements(table, sizes), lambda path: leaves[path[-1]])
    tensors = {published_name(spec, name): np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    if config.mapped:
        ids = leaves["ids"].astype(np.int64)
        tensors[OFFSETS] = ids - np.arange(len(ids))
        tensors[MASK] = np.isin(np.arange(target.vocab_size), ids)
    return tensors


def head_description(config: HeadConfig, target: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of a head. Nothing is left to a default that engines could disagree on, the rope's base above all."""
    spec, rope = head_spec(config.kind), config.rope
    described: dict[str, Any] = {
        "architectures": [spec.architecture],
        "model_type": spec.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": rope.theta,
        "rope_scaling": hf_rope_scaling(rope),
        # Dynamic scaling starts from this length, and reaches further.
        "max_position_embeddings": rope.original_max_position if rope.scaling == "dynamic" else target.max_positions,
        "vocab_size": target.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **spec.keys,
    }
    if rope.partial != 1:
        described["partial_rotary_factor"] = rope.partial
    if spec.absent_bias is not None and config.fc_bias != spec.absent_bias:
        described["bias"] = config.fc_bias
    if spec.reads_layers:
        if target.hidden_size != config.hidden_size:
            described["target_hidden_size"] = target.hidden_size
        described |= {
            "draft_vocab_size": config.vocab_size if config.own_head else None,
            "norm_before_residual": config.norm_before_residual,
            "eagle_config": {AUX_LAYERS_KEY: list(config.aux_layers), "use_aux_hidden_state": True},
            AUX_LAYERS_KEY: [layer + 1 for layer in config.aux_layers],
        }
    return described
