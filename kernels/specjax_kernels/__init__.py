"""The operations of a forward: `linear`, `unembed`, `attention`. Which implementation runs is decided in here."""

from specjax_kernels.api import (
    IMPLEMENTATIONS,
    INACTIVE,
    attention,
    default_implementation,
    implementation_named,
    tree_attention,
)
from specjax_kernels.linear import CHEAP_ROWS, linear, unembed
from specjax_kernels.masks import CAUSAL, Causal, pack_bits, unpack_bits
from specjax_kernels.quantised import Quantised, dequantise, embed, quantise

__all__ = [
    "CAUSAL",
    "CHEAP_ROWS",
    "IMPLEMENTATIONS",
    "INACTIVE",
    "Causal",
    "Quantised",
    "attention",
    "default_implementation",
    "dequantise",
    "embed",
    "implementation_named",
    "linear",
    "pack_bits",
    "quantise",
    "tree_attention",
    "unembed",
    "unpack_bits",
]
