"""Tree attention over paged keys and values: one signature, several implementations, one definition."""

from specjax_kernels.api import IMPLEMENTATIONS, default_implementation, tree_attention
from specjax_kernels.masks import CAUSAL, Causal, pack_bits, unpack_bits

__all__ = [
    "CAUSAL",
    "IMPLEMENTATIONS",
    "Causal",
    "default_implementation",
    "pack_bits",
    "tree_attention",
    "unpack_bits",
]
