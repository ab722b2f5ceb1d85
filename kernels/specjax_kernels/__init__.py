"""The operations of a step, and which implementation of each runs: `linear`, `unembed`, `attention`, `commit_all`."""

from specjax_kernels.api import (
    IMPLEMENTATIONS,
    INACTIVE,
    attention,
    default_implementation,
    implementation_named,
    tree_attention,
)
from specjax_kernels.largest import argmax
from specjax_kernels.linear import CHEAP_ROWS, linear, unembed
from specjax_kernels.masks import CAUSAL, Causal, pack_bits, unpack_bits
from specjax_kernels.mesh import largest, top_k
from specjax_kernels.norm import Norm, rms_norm
from specjax_kernels.pages import commit_all, take_rows
from specjax_kernels.quantised import Quantised, dequantise, embed, quantise

__all__ = [
    "CAUSAL",
    "CHEAP_ROWS",
    "IMPLEMENTATIONS",
    "INACTIVE",
    "Causal",
    "Norm",
    "Quantised",
    "argmax",
    "attention",
    "commit_all",
    "default_implementation",
    "dequantise",
    "embed",
    "implementation_named",
    "largest",
    "linear",
    "pack_bits",
    "quantise",
    "rms_norm",
    "take_rows",
    "top_k",
    "tree_attention",
    "unembed",
    "unpack_bits",
]
