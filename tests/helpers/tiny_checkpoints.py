"""Small random checkpoints: saved by transformers, or written as GGUF files like llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_llama(folder: Path, **changes: Any) -> dict:
    """Save a random Llama; see `save_model`."""
    return save_model(folder, "LlamaForCausalLM", **changes)


def save_model(
    folder: Path, architecture: str, *, seed: int = 0, dtype: str = "float32", shard: str = "5GB", **changes: Any
) -> dict:
    """Save a random model with random norms, biases and routers. Returns its tensors, name -> float32 array.

    Args:
      architecture: a class of transformers, or MiMoForCausalLM, a Qwen2 with another architecture in config.json.
      changes: to ``SIZES``, of its config.json.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, "Qwen2ForCausalLM" if architecture == "MiMoForCausalLM" else architecture)
    model = kind(kind.config_class(**(SIZES | changes)))
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            factors = ("bias", "sinks", "gate.weight", "router.weight", "layer_scalar", "router.scale", "expert_scale")
            if "norm" in name or (name.endswith(factors) and "per_layer_input" not in name):
                parameter.uniform_(0.5, 1.5)
                if "Gemma4" in architecture and name.endswith("q_norm.weight"):
                    parameter *= 0.25  # scores are not scaled by E ** -0.5
            elif name.endswith("A_log"):  # decays by a factor of about 0.9 to 0.5 a token
                parameter.uniform_(-3.0, -1.0)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    if architecture == "MiMoForCausalLM":
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"architectures": [architecture], "model_type": "mimo"}
        file.write_text(json.dumps(config))
    return {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}


MTP_NAMES: dict[str, tuple[str, str, dict[str, str]]] = {
    "mimo": (
        "model.mtp_layers.{i}.", "model.mtp_layers.{i}.",
        {"fc": "input_proj", "embedding": "token_layernorm", "feature": "hidden_layernorm", "final": "final_layernorm"},
    ),
    "deepseek": (
        "model.layers.{layer}.", "model.layers.{layer}.",
        {"fc": "eh_proj", "embedding": "enorm", "feature": "hnorm", "final": "shared_head.norm"},
    ),
    "qwen3_next": (
        "mtp.layers.{i}.", "mtp.",
        {"fc": "fc", "embedding": "pre_fc_norm_embedding", "feature": "pre_fc_norm_hidden", "final": "norm"},
    ),
}  # fmt: skip
"""Style of MTP layers -> prefixes of a layer and of the tensors around it, and names of these tensors."""


def save_mtp(folder: Path, architecture: str, style: str, *, count: int = 1, seed: int = 0, **changes: Any) -> dict:
    """Save a random model whose shards also hold MTP layers; see ``save_model``.

    The layer and the final norm of head i are from a random model of one layer, saved in ``folder / "head{i}"``. In the
    style qwen3_next all heads share the first head's norms and projection.

    Returns: the tensors around each layer, ``{i}.fc`` and so on -> float32 array.
    """
    from safetensors.numpy import load_file, save_file

    save_model(folder, architecture, seed=seed, **changes)
    tensors, around = load_file(folder / "model.safetensors"), {}
    width, layers = ((SIZES | changes)[key] for key in ("hidden_size", "num_hidden_layers"))
    rng, (inner, outer, names) = np.random.default_rng(seed), MTP_NAMES[style]
    single: dict[str, Any] = changes | {"num_hidden_layers": 1}
    if style == "deepseek":
        single["first_k_dense_replace"] = 0
    if "full_attention_interval" in changes:
        single["full_attention_interval"] = 1
    for i in range(count):
        save_model(folder / f"head{i}", architecture, seed=seed + 1 + i, **single)
        layer = load_file(folder / f"head{i}" / "model.safetensors")
        parts = {
            "fc": rng.normal(0, 0.3, (width, 2 * width)).astype(np.float32),
            "embedding": rng.uniform(0.5, 1.5, width).astype(np.float32),
            "feature": rng.uniform(0.5, 1.5, width).astype(np.float32),
            "final": layer["model.norm.weight"],
        }
        if i and style == "qwen3_next":
            parts = {name: around[f"0.{name}"] for name in parts}
        around |= {f"{i}.{name}": tensor for name, tensor in parts.items()}
        numbers = {"i": i, "layer": layers + i}
        for name, tensor in layer.items():
            if name.startswith("model.layers.0."):
                tensors[inner.format(**numbers) + name.removeprefix("model.layers.0.")] = tensor
        tensors |= {f"{outer.format(**numbers)}{names[name]}.weight": parts[name] for name in parts}
        if style == "deepseek":
            for name, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
                tensors[f"{inner.format(**numbers)}{name}.weight"] = tensors[f"{original}.weight"].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return around


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of q and k rows in a GGUF file: in each head, rows 0, E/2, 1, E/2 + 1, ..."""
    width = len(rows) // heads
    order = [h * width + half * (width // 2) + i for h in range(heads) for i in range(width // 2) for half in (0, 1)]
    return rows[order]


def byte_level_metadata(size: int = 300) -> dict[str, Any]:
    """Tokenizer metadata: three special tokens, the 256 bytes, three merges, unused ids up to ``size``."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "ll", "hell", "12"]
    types = [3, 3, 3] + [1] * (len(tokens) - 3)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types + [5] * (size - len(types)),
        "merges": ["h e", "l l", "he ll", "1 2"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
    }


def write_gguf(
    file: Path,
    tensors: dict[str, np.ndarray],
    *,
    tokenizer: dict[str, Any] | None = None,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    quantize: bool = False,
    **changes: Any,
) -> None:
    """Write a GGUF file with the weights of ``save_llama``.

    Args:
      tensors: Hugging Face names.
      extra: further tensors under their GGUF names.
      metadata: further keys, int, float or string.
      quantize: matrices as Q8_0.
      changes: to ``SIZES``.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize as encode

    sizes = SIZES | changes
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    for key, value in (tokenizer or byte_level_metadata(sizes["vocab_size"])).items():
        key = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    heads = {"q_proj": sizes["num_attention_heads"], "k_proj": sizes["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if kind := heads.get(name.split(".")[-2]):
            tensor = llama_cpp_order(tensor, kind)
        if name in GGUF_NAMES:
            name = GGUF_NAMES[name]
        else:
            _, _, layer, *middle, suffix = name.split(".")
            name = f"blk.{layer}.{GGUF_LAYER_NAMES['.'.join(middle)]}.{suffix}"
        if quantize and tensor.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, encode(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
