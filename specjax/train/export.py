"""Writes a trained draft head as a folder that engines read: config.json, model.safetensors and a model card.

Tensors have the names and layouts of published heads, from the tables that loading uses. Engines read these keys:

- SGLang, `models/llama_eagle3.py` and `llama_eagle.py`: `architectures` selects the class; `target_hidden_size`, the
  width of each of the three features, defaults to `hidden_size`; `draft_vocab_size`, null for the target's output
  layer; d2t as offsets; no embedding; `bias` of fc, by default false for EAGLE-3 and true for EAGLE. The target reads
  `eagle_config.eagle_aux_hidden_state_layer_ids`: see `_layer_ids`.
- vLLM, `models/llama_eagle3.py`: the same, and `norm_before_residual` and `eagle_config.use_aux_hidden_state`. It also
  reads layers at the top level, where id j is the input of layer j; so both are written. It adds `Eagle` before the
  architecture of an EAGLE-1 head: give it `LlamaForCausalLM` instead.
- EAGLE-3.1: SGLang, vLLM and TensorRT-LLM read `fc_norm` and `norm_output` at the top level and `norm_before_fc` in
  `eagle_config`, speculators reads all at the top level; so each is written in both places. Of `fc_norm` and
  `norm_before_fc` together, TensorRT-LLM applies the first only; speculators refuses them.
- SafeAILab/EAGLE, `cnets.py`: loads the target's embedding only without `target_hidden_size` (otherwise it drafts from
  a random one), so the key is omitted if the two widths are equal; `type` in `rope_scaling`.
- SGLang and vLLM, `models/mimo_mtp.py`: `model.mtp_layers.0.*`, with Qwen2's biases of q, k and v. Only engines that
  detect biases by their tensors read a head without them. transformers' `model_type` of this layer is qwen2.

- z-lab/dflash, SGLang and vLLM, block heads: `dflash_config`; `DSparkDraftModel` and `projector_type` as in SpecForge;
  `DFlash2DraftModel`, whose convolution and selector are described in `dflash_config`.
  A draft vocabulary (`draft_vocab_size`, d2t, t2d, lm_head) is speculators' extension.

Sources: sgl-project/sglang 03d5a77, 034b3be, 0564b52 and `set_eagle3_layers_to_capture`; vllm-project/vllm 00bd149,
0bb55d6 and `_get_eagle3_aux_layers_from_config`; SafeAILab/EAGLE `cnets.py` and `cnets1.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint import CheckpointError
from specjax.checkpoint.draft_head import AUX_LAYERS_KEY, published_name
from specjax.checkpoint.files import listed, replacing_folder
from specjax.checkpoint.hf_config import LAYER_TYPES, hf_rope_scaling
from specjax.checkpoint.parameters import HOST_DTYPES
from specjax.checkpoint.weights import SINGLE_NAME, save_tensors
from specjax.config import BlockConfig, HeadConfig, ModelConfig
from specjax.models.head_spec import MASK, NORMS, OFFSETS, head_sizes, head_spec, head_table
from specjax.models.params import map_leaves, placements, tensors_of

CONFIG_NAME, CARD_NAME = "config.json", "README.md"


def export_head(
    folder: Path | str, config: HeadConfig, params: Mapping[str, Any], target: ModelConfig, *,
    target_name: str, card: str, dtype: str = "bfloat16", license: str | None = None,
) -> Path:  # fmt: skip
    """Write a head to a temporary folder, which then replaces `folder`: readers never see an incomplete head.

    Args:
        folder: created if needed; an existing export is replaced.
        params: leaves of `specjax.models.head_spec.head_table`, of any float type, on any device; rounded once.
        target: the model that the head drafts for. The card names it `target_name`; a hub id becomes a link.
        card: Markdown, the model card below its front matter.
        dtype: bfloat16, float16 or float32, of the parameters as written.
        license: of the head, as the hub spells it; None: not in the card.

    Raises:
        ValueError: the parameters do not fit the configuration, or are not finite in `dtype`.
        CheckpointError: the folder cannot be written, or contains files that an export does not have.
    """
    folder = Path(folder)
    tensors, described = head_tensors(config, params, target, dtype), head_description(config, target, dtype)
    tags = ["speculative-decoding", "draft-model", config.kind, "jax"]
    front: dict[str, Any] = {} if license is None else {"license": license}
    front |= {"base_model": target_name, "library_name": "specjax", "tags": tags}
    # JSON strings are YAML.
    matter = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    try:
        if others := other_files(folder):
            raise CheckpointError(
                f"{folder} contains {listed(others)}, which an exported draft does not have and replacing it would "
                "delete; choose another folder, or move them away"
            )
        with replacing_folder(folder) as draft:
            (draft / CONFIG_NAME).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
            (draft / CARD_NAME).write_text(f"---\n{matter}\n---\n\n{card.strip()}\n", encoding="utf-8")
            save_tensors(draft / SINGLE_NAME, tensors)
    except OSError as error:
        raise CheckpointError(
            f"cannot write a draft to {folder} ({error}); free some space or choose another folder"
        ) from error
    return folder


def other_files(folder: Path) -> list[str]:
    """Names in a folder that do not belong to an exported head."""
    names = {file.name for file in folder.iterdir()} if folder.exists() else set()
    return sorted(names - {CONFIG_NAME, CARD_NAME, SINGLE_NAME})


def head_tensors(
    config: HeadConfig, params: Mapping[str, Any], target: ModelConfig, dtype: str = "bfloat16"
) -> dict[str, np.ndarray]:
    """Tensors by their names in the file: parameters as `dtype`, `d2t` int64 [W] and `t2d` bool [V]."""
    if dtype not in HOST_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; a draft can be written as: {', '.join(HOST_DTYPES)}")
    spec = None if isinstance(config, BlockConfig) else head_spec(config.kind)
    if config.mapped and spec is not None and not spec.own_ends:
        raise ValueError(f"there is no published format of {config.kind} heads with a token map; export without it")
    table, sizes = head_table(config), head_sizes(config, target.vocab_size)
    shapes, given = _flat(map_leaves(table, lambda leaf: leaf.shape(sizes))), _flat(params)
    if wrong := sorted(shapes.keys() ^ given.keys()):
        raise ValueError(f"{config.kind} heads have the parameters {listed(shapes)}; missing or more: {listed(wrong)}")
    leaves: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        leaf = np.asarray(given[name])
        if leaf.shape != shape:
            raise ValueError(f"parameter {name} is {list(leaf.shape)}; the head's description implies {list(shape)}")
        if name != "ids":
            with np.errstate(over="ignore"):
                leaf = leaf.astype(HOST_DTYPES[dtype])
            if not np.isfinite(leaf.astype(np.float32)).all():
                raise ValueError(f"parameter {name} has values that are not finite in {dtype}; the training diverged")
        leaves[name] = leaf
    tensors = tensors_of(placements(table, sizes), lambda path: leaves[".".join(path)])
    named = tensors if spec is None else {published_name(spec, name): tensor for name, tensor in tensors.items()}
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in named.items()}
    if config.mapped:
        ids = leaves["ids"].astype(np.int64)
        tensors[OFFSETS] = ids - np.arange(len(ids))
        tensors[MASK] = np.isin(np.arange(target.vocab_size), ids)
    return tensors


def _flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by path: "layers_0.down"."""
    parts = ((f"{prefix}{name}", leaf) for name, leaf in params.items())
    return {
        k: v for path, x in parts for k, v in (_flat(x, f"{path}.") if isinstance(x, Mapping) else {path: x}).items()
    }


def head_description(config: HeadConfig, target: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of a head, with all keys whose defaults differ between engines, such as `rope_theta`."""
    rope = config.rope
    described: dict[str, Any] = {
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon, "rope_theta": rope.theta, "rope_scaling": hf_rope_scaling(rope),
        # With dynamic scaling, sequences may be longer.
        "max_position_embeddings": rope.original_max_position if rope.scaling == "dynamic" else target.max_positions,
        "vocab_size": target.vocab_size, "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False, "torch_dtype": dtype,
    }  # fmt: skip
    if rope.partial != 1:
        described["partial_rotary_factor"] = rope.partial
    if isinstance(config, BlockConfig):
        return described | _block_keys(config, target)
    spec = head_spec(config.kind)
    if (window := config.windows[0]) is not None:  # as in speculators
        described |= {"layer_types": [LAYER_TYPES[0]], "sliding_window": window, "use_sliding_window": True}
    described |= {"architectures": [spec.architecture], "model_type": spec.model_type, **spec.keys}
    if spec.absent_bias is not None and config.fc_bias != spec.absent_bias:
        described["bias"] = config.fc_bias
    if spec.reads_layers:
        if target.hidden_size != config.hidden_size:
            described["target_hidden_size"] = target.hidden_size
        described |= {
            "draft_vocab_size": config.vocab_size if config.own_head else None,
            "norm_before_residual": config.norm_before_residual, **_layer_ids(config.aux_layers, target.family),
        }  # fmt: skip
        norms = {norm: True for norm in NORMS if getattr(config, norm)}
        described |= norms | {"eagle_config": described["eagle_config"] | norms}
    return described


def _layer_ids(aux_layers: tuple[int, ...], family: str) -> dict[str, Any]:
    """The layers of an EAGLE-3 head, as SGLang, vLLM and `specjax.checkpoint` read them. Raises as `check_first_layer`.

    vLLM reads boundaries at the top level: id j is the input of layer j. SGLang reads `eagle_config`: outputs if the
    first id is 1, else boundaries; for gpt-oss always boundaries."""
    check_first_layer(aux_layers, family)
    boundaries = [layer + 1 for layer in aux_layers]
    nested = list(aux_layers) if aux_layers[0] == 1 and family != "gpt_oss" else boundaries
    return {"eagle_config": {AUX_LAYERS_KEY: nested, "use_aux_hidden_state": True}, AUX_LAYERS_KEY: boundaries}


def check_first_layer(aux_layers: tuple[int, ...], family: str) -> None:
    """Raises ValueError if the first layer of an EAGLE-3 head is 0: engines would take its boundary, 1, for the output
    of layer 1, except for gpt-oss."""
    if aux_layers[:1] == (0,) and family != "gpt_oss":
        given = " ".join(map(str, aux_layers))
        problem = "begins with 0, whose id in config.json, 1, engines read as the output of layer 1"
        raise ValueError(f"--aux-layers {given} {problem}; another layer must come first")


def _block_keys(config: BlockConfig, target: ModelConfig) -> dict[str, Any]:
    """Keys of a block head: z-lab's, and with a Markov head SpecForge's."""
    architecture, walk = "DFlashDraftModel", dict[str, Any]()
    if config.walk == "selector":
        architecture, group = "DFlash2DraftModel", config.hidden_size // config.conv_groups
        walk = {"conv_kernel_size": config.conv_taps, "conv_group_size": group}
        walk |= {"selector_rank": config.rank, "selector_top_k": config.candidates}
    elif config.walk != "none":
        architecture = "DSparkDraftModel"
        walk = {"projector_type": "dspark", "markov_rank": config.rank, "markov_head_type": config.walk}
    keys: dict[str, Any] = {
        "architectures": [architecture], "model_type": "qwen3",
        "block_size": config.block, "num_target_layers": target.num_layers,
        "layer_types": [LAYER_TYPES[0 if window else 1] for window in config.windows],
        "sliding_window": next(filter(None, config.windows), None),
        "dflash_config": {
            "mask_token_id": config.mask_token, "target_layer_ids": list(config.aux_layers),
            "sample_from_anchor": config.from_anchor, "input_embedding_scale": config.input_scale,
            "output_multiplier": config.output_scale, "final_logit_softcapping": config.logit_softcap,
            **walk,
        },
    }  # fmt: skip
    if len({*config.causal}) == 1:
        keys["is_causal"] = config.causal[0]
    else:  # layers with a window are causal, also those of DFlash2
        keys["sliding_window_non_causal"] = False
    return keys | ({"draft_vocab_size": config.vocab_size} if config.mapped else {})
