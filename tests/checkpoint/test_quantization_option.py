"""`--quantization` and `--dtype`: which combinations with a checkpoint work, and that others are refused early."""

from __future__ import annotations

import json
import re

import pytest
from family_helpers import EXPERTS
from tiny_checkpoints import SIZES, save_model

import specjax.load
from specjax import checkpoint
from specjax.checkpoint import CheckpointError, effective_quantization, model_config
from specjax.checkpoint.hf_config import QUANTIZATIONS
from specjax.cli import build, flags
from specjax.cli import serve as command
from specjax.hardware.dry_run import outline
from specjax.train import run
from specjax.train.options import TrainOptions

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
def test_every_combination(stored, quantization):
    hf_config = LLAMA | {"quantization_config": STORED[stored]}
    config = model_config(hf_config)
    if quantization in ("auto", "none") or stored == "float":
        assert effective_quantization("m", hf_config, config, quantization) == quantization
    elif quantization == stored:
        assert effective_quantization("m", hf_config, config, quantization) == "auto", "they are stored so"
    else:
        message = f"quantization {quantization} is for float weights, and those of m are quantised already ({stored});"
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)} auto keeps them .* none dequantises them$"):
            effective_quantization("m", hf_config, config, quantization)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"intermediate_size": 48}, "down of m has 48"),
        ({"hidden_size": 48, "head_dim": 8}, "head of m has 48"),
        ({"hidden_size": 48, "head_dim": 8, "tie_word_embeddings": True}, "embed of m has 48"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8, **EXPERTS},
            "experts_down of m has 24",
        ),
    ],
)
def test_groups_of_four_bits(changes, tensor):
    hf_config = LLAMA | changes
    config = model_config(hf_config)
    with pytest.raises(CheckpointError, match=f"^quantization int4 needs inputs in groups of 32, and {tensor}; int8"):
        effective_quantization("m", hf_config, config, "int4")
    assert effective_quantization("m", hf_config, config, "int8") == "int8"


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_families_that_float16_is_too_small_for(architecture, tmp_path):
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


@pytest.fixture
def quantised(tmp_path, monkeypatch):
    """A folder with quantised weights, so its config says, of which nothing may be read."""
    save_model(tmp_path, "LlamaForCausalLM", intermediate_size=64)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": STORED["awq"]}))
    monkeypatch.setattr(specjax.load.checkpoint, "load_params", lambda *_, **__: pytest.fail("weights were read"))
    return tmp_path


def test_refused_before_weights_are_read_naming_where_it_was_set(quantised, tmp_path, capsys):
    model = ("--model", str(quantised))
    file = tmp_path / "my.toml"
    file.write_text("[model]\nquantization = 'int8'\n")
    for argv, place in {
        ("--quantization", "fp8"): "--quantization fp8",
        ("--config", str(file)): f"--config {file}: [model] quantization int8",
    }.items():
        assert command.main([*model, *argv, "--dry-run"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"specjax serve: {place} is for float weights, and those of {tmp_path}"), line
    with pytest.raises(CheckpointError, match=r"^--quantization int4 is for float weights"):
        build.make_engine(
            flags.Settings(model=flags.ModelSettings(model=str(quantised), quantization="int4")), progress=False
        )
    with pytest.raises(CheckpointError, match=r"^quantization int4 is for float weights"):
        outline(str(quantised), quantization="int4")


def test_the_built_in_model_is_quantised_already():
    files = checkpoint.resolve(checkpoint.BUILT_IN_MODEL, outline=True)
    config = model_config(files.config)
    assert effective_quantization(files.name, files.config, config, "none") == "none"
    with pytest.raises(CheckpointError, match=r"quantised already \(gguf\)"):
        effective_quantization(files.name, files.config, config, "int8")


def test_training_reads_float_weights():
    with pytest.raises(ValueError, match=r"^--quantization int8 does not apply to training"):
        run.prepare(TrainOptions(model=flags.ModelSettings(quantization="int8")))
