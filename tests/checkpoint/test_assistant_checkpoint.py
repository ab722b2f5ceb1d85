"""Gemma 4's assistants on disk: how they are named and found, both forms of config.json, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import VOCABULARY, tokenizer
from family_helpers import save_family
from safetensors.numpy import load_file, save_file
from specjax_kernels import Quantised
from tiny_assistants import save_assistant
from tiny_checkpoints import save_llama, write_gguf
from tiny_heads import save_head

from specjax.checkpoint import CheckpointError, describe_head, load_head, model_config, resolve
from specjax.config import AssistantConfig, ModelConfig
from specjax.drafters import Assistant, Auto, Eagle, Eagle3, Mtp, Ngram, Standalone
from specjax.limits import ParameterError
from specjax.load import choose, load

FAMILY = "gemma4"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A target, and its assistant beside it, with clusters of tokens."""
    root = tmp_path_factory.mktemp("pair")
    target = save_family(root / "gemma", FAMILY, vocab_size=VOCABULARY)
    tokenizer().save_pretrained(target)
    clusters = max(count for count in range(1, 12) if VOCABULARY % count == 0)
    return target, save_assistant(root / "gemma-assistant", target, centroids=clusters, best=1)


@pytest.fixture(scope="module")
def target(folders) -> ModelConfig:
    return model_config(resolve(str(folders[0])).config, dtype="float32")


@pytest.fixture
def changed(folders, tmp_path) -> Callable[..., str]:
    """A copy of the assistant with changes to config.json, its `text_config` and its tensors; None removes one."""

    def make(outer: Any = None, text: Any = None, tensors: Any = None) -> str:
        folder = tmp_path / "changed"
        shutil.copytree(folders[1], folder)
        config = json.loads((folder / "config.json").read_text())
        for section, changes in ((config, outer), (config["text_config"], text)):
            section |= changes or {}
        (folder / "config.json").write_text(json.dumps(config))
        stored = load_file(folder / "model.safetensors") | (tensors or {})
        save_file({name: leaf for name, leaf in stored.items() if leaf is not None}, folder / "model.safetensors")
        return str(folder)

    return make


def read(name: str, target: ModelConfig, **options: Any) -> tuple[AssistantConfig, Any]:
    config, params = load_head(name, target, kind="assistant", progress=False, **options)
    assert isinstance(config, AssistantConfig)
    return config, params


def test_nextn_with_an_assistants_folder(folders):
    model, assistant = map(str, folders)
    for options in (Mtp(path=assistant), Eagle(path=assistant, steps=2), Assistant(path=assistant)):
        loaded = load(model, draft=options, progress=False)
        assert (loaded.drafter.name, loaded.drafter.reads_layers) == ("ASSISTANT", (0, 1))
        assert loaded.speculation.source == assistant
        assert loaded.drafter.depth == (options.steps or 3)
        assert isinstance(loaded.draft_model, AssistantConfig)
        layers = {f"layers_{i}" for i in range(4)}
        ends = {"embed_clustered", "centroids", "clusters", "final_norm", "fc", "feature"}
        assert loaded.params.draft.keys() == layers | ends


def test_auto_finds_an_assistant_beside_the_target(folders, target, tmp_path, caplog):
    files, path = resolve(str(folders[0])), str(folders[1])
    caplog.set_level(logging.INFO)
    for options in (Auto(), Mtp(), Eagle()):
        assert choose(options, files, target, "gpu").options == Assistant(path=path)
    assert {record.getMessage().partition(":")[0] for record in caplog.records} == {"AUTO", "MTP", "EAGLE"}
    assert choose(Auto(), files, target, "cpu").ngrams == Ngram(min_match=4), "n-grams draft before it"
    assert choose(Auto(steps=2), files, target, "cpu") == (Assistant(path=path, steps=2), None, None, None, None)
    shutil.copytree(folders[0], tmp_path / "alone")
    alone = resolve(str(tmp_path / "alone"))
    assert choose(Auto(), alone, target, "gpu").options == Ngram()
    save_head(tmp_path / "alone-assistant", "eagle")
    assert choose(Auto(), alone, target, "gpu").options == Ngram(), "no assistant"
    with pytest.raises(ValueError, match=r"^Mtp\.path is missing: MTP needs MTP layers"):
        choose(Mtp(), alone, target, "gpu")


def test_options_without_effect(folders, target):
    files = resolve(str(folders[0]))
    with pytest.raises(ParameterError, match=r"^Mtp\.token_map has no effect with ASSISTANT$"):
        choose(Mtp(path=str(folders[1]), token_map=5), files, target)


def test_forms_of_published_files(folders, target, changed):
    """Sizes of layers without a window at the top level, no shared layers, and ids as floats. H is from q_proj."""
    expected, params = read(str(folders[1]), target)
    ids = load_file(folders[1] / "model.safetensors")["masked_embedding.token_ordering"]
    name = changed(
        text={
            "per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
            "num_attention_heads": 8,
        },
        tensors={
            "masked_embedding.token_ordering": ids.astype(np.float32), "lm_head.weight": np.zeros((3, 3), np.float32),
            "model.layers.0.self_attn.k_proj.weight": np.zeros((2, 2), np.float32),
        },
    )  # fmt: skip
    config, loaded = read(name, target)
    assert config == expected == describe_head(str(folders[1]), target, kind="assistant")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    np.testing.assert_array_equal(np.asarray(loaded["clusters"]).reshape(-1), ids)


def test_a_description_needs_no_weights(folders, target, tmp_path):
    shutil.copy(folders[1] / "config.json", tmp_path)
    expected, _ = read(str(folders[1]), target)
    assert describe_head(str(tmp_path), target, kind="assistant") == expected


def test_quantisation(folders, target, tmp_path):
    """The logits of all tokens read a matrix; those of a cluster read its rows."""
    _, params = read(str(folders[1]), target, quantization="int8")
    assert isinstance(params["fc"], Quantised) and params["embed_clustered"].dtype == jnp.float32
    save_assistant(tmp_path, folders[0])
    _, params = read(str(tmp_path), target, quantization="int8")
    assert isinstance(params["head"], Quantised) and "embed_clustered" not in params


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "backbone": (
        {"outer": {"backbone_hidden_size": 1536}},
        "backbone_hidden_size is 1536, and the target's is 32; it is the assistant of another model",
    ),
    "head width": ({"text": {"head_dim": 24}}, "head_dim is 24, and the target's is 16; it is the assistant"),
    "heads": ({"text": {"num_key_value_heads": 4}}, "num_key_value_heads is 4, and the target's is 2; it is the"),
    "full width": (
        {"text": {"per_layer_config": {"3": {"head_dim": 64, "num_key_value_heads": 1}}}},
        "head_dim of full_attention is 64, and the target's is 32",
    ),
    "full heads": (
        {"text": {"per_layer_config": {"3": {"head_dim": 32}}}},
        "num_key_value_heads of full_attention is 2, and the target's is 1",
    ),
    "rotation": (
        {"text": {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}}},
        "rope_parameters of full_attention is .*, and the target's is",
    ),
    "own inputs": (
        {"text": {"hidden_size_per_layer_input": 8}},
        "hidden_size_per_layer_input is 8; supported: 0",
    ),
    "clusters": ({"outer": {"num_centroids": 7919}}, "num_centroids is 7919; supported: a divisor of vocab_size"),
    "best": ({"outer": {"centroid_intermediate_top_k": 99}}, "centroid_intermediate_top_k is 99; at most"),
    "no projection": ({"tensors": {"pre_projection.weight": None}}, "missing tensors: pre_projection.weight"),
    "query heads": (
        {"tensors": {"model.layers.0.self_attn.q_proj.weight": np.zeros((48, 16), np.float32)}},
        r"wrong shapes: model.layers.0.self_attn.q_proj.weight is \[48, 16\], not \[64, 16\]",
    ),
    "no ids": (
        {"tensors": {"masked_embedding.token_ordering": None}},
        "missing tensors: masked_embedding.token_ordering, which use_ordered_embeddings needs",
    ),
    "ids twice": (
        {"tensors": {"masked_embedding.token_ordering": np.zeros(VOCABULARY, np.int64)}},
        f"token_ordering in .* must hold each of the {VOCABULARY} token ids once",
    ),
    "another tensor": ({"tensors": {"fc.weight": np.zeros((2, 2), np.float32)}}, "tensors with no place in assistants"),
    "architecture": (
        {"outer": {"architectures": ["Gemma4ForCausalLM"]}},
        "architectures is .*Gemma4ForCausalLM.*; supported: Gemma4AssistantForCausalLM, Gemma4UnifiedAssistant",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(changed, target, case):
    changes, message = REFUSED[case]
    name = changed(**changes)
    with pytest.raises(CheckpointError, match=rf"^{name}: .*{message}"):
        read(name, target)


def test_other_targets(folders, target, tmp_path):
    name = str(folders[1])
    with pytest.raises(CheckpointError, match="layer_types has sliding_attention, and the target has no such layer"):
        read(name, replace(target, windows=()))
    save_llama(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ParameterError, match=r"^Assistant\.path .*: an assistant drafts for a gemma4 model, and the targ"
    ):
        load(str(tmp_path), draft=Mtp(path=name), progress=False)


def test_wrong_folders(folders, target, tmp_path):
    """The error names the option, the folder and what would work."""
    model, assistant = map(str, folders)
    with pytest.raises(
        ParameterError, match=rf"^Assistant\.path {model}: config.json: architectures is .*; supported: "
    ):
        load(model, draft=Assistant(path=model), progress=False)
    with pytest.raises(ParameterError, match=r"^Mtp\.path .*nowhere.*give a folder with config.json"):
        load(model, draft=Mtp(path=str(tmp_path / "nowhere")), progress=False)
    with pytest.raises(
        ParameterError, match=rf"^Eagle3\.path {assistant}: .*architectures is Gemma4Unified.*MTP or ASSISTANT"
    ):
        load(model, draft=Eagle3(path=assistant), progress=False)


@pytest.mark.parametrize("options", [Assistant, Mtp, Eagle, Standalone])
def test_gguf_files(folders, tmp_path, options):
    """Assistants are read from safetensors. A file is refused by its name or its architecture."""
    file = tmp_path / "gemma-assistant.gguf"
    write_gguf(file, {}, architecture="gemma4-assistant")
    problem = "general.architecture is 'gemma4-assistant'; supported: " if options is Standalone else "is a file; give"
    with pytest.raises(ParameterError, match=rf"^{options.__name__}\.path {file}: .*{problem}"):
        load(str(folders[0]), draft=options(path=str(file)), progress=False)
