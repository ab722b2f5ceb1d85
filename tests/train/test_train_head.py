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
from safetensors.numpy import load_file
from tiny_heads import save_head
from toy_models import tiny_llama

from specjax.checkpoint import CheckpointError, load_head
from specjax.checkpoint.draft_head import aux_layer_ids
from specjax.config import HeadConfig, RopeConfig
from specjax.models.draft_head import init_head_params
from specjax.train import head
from specjax.train.data import Example, pack
from specjax.train.export import export_head, head_description
from specjax.train.losses import Teacher
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
    assert not (few.norm_before_fc or few.fc_norm or few.norm_output)
    for norm in ("norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(head.head_config(DraftSettings(**{norm: True}), config()), norm)
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
        ("--fc-norm True", {"fc_norm": True}),
        ("--norm-before-fc True", {"norm_before_fc": True}),
        ("--draft-vocab-size 9", {"draft_vocab_size": 9}),
        ("--aux-layers 1 2", {"aux_layers": ("1", "2")}),
    ):
        with pytest.raises(ValueError, match=f"{flag} differs from --init-from .*leave it out"):
            head.from_head(DraftSettings(init_from=folder, **changes), target)
    for stated, norm_output in ((None, False), (True, True)):  # it has no tensor
        settings = DraftSettings(init_from=folder, norm_output=stated)
        assert head.from_head(settings, target)[0].norm_output == norm_output
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
    "eagle3 fc norm": HeadConfig("eagle3", **SHARED | THIRD | {"fc_norm": True}),
    "eagle3 norm output": HeadConfig("eagle3", **SHARED | THIRD | {"norm_output": True}),
    "eagle3 all norms": HeadConfig(
        "eagle3", **SHARED | THIRD | {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
    ),
    "eagle3 sliding": HeadConfig("eagle3", **SHARED | THIRD | {"windows": (4,), "head_norms": True}),
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


@pytest.mark.parametrize("name", ["eagle3", "eagle", "mtp"])
def test_published_tensors(tmp_path, name):
    """Names and shapes are those of published heads."""
    folder = export(tmp_path / "head", name)
    assert sorted(content(folder)) == ["README.md", "config.json", "model.safetensors"]
    tensors, published = load_file(folder / "model.safetensors"), save_head(tmp_path / "published", name)
    published.pop("embed_tokens.weight", None)  # the target's
    assert {key: tensor.shape for key, tensor in tensors.items()} == {k: array.shape for k, array in published.items()}
    narrow = {key for key, tensor in tensors.items() if tensor.dtype == ml_dtypes.bfloat16}
    assert narrow == published.keys() - {"d2t", "t2d"}
    if name == "eagle3":
        ids = params_of(name)["ids"]
        assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
        assert [i + offset for i, offset in enumerate(tensors["d2t"].tolist())] == ids.tolist()
        assert np.flatnonzero(tensors["t2d"]).tolist() == sorted(ids.tolist())


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


@pytest.mark.parametrize("name", ["eagle3 unmapped", "eagle3 norm output", "eagle3 norm before fc", "eagle3 fc norm"])
def test_scale_of_features(name):
    """Folded into `fc` of the export; unused before a norm, through which it cannot be folded."""
    draft, params, rng = object.__new__(head.HeadDraft), params_of(name), np.random.default_rng(0)
    draft.config, draft._init_params, draft._scale = HEADS[name], dict(params), None
    draft._source = SimpleNamespace(config=target().target.config)  # type: ignore[assignment]
    rows = pack([Example(np.array([1, 2, 3], np.int32), np.ones(3, bool))], 4, 0)
    features = jnp.asarray(rng.normal(0, 9, (1, 4, 48)), jnp.float32)
    teacher = Teacher(features, jnp.zeros((1, 4, 16)), jnp.zeros((1, 4), jnp.int32))
    weights, frozen = draft.first_weights({}, rows, lambda: (teacher, rows))
    has_scale = name in ("eagle3 unmapped", "eagle3 norm output")
    assert (draft._scale is not None) == has_scale
    expected = jnp.einsum("bnf,fm->bnm", features, params["fc"])
    read = features * draft._scale[None, None] if has_scale else features
    np.testing.assert_allclose(jnp.einsum("bnf,fm->bnm", read, weights["fc"]), expected, rtol=1e-3, atol=1e-4)
    exported = draft.exported(weights, frozen)
    assert exported.keys() == params.keys()
    for leaf, array in params.items():
        np.testing.assert_allclose(exported[leaf], array, rtol=1e-6, err_msg=leaf)


@pytest.mark.parametrize("name", ["eagle3", "eagle3 norm before fc", "eagle3 fc norm", "eagle3 all norms"])
def test_norms_in_config_json(name):
    """At the top level and in eagle_config: engines read different places."""
    described = head_description(HEADS[name], target().target.config)
    for keys in (described, described["eagle_config"]):
        for norm in ("norm_before_fc", "fc_norm", "norm_output"):
            assert keys.get(norm, False) == getattr(HEADS[name], norm)


def test_config_json(tmp_path):
    """Keys that differ between kinds, or whose defaults differ between engines."""
    model = target().target.config

    def described(name: str, model: Any = model, dtype: str = "bfloat16") -> dict[str, Any]:
        return head_description(HEADS[name], model, dtype)

    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 5], "use_aux_hidden_state": True}
    own = {"draft_vocab_size": 11, "norm_before_residual": False, "eagle_config": layers, "attention_bias": False}
    for name, keys in {
        "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rope_theta": 777.0} | own,
        "eagle": {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "torch_dtype": "bfloat16"},
        "mtp": {"architectures": ["MiMoMTP"], "model_type": "qwen2", "attention_bias": True,
                "num_nextn_predict_layers": 1},
    }.items():  # fmt: skip
        assert described(name) | keys == described(name)
    assert described("eagle", dtype="float16")["torch_dtype"] == "float16"
    absent = {"bias", "target_hidden_size", "norm_before_fc", "partial_rotary_factor"}
    assert not absent & (described("eagle3").keys() | described("eagle").keys() | described("mtp").keys())
    assert described("eagle3", dataclasses.replace(model, hidden_size=24))["target_hidden_size"] == 24
    assert described("eagle nobias")["bias"] is False and described("eagle3 biases")["bias"] is True
    assert described("eagle3 target's head")["draft_vocab_size"] is None
    folder = export(tmp_path / "head", "eagle3")
    assert json.loads((folder / "config.json").read_text()) == described("eagle3")


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


MISFITS: list[tuple[str, dict[str, Any], str, str]] = [
    # (head, changes of its parameters, dtype, the end of the message)
    ("eagle", {"fc_bias": None}, "bfloat16", "missing or more: fc_bias"),
    ("eagle", {"embed": np.zeros(1)}, "bfloat16", "missing or more: embed"),
    ("eagle3", {"ids": None}, "bfloat16", "missing or more: ids"),
    ("mtp", {"mlp_norm": np.zeros(15)}, "bfloat16", "mlp_norm is [15]; the head's description implies [16]"),
    ("eagle", {"down": np.full((24, 16), np.nan)}, "bfloat16", "not finite in bfloat16; the training diverged"),
    ("eagle", {"down": np.full((24, 16), 1e6)}, "float16", "not finite in float16; the training diverged"),
    ("eagle", {}, "int8", "dtype is 'int8'; a draft can be written as: float32, bfloat16, float16"),
    ("eagle with a map", {}, "bfloat16", "no published format of eagle heads with a token map; export without it"),
]


@pytest.mark.parametrize(("name", "changes", "dtype", "message"), MISFITS)
def test_parameters_that_do_not_fit(tmp_path, name, changes, dtype, message):
    mapped = HeadConfig("eagle", **SHARED | {"own_head": True, "mapped": True})
    params = {} if name not in HEADS else params_of(name) | changes
    params = {leaf: array for leaf, array in params.items() if array is not None}
    options: dict[str, Any] = {"target_name": "t", "card": "", "dtype": dtype}
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        export_head(tmp_path / "head", HEADS.get(name, mapped), params, target().target.config, **options)
    assert not list(tmp_path.iterdir())


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
