"""The files of `configs/sglang`, one for each launch command of SGLang's documentation, and of `configs/block`: their
settings, and their texts when they are served with small random checkpoints of the same architecture and dialect."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import openai
import pytest
from engine_helpers import VOCABULARY, byte_ids, tokenizer
from quantised_formats import FORMATS, in_mxfp4
from safetensors.numpy import load_file, save_file
from server_helpers import Running, running
from specjax_kernels import Quantised
from tiny_blocks import save_block
from tiny_checkpoints import save_model, save_mtp
from tiny_heads import save_head

from specjax.checkpoint import load_head, model_config, mtp_config, resolve, shipped
from specjax.checkpoint.token_map import checked_ids
from specjax.cli import build, flags
from specjax.cli import serve as command
from specjax.config import BlockConfig
from specjax.drafters import Block, DraftOptions, Eagle, Eagle3, Mtp, Ngram, Standalone
from specjax.hardware import dry_run
from specjax.load import load
from specjax.models import make_target
from specjax.models.draft_head import init_head_params
from specjax.settings import Parser, add_flags, parse
from specjax.train.export import export_head

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
FEW_BITS = {"deepseek-ai/DeepSeek-V3-0324", GPT_OSS, GPT_OSS_120B}
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


# Checkpoints.

LETTERS = byte_ids(b"aeinorst")
"""Frequent tokens of the models, so that some random drafts are accepted; and the ids of token maps."""
PADDED = VOCABULARY + 23
SIZES: dict[str, Any] = {
    "vocab_size": PADDED, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
HEAD: dict[str, Any] = {
    "hidden_size": 32, "target_hidden_size": 32, "target_vocab_size": PADDED, "draft_vocab_size": len(LETTERS),
}  # fmt: skip
ROPE_31 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
NEXTN = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "head_dim": 8, "n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip

OSS = {
    "intermediate_size": 32, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4,
    "sliding_window": 16, "seed": 8,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "truncate": False,
    },
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
DELTA = {
    "head_dim": 8, "full_attention_interval": 2, "num_hidden_layers": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
HEADS = {
    DFLASH_4B: ("dflash", 16), DFLASH_8B: ("dflash", 16), DFLASH2: ("speculators-dflash2", 8), JETSPEC: ("jetspec", 16),
    DSPARK_8B: ("deepspec-vanilla", 7), DSPARK_14B: ("deepspec-vanilla", 7), DFLASH_LLAMA: ("dflash", 16),
    DFLASH_OSS: ("dflash", 16), DFLASH_OSS_120B: ("dflash", 16), DFLASH_35_4B: ("dflash", 16),
    DFLASH_35_27B: ("dflash", 16),
}  # fmt: skip
"""Block heads: dialect and block."""


@functools.cache
def root() -> Path:
    return Path(tempfile.mkdtemp(prefix="specjax-configs-"))


@pytest.fixture(scope="module", autouse=True)
def tidy():
    yield
    shutil.rmtree(root())


def change(folder: Path, edit: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = {name: np.ascontiguousarray(tensor) for name, tensor in edit(tensors).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def literate(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with larger logits of LETTERS."""
    tied = "lm_head.weight" not in tensors
    for name in tensors:
        if name.endswith("embed_tokens.weight" if tied else ("lm_head.weight", "shared_head.head.weight")):
            tensors[name][LETTERS] *= 4
    return tensors


def fp8(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with matrices quantised as in DeepSeek's files."""
    rng, written = np.random.default_rng(0), {}
    for name, tensor in tensors.items():
        if re.search(r"(self_attn|mlp)\..*_proj\w*\.weight$", name):
            parts = FORMATS["fp8 blocks"].write(tensor, rng).tensors
            written |= {name.removesuffix("weight") + part: array for part, array in parts.items()}
        else:
            written[name] = tensor
    return written


@functools.cache
def model(name: str) -> Path:
    """The folder of a random model with the architecture of the hub's model `name`."""
    folder = root() / name.replace("/", "-")
    if name == DEEPSEEK:
        save_mtp(folder, "DeepseekV3ForCausalLM", "deepseek", **SIZES | NEXTN)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = FORMATS["fp8 blocks"].config
        (folder / "config.json").write_text(json.dumps(config))
    elif name == MIMO:
        save_mtp(folder, "MiMoForCausalLM", "mimo", num_nextn_predict_layers=1, **SIZES)
    elif name in (QWEN35_4B, QWEN35_27B):
        save_mtp(folder, "Qwen3_5ForCausalLM", "qwen3_next", **SIZES | DELTA)
    elif name == QWEN_NEXT:
        shared = {"shared_expert_intermediate_size": 16}
        save_mtp(folder, "Qwen3NextForCausalLM", "qwen3_next", **SIZES | DELTA | EXPERTS | shared)
    elif name == SMALL_QWEN:  # with fewer rows of padding than the target, as on the hub
        small = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": VOCABULARY + 7, "tie_word_embeddings": True}
        save_model(folder, "Qwen2ForCausalLM", seed=1, **SIZES | small)
    else:
        architecture, changes = {
            LLAMA_2: ("Llama", {"num_key_value_heads": 4}),
            LLAMA_3: ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
            LLAMA_31: ("Llama", {"rope_parameters": ROPE_31, "num_hidden_layers": 7}),  # EAGLE-3 reads three of seven
            QWEN: ("Qwen2", {}),
            **dict.fromkeys((QWEN3_4B, QWEN3_8B, QWEN3_14B), ("Qwen3", {"num_hidden_layers": 4, "seed": 4})),
            QWEN3_MOE: ("Qwen3Moe", EXPERTS),
            **dict.fromkeys((GPT_OSS, GPT_OSS_120B), ("GptOss", OSS)),
        }[name]
        save_model(folder, f"{architecture}ForCausalLM", **SIZES | changes)
        if architecture == "GptOss":
            in_mxfp4(folder)
    change(folder, lambda tensors: fp8(literate(tensors)) if name == DEEPSEEK else literate(tensors))
    tokenizer().save_pretrained(folder)
    return folder


def target_of(draft: str) -> str:
    """The target of a draft that a file names."""
    return next(launch.model for launch in LAUNCHES.values() if getattr(launch.draft, "path", None) == draft)


@functools.cache
def draft_model(name: str) -> Path:
    """The folder of a random draft, in its published layout."""
    folder = root() / name.replace("/", "-")
    if name == SMALL_QWEN:
        return model(name)
    if name in HEADS:
        dialect, block = HEADS[name]
        target = json.loads((model(target_of(name)) / "config.json").read_text())
        usual = {"num_target_layers": target["num_hidden_layers"], "tie_word_embeddings": False, "dtype": "bfloat16"}
        windows = {"layer_types": ["full_attention"] * 2, "use_sliding_window": False, "max_window_layers": 2}
        if name == DFLASH2:
            windows = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 2048}
        changes = {"block_size": block, **usual} | ({} if name == DFLASH2 else windows)
        save_block(folder, dialect, scale=2.0, width=32, vocab=PADDED, features=(0,), config=changes)
        if name == DFLASH2:
            described = json.loads((folder / "config.json").read_text()) | {"sliding_window_non_causal": True}
            described["transformer_layer_config"] |= windows
            (folder / "config.json").write_text(json.dumps(described))
        return folder
    if name == EAGLE_OSS_120B:  # it uses the target's output layer, and counts boundaries
        layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
        changes = {"draft_vocab_size": None, "eagle_config": layers}
        missing = {"lm_head.weight": None}
        save_head(folder, "eagle3", dialect="eagle3-full-vocabulary", config=changes, tensors=missing, **HEAD)
    elif name in (EAGLE_3, EAGLE_3_ORIGINAL, EAGLE_OSS):
        vocabulary = {"d2t": np.array(LETTERS) - np.arange(len(LETTERS)), "t2d": np.isin(np.arange(PADDED), LETTERS)}
        dialect, architecture, changes = "eagle3", "LlamaForCausalLMEagle3", {}
        if name == EAGLE_3_ORIGINAL:
            architecture = "LlamaForCausalLM"
            changes = {"architectures": [architecture]}
        if name == EAGLE_OSS:
            dialect, architecture = "eagle3-norm-before-fc", "Eagle3Speculator"
            changes = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
        save_head(folder, "eagle3", dialect=dialect, tensors=vocabulary, config=changes, **HEAD)
        assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    else:
        dialect, kv_heads = ("eagle", 4) if name == EAGLE_2 else ("eagle-nobias", 2)
        named = {"architectures": ["LlamaForCausalLMEagle"]}
        save_head(folder, "eagle", dialect=dialect, config=named, kv_heads=kv_heads, **HEAD)
    return folder


def token_map(ids: list[int]) -> Path:
    import torch

    file = root() / f"freq_{len(ids)}.pt"
    torch.save(ids, file)
    return file


# Served.

SMALL = ("--dtype", "float32", "--max-running-requests", 2, "--max-total-tokens", 512, "--chunked-prefill-size", 16)
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "extra_body": {"ignore_eos": True}}
METERED = OPTIONS | {"extra_body": {"ignore_eos": True, "return_speculative_metrics": True}}
QUICK = (
    "llama-3.1-8b-instruct-eagle3", "llama-3-8b-instruct-fr-spec", "deepseek-v3-nextn", "qwen2.5-7b-standalone",
    "qwen3-8b-dflash2", "qwen3-8b-dflash-tree", "qwen3-30b-a3b-jetspec", "gpt-oss-120b-eagle3",
    "qwen3.5-27b-dflash",
)  # fmt: skip
"""One file of each kind of draft; NGRAM is in other tests. The rest are slow tests."""
MESSAGES: Any = [{"role": "user", "content": "is the hell in a hall?"}]


def with_checkpoints(name: str, *more: Any) -> flags.Settings:
    """The file's settings with flags that name the checkpoints, and further flags."""
    file = read(name)
    argv = ["--model", model(file.model.model), *SMALL, "--tp", 1, "--no-speculative-adaptive"]  # every step drafts
    if path := file.speculative.speculative_draft_model_path:
        argv += ["--speculative-draft-model-path", draft_model(path)]
    if file.speculative.speculative_token_map:
        argv += ["--speculative-token-map", token_map(LETTERS)]
    return read(name, *argv, *more)


@contextmanager
def served(settings: flags.Settings) -> Iterator[tuple[Running, openai.OpenAI]]:
    name = settings.model.model
    with (
        running(command.load(settings), settings.server, model=name) as server,
        openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


class Answers(NamedTuple):
    texts: list[Any]  # with finish reason and usage
    histogram: list[int]  # of accepted drafts


def ask(client: openai.OpenAI, name: str) -> Answers:
    """A chat, a chat as a stream, and completions, greedy and seeded."""
    # The first request fills the prefix cache, so that the next two have equal hits.
    client.chat.completions.create(model=name, messages=MESSAGES, **METERED)
    chat = client.chat.completions.create(model=name, messages=MESSAGES, **METERED)
    pieces, usage, reason = "", None, None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model=name, messages=MESSAGES, stream=True, stream_options=options, **OPTIONS
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += choice.delta.content or ""
            reason = choice.finish_reason or reason
    greedy = client.completions.create(model=name, prompt="an oar, an oat", **METERED)
    seeded = client.completions.create(model=name, prompt="rain", seed=5, **METERED | {"temperature": 1})
    text = chat.choices[0].message.content
    assert (text, chat.choices[0].finish_reason, chat.usage) == (pieces, reason, usage), "the stream has another text"
    texts = [(text, reason, usage)]
    texts += [(answer.choices[0].text, answer.choices[0].finish_reason, answer.usage) for answer in (greedy, seeded)]
    answers: list[Any] = [chat, greedy, seeded]
    metrics = [answer.metadata["speculative"] for answer in answers]
    assert all(row["spec_verify_ct"] > 0 for row in metrics)
    return Answers(texts, np.sum([row["spec_accept_histogram"] for row in metrics], axis=0).tolist())


@functools.cache
def plain(model: flags.ModelSettings, engine: flags.EngineSettings) -> Answers:
    """Without drafts."""
    none = flags.SpeculativeSettings(speculative_algorithm="NONE")
    with served(flags.Settings(model, engine, none)) as (server, client):
        assert server.engine.drafter.width == 1
        return ask(client, model.model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAUNCHES]
)
def test_text_equals_no_drafting(name):
    launch, settings = LAUNCHES[name], with_checkpoints(name)
    with served(settings) as (server, client):
        engine = server.engine
        assert (engine.drafter.name, engine.drafter.depth, engine.drafter.width) == (
            launch.algorithm, launch.depth, launch.width
        )  # fmt: skip
        assert engine.target.config.dtype == "float32" and engine.config.overlap
        assert engine.config.mem_fraction == launch.others.get("mem_fraction_static", 0.85)
        leaves = jax.tree.leaves(engine.params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
        assert any(isinstance(leaf, Quantised) for leaf in leaves) == (launch.model in FEW_BITS)
        if getattr(launch.draft, "path", None) == EAGLE_3 or getattr(launch.draft, "token_map", None):
            assert engine.params.draft["ids"].tolist() == LETTERS
        answers = ask(client, settings.model.model)
        assert engine.counters.drafted_steps == engine.counters.verifications > 0
    assert answers.texts == plain(settings.model, replace(settings.engine, mem_fraction_static=0.85)).texts
    assert len({text for text, *_ in answers.texts}) == 3 and all(len(set(text)) > 3 for text, *_ in answers.texts)
    assert sum(answers.histogram[1:]) > 0, "some drafts were accepted"


# The heads that docs/heads.md lists.

PAGE = (FOLDER.parent / "docs" / "heads.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^\| `([^`]+)`", PAGE.partition("## Dialects")[0], flags=re.M)
SMOLLM = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 1e5,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
WITHOUT_A_FILE = {
    EAGLE_3_ORIGINAL: ("llama-3.1-8b-instruct-eagle3", EAGLE_3_ORIGINAL),
    TOKEN_MAP.rpartition("/")[0]: ("llama-3-8b-instruct-fr-spec", EAGLE_LLAMA_3),
}
"""Entries that are not the draft of a file: a file of `configs`, and the draft that it is opened with."""


def file_and_draft(entry: str) -> tuple[str, str | None]:
    if entry in WITHOUT_A_FILE:
        return WITHOUT_A_FILE[entry]
    drafts = {name: getattr(launch.draft, "path", None) for name, launch in LAUNCHES.items()}
    named = [name for name, path in drafts.items() if entry in (path, path or LAUNCHES[name].model)]
    return named[0], drafts[named[0]]


@pytest.mark.parametrize("entry", [entry for entry in LISTED if "/" in entry])
def test_listed_heads_open(entry):
    """Every draft on the hub that the page lists, in its published layout with small sizes, as `Engine` loads it."""
    name, path = file_and_draft(entry)
    argv = ["--speculative-draft-model-path", draft_model(path)] if path else []
    arguments = build.engine_arguments(with_checkpoints(name, *argv))
    del arguments["config"]
    loaded = load(**arguments, progress=False)
    assert loaded.drafter.name == LAUNCHES[name].algorithm
    assert jax.tree.leaves(loaded.params.draft)
    if entry == EAGLE_OSS:
        assert "joint_norm" in loaded.params.draft and loaded.draft_model.aux_layers == (1, 2, 3)
    if entry == EAGLE_OSS_120B:
        assert loaded.draft_model.aux_layers == (0, 1, 3)


@pytest.mark.parametrize("entry", [entry for entry in LISTED if "/" not in entry])
def test_listed_heads_of_the_package_open(entry, tmp_path):
    target = model_config(SMOLLM, dtype="float32")
    if entry == "smollm2-token-map":
        ids = np.load(shipped.FOLDER.parent / f"{entry}.npy")
        assert len(checked_ids(ids, target.vocab_size)) == len(ids)
        return
    kind = "block" if entry.endswith("dflash") else next(head.kind for head in shipped.HEADS if head.name == entry)
    folder = shipped.FOLDER / entry
    if kind == "block":  # published nowhere: the layout that `specjax train` writes
        folder, size = tmp_path / entry, 8192
        head = BlockConfig(
            hidden_size=576, feature_size=3 * 576, intermediate_size=64, num_heads=9, num_kv_heads=3, head_dim=64,
            norm_epsilon=1e-5, rope=target.rope, vocab_size=size, aux_layers=(1, 14, 27), own_head=True, mapped=True,
            layers=2, block=5, mask_token=4, from_anchor=False, windows=(None,) * 2, causal=(False,) * 2,
        )  # fmt: skip
        params = init_head_params(head, make_target(target), jax.random.key(0))
        export_head(folder, head, params, target, target_name="t", card="")
    config, _ = load_head(str(folder), target, kind=kind, progress=False)
    layers = {"eagle3": (1, 14, 26), "eagle": (), "block": (1, 14, 27)}
    assert (config.kind, config.aux_layers) == (kind, layers[kind])


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


def described(name: str) -> Path:
    """A folder with only config.json."""
    folder = root() / "real" / name.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(REAL[name]))
    return folder


@pytest.mark.parametrize("name", [MIMO, DEEPSEEK, QWEN35_27B, QWEN_NEXT])
def test_mtp_layers_in_config_json(name):
    files = resolve(str(model(name)), progress=False)
    target = model_config(files.config)
    layers = mtp_config(files, target)
    assert layers is not None and layers == mtp_config(replace(files, weights=()), target)


@pytest.mark.parametrize("name", LAUNCHES)
def test_dry_run_of_real_sizes(name, capsys, monkeypatch):
    monkeypatch.setattr(command, "set_up_logging", lambda level: None)  # its handler would replace pytest's
    launch, file = LAUNCHES[name], file_of(name)
    argv = ["--dry-run", "--json", "--assume-device", "H200", "--config", file, "--model", described(launch.model)]
    if path := getattr(launch.draft, "path", None):
        argv += ["--speculative-draft-model-path", described(path)]
    if getattr(launch.draft, "token_map", None):
        argv += ["--speculative-token-map", token_map(list(range(32768)))]
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
