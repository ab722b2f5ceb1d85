"""Mutated files of models, heads and settings: each gives a clean error or a load, within bounds of time and memory.

A mutation is a function of its format and its number, which a failure prints. To repeat one:

    SPECJAX_FUZZ=123 python -m pytest tests/checkpoint/test_fuzz_files.py -k safetensors
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_helpers import tokenizer
from quantised_formats import FORMATS as QUANTISED
from test_quantised_checkpoints import save_quantised
from tiny_blocks import save_block
from tiny_checkpoints import save_llama, save_model, write_gguf
from tiny_heads import save_head

from specjax import checkpoint
from specjax.checkpoint import CheckpointError, gguf
from specjax.cli import flags
from specjax.config import ModelConfig
from specjax.limits import ParameterError
from specjax.models import make_target
from specjax.models.rope import inverse_frequencies
from specjax.settings import Parser, SettingsError, add_flags, read

MAX_SECONDS, MAX_BYTES = 10, 500 << 20  # of processor time and resident memory
FEW, MANY = 300, 10_000

# Loading, as a start of the server does it.


def load_model(folder: Path) -> ModelConfig:
    files = checkpoint.resolve(str(folder), progress=False)
    config = checkpoint.model_config(files.config)
    checkpoint.effective_quantization(files.name, files.config, config, "auto")
    checkpoint.stop_token_ids(files, vocab_size=config.vocab_size)
    checkpoint.sampling_defaults(files)
    checkpoint.bits_per_weight(files.config)
    checkpoint.mtp_config(files, config)
    checkpoint.load_params(files, config, progress=False)
    make_target(config)
    inverse_frequencies(config.rope, config.head_dim)
    return config


def load_gguf(folder: Path) -> None:
    converted = folder / "converted"
    shutil.rmtree(converted, ignore_errors=True)
    converted.mkdir()
    gguf.convert(folder / "x.gguf", converted, progress=False)
    config = load_model(converted)
    checkpoint.load_tokenizer(checkpoint.resolve(str(converted))).encode("hello <|im_end|>")
    assert config.family == "llama"


def load_words(folder: Path) -> None:
    files = checkpoint.resolve(str(folder), progress=False, outline=True)
    words = checkpoint.load_tokenizer(files)
    words.decode(words("hello <|im_end|>").input_ids)
    checkpoint.stop_token_ids(files, words, 300)


def load_settings(folder: Path) -> None:
    parser = Parser(prog="specjax serve")
    add_flags(parser, flags.Settings())
    read(parser.parse_args(["--config", str(folder / "x.toml")]), flags.Settings())


TARGET = {"hidden_size": 16, "vocab_size": 31, "num_hidden_layers": 8, "num_attention_heads": 4}


def head_loader(kind: str) -> Callable[[Path], Any]:
    def load(folder: Path) -> None:
        target = checkpoint.model_config({"architectures": ["LlamaForCausalLM"], "intermediate_size": 8} | TARGET)
        checkpoint.describe_head(str(folder), target, kind=kind)
        checkpoint.load_head(str(folder), target, kind=kind, progress=False)

    return load


# Mutations. Numbers at the ends of their types, and texts, lists and objects of other kinds.

ODD = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 255, 2**16, 10**6, 2**31 - 1, 2**31, 10**9, 2**32, 2**53, 2**62, 2**63,
    2**64, 10**30, 0.0, -0.5, 1e-300, 1e30, 1e300, float("inf"), float("nan"), "", "x", "\x00", "\ud800", "1", [], {},
    [1], [[1]], {"a": 1}, [0] * 99, [None], "default", "a b", "é" * 5000,
]  # fmt: skip
WIDTHS = [0, 1, 2, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def mutate_bytes(data: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """One to four changes of the first ``end`` bytes: numbers, bits, and parts cut, doubled or swapped."""
    whole = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not whole:
            break
        at = rng.randrange(min(end or len(whole), len(whole)))
        to = at + rng.choice((1, 2, 4, 8, 100))
        match rng.randrange(7):
            case 0:
                whole[at] ^= 1 << rng.randrange(8)
            case 1 | 2:
                size = rng.choice((1, 2, 4, 8))
                whole[at : at + size] = (rng.choice(WIDTHS) % 256**size).to_bytes(size, "little")
            case 3:
                whole[at:to] = rng.randbytes(rng.randint(0, 9))
            case 4:
                whole[at:at] = whole[at:to]
            case 5:
                del whole[at:to]
            case 6 if rng.random() < 0.2:
                del whole[at:]
    return bytes(whole)


def mutate_json(value: Any, rng: random.Random) -> str:
    """One to three values replaced, scaled, removed, copied to other places or nested deeply."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        parent, key = rng.choice([*places({"": value})][1:] or [({"": value}, "")])
        match rng.randrange(8):
            case 0:
                del parent[key]
            case 1:
                other, place = rng.choice([*places(value)] or [({"": 1}, "")])
                parent[key] = copy.deepcopy(other[place])
            case 2 if isinstance(parent[key], int | float):
                parent[key] *= rng.choice((-1, 0, 2, 0.5, 10**6, 10**9))
            case 3 if isinstance(parent, dict):
                parent[rng.choice(["", "x", *map(str, value)])] = parent.pop(key)
            case 4 if rng.random() < 0.1:
                for _ in range(rng.choice((10, 200))):
                    parent[key] = rng.choice(([parent[key]], {"": parent[key]}))
            case 5 if isinstance(parent[key], list):
                parent[key] = parent[key] * rng.choice((0, 2, 50))
            case _:
                parent[key] = copy.deepcopy(rng.choice(ODD))
    return json.dumps(value)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value inside as (container, key)."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    return mutate_bytes(data, rng)


def change_gguf(data: bytes, rng: random.Random) -> bytes:
    """Mostly the keys, which are followed by the tensors' names and places."""
    end = data.index(b"output.weight")
    return mutate_bytes(data, rng, rng.choice((100, 700, end, len(data))))


def change_json(data: bytes, rng: random.Random) -> bytes:
    text = mutate_json(json.loads(data), rng).encode()
    if rng.random() < 0.02:
        text = text.replace(b":", b":" + b"[" * 5000, 1)
    return mutate_bytes(text, rng) if rng.random() < 0.1 else text


def change_safetensors(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return mutate_bytes(data, rng, 8 + length)
    header = change_json(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def change_bin(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            target.writestr(info, mutate_bytes(content, rng) if info.filename.endswith("data.pkl") else content)
    return out.getvalue()


def change_toml(data: bytes, rng: random.Random) -> bytes:
    lines = data.decode().splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition(" = ")
        if equals and rng.random() < 0.7:
            odd = [*map(json.dumps, ODD), "1979-05-27", "0x7f", "[[1, 2], 'a']", "[" * 3000, "{a.b = 1}", "'''", "1_0"]
            lines[at] = f"{key} = {rng.choice(odd)}"
        else:
            lines.insert(rng.randrange(len(lines)), lines[at])
    text = "\n".join(lines).encode()
    return mutate_bytes(text, rng) if rng.random() < 0.5 else text


# Formats.


class Format(NamedTuple):
    file: str  # that is changed
    save: Callable[[Path], Any]
    load: Callable[[Path], Any]
    change: Callable[[bytes, random.Random], bytes] = change_json


def save_gguf(folder: Path) -> None:
    write_gguf(folder / "x.gguf", save_llama(folder / "source"), extra={}, metadata={"llama.rope.scaling.factor": 2.0})


def save_words(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def save_toml(folder: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "configs" / "smollm2-135m-instruct-eagle3.toml", folder / "x.toml")


def model(architecture: str, **changes: Any) -> Format:
    return Format("config.json", lambda folder: save_model(folder, architecture, **changes), load_model)


MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
DELTA = MOE | {
    "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "shared_expert_intermediate_size": 20,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
          "original_max_position_embeddings": 32}  # fmt: skip

CONFIGS: dict[str, Format] = {
    "llama": model("LlamaForCausalLM", rope_parameters=LLAMA3),
    "qwen2": model("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "moe": model("Qwen3MoeForCausalLM", **MOE, rope_parameters=YARN),
    "deepseek": model("DeepseekV3ForCausalLM", **LATENT),
    "gpt-oss": model("GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "gemma3": model("Gemma3ForCausalLM", head_dim=8, query_pre_attn_scalar=8),
    "delta": model("Qwen3NextForCausalLM", **DELTA),
    **{
        f"quantised {name}": Format("config.json", lambda folder, name=name: save_quantised(folder, name), load_model)
        for name in QUANTISED
    },
    **{
        f"head {kind}": Format("config.json", lambda folder, kind=kind: save_head(folder, kind), head_loader(kind))
        for kind in ("eagle", "eagle3", "mtp")
    },
    "head block": Format("config.json", lambda folder: save_block(folder, "dflash2"), head_loader("block")),
}  # fmt: skip
FORMATS: dict[str, list[Format]] = {
    "gguf": [Format("x.gguf", save_gguf, load_gguf, change_gguf)],
    "safetensors": [
        form._replace(file="model.safetensors", change=change_safetensors)
        for name, form in CONFIGS.items()
        if not name.startswith("head")
    ],
    "bin": [
        Format("pytorch_model.bin", lambda folder: save_head(folder, "eagle", format="bin"), head_loader("eagle"),
               change_bin),
    ],
    "tokenizer.json": [Format("tokenizer.json", save_words, load_words)],
    "tokenizer_config.json": [Format("tokenizer_config.json", save_words, load_words)],
    "config.json": [*CONFIGS.values()],
    "toml": [Format("x.toml", save_toml, load_settings, change_toml)],
}  # fmt: skip


class Overtime(BaseException):
    pass


@contextmanager
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Overtime

    before = signal.signal(signal.SIGPROF, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # A backstop: mappings beyond it fail, while resident memory is what is measured.
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + 8 * MAX_BYTES, limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _memory(name: str) -> int:
    """Bytes of this process: VmSize, VmRSS, or VmHWM, the largest VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def attempt(form: Format, folder: Path) -> str:
    """What is wrong with loading the changed file; empty: nothing."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    before, start, problem = _memory("VmRSS"), time.process_time(), ""
    signal.setitimer(signal.ITIMER_PROF, 2 * MAX_SECONDS)
    try:
        form.load(folder)
    except (CheckpointError, ParameterError, SettingsError) as error:
        message = str(error)
        if not any(name in message for name in (str(folder), form.file)) or len(message) > 3000:
            problem = f"the message names no file, or is long: {message[:500]}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"{type(error).__name__}: {error!s:.300} at {_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds, grown = time.process_time() - start, _memory("VmHWM") - before
    if seconds > MAX_SECONDS or grown > MAX_BYTES:
        problem += f" took {seconds:.1f} s and {grown >> 20} MB"
    return problem


def _line(error: BaseException) -> str:
    trace, line = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "specjax" in code.co_filename:
            line = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def fuzz(name: str, count: int, folder: Path) -> None:
    forms, failures = FORMATS[name], []
    for i, form in enumerate(forms):
        (folder / str(i)).mkdir()
        form.save(folder / str(i))
        form.load(folder / str(i))  # whole files load
    originals = [(folder / str(i) / form.file).read_bytes() for i, form in enumerate(forms)]
    chosen = os.environ.get("SPECJAX_FUZZ")
    with alarm():
        for seed in [int(chosen)] if chosen else range(count):
            i = seed % len(forms)
            file = folder / str(i) / forms[i].file
            file.unlink()  # earlier tensors may be views of the file
            file.write_bytes(forms[i].change(originals[i], random.Random(f"{name} {seed}")))
            if problem := attempt(forms[i], folder / str(i)):
                failures.append(f"SPECJAX_FUZZ={seed} ({name} {i}): {problem}")
                if len(failures) == 50:
                    break
    assert not failures, "\n".join(failures)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_mutations_repeat():
    """A mutation depends on its number only, or a failure could not be repeated."""
    value = {"a": [1, {"b": 2.0}], "c": "x"}
    first, again = ([mutate_json(value, random.Random(seed)) for seed in range(500)] for _ in range(2))
    assert first == again


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files(name, tmp_path):
    fuzz(name, FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutated_files(name, tmp_path):
    fuzz(name, MANY, tmp_path)
