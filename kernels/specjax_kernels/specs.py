"""Named shapes of `tree_attention` with seeded inputs, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax_kernels.call import CAUSAL, INACTIVE, pack_bits

_packed = jax.jit(pack_bits)  # one program instead of one for each operation

MaskKind = Literal["causal", "tree", "random"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One shape of `tree_attention`. Letters as in `specjax.cache`. Masks: "causal"; "tree", the ancestors in a random
    tree of C nodes, whose last N nodes are the queries; "random", in which some rows see nothing."""

    name: str
    prefix: tuple[int, ...]  # [B]: committed tokens of each row, or INACTIVE
    N: int
    C: int
    H: int
    K: int
    E: int
    T: int
    S: int = 16
    Ev: int | None = None  # None: E
    latent: bool = False  # values are keys[..., :Ev]
    mask: MaskKind = "causal"
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    holes: bool = False  # some entries inside the prefix are holes: P, or another invalid id
    tags: tuple[str, ...] = ()  # "test": small enough for the suite; "bench": a shape people run

    @property
    def B(self) -> int:
        return len(self.prefix)

    @property
    def v_width(self) -> int:
        return self.E if self.Ev is None else self.Ev

    @property
    def P(self) -> int:
        """Pages in the pool: the used ones, and three unused ones."""
        return sum(-(-max(n, 0) // self.S) for n in self.prefix) + 3

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that the operation must read: committed and block, each once; holes count."""
        window = max(self.prefix) if self.window is None else self.window
        tokens = sum(min(n, window) + self.C for n in self.prefix if n != INACTIVE)
        width = self.E if self.latent else self.E + self.v_width
        return tokens * self.K * width * jnp.dtype(self.dtype).itemsize

    def arguments(self, seed: int = 0, *, poison: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs for this spec, as (args, kwargs) of `tree_attention`.

        Pages are a random permutation of the pool; entries past a row's prefix are holes (P). With `poison` every slot
        and block key that no query sees holds NaN.
        """
        rng = np.random.default_rng(seed)
        B, N, C, K, P, S, T = self.B, self.N, self.C, self.K, self.P, self.S, self.T
        shapes = (B, N, self.H, self.E), (B, C, K, self.E), (B, C, K, self.v_width), (P, S, K, self.E)
        floats = [rng.standard_normal(shape, dtype=np.float32) for shape in (*shapes, (P, S, K, self.v_width))]
        _, k_block, v_block, k_pages, v_pages = floats
        page_table = np.full((B, T), P, np.int32)
        free = list(rng.permutation(P))
        unread = np.ones((P, S), bool)
        prefix = np.array(self.prefix, np.int32)
        depth, visible = _block(self.mask, B, N, C, rng)
        block_positions = prefix[:, None] + depth
        q_positions = block_positions[:, C - N :]
        for b, length in enumerate(self.prefix):
            oldest = 0 if self.window is None else q_positions[b].min() - self.window + 1
            for index in range(-(-length // S)):
                page = free.pop()
                if self.holes and index % 3 == 1:
                    page_table[b, index] = (P, -1, P + 5, -(2**31), 2**31 - 1)[index // 3 % 5]
                    continue
                page_table[b, index] = page
                token = index * S + np.arange(S)
                unread[page] = (token < oldest) | (token >= length)
        if poison:
            unseen = np.zeros((B, C), bool) if visible is None else ~visible.any(1)
            unseen |= (prefix == INACTIVE)[:, None]
            for array, where in ((k_pages, unread), (v_pages, unread), (k_block, unseen), (v_block, unseen)):
                array[where] = np.nan

        missing = (2, 4) if self.latent else ()
        arrays = [None if i in missing else jnp.asarray(array, self.dtype) for i, array in enumerate(floats)]
        mask = CAUSAL if visible is None else _packed(jnp.asarray(visible))
        integers = (page_table, prefix, q_positions, block_positions)
        args = (*arrays, *map(jnp.asarray, integers), mask)
        options: dict[str, Any] = {"scale": self.E**-0.5, "window": self.window, "softcap": self.softcap}
        if self.sinks:  # of the size of the sum over many keys
            options["sinks"] = jnp.asarray(rng.normal(3, 1, self.H), self.dtype)
        return args, options | ({"v_width": self.v_width} if self.latent else {})


def _block(kind: MaskKind, B: int, N: int, C: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    """Depths int32 [B, C] and visibility bool [B, N, C] (None: causal) of the block's keys."""
    if kind == "causal":
        return np.broadcast_to(np.arange(C, dtype=np.int32), (B, C)), None
    depth = np.zeros((B, C), np.int32)
    sees = np.zeros((B, C, C), bool)
    for b in range(B):
        for node in range(C):
            if node:
                parent = rng.integers(max(0, node - 4), node)
                depth[b, node] = depth[b, parent] + 1
                sees[b, node] = sees[b, parent]
            sees[b, node, node] = True
    if kind == "tree":
        return depth, sees[:, C - N :]
    visible = rng.random((B, N, C)) < 0.5
    visible[:, ::3] = False
    return depth, visible


def _family(prefix: str, *tags: str, **shape: Any) -> Callable[..., Spec]:
    """Makes specs that share a shape; C is N unless it is given."""

    def spec(name: str, lengths: tuple[int, ...], N: int = 3, **more: Any) -> Spec:
        return Spec(prefix + name, lengths, N, **({"C": N, "tags": tags} | shape | more))

    return spec


_smollm2 = _family("smollm2-", "bench", H=9, K=3, E=64, T=64)
_llama = _family("llama8b-", "bench", "large", H=32, K=8, E=128, T=256, dtype="bfloat16")
_wide = _family("", "bench", "large", T=128, dtype="bfloat16", mask="tree")
"""Other families' heads: 80 and 96 (Phi), 256 (Gemma), latent values (DeepSeek)."""
_gpt_oss = _family("gpt-oss-", "bench", "large", H=64, K=8, E=64, T=256, dtype="bfloat16", sinks=True)
_odd = _family("", "test", H=4, K=2, E=16, T=8, S=4)

SPECS: tuple[Spec, ...] = (
    *(_smollm2(f"decode-{length}", (length,), 1) for length in (50, 300)),
    _smollm2("decode-300-long-table", (300,), 1, T=512),
    _smollm2("decode-900", (900,), 1),
    _smollm2("decode-2000", (2000,), 1, T=512),
    _smollm2("decode-4x", (50, 200, 350, 500), 1),
    _smollm2("decode-16x", tuple(range(40, 680, 40)), 1),
    _smollm2("decode-48x", tuple(range(10, 490, 10)), 1),
    _smollm2("chain-4", (300,), 4),
    *(_smollm2(f"tree-{N}", (300,), N, mask="tree") for N in (8, 16)),
    _smollm2("tree-16-4x", (50, 200, 350, 500), 16, mask="tree"),
    _smollm2("beam-4-of-16", (300,), 4, C=16, mask="tree"),
    _smollm2("prefill-64", (0,), 64),
    _smollm2("prefill-256", (256,), 256),
    _smollm2("prefill-512", (512,), 512, T=512),
    _smollm2("tree-16-bfloat16", (300,), 16, mask="tree", dtype="bfloat16"),
    *(_llama(f"decode-{length}", (length,), 1) for length in (1000, 4000)),
    _llama("decode-16x", tuple(range(100, 1700, 100)), 1),
    _llama("chain-8", (1000,), 8),
    _llama("tree-32", (1000,), 32, mask="tree"),
    _llama("tree-64-8x", tuple(range(200, 1800, 200)), 64, mask="tree"),
    *(_llama(f"beam-{N}-of-{8 * N}", (1000,), N, C=8 * N, mask="tree") for N in (8, 16)),
    _llama("tree-64-window-softcap", (1000,), 64, C=100, mask="tree", window=500, softcap=50.0),
    _llama("prefill-1024", (1024,), 1024),
    _llama("prefill-window-softcap", (1024,), 1024, window=500, softcap=50.0),
    _llama("prefill-2048-float16", (0,), 2048, dtype="float16"),
    _gpt_oss("tree-8", (1000,), 8, mask="tree"),
    _gpt_oss("decode-window", (4000,), 1, window=128),
    _llama("decode-131000", (131000,), 1, T=2048, S=64),
    _llama("chain-8-32x-8000", (8000,) * 32, 8, T=128, S=64),
    _llama("chain-8-64x-inactive", (1000, *(INACTIVE,) * 63), 8),
    _llama("decode-window-softcap", (8000,), 1, T=512, window=4096, softcap=50.0),
    _llama("tree-32-float32", (1000,), 32, mask="tree", dtype="float32"),
    _llama("beam-float32", (1000,), 64, C=128, mask="tree", dtype="float32", window=500, softcap=50.0),
    *(_wide(f"heads-{E}", (1000, 300), 8, H=32, K=32, E=E) for E in (80, 96)),
    _wide("heads-256", (1000, 300), 8, H=16, K=8, E=256),
    _wide("heads-256-float32", (1000, 300), 8, H=16, K=8, E=256, dtype="float32"),
    _wide("heads-latent-576", (1000, 300), 8, H=16, K=1, E=576, Ev=512, latent=True),
    _odd("empty-prefix", (0, 0)),
    _odd("mixed-prefix", (0, 1, 17, 32)),
    _odd("page-boundary", (4, 8, 31, 32)),
    _odd("inactive-rows", (9, INACTIVE, 30, INACTIVE)),
    _odd("inactive-tree", (INACTIVE, 30), N=7, mask="tree"),
    _odd("page-size-1", (0, 5, 19), S=1, T=20),
    _odd("page-size-5", (3, 40, 11), S=5),
    _odd("one-page-table", (4, 2), T=1),
    _odd("many-chunks", (0, 300, 513), S=16, T=40),
    _odd("holes", (30, 32, 13), holes=True),
    _odd("decode", (9, 30), N=1),
    _odd("tree", (9, 30, 0), N=7, mask="tree"),
    _odd("tree-33", (9, 30), N=33, mask="tree"),
    _odd("beam", (9, 30), N=4, C=37, mask="tree"),
    _odd("random-mask", (9, 0), N=6, C=40, mask="random"),
    *(_odd(f"gqa-{H // K}", (9, 30), H=H, K=K) for H, K in ((3, 3), (9, 3), (8, 1))),
    *(_odd(f"width-{E}", (9, 30), E=E) for E in (64, 80, 96, 128, 256)),
    _odd("value-width", (9, 30), Ev=24),
    _odd("value-width-32", (9, 30), N=3, C=3, E=48, Ev=32),
    _odd("many-block-keys", (300, 0, 9), N=20, C=150, T=80, mask="random"),
    _odd("latent", (9, 30), H=8, K=1, E=40, Ev=32, latent=True),
    _odd("latent-tree", (9, 30), N=6, H=8, K=1, E=40, Ev=32, latent=True, mask="tree"),
    _odd("window", (9, 30), window=5),
    _odd("window-1", (9, 30), window=1),
    _odd("window-many-chunks", (100, 513), S=16, T=40, window=20),
    _odd("window-tree-holes", (9, 30), N=7, window=11, mask="tree", holes=True),
    _odd("softcap", (9, 30), softcap=2.0),
    _odd("softcap-large", (9, 30), softcap=1000.0),
    _odd("wild-holes", (60, 9, 56), T=16, holes=True, mask="tree"),
    _odd("softcap-window-beam", (9, 30), N=2, C=9, softcap=2.0, window=6, mask="tree"),
    _odd("causal-33", (9, 30), N=33),
    _odd("sinks", (0, 9, INACTIVE), sinks=True),
    _odd("sinks-many-chunks", (0, 300, 513), S=16, T=40, sinks=True),
    _odd("sinks-window-tree-holes", (9, 30), N=7, window=11, mask="tree", holes=True, sinks=True),
    _odd("sinks-softcap-random", (9, 0), N=6, C=40, E=64, mask="random", softcap=2.0, sinks=True),
    _odd("sinks-latent", (9, 30), H=8, K=1, E=40, Ev=32, latent=True, sinks=True),
    _odd("sinks-bfloat16", (9, 300), N=7, S=16, T=40, mask="tree", window=128, dtype="bfloat16", sinks=True),
    *(_odd(dtype, (9, 30), N=7, mask="tree", dtype=dtype) for dtype in ("bfloat16", "float16")),
    _odd("bfloat16-latent-window", (9, 30), H=8, K=1, E=40, Ev=32, latent=True, window=6, dtype="bfloat16"),
)


def tagged(tag: str) -> tuple[Spec, ...]:
    """The specs with a tag: "test", "bench", "large"."""
    return tuple(spec for spec in SPECS if tag in spec.tags)


def named(name: str) -> Spec:
    """The spec of a name. Raises ValueError if there is none."""
    by_name = {spec.name: spec for spec in SPECS}
    if name not in by_name:
        raise ValueError(f"no spec {name!r}; there are: {', '.join(by_name)}")
    return by_name[name]
