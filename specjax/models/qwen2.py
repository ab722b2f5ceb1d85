"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values; MiMo-7B, the same with multi-token prediction."""

from specjax.models.llama import FAMILY

__all__ = ["FAMILY"]
