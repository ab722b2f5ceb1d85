"""The arguments of `tree_attention` as one value: checked once, then given to an implementation."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax_kernels.masks import Causal, words

DTYPES = ("float32", "bfloat16", "float16")

FLOATS = {"q": "B N H E", "k_block": "B C K E", "k_pages": "P S K E", "v_block": "B C K Ev", "v_pages": "P S K Ev"}
INTEGERS = {"page_table": "B T", "prefix_length": "B", "queries": "B", "q_positions": "B N", "block_positions": "B C"}
"""The axes of each array."""


class Shape(NamedTuple):
    """Everything static about a call. G = H / K."""

    B: int
    H: int
    N: int
    C: int
    K: int
    G: int
    E: int
    Ev: int
    P: int
    S: int
    T: int
    latent: bool  # values are keys[..., :Ev]
    causal: bool
    scale: float
    window: int | None
    softcap: float | None


class Call(NamedTuple):
    """The arguments of `specjax_kernels.tree_attention`, which describes them."""

    q: Array
    k_block: Array
    v_block: Array | None
    k_pages: Array
    v_pages: Array | None
    page_table: Array
    prefix_length: Array
    q_positions: Array
    block_positions: Array
    mask: Causal | Array
    scale: float
    v_width: int | None = None
    window: int | None = None
    softcap: float | None = None
    queries: Array | None = None  # int32 [B]: how many of the N count; None: all

    @property
    def bits(self) -> Array:
        """The mask's bits, uint32 [B, N, ceil(C / 32)]; a causal mask has none."""
        assert not isinstance(self.mask, Causal)
        return jnp.broadcast_to(self.mask, (self.q.shape[0], *self.mask.shape[1:]))

    @property
    def shape(self) -> Shape:
        B, N, H, E = self.q.shape
        P, S, K, _ = self.k_pages.shape
        C, T = self.k_block.shape[1], self.page_table.shape[1]
        Ev = self.v_width if self.v_block is None else self.v_block.shape[-1]
        assert Ev is not None  # see `check`
        latent, causal = self.v_block is None, isinstance(self.mask, Causal)
        return Shape(B, H, N, C, K, H // K, E, Ev, P, S, T, latent, causal, self.scale, self.window, self.softcap)


def check(call: Call) -> None:
    """Raises ValueError, with the values, for arguments that do not fit together."""
    if (call.v_block is None) != (call.v_pages is None):
        given, missing = ("v_block", "v_pages") if call.v_pages is None else ("v_pages", "v_block")
        raise ValueError(
            f"values are given for both block and pages, or for neither: got {given}, but {missing} is None"
        )
    sizes: dict[str, tuple[int, str]] = {}
    for name, letters in (FLOATS | INTEGERS).items():
        array: Array | None = getattr(call, name)
        if array is None:
            continue
        if name in INTEGERS and array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
        if name in FLOATS and (array.dtype != call.q.dtype or str(array.dtype) not in DTYPES):
            raise ValueError(
                f"q, keys and values share a dtype out of {', '.join(DTYPES)}: "
                f"q is {call.q.dtype}, {name} is {array.dtype}"
            )
        axes = letters.split()
        if array.ndim != len(axes):
            raise ValueError(f"{name} must be [{', '.join(axes)}], got shape {array.shape}")
        for axis, size in zip(axes, array.shape, strict=True):
            known, source = sizes.setdefault(axis, (size, name))
            if size != known:
                raise ValueError(f"{axis} is {known} in {source} but {size} in {name} {array.shape}")
            if size < 1:
                raise ValueError(f"{axis} must be at least 1, got {size} in {name} {array.shape}")
    B, N, C, H, K, E = (sizes[axis][0] for axis in "BNCHKE")
    if H % K:
        raise ValueError(f"H must be a multiple of K, got H = {H} query heads and K = {K} key/value heads")
    if call.v_block is None and (call.v_width is None or not 1 <= call.v_width <= E):
        raise ValueError(f"without values v_width must lie in 1 .. E = {E}, got {call.v_width}")
    if call.v_block is not None and call.v_width not in (None, call.v_block.shape[-1]):
        raise ValueError(
            f"v_width is {call.v_width}, but v_block {call.v_block.shape} has width {call.v_block.shape[-1]}"
        )
    if call.window is not None and not 1 <= call.window < 2**31:
        raise ValueError(f"window is the number of keys a query sees, from 1 to 2**31 - 1 (or None), got {call.window}")
    if call.softcap is not None and not call.softcap > 0:
        raise ValueError(f"softcap must be positive (or None), got {call.softcap}")
    if isinstance(call.mask, Causal):
        if C != N:
            raise ValueError(f"a CAUSAL mask needs C == N, got C = {C} block keys and N = {N} queries")
    elif getattr(call.mask, "dtype", None) != jnp.uint32:
        raise ValueError(f"mask must be CAUSAL or uint32 bits, got {getattr(call.mask, 'dtype', call.mask)}")
    elif call.mask.shape not in ((B, N, words(C)), (1, N, words(C))):
        raise ValueError(f"mask must be [B, N, ceil(C / 32)] = {(B, N, words(C))} for C = {C}, got {call.mask.shape}")
