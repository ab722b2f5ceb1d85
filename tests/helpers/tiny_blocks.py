"""Small random block heads in every published dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from block_oracle import Spec
from safetensors.numpy import save_file

BLOCK, RANK, WORDS = 5, 6, 11
ZLAB: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK}
DEEPSPEC: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "tie_word_embeddings": False}
SPARK = DEEPSPEC | {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
GEMMA: dict[str, Any] = DEEPSPEC | {
    "architectures": ["Gemma4DSparkModel"], "head_dim": 256, "global_head_dim": 8, "num_key_value_heads": 4,
    "num_global_key_value_heads": 2, "rope_parameters": ROPES, "rope_theta": None, "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 5.0, "sliding_window": 1024,
    "layer_types": ["full_attention"] * 2, "hidden_size_per_layer_input": 0, "enable_moe_block": False,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
SPECULATORS: dict[str, Any] = {"speculators_model_type": "dflash", "block_size": BLOCK}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": 4}


class Dialect(NamedTuple):
    config: Mapping[str, Any]  # top level of config.json
    nested: Mapping[str, Any]  # `dflash_config`, or of speculators the top level
    spec: Mapping[str, Any] = {}  # fields of `Spec` that differ from a head of the first family
    prefix: str = ""  # of tensors
    ends: bool = False  # with copies of the target's embedding and output matrix
    mapped: bool = False  # with a vocabulary of WORDS tokens


DIALECTS: dict[str, Dialect] = {
    "dflash": Dialect(ZLAB, {}),
    "dflash-sliding": Dialect(ZLAB | SLIDING, {}, {"windows": (7, None), "causal": (True, False)}),
    "dflash-swa": Dialect(ZLAB, {"use_swa": True, "swa_window_size": 6}, {"windows": (6, 6)}),
    "dflash-scaled": Dialect(
        ZLAB,
        {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
        {"input_scale": 2.0, "output_scale": 0.5, "softcap": 3.0},
    ),
    "jetspec": Dialect(ZLAB, {"causal_head": True}, {"causal": (True, True)}),
    "specforge": Dialect(ZLAB, {"projector_type": "dflash"}, prefix="model."),
    "specforge-dspark": Dialect(
        ZLAB | {"architectures": ["DSparkDraftModel"]}, {"projector_type": "dspark", "markov_rank": RANK}
    ),
    "dflash2": Dialect(
        ZLAB | SLIDING | {"architectures": ["DFlash2DraftModel"], "is_causal": False},
        SELECTOR,
        {"windows": (7, None), "candidates": 4},
    ),
    "deepspec-dflash": Dialect(DEEPSPEC | {"markov_rank": 0}, {}, {"from_anchor": True}, ends=True),
    "deepspec-vanilla": Dialect(SPARK | {"markov_head_type": "vanilla"}, {}, {"from_anchor": True}, ends=True),
    "deepspec-gated": Dialect(SPARK | {"markov_head_type": "gated"}, {}, {"from_anchor": True}, ends=True),
    "deepspec-rnn": Dialect(SPARK | {"markov_head_type": "rnn"}, {}, {"from_anchor": True}, ends=True),
    "deepspec-gemma4": Dialect(
        GEMMA | {"attention_k_eq_v": True, "markov_rank": RANK, "markov_head_type": "vanilla"},
        {},
        {"from_anchor": True, "softcap": 5.0, "gemma": True},
        ends=True,
    ),
    "deepspec-gemma4-values": Dialect(
        GEMMA | {"attention_k_eq_v": False, "num_key_value_heads": 2, "markov_rank": 0},
        {},
        {"from_anchor": True, "softcap": 5.0, "gemma": True},
        ends=True,
    ),
    "speculators-dflash": Dialect(SPECULATORS, {}, mapped=True),
    "speculators-sliding": Dialect(
        SPECULATORS | SLIDING | {"sliding_window_non_causal": False},
        {},
        {"windows": (7, None), "causal": (True, False)},
        mapped=True,
    ),
    "speculators-sliding-non-causal": Dialect(
        SPECULATORS | SLIDING | {"sliding_window_non_causal": True}, {}, {"windows": (7, None)}, mapped=True
    ),
    "speculators-dflash2-causal": Dialect(
        SPECULATORS | SLIDING | SELECTOR | {"speculators_model_type": "dflash2", "sliding_window_non_causal": False},
        {},
        {"windows": (7, None), "causal": (True, False), "candidates": 4},
    ),
    "speculators-dspark": Dialect(
        {"speculators_model_type": "dspark", "block_size": BLOCK, "sample_from_anchor": True, "markov_rank": RANK},
        {},
        {"from_anchor": True},
        mapped=True,
    ),
    "speculators-dflash2": Dialect(
        {"speculators_model_type": "dflash2", "block_size": BLOCK} | SELECTOR, {}, {"candidates": 4}
    ),
}


class Saved(NamedTuple):
    tensors: dict[str, np.ndarray]  # under z-lab's names, float32
    spec: Spec
    ids: np.ndarray  # [W], the target's ids


def save_block(
    folder: Path, dialect: str, *, width: int = 16, vocab: int = 31, features: tuple[int, ...] = (1, 3, 4),
    seed: int = 0, config: Mapping[str, Any] | None = None, scale: float = 1.0, mask: int | None = None,
    head: np.ndarray | None = None, words: np.ndarray | None = None, **sizes: int,
) -> Saved:  # fmt: skip
    """Saves a random head of two layers for a target of this width and vocabulary.

    Args:
        features: layers of the target, 0-based.
        config: changes to config.json; None removes a key.
        scale: of the matrices, relative to 1 / sqrt(inputs).
        words: target ids of a smaller vocabulary; WORDS random ids if None.
        head: the target's output matrix [V, M], of which a smaller vocabulary is a part.
    """
    rng, form = np.random.default_rng(seed), DIALECTS[dialect]
    size = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "inner": 24} | sizes
    inner, size_q, size_kv = size["inner"], size["heads"] * size["head_dim"], size["kv_heads"] * size["head_dim"]
    described, walk = {**form.config, **form.nested}, form.spec.get("candidates", 0)
    ids = np.arange(vocab)
    if form.mapped:
        ids = np.sort(rng.choice(vocab, min(WORDS, vocab), replace=False)) if words is None else np.asarray(words)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, width * len(features)), "hidden_norm.weight": (width,), "norm.weight": (width,)
    }  # fmt: skip
    for i in range(size["layers"]):
        at = f"layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,), f"{at}post_attention_layernorm.weight": (width,),
            f"{at}self_attn.q_norm.weight": (size["head_dim"],), f"{at}self_attn.k_norm.weight": (size["head_dim"],),
            f"{at}self_attn.q_proj.weight": (size_q, width), f"{at}self_attn.k_proj.weight": (size_kv, width),
            f"{at}self_attn.v_proj.weight": (size_kv, width), f"{at}self_attn.o_proj.weight": (width, size_q),
            f"{at}mlp.gate_proj.weight": (inner, width), f"{at}mlp.up_proj.weight": (inner, width),
            f"{at}mlp.down_proj.weight": (width, inner),
        }  # fmt: skip
        if form.spec.get("gemma"):
            shapes |= {f"{at}{name}_feedforward_layernorm.weight": (width,) for name in ("pre", "post")}
            shapes[f"{at}layer_scalar"] = (1,)
            if described["attention_k_eq_v"]:
                del shapes[f"{at}self_attn.v_proj.weight"]
        for name in ("attention_conv", "mlp_conv") if walk else ():
            taps, group = described["conv_kernel_size"], described["conv_group_size"]
            shapes[f"{at}{name}.base_kernel"] = (2, taps, width)
            shapes[f"{at}{name}.kernel_projection.weight"] = (2 * taps * width // group, width)
    if walk:
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, width)
        shapes["candidate_selector.predecessor_codebook"] = (vocab, RANK)
        shapes["candidate_selector.successor_codebook"] = (len(ids), RANK)
    if described.get("markov_rank"):
        shapes |= {"markov_head.markov_w1.weight": (vocab, RANK), "markov_head.markov_w2.weight": (len(ids), RANK)}
        shapes |= {"confidence_head.proj.weight": (1, width + RANK), "confidence_head.proj.bias": (1,)}
        if described.get("markov_head_type") == "gated":
            shapes["markov_head.gate_proj.weight"] = (RANK, width + RANK)
            shapes["markov_head.gate_proj.bias"] = (RANK,)
        if described.get("markov_head_type") == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * RANK, width + 2 * RANK)
            shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name or "scalar" in name:
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        elif "markov_w" in name or "codebook" in name or "base_kernel" in name:
            tensors[name] = rng.normal(0, 1, shape).astype(np.float32)
        else:
            tensors[name] = rng.normal(0, scale / np.sqrt(shape[-1]), shape).astype(np.float32)
    if form.mapped:
        rows = rng.normal(0, 1, (vocab, width)).astype(np.float32) if head is None else head
        tensors["lm_head.weight"] = np.ascontiguousarray(rows[ids])
        tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}
    stored = dict(tensors)
    if form.ends:  # never read
        stored |= {name: rng.normal(0, 1, (vocab, width)) for name in ("embed_tokens.weight", "lm_head.weight")}
    mask = vocab - 1 if mask is None else mask
    layer = {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": size["layers"], "hidden_act": "silu",
        "num_attention_heads": size["heads"], "num_key_value_heads": size["kv_heads"], "head_dim": size["head_dim"],
        "rms_norm_eps": 1e-5, "rope_theta": 100.0, "attention_bias": False, "max_position_embeddings": 256,
    }  # fmt: skip
    if "speculators_model_type" in described:
        layer |= {key: described.pop(key) for key in SLIDING if key in described}
        written: dict[str, Any] = {
            **described, "transformer_layer_config": layer, "mask_token_id": mask, "draft_vocab_size": len(ids),
            "aux_hidden_state_layer_ids": [layer + 1 for layer in features],
        }  # fmt: skip
    elif described["architectures"][0] in ("Qwen3DSparkModel", "Gemma4DSparkModel"):
        written = {
            **layer, **described, "vocab_size": vocab, "mask_token_id": mask, "target_layer_ids": list(features)
        }  # fmt: skip
    else:
        nested = {"mask_token_id": mask, "target_layer_ids": list(features), **form.nested}
        written = {**layer, **form.config, "vocab_size": vocab, "dflash_config": nested}
    written |= dict(config or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: item for key, item in written.items() if item is not None}))
    save_file({form.prefix + name: tensor for name, tensor in stored.items()}, folder / "model.safetensors")
    facts: dict[str, Any] = {"from_anchor": False, "windows": (None, None), "causal": (False, False)}
    spec = Spec(
        layers=size["layers"], heads=size["heads"], kv_heads=size["kv_heads"], head_dim=size["head_dim"], theta=100.0,
        eps=1e-5, mask=mask, **{**facts, **form.spec},
    )  # fmt: skip
    return Saved(tensors, spec, ids)
