"""Checkpoints as Qwen3.5's are published: a multimodal model's names, and the experts of a layer in one tensor."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import save_model

from specjax.checkpoint import load_params, model_config, resolve

SIZES = {
    "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_names(tmp_path, dtype):
    plain, published = tmp_path / "plain", tmp_path / "published"
    save_model(plain, "Qwen3_5MoeForCausalLM", dtype=dtype, **SIZES)
    published.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stacked: dict[str, np.ndarray] = {}
    for name in {re.sub(r"\.experts\.\d+\..*", "", name) for name in tensors if ".experts." in name}:
        parts = {
            one: np.stack([tensors.pop(f"{name}.experts.{e}.{one}_proj.weight") for e in range(3)])
            for one in ("gate", "up", "down")
        }
        stacked[f"{name}.experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        stacked[f"{name}.experts.down_proj"] = parts["down"]
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in (tensors | stacked).items()}
    renamed["model.visual.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
    save_file(renamed, published / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (published / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": False}))
    loaded = []
    for folder in (plain, published):
        files = resolve(str(folder), progress=False)
        config = model_config(files.config, dtype=dtype)
        loaded.append((config, load_params(files, config, progress=False)))
    (config, params), (other, same) = loaded
    assert config == other and config.delta is not None and config.experts is not None and config.experts.shared_gate
    for name, leaf in params["layers_0"].items():
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.asarray(same["layers_0"][name], np.float32))
