"""Declarations of parameters: name, shape, logical axes, initial values, and the tensors that fill each.

A table is a tuple of `Scope`s, computed from a model's or head's config. Initial values, loading and writing
checkpoints, sharding, sizes and the optimiser's groups follow from it.

Shapes are written in dimension letters. "M -> K Q E" is a linear map from an axis M to three axes; it has the shape
[M, K, Q, E], as all weights are laid out [in, out...]. Further letters than in `specjax.cache`: Q = G + 2, a key/value
group (its query heads, its key, its value); 2, the gate and the up projection of a gated MLP; X experts, i and s the
widths of an expert's and of the shared MLP; of latent attention c the latent, a the queries' latent, n and r a head's
channels without and with rotary embedding, v its values, q = n + r, w = n + v, p = c + r; of gated attention d = 2 E;
of gated delta nets h key heads, j value heads for each, b = 2 j, k and u the channels of a key and of a value, e = j u
the values of a key head, A = 2 k, y = A + e its query, key and values, Z = y + e, t taps of the convolution; of Gemma 4
f, g, l and o in place of K, G, E and Q in layers without a window, o without values that are keys, D = 2 I, P channels
of a layer's own embeddings, Y = L P, U their tokens.

A checkpoint's tensor fills a leaf or a part of it. Its axes are products of letters: "KGE M" is a matrix [K*G*E, M].
Loading splits the products and transposes to the leaf's order. Worked example, H = 4 query heads and K = 2 key/value
heads, so G = 2: row h*E + e of `q_proj.weight` is query head h = k*G + g, that is (k, g, e) of "KGE"; it becomes
qkv[:, k, g, e]. Keys go to qkv[:, k, G, e] and values to qkv[:, k, G + 1, e].

Imports no jax, so that reading a checkpoint's description is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import ml_dtypes  # noqa: F401 (gives numpy bfloat16)
import numpy as np

from specjax.config import HeadConfig, ModelConfig

if TYPE_CHECKING:
    import flax.linen as nn
    from jax import Array

Sizes = Mapping[str, int]  # by dimension letter

T = TypeVar("T")

# Names that all families' checkpoints share.
EMBED_TENSOR, HEAD_TENSOR = "model.embed_tokens.weight", "lm_head.weight"
# The logical axes of dimension letters, which a tensor-parallel mesh may split. Other axes are never split.
AXES = {
    "V": "vocab",
    "W": "vocab",
    "K": "kv_heads",
    "H": "heads",
    "I": "mlp",
    "i": "mlp",
    "s": "mlp",
    "X": "experts",
    "h": "heads",
    "f": "kv_heads",
    "D": "mlp",
    "U": "vocab",
}
LAYER_EMBEDDINGS = "embed_layers"  # of Gemma 4's layers
CLUSTERED = "embed_clustered"  # the output matrix of an assistant that computes the logits of some clusters of tokens
EMBEDDINGS = ("embed", LAYER_EMBEDDINGS)
"""Leaves of which a token reads a row."""


class Part(NamedTuple):
    """Indices of a leaf's axis that a tensor fills, starting at the size of `after` plus `offset`."""

    axis: str
    letter: str = ""  # the tensor's axis in place of the leaf's; empty: one index
    after: str = ""
    offset: int = 0

    def of(self, sizes: Sizes) -> int | slice:
        start = sizes.get(self.after, 0) + self.offset
        return slice(start, start + sizes[self.letter]) if self.letter else start


QUERIES, KEY, VALUE = Part("Q", "G"), Part("Q", after="G"), Part("Q", after="G", offset=1)
GATE, UP = Part("2"), Part("2", offset=1)


def renamed(leaves: Iterable[Leaf], letters: Mapping[str, str]) -> tuple[Leaf, ...]:
    """Leaves with other dimension letters of their shapes and tensors."""
    named = str.maketrans(dict(letters))

    def part(part: Part) -> Part:
        return part._replace(**{key: getattr(part, key).translate(named) for key in ("axis", "letter", "after")})

    def tensor(tensor: Tensor) -> Tensor:
        return replace(tensor, axes=tensor.axes.translate(named), parts=tuple(map(part, tensor.parts)))

    return tuple(
        replace(leaf, letters=leaf.letters.translate(named), tensors=tuple(map(tensor, leaf.tensors)))
        for leaf in leaves
    )


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint."""

    name: str  # in safetensors, after the prefix of its scope
    axes: str  # letters of one axis are written together
    parts: tuple[Part, ...] = ()  # indices of the leaf; empty: all. A stacked expert: (Part("X", offset=3), GATE)
    gguf: str = ""  # name in GGUF files, after the prefix of its scope; empty: absent there
    interleaved: bool = False  # GGUF files hold its rows in llama.cpp's rotary order, see `checkpoint.gguf`
    # First axes of all stacked tensors, and the index of this one: (("KGE", "KE", "KE"), 1) are the keys in `qkv_proj`.
    fused: tuple[tuple[str, ...], int] | None = None
    # Only a part of an axis: the axis, the part's letter, and the letter that precedes it: ("w", "v", "n").
    cut: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class Leaf:
    """One array of parameters."""

    name: str
    letters: str  # of its axes; a linear map has an arrow from inputs to outputs
    tensors: tuple[Tensor, ...] = ()  # together they fill the leaf
    # normal: deviation 0.02; indices: 0, 1, 2, ...; identity: 1 for the first of the taps [2, T, M], else 0
    init: Literal["normal", "ones", "zeros", "indices", "identity"] = "normal"
    dtype: str | None = None  # None: the model's
    replicated: bool = False  # never split over devices

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(self.letters.replace("->", "").split())

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical axis of each axis."""
        return tuple(None if self.replicated else AXES.get(letter) for letter in self.dims)

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Input and output axes of a linear map; None: a norm, a bias or a table."""
        inputs, arrow, _ = self.letters.partition("->")
        first = len(inputs.split())
        return (tuple(range(first)), tuple(range(first, len(self.dims)))) if arrow else None

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.dims)

    def initial(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Initial values; the signature is that of Flax's initialisers."""
        import jax

        if self.init == "indices":
            return jax.numpy.arange(prod(shape), dtype=dtype).reshape(shape)
        if self.init == "identity":
            return jax.numpy.zeros(shape, dtype).at[:, 0].set(1)
        init = jax.nn.initializers
        return {"normal": init.normal(0.02), "ones": init.ones, "zeros": init.zeros}[self.init](key, shape, dtype)


class Scope(NamedTuple):
    """The leaves of one layer, or the leaves outside the layers."""

    leaves: tuple[Leaf, ...]
    name: str = ""  # of their dict in the tree; empty: at its top
    prefix: str = ""  # of their tensors in a checkpoint
    gguf_prefix: str = ""


Table = tuple[Scope, ...]


def norm(name: str, tensor: str, gguf: str = "", *, letters: str = "M") -> Leaf:
    """The weight of a norm over M or another axis."""
    return Leaf(name, letters, (Tensor(tensor, letters, gguf=gguf),), init="ones")


ATTENTION_NORM = norm("attention_norm", "input_layernorm.weight", "attn_norm.weight")
MLP_NORM = norm("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight")
# Gemma's, in place of MLP_NORM.
OUTPUT_NORM = norm("attention_output_norm", "post_attention_layernorm.weight", "post_attention_norm.weight")
GEMMA_MLP_NORM = norm("mlp_norm", "pre_feedforward_layernorm.weight", "ffn_norm.weight")
MLP_OUTPUT_NORM = norm("mlp_output_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight")
HEAD_NORMS = (
    norm("query_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", letters="E"),
    norm("key_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", letters="E"),
)


def linear(name: str, letters: str, *tensors: Tensor, bias: bool) -> tuple[Leaf, ...]:
    """A linear map and, with `bias`, a leaf `name_bias`. `tensors` are named without ".weight" and ".bias"."""

    def named(tensor: Tensor, suffix: str, axes: str) -> Tensor:
        gguf = f"{tensor.gguf}.{suffix}" if tensor.gguf else ""
        return replace(tensor, name=f"{tensor.name}.{suffix}", axes=axes, gguf=gguf)

    leaf = Leaf(name, letters, tuple(named(tensor, "weight", tensor.axes) for tensor in tensors))
    if not bias:
        return (leaf,)
    biases = tuple(named(tensor, "bias", tensor.axes.split()[0]) for tensor in tensors)
    return leaf, Leaf(f"{name}_bias", letters.partition("->")[2].strip(), biases, init="zeros")


def attention_leaves(*, bias: bool, output_bias: bool, inputs: str = "M", fused: bool = False) -> tuple[Leaf, ...]:
    """Grouped-query attention. `bias` is for queries, keys and values, whose input axis is `inputs`; if `fused`, they
    are one tensor."""
    query = Tensor("self_attn.q_proj", f"KGE {inputs}", (QUERIES,), "attn_q", interleaved=True)
    key = Tensor("self_attn.k_proj", f"KE {inputs}", (KEY,), "attn_k", interleaved=True)
    value = Tensor("self_attn.v_proj", f"KE {inputs}", (VALUE,), "attn_v")
    output = Tensor("self_attn.o_proj", "M KGE", gguf="attn_output")
    parts = _fused("self_attn.qkv_proj", query, key, value) if fused else (query, key, value)
    return (
        *linear("qkv", f"{inputs} -> K Q E", *parts, bias=bias),
        *linear("output", "K G E -> M", output, bias=output_bias),
    )


def mlp_leaves(*, bias: bool, fused: bool = False) -> tuple[Leaf, ...]:
    """A gated MLP. If `fused`, gate and up projection are one tensor."""
    gate = Tensor("mlp.gate_proj", "I M", (GATE,), "ffn_gate")
    up = Tensor("mlp.up_proj", "I M", (UP,), "ffn_up")
    return (
        *linear("gate_up", "M -> 2 I", *(_fused("mlp.gate_up_proj", gate, up) if fused else (gate, up)), bias=bias),
        *linear("down", "I -> M", Tensor("mlp.down_proj", "M I", gguf="ffn_down"), bias=bias),
    )


def _fused(name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Declarations of `tensors` that are stacked in one tensor `name`, which GGUF files do not have."""
    stacked = tuple(tensor.axes.split()[0] for tensor in tensors)
    return tuple(replace(tensor, name=name, gguf="", fused=(stacked, i)) for i, tensor in enumerate(tensors))


def end_leaves(*, tied: bool) -> tuple[Leaf, ...]:
    """The embedding, the final norm and, unless `tied`, the output matrix."""
    embed = Leaf("embed", "V M", (Tensor(EMBED_TENSOR, "V M", gguf="token_embd.weight"),))
    final_norm = norm("final_norm", "model.norm.weight", "output_norm.weight")
    head = Leaf("head", "M -> V", (Tensor(HEAD_TENSOR, "V M", gguf="output.weight"),))
    return (embed, final_norm) if tied else (embed, final_norm, head)


def dimensions(config: ModelConfig | HeadConfig) -> dict[str, int]:
    """Sizes of a model's dimension letters."""
    sizes = {
        "V": config.vocab_size,
        "M": config.hidden_size,
        "I": config.intermediate_size,
        "H": config.num_heads,
        "K": config.num_kv_heads,
        "G": config.group_size,
        "E": config.head_dim,
        "d": 2 * config.head_dim,
        "Q": config.group_size + 2,
        "2": 2,
        "1": 1,
    }
    if isinstance(config, ModelConfig) and (experts := config.experts):
        sizes |= {"X": experts.count, "i": experts.width, "s": experts.shared_width}
    if isinstance(config, ModelConfig) and (latent := config.latent):
        c, n, r, v = latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim
        sizes |= {"c": c, "a": latent.query_rank or 0, "n": n, "r": r, "v": v, "q": n + r, "w": n + v, "p": c + r}
    if isinstance(config, ModelConfig) and (delta := config.delta):
        j, k, u = delta.value_heads // delta.key_heads, delta.key_dim, delta.value_dim
        sizes |= {"h": delta.key_heads, "j": j, "k": k, "u": u, "e": j * u, "t": delta.taps}
        sizes |= {"y": 2 * k + j * u, "A": 2 * k, "Z": 2 * (k + j * u), "b": 2 * j}
    if isinstance(config, ModelConfig) and (kinds := config.kinds):
        group = config.num_heads // kinds.kv_heads
        sizes |= {"f": kinds.kv_heads, "g": group, "l": kinds.head_dim, "o": group + 2 - kinds.keys_as_values}
        sizes |= {"D": 2 * config.intermediate_size, "P": kinds.inputs, "Y": config.num_layers * kinds.inputs}
        sizes |= {"U": kinds.input_vocab}
    return sizes


def output_major(leaf: Leaf) -> Leaf:
    """The declaration of a quantised leaf: outputs first, and all inputs as one axis "@". "M -> K Q E" is "K Q E @".
    Stacked experts are outputs."""
    inputs, arrow, outputs = leaf.letters.partition("->")
    stacked = [letter for letter in inputs.split() if letter == "X"]
    letters = [*stacked, *(outputs if arrow else leaf.letters.split()[0]).split(), "@"]

    def outputs_first(axes: str) -> str:
        first, *others = axes.split()
        return f"{first}{others[-1] if len(others) > 1 else ''} @"  # a tensor of experts is [experts, in, out]

    tensors = tuple(replace(tensor, axes=outputs_first(tensor.axes)) for tensor in leaf.tensors)
    return replace(leaf, letters=" ".join(letters), tensors=tensors)


def input_letters(leaf: Leaf) -> list[str]:
    """The axes that a product with the leaf sums over, joined as "@" by `output_major`."""
    inputs, arrow, _ = leaf.letters.partition("->")
    return [letter for letter in (inputs.split() if arrow else leaf.letters.split()[1:]) if letter != "X"]


def create(module: nn.Module, leaves: Iterable[Leaf], sizes: Sizes, dtype: str) -> dict[str, Array]:
    """A module's parameters. Quantised leaves, whose shapes differ from the declared ones, are returned unchecked."""
    import jax

    def parameter(leaf: Leaf) -> Any:
        value = module.get_variable("params", leaf.name) if module.has_variable("params", leaf.name) else 0
        if not jax.tree_util.all_leaves([value]):
            return value
        return module.param(leaf.name, leaf.initial, leaf.shape(sizes), np.dtype(leaf.dtype or dtype))

    return {leaf.name: parameter(leaf) for leaf in leaves}


def map_leaves(table: Table, function: Callable[[Leaf], T]) -> dict[str, Any]:
    """The parameter tree with `function(leaf)` in place of each leaf."""
    tree: dict[str, Any] = {}
    for scope in table:
        group = tree.setdefault(scope.name, {}) if scope.name else tree
        group |= {leaf.name: function(leaf) for leaf in scope.leaves}
    return tree


def leaves_of(table: Table) -> Iterator[Leaf]:
    return (leaf for scope in table for leaf in scope.leaves)


class Bits(NamedTuple):
    """Estimated size of quantised weights."""

    weight: float  # bits per weight, with its share of group scales
    ends: bool  # True if embedding and output matrix are quantised, too
    embed: bool = True  # False: the output matrix is quantised without the embedding
    channel: int = 0  # bytes of the scale of an output
    experts: bool = False  # True: only stacked experts are quantised


def leaf_bytes(leaf: Leaf, sizes: Sizes, dtype: str, bits: Bits | None = None) -> int:
    """Bytes of a leaf, estimated if it is quantised."""
    shape = leaf.shape(sizes)
    if bits and bits.experts and "experts" not in leaf.axes:
        bits = None
    if bits and is_product(leaf) and (bits.ends or "vocab" not in leaf.axes) and (bits.embed or leaf.name != "embed"):
        outputs = prod(shape) // prod(sizes[letter] for letter in input_letters(leaf))
        return int(prod(shape) * bits.weight / 8) + outputs * bits.channel
    return prod(shape) * np.dtype(leaf.dtype or dtype).itemsize


def is_product(leaf: Leaf) -> bool:
    """True if a leaf may be quantised: the embedding, and linear maps except small ones that every device has. One is a
    router: quantisation would change which experts it chooses."""
    return leaf.name in EMBEDDINGS or (leaf.matrix is not None and not leaf.replicated)


def read_leaves(table: Table) -> Iterator[Leaf]:
    """The leaves that a forward reads as a whole: all except embeddings that are not the output matrix."""
    leaves = [*leaves_of(table)]
    tied = not any(leaf.matrix and "vocab" in leaf.axes for leaf in leaves)
    return (leaf for leaf in leaves if leaf.name not in EMBEDDINGS or (tied and leaf.name == "embed"))


@dataclass(frozen=True)
class Placement:
    """How a tensor fills a leaf: ``leaf[part] = tensor[rows].reshape(split)[cut].transpose(axes)``."""

    tensor: str
    shape: tuple[int, ...]  # of the tensor
    rows: slice
    leaf: tuple[str, ...]  # path in the parameter tree
    leaf_shape: tuple[int, ...]
    split: tuple[int, ...]
    cut: tuple[slice, ...]
    axes: tuple[int, ...]
    part: tuple[int | slice, ...]
    gguf: str
    interleaved: bool

    @property
    def size(self) -> int:
        """Number of elements of the leaf that the tensor fills."""
        return prod(len(range(*part.indices(size))) for part, size in zip(self.cut, self.split, strict=True))

    def place(self, leaf: np.ndarray, tensor: np.ndarray, some: Mapping[int, slice] | None = None) -> None:
        """Write ``tensor [shape]`` into its part of ``leaf [leaf_shape]``, cast to the leaf's dtype. `some`: indices of
        axes of the leaf that ``leaf`` holds; other elements of the tensor are not read."""
        source = tensor[self.rows].reshape(self.split)[self.cut]
        order = [axis for axis, part in enumerate(self.part) if isinstance(part, slice)]
        cut = [slice(None)] * source.ndim
        for axis, indices in (some or {}).items():
            cut[self.axes[order.index(axis)]] = indices
        _copy(leaf[self.part].transpose(np.argsort(self.axes)), source[tuple(cut)])

    def within(self, axis: int, some: slice) -> Placement | None:
        """The rule for a leaf that holds only the indices `some` of an axis. The tensor fills one index; None if the
        leaf does not hold it."""
        index = self.part[axis]
        assert isinstance(index, int), self
        if not some.start <= index < some.stop:
            return None
        return replace(self, part=(*self.part[:axis], index - some.start, *self.part[axis + 1 :]))

    def take(self, leaf: np.ndarray) -> np.ndarray:
        """The inverse of `place`: the tensor's rows, from ``leaf [leaf_shape]``."""
        assert self.size == prod(self.split), "a tensor that fills several leaves"
        return leaf[self.part].transpose(np.argsort(self.axes)).reshape(-1, *self.shape[1:])


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """``target[...] = source``. Transposes by blocks that fit the cache, through a buffer whose row length is not a
    power of two, so that its columns do not share a few cache lines."""
    shape: list[int] = []  # axes that are contiguous in both arrays are joined
    for i, size in enumerate(source.shape):
        if shape and all(array.strides[i - 1] == size * array.strides[i] for array in (target, source)):
            shape[-1] *= size
        else:
            shape.append(size)
    target, source = target.reshape(shape), source.reshape(shape)
    inner = int(np.argmin(target.strides))
    if inner == source.ndim - 1:
        target[...] = source
        return
    target, source = (np.moveaxis(array, inner, -2) for array in (target, source))
    height, width = 64, 4096
    *before, rows, columns = source.shape
    buffer = np.empty((height, min(columns, width) + 32), target.dtype)
    for place in np.ndindex(*before):
        for row, column in product(range(0, rows, height), range(0, columns, width)):
            block = *place, slice(row, row + height), slice(column, column + width)
            copied = buffer[: min(height, rows - row), : min(width, columns - column)]
            copied[...] = source[block]
            target[block] = copied


def placements(table: Table, sizes: Sizes) -> Iterator[Placement]:
    """The rules of all tensors of a checkpoint, in the order of the parameter tree."""
    return (
        _placement(scope, leaf, tensor, sizes) for scope in table for leaf in scope.leaves for tensor in leaf.tensors
    )


def _placement(scope: Scope, leaf: Leaf, tensor: Tensor, sizes: Sizes) -> Placement:
    def size(letters: str) -> int:
        return prod(sizes[letter] for letter in letters)

    first, *others = tensor.axes.split()
    rows = slice(0, size(first))
    height = rows.stop
    if tensor.fused:
        stacked, place = tensor.fused
        before, height = (sum(map(size, axes)) for axes in (stacked[:place], stacked))
        rows = slice(before, before + rows.stop)
    letters = tensor.axes.replace(" ", "")
    split, cut = tuple(sizes[letter] for letter in letters), [slice(None)] * len(letters)
    if tensor.cut:
        whole, letter, after = tensor.cut
        start = sizes.get(after, 0)
        cut[letters.index(whole)] = slice(start, start + sizes[letter])
        letters = letters.replace(whole, letter)
    parts = {part.axis: part for part in tensor.parts}
    order = "".join(parts[letter].letter if letter in parts else letter for letter in leaf.dims)
    return Placement(
        tensor=scope.prefix + tensor.name,
        shape=(height, *map(size, others)),
        rows=rows,
        leaf=(scope.name, leaf.name) if scope.name else (leaf.name,),
        leaf_shape=leaf.shape(sizes),
        split=split,
        cut=tuple(cut),
        axes=tuple(letters.index(letter) for letter in order),
        part=tuple(parts[letter].of(sizes) if letter in parts else slice(None) for letter in leaf.dims),
        gguf=scope.gguf_prefix + tensor.gguf if tensor.gguf else "",
        interleaved=tensor.interleaved,
    )


def tensors_of(table: Iterable[Placement], read: Callable[[tuple[str, ...]], np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint from its leaves, the inverse of loading. `read` returns the leaf at a path."""
    pieces: dict[str, list[np.ndarray]] = {}
    for rule in table:
        pieces.setdefault(rule.tensor, []).append(rule.take(read(rule.leaf)))
    return {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in pieces.items()}
