"""Multi-token prediction (MTP) layers in a target's own checkpoint: which there are, and their parameters.

A head is one layer as the target's family has it, between a projection and a norm. Head i's slot t reads a feature f
and the embedding e of token x_{t+1+i}, stands at RoPE position t, and predicts x_{t+2+i}:

    x = fc(norm(e), norm(f))        out = norm(layer(x))        logits = target's head(out)

or fc(norm(f), norm(e)). The first head's feature is the target's, after its final norm; that of each further one is the
`out` of the head before it at the same slot. Sources: sgl-project/sglang `mimo_mtp.py`, `deepseek_nextn.py`;
vllm-project/vllm `qwen3_next_mtp.py`. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from specjax.config import ModelConfig, MtpConfig
from specjax.models import table
from specjax.models.params import EMBED_TENSOR, HEAD_TENSOR, Scope, Sizes, Table, Tensor, dimensions, linear, norm


@dataclass(frozen=True)
class MtpStyle:
    """How a checkpoint names and computes such layers. `{i}` is the head, `{layer}` that number after the target's."""

    prefix: str  # of a layer's tensors
    fc: str  # names of what is around a layer, after the prefix or, where the heads share it, after `shared`
    embedding_norm: str
    feature_norm: str
    final_norm: str
    shared: str | None = None  # prefix of what all heads share; None: each has its own
    feature_first: bool = False  # in what `fc` reads
    first_embedding_zero: bool = False  # slot 0 reads the feature alone
    copies: Mapping[str, str] = field(default_factory=dict)  # names of tensors that repeat the target's -> which
    architecture: str | None = None  # in config.json, of models that are published with such layers

    def layer_prefix(self, head: int, layers: int) -> str:
        return self.prefix.format(i=head, layer=layers + head)

    @property
    def marks(self) -> tuple[str, ...]:
        """Tensors around a layer that no layer of a target has."""
        return (f"{self.fc}.weight", *(f"{name}.weight" for name in (self.embedding_norm, self.feature_norm)))


STYLES: Mapping[str, MtpStyle] = {
    "mimo": MtpStyle(
        "model.mtp_layers.{i}.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
        feature_first=True, first_embedding_zero=True, architecture="MiMoForCausalLM",
    ),
    "deepseek": MtpStyle(
        "model.layers.{layer}.", "eh_proj", "enorm", "hnorm", "shared_head.norm",
        copies={"embed_tokens.weight": EMBED_TENSOR, "shared_head.head.weight": HEAD_TENSOR},
        architecture="DeepseekV3ForCausalLM",
    ),
    "qwen3_next": MtpStyle(
        "mtp.layers.{i}.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", shared="mtp."
    ),
}  # fmt: skip


def mtp_config(names: Collection[str], target: ModelConfig) -> MtpConfig | None:
    """The MTP layers of a checkpoint with these tensors; None if it has none."""
    for key, style in STYLES.items():
        prefixes = (style.layer_prefix(i, target.num_layers) for i in count())
        heads = list(takewhile(lambda prefix, style=style: _is_head(names, prefix, style), prefixes))
        if heads:
            mixed = any(name.startswith(f"{heads[0]}mlp.experts.") for name in names)
            return _layers(key, target, len(heads), mixed)
    return None


def published_mtp_config(architecture: str, target: ModelConfig, heads: int) -> MtpConfig | None:
    """The ``heads`` MTP layers that a model of this architecture is published with; None if there is no such model."""
    found = (key for key, style in STYLES.items() if style.architecture == architecture)
    return next((_layers(key, target, heads, mixed=True) for key in found), None)


def _layers(style: str, target: ModelConfig, heads: int, mixed: bool) -> MtpConfig:
    """``mixed``: with the experts that the target has, if it has any."""
    experts = replace(target.experts, layers=(0,)) if target.experts is not None and mixed else None
    layer = replace(target, num_layers=1, windows=(), window_rope=None, experts=experts)
    return MtpConfig(style, layer, target.num_layers, heads, target.vocab_size)


def _is_head(names: Collection[str], prefix: str, style: MtpStyle) -> bool:
    """Whether a head has this prefix. One more of a target's own layers would be an error, and no head."""
    if "{layer}" in style.prefix:
        return any(prefix + mark in names for mark in style.marks)
    return any(name.startswith(prefix) for name in names)


def mtp_tensors(names: Collection[str], target: ModelConfig) -> set[str]:
    """Those of a checkpoint's tensors that belong to its MTP layers."""
    if (config := mtp_config(names, target)) is None:
        return set()
    style = STYLES[config.style]
    prefixes = {style.layer_prefix(i, target.num_layers) for i in range(config.count)} | {style.shared or ""} - {""}
    return {name for name in names if name.startswith(tuple(prefixes))}


def mtp_table(config: MtpConfig) -> Table:
    """The parameters: a dict `layers_i` for each head, with what is around its layer unless the heads share it."""
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
    """Sizes of the letters of `mtp_table`; F is the input of `fc`."""
    return dimensions(config.layer) | {"F": 2 * config.hidden_size}
