"""Small random assistants of Gemma 4, saved by transformers for a target that it saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TAKEN = ("head_dim", "num_key_value_heads", "vocab_size", "sliding_window", "rope_parameters", "attention_k_eq_v",
         "num_global_key_value_heads", "global_head_dim", "max_position_embeddings")  # fmt: skip


def save_assistant(
    folder: Path, target: Path, *, centroids: int = 0, best: int = 0, seed: int = 0, scale: float = 0.4, **changes: Any
) -> Path:
    """Saves an assistant of four layers for the target in a folder.

    Args:
      centroids: clusters of the vocabulary, whose size they divide; 0: a whole output matrix.
      best: clusters whose logits are computed.
      scale: deviation of the matrices.
      changes: to the assistant's `text_config`, or to its backbone_hidden_size.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    described = json.loads((target / "config.json").read_text())
    described = described.get("text_config", described)
    unified = "Unified" if "unified" in described["model_type"] else ""
    sizes = _published_form(described)
    text: dict[str, Any] = {key: sizes[key] for key in TAKEN if sizes.get(key) is not None}
    text |= {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "final_logit_softcapping": None,
    }  # fmt: skip
    outer = {
        "backbone_hidden_size": changes.pop("backbone_hidden_size", described["hidden_size"]),
        "use_ordered_embeddings": centroids > 0, "num_centroids": centroids or 2048,
        "centroid_intermediate_top_k": best or 32,
    }  # fmt: skip
    text_config = getattr(transformers, f"Gemma4{unified}TextConfig")(**text | changes)
    config = getattr(transformers, f"Gemma4{unified}AssistantConfig")(text_config=text_config, **outer)
    model = getattr(transformers, f"Gemma4{unified}AssistantForCausalLM")(config)
    with torch.no_grad():
        for name, leaf in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("token_ordering"):
                leaf.copy_(torch.randperm(len(leaf)))
            elif "norm" in name or name.endswith("layer_scalar"):
                leaf.uniform_(0.5, 1.5)
                if name.endswith("q_norm.weight"):
                    leaf *= 0.25  # scores are not scaled by E ** -0.5
            elif name.endswith("weight"):
                leaf.normal_(0, scale)
    model.save_pretrained(folder)
    return folder


def load_assistant_oracle(folder: Path, window: int) -> Any:
    """transformers' module with a window, whose sliding layers see the last `window` + 1 keys."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    config.text_config.sliding_window = window
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(folder, config=config)
    model.set_attn_implementation("eager")
    return model.eval()


def _published_form(described: dict[str, Any]) -> dict[str, Any]:
    """transformers writes the sizes of layers without a window in `per_layer_config`."""
    of_layer = next(iter((described.get("per_layer_config") or {}).values()), {})
    sizes = dict(described)
    if "head_dim" in of_layer:
        sizes["global_head_dim"] = of_layer["head_dim"]
    if described.get("attention_k_eq_v") and "num_key_value_heads" in of_layer:
        sizes["num_global_key_value_heads"] = of_layer["num_key_value_heads"]
    return sizes
