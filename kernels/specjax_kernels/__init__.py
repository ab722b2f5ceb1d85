"""The operations of a step, and their implementations for CPUs and GPUs. In reading order:

attention, call    the operation and the choice of an implementation; its arguments and masks
reference          definitions of attention and products
xla, gpu_attention implementations of attention; launch: block sizes of the GPU kernels
gpu_language       what GPU kernels are written in; pallas_triton and triton compile them
linear, quantised  products with weights of 4 to 32 bits, and weights of 4 and 8 bits; gpu_quantised for GPUs
sampling           argmax, top-k and top-p of a vocabulary
cpu/               kernels that Numba compiles
platforms, mesh    branches by platform, and tensor parallelism
specs              shapes that tests and benchmarks share
"""

import warnings

from specjax_kernels.attention import (
    IMPLEMENTATIONS,
    attention,
    default_implementation,
    implementation_named,
    tree_attention,
)
from specjax_kernels.call import CAUSAL, INACTIVE, Causal, mask_words, pack_bits, unpack_bits
from specjax_kernels.linear import Norm, linear, rms_norm, skips_padding, unembed
from specjax_kernels.quantised import Quantised, dequantise, embed, quantise
from specjax_kernels.sampling import argmax, largest, top_k

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

__all__ = [
    "CAUSAL",
    "IMPLEMENTATIONS",
    "INACTIVE",
    "Causal",
    "Norm",
    "Quantised",
    "argmax",
    "attention",
    "default_implementation",
    "dequantise",
    "embed",
    "implementation_named",
    "largest",
    "linear",
    "mask_words",
    "pack_bits",
    "quantise",
    "rms_norm",
    "skips_padding",
    "top_k",
    "tree_attention",
    "unembed",
    "unpack_bits",
]
