"""`--quantization`, `--dtype` and `--speculative-draft-quantization`: which combinations work, and early refusals."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import VOCABULARY, tokenizer
from family_helpers import EXPERTS
from specjax_kernels import Quantised, dequantise
from tiny_checkpoints import SIZES, save_llama, save_model, save_mtp
from tiny_heads import save_head

import specjax.load
from specjax.checkpoint import CheckpointError, effective_quantization, model_config
from specjax.checkpoint.hf_config import QUANTIZATIONS
from specjax.checkpoint.torch_files import write_torch_list
from specjax.cli import build, flags
from specjax.cli import serve as command
from specjax.drafters import Auto, DraftOptions, Eagle, Eagle3, Mtp, NoDraft, Standalone
from specjax.engine import EngineConfig
from specjax.gpu import DEVICES
from specjax.hardware.dry_run import Case, make_plan, outline
from specjax.limits import ParameterError
from specjax.settings import Parser, SettingsError, add_flags, read

LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "intermediate_size": 64}
STORED = {
    "float": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    },
    "gguf": {"quant_method": "gguf"},
}  # fmt: skip


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("stored", STORED)
def test_combinations(stored, quantization):
    hf_config = LLAMA | {"quantization_config": STORED[stored]}
    config = model_config(hf_config)
    if quantization in ("auto", "none") or stored == "float":
        assert effective_quantization("m", hf_config, config, quantization) == quantization
    elif quantization == stored:
        assert effective_quantization("m", hf_config, config, quantization) == "auto"
    else:
        message = f"quantization {quantization} is for float weights, and m is quantised already ({stored});"
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)} auto keeps its .* none dequantises them$"):
            effective_quantization("m", hf_config, config, quantization)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"intermediate_size": 48}, "down of m has 48"),
        ({"hidden_size": 48, "head_dim": 8}, "head of m has 48"),
        ({"hidden_size": 48, "head_dim": 8, "tie_word_embeddings": True}, "embed of m has 48"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8, **EXPERTS}, "experts_down of m has 24"),
    ],
)
def test_groups_of_four_bits(changes, tensor):
    hf_config = LLAMA | changes
    config = model_config(hf_config)
    with pytest.raises(CheckpointError, match=f"^quantization int4 needs inputs in groups of 32, and {tensor}; int8"):
        effective_quantization("m", hf_config, config, "int4")
    assert effective_quantization("m", hf_config, config, "int8") == "int8"


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_float16_overflow(architecture, tmp_path):
    save_model(tmp_path, architecture)
    hf_config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "float16"}
    message = f"dtype float16 is too small for the activations of {architecture}; use auto, bfloat16 or float32"
    with pytest.raises(CheckpointError, match=f"^{message}$"):
        model_config(hf_config, dtype="float16")
    assert model_config(hf_config, platform="gpu").dtype == "bfloat16"
    assert model_config(hf_config, dtype="bfloat16").dtype == "bfloat16"
    chosen = flags.Settings(model=flags.ModelSettings(model=str(tmp_path), dtype="float16"))
    with pytest.raises(CheckpointError, match=r"^--dtype float16 is too small"):
        build.make_engine(chosen, progress=False)


def test_refused_before_weights_are_read(tmp_path, capsys, monkeypatch):
    save_model(tmp_path, "LlamaForCausalLM", intermediate_size=64)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": STORED["awq"]}))
    monkeypatch.setattr(specjax.load.checkpoint, "load_params", lambda *_, **__: pytest.fail("weights were read"))
    model = ("--model", str(tmp_path))
    file = tmp_path / "my.toml"
    file.write_text("[model]\nquantization = 'int8'\n")
    for argv, place in {
        ("--quantization", "fp8"): "--quantization fp8",
        ("--config", str(file)): f"--config {file}: [model] quantization int8",
    }.items():
        assert command.main([*model, *argv, "--dry-run"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"specjax serve: {place} is for float weights, and {tmp_path}"), line
    settings = flags.Settings(model=flags.ModelSettings(model=str(tmp_path), quantization="int4"))
    with pytest.raises(CheckpointError, match=r"^--quantization int4 is for float weights"):
        build.make_engine(settings, progress=False)
    with pytest.raises(CheckpointError, match=r"^quantization int4 is for float weights"):
        outline(str(tmp_path), quantization="int4")


# Drafts.

FLAG = "--speculative-draft-quantization"
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": VOCABULARY, "eos_token_id": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A target, a target with an MTP layer, and a draft of each kind."""
    root = tmp_path_factory.mktemp("drafts")
    save_llama(root / "model", **SMALL, num_hidden_layers=3, initializer_range=0.3)
    save_llama(root / "small", **SMALL, num_hidden_layers=1, initializer_range=0.3)
    changes = {"max_position_embeddings": 256, "head_dim": 8, "tie_word_embeddings": False}
    save_mtp(root / "mtp", "MiMoForCausalLM", "mimo", count=1, **SMALL, **changes, initializer_range=0.3)
    for name in ("model", "small", "mtp"):
        tokenizer().save_pretrained(root / name)
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}}
    save_head(root / "eagle3", "eagle3", config=config, target_vocab_size=VOCABULARY)
    save_head(root / "eagle", "eagle", target_vocab_size=VOCABULARY)
    for name, layers in (("wide-model", 3), ("wide-small", 1)):
        save_llama(root / name, **SMALL | {"hidden_size": 32}, num_hidden_layers=layers, initializer_range=0.3)
        tokenizer().save_pretrained(root / name)
    wide = {"target_hidden_size": 32, "hidden_size": 32, "intermediate_size": 32}
    save_head(root / "wide-eagle3", "eagle3", config=config, target_vocab_size=VOCABULARY, **wide)
    return root


CONFIG = EngineConfig(max_running_requests=2, page_size=4, max_total_tokens=128, context_length=64)
CHAIN: dict[str, Any] = {"steps": 2, "topk": 1, "nodes": 3}
DRAFTS = {"EAGLE": (Eagle, "model", "eagle"), "EAGLE3": (Eagle3, "model", "eagle3"), "MTP": (Mtp, "mtp", None)}
DRAFTS["STANDALONE"] = (Standalone, "model", "small")
CODES = {"int8": "int8", "fp8": "float8_e4m3fn", "int4": "uint8"}


def nbytes(tree: Any) -> int:
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "int8") for name in DRAFTS), ("EAGLE3", "fp8"), ("EAGLE3", "int4"), ("STANDALONE", "int4")],
)
def test_quantised_drafts(saved, name, kind):
    """Only matrices are stored in few bits, and a dry run counts them. tests/core/test_mesh_quantised.py has texts."""
    options, model, path = DRAFTS[name]
    if kind == "int4":  # needs inputs in groups of 32
        model, path = f"wide-{model}", f"wide-{path}"
    path = None if path is None else str(saved / path)
    draft = options(path=path, **CHAIN, quantization=kind)
    plain, loaded = (specjax.load.load(str(saved / model), draft=each, progress=False) for each in (NoDraft(), draft))
    leaves = jax.tree.leaves(loaded.params.draft, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    matrices = [leaf for leaf in leaves if isinstance(leaf, Quantised)]
    assert {str(leaf.codes.dtype) for leaf in matrices} == {CODES[kind]}
    groups = {leaf.depth // 32 if kind == "int4" else 1 for leaf in matrices}
    assert {leaf.scale.shape[-1] for leaf in matrices} == groups, "scales for each output, or each 32 inputs"
    others = [leaf.shape for leaf in leaves if not isinstance(leaf, Quantised) and len(leaf.shape) > 1]
    # An embedding, of which rows are read; biases.
    expected = {"STANDALONE": [(VOCABULARY, 32 if kind == "int4" else 16)], "MTP": [(2, 4, 8)]}
    assert others == expected.get(name, [])
    jax.tree.map(np.testing.assert_array_equal, plain.params.target, loaded.params.target)
    described = outline(str(saved / model), draft=draft)
    plan = make_plan(Case(described, CONFIG, DEVICES["RTX4090"], "cpu"))
    assert plan["memory"]["draft_weights"] == nbytes(loaded.params.draft)
    source = loaded.speculation.source
    assert f"weights in {kind}" in source and source == described.speculation.source


def test_draft_in_four_bits_needs_groups(saved):
    """The head's inputs are 16 numbers: the error names the option and what would work."""
    draft = Eagle3(str(saved / "eagle3"), quantization="int4")
    with pytest.raises(CheckpointError, match=r"int4 of .*multiple of 32 inputs, got .* 'int8' and 'fp8' take any"):
        specjax.load.load(str(saved / "model"), draft=draft, progress=False)


def test_token_map_quantises_the_targets_columns(saved, tmp_path):
    ids = np.arange(40, 10, -1)
    write_torch_list(tmp_path / "map.pt", ids.tolist())
    draft = Eagle(str(saved / "eagle"), token_map=str(tmp_path / "map.pt"), quantization="int8")
    model = specjax.load.load(str(saved / "model"), draft=draft, progress=False)
    head, columns = model.params.draft["head"], np.asarray(model.params.target["head"])[:, ids].T
    assert isinstance(head, Quantised) and head.shape == columns.shape
    assert (np.abs(np.asarray(dequantise(head)) - columns) < 0.51 * np.asarray(head.scale)).all()


@pytest.mark.parametrize(
    ("quantization", "dtype", "platform", "otherwise", "stored", "expected"),
    [
        (None, "bfloat16", "gpu", "none", None, "int8"),
        (None, "float16", "gpu", "auto", None, "int8"),
        (None, "float32", "gpu", "none", None, "none"),
        (None, "float32", "cpu", "auto", None, "auto"),
        (None, "bfloat16", "cpu", "none", None, "none"),
        (None, "float32", "cpu", "int8", None, "int8"),
        (None, "bfloat16", "gpu", "int4", None, "int4"),
        (None, "bfloat16", "gpu", "auto", "awq", "auto"),
        (None, "bfloat16", "gpu", "none", "awq", "none"),
        ("none", "bfloat16", "gpu", "int8", None, "none"),
        ("none", "bfloat16", "gpu", "auto", "awq", "none"),
        ("fp8", "float32", "cpu", "none", None, "fp8"),
        ("int8", "float32", "cpu", "int4", None, "int8"),
        ("fp8", "bfloat16", "gpu", "auto", "fp8", "auto"),
        ("int8", "bfloat16", "gpu", "auto", "fp8", ValueError),
        ("fp8", "float32", "cpu", "auto", "gguf", ValueError),
    ],
)
def test_draft_defaults(quantization, dtype, platform, otherwise, stored, expected):
    options = Standalone("p", quantization=quantization)
    if expected is not ValueError:
        assert options.weights("m", dtype, platform, otherwise=otherwise, stored=stored) == expected
        return
    message = f"Standalone.quantization {quantization} is for float weights, and m is quantised already"
    message = re.escape(f"{message} ({stored});")
    with pytest.raises(ValueError, match=f"^{message} without the option it stays .*, none dequantises it$"):
        options.weights("m", dtype, platform, otherwise=otherwise, stored=stored)


def drafting(*argv: object) -> DraftOptions | str:
    parser = Parser()
    add_flags(parser, flags.Settings())
    return build.draft_options(read(parser.parse_args([str(arg) for arg in argv]), flags.Settings()))


def test_draft_flag_and_config_file(tmp_path):
    head = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "h")
    assert drafting(*head, FLAG, "FP8") == Eagle3("h", quantization="fp8")
    assert drafting(FLAG, "none") == Auto(quantization="none")
    file = tmp_path / "my.toml"
    file.write_text("[speculative]\nspeculative-draft-quantization = 'int8'\n")
    assert drafting(*head, "--config", file) == Eagle3("h", quantization="int8")
    for name in ("NGRAM", "NONE", "my:factory"):
        message = f"^{FLAG} int8 is no use to {name}: --speculative-algorithm EAGLE or"
        with pytest.raises(ValueError, match=message), flags.named_as_flags(flags.Settings()):
            drafting("--speculative-algorithm", name, FLAG, "int8")
    with pytest.raises(SettingsError, match=f"^{FLAG} must be one of int8, fp8, int4, none, got 'int2'$"):
        drafting(FLAG, "int2")
    for owner, flag in (("Mtp", FLAG), ("", "--quantization")):
        assert str(flags.with_flag(ParameterError("quantization", "int8", owner))) == f"{flag} int8"


def test_quantised_drafts_are_refused_before_weights_are_read(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(specjax.load.checkpoint, "load_params", lambda *_, **__: pytest.fail("weights were read"))
    for name in ("small", "mtp"):
        (folder := tmp_path / name).mkdir()
        for file in (saved / name).glob("*.json*"):
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        config |= {"quantization_config": STORED["fp8"], "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
    standalone = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(tmp_path / "small"))
    for argv in (
        ("--model", str(saved / "model"), *standalone),
        ("--model", str(tmp_path / "mtp"), "--speculative-algorithm", "MTP"),
    ):
        assert command.main([*argv, FLAG, "int8", "--dry-run"]) == 2
        assert f"{FLAG} int8 is for float weights, and " in capsys.readouterr().err
        assert command.main([*argv, "--dry-run", "--assume-device", "h200"]) in (0, 1)
        capsys.readouterr()
    chosen = Standalone(str(tmp_path / "small"), quantization="int8")
    (tmp_path / "small" / "model.safetensors").write_bytes((saved / "small" / "model.safetensors").read_bytes())
    with pytest.raises((CheckpointError, ValueError), match=r"Standalone.quantization int8 is for float weights"):
        specjax.load.load(str(saved / "model"), draft=chosen, progress=False)
