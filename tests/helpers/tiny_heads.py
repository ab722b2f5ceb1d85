"""Small random draft heads in every published dialect, saved by torch and safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Dialect(NamedTuple):
    kind: str
    config: Mapping[str, Any] = {}  # keys of config.json, beside those of all heads
    nested: bool = False  # the layer's keys are in `transformer_layer_config`
    renamed: tuple[tuple[str, str], ...] = ()  # patterns of tensor names, and their replacements
    fc_bias: bool = False
    qkv_bias: bool = False
    embedding: bool = False
    whole: bool = False  # with the target's vocabulary
    joint_norm: bool = False  # one norm over the features of all layers
    fc_norm: bool = False  # one for each layer
    head_norms: bool = False
    layers: int = 0  # of P-EAGLE; 0: no P-EAGLE head
    gemma: bool = False  # Gemma 4's layer


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}
MIMO = {
    "architectures": ["MiMoMTP"], "model_type": "mimo", "num_nextn_predict_layers": 1, "head_dim": 8,
    "rope_theta": 640000.0,
}  # fmt: skip
SPECULATORS_EAGLE = {
    "speculators_model_type": "eagle", "architectures": ["EagleSpeculator"], "fusion_bias": False, "layernorms": False
}  # fmt: skip
SPECULATORS_EAGLE3 = {
    "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
}  # fmt: skip
SPECULATORS_PEAGLE = {
    **SPECULATORS_EAGLE3, "speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"],
    "mask_token_id": 28, "embed_requires_grad": True,
    "speculators_config": {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": 6}]},
}  # fmt: skip
AUTOMODEL_PEAGLE = {
    "architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "mask_token_id": 27, "num_depths": 5,
    "fc_norm": True, "norm_output": True,
}  # fmt: skip
FEW_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
LAYERS = ((r"^midlayer\.", "layers.0."),)
MODEL_PREFIX = (*LAYERS, (r"^(?!lm_head|d2t|t2d)", "model."))
DEEPSPEC = {"target_layer_ids": [1, 3, 4], "tie_word_embeddings": False, "rope_theta": 10000.0}
GEMMA: dict[str, Any] = DEEPSPEC | {
    "architectures": ["Gemma4Eagle3Model"], "head_dim": 256, "global_head_dim": 8, "num_key_value_heads": 4,
    "num_global_key_value_heads": 2, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 5.0, "sliding_window": 1024, "layer_types": ["full_attention"], "rope_theta": None,
    "hidden_size_per_layer_input": 0, "enable_moe_block": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
_DIALECTS: dict[str, Dialect] = {
    "eagle": Dialect("eagle", LLAMA, fc_bias=True, embedding=True),
    "eagle-nobias": Dialect("eagle", LLAMA | {"bias": False, "rope_theta": 500000.0}, embedding=True),
    "eagle-qwen2": Dialect(
        "eagle", LLAMA | {"num_key_value_heads": 1}, fc_bias=True, qkv_bias=True, embedding=True
    ),
    "eagle-speculators": Dialect(
        "eagle", SPECULATORS_EAGLE, True, ((r"^fc\.", "fusion_fc."), (r"^layers\.0\.", "transformer."))
    ),
    "eagle3": Dialect("eagle3", EAGLE3),
    "eagle3-speculators": Dialect("eagle3", SPECULATORS_EAGLE3, True, LAYERS, embedding=True),
    "eagle3-model-prefix": Dialect("eagle3", EAGLE3, renamed=MODEL_PREFIX),
    "eagle3-full-vocabulary": Dialect("eagle3", EAGLE3, whole=True),
    "eagle3-norm-before-residual": Dialect("eagle3", EAGLE3 | {"norm_before_residual": True}),
    "eagle3-norm-before-fc": Dialect(
        "eagle3", SPECULATORS_EAGLE3 | {"norm_before_residual": True, "norm_before_fc": True}, True, LAYERS,
        embedding=True, joint_norm=True,
    ),
    "eagle3-own-embedding": Dialect("eagle3", EAGLE3, embedding=True),
    "eagle3.1": Dialect("eagle3", EAGLE3 | {"fc_norm": True, "norm_output": True}, fc_norm=True),
    "eagle3.1-automodel": Dialect(
        "eagle3", EAGLE3 | {"fc_norm": True, "norm_output": True}, renamed=MODEL_PREFIX, fc_norm=True
    ),
    "eagle3.1-speculators": Dialect(
        "eagle3", SPECULATORS_EAGLE3 | dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), True),
        True, LAYERS, joint_norm=True,
    ),
    "eagle3.1-sliding": Dialect(
        "eagle3", SPECULATORS_EAGLE3 | {"norm_before_fc": True, "norm_output": True} | SLIDING, True, LAYERS,
        joint_norm=True, head_norms=True,
    ),
    "eagle3.1-tensorrt": Dialect(
        "eagle3", EAGLE3 | {"eagle_config": {"norm_before_fc": True, "return_hidden_post_norm": True}}, renamed=LAYERS,
        joint_norm=True,
    ),
    "eagle3.1-both-norms": Dialect(
        "eagle3", EAGLE3 | {"use_aux_norm": True, "eagle_config": {"norm_before_fc": True}}, fc_norm=True,
        joint_norm=True,
    ),
    "peagle-speculators": Dialect(
        "eagle3", SPECULATORS_PEAGLE | {"norm_before_residual": True}, True, LAYERS, embedding=True, layers=1,
    ),
    "peagle-speculators-deep": Dialect(
        "eagle3", SPECULATORS_PEAGLE | {"norm_before_fc": True} | SLIDING | {"layer_types": FEW_SLIDING}, True, LAYERS,
        embedding=True, joint_norm=True, head_norms=True, layers=3,
    ),
    "peagle-amazon": Dialect("eagle3", EAGLE3 | {"ptd_token_id": 30}, renamed=LAYERS, embedding=True, layers=2),
    "peagle-specforge": Dialect(
        "eagle3", LLAMA | {"architectures": ["PEagleDraftModel"], "dflash_config": {"mask_token_id": 29}},
        renamed=LAYERS, embedding=True, layers=4,
    ),
    "peagle-automodel": Dialect(
        "eagle3", LLAMA | AUTOMODEL_PEAGLE, renamed=MODEL_PREFIX, embedding=True, fc_norm=True, whole=True, layers=2,
    ),
    "deepspec-qwen3": Dialect(
        "eagle3", DEEPSPEC | {"architectures": ["Qwen3Eagle3Model"], "head_dim": 8}, renamed=LAYERS, embedding=True,
        head_norms=True, whole=True,
    ),
    "deepspec-gemma4": Dialect(
        "eagle3", GEMMA | {"attention_k_eq_v": True}, renamed=LAYERS, embedding=True, head_norms=True, whole=True,
        gemma=True,
    ),
    "deepspec-gemma4-values": Dialect(
        "eagle3", GEMMA | {"attention_k_eq_v": False, "num_key_value_heads": 2}, renamed=LAYERS, embedding=True,
        head_norms=True, whole=True, gemma=True,
    ),
    "mtp": Dialect("mtp", MIMO | {"attention_bias": True}, qkv_bias=True),
    "mtp-nobias": Dialect("mtp", MIMO | {"attention_bias": False}),
}  # fmt: skip
DIALECTS = {name: dialect.kind for name, dialect in _DIALECTS.items() if not dialect.layers and "deepspec" not in name}
"""Dialect -> kind."""
OF_DEEPSPEC = tuple(name for name in _DIALECTS if "deepspec" in name)
"""Dialects of EAGLE-3 heads by DeepSpec, with copies of the target's embedding and output matrix."""
PARALLEL = {name: dialect.layers for name, dialect in _DIALECTS.items() if dialect.layers}
"""Dialect of P-EAGLE -> layers."""
SPECULATORS = tuple(name for name, dialect in _DIALECTS.items() if dialect.nested)
"""Dialects of vLLM's speculators."""

SIZES: dict[str, int] = {
    "target_hidden_size": 16,
    "target_vocab_size": 31,
    "aux_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,  # 4 heads of 8 are 32 rows, not the hidden size
    "draft_vocab_size": 11,
}


def save_head(
    folder: Path,
    kind: str,
    *,
    dialect: str | None = None,
    format: str | None = None,
    seed: int = 0,
    dtype: str = "float16",
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    **sizes: int,
) -> dict[str, np.ndarray]:
    """Save a random head.

    Args:
      folder: gets config.json and the weights; created if absent.
      kind: eagle, eagle3 or mtp.
      dialect: of ``DIALECTS``; ``kind`` itself if None.
      format: safetensors, bin, sharded safetensors or sharded bin; None: the published format of the kind.
      seed: of the weights.
      dtype: stored dtype of torch, to which the returned values are rounded.
      config: changes to config.json; None removes a key.
      tensors: changes to the tensors as saved, after renaming; None removes one.
      sizes: changes to ``SIZES``.

    Returns:
      The tensors under the published names of the kind, float32; ``d2t`` int64, ``t2d`` bool.
    """
    import torch

    form, size = _DIALECTS[dialect or kind], SIZES | sizes
    assert form.kind == kind, (dialect, kind)
    raw = _random(form, size, np.random.default_rng(seed))
    rounded = {
        name: array if array.dtype.kind in "ib" else torch.from_numpy(array).to(getattr(torch, dtype))
        for name, array in raw.items()
    }
    raw = {name: value if isinstance(value, np.ndarray) else value.float().numpy() for name, value in rounded.items()}
    stored = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in rounded.items()
    }
    for pattern, replacement in form.renamed:
        stored = {re.sub(pattern, replacement, name): tensor for name, tensor in stored.items()}
    for name, value in (tensors or {}).items():
        if value is None:
            del stored[name]
        else:
            stored[name] = torch.from_numpy(np.ascontiguousarray(value))
    folder.mkdir(parents=True, exist_ok=True)
    described = _config(form, size) | {"torch_dtype": dtype} | dict(config or {})
    (folder / "config.json").write_text(json.dumps({key: item for key, item in described.items() if item is not None}))
    _write(folder, stored, format or ("bin" if kind == "eagle" else "safetensors"))
    return raw


def _random(form: Dialect, size: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    m, i, e = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    q, kv = size["heads"] * e, size["kv_heads"] * e
    vocab, target, kind = size["target_vocab_size"], size["target_hidden_size"], form.kind
    wide = kind == "eagle3"
    layer = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": "model.mtp_layers.0."}[kind]
    read = 2 * m if wide else m
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}input_proj.weight" if kind == "mtp" else "fc.weight": (
            m,
            size["aux_layers"] * target if wide else 2 * m,
        ),
        f"{layer}self_attn.q_proj.weight": (q, read),
        f"{layer}self_attn.k_proj.weight": (kv, read),
        f"{layer}self_attn.v_proj.weight": (kv, read),
        f"{layer}self_attn.o_proj.weight": (m, q),
        f"{layer}post_attention_layernorm.weight": (m,),
        f"{layer}mlp.gate_proj.weight": (i, m),
        f"{layer}mlp.up_proj.weight": (i, m),
        f"{layer}mlp.down_proj.weight": (m, i),
    }
    if wide:
        shapes |= {f"{layer}{norm}.weight": (m,) for norm in ("input_layernorm", "hidden_norm")}
        words = vocab if form.whole else size["draft_vocab_size"]
        shapes |= {"norm.weight": (m,), "lm_head.weight": (words, m)}
    if form.head_norms:
        shapes |= {f"{layer}self_attn.{part}_norm.weight": (e,) for part in "qk"}
    for i in range(1, form.layers):
        further = {name.replace(layer, f"layers.{i}."): shape for name, shape in shapes.items() if layer in name}
        shapes |= {name: (s[0], m) if re.search("[qkv]_proj", name) else s for name, s in further.items()}
        del shapes[f"layers.{i}.hidden_norm.weight"]
    if form.layers:
        shapes["mask_hidden"] = (1, 1, size["aux_layers"] * target)
    if form.gemma:
        shapes |= {f"{layer}{norm}_feedforward_layernorm.weight": (m,) for norm in ("pre", "post")}
        shapes[f"{layer}layer_scalar"] = (1,)
        if form.config["attention_k_eq_v"]:
            del shapes[f"{layer}self_attn.v_proj.weight"]
    if form.joint_norm:
        shapes["input_norm.weight"] = (size["aux_layers"] * target,)
    if form.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(size["aux_layers"])}
    if kind == "mtp":
        norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
        shapes |= {f"{layer}{norm}.weight": (m,) for norm in norms}
    if form.fc_bias:
        shapes["fc.bias"] = (m,)
    if form.qkv_bias:
        shapes |= {f"{layer}self_attn.{part}_proj.bias": (rows,) for part, rows in zip("qkv", (q, kv, kv), strict=True)}
    if form.embedding:
        shapes["embed_tokens.weight"] = (vocab, m)
    raw = {}
    for name, shape in shapes.items():
        if "norm" in name or "scalar" in name:
            raw[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            raw[name] = rng.normal(0, 1 if "mask" in name else 1 / np.sqrt(shape[-1]), shape).astype(np.float32)
    if wide and not form.whole:
        ids = np.sort(rng.choice(vocab, size["draft_vocab_size"], replace=False))
        raw["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
        raw["t2d"] = np.isin(np.arange(vocab), ids)
    return raw


def _config(form: Dialect, size: Mapping[str, int]) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "hidden_size": size["hidden_size"],
        "intermediate_size": size["intermediate_size"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "num_hidden_layers": max(form.layers, 1),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "vocab_size": size["target_vocab_size"],
    }
    words = size["target_vocab_size" if form.whole else "draft_vocab_size"]
    config = {"draft_vocab_size": words} if form.kind == "eagle3" else {}
    if form.nested:
        nested = layer | {"head_dim": size["head_dim"], "rope_theta": 500000.0, "model_type": "llama"}
        return config | form.config | {"transformer_layer_config": nested}
    return layer | config | form.config


def _write(folder: Path, tensors: dict[str, Any], format: str) -> None:
    import torch
    from safetensors.torch import save_file

    kind = format.split()[-1]
    single = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind]
    if not format.startswith("sharded"):
        shards = {single: tensors}
    else:
        items = sorted(tensors.items())
        half = len(items) // 2
        stem, suffix = single.rsplit(".", 1)
        shards = {
            f"{stem}-0000{number}-of-00002.{suffix}": dict(part)
            for number, part in ((1, items[:half]), (2, items[half:]))
        }
        index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
        (folder / f"{single}.index.json").write_text(json.dumps(index))
    for file, part in shards.items():
        if kind == "bin":
            torch.save(part, folder / file)
        else:
            save_file({name: tensor.contiguous() for name, tensor in part.items()}, folder / file)
