"""Styles and parameters of multi-token prediction (MTP) layers in a target's own checkpoint.

A head is one layer of the target's family between a projection and a norm. Slot t of head i reads a feature f and the
embedding e of token x_{t+1+i}, has RoPE position t, and predicts x_{t+2+i}:

    x = fc(norm(e), norm(f))        out = norm(layer(x))        logits = target's head(out)

or fc(norm(f), norm(e)). The first head reads the target's feature after the final norm; each further head reads `out`
of the previous head at the same slot. Sources: sgl-project/sglang `mimo_mtp.py`, `deepseek_nextn.py`;
vllm-project/vllm `qwen3_next_mtp.py`. Also declares Gemma 4's assistants, which `specjax.models.assistant` describes.
Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from specjax.config import AssistantConfig, ModelConfig, MtpConfig
from specjax.models import ARCHITECTURES, table
from specjax.models.params import (
    CLUSTERED,
    EMBED_TENSOR,
    HEAD_TENSOR,
    Leaf,
    Scope,
    Sizes,
    Table,
    Tensor,
    dimensions,
    linear,
    norm,
)


@dataclass(frozen=True)
class MtpStyle:
    """Tensor names and computation of MTP layers. `{i}` is the head, `{layer}` is i plus the target's layers."""

    prefix: str  # of a layer's tensors
    fc: str  # name after the prefix, or after `shared`; likewise the three norms
    embedding_norm: str
    feature_norm: str
    final_norm: str
    shared: str | None = None  # prefix of tensors that all heads share; None: `fc` and norms belong to each head
    feature_first: bool = False  # order of the inputs of `fc`
    first_embedding_zero: bool = False  # slot 0 reads the feature alone
    copies: Mapping[str, str] = field(default_factory=dict)  # name of a copied tensor -> the target's tensor
    architectures: tuple[str, ...] = ()  # of models that are published with such layers
    key: str = "num_nextn_predict_layers"  # of config.json: how many
    published: int = 0  # how many without that key

    def layer_prefix(self, head: int, layers: int) -> str:
        return self.prefix.format(i=head, layer=layers + head)

    @property
    def marks(self) -> tuple[str, ...]:
        """Tensors that no layer of a target has."""
        return (f"{self.fc}.weight", *(f"{name}.weight" for name in (self.embedding_norm, self.feature_norm)))


STYLES: Mapping[str, MtpStyle] = {
    "mimo": MtpStyle(
        "model.mtp_layers.{i}.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
        feature_first=True, first_embedding_zero=True, architectures=("MiMoForCausalLM",),
    ),
    "deepseek": MtpStyle(
        "model.layers.{layer}.", "eh_proj", "enorm", "hnorm", "shared_head.norm",
        copies={"embed_tokens.weight": EMBED_TENSOR, "shared_head.head.weight": HEAD_TENSOR},
        architectures=("DeepseekV3ForCausalLM",),
    ),
    "qwen3_next": MtpStyle(
        "mtp.layers.{i}.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", shared="mtp.",
        architectures=tuple(name for name, family in ARCHITECTURES.items() if family == "qwen3_next"),
        key="mtp_num_hidden_layers", published=1,
    ),
}  # fmt: skip


def mtp_config(names: Collection[str], target: ModelConfig) -> MtpConfig | None:
    """The MTP layers of a checkpoint with the tensors `names`; None if it has none."""
    for key, style in STYLES.items():
        prefixes = (style.layer_prefix(i, target.num_layers) for i in count())
        heads = list(takewhile(lambda prefix, style=style: _is_head(names, prefix, style), prefixes))
        if heads:
            mixed = any(name.startswith(f"{heads[0]}mlp.experts.") for name in names)
            return _layers(key, target, len(heads), mixed)
    return None


def published_mtp_config(
    architecture: str, target: ModelConfig, count: Callable[[str, int], int]
) -> MtpConfig | None:  # fmt: skip
    """The MTP layers that models of this architecture are published with; None if there are none. `count` (key of
    config.json, default) -> number."""
    for name, style in STYLES.items():
        if architecture in style.architectures and (heads := count(style.key, style.published)):
            return _layers(name, target, heads, mixed=True)
    return None


def _layers(style: str, target: ModelConfig, heads: int, mixed: bool) -> MtpConfig:
    """``mixed``: with the target's experts, if it has experts."""
    experts = replace(target.experts, layers=(0,)) if target.experts is not None and mixed else None
    layer = replace(target, num_layers=1, windows=(), window_rope=None, experts=experts, delta=None)
    return MtpConfig(style, layer, target.num_layers, heads, target.vocab_size)


def _is_head(names: Collection[str], prefix: str, style: MtpStyle) -> bool:
    """True if a head has this prefix. An additional layer of the target's kind is not a head."""
    if "{layer}" in style.prefix:
        return any(prefix + mark in names for mark in style.marks)
    return any(name.startswith(prefix) for name in names)


def mtp_tensors(names: Collection[str], target: ModelConfig) -> set[str]:
    """The tensors of a checkpoint that belong to its MTP layers."""
    if (config := mtp_config(names, target)) is None:
        return set()
    style = STYLES[config.style]
    prefixes = {style.layer_prefix(i, target.num_layers) for i in range(config.count)} | {style.shared or ""} - {""}
    return {name for name in names if name.startswith(tuple(prefixes))}


def mtp_table(config: MtpConfig) -> Table:
    """The parameters: a dict `layers_i` for each head, with `fc` and norms unless the heads share them."""
    if isinstance(config, AssistantConfig):
        return _assistant_table(config)
    style = STYLES[config.style]
    around = (
        *linear("fc", "F -> M", Tensor(style.fc, "M F"), bias=False),
        norm("embedding_norm", f"{style.embedding_norm}.weight"),
        norm("feature_norm", f"{style.feature_norm}.weight"),
        norm("final_norm", f"{style.final_norm}.weight"),
    )
    shared = style.shared is not None
    leaves = table(config.layer)[1].leaves
    return (
        *((Scope(around, prefix=style.shared),) if style.shared is not None else ()),
        *(
            Scope(leaves if shared else (*around, *leaves), f"layers_{i}", style.layer_prefix(i, config.target_layers))
            for i in range(config.count)
        ),
    )


def mtp_sizes(config: MtpConfig) -> Sizes:
    """Sizes of the letters of `mtp_table`. F: the input of `fc`; W: tokens that are proposed. Of an assistant: N,
    channels of a feature; C clusters of t tokens."""
    sizes = dimensions(config.layer) | {"F": 2 * config.feature_size, "N": config.feature_size, "W": config.vocab_size}
    if isinstance(config, AssistantConfig) and config.centroids:
        sizes |= {"C": config.centroids, "t": config.vocab_size // config.centroids}
    return sizes


def _assistant_table(config: AssistantConfig) -> Table:
    """Those of a model of Gemma 4 whose layers all share keys and values, and the leaves around it. `clusters`, the ids
    of each cluster's tokens, is filled from the tensor `TOKEN_ORDERING`."""
    ends, *layers = table(config.layer)
    embed, final_norm = ends.leaves
    output = (Leaf("head", "M -> V", embed.tensors),)
    if config.centroids:
        centroids = Tensor("masked_embedding.centroids.weight", "C M")
        output = (
            replace(embed, name=CLUSTERED),
            Leaf("centroids", "M -> C", (centroids,), replicated=True),
            Leaf("clusters", "C t", init="indices", dtype="int32", replicated=True),
        )
    around = (
        *linear("fc", "F -> M", Tensor("pre_projection", "M F"), bias=False),
        *linear("feature", "M -> N", Tensor("post_projection", "N M"), bias=False),
    )
    return Scope((final_norm, *around, *output)), *layers


def misfit(config: AssistantConfig, target: ModelConfig) -> str | None:
    """Why an assistant drafts for another target, by the keys of its config.json; None: it fits."""
    layer, kinds, own = config.layer, config.layer.kinds, target.kinds
    if target.family != layer.family or kinds is None or own is None:
        return f"an assistant drafts for a {layer.family} model, and the target is a {target.family} model"
    pairs: dict[str, tuple[object, object]] = {
        "backbone_hidden_size": (config.backbone_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
    }
    for windowed in sorted({layer.window(i) is not None for i in range(layer.num_layers)}):
        name = ("full_attention", "sliding_attention")[windowed]
        if target.last_owner(windowed=windowed) < 0:
            return f"layer_types has {name}, and the target has no such layer with keys of its own"
        if windowed:
            pairs |= {"head_dim": (layer.head_dim, target.head_dim)}
            pairs |= {"num_key_value_heads": (layer.num_kv_heads, target.num_kv_heads)}
            pairs |= {f"rope_parameters of {name}": (layer.window_rope, target.window_rope)}
        else:
            pairs |= {f"head_dim of {name}": (kinds.head_dim, own.head_dim)}
            pairs |= {f"num_key_value_heads of {name}": (kinds.kv_heads, own.kv_heads)}
            pairs |= {f"rope_parameters of {name}": (layer.rope, target.rope)}
    for key, (value, needed) in pairs.items():
        if value != needed:
            return f"{key} is {value}, and the target's is {needed}; it is the assistant of another model"
    return None


TOKEN_ORDERING = "masked_embedding.token_ordering"
"""Tensor [V]: the ids of the first cluster's tokens, then of the next cluster's."""
