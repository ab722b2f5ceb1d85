"""What a draft head's config.json says that its tensors cannot: norms' epsilon, rope, heads, auxiliary layers, flags.

Knows nothing of tensors. ``speculators`` and NeMo nest the layer's own settings in ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.hf_config import ROPE_SECTIONS, refuse_unsupported

AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# EAGLE-3.1 and NVIDIA's variants. norm_output has no tensor of its own: it feeds the head with normed outputs.
_UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's settings and the head's own in one mapping; null means absent."""
    nested = _section(config, "transformer_layer_config")
    # The layer's own rotary embedding as a whole: parts of the other's would contradict it.
    ropes = {"rope_theta", *ROPE_SECTIONS}
    hidden = ropes if any(nested.get(key) is not None for key in ropes) else set()
    outer = {key: value for key, value in config.items() if key not in hidden}
    merged = {key: value for part in (outer, nested) for key, value in part.items() if value is not None}
    # Qwen2 configs carry a window that is switched off.
    if not merged.get("use_sliding_window", True):
        merged.pop("sliding_window", None)
    refuse_unsupported(merged)
    for key in _UNSUPPORTED:
        if value := merged.get(key) or _section(merged, "eagle_config").get(key):
            raise CheckpointError(
                f"config.json: {key} is {value!r}; such heads (EAGLE-3.1) are not supported, since engines differ in "
                "what it means; use an EAGLE-3 head without it"
            )
    return merged


def aux_layer_ids(merged: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers, 0-based, whose outputs the head reads, in its order; ``merged`` is from ``layer_config``.

    Two conventions are in use. In ``eagle_config``, id j is the output of layer j. At the top level, where speculators
    puts them for vLLM, id j is the input of layer j, so the output of j - 1: vLLM collects before the layer, and
    NeMo-RL subtracts 1 from the ids of such configs. But speculators' converter copies the ids of older heads
    unchanged ([1, 46, 90] for 94 layers: speculators#142). The first id tells the two apart, as in sglang#25454: it is
    1 only as an output, since no head reads the output of layer 0.
    """
    nested = _section(merged, "eagle_config").get(AUX_LAYERS_KEY)
    where = f"eagle_config.{AUX_LAYERS_KEY}" if nested else AUX_LAYERS_KEY
    if ids := nested or merged.get(AUX_LAYERS_KEY):
        if not isinstance(ids, Sequence) or not all(type(value) is int for value in ids):
            raise CheckpointError(f"config.json: {where} is {ids!r}; a list of integers is needed")
        shift = 0 if nested or ids[0] == 1 else 1
        aux_layers = tuple(value - shift for value in ids)
        problem = f"{list(ids)}, read as the outputs of layers {list(aux_layers)}"
    else:
        aux_layers = (1, num_layers // 2 - 1, num_layers - 4)
        problem = f"absent, and its default for a target of {num_layers} layers is {list(aux_layers)}"
    if len(set(aux_layers)) != len(aux_layers) or not all(0 <= layer < num_layers for layer in aux_layers):
        raise CheckpointError(
            f"config.json: {where} is {problem}; give different layers of the target's, 0..{num_layers - 1}. In "
            "eagle_config, id j is the output of layer j; at the top level it is the output of layer j - 1, unless the "
            "first id is 1"
        )
    return aux_layers


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {key} is {section!r:.80}; an object is needed")
    return section
