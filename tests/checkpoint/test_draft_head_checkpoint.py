"""load_head: every dialect and format against the raw tensors, element by element, and the refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_heads import DIALECTS, SIZES, SPECULATORS, save_head

from specjax.checkpoint import CheckpointError, describe_head, draft_head, load_head
from specjax.checkpoint.draft_head import aux_layer_ids, published_name
from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.drafters import Auto, Eagle3
from specjax.limits import ParameterError
from specjax.models.head_spec import head_sizes, head_spec, head_table
from specjax.models.params import placements, tensors_of

LAYER = "midlayer.self_attn."
KEY = "eagle_aux_hidden_state_layer_ids"
FORMATS = ("safetensors", "bin", "sharded safetensors", "sharded bin")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


NORMS = {  # fields that are true, by dialect
    "eagle3-norm-before-residual": ("norm_before_residual",),
    "eagle3-norm-before-fc": ("norm_before_residual", "norm_before_fc"),
    "eagle3.1": ("fc_norm", "norm_output"),
    "eagle3.1-automodel": ("fc_norm", "norm_output"),
    "eagle3.1-speculators": ("norm_before_residual", "norm_before_fc", "norm_output"),
    "eagle3.1-sliding": ("norm_before_fc", "norm_output"),
    "eagle3.1-tensorrt": ("norm_before_fc", "norm_output"),
    "eagle3.1-both-norms": ("norm_before_fc", "fc_norm"),
}


def target(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "family": "llama", "vocab_size": SIZES["target_vocab_size"], "hidden_size": SIZES["target_hidden_size"],
        "intermediate_size": 20, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
        "norm_epsilon": 1e-6, "rope": RopeConfig(theta=7.0), "max_positions": 64, "tied_embeddings": False,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def read(folder: Path, kind: str, **options: Any):
    model = options.pop("target", None) or target()
    return load_head(str(folder), model, kind=kind, progress=False, **options)  # type: ignore[arg-type]


def assert_leaves(config: HeadConfig, params: dict[str, Any], raw: dict[str, np.ndarray]) -> None:
    """Compare with the raw tensors. tests/drafters compares the drafts of every dialect with an oracle."""
    rules = placements(head_table(config), head_sizes(config, SIZES["target_vocab_size"]))
    common = tensors_of(rules, lambda path: np.asarray(params[path[-1]]))
    stored = {published_name(head_spec(config.kind), name): tensor for name, tensor in common.items()}
    assert raw.keys() - stored.keys() <= {"d2t", "t2d", "embed_tokens.weight"}
    for name, tensor in stored.items():
        np.testing.assert_array_equal(np.float32(tensor), raw[name], name)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects(tmp_path, dialect, format):
    kind = DIALECTS[dialect]
    raw = save_head(tmp_path, kind, dialect=dialect, format=format)
    config, params = read(tmp_path, kind)
    assert_leaves(config, params, raw)
    assert all(isinstance(leaf, jax.Array) for leaf in params.values())
    assert {leaf.dtype for name, leaf in params.items() if name != "ids"} == {jnp.dtype("float32")}
    assert (config.kind, config.hidden_size, config.intermediate_size) == (kind, 16, 24)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.norm_epsilon) == (4, 2, 8, 1e-5)
    assert config.fc_bias == ("fc_bias" in params) == (dialect in ("eagle", "eagle-qwen2"))
    assert config.attention_bias == ("qkv_bias" in params) == (dialect in ("eagle-qwen2", "mtp"))
    assert not config.output_bias and not config.mlp_bias
    assert (config.windows, config.head_norms) == (((4,), True) if dialect == "eagle3.1-sliding" else ((None,), False))
    norms = NORMS.get(dialect, ())
    assert {
        key for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, key)
    } == {*norms}
    assert ("joint_norm" in params) == ("norm_before_fc" in norms) and ("fc_norm" in params) == ("fc_norm" in norms)
    own = dialect in ("eagle3-own-embedding", "eagle3-speculators", "eagle3-norm-before-fc")
    assert config.own_embedding == ("embed" in params) == own
    assert config.own_head == ("head" in params) == (kind == "eagle3")
    mapped = kind == "eagle3" and dialect != "eagle3-full-vocabulary"
    assert config.mapped == ("ids" in params) == mapped
    assert config.vocab_size == (11 if mapped else 31)
    assert config.aux_layers == ((1, 3, 4) if kind == "eagle3" else ())
    assert config.feature_size == (48 if kind == "eagle3" else 16)
    if mapped:
        assert params["ids"].dtype == jnp.int32
        assert params["ids"].tolist() == [i + offset for i, offset in enumerate(raw["d2t"].tolist())]
        assert params["ids"].tolist() == np.flatnonzero(raw["t2d"]).tolist()
    # The head's own base, 10000 if absent, and never the target's 7.
    theta = 500000.0 if dialect in ("eagle-nobias", *SPECULATORS) else 10000.0
    theta = 640000.0 if kind == "mtp" else theta
    assert config.rope == RopeConfig(theta=theta)
    assert describe_head(str(tmp_path), target(), kind=kind) == config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "float64"])
def test_cast_to_dtype(tmp_path, stored, dtype):
    raw = save_head(tmp_path, "eagle3", dtype=stored, format="bin")
    config, params = read(tmp_path, "eagle3", target=target(dtype=dtype))
    assert config.dtype == dtype
    numpy_dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[dtype]
    assert_leaves(config, params, {name: np.float32(value.astype(numpy_dtype)) for name, value in raw.items()})
    assert params["fc"].dtype == jnp.dtype(dtype) and params["ids"].dtype == jnp.int32


def test_key_value_heads_follow_weights(tmp_path):
    raw = save_head(tmp_path, "eagle", dialect="eagle-qwen2", kv_heads=4)
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 1
    config, params = read(tmp_path, "eagle")
    assert (config.num_kv_heads, config.group_size) == (4, 1)
    assert_leaves(config, params, raw)


def test_biases(tmp_path):
    rows = {"q": 32, "k": 16, "v": 16, "o": 16}
    biases = {f"midlayer.self_attn.{part}_proj.bias": np.arange(n, dtype=np.float32) for part, n in rows.items()}
    biases |= {f"midlayer.mlp.{part}_proj.bias": np.arange(24, dtype=np.float32) for part in ("gate", "up")}
    biases["midlayer.mlp.down_proj.bias"] = np.arange(16, dtype=np.float32)
    save_head(tmp_path, "eagle3", tensors=biases)
    config, params = read(tmp_path, "eagle3")
    assert config.attention_bias and config.output_bias and config.mlp_bias
    assert params["qkv_bias"][1, 1, 2] == 26 and params["qkv_bias"][1, 2, 2] == params["qkv_bias"][1, 3, 2] == 10
    assert params["output_bias"].tolist() == list(range(16)) == params["down_bias"].tolist()
    assert params["gate_up_bias"].shape == (2, 24) and params["gate_up_bias"][1, 7] == 7


def test_config_of_the_head_overrides_the_targets(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    extra = {"rope_theta": None, "rms_norm_eps": None, "rope_scaling": rope, "sliding_window": 4, "head_dim": 8}
    save_head(tmp_path, "eagle3", config=extra | {"use_sliding_window": False})
    config, _ = read(tmp_path, "eagle3")
    assert config.rope == RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 32)
    assert config.norm_epsilon == 1e-6


def test_nested_config(tmp_path):
    save_head(tmp_path, "eagle3", dialect="eagle3-speculators", config={"rms_norm_eps": 0.5, "hidden_size": 99})
    assert read(tmp_path, "eagle3")[0].norm_epsilon == 1e-5
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    layer |= {"rope_theta": None, "norm_before_residual": True}
    (tmp_path / "new").mkdir()
    save_head(tmp_path / "new", "eagle3", dialect="eagle3-speculators",
              config={"transformer_layer_config": layer, "norm_before_residual": None})  # fmt: skip
    config, _ = read(tmp_path / "new", "eagle3")
    assert config.rope.theta == 10000.0 and config.norm_before_residual


def test_ignored_tensors(tmp_path):
    save_head(tmp_path, "eagle", tensors={
        "layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "embed_tokens.weight": np.zeros((31, 16), np.float32),
    })  # fmt: skip
    assert "embed" not in read(tmp_path, "eagle")[1]


def test_output_matrix_of_head_or_target(tmp_path):
    matrix = np.arange(31 * 16, dtype=np.float32).reshape(31, 16)
    save_head(tmp_path / "eagle", "eagle", tensors={"lm_head.weight": matrix})
    config, params = read(tmp_path / "eagle", "eagle")
    assert config.own_head and config.vocab_size == 31
    np.testing.assert_array_equal(params["head"].T, matrix)
    save_head(tmp_path / "eagle3", "eagle3", dialect="eagle3-full-vocabulary", tensors={"lm_head.weight": None})
    config, params = read(tmp_path / "eagle3", "eagle3")
    assert not config.own_head and not config.mapped and config.vocab_size == 31 and "head" not in params


def test_ids_without_order(tmp_path):
    ids = np.array([30, 2, 17, 0, 5, 1, 29, 3, 11, 12, 13])
    # SpecJAX's training writes t2d as an int32 map, and an int32 d2t if jax has no 64-bit types.
    changes = {"d2t": (ids - np.arange(11)).astype(np.int32), "t2d": np.full(31, -1, np.int32)}
    save_head(tmp_path, "eagle3", tensors=changes)
    assert read(tmp_path, "eagle3")[1]["ids"].tolist() == ids.tolist()
    save_head(tmp_path, "eagle3", tensors={"t2d": None})
    assert read(tmp_path, "eagle3")[0].mapped
    for whole in (np.arange(31), np.arange(31)[::-1]):
        save_head(tmp_path, "eagle3", dialect="eagle3-full-vocabulary", tensors={"d2t": whole - np.arange(31)})
        config, params = read(tmp_path, "eagle3")
        assert params["ids"].tolist() == whole.tolist() if config.mapped else whole[0] == 0


def test_embedding_equal_to_the_targets_is_shared(tmp_path):
    raw = save_head(tmp_path, "eagle3", dialect="eagle3-own-embedding", dtype="bfloat16")
    embedding = raw["embed_tokens.weight"]
    config, params = read(tmp_path, "eagle3", target_embedding=lambda: embedding.astype(np.float16))
    assert not config.own_embedding and "embed" not in params
    other = embedding.copy()
    other[30, 15] += 0.1
    config, params = read(tmp_path, "eagle3", target_embedding=lambda: other)
    assert config.own_embedding and "embed" in params
    assert read(tmp_path, "eagle3", target_embedding=lambda: embedding[:, :8])[0].own_embedding
    save_head(tmp_path / "none", "eagle3")
    read(tmp_path / "none", "eagle3", target_embedding=lambda: pytest.fail("called without need"))


def test_head_narrower_than_target(tmp_path):
    raw = save_head(tmp_path, "eagle3", dialect="eagle3-own-embedding", target_hidden_size=20)
    options = {"target": target(hidden_size=20), "target_embedding": lambda: np.zeros((31, 20))}
    config, params = read(tmp_path, "eagle3", **options)
    assert (config.hidden_size, config.feature_size) == (16, 60) and config.own_embedding
    assert_leaves(config, params, raw)


def test_default_aux_layers():
    for layers, aux_layers in ((7, (1, 2, 3)), (8, (1, 3, 4)), (30, (1, 14, 26)), (32, (1, 15, 28))):
        for family in ("", "gpt_oss"):
            assert aux_layer_ids({}, layers, family) == aux_layers
            assert aux_layer_ids({"eagle_config": {KEY: []}, KEY: None}, layers, family) == aux_layers


# (ids, layers of the target, outputs, outputs for gpt-oss); a string is an error.
LAYER_IDS: list[tuple[list[int], int, tuple[int, ...] | str, tuple[int, ...] | str]] = [
    ([1, 14, 26], 30, (1, 14, 26), (0, 13, 25)),
    ([1, 46, 90], 94, (1, 46, 90), (0, 45, 89)),
    ([1, 17, 32], 36, (1, 17, 32), (0, 16, 31)),  # nvidia/gpt-oss-120b-Eagle3-long-context
    ([24, 30, 36], 36, (23, 29, 35), (23, 29, 35)),  # nvidia/gpt-oss-120b-Eagle3-v3
    ([2, 16, 29], 32, (1, 15, 28), (1, 15, 28)),
    ([2, 30, 58], 61, (1, 29, 57), (1, 29, 57)),
    ([3, 1, 2], 8, (2, 0, 1), (2, 0, 1)),
    ([1], 8, (1,), (0,)),
    ([8], 8, (7,), (7,)),
    ([1, 3, 7], 8, (1, 3, 7), (0, 2, 6)),
    ([1, 3, 8], 8, "outputs: the outputs of layers [1, 3, 8]", (0, 2, 7)),
    ([2, 3, 9], 8, "boundaries: the outputs of layers [1, 2, 8]", "boundaries: the outputs of layers [1, 2, 8]"),
    ([0, 3, 5], 8, "[0, 3, 5], boundaries: the outputs of layers [-1, 2, 4]", "layers [-1, 2, 4]"),
    ([2, -1, 5], 8, "layers [1, -2, 4]", "layers [1, -2, 4]"),
    ([1, 1, 4], 8, "layers [1, 1, 4]", "layers [0, 0, 3]"),
    ([2, 4, 4], 8, "layers [1, 3, 3]", "layers [1, 3, 3]"),
]


@pytest.mark.parametrize("place", ["top", "nested", "both"])
@pytest.mark.parametrize(("ids", "layers", "outputs", "gpt_oss"), LAYER_IDS)
def test_layer_ids(ids, layers, outputs, gpt_oss, place):
    """The first id decides what the file counts, in either place; for gpt-oss ids are boundaries."""
    settings = {KEY: ids} if place != "nested" else {}
    settings |= {"eagle_config": {KEY: ids, "use_aux_hidden_state": True}} if place != "top" else {}
    for family, expected in (("llama", outputs), ("qwen3", outputs), ("gpt_oss", gpt_oss)):
        if isinstance(expected, tuple):
            assert aux_layer_ids(settings, layers, family) == expected
        else:
            with pytest.raises(
                CheckpointError, match=re.escape(expected) + ".*; different layers .* option aux_layers"
            ):
                aux_layer_ids(settings, layers, family)


def test_two_lists_of_layer_ids():
    """Lists that mean the same layers; others are refused, since SGLang reads one of them and vLLM the other."""
    both = {"eagle_config": {KEY: [1, 14, 26]}, KEY: [2, 15, 27]}  # as specjax writes them
    assert aux_layer_ids(both, 30) == (1, 14, 26)
    with pytest.raises(CheckpointError, match=r"\[1, 14, 26\], .*\[0, 13, 25\] and .*\[2, 15, 27\].* which differ"):
        aux_layer_ids(both, 30, "gpt_oss")
    assert aux_layer_ids({"eagle_config": {KEY: [2, 15, 27]}, KEY: [2, 15, 27]}, 30, "gpt_oss") == (1, 14, 26)
    with pytest.raises(
        CheckpointError, match=r"eagle_config.* \[1, 4, 6\] and .* \[2, 5, 7\], which differ; .*aux_layers"
    ):
        aux_layer_ids({"eagle_config": {KEY: [2, 5, 7]}, KEY: [3, 6, 8]}, 8)


def test_aux_layers_override_the_file(tmp_path, caplog):
    """The layers that are read are logged once."""
    save_head(tmp_path, "eagle3", config={"eagle_config": {KEY: [0, 9, 9]}})
    with caplog.at_level("INFO"):
        config, params = read(tmp_path, "eagle3", aux_layers=(0, 3, 7))
    assert config.aux_layers == (0, 3, 7) and params["fc"].shape == (48, 16)
    assert describe_head(str(tmp_path), target(), kind="eagle3", aux_layers=(0, 3, 7)).aux_layers == (0, 3, 7)
    lines = [record.getMessage() for record in caplog.records if "reads the outputs" in record.getMessage()]
    assert lines == [f"{tmp_path} reads the outputs of layers 0, 3, 7 (before the final norm) of 0..7"]
    for wrong in ((), (1, 1, 2), (0, 3, 8), (-1, 2, 3)):
        with pytest.raises(ParameterError, match=r"Eagle3.aux_layers must be different layers from 0 to 7, got \["):
            read(tmp_path, "eagle3", aux_layers=wrong)
    with pytest.raises(ParameterError, match=r"aux_layers has 2 layers, 32 channels .*fc.weight \[16, 48\]"):
        read(tmp_path, "eagle3", aux_layers=(1, 3))
    (tmp_path / "model.safetensors").unlink()
    assert describe_head(str(tmp_path), target(), kind="eagle3", aux_layers=(0, 3)).aux_layers == (0, 3)


def test_aux_layers_option():
    """Numbers, or their text in flags and files."""
    for given in ((1, 14, 26), ("1", "14", "26")):
        assert Eagle3(aux_layers=given).aux_layers == (1, 14, 26)
        assert cast(Eagle3, Auto(aux_layers=given).choose("eagle3")[0]).aux_layers == (1, 14, 26)
    for wrong in ((), (1, 1), (1, -2), ("x",), ("1", "01"), ("1.0",), ("1 2",)):
        with pytest.raises(ParameterError, match="aux_layers must be different layers of the target, counted from 0"):
            Eagle3(aux_layers=wrong)


# Keys of EAGLE heads that change the forward: the value, and the message of its refusal, or the field that it sets.
KEYS: list[tuple[str, Any, str]] = [
    *(
        (
            key,
            True,
            "missing tensors: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight (a head has fc_norm.* if and "
            "only if its config.json has fc_norm true)",
        )
        for key in ("fc_norm", "use_aux_norm")
    ),
    ("norm_output", True, ""),
    ("return_hidden_post_norm", True, ""),
    ("norm_output", 0, "norm_output is 0; true or false is needed"),
    ("return_hidden_post_norm", "true", "return_hidden_post_norm is 'true'; true or false is needed"),
    ("eh_proj_before_attn", True, "eh_proj_before_attn is True; such heads"),
    ("use_aux_hidden_state", False, "use_aux_hidden_state is False; supported: true (an EAGLE-3 head reads several"),
    ("ptd_token_id", 0, "missing tensors: mask_hidden"),
    ("layernorms", True, "layernorms is True; such heads"),
    ("norm_before_residual", True, ""),
    ("norm_before_residual", "yes", "norm_before_residual is 'yes'; true or false is needed"),
    ("norm_before_fc", True, "missing tensors: input_norm.weight"),
    ("norm_before_fc", 1, "norm_before_fc is 1; true or false is needed"),
]
NEUTRAL = {"use_aux_hidden_state": True, "ptd_token_id": None}
"""Values that change nothing, of other keys False."""
WINDOWS: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["full_attention"], "sliding_window": 2048}, ""),
    ({"layer_types": ["full_attention"], "sliding_window": 2048, "use_sliding_window": False}, ""),
    ({"sliding_window": 2048, "use_sliding_window": False}, ""),
    ({"layer_types": None, "sliding_window": None}, ""),
    ({"sliding_window": 2048}, "sliding_window is 2048"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True}, ""),
    ({"layer_types": ["sliding_attention"], "sliding_window": 2048}, ""),
    (
        {"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": False},
        "use_sliding_window is False; supported: true where",
    ),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048}, "layer_types is ["),
    ({"layer_types": ["sliding_attention"]}, "sliding_window is None; a positive integer is needed"),
    ({"layer_types": ["sliding_attention"], "sliding_window": "all"}, "sliding_window is 'all'; a positive integer"),
    *(
        ({"layer_types": types}, f"layer_types is {types!r}; for each of 1 layers one of full_attention")
        for types in ("full_attention", 1, True)
    ),
    ({"speculators_model_type": "peagle", "mask_token_id": 3}, "missing tensors: mask_hidden"),
    ({"architectures": ["PEagleDraftModel"], "mask_token_id": 3}, "missing tensors: mask_hidden"),
    ({"parallel_drafting": True, "mask_token_id": 31}, "mask_token_id is 31; a token id from 0 to 30 is needed"),
    *(
        ({"architectures": [name]}, f"architectures is ['{name}']; such heads (latent attention) are not supported")
        for name in ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepSeekV3ForCausalLM")
    ),
]
CASES = [
    *((nested, {key: value}, message) for key, value, message in KEYS for nested in (False, True)),
    *((False, *case) for case in WINDOWS),
]


@pytest.mark.parametrize("dialect", ["eagle3", "eagle3-speculators"])
@pytest.mark.parametrize(("nested", "changes", "message"), CASES)
def test_keys_that_change_the_forward(tmp_path, dialect, nested, changes, message):
    """At the top level and in eagle_config, read or refused by name; values that change nothing are accepted."""

    def saved(changes: dict[str, Any]) -> HeadConfig:
        save_head(tmp_path, "eagle3", dialect=dialect, config={"eagle_config": changes} if nested else changes)
        return read(tmp_path, "eagle3")[0]

    plain, (key, *_) = saved({}), changes
    if key in {key for key, *_ in KEYS}:
        assert saved({key: NEUTRAL.get(key, False)}) == saved({key: None}) == plain
    if message:
        with pytest.raises(CheckpointError, match=re.escape(message)):
            saved(changes)
    else:
        windowed = {"windows": (2048,)} if changes.get("layer_types") == ["sliding_attention"] else {}
        fields = windowed | {
            "norm_output" if k.startswith("return") else k: v for k, v in changes.items() if "norm" in k
        }
        assert saved(changes) == replace(plain, **fields)


NORM_CONFLICTS = [
    (
        {"norm_output": True, "eagle_config": {"norm_output": False}},
        "norm_output is True and eagle_config.norm_output is F",
    ),
    (
        {"norm_output": False, "eagle_config": {"return_hidden_post_norm": True}},
        "eagle_config.return_hidden_post_norm is T",
    ),
    ({"fc_norm": False, "use_aux_norm": True}, "fc_norm is False and use_aux_norm is True, which differ"),
]


@pytest.mark.parametrize(("changes", "message"), NORM_CONFLICTS)
def test_norms_that_contradict_each_other(tmp_path, changes, message):
    """An option decides where no tensor does."""
    save_head(tmp_path, "eagle3", config=changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(tmp_path, "eagle3")
    if "fc_norm" not in changes:
        assert read(tmp_path, "eagle3", norm_output=True)[0].norm_output
        assert not describe_head(str(tmp_path), target(), kind="eagle3", norm_output=False).norm_output


def test_norms_of_files_without_weights(tmp_path):
    keys = {"fc_norm": True, "eagle_config": {"norm_before_fc": True, "return_hidden_post_norm": True}}
    save_head(tmp_path, "eagle3", config=keys)
    (tmp_path / "model.safetensors").unlink()
    config = describe_head(str(tmp_path), target(), kind="eagle3")
    assert config.fc_norm and config.norm_before_fc and config.norm_output


# Refusals: (kind, options of save_head, the target, the message).
REFUSALS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "activation": ("eagle3", {"config": {"hidden_act": "gelu"}}, {}, "hidden_act is 'gelu'; supported: silu"),
    "quantised": ("eagle3", {"config": {"quantization_config": {"quant_method": "awq"}}}, {}, "awq.*; supported: none"),
    "rope": ("eagle3", {"config": {"rope_scaling": {"rope_type": "ntk"}}}, {}, "'ntk'; supported: default, linear"),
    "fc_norm": ("eagle3", {"tensors": {"fc_norm.0.weight": np.ones(16, np.float32)}}, {},
                r"no place in EAGLE3 heads: fc_norm\.0\.weight \[16\] \(.* fc_norm true\)"),
    "few norms": ("eagle3", {"dialect": "eagle3.1", "tensors": {"fc_norm.1.weight": None}}, {},
                  r"missing tensors: fc_norm\.1\.weight$"),
    "many norms": ("eagle3", {"dialect": "eagle3.1", "tensors": {"fc_norm.3.weight": np.ones(16, np.float32)}}, {},
                   r"no place in EAGLE3 heads: fc_norm\.3\.weight \[16\]$"),
    "wide norm": ("eagle3", {"dialect": "eagle3.1-automodel",
                             "tensors": {"model.fc_norm.0.weight": np.ones(48, np.float32)}}, {},
                  r"wrong shapes: model\.fc_norm\.0\.weight is \[48\], not \[16\]"),
    "norms of eagle": ("eagle", {"config": {"eagle_config": {"fc_norm": True}}}, {},
                       r"fc_norm is True; supported: false \(EAGLE heads lack this norm"),
    "norms of mtp": ("mtp", {"config": {"norm_output": True}}, {}, r"norm_output is True; .*false \(MTP heads lack"),
    "unknown": ("eagle3", {"tensors": {f"{LAYER}q_norm.weight": np.ones(8, np.float32)}}, {},
                r"no place in EAGLE3 heads: midlayer\.self_attn\.q_norm\.weight \[8\]"),
    "map of eagle": ("eagle", {"tensors": {"d2t": np.zeros(31, np.int64)}}, {}, r"no place in EAGLE heads: d2t \[31\]"),
    "layers": ("eagle", {"tensors": {"layers.1.mlp.up_proj.weight": np.ones((24, 16), np.float32)}}, {},
               "it has 2 decoder layers; heads of 1 layer"),
    "twice": ("eagle3", {"tensors": {"model.fc.weight": np.ones((16, 48), np.float32)}}, {}, "mean the same"),
    "no fc": ("eagle3", {"tensors": {"fc.weight": None}}, {}, r"missing tensors: fc\.weight; the files hold d2t"),
    "no norm": ("eagle3", {"tensors": {"norm.weight": None, "midlayer.hidden_norm.weight": None}}, {},
                r"missing tensors: midlayer\.hidden_norm\.weight, norm\.weight"),
    "mtp norm": ("mtp", {"tensors": {"model.mtp_layers.0.final_layernorm.weight": None}}, {},
                 r"missing tensors: model\.mtp_layers\.0\.final_layernorm\.weight$"),
    "mtp target": ("mtp", {}, {"hidden_size": 20},
                   r"input_proj\.weight \[16, 32\] is for another target; \[20, 40\] is needed"),
    "one bias": ("eagle", {"tensors": {"layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}}, {},
                 r"missing tensors: .*k_proj\.bias, .*v_proj\.bias"),
    "shape": ("eagle3", {"dialect": "eagle3-model-prefix",
                         "tensors": {"model.layers.0.mlp.up_proj.weight": np.ones((23, 16), np.float32)}}, {},
              r"wrong shapes: model\.layers\.0\.mlp\.up_proj\.weight is \[23, 16\], not \[24, 16\]"),
    "integers": ("eagle3", {"tensors": {"midlayer.mlp.up_proj.weight": np.ones((24, 16), np.int8)}}, {},
                 r"no floats \(quantised heads are not supported\): .*up_proj\.weight \[24, 16\] is of int8"),
    "vector": ("eagle3", {"tensors": {"fc.weight": np.ones(16, np.float32)}}, {}, r"fc\.weight \[16\] must have two"),
    "q width": ("eagle3", {"tensors": {f"{LAYER}q_proj.weight": np.ones((32, 40), np.float32)}}, {},
                r"reads 40 numbers, .* gives 16; supported: 16 \(EAGLE\), 32 \(EAGLE3\), 16 \(MTP\)"),
    "heads": ("eagle3", {"config": {"num_attention_heads": 5}}, {}, r"reads 32 numbers, .* 5 heads .* of 6"),
    "no heads": ("eagle3", {"config": {"num_attention_heads": None}}, {}, "num_attention_heads is None"),
    "head_dim": ("eagle3", {"config": {"head_dim": 16}}, {}, r"4 heads \(num_attention_heads\) of 16 \(head_dim\)"),
    "kv heads": ("eagle3", {"tensors": {f"{LAYER}k_proj.weight": np.ones((24, 32), np.float32)}}, {},
                 r"k_proj\.weight \[24, 32\] does not hold a divisor of 4"),
    "hidden_size": ("eagle3", {"config": {"hidden_size": 32}}, {}, r"hidden_size is 32, and fc\.weight \[16, 48\]"),
    "vocab_size": ("eagle", {"config": {"vocab_size": 40}}, {}, "vocab_size is 40, and the target's is 31"),
    "other target": ("eagle", {}, {"hidden_size": 20},
                     r"fc\.weight \[16, 32\] is for another target; \[20, 40\] is needed"),
    "aux_layers": ("eagle3", {"aux_layers": 4}, {},
                   r"\[16, 48\] is needed, for the auxiliary layers 1, 3, 4"),
    "wide target": ("eagle3", {}, {"hidden_size": 20}, r"\[16, 48\] is for another target; \[16, 60\] is needed"),
    "layer type": ("eagle3", {"config": {KEY: ["2", "3", "4"]}}, {}, "a list of integers is needed"),
    "norm before fc": ("eagle3", {"dialect": "eagle3-norm-before-fc", "config": {"norm_before_fc": None}}, {},
                       r"no place in EAGLE3 heads: input_norm.* norm_before_fc true"),
    "one layer": ("eagle3", {}, {"num_layers": 1}, r"absent, and its default for a target of 1 layers is \[1, "),
    "six layers": ("eagle3", {}, {"num_layers": 6}, r"absent, and its default for a target of 6 layers is \[1, "),
    "no layers": ("eagle3", {"config": {"eagle_config": {KEY: ""}}}, {}, "is ''; a list of integers is needed"),
    "no embedding": ("eagle3", {"target_hidden_size": 20}, {"hidden_size": 20},
                     r"no embed_tokens\.weight, and the target's is 20 wide, the draft head 16"),
    "no head": ("eagle3", {"dialect": "eagle3-own-embedding", "target_hidden_size": 20,
                           "tensors": {"lm_head.weight": None, "d2t": None}}, {"hidden_size": 20},
                r"no lm_head\.weight, and the target's is 20 wide"),
    "map alone": ("eagle3", {"tensors": {"lm_head.weight": None}}, {}, r"d2t \[11\] .* each row of lm_head.*: 31"),
    "d2t length": ("eagle3", {"tensors": {"d2t": np.zeros(12, np.int64)}}, {}, r"d2t \[12\] .* each row of lm_head"),
    "d2t outside": ("eagle3", {"tensors": {"d2t": np.arange(20, 31)}}, {},
                    r"d2t must hold target id - draft id; .* entry 6 is 32, outside the target's vocabulary 0\.\.30"),
    "d2t repeats": ("eagle3", {"tensors": {"d2t": np.array([0, 0, 0, 0, -2, 0, 0, 0, 0, 0, 0])}}, {},
                    "ids must differ; repeated: 2"),
    "no map": ("eagle3", {"tensors": {"d2t": None}}, {}, "is for 11 of 31 tokens, without d2t"),
    "embedding": ("eagle", {"tensors": {"embed_tokens.weight": np.ones((40, 16), np.float32)}}, {},
                  r"embed_tokens\.weight \[40, 16\] is not of the target's size: \[31, 16\]"),
    "eagle head": ("eagle", {"tensors": {"lm_head.weight": np.ones((11, 16), np.float32)}}, {},
                   r"lm_head\.weight \[11, 16\] is not of the target's size: \[31, 16\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(tmp_path, case, monkeypatch):
    kind, options, changes, message = REFUSALS[case]
    save_head(tmp_path, kind, **options)
    monkeypatch.setattr(draft_head, "fill_parameters", lambda *_, **__: pytest.fail("read before the refusal"))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, kind, target=target(**changes))
    assert str(caught.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_other_kinds_are_refused(tmp_path, kind):
    save_head(tmp_path, kind)
    for other in {"eagle", "eagle3", "mtp"} - {kind}:
        with pytest.raises(CheckpointError, match=rf"for {kind.upper()}, not {other.upper()} \("):
            read(tmp_path, other)


def test_folders_that_are_no_heads(tmp_path, monkeypatch):
    def message(name: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_head(name, target(), kind="eagle", progress=False)
        assert f"{name}: " in str(caught.value)
        return str(caught.value)

    assert "has no config.json" in message(str(tmp_path))
    save_head(tmp_path, "eagle")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.bin")
    assert re.search(r"none of: model\.safetensors, .*, pytorch_model\.bin, .*; it has config\.json, model\.bin",
                     message(str(tmp_path)))  # fmt: skip
    assert "is no file or folder" in message("./no/such")
    assert "is a file; give a folder" in message(str(tmp_path / "model.bin"))
    save_head(tmp_path, "eagle", format="sharded bin")
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    expected = r"lacks shards that pytorch_model\.bin\.index\.json lists: pytorch_model-00001"
    assert re.search(expected, message(str(tmp_path)))
    (tmp_path / "config.json").write_text("[")
    assert "cannot be read as JSON" in message(str(tmp_path))
    with pytest.raises(CheckpointError, match="revision 'x' has no meaning"):
        load_head(str(tmp_path), target(), kind="eagle", revision="x")
    monkeypatch.chdir(tmp_path)
    assert re.search("there is no local folder some/head, and the .* hub", message("some/head"))


def test_damaged_state_dicts(tmp_path):
    import torch

    def refuse(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path, "eagle")

    save_head(tmp_path, "eagle")
    for value in ([1, 2], {"state_dict": {}}, torch.ones(2)):
        torch.save(value, tmp_path / "pytorch_model.bin")
        refuse("does not hold a state dict")
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")
    refuse(r"asks for \w+\.print")
    save_head(tmp_path, "eagle", format="sharded bin")
    first, second = sorted(tmp_path.glob("*-of-*.bin"))
    torch.save(torch.load(first, weights_only=True) | torch.load(second, weights_only=True), second)
    refuse("in another shard; keep one")


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_hub(tmp_path, monkeypatch, format):
    """torch's files are downloaded only if there are no others."""
    import huggingface_hub

    requests = []

    def download(name: str, **options: Any) -> str:
        requests.append((name, options["revision"], options["allow_patterns"]))
        folder = tmp_path / str(len(requests))
        save_head(folder, "eagle", format=format)
        if "*.bin" not in options["allow_patterns"]:
            (folder / "pytorch_model.bin").unlink(missing_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load_head("some/head", target(), kind="eagle", revision="v1", progress=False)
    patterns = ["*.json", "*.safetensors"]
    expected = [("some/head", "v1", patterns), ("some/head", "v1", [*patterns, "*.bin"])]
    assert requests == (expected[:1] if format == "safetensors" else expected)
