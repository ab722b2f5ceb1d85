"""The files of `configs/`, except for the built-in model and for training: their settings, what a dry run says of each
with the published config.json, the tables of README.md, and a served one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_tables import CARDS, FILES, README, REAL, card_of, read, row, with_tables
from config_tables import described as save_config
from engine_helpers import VOCABULARY, byte_ids, tokenizer
from safetensors.numpy import load_file, save_file
from server_helpers import running
from tiny_checkpoints import save_llama
from tiny_heads import save_head

from specjax.checkpoint import model_config, mtp_config, resolve
from specjax.checkpoint.torch_files import write_torch_list
from specjax.cli import build
from specjax.cli import serve as command

# The files.


@pytest.mark.parametrize("name", FILES)
def test_each_key_has_an_effect(name, caplog):
    settings = read(name)
    build.draft_options(settings)
    assert settings.model.model and not caplog.records


# Served.

WORDS = byte_ids(b"aeinorst")
"""Frequent tokens of the model, so that some random drafts are accepted; the draft head has no others."""


def test_served_file(tmp_path):
    """A file with flags that name small random checkpoints."""
    words, size = WORDS, VOCABULARY
    sizes: dict[str, Any] = {"vocab_size": size, "num_hidden_layers": 7, "initializer_range": 0.3, "eos_token_id": 2}
    save_llama(tmp_path / "model", **sizes)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["lm_head.weight"][words] *= 4
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(tmp_path / "model")
    mapped = {"d2t": np.array(words) - np.arange(len(words)), "t2d": np.isin(np.arange(size), words)}
    save_head(
        tmp_path / "head", "eagle3", tensors=mapped, hidden_size=32, target_hidden_size=32, target_vocab_size=size,
        draft_vocab_size=len(words),
    )  # fmt: skip
    settings = read(
        "llama-3.1-8b-instruct-eagle3", "--model", tmp_path / "model", "--speculative-draft-model-path",
        tmp_path / "head", "--dtype", "float32", "--max-running-requests", 2, "--max-total-tokens", 512,
        "--no-speculative-adaptive",
    )  # fmt: skip
    with running(command.load(settings), settings.server, model="m") as server:
        answer = server.complete("an oar, an oat", max_tokens=32, temperature=0, ignore_eos=True).json()
        drafter, engine = server.engine.drafter, server.engine
        assert (drafter.name, drafter.depth, drafter.width) == ("EAGLE3", 5, 32)
        assert engine.config.mem_fraction == 0.6 and engine.params.draft["ids"].tolist() == words
        assert answer["model"] == "m" and answer["usage"]["completion_tokens"] == 32
        assert engine.counters.drafted_steps > 0


# The sizes of the real models, without weights.


DEEPSEEK, GPT_OSS = "deepseek-ai/DeepSeek-V3-0324", ("openai/gpt-oss-20b", "openai/gpt-oss-120b")
PARAMETERS = {
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616, "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248, "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360, DEEPSEEK: 671_026_419_200, "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
}  # fmt: skip
"""Of the published checkpoints without MTP layers. Each has two bytes, except DeepSeek's router biases with four."""


@pytest.fixture
def described(tmp_path):
    """described(name) -> a folder with only config.json."""

    def save(name: str) -> Path:
        return save_config(name, tmp_path)

    return save


@pytest.mark.parametrize(
    ("name", "style", "experts"),
    [
        ("XiaomiMiMo/MiMo-7B-RL", "mimo", 0),
        (DEEPSEEK, "deepseek", 256),
        ("Qwen/Qwen3.5-27B", "qwen3_next", 0),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 512),
        ("Qwen/Qwen3.6-27B", "qwen3_next", 0),
        ("Qwen/Qwen3.6-35B-A3B", "qwen3_next", 256),
        ("Qwen/Qwen3.8-27B", "qwen3_next", 0),
    ],
)
def test_mtp_layers_in_config_json(described, name, style, experts):
    """tests/drafters/test_mtp_layers.py compares config.json with the tensors."""
    files = resolve(str(described(name)), progress=False, outline=True)
    layers = mtp_config(files, model_config(files.config))
    assert layers is not None and (layers.style, layers.count) == (style, 1)
    assert (layers.layer.experts.count if layers.layer.experts else 0) == experts


QUICK = (
    "gemma-4-e4b-it-assistant-24gb", "gpt-oss-20b-eagle3", "llama-2-7b-chat-eagle2", "llama-3-8b-instruct-fr-spec",
    "llama-3.1-8b-instruct-eagle3",
    "mimo-7b-rl-mtp", "qwen2.5-7b-ngram", "qwen2.5-7b-standalone", "qwen3-8b-dflash", "qwen3-8b-dspark",
    "qwen3.5-4b-dflash", "qwen3.5-4b-dflash-16gb", "qwen3.6-27b-dflash-24gb", "qwen3.6-35b-a3b-dflash",
    "qwen3.6-35b-a3b-nextn", "qwen3.8-27b-dflash2",
)  # fmt: skip
"""A file of each algorithm and dialect."""


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FILES if name not in QUICK)]
)
def test_dry_run_of_real_sizes(described, name, tmp_path, capsys, monkeypatch):
    """The algorithm, the tree and the weights of a file."""
    monkeypatch.setattr(command, "set_up_logging", lambda level: None)  # its handler would replace pytest's
    settings = read(name)
    model, chosen = settings.model.model, settings.speculative
    path, algorithm, nodes = (
        chosen.speculative_draft_model_path, chosen.speculative_algorithm, chosen.speculative_num_draft_tokens
    )  # fmt: skip
    card, quantised = card_of(name), settings.model.quantization != "auto"
    argv = ["--dry-run", "--json", "--assume-device", card, "--config", FILES[name], "--model", described(model)]
    if path:
        argv += ["--speculative-draft-model-path", described(path)]
    if chosen.speculative_token_map:
        write_torch_list(tmp_path / "map.pt", list(range(32768)))
        argv += ["--speculative-token-map", tmp_path / "map.pt"]
    status = command.main([str(part) for part in argv])
    printed = capsys.readouterr()
    assert status == (model == DEEPSEEK), printed  # no device holds DeepSeek's weights
    document = json.loads(printed.out)
    assert document["pool_tokens"] > 8192 or model == DEEPSEEK
    expected = {"NEXTN": "MTP", "DSPARK": "DFLASH"}.get(algorithm, algorithm) if path or algorithm == "NGRAM" else "MTP"
    levels = chosen.speculative_num_steps
    if path and REAL[path]["architectures"] == ["Gemma4AssistantForCausalLM"]:
        expected = "ASSISTANT"
    if expected == "EAGLE3" and levels is None:  # SGLang's tree for a Llama
        levels, nodes = 5, 8
    if expected == "NGRAM":
        levels = nodes - 1
    elif expected == "DFLASH":  # a DeepSpec head's anchor drafts, too
        head = REAL[path].get("dflash_config", {}) | REAL[path]
        block = chosen.speculative_dflash_block_size or head["block_size"]
        levels = block - (REAL[path]["architectures"] != ["Qwen3DSparkModel"])
    assert document["drafter"] == {"name": expected, "nodes": nodes or levels + 1, "levels": levels}
    stored = "float16" if card == "T4" else REAL[model].get("torch_dtype") or REAL[model]["dtype"]
    assert document["dtype"] == (settings.model.dtype if settings.model.dtype != "auto" else stored)
    if (count := PARAMETERS.get(model)) and not quantised:
        weights = document["memory"]["weights"]
        if model in GPT_OSS:  # matrices of experts in 4.25 bits, the router's biases in 4 bytes
            layers, experts = REAL[model]["num_hidden_layers"], REAL[model]["num_local_experts"]
            matrices = layers * experts * 3 * 2880 * 2880
            assert weights == matrices * 4.25 / 8 + 2 * (count - matrices + layers * experts)
        elif model == DEEPSEEK:  # fp8, except embedding, output matrix, router and the projection to keys and values
            assert 1.0 < weights / count < 1.01
        else:
            assert weights == 2 * count


# README.md


def test_every_file_has_a_row():
    rows = with_tables(README.read_text(), {name: f"| `{name}` |" for name in FILES})
    assert sorted(line for line in rows.splitlines() if line.startswith("| `") and line.count("|") == 2) == sorted(
        f"| `{name}` |" for name in FILES
    )


def test_what_to_start_first():
    """Each card's files are named, and fit it."""
    text = README.read_text()
    first = dict(re.findall(r"^\| (H200|RTX 4090|T4), .*? \| (.+) \|$", text, flags=re.MULTILINE))
    assert [*first] == ["H200", "RTX 4090", "T4"]
    for card, files in first.items():
        for name in re.findall(r"`([\w.-]+)`", files):
            (fits,) = re.findall(rf"^\| \[`{re.escape(name)}`\].* \| ([^|]+) \|$", text, flags=re.MULTILINE)
            assert card.replace(" ", "") in fits.split(", ") and name in FILES


@pytest.mark.parametrize(
    "name", [*QUICK[-3:], *(pytest.param(name, marks=pytest.mark.slow) for name in FILES if name not in QUICK[-3:])]
)
def test_row_of_a_file(name, tmp_path):
    """`python tests/helpers/config_tables.py --write` writes the rows. A file for a card fits it."""
    text, cards = row(name, tmp_path)
    assert text in README.read_text().splitlines()
    assert FILES[name].parent.name not in ("rtx4090", "t4") or card_of(name) in cards
    assert cards == tuple(card for card in CARDS if card in cards)
