"""Draft heads in training: options, configuration, vocabulary, first weights, and exported folders."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from eagle_oracle import HeadSpec, draft_logits, head_forward, target_ids
from safetensors.numpy import load_file
from specjax_kernels import CAUSAL
from tiny_heads import save_head
from toy_models import tiny_llama

from specjax.checkpoint import CheckpointError, load_head
from specjax.checkpoint.draft_head import aux_layer_ids
from specjax.config import HeadConfig, RopeConfig
from specjax.models.blocks import KeyValue, Past
from specjax.models.draft_head import draft_head, init_head_params
from specjax.train import head
from specjax.train.data import Example, pack
from specjax.train.export import export_head, head_description, head_tensors
from specjax.train.options import DraftSettings, LossSettings


def config(layers: int = 8):
    return dataclasses.replace(tiny_llama(3).target.config, num_layers=layers)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DraftSettings(draft="EAGLE", draft_vocab_size=4), "--draft-vocab-size is for --draft EAGLE3"),
        (DraftSettings(draft="MTP", aux_layers=("1",)), "--aux-layers is for --draft EAGLE3"),
        (DraftSettings(draft_vocab_size=32), "--draft-vocab-size 32 is more than the target's 31"),
        (DraftSettings(draft_vocab_size=1), "--draft-vocab-size 1 has no room for the model's 2 end tokens"),
        (DraftSettings(aux_layers=("8",)), "--aux-layers must be different layers from 0 to 7, got 8"),
        (DraftSettings(aux_layers=("1", "1")), "--aux-layers must be different layers from 0 to 7, got 1 1"),
        (DraftSettings(aux_layers=("0", "2")), "--aux-layers 0 2 begins with 0, .* another layer must come first"),
        (DraftSettings(aux_layers=("x",)), "--aux-layers must be different layers from 0 to 7, got x"),
    ],
)
def test_wrong_head_settings(settings, expected):
    with pytest.raises(ValueError, match=expected):
        head.head_config(settings, config(), (2, 5))


def test_head_configurations():
    assert head.head_config(DraftSettings(), config(), (2,)).aux_layers == (1, 3, 4)
    few = head.head_config(DraftSettings(aux_layers=("7", "0"), draft_vocab_size=2), config(), (2, 5))
    assert (few.aux_layers, few.feature_size, few.vocab_size, few.mapped) == ((7, 0), 32, 2, True)
    assert not head.head_config(DraftSettings(draft_vocab_size=31), config()).mapped
    assert head.head_config(DraftSettings(), config(4)).aux_layers == (1, 2, 3)
    assert head.head_config(DraftSettings(), config(3)).aux_layers == (1, 0, 2)
    with pytest.raises(
        ValueError, match="the target has 2 layers, and --aux-layers are three by default; give --aux-layers"
    ):
        head.head_config(DraftSettings(), config(2))


@pytest.mark.parametrize("size", [1, 2, 5, 9, 30])
def test_draft_vocabulary_is_the_most_frequent_tokens_with_a_loss(size):
    rng = np.random.default_rng(size)
    examples = []
    for _ in range(20):
        tokens = np.minimum(rng.geometric(0.15, 30), 29).astype(np.int32)
        examples.append(Example(tokens, rng.random(30) < 0.3))
    rows = pack(examples, 64, 0)
    counted: Counter[int] = Counter()
    for example in examples:
        counted.update(example.tokens[example.loss].tolist())
    end = 30  # never seen
    ranked = [token for token in sorted(range(31), key=lambda t: (-counted[t], t)) if token != end]
    ids = head.draft_ids(rows, size, 31, (end,))
    assert ids.tolist() == sorted([*ranked[: size - 1], end])


def test_init_from(tmp_path):
    toy, folder = tiny_llama(3, num_layers=4), str(tmp_path / "head")
    target = toy.target.config
    described = head.head_config(DraftSettings(draft_vocab_size=3, aux_layers=("2", "0")), target)
    params = dict(head.new_params(described, toy.target, toy.params, np.array([1, 2, 5], np.int32), seed=5))
    export_head(folder, described, params, target, target_name="t", card="", dtype="float32")
    loaded, weights = head.from_head(DraftSettings(init_from=folder), target)
    assert dataclasses.replace(loaded, dtype=described.dtype) == described
    assert weights.keys() == params.keys() and weights["fc"].dtype == jnp.float32
    for name, leaf in params.items():
        np.testing.assert_array_equal(weights[name], leaf, err_msg=name)
    for flag, changes in (
        ("--draft-vocab-size 9", {"draft_vocab_size": 9}),
        ("--aux-layers 1 2", {"aux_layers": ("1", "2")}),
    ):
        with pytest.raises(ValueError, match=f"{flag} differs from --init-from .*leave it out"):
            head.from_head(DraftSettings(init_from=folder, **changes), target)
    save_head(tmp_path / "other", "eagle")
    with pytest.raises(CheckpointError, match="head"):
        head.from_head(DraftSettings(init_from=str(tmp_path / "other")), target)


def test_feature_scale():
    """Features times their scale have unit size, whatever a single enormous token."""
    sizes = np.array([1.0, 100.0, 0.01], np.float32)
    features = np.random.default_rng(0).normal(0, 1, (4, 200, 3)).astype(np.float32) * sizes
    features[0, 0] *= 1e6
    scale = head.feature_scale(features, np.ones((4, 200), np.int32))
    np.testing.assert_allclose(scale * sizes, 1, rtol=0.1)


@pytest.mark.parametrize(
    ("kind", "settings", "weights"),
    [
        ("EAGLE3", {}, [0.8**j for j in range(7)]),
        ("EAGLE3", {"rounds": 3}, [1, 0.8, 0.64]),
        ("EAGLE3", {"rounds": 9}, [0.8**j for j in range(9)]),
        ("EAGLE", {"rounds": 2}, [0.1, 0.08]),
        ("EAGLE", {}, [0.1]),
        ("MTP", {"rounds": 1}, [0.51]),
        ("MTP", {}, [0.51, 0.31, 0.18]),
    ],
)
def test_weights_of_rounds(kind, settings, weights):
    assert head.objective(kind, LossSettings(**settings)).weights == pytest.approx(weights)


SHARED: dict[str, Any] = {
    "hidden_size": 16, "feature_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "norm_epsilon": 1e-5, "rope": RopeConfig(theta=777.0), "vocab_size": 31,
}  # fmt: skip
THIRD = {"feature_size": 48, "aux_layers": (1, 2, 5), "own_head": True}
BIASES = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
LLAMA3 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)
DYNAMIC = RopeConfig(9.0, "dynamic", 2.0, original_max_position=64)
HEADS: dict[str, HeadConfig] = {
    "eagle3": HeadConfig("eagle3", **SHARED | THIRD | {"vocab_size": 11, "mapped": True}),
    "eagle3 unmapped": HeadConfig("eagle3", **SHARED | THIRD | {"norm_before_residual": True}),
    "eagle3 norm before fc": HeadConfig("eagle3", **SHARED | THIRD | {"norm_before_fc": True}),
    "eagle3 last layers": HeadConfig("eagle3", **SHARED | THIRD | {"aux_layers": (2, 0, 6)}),
    "eagle3 biases": HeadConfig("eagle3", **SHARED | THIRD | BIASES | {"rope": LLAMA3, "fc_bias": True}),
    "eagle3 own embedding": HeadConfig(
        "eagle3", **SHARED | THIRD | {"own_embedding": True, "rope": RopeConfig(9.0, "linear", 2.0)}
    ),
    "eagle3 dynamic": HeadConfig("eagle3", **SHARED | THIRD | {"rope": DYNAMIC, "max_positions": 128}),
    "eagle3 target's head": HeadConfig("eagle3", **SHARED | THIRD | {"own_head": False}),
    "eagle": HeadConfig("eagle", **SHARED | {"fc_bias": True}),
    "eagle nobias": HeadConfig("eagle", **SHARED),
    "eagle biases": HeadConfig("eagle", **SHARED | BIASES | {"fc_bias": True, "num_kv_heads": 4}),
    "mtp": HeadConfig("mtp", **SHARED | {"attention_bias": True}),
    "mtp nobias": HeadConfig("mtp", **SHARED),
}


@functools.cache
def target():
    return tiny_llama(3, num_layers=7)


@functools.cache
def params_of(name: str) -> dict[str, np.ndarray]:
    """Random leaves, also of norms and biases; the map is unsorted."""
    config, rng = HEADS[name], np.random.default_rng(len(name))
    params = init_head_params(config, target().target, jax.random.key(0))
    leaves = {leaf: rng.normal(0.5, 0.4, array.shape).astype(np.float32) for leaf, array in params.items()}
    if config.mapped:
        leaves["ids"] = rng.permutation(31)[: config.vocab_size].astype(np.int32)
    return leaves


def export(folder: Path, name: str, **options: Any) -> Path:
    options = {"target_name": "some/target", "card": "# A head"} | options
    return export_head(folder, HEADS[name], params_of(name), target().target.config, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in HEADS), ("eagle3", "bfloat16"), ("mtp", "float16")]
)
def test_an_export_loads_with_equal_parameters(tmp_path, name, dtype):
    """Equal bits in float32, rounded once in half precision, also from leaves in bfloat16 on a device."""
    folder = export(tmp_path / "head", name, dtype=dtype)
    config, params = load_head(str(folder), target().target.config, kind=HEADS[name].kind, progress=False)
    assert config == HEADS[name]
    narrow = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    expected = {leaf: array if leaf == "ids" else array.astype(narrow) for leaf, array in params_of(name).items()}
    assert params.keys() == expected.keys()
    for leaf, array in expected.items():
        np.testing.assert_array_equal(np.asarray(params[leaf]), array.astype(params[leaf].dtype), err_msg=leaf)
    if dtype == "bfloat16":
        halves = {leaf: jnp.asarray(array) for leaf, array in expected.items()}
        export_head(folder, config, halves, target().target.config, target_name="t", card="", dtype="float32")
        again = load_head(str(folder), target().target.config, kind=HEADS[name].kind, progress=False)[1]
        for leaf, array in halves.items():
            np.testing.assert_array_equal(np.asarray(again[leaf], np.float32), np.asarray(array, np.float32))


ATTENTION = {"q_proj.weight": (32, 16), "k_proj.weight": (16, 16), "v_proj.weight": (16, 16), "o_proj.weight": (16, 32)}
MLP = {"gate_proj.weight": (24, 16), "up_proj.weight": (24, 16), "down_proj.weight": (16, 24)}
KEYS: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle3": {
        "fc.weight": (16, 48),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (32, 32),
        "midlayer.self_attn.k_proj.weight": (16, 32),
        "midlayer.self_attn.v_proj.weight": (16, 32),
        "midlayer.self_attn.o_proj.weight": (16, 32),
        "midlayer.post_attention_layernorm.weight": (16,),
        **{f"midlayer.mlp.{name}": shape for name, shape in MLP.items()},
        "norm.weight": (16,),
        "lm_head.weight": (11, 16),
        "d2t": (11,),
        "t2d": (31,),
    },
    "eagle": {
        "fc.weight": (16, 32),
        "fc.bias": (16,),
        **{f"layers.0.self_attn.{name}": shape for name, shape in ATTENTION.items()},
        "layers.0.post_attention_layernorm.weight": (16,),
        **{f"layers.0.mlp.{name}": shape for name, shape in MLP.items()},
    },
    "mtp": {
        "model.mtp_layers.0.token_layernorm.weight": (16,),
        "model.mtp_layers.0.hidden_layernorm.weight": (16,),
        "model.mtp_layers.0.input_proj.weight": (16, 32),
        "model.mtp_layers.0.input_layernorm.weight": (16,),
        **{f"model.mtp_layers.0.self_attn.{name}": shape for name, shape in ATTENTION.items()},
        "model.mtp_layers.0.self_attn.q_proj.bias": (32,),
        "model.mtp_layers.0.self_attn.k_proj.bias": (16,),
        "model.mtp_layers.0.self_attn.v_proj.bias": (16,),
        "model.mtp_layers.0.post_attention_layernorm.weight": (16,),
        **{f"model.mtp_layers.0.mlp.{name}": shape for name, shape in MLP.items()},
        "model.mtp_layers.0.final_layernorm.weight": (16,),
    },
}


@pytest.mark.parametrize("name", KEYS)
def test_documented_tensors(tmp_path, name):
    folder = export(tmp_path / "head", name)
    assert sorted(content(folder)) == ["README.md", "config.json", "model.safetensors"]
    tensors = load_file(folder / "model.safetensors")
    assert {key: tensor.shape for key, tensor in tensors.items()} == KEYS[name]
    narrow = {key for key, tensor in tensors.items() if tensor.dtype == ml_dtypes.bfloat16}
    assert narrow == KEYS[name].keys() - {"d2t", "t2d"}
    if name == "eagle3":
        ids = params_of(name)["ids"]
        assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
        assert [i + offset for i, offset in enumerate(tensors["d2t"].tolist())] == ids.tolist()
        assert np.flatnonzero(tensors["t2d"]).tolist() == sorted(ids.tolist())


COMMON = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 777.0,
    "rope_scaling": None, "max_position_embeddings": 256, "vocab_size": 31, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("layers", [(1, 14, 26), (1,), (2, 5, 29), (23, 0, 29), (29,), (0, 3), (0,), (0, 2, 1)])
def test_layer_ids_in_other_engines(layers, family):
    """SGLang, vLLM and specjax read the same layers; lists that they would read differently are refused."""
    model = dataclasses.replace(target().target.config, num_layers=30, family=family)
    config = dataclasses.replace(HEADS["eagle3"], aux_layers=layers)
    if layers[0] == 0 and family != "gpt_oss":
        with pytest.raises(ValueError, match=r"--aux-layers 0.* begins with 0, .* another layer must come first"):
            head_description(config, model)
        return
    described = head_description(config, model)
    key = "eagle_aux_hidden_state_layer_ids"
    nested = described["eagle_config"][key]
    sglang = nested if nested[0] == 1 and family != "gpt_oss" else [boundary - 1 for boundary in nested]
    vllm = [boundary - 1 for boundary in described[key]]
    assert tuple(sglang) == tuple(vllm) == layers == aux_layer_ids(described, 30, family)
    # SGLang before May 2026 reads outputs in eagle_config, also where the list begins with another id.
    assert nested == list(layers) if layers[0] == 1 and family != "gpt_oss" else nested[0] != 1 or family == "gpt_oss"


def test_training_a_head_with_a_norm_before_fc():
    """The features' scale cannot be folded through the norm, so it is not used."""
    draft, params = object.__new__(head.HeadDraft), params_of("eagle3 norm before fc")
    draft.config, draft._init_params, draft._scale = HEADS["eagle3 norm before fc"], dict(params), None
    draft._source = SimpleNamespace(config=target().target.config)  # type: ignore[assignment]
    rows = pack([Example(np.array([1, 2, 3], np.int32), np.ones(3, bool))], 4, 0)
    weights, frozen = draft.first_weights({}, rows, lambda: pytest.fail("no features are needed"))
    exported = draft.exported(weights, frozen)
    assert exported.keys() == params.keys()
    for name, leaf in params.items():
        np.testing.assert_array_equal(exported[name], leaf, name)
    described = head_description(draft.config, target().target.config)
    assert described["norm_before_fc"] is True and described["eagle_config"]["norm_before_fc"] is True


def test_config_json(tmp_path):
    model = target().target.config
    assert head_description(HEADS["eagle3"], model) == COMMON | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": 11,
        "norm_before_residual": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5], "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [2, 3, 6],
    }
    assert head_description(HEADS["eagle"], model, "float16") == COMMON | {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "torch_dtype": "float16",
    }
    wider = dataclasses.replace(model, hidden_size=24)
    assert head_description(HEADS["eagle3"], wider)["target_hidden_size"] == 24
    assert head_description(HEADS["eagle nobias"], model)["bias"] is False
    assert head_description(HEADS["eagle3 biases"], model)["bias"] is True
    assert head_description(HEADS["eagle3 target's head"], model)["draft_vocab_size"] is None
    assert head_description(HEADS["mtp"], model) == COMMON | {
        "architectures": ["MiMoMTP"],
        "model_type": "qwen2",
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    }
    folder = export(tmp_path / "head", "eagle3")
    assert json.loads((folder / "config.json").read_text()) == head_description(HEADS["eagle3"], model)


@pytest.mark.parametrize("name", ["eagle3", "eagle3 biases", "eagle3 own embedding", "eagle3 dynamic", "eagle", "mtp"])
def test_transformers_reads_the_config(tmp_path, name):
    """`rope_type` is for transformers, SGLang and vLLM, `type` for SafeAILab's loader."""
    from transformers import AutoConfig

    folder, rope = export(tmp_path / "head", name), HEADS[name].rope
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim, config.vocab_size) == (16, 2, 8, 31)
    assert config.rope_parameters["rope_theta"] == rope.theta
    scaling = None if rope.scaling == "none" else rope.scaling
    assert config.rope_parameters["rope_type"] == (scaling or "default")
    described = json.loads((folder / "config.json").read_text())["rope_scaling"] or {}
    assert described.get("rope_type") == scaling
    assert described.get("type") == (None if scaling == "llama3" else scaling)


def test_model_card(tmp_path):
    card = "# A head\n\nA description.\n"
    text = (export(tmp_path / "head", "eagle3", card=card, license="mit") / "README.md").read_text()
    assert text.startswith('---\nlicense: "mit"\nbase_model: "some/target"\nlibrary_name: "specjax"\ntags: [')
    assert '"speculative-decoding"' in text and '"eagle3"' in text
    assert text.endswith("]\n---\n\n# A head\n\nA description.\n")
    assert "license" not in (export(tmp_path / "head", "eagle3", card=card) / "README.md").read_text()


@pytest.mark.parametrize("name", ["eagle3", "eagle3 unmapped", "eagle", "mtp"])
def test_oracle_computes_equal_outputs_from_the_file(tmp_path, name):
    """A forward over six slots from position 0, by numpy and plain loops."""
    config, toy, rng = HEADS[name], target(), np.random.default_rng(1)
    tensors = load_file(export(tmp_path / "head", name, dtype="float32") / "model.safetensors")
    spec = HeadSpec(config.kind, 4, 8, 1e-5, 777.0, config.norm_before_residual)
    tokens, features = rng.integers(0, 31, 6), rng.normal(0, 1, (6, config.feature_size)).astype(np.float32)
    visible = [set(range(item + 1)) for item in range(6)]
    embedding, rows = np.asarray(toy.params["embed"]), np.asarray(toy.params["head"]).T
    expected = head_forward(tensors, spec, embedding[tokens], features, list(range(6)), visible, [False] * 6)

    head, params = draft_head(config, toy.target, backend="reference"), jax.tree.map(jnp.asarray, params_of(name))
    empty = jnp.zeros((1, 1, config.num_kv_heads, config.head_dim))
    past = Past(KeyValue(empty, empty), jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    positions = jnp.arange(6, dtype=jnp.int32)[None]
    embedded = head.embed(toy.params, params, jnp.asarray(tokens[None], jnp.int32))
    out, _ = head.forward(params, embedded, head.fuse(params, jnp.asarray(features[None])), positions, CAUSAL, past)
    np.testing.assert_allclose(out[0], expected, atol=2e-4, rtol=1e-4)
    logits = head.unembed(toy.params, params, out)
    expected_logits = np.stack([draft_logits(tensors, spec, item, rows) for item in expected])
    np.testing.assert_allclose(logits[0], expected_logits, atol=1e-3, rtol=1e-4)
    ours = head.target_ids(params, jnp.arange(config.vocab_size, dtype=jnp.int32))
    assert np.asarray(ours).tolist() == target_ids(tensors, spec, 31).tolist()


def test_parameters_that_do_not_fit(tmp_path):
    def refusal(name: str, changes: dict[str, Any], dtype: str = "bfloat16") -> str:
        params = {leaf: array for leaf, array in (params_of(name) | changes).items() if array is not None}
        with pytest.raises(ValueError, match=r"head|draft|parameter") as caught:
            export_head(
                tmp_path / "head", HEADS[name], params, target().target.config, target_name="t", card="", dtype=dtype
            )
        assert not list(tmp_path.iterdir())
        return str(caught.value)

    assert refusal("eagle", {"fc_bias": None}).endswith("missing or more: fc_bias")
    assert refusal("eagle", {"embed": np.zeros(1)}).endswith("missing or more: embed")
    assert refusal("eagle3", {"ids": None}).endswith("missing or more: ids")
    message = refusal("mtp", {"mlp_norm": np.zeros(15)})
    assert message == "parameter mlp_norm is [15]; the head's description implies [16]"
    assert "down has values that are not finite in bfloat16" in refusal("eagle", {"down": np.full((24, 16), np.nan)})
    assert "down has values that are not finite in float16" in refusal(
        "eagle", {"down": np.full((24, 16), 1e6)}, "float16"
    )
    assert refusal("eagle", {}, "int8") == "dtype is 'int8'; a draft can be written as: float32, bfloat16, float16"
    mapped = HeadConfig("eagle", **SHARED | {"own_head": True, "mapped": True})
    with pytest.raises(ValueError, match="no published format of eagle heads with a token map"):
        head_tensors(mapped, {}, target().target.config)


def test_an_export_replaces_the_previous_one(tmp_path):
    export(tmp_path / "head", "eagle3")
    (tmp_path / "link").symlink_to(tmp_path / "head")
    assert export(tmp_path / "link", "mtp") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["head", "link"]
    assert json.loads((tmp_path / "head" / "config.json").read_text())["architectures"] == ["MiMoMTP"]
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", "eagle")
    export(tmp_path / "new" / "deep" / "head", "eagle")


@pytest.mark.parametrize("failing", [1, 3])
def test_a_full_disk_keeps_the_old_head(tmp_path, monkeypatch, failing):
    folder = export(tmp_path / "head", "eagle3")
    before, calls, real = content(folder), [], os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        CheckpointError,
        match=r"cannot write a draft to .*head \(.*No space left.*free some space or choose another",
    ):
        export(folder, "eagle")
    assert content(folder) == before
    assert [file.name for file in tmp_path.iterdir()] == ["head"]


def test_a_kill_between_the_renames_is_repaired(tmp_path, monkeypatch):
    """The next export restores the old head first, and removes the temporary folders."""
    folder = export(tmp_path / "head", "eagle3")
    before = content(folder)
    folder.rename(tmp_path / ".head.before")
    (tmp_path / ".head.partial").mkdir()
    (tmp_path / ".head.partial" / "config.json").write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(CheckpointError, match="full"):
            export(folder, "eagle")
    assert content(folder) == before
    export(folder, "eagle")
    assert [file.name for file in tmp_path.iterdir()] == ["head"]


def test_folders_that_cannot_be_replaced(tmp_path):
    folder = export(tmp_path / "head", "eagle3")
    (folder / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"head contains checkpoints, which an exported draft does not have"):
        export(folder, "eagle")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    (tmp_path / "file").write_text("a file")
    for path in (tmp_path / "file", tmp_path / "file" / "head"):
        with pytest.raises(CheckpointError, match=rf"cannot write a draft to {re.escape(str(path))} \("):
            export(path, "eagle")
    assert (tmp_path / "file").is_file()
