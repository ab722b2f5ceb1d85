"""`--dry-run` against engines and figures computed by hand; proposed changes make the model fit."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import combinations, product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import pytest
from engine_helpers import VOCABULARY, tokenizer
from test_gemma4_checkpoint import PUBLISHED as GEMMA_4_FILES
from tiny_checkpoints import save_llama, write_gguf
from tiny_heads import save_head

from specjax import checkpoint
from specjax.checkpoint import CheckpointError
from specjax.cli import serve as command
from specjax.drafters import Eagle3, Ngram, NoDraft, Standalone
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.engine.memory import Devices, layout, temporary_bytes, temporary_terms
from specjax.engine.plan import Key
from specjax.engine.programs import Programs
from specjax.gpu import DEVICES, SHARE_VARIABLES
from specjax.hardware.dry_run import Case, experts_read, make_plan, outline
from specjax.state import init_state

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 204_800, "num_hidden_layers": 13, "num_attention_heads": 64
}  # fmt: skip
"""As large as Llama 70B, with few layers, which are what a dry run takes time for."""
EAGLE3 = LLAMA_8B | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "num_experts": 64,
    "num_experts_per_tok": 8, "moe_intermediate_size": 712, "norm_topk_prob": True, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


PUBLISHED = json.loads((Path(__file__).parents[1] / "golden/published_configs.json").read_text())


class Output(NamedTuple):
    status: int
    text: str
    document: dict[str, Any]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Keeps pytest's log handler, and fails if the command listens or loads a model."""

    def refuse(*_: Any, **options: Any) -> Any:
        raise AssertionError("a dry run must not")

    monkeypatch.setattr(command, "set_up_logging", lambda level: None)
    monkeypatch.setattr(command, "listen", refuse)
    monkeypatch.setattr(command.build, "make_engine", refuse)
    for name in SHARE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def configs(tmp_path):
    """Folders that hold only a config.json."""
    for name, config in (("8b", LLAMA_8B), ("70b", LLAMA_70B), ("eagle3", EAGLE3), ("mixture", MIXTURE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def dry_run(capsys):
    def call(*argv: Any, text: bool = False) -> Output:
        """`text`: another run, for the text without --json."""
        given = ["--dry-run", *map(str, argv)]
        status = command.main([*given, "--json"])
        document = json.loads(capsys.readouterr().out)  # stdout holds only the document
        assert document["fits"] == (status == 0)
        if not text:
            return Output(status, "", document)
        assert command.main(given) == status
        printed = capsys.readouterr().out
        verdict = printed.splitlines()[-1]
        assert ("tokens/s" in printed) == bool(document["speeds"]) == document["fits"]
        command_line = document["command"] and document["command"]["line"]
        assert [line for line in printed.splitlines() if line.startswith("specjax")] == [command_line] * bool(
            command_line
        )
        assert verdict.startswith("fits: ") if document["fits"] else verdict == "does not fit"
        assert "{" not in printed
        return Output(status, printed, document)

    return call


def head_flags(configs) -> tuple[Any, ...]:
    return "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", configs / "eagle3"


# Figures computed by hand.


@pytest.mark.parametrize(("kind", "size", "beside"), [("none", 2, 0), (None, 1, 4)])
def test_llama_8b_with_an_eagle3_head_on_an_h200(configs, dry_run, kind, size, beside):
    """A draft weight has `size` bytes, and an output of a matrix `beside` more; int8 is the default on GPUs."""
    tree = "--speculative-num-steps", 7, "--speculative-eagle-topk", 1, "--speculative-adaptive"
    tree += ("--speculative-draft-quantization", kind) if kind else ()
    output = dry_run("--model", configs / "8b", "--assume-device", "h200", *head_flags(configs), *tree)
    document, memory = output.document, output.document["memory"]
    assert output.status == 0 and document["fits"] and document["dtype"] == "bfloat16"
    assert memory["weights"] == 2 * 8_030_261_248
    assert document["reads"]["forward"] == memory["weights"] - 2 * 128256 * 4096, "an embedding is read by rows"
    layer = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    outputs = (4096 + 2 * 1024) + 4096 + 2 * 14336 + 4096 + 32000
    norms = 2 * 4 * 4096  # of the embedding, the feature, the MLP and the end
    fc = size * 3 * 4096 * 4096 + beside * 4096
    level = size * (layer + 32000 * 4096) + beside * outputs + norms
    assert memory["draft_weights"] == level + fc + 4 * 32000, "the last are ids"
    assert ("weights in int8" in document["speculation"]["head"]) == (size == 1)
    assert memory["limit"] == int(0.95 * 141e9), "a tenth more than weights and pool"
    room = int(141e9 * 0.85) - memory["weights"] - memory["draft_weights"]
    token, draft_token = 32 * 2 * 8 * 128 * 2, 2 * 8 * 128 * 2
    assert document["pool_tokens"] == room // (token + draft_token) // 16 * 16
    assert memory["pool"] == document["pool_tokens"] * token
    forward, context = document["reads"]["forward"], 1024
    for batch in (1, 48):
        assert document["speeds"][str(batch)] == pytest.approx(batch * 4.8e12 / (forward + batch * context * token))


def test_gemma_4_with_its_assistant_beside_it(configs, dry_run):
    """AUTO finds it. It has weights and no pages; of its output matrix a node reads 4,096 rows."""
    described, numbers = GEMMA_4_FILES["E4B"]
    text = described["text_config"] | {
        "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4,
        "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "final_logit_softcapping": None,
    }  # fmt: skip
    assistant = {"architectures": ["Gemma4AssistantForCausalLM"], "dtype": "bfloat16", "text_config": text}
    assistant |= {"backbone_hidden_size": 2560, "use_ordered_embeddings": True}
    for name, config in (("e4b", described), ("e4b-assistant", assistant)):
        (configs / name).mkdir()
        (configs / name / "config.json").write_text(json.dumps(config))
    given = "--model", configs / "e4b", "--assume-device", "RTX4090", "--speculative-draft-quantization", "none"
    found = dry_run(*given).document
    named = "--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", configs / "e4b-assistant"
    assert dry_run(*given, *named).document == found
    assert found["drafter"] == {"name": "ASSISTANT", "nodes": 4, "levels": 3}
    assert (found["token_bytes"], found["draft_token_bytes"]) == (2 * numbers, 0)
    heads = 4 * 256 * (3 * 256 + 512)
    layers = 4 * (3 * 256 * 2048 + 4 * 256 + 1) + 2 * heads + 3 * 256 + 512  # MLP, norms, scalar; q and o; q_norm
    rows, around = 262144 * 256, 3 * 2560 * 256 + 256 + 2048 * 256
    assert found["memory"]["draft_weights"] == 2 * (layers + rows + around) + 4 * 262144, "the last are ids"
    small = dry_run(*given[:4]).document["memory"]["draft_weights"]
    assert 2 * rows < small < found["memory"]["draft_weights"], "int8; rows are read as they are"


@pytest.mark.parametrize(("device", "kind"), [("T4", "int8"), ("L4", "int4")])
def test_8b_models_in_few_bits_fit_small_gpus(configs, dry_run, device, kind):
    """The pool holds a context of 8,192 tokens beside the temporaries of programs."""
    output = dry_run("--model", configs / "8b", "--assume-device", device, "--quantization", kind)
    memory, smallest = output.document["memory"], 16e9 if device == "T4" else 24e9
    assert output.status == 0 and output.document["fits"] and output.document["device"]["memory"] == smallest
    assert output.document["pool_tokens"] > 8192 and memory["total"] < memory["limit"] < 0.97 * smallest
    if device == "T4":
        assert memory["temporaries"] > 1.5e9, "the gathered pages of a layer, beside a prefill's activations"
    whole = dry_run("--model", configs / "8b", "--assume-device", device)
    assert whole.document["fits"] == (device != "T4")


def test_path_of_a_config_and_tied_embedding(configs, dry_run):
    paths = configs / "8b", configs / "8b" / "config.json"
    folder, file = (dry_run("--model", path, "--assume-device", "A100").document for path in paths)
    assert folder | {"model": ""} == file | {"model": ""}
    two = dry_run("--model", paths[0], "--assume-device", "A100", "--dp", 2, "--tp", 2, text=True)
    assert two.document["memory"]["limit"] == folder["memory"]["limit"] and "2 for each of 2 replicas" in two.text
    assert file["drafter"]["name"] == "NGRAM"
    with pytest.raises(CheckpointError, match=r"has none of: model.safetensors"):
        checkpoint.resolve(str(configs / "8b"))
    with pytest.raises(CheckpointError, match=r"is a file and not a \.gguf"):
        checkpoint.resolve(str(configs / "8b" / "config.json"))
    config = LLAMA_8B | {"tie_word_embeddings": True, "num_hidden_layers": 2}
    (configs / "8b" / "config.json").write_text(json.dumps(config))
    described = outline(str(configs / "8b"), draft=NoDraft(), platform="gpu")
    reads = planned(described)["reads"]
    assert reads["forward"] == reads["weights"], "a tied embedding is read whole"
    case = Case(described, EngineConfig(), DEVICES["H200"], "cpu")
    assert case._replace(replicas=3).limit == case.limit // 3, "replicas on CPUs share the memory"


def planned(described: Any, devices: int = 1) -> dict[str, Any]:
    return make_plan(Case(described, EngineConfig(tensor_parallel=devices), DEVICES["H200"], "gpu"))


def test_several_devices(configs):
    described = outline(str(configs / "8b"), draft=Eagle3(str(configs / "eagle3")), platform="gpu")
    one, two, many = (planned(described, devices=devices) for devices in (1, 2, 16))
    norms, weights = 2 * 4096 * (2 * 32 + 1), one["memory"]["weights"]
    assert two["memory"]["weights"] == (weights - norms) // 2 + norms
    for name in ("token_bytes", "draft_token_bytes"):
        assert two[name] == one[name] // 2
    assert two["speeds"][1] > 1.96 * one["speeds"][1]
    # Each of 16 devices has a copy of a key/value head and two of its query heads: 4 of 48 heads.
    qkv = 2 * 32 * 4096 * 48 * 128
    assert many["memory"]["weights"] == (weights - norms - qkv) // 16 + norms + qkv // 12
    assert many["token_bytes"] == one["token_bytes"] // 8


@pytest.mark.parametrize(
    ("argv", "reason", "changes"),
    [
        (
            "70b --tp 3",
            "--tensor-parallel-size 3 cannot split the 64 query heads on 8 key/value heads of the model evenly",
            ["--tensor-parallel-size 4"],
        ),
        (
            "mixture --tp 32 --ep 2",
            "--expert-parallel-size 2 cannot spread the 64 experts of the model, each 712 wide, .* over 32 devices; "
            "these can: 1, 4, 8, 16, 32$",
            None,
        ),
        ("70b --tp 8 --ep 8", "--expert-parallel-size 8 spreads the experts of a mixture over devices, and", None),
    ],
)
def test_devices_that_cannot_split_a_model(configs, dry_run, argv, reason, changes):
    name, *given = argv.split()
    document = dry_run("--model", configs / name, "--assume-device", "H100", *given).document
    assert any(re.match(reason, problem) for problem in document["problems"]), document["problems"]
    if changes is not None:
        assert [change for change in document["changes"] if "parallel" in change] == changes
        assert dry_run("--model", configs / name, "--assume-device", "H100", *changes[0].split()).status == 0


def test_expert_parallel(configs, dry_run):
    """32 devices do not divide the width of 712: each has all experts, or the experts of one group."""
    given = "--model", configs / "mixture", "--assume-device", "H200", "--tp", 32
    whole, spread = dry_run(*given), dry_run(*given, "--ep", 32)
    experts = 2 * 4 * 64 * 3 * 1024 * 712
    assert whole.document["memory"]["weights"] - spread.document["memory"]["weights"] == experts - experts // 32


# Engines.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    save_llama(root / "model", num_hidden_layers=3, vocab_size=VOCABULARY)
    tokenizer().save_pretrained(root / "model")
    head = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}}
    sizes = {"target_hidden_size": 32, "target_vocab_size": VOCABULARY, "hidden_size": 32}
    save_head(root / "head", "eagle3", config=head, **sizes)
    save_head(root / "peagle", "eagle3", dialect="peagle-specforge", config=head, **sizes)
    save_llama(root / "pard", num_hidden_layers=1, hidden_size=16, vocab_size=VOCABULARY, pard_token=9)
    tokenizer().save_pretrained(root / "pard")
    return root


@pytest.mark.parametrize("name", ["NGRAM", "EAGLE3", "P-EAGLE", "PARD"])
def test_memory_equals_the_engines(tiny, monkeypatch, name):
    draft = {
        "NGRAM": Ngram(capacity=4096), "EAGLE3": Eagle3(str(tiny / "head")),
        "P-EAGLE": Eagle3(str(tiny / "peagle"), steps=3), "PARD": Standalone(str(tiny / "pard"), steps=4),
    }[name]  # fmt: skip
    config = EngineConfig(max_running_requests=3, page_size=4)
    engine = Engine.from_pretrained(str(tiny / "model"), draft=draft, config=config, compilation_cache=False)
    described = outline(str(tiny / "model"), draft=draft)
    device = DEVICES["RTX4090"]
    plan = make_plan(Case(described, config, device, "cpu"))
    assert plan["fits"]
    functions, facts = dict.fromkeys(("init", "propose", "observe")), {"drafter": None, "resize": None}
    assert described.speculation.drafter._replace(**functions) == engine.drafter._replace(**functions)
    assert described.speculation._replace(**facts) == engine.speculation._replace(**facts)
    assert described.speculation.costly_observe == (name in ("P-EAGLE", "PARD"))
    if described.speculation.costly_observe:
        sampling = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=1.0, seed=3)]
        plain = Engine.from_pretrained(str(tiny / "model"), draft="NONE", config=config, compilation_cache=False)
        texts = [[done.output_ids for done in each.generate(["hello", "the"], sampling)] for each in (engine, plain)]
        assert texts[0] == texts[1] and engine.counters.drafted_steps
    memory, state, buckets = plan["memory"], engine.programs.state_shapes, engine.buckets
    assert memory["weights"] == nbytes(engine.params.target) and memory["draft_weights"] == nbytes(engine.params.draft)
    assert memory["pool"] == nbytes(state.cache)
    assert memory["pool"] + memory["draft_pool"] + memory["rows"] == nbytes(state)
    assert memory["page_tables"] == nbytes(engine.device.state.tables)
    assert memory | engine.memory_plan.always == memory
    sizes = {"batches": buckets.batches, "chunks": buckets.chunks, "tables": buckets.tables}
    assert (plan["pool_tokens"], plan["buckets"]) == (engine.intake.pool_tokens, sizes)
    assert plan["context_length"] == engine.context_length
    # A GPU's engine sizes its pool by the free memory.
    used, limit = memory["weights"] + memory["draft_weights"], 6_000_000
    stats = {"bytes_limit": limit, "bytes_in_use": used}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    monkeypatch.setattr(engine, "platform", "gpu")
    tokens = prod(engine.make_plan(None).checked().pool)
    monkeypatch.setenv(SHARE_VARIABLES[0], "0.75")
    small = make_plan(Case(described, config, device._replace(memory=limit / 0.75), "gpu"))
    assert small["pool_tokens"] == tokens > 0


@pytest.mark.parametrize("kind", ["step", "prefill"])
def test_temporaries_against_xla(tmp_path, kind):
    """A step of 32 nodes needs memory mostly for logits, a chunk of 256 tokens for activations."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | sizes | heads))
    described = outline(str(tmp_path), draft=Ngram(nodes=8, capacity=4096))
    parts, config = (described.target, described.speculation.drafter), EngineConfig(max_running_requests=4)
    pool, buckets = layout(config, 1024, 1024, "cpu", described.speculation)
    # The other kind of program is small.
    few: dict[str, Any] = {"chunks": (8,)} if kind == "step" else {"trees": {1: 8}}
    buckets = replace(buckets, several=None, **few)
    state = jax.eval_shape(lambda: init_state(described.params, *parts, rows=4, pool=pool))
    sizes = {"table": buckets.tables[-1], "new_pages": 1}
    program: Any = Programs(described.target, described.speculation, described.params, state, **sizes).get(
        buckets.step(4, nodes=8) if kind == "step" else Key(kind, 256, buckets.tables[0])
    )
    held = program.memory_analysis().temp_size_in_bytes
    terms = temporary_terms(described.target, described.speculation.drafter.features, buckets, Devices("cpu"))
    assert 0.7 * held < temporary_bytes(terms) < 1.5 * held


def nbytes(tree: Any) -> int:
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_gguf_described_without_conversion(tmp_path, monkeypatch):
    tensors = save_llama(tmp_path / "model")
    write_gguf(tmp_path / "it.gguf", tensors)
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    described = outline(str(tmp_path / "it.gguf"), draft=NoDraft(), platform="cpu")
    assert not (tmp_path / "cache").exists()
    config = checkpoint.model_config(checkpoint.resolve(str(tmp_path / "it.gguf"), progress=False).config)
    assert described.target.config == config


# Proposed changes.


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (f"{SHARE_VARIABLES[1]}=0.715 8b --assume-device RTX4090", "--tensor-parallel-size --assume-device"),
        ("70b --assume-device H200", "--tensor-parallel-size"),
        (
            "8b --assume-device L40S --context-length 131072 --mem-fraction 0.68",
            "--context-length --mem-fraction-static",
        ),
        (
            f"{SHARE_VARIABLES[0]}=0.75 8b --assume-device H200 --max-total-tokens 850000",
            "--max-total-tokens",
        ),
        (
            "8b --assume-device L40S --max-running-requests 256 --speculative-algorithm NGRAM "
            "--speculative-num-draft-tokens 64 --max-total-tokens 80000",
            "--max-running-requests --speculative-algorithm",
        ),
    ],
)
def test_each_proposed_change_fits(configs, dry_run, monkeypatch, argv, expected):
    *variables, rest = re.split(r"(?<=\d) (?=\d+b )", argv)
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    name, *given = rest.split()
    output = dry_run("--model", configs / name, *given, text=name == "70b")
    assert output.status == 1 and output.document["problems"]
    changes = output.document["changes"]
    assert set(expected.split()) <= {change.split()[0] for change in changes}, changes
    for change in changes:
        assert dry_run("--model", configs / name, *given, *change.split()).status == 0, change


# The command that fits best.


@pytest.fixture
def published(tmp_path):
    """published(name) -> a folder with only the published config.json of a hub id."""

    def save(name: str) -> Path:
        folder = tmp_path / name.replace("/", " of ")  # which a shell splits
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
        return folder

    return save


HEADS = {
    "Qwen/Qwen3.5-27B": ("DFLASH", "z-lab/Qwen3.5-27B-DFlash"),
    "Qwen/Qwen3-14B": ("DSPARK", "deepseek-ai/dspark_qwen3_14b_block7"),
    "openai/gpt-oss-20b": ("DFLASH", "z-lab/gpt-oss-20b-DFlash"),
    "Qwen/Qwen2.5-7B-Instruct": ("STANDALONE", "Qwen/Qwen2.5-1.5B-Instruct"),
    "Qwen/Qwen3.6-35B-A3B": ("NEXTN", None),
    "Qwen/Qwen3-30B-A3B": ("DFLASH", "JetSpec/jetspec-qwen3-30b-a3b"),
    "meta-llama/Llama-3.1-8B-Instruct": ("EAGLE3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
}


def with_head(published, model: str) -> list[Any]:
    algorithm, head = HEADS[model]
    path = ["--speculative-draft-model-path", published(head)] if head else []
    return ["--model", published(model), "--speculative-algorithm", algorithm, *path]


@pytest.mark.parametrize(
    ("model", "argv", "expected"),
    [
        ("Qwen/Qwen3.5-27B", "--assume-device RTX4090", "--quantization int4 --state-snapshots 2"),
        pytest.param(
            "Qwen/Qwen3.5-27B",
            "--assume-device A10G --max-running-requests 1",
            "--quantization int4",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Qwen/Qwen3.5-27B",
            "--assume-device L40S --context-length 65536",
            "--quantization int8 --context-length",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Qwen/Qwen3-14B",
            "--assume-device T4 --disable-radix-cache",
            "--quantization int4 --disable-radix-cache",
            marks=pytest.mark.slow,
        ),
        ("Qwen/Qwen3-14B", "--assume-device L4 --context-length 40000", "--quantization int8"),
        ("openai/gpt-oss-20b", "--assume-device T4", "--speculative-algorithm NONE"),
        pytest.param("Qwen/Qwen2.5-7B-Instruct", "--assume-device T4", "--quantization int8", marks=pytest.mark.slow),
        pytest.param(
            "Qwen/Qwen3.6-35B-A3B",
            "--assume-device L4",
            "--quantization int8 --tensor-parallel-size 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Qwen/Qwen3.6-35B-A3B",
            "--assume-device A100 --max-total-tokens 90000000",
            "--max-total-tokens",
            marks=pytest.mark.slow,
        ),
        pytest.param("Qwen/Qwen3-30B-A3B", "--assume-device RTX4090", "--quantization int4", marks=pytest.mark.slow),
        ("meta-llama/Llama-3.1-8B-Instruct", "--assume-device H100 --tp 3", "--tensor-parallel-size 2"),
    ],
)
def test_best_command_fits(published, dry_run, model, argv, expected):
    """The line can be pasted. It says what the plan says, and needs no other device unless none fits."""
    given = argv.split()
    first = dry_run(*with_head(published, model), *given)
    assert first.status == 1 and first.document["speeds"] == {}
    command = first.document["command"]
    program, subcommand, *line = shlex.split(command["line"])
    assert (program, subcommand) == ("specjax", "serve") and "--dry-run" not in line
    again = dry_run(*line, *given[:2])
    assert again.status == 0 and again.document["command"] is None
    assert again.document["pool_tokens"] == command["pool_tokens"] >= 2048
    assert again.document["devices"] == command["devices"]
    assert set(expected.split()) <= {*line} and len({*line} & {"--quantization"}) <= 1
    assert ("--tensor-parallel-size" in line) == (command["devices"] != 1)
    assert not any("(1)" in problem for problem in first.document["problems"])


def test_best_command_of_27b_on_a_small_card(published, dry_run):
    """Qwen3.5-27B with a DFlash head on one card of 24 GB: int4, small chunks and few snapshots."""
    given = [*with_head(published, "Qwen/Qwen3.5-27B"), "--assume-device", "RTX4090"]
    by_hand = "--quantization int4 --chunked-prefill-size 256 --state-snapshots 2 --max-running-requests 1"
    assert dry_run(*given, *by_hand.split(), "--mem-fraction", 0.9).status == 0
    command = dry_run(*given).document["command"]
    assert command["devices"] == 1 and command["requests"] > 1 and command["pool_tokens"] > 8192
    assert "--chunked-prefill-size 256" in command["line"]


def test_best_command_keeps_the_file(published, dry_run, tmp_path):
    """Settings of the file stay there; flags win over it."""
    file = tmp_path / "my config.toml"
    model, head = (str(published(name)) for name in ("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7"))
    file.write_text(
        f"model = {model!r}\nquantization = 'none'\nspeculative-algorithm = 'DSPARK'\n"
        f"speculative-draft-model-path = {head!r}\n"
    )
    line = dry_run("--config", file, "--assume-device", "L4").document["command"]["line"]
    assert (
        line.startswith(f"specjax serve --config '{file}' --quantization int8 ")
        and "model" not in line[len(str(file)) + 24 :]
    )
    assert dry_run(*shlex.split(line)[2:], "--assume-device", "L4").status == 0


def test_best_command_on_a_cpu(tiny, dry_run):
    """The pool has a fixed size on a CPU, and becomes smaller."""
    first = dry_run("--model", tiny / "model", "--max-total-tokens", 10**10)
    command = first.document["command"]
    assert 1000 < command["pool_tokens"] < 10**10 and f"--max-total-tokens {command['pool_tokens']}" in command["line"]


def test_pool_too_small_to_be_of_use(published, dry_run):
    """The engine starts, and its pool holds hundreds of tokens."""
    given = ["--model", published("Qwen/Qwen3-4B"), "--assume-device", "T4", "--mem-fraction", 0.525]
    output = dry_run(*given, "--speculative-algorithm", "NONE", text=True)
    assert output.status == 0 and output.document["pool_tokens"] < 2048
    assert [*output.document["speeds"]] == ["1"], "more requests have no room for their texts"
    assert output.document["reads"]["context"] == min(1024, output.document["pool_tokens"])
    assert output.document["command"]["pool_tokens"] > 2048 and "--mem-fraction-static 0.9" in output.text


def test_nothing_fits(published, dry_run):
    model = "deepseek-ai/DeepSeek-V3-0324"
    output = dry_run("--model", published(model), "--assume-device", "T4", text=True)
    assert output.document["command"] is None and "change: a smaller model; no settings and no listed" in output.text


# Mixtures.


def test_experts_that_a_batch_reads(published, dry_run):
    """The mean over all choices of 2 of 4 experts by up to three tokens, and the bytes of a step."""
    config = checkpoint.model_config(MIXTURE)
    small = replace(config, experts=replace(config.experts, per_token=2, count=4))
    for tokens in (1, 2, 3):
        chosen = [len({*sum(choice, ())}) for choice in product(combinations(range(4), 2), repeat=tokens)]
        assert 4 * experts_read(small, tokens) == pytest.approx(sum(chosen) / len(chosen))
    assert experts_read(replace(config, experts=None), 7) == 1
    model = ["--model", published("Qwen/Qwen3-30B-A3B"), "--assume-device", "H200", "--speculative-algorithm", "NONE"]
    output = dry_run(*model, text=True)
    document, experts = output.document, 2 * 48 * 128 * 3 * 2048 * 768
    others = document["reads"]["forward"] - experts * 8 // 128
    for batch, read in ((1, 8 / 128), (8, 1 - (120 / 128) ** 8), (48, 1 - (120 / 128) ** 48)):
        size = others + experts * read + batch * 1024 * document["token_bytes"]
        assert document["speeds"][str(batch)] == pytest.approx(batch * 4.8e12 / size, rel=1e-5)
        assert document["experts"][str(batch)] == round(128 * read, 1)
    assert "reading 51.6 experts of a layer, if chosen evenly" in output.text


def test_16_bits_before_ampere(published, dry_run):
    """A T4 has no bfloat16. Gemma's and gpt-oss's activations are too large for float16."""
    flags = "--assume-device", "T4", "--speculative-algorithm", "NONE"
    dtypes = {"Qwen/Qwen3-4B": "float16", "openai/gpt-oss-20b": "bfloat16"}
    for model, dtype in dtypes.items():
        assert dry_run("--model", published(model), *flags).document["dtype"] == dtype
    assert dry_run("--model", published("Qwen/Qwen3-4B"), "--assume-device", "L4").document["dtype"] == "bfloat16"


# Flags.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--assume-device H200", "error: --assume-device needs --dry-run"),
        ("--dry-run --assume-device B9", "error: argument --assume-device: invalid choice: 'B9' (choose from "),
        ("--dry-run --model ./nowhere", "the model './nowhere' looks like a path"),
        ("--dry-run --context-length 1000000", "--context-length 1000000 exceeds the model's 131072 positions"),
        (
            "--dry-run --speculative-algorithm EAGLE3",
            "--speculative-draft-model-path is missing: EAGLE3 needs a draft head",
        ),
        ("--dry-run --tokenizer-path ./nowhere", "(tokenizer_path, --tokenizer-path) is not a folder"),
    ],
)
def test_refused(configs, capsys, argv, message):
    try:
        status = command.main(["--model", str(configs / "8b"), *argv.split()])
    except SystemExit as end:  # argparse
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "") and printed.err.startswith("specjax serve: ") and message in printed.err


def test_measured_speed_of_this_machine(tiny, dry_run):
    flags = "--speculative-algorithm", "NONE", "--max-running-requests", 2
    output = dry_run("--model", tiny / "model", *flags, text=True)
    device = output.document["device"]
    assert output.status == 0 and output.document["dtype"] == "float32"
    assert device["bandwidth"] > 1e8 and "measured: a copy" in output.text
    assert output.document["memory"]["limit"] == int(device["memory"] * 0.85)
    # 10^10 tokens of 3 layers exceed any machine's memory.
    assert dry_run("--model", tiny / "model", "--max-total-tokens", 10**10).status == 1


GEMMA_4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16",
    "text_config": {
        "num_hidden_layers": 12, "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 6,
    },
}  # fmt: skip
"""E4B with fewer layers, which are what a dry run takes time for."""


def test_pages_in_windows_and_embeddings_of_layers(configs, dry_run):
    (configs / "gemma4").mkdir()
    (configs / "gemma4" / "config.json").write_text(json.dumps(GEMMA_4))
    argv = "--model", configs / "gemma4", "--assume-device", "h200", "--speculative-algorithm", "NONE"
    document, text = dry_run(*argv).document, dry_run(*argv, text=True).text
    sliding, full = 5 * 2 * 2 * 256 * 2, 2 * 2 * 512 * 2
    assert document["token_bytes"] == sliding + full and document["window_token_bytes"] == sliding
    assert document["layer_embeddings"] == 262144 * 12 * 256 * 2
    assert f"token     {sliding + full} bytes in pages, 71% in layers that see at most 512 tokens" in text
    assert "1.611 GB are the layers' own embeddings, of which a token reads a row" in text
    read = document["memory"]["weights"] - document["reads"]["forward"]
    assert read == document["layer_embeddings"], "a token reads a row"


def test_embeddings_of_layers_that_do_not_fit(configs, dry_run):
    """E4B in 16 bits on 16 GB: the report has the table's bytes, and what would work."""
    (configs / "e4b").mkdir()
    (configs / "e4b" / "config.json").write_text(json.dumps(PUBLISHED["google/gemma-4-E4B-it"]))
    argv = "--model", configs / "e4b", "--assume-device", "t4", "--speculative-algorithm", "NONE"
    text = dry_run(*argv, text=True).text
    assert "5.637 GB are the layers' own embeddings" in text and text.rstrip().endswith("does not fit")
    assert "why: no memory is left for the KV pool" in text and "change: --quantization int8" in text
    document = dry_run(*argv, "--quantization", "int8").document
    assert document["fits"] and 0.5 <= document["layer_embeddings"] / 5.637e9 < 0.51
