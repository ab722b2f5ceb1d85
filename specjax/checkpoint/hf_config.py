"""A Hugging Face config.json to a ``ModelConfig``. Whatever is not implemented is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

from specjax.checkpoint.architectures import READERS
from specjax.checkpoint.files import CheckpointError, CheckpointOptionError, listed
from specjax.checkpoint.quantised import refuse_unknown
from specjax.checkpoint.rope_config import longest, rope
from specjax.checkpoint.stored import PACKED
from specjax.checkpoint.values import flag, given, number, require
from specjax.config import ModelConfig
from specjax.models import ARCHITECTURES, table
from specjax.models.params import dimensions, input_letters, is_product, leaves_of

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")  # see `load_params`


def model_config(
    hf_config: Mapping[str, Any], *, dtype: str = "auto", platform: str | None = None, context_length: int | None = None
) -> ModelConfig:
    """Describe the model that ``hf_config`` describes.

    Args:
      hf_config: a parsed config.json, as transformers 4 or 5 writes it.
      dtype: float32, bfloat16, float16, or auto: float32 on a CPU, else the type the checkpoint names.
      platform: ``jax.default_backend()`` if None; only auto looks at it.
      context_length: the longest text that will be served; only longrope looks at it. None: the model's.

    Raises:
      CheckpointError: an architecture, activation, rope type, quantisation or dtype that is not implemented, float16
        where activations overflow in it, or a key that is missing.
    """
    architectures = hf_config.get("architectures") or []
    architecture = next((name for name in architectures if name in ARCHITECTURES), None)
    if architecture is None:
        raise CheckpointError(
            f"config.json: architectures is {architectures or 'absent'}; supported: {listed(ARCHITECTURES, 99)}"
        )
    reader = READERS[architecture]
    if (code := hf_config.get("auto_map")) and not reader.remote_code:
        named = listed(code) if isinstance(code, Mapping) else f"{code!r:.80}"
        raise CheckpointError(
            f"config.json: auto_map ({named}) says that the model is computed by Python code of its own, which is not "
            f"run here and may differ from {architecture}; remove the key if the code is that of transformers"
        )
    hf_config = dict(reader.absent) | dict(hf_config) | _text_config(hf_config, reader.text)
    refuse_unknown(hf_config)
    refuse_unsupported(
        {key: value for key, value in hf_config.items() if key != "quantization_config"},
        activation=reader.activation, only=reader.only,
    )  # fmt: skip
    heads = require(hf_config, "num_attention_heads")
    hidden = require(hf_config, "hidden_size")
    kv_heads = require(hf_config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    max_positions = require(hf_config, "max_position_embeddings", 2048)
    layers, head_dim = require(hf_config, "num_hidden_layers"), require(hf_config, "head_dim", hidden // heads)
    fields = reader.read(hf_config, layers)
    if "rope" not in fields:
        fields["rope"] = rope(
            hf_config, max_positions, head_dim=fields.get("head_dim", head_dim), context_length=context_length,
            partial=reader.partial_rope,
        )  # fmt: skip
    common: dict[str, Any] = {
        "family": ARCHITECTURES[architecture],
        "vocab_size": require(hf_config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": require(hf_config, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_epsilon": number(hf_config, "rms_norm_eps", 1e-6),
        "max_positions": longest(fields["rope"], max_positions),
        "tied_embeddings": flag(hf_config, "tie_word_embeddings"),
        "dtype": _dtype(hf_config, dtype, platform),
    }
    if common["dtype"] == "float16" and not reader.float16:
        if dtype == "float16":
            problem = f"float16 is too small for the activations of {architecture}; use auto, bfloat16 or float32"
            raise CheckpointOptionError("dtype", problem)
        common["dtype"] = "bfloat16"
    # One as long as any text is none, but for the rotary embedding that layers with a window may have.
    longest_window = None if "window_rope" in fields else common["max_positions"]
    windows = tuple(
        None if w is None or (longest_window and w >= longest_window) else w for w in fields.get("windows", ())
    )
    fields |= {"windows": windows if any(windows) else ()}
    return ModelConfig(**cast(Any, common | fields))


def effective_quantization(name: str, hf_config: Mapping[str, Any], config: ModelConfig, quantization: str) -> str:
    """How ``load_params`` should quantise the model ``name``: as asked for, or auto where it is stored so already.

    Raises:
      CheckpointError: before any weight is read: no such kind; the weights are stored in another; or their inputs do
        not divide into its groups.
    """
    if quantization not in QUANTIZATIONS:
        problem = f"{quantization:.60} is not one of: {', '.join(QUANTIZATIONS)}"
        raise CheckpointOptionError("quantization", problem)
    if quantization in ("auto", "none"):
        return quantization
    if method := given(hf_config, "quantization_config", {}).get("quant_method"):
        if method == quantization:
            return "auto"
        problem = (
            f"{quantization} is for float weights, and those of {name} are quantised already ({method}); auto keeps "
            "them as they are, none dequantises them"
        )
        raise CheckpointOptionError("quantization", problem)
    if quantization == "int4":
        sizes = dimensions(config)
        for leaf in filter(is_product, leaves_of(table(config))):
            depth = prod(sizes[letter] for letter in input_letters(leaf))
            if depth % PACKED and (leaf.name != "embed" or config.tied_embeddings):
                problem = (
                    f"int4 needs inputs in groups of {PACKED}, and {leaf.name} of {name} has {depth}; int8 and fp8 "
                    "take any number"
                )
                raise CheckpointOptionError("quantization", problem)
    return quantization


def _text_config(hf_config: Mapping[str, Any], is_there: bool) -> dict[str, Any]:
    """The language model's own keys, where a config.json of several modalities has them in a section."""
    section = given(hf_config, "text_config", {}) if is_there else {}
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: text_config is {section!r:.80}; an object is needed")
    return {
        key: value
        for key, value in section.items()
        if key not in ("architectures", "quantization_config", "tie_word_embeddings")
    }


def refuse_unsupported(
    hf_config: Mapping[str, Any], *, activation: tuple[str, str] = ("hidden_act", "silu"),
    only: Mapping[str, tuple[Any, str]] = {"sliding_window": (0, "null (attention over the whole context)")},
) -> None:  # fmt: skip
    """Refuse an activation, quantisation or another value that is not implemented.

    ``only``: by key, the value that is implemented, as null is, and what the message says is.
    """
    key, name = activation
    known: dict[str, tuple[Any, str]] = {
        key: (name, name),
        "quantization_config": ({}, "none; use the float32, bfloat16 or float16 checkpoint that it was made from"),
    }
    for key, (value, supported) in (known | dict(only)).items():
        if (found := given(hf_config, key, value)) != value:
            raise CheckpointError(f"config.json: {key} is {found!r:.80}; supported: {supported}")


def _dtype(hf_config: Mapping[str, Any], dtype: str, platform: str | None) -> str:
    if dtype in DTYPES:
        return dtype
    if dtype != "auto":
        raise CheckpointError(f"dtype {dtype!r} is not one of: auto, {', '.join(DTYPES)}")
    if platform is None:
        import jax

        platform = jax.default_backend()
    if platform == "cpu":  # bfloat16 products are slower than float32 ones there
        return "float32"
    stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32").removeprefix("torch.")
    if stored not in DTYPES:
        raise CheckpointError(f"config.json: torch_dtype is {stored!r}; set dtype to one of: {', '.join(DTYPES)}")
    return stored
