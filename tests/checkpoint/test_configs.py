"""The files of `configs/sglang`, one for each launch command of SGLang's documentation, and of `configs/block`: their
settings, what a dry run says of each with the published config.json, and the texts of a served one."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
from engine_helpers import VOCABULARY, byte_ids, tokenizer
from safetensors.numpy import load_file, save_file
from server_helpers import running
from tiny_checkpoints import save_llama
from tiny_heads import save_head

from specjax.checkpoint import describe_head, model_config, mtp_config, resolve
from specjax.checkpoint.torch_files import write_torch_list
from specjax.cli import build, flags
from specjax.cli import serve as command
from specjax.drafters import Block, DraftOptions, Eagle, Eagle3, Mtp, Ngram, Standalone
from specjax.hardware import dry_run
from specjax.settings import Parser, add_flags, parse

FOLDER = Path(__file__).parents[2] / "configs"
LLAMA_2, LLAMA_3, LLAMA_31 = (
    "meta-llama/Llama-2-7b-chat-hf", "meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
)  # fmt: skip
MIMO, QWEN, SMALL_QWEN, DEEPSEEK = (
    "XiaomiMiMo/MiMo-7B-RL", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "deepseek-ai/DeepSeek-V3-0324"
)  # fmt: skip
EAGLE_2, EAGLE_LLAMA_3 = "lmsys/sglang-EAGLE-llama2-chat-7B", "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B"
EAGLE_3 = "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B"
EAGLE_3_ORIGINAL = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
QWEN_NEXT = "Qwen/Qwen3-Next-80B-A3B-Instruct"
QWEN35_4B, QWEN35_27B = (f"Qwen/Qwen3.5-{size}" for size in ("4B", "27B"))
DFLASH_35_4B, DFLASH_35_27B = (f"z-lab/Qwen3.5-{size}-DFlash" for size in ("4B", "27B"))
QWEN3_4B, QWEN3_8B, QWEN3_14B, QWEN3_MOE = (f"Qwen/Qwen3-{size}" for size in ("4B", "8B", "14B", "30B-A3B"))
DFLASH_4B, DFLASH_8B, DFLASH2 = (
    "z-lab/Qwen3-4B-DFlash-b16", "z-lab/Qwen3-8B-DFlash-b16", "RedHatAI/Qwen3-8B-speculator.dflash2"
)  # fmt: skip
DSPARK_8B, DSPARK_14B = (f"deepseek-ai/dspark_qwen3_{size}_block7" for size in ("8b", "14b"))
JETSPEC, DFLASH_LLAMA = "JetSpec/jetspec-qwen3-30b-a3b", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"
GPT_OSS, GPT_OSS_120B = (f"openai/gpt-oss-{size}" for size in ("20b", "120b"))
EAGLE_OSS, EAGLE_OSS_120B = "RedHatAI/gpt-oss-20b-speculator.eagle3", "nvidia/gpt-oss-120b-Eagle3"
DFLASH_OSS, DFLASH_OSS_120B = (f"z-lab/gpt-oss-{size}-DFlash" for size in ("20b", "120b"))
TOKEN_MAP = "thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt"


class Launch(NamedTuple):
    """A launch command: its settings that are not defaults, and the resulting algorithm and tree."""

    model: str
    draft: DraftOptions
    algorithm: str
    depth: int
    width: int
    others: dict[str, Any]  # dtype and mem_fraction_static of the command


def launch(model: str, draft: Any, *, algorithm: str = "", **others: Any) -> Launch:
    if isinstance(draft, Ngram):
        return Launch(model, draft, "NGRAM", 15, 16, others)
    return Launch(model, draft, algorithm or draft.algorithm, draft.steps, draft.nodes, others)


HALF = {"dtype": "float16"}
SGLANG: dict[str, Launch] = {
    "llama-2-7b-chat-eagle2": launch(LLAMA_2, Eagle(EAGLE_2, None, 3, 4, 16)),
    "llama-2-7b-chat-eagle2-wide": launch(LLAMA_2, Eagle(EAGLE_2, None, 5, 8, 64), mem_fraction_static=0.6),
    "llama-3-8b-instruct-fr-spec": launch(
        LLAMA_3, Eagle(EAGLE_LLAMA_3, None, 5, 8, 64, token_map=TOKEN_MAP), mem_fraction_static=0.7, **HALF
    ),
    "llama-3.1-8b-instruct-eagle3": launch(
        LLAMA_31, Eagle3(EAGLE_3, None, 5, 8, 32), mem_fraction_static=0.6, **HALF
    ),
    "llama-3.1-8b-instruct-eagle3-chain": launch(
        LLAMA_31, Eagle3(EAGLE_3, None, 7, 1, 8), mem_fraction_static=0.6, **HALF
    ),
    "mimo-7b-rl-mtp": launch(MIMO, Eagle(None, None, 1, 1, 2), algorithm="MTP", mem_fraction_static=0.5),
    "qwen2.5-7b-standalone": launch(QWEN, Standalone(SMALL_QWEN, None, 4, 2, 7), mem_fraction_static=0.7),
    "qwen2.5-7b-standalone-overlap": launch(QWEN, Standalone(SMALL_QWEN, None, 4, 1, 5), mem_fraction_static=0.7),
    "qwen2.5-7b-ngram": launch(QWEN, Ngram(nodes=16, max_match=12, max_breadth=10), mem_fraction_static=0.7),
    "qwen3.5-27b-nextn": launch(QWEN35_27B, Mtp(None, None, 3, 1, 4)),
    "qwen3-next-80b-a3b-nextn": launch(QWEN_NEXT, Mtp(None, None, 3, 1, 4), tensor_parallel_size=4),
    "deepseek-v3-nextn": launch(DEEPSEEK, Mtp(None, None, 1, 1, 2)),
    "gpt-oss-20b-eagle3": launch(GPT_OSS, Eagle3(EAGLE_OSS, None, 3, 1, 4)),
    "gpt-oss-120b-eagle3": launch(GPT_OSS_120B, Eagle3(EAGLE_OSS_120B, None, 3, 1, 4)),
}  # fmt: skip
BLOCKS: dict[str, Launch] = {
    "qwen3-4b-dflash": Launch(QWEN3_4B, Block(DFLASH_4B), "DFLASH", 15, 16, {}),
    "qwen3.5-4b-dflash": Launch(QWEN35_4B, Block(DFLASH_35_4B), "DFLASH", 15, 16, {}),
    "qwen3.5-27b-dflash": Launch(QWEN35_27B, Block(DFLASH_35_27B), "DFLASH", 15, 16, {}),
    "qwen3-8b-dflash": Launch(QWEN3_8B, Block(DFLASH_8B), "DFLASH", 15, 16, {}),
    "qwen3-8b-dflash-tree": Launch(QWEN3_8B, Block(DFLASH_8B, topk=4, nodes=32), "DFLASH", 15, 32, {}),
    "qwen3-8b-dflash2": Launch(QWEN3_8B, Block(DFLASH2), "DFLASH", 7, 8, {}),
    "qwen3-8b-dspark": Launch(QWEN3_8B, Block(DSPARK_8B), "DFLASH", 7, 8, {}),
    "qwen3-14b-dspark": Launch(QWEN3_14B, Block(DSPARK_14B), "DFLASH", 7, 8, {}),
    "qwen3-30b-a3b-jetspec": Launch(QWEN3_MOE, Block(JETSPEC, topk=7, nodes=64), "DFLASH", 15, 64, {}),
    "gpt-oss-20b-dflash": Launch(GPT_OSS, Block(DFLASH_OSS), "DFLASH", 15, 16, {}),
    "gpt-oss-120b-dflash": Launch(GPT_OSS_120B, Block(DFLASH_OSS_120B), "DFLASH", 15, 16, {}),
    "llama-3.1-8b-instruct-dflash": Launch(LLAMA_31, Block(DFLASH_LLAMA, block=8), "DFLASH", 7, 8, {}),
}
LAUNCHES = SGLANG | BLOCKS


def file_of(name: str) -> Path:
    return FOLDER / ("block" if name in BLOCKS else "sglang") / f"{name}.toml"


def read(name: str, *argv: Any) -> flags.Settings:
    """The settings of `specjax serve --config FILE ...`."""
    parser = Parser(prog="specjax serve")
    add_flags(parser, flags.Settings())
    dry_run.add_flags(parser)
    return parse(parser, ["--config", str(file_of(name)), *map(str, argv)], flags.Settings())[1]


# The files.


def test_files():
    assert {*(FOLDER / "sglang").iterdir(), *(FOLDER / "block").iterdir()} == {file_of(name) for name in LAUNCHES}


@pytest.mark.parametrize("name", LAUNCHES)
def test_settings_of_the_launch_command(name, caplog):
    launch, settings = LAUNCHES[name], read(name)
    assert build.draft_options(settings) == launch.draft
    assert not caplog.records, "each key has an effect"
    changed = {
        field.name: getattr(group, field.name)
        for group in (settings.model, settings.engine, settings.server)
        for field in fields(group)
        if getattr(group, field.name) != field.default
    }
    assert changed == {"model": launch.model} | launch.others


# Served.

VOCABULARY_MAP = byte_ids(b"aeinorst")
"""Frequent tokens of the model, so that some random drafts are accepted; the draft head has no others."""


def test_text_of_a_served_file_equals_no_drafting(tmp_path):
    """A file with flags that name small random checkpoints."""
    words, size = VOCABULARY_MAP, VOCABULARY
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
    name = "llama-3.1-8b-instruct-eagle3"
    small = ("--model", tmp_path / "model", "--speculative-draft-model-path", tmp_path / "head", "--dtype", "float32",
             "--max-running-requests", 2, "--max-total-tokens", 512, "--no-speculative-adaptive")  # fmt: skip
    drafting = read(name, *small)
    plain = replace(drafting, speculative=flags.SpeculativeSettings(speculative_algorithm="NONE"))
    texts, accepted = [], []
    for settings in (drafting, plain):
        with (
            running(command.load(settings), settings.server, model="m") as server,
            openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client,
        ):
            options: Any = {"model": "m", "max_tokens": 32, "extra_body": {"ignore_eos": True}}
            greedy = client.completions.create(prompt="an oar, an oat", temperature=0, **options)
            seeded = client.completions.create(prompt="rain", temperature=1, seed=5, **options)
            texts.append([answer.choices[0].text for answer in (greedy, seeded)])
            drafter, counters = server.engine.drafter, server.engine.counters
            if settings is drafting:
                launch = LAUNCHES[name]
                assert (drafter.name, drafter.depth, drafter.width) == (launch.algorithm, launch.depth, launch.width)
                assert server.engine.config.mem_fraction == launch.others["mem_fraction_static"]
                assert server.engine.params.draft["ids"].tolist() == words
            accepted.append(counters.drafted_steps)
    assert texts[0] == texts[1] and all(len(set(text)) > 3 for text in texts[0])
    assert accepted[0] > 0 == accepted[1]


# The sizes of the real models, without weights.


def config(architecture: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """A published config.json; `sizes`: vocabulary, hidden, intermediate, layers, heads, key/value heads, positions."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    common = {"architectures": [architecture], "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return common | dict(zip(names, sizes, strict=True)) | others


def block(architecture: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """config.json of a block head that reads the default layers."""
    common = {"head_dim": 128, "block_size": 16, "mask_token_id": 151669, "rope_theta": 1e6}
    return config(architecture, *sizes, **common | others)


REAL_DELTA: dict[str, Any] = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def multimodal(*sizes: int, **others: Any) -> dict[str, Any]:
    """config.json of a Qwen3.5, whose language model has a section."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    text = config("Qwen3_5ForCausalLM", *sizes, **REAL_DELTA, rope_parameters=rope, mtp_num_hidden_layers=1, **others)
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    return outer | {"text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}


ROPE_LLAMA_31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
REAL_OSS: dict[str, Any] = {
    "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000, "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4"}, "attention_bias": True,
}  # fmt: skip
REAL: dict[str, dict[str, Any]] = {
    LLAMA_2: config("LlamaForCausalLM", 32000, 4096, 11008, 32, 32, 32, 4096, torch_dtype="float16"),
    EAGLE_2: config("LlamaForCausalLMEagle", 32000, 4096, 11008, 1, 32, 32, 4096, torch_dtype="float16"),
    LLAMA_3: config("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 8192, rope_theta=500000.0),
    EAGLE_LLAMA_3: config("LlamaForCausalLMEagle", 128256, 4096, 14336, 1, 32, 8, 8192, bias=False),
    LLAMA_31: config(
        "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 131072, rope_theta=500000.0, rope_scaling=ROPE_LLAMA_31
    ),
    EAGLE_3: config("LlamaForCausalLMEagle3", 128256, 4096, 14336, 1, 32, 8, 2048, draft_vocab_size=32000),
    EAGLE_3_ORIGINAL: config("LlamaForCausalLM", 128256, 4096, 14336, 1, 32, 8, 2048, draft_vocab_size=32000),
    MIMO: config(
        "MiMoForCausalLM", 151680, 4096, 11008, 36, 32, 8, 32768, model_type="mimo", rope_theta=640000,
        attention_bias=True, head_dim=128, num_nextn_predict_layers=1,
    ),
    QWEN: config("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, 32768, rope_theta=1000000.0),
    SMALL_QWEN: config(
        "Qwen2ForCausalLM", 151936, 1536, 8960, 28, 12, 2, 32768, rope_theta=1000000.0, tie_word_embeddings=True
    ),
    DEEPSEEK: config(
        "DeepseekV3ForCausalLM", 129280, 7168, 18432, 61, 128, 128, 163840, model_type="deepseek_v3",
        moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5,
        kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        topk_method="noaux_tc", n_group=8, topk_group=4, num_experts_per_tok=8, moe_layer_freq=1,
        first_k_dense_replace=3, norm_topk_prob=True, scoring_func="sigmoid", num_nextn_predict_layers=1,
        rope_theta=10000, rope_scaling=YARN,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    QWEN3_4B: config(
        "Qwen3ForCausalLM", 151936, 2560, 9728, 36, 32, 8, 40960, head_dim=128, rope_theta=1e6, tie_word_embeddings=True
    ),
    QWEN3_8B: config("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128, rope_theta=1e6),
    QWEN3_14B: config("Qwen3ForCausalLM", 151936, 5120, 17408, 40, 40, 8, 40960, head_dim=128, rope_theta=1e6),
    QWEN3_MOE: config(
        "Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, 40960, head_dim=128, rope_theta=1e6, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    GPT_OSS: config("GptOssForCausalLM", 201088, 2880, 2880, 24, 64, 8, 131072, **REAL_OSS, num_local_experts=32),
    GPT_OSS_120B: config("GptOssForCausalLM", 201088, 2880, 2880, 36, 64, 8, 131072, **REAL_OSS, num_local_experts=128),
    EAGLE_OSS: {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
        "norm_before_residual": True, "norm_before_fc": True, "torch_dtype": "bfloat16",
        "transformer_layer_config": config(
            "LlamaForCausalLM", 201088, 2880, 7680, 1, 64, 8, 131072, head_dim=64, model_type="llama"
        ),
    },
    EAGLE_OSS_120B: config(
        "LlamaForCausalLMEagle3", 201088, 2880, 17280, 1, 64, 8, 131072, head_dim=64, draft_vocab_size=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True},
    ),
    **dict.fromkeys(
        (DFLASH_OSS, DFLASH_OSS_120B),
        block("DFlashDraftModel", 201088, 2880, 7680, 8, 64, 8, 131072, head_dim=64, mask_token_id=200000),
    ),
    QWEN35_4B: multimodal(248320, 2560, 9216, 32, 16, 4, 262144, linear_num_value_heads=32, tie_word_embeddings=True),
    QWEN35_27B: multimodal(248320, 5120, 17408, 64, 24, 4, 262144, linear_num_value_heads=48),
    QWEN_NEXT: config(
        "Qwen3NextForCausalLM", 151936, 2048, 5120, 48, 16, 2, 262144, model_type="qwen3_next", num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        linear_num_value_heads=32, rope_theta=1e7, **REAL_DELTA,
    ),
    DFLASH_35_4B: block("DFlashDraftModel", 248320, 2560, 9728, 5, 32, 8, 262144, mask_token_id=248319),
    DFLASH_35_27B: block("DFlashDraftModel", 248320, 5120, 17408, 5, 32, 8, 262144, mask_token_id=248319),
    DFLASH_4B: block("DFlashDraftModel", 151936, 2560, 9728, 5, 32, 8, 40960),
    DFLASH_8B: block("DFlashDraftModel", 151936, 4096, 12288, 5, 32, 8, 40960),
    DFLASH2: block("DFlash2DraftModel", 151936, 4096, 12288, 5, 32, 8, 40960, block_size=8),
    DSPARK_8B: block("Qwen3DSparkModel", 151936, 4096, 12288, 5, 32, 8, 40960, block_size=7, markov_rank=256),
    DSPARK_14B: block("Qwen3DSparkModel", 151936, 5120, 17408, 5, 40, 8, 40960, block_size=7, markov_rank=256),
    JETSPEC: block("DFlashDraftModel", 151936, 2048, 6144, 5, 32, 4, 40960, dflash_config={"causal_head": True}),
    DFLASH_LLAMA: block("DFlashDraftModel", 128256, 4096, 14336, 5, 32, 8, 131072, mask_token_id=128002),
}  # fmt: skip
PARAMETERS = {
    LLAMA_2: 6_738_415_616, LLAMA_3: 8_030_261_248, LLAMA_31: 8_030_261_248, QWEN: 7_615_616_512,
    QWEN3_8B: 8_190_735_360,
    DEEPSEEK: 671_026_419_200, GPT_OSS: 20_914_757_184, GPT_OSS_120B: 116_829_156_672,
}  # fmt: skip
"""Of the published checkpoints without MTP layers. Each has two bytes, except DeepSeek's router biases with four."""


@pytest.fixture
def described(tmp_path):
    """described(name) -> a folder with only config.json."""

    def save(name: str) -> Path:
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(REAL[name]))
        return folder

    return save


@pytest.mark.parametrize(
    ("name", "style", "experts"),
    [(MIMO, "mimo", 0), (DEEPSEEK, "deepseek", 256), (QWEN35_27B, "qwen3_next", 0), (QWEN_NEXT, "qwen3_next", 512)],
)
def test_mtp_layers_in_config_json(described, name, style, experts):
    """tests/drafters/test_mtp_layers.py compares config.json with the tensors."""
    files = resolve(str(described(name)), progress=False, outline=True)
    layers = mtp_config(files, model_config(files.config))
    assert layers is not None and (layers.style, layers.count) == (style, 1)
    assert (layers.layer.experts.count if layers.layer.experts else 0) == experts


HEADS = {
    launch.draft.path: launch
    for launch in LAUNCHES.values()
    if isinstance(launch.draft, Eagle | Eagle3 | Block) and launch.draft.path
} | {EAGLE_3_ORIGINAL: LAUNCHES["llama-3.1-8b-instruct-eagle3"]}


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_described(described, name):
    """From the published config.json. Tests of the dialects read the tensors of small heads."""
    target = model_config(REAL[HEADS[name].model], dtype="float32")
    kind = {"EAGLE": "eagle", "EAGLE3": "eagle3", "DFLASH": "block"}[HEADS[name].algorithm]
    head = describe_head(str(described(name)), target, kind=kind)
    layers = {EAGLE_2: (), EAGLE_3: (1, 15, 28), EAGLE_OSS: (1, 11, 20), EAGLE_OSS_120B: (0, 16, 31)}
    assert (head.kind, head.hidden_size) == (kind, target.hidden_size)
    assert head.aux_layers == layers.get(name, head.aux_layers)


@pytest.mark.parametrize("name", LAUNCHES)
def test_dry_run_of_real_sizes(described, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "set_up_logging", lambda level: None)  # its handler would replace pytest's
    launch, file = LAUNCHES[name], file_of(name)
    argv = ["--dry-run", "--json", "--assume-device", "H200", "--config", file, "--model", described(launch.model)]
    if path := getattr(launch.draft, "path", None):
        argv += ["--speculative-draft-model-path", described(path)]
    if getattr(launch.draft, "token_map", None):
        write_torch_list(tmp_path / "map.pt", list(range(32768)))
        argv += ["--speculative-token-map", tmp_path / "map.pt"]
    status = command.main([str(part) for part in argv])
    printed = capsys.readouterr()
    assert status == (1 if launch.model == DEEPSEEK else 0), printed  # no device holds DeepSeek's weights
    document = json.loads(printed.out)
    assert document["drafter"] == {"name": launch.algorithm, "nodes": launch.width, "levels": launch.depth}
    assert document["dtype"] == launch.others.get("dtype", REAL[launch.model]["torch_dtype"])
    if count := PARAMETERS.get(launch.model):
        weights = document["memory"]["weights"]
        # DeepSeek's matrices are fp8, except embedding, output matrix, router and the projection to keys and values.
        if launch.model in (GPT_OSS, GPT_OSS_120B):  # matrices of experts in 4.25 bits, the router's biases in 4 bytes
            sizes = REAL[launch.model]
            layers, experts = sizes["num_hidden_layers"], sizes["num_local_experts"]
            matrices = layers * experts * 3 * 2880 * 2880
            assert weights == matrices * 4.25 / 8 + 2 * (count - matrices + layers * experts)
        else:
            assert 1.0 < weights / count < 1.01 if launch.model == DEEPSEEK else weights == 2 * count
