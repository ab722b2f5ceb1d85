"""The models of `scale.py`: published shapes, their drafts, and published accept lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llama_shapes import eagle3_head, llama_8b

from specjax import Params, checkpoint, make_target
from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.costs import PLAIN, Tree
from specjax.drafters.base import none_drafter
from specjax.models.mtp_spec import published_mtp_config
from specjax.models.params import Bits
from specjax.outline import Outline

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 163840, "tie_word_embeddings": False,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Of deepseek-ai/DeepSeek-V3's config.json, without YaRN, which changes no count."""


@dataclass(frozen=True)
class Acceptance:
    """Drafts of a chain: the first is accepted with probability `first`, each further one with `later` if all before it
    were."""

    first: float
    later: float
    source: str

    def length(self, tree: Tree) -> float:
        """Tokens of a step, the target's own included."""
        return 1 + self.first * sum(self.later**i for i in range(tree.depth))

    @classmethod
    def of(cls, published: float, depth: int, source: str, first: float | None = None) -> Acceptance:
        """That gives chains of `depth` drafts the accept length `published`; `first`: None for the same everywhere."""

        def made(later: float) -> Acceptance:
            return cls(later if first is None else first, later, source)

        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if made(middle).length(Tree(depth, 1, depth + 1)) < published else (low, middle)
        return made(low)


@dataclass(frozen=True)
class Model:
    name: str
    weights: str  # how they are stored
    draft: str
    outline: Outline
    acceptance: Acceptance
    chains: tuple[Tree, ...] = tuple(Tree(steps, 1, steps + 1) for steps in (1, 2, 3, 5, 7))

    def accept(self, tree: Tree) -> float:
        return 1.0 if tree == PLAIN else self.acceptance.length(tree)


def described(
    config: ModelConfig, head: HeadConfig | MtpConfig | None, bits: Bits | None = None, draft_bits: Bits | None = None
) -> Outline:
    """Without parameters: shapes are enough for what is counted."""
    none = Params(None, None)
    return Outline(make_target(config), none, none_drafter(), head, None, bits, draft_bits, headers=False)


def llama_70b() -> ModelConfig:
    """Llama-3.1-70B's and Llama-3.3-70B's shape."""
    wider = {"hidden_size": 8192, "intermediate_size": 28672, "num_heads": 64}
    return replace(llama_8b(80), **wider)


def deepseek_v3() -> tuple[ModelConfig, MtpConfig, Bits]:
    """The target, its one MTP layer, and the storage of both: matrices in float8, embedding and output in bfloat16."""
    config = checkpoint.model_config(DEEPSEEK_V3, dtype="auto", platform="gpu")
    head = published_mtp_config("DeepseekV3ForCausalLM", config, 1)
    assert head is not None
    return config, head, Bits(8.0, ends=False)


CARD = "Hugging Face model card nebius/{}, mean of MT-bench, HumanEval and GSM8K, chains of 7, temperature {}"


def models() -> dict[str, Model]:
    """By the names that `scale.py` takes."""
    eight, seventy = llama_8b(32), llama_70b()
    deepseek, mtp, bits = deepseek_v3()
    of_8b = Acceptance.of(3.20, 7, CARD.format("EAGLE3-Llama-3.3-70B-Instruct (yuhuili's head for 8B)", 1))
    of_70b = Acceptance.of(3.26, 7, CARD.format("EAGLE3-Llama-3.3-70B-Instruct (RedHatAI's head)", 1))
    of_mtp = Acceptance.of(
        3.20, 7, CARD.format("MTP-DeepSeek-V3-0324 (original MTP)", 0) + "; the first draft 0.85 by arXiv:2412.19437",
        first=0.85,
    )  # fmt: skip
    return {
        "8b": Model("Llama-3.1-8B", "bfloat16", "EAGLE-3", described(eight, eagle3_head(eight)), of_8b),
        "70b": Model("Llama-3.1-70B", "bfloat16", "EAGLE-3", described(seventy, eagle3_head(seventy)), of_70b),
        "deepseek-v3": Model("DeepSeek-V3", "float8", "its MTP layer", described(deepseek, mtp, bits, bits), of_mtp),
    }
