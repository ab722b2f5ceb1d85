"""Tree attention over paged keys and values: one signature, several implementations, one definition."""

from specjax_kernels.api import (
    IMPLEMENTATIONS,
    INACTIVE,
    default_implementation,
    implementation_named,
    tree_attention,
    tree_attention_packed,
)
from specjax_kernels.masks import CAUSAL, Causal, pack_bits, unpack_bits

__all__ = [
    "CAUSAL",
    "IMPLEMENTATIONS",
    "INACTIVE",
    "Causal",
    "default_implementation",
    "implementation_named",
    "pack_bits",
    "tree_attention",
    "tree_attention_packed",
    "unpack_bits",
]
