"""The kinds of draft heads: EAGLE (1 and 2, which differ in their trees only), EAGLE-3 and MTP.

Each is one decoder layer. Slot t reads the target's feature f_t and the embedding e of token x_{t+1}, has RoPE position
t, and predicts x_{t+2}. Deeper in a tree the feature is the head's output at the parent:

    eagle   x = fc(e, f)               out = x + attention(x)             + mlp(norm(.))   logits = target's head(out)
    eagle3  g = fc(f), or out          out = g + attention(norm(e), norm(g)) + mlp(norm(.))   logits = head(norm(out))
    mtp     x = fc(norm(f), norm(e))   out = norm(x + attention(norm(x))  + mlp(norm(.)))   logits = target's head(out)

`out` is the next feature. EAGLE-3.1 normalises eagle3's f, as a whole (`norm_before_fc`) or by layers (`fc_norm`), and
with `norm_output` the next feature is norm(out). P-EAGLE (`mask_token`) is eagle3 with a learnt f for slots of which
the target has none; further layers are plain decoder layers. A `HeadSpec` declares the differences between kinds.
Sources: SafeAILab/EAGLE `cnets1.py`, `cnets.py`; EAGLE-3.1 arXiv 2605.09992 and vllm-project/vllm `llama_eagle3.py`;
P-EAGLE arXiv 2602.01469; for mtp sgl-project/sglang and vllm-project/vllm `mimo_mtp.py`. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specjax.config import BlockConfig, HeadConfig
from specjax.models.params import (
    GEMMA_MLP_NORM,
    HEAD_NORMS,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    OUTPUT_NORM,
    Leaf,
    Part,
    Scope,
    Table,
    Tensor,
    attention_leaves,
    dimensions,
    linear,
    mlp_leaves,
    norm,
)

# Tensor names in published EAGLE-3 heads; see `HeadSpec.published`. `OFFSETS` [W]: token id of the target minus that of
# the head. `MASK` [V]: true for the target's tokens that the head has.
LAYER = "midlayer."  # prefix of the decoder layer's tensors
NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3.1: fields of `HeadConfig`, keys of config.json
FC, EMBED, HEAD, OFFSETS, MASK = "fc.weight", "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
MASK_FEATURE = "mask_hidden"  # of P-EAGLE: the features [F] of slots whose tokens the target has not read


@dataclass(frozen=True)
class HeadSpec:
    """One kind of draft head."""

    kind: str  # name in `HeadConfig.kind` and in Python
    algorithm: str  # name on the command line
    architecture: str  # in config.json, for the engines that read exported heads
    training: Mapping[str, Any]  # loss, round weights, regression and noise of the authors' training
    model_type: str = "llama"  # in config.json
    keys: Mapping[str, Any] = field(default_factory=dict)  # further keys of config.json
    # True: features are outputs of several of the target's layers, `fc` maps them to M, and attention reads embedding
    # and feature side by side (2 M). False: features are the target's final hidden state, and `fc` maps the pair to M.
    reads_layers: bool = False
    feature_first: bool = False  # order of the pair
    input_norms: tuple[Leaf, ...] = ()  # of the embedding, the feature and attention's input; tensors below `LAYER`
    final_norm: Leaf | None = None  # of the layer's output
    next_feature_normed: bool = False  # True: the final norm applies to the next feature; False: only to logits' input
    first_embedding_zero: bool = False  # slot 0 reads the feature alone
    own_ends: bool = False  # checkpoints may hold an embedding, an output layer and a vocabulary of their own
    published: tuple[tuple[str, str], ...] = ()  # (prefix of a tensor here, prefix in published files)
    mark: str | None = None  # a tensor that only this kind has
    absent_bias: bool | None = None  # value of an absent key `bias` (of `fc`) in other engines; None: no such key
    biases: tuple[str, ...] = ()  # fields of `HeadConfig` set in a new head, since other engines expect the tensors

    @property
    def query_parts(self) -> int:
        """Input width of attention, in units of M."""
        return 2 if self.reads_layers else 1


_EAGLE = HeadSpec(
    kind="eagle",
    algorithm="EAGLE",
    published=((LAYER, "layers.0."),),
    architecture="LlamaForCausalLMEagle",
    absent_bias=True,
    biases=("fc_bias",),
    training={"loss": "cross_entropy", "weights": (0.1,), "regression": 1.0, "noise": 0.2},
)
_EAGLE3 = HeadSpec(
    kind="eagle3",
    algorithm="EAGLE3",
    reads_layers=True,
    input_norms=(norm("embedding_norm", "input_layernorm.weight"), norm("feature_norm", "hidden_norm.weight")),
    final_norm=norm("final_norm", "norm.weight"),
    own_ends=True,
    architecture="LlamaForCausalLMEagle3",
    absent_bias=False,
    training={"loss": "cross_entropy", "weights": tuple(0.8**j for j in range(7))},
)
_MTP = HeadSpec(
    kind="mtp",
    algorithm="MTP",
    feature_first=True,
    input_norms=(
        norm("embedding_norm", "token_layernorm.weight"),
        norm("feature_norm", "hidden_layernorm.weight"),
        norm("attention_norm", "input_layernorm.weight"),
    ),
    final_norm=norm("final_norm", f"{LAYER}final_layernorm.weight"),
    next_feature_normed=True,
    # SGLang and vLLM do so. It affects later slots, which attend to slot 0.
    first_embedding_zero=True,
    published=(("fc.", "model.mtp_layers.0.input_proj."), (LAYER, "model.mtp_layers.0.")),
    mark=f"{LAYER}token_layernorm.weight",
    architecture="MiMoMTP",
    model_type="qwen2",
    keys={"num_nextn_predict_layers": 1},
    biases=("attention_bias",),
    training={"loss": "token", "weights": (0.51, 0.31, 0.18)},
)

HEAD_SPECS: dict[str, HeadSpec] = {spec.kind: spec for spec in (_EAGLE, _EAGLE3, _MTP)}
ALGORITHMS: dict[str, HeadSpec] = {spec.algorithm: spec for spec in HEAD_SPECS.values()}


def head_spec(kind: str) -> HeadSpec:
    """The specification of a kind. Raises ValueError if there is no such kind."""
    if kind not in HEAD_SPECS:
        raise ValueError(f"no kind of draft head {kind!r}; supported: {', '.join(HEAD_SPECS)}")
    return HEAD_SPECS[kind]


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """The default layers whose outputs an EAGLE-3 head reads, as in SafeAILab/EAGLE: the inputs of the layers 2, L // 2
    and L - 3. They are distinct if L is at least 7."""
    return 1, layers // 2 - 1, layers - 4


def head_table(config: HeadConfig) -> Table:
    """The parameters of a head, a flat dict. `ids` [W], the target's token ids of a smaller vocabulary, is computed
    from the tensor `OFFSETS`. For block heads see `block_table`."""
    if isinstance(config, BlockConfig):
        return block_table(config)
    spec = head_spec(config.kind)
    head_norms = HEAD_NORMS if config.head_norms else ()
    layer = *spec.input_norms, *_sublayers(config, head_norms, "J")
    final_norm = (spec.final_norm,) if spec.final_norm else ()
    joint_norm = norm("joint_norm", "input_norm.weight", letters="F")
    each = tuple(Tensor(f"fc_norm.{i}.weight", "f", (Part("A", offset=i),)) for i in range(len(config.aux_layers)))
    norms = (joint_norm, config.norm_before_fc), (Leaf("fc_norm", "A f", each, init="ones"), config.fc_norm)
    feature_norms = tuple(leaf for leaf, present in norms if present)
    fc = linear("fc", "F -> M", Tensor("fc", "M F"), bias=config.fc_bias)
    mask = (Leaf("mask_feature", "F", (Tensor(MASK_FEATURE, "F"),)),) if config.mask_token is not None else ()
    further = norm("attention_norm", "input_layernorm.weight"), *_sublayers(config, head_norms)
    return (
        Scope((*feature_norms, *fc, *mask)), Scope(layer, prefix=LAYER), Scope((*final_norm, *_own_ends(config))),
        *(Scope(further, f"layers_{i}", f"layers.{i}.") for i in range(1, config.layers)),
    )  # fmt: skip


def _sublayers(config: HeadConfig, head_norms: tuple[Leaf, ...], inputs: str = "M") -> tuple[Leaf, ...]:
    """Attention, which reads the axis `inputs`, and MLP of a layer, with the norms after attention's input."""
    attention = attention_leaves(bias=config.attention_bias, output_bias=config.output_bias, inputs=inputs)
    if config.keys_as_values:
        attention = tuple(replace(leaf, tensors=tuple(map(_of_keys, leaf.tensors))) for leaf in attention)
    mlp = mlp_leaves(bias=config.mlp_bias)
    if not config.gemma_layers:
        return *attention, *head_norms, MLP_NORM, *mlp
    scale = Leaf("layer_scale", "1", (Tensor("layer_scalar", "1"),), init="ones")
    return *attention, *head_norms, OUTPUT_NORM, GEMMA_MLP_NORM, *mlp, MLP_OUTPUT_NORM, scale


def _of_keys(tensor: Tensor) -> Tensor:
    return replace(tensor, name=tensor.name.replace("v_proj", "k_proj"))


def _own_ends(config: HeadConfig) -> tuple[Leaf, ...]:
    """The embedding and the output layer that a head does not share with the target."""
    embed = Leaf("embed", "V M", (Tensor(EMBED, "V M"),))
    head = Leaf("head", "M -> W", (Tensor(HEAD, "W M"),))
    ids = Leaf("ids", "W", init="indices", dtype="int32", replicated=True)
    present = ((embed, config.own_embedding), (head, config.own_head), (ids, config.mapped))
    return tuple(leaf for leaf, own in present if own)


def block_table(config: BlockConfig) -> Table:
    """The parameters of a block head: a dict `layers_i` for each layer, and the leaves around the layers.

    Letters: T taps and g channel groups of the convolutions, 2 sides (before and after attention or MLP); r channels of
    the walk's token vectors, J and Y inputs of the gate and of the recurrence.
    """
    layer = norm("attention_norm", "input_layernorm.weight"), *_sublayers(config, HEAD_NORMS)
    for name in ("attention_conv", "mlp_conv") if config.conv_taps else ():
        base, kernel = Tensor(f"{name}.base_kernel", "2 T M"), Tensor(f"{name}.kernel_projection.weight", "2Tg M")
        layer += Leaf(f"{name}_base", "2 T M", (base,), "identity"), Leaf(name, "M -> 2 T g", (kernel,), "zeros")
    around = (
        *linear("fc", "F -> M", Tensor("fc", "M F"), bias=config.fc_bias),
        norm("feature_norm", "hidden_norm.weight"),
        norm("final_norm", "norm.weight"),
        *_own_ends(config),
        *_walk_leaves(config),
    )
    return Scope(around), *(Scope(layer, f"layers_{i}", f"layers.{i}.") for i in range(config.layers))


def _walk_leaves(config: BlockConfig) -> tuple[Leaf, ...]:
    """`previous` and `next` are vectors of the token before a slot and of the slot's token."""

    def table(name: str, letters: str, tensor: str) -> Leaf:
        return Leaf(name, letters, (Tensor(tensor, letters if "->" not in letters else "W r"),))

    if config.walk == "none":
        return ()
    at = "candidate_selector." if config.walk == "selector" else "markov_head."
    if config.walk == "selector":
        tables = table("previous", "V r", f"{at}predecessor_codebook"), table("next", "W r", f"{at}successor_codebook")
        return *tables, *linear("selector", "M -> r", Tensor(f"{at}hidden_projection", "r M"), bias=False)
    tables = table("previous", "V r", f"{at}markov_w1.weight"), table("next", "r -> W", f"{at}markov_w2.weight")
    further = {
        "gated": linear("gate", "J -> r", Tensor(f"{at}gate_proj", "r J"), bias=True),
        "rnn": linear("joint", "Y -> 3 r", Tensor(f"{at}joint_proj", "3r Y"), bias=True),
    }
    return *tables, *further.get(config.walk, ())


def head_sizes(config: HeadConfig, target_vocab_size: int) -> dict[str, int]:
    """Sizes of the letters of `head_table`. W: the head's vocabulary, F: input of `fc`, J: input of attention, A:
    auxiliary layers, f: channels of each."""
    if isinstance(config, BlockConfig):
        rank, width = config.rank, config.hidden_size
        walk = {"r": rank, "3": 3, "J": width + rank, "Y": width + 2 * rank}
        convolution = {"T": config.conv_taps, "g": config.conv_groups}
        ends = {"V": target_vocab_size, "W": config.vocab_size, "F": config.feature_size}
        return dimensions(config) | ends | walk | convolution
    spec, width = head_spec(config.kind), config.hidden_size
    return dimensions(config) | {
        "V": target_vocab_size,
        "W": config.vocab_size,
        "F": config.feature_size if spec.reads_layers else 2 * width,
        "A": len(config.aux_layers),
        "f": config.feature_size // max(len(config.aux_layers), 1),
        "J": spec.query_parts * width,
    }
