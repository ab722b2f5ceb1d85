"""Decoding speed by how weights are stored: the engine with and without drafts, llama.cpp and transformers.

    PYTHONPATH=FOLDER_WITH_LLAMA_CPP python benchmarks/storage.py [--storages f32 f16 q8_0 q4_1] [--limit 10] [--record]

The built-in model's GGUF (Q4_1) is dequantised and written as F32, F16 and Q8_0; all engines read the same files. The
texts of f32, q4_1 and f16 should be equal: f32 and q4_1 have equal weights, and f16 rounds them slightly.

    none, ngram, auto   specjax
    llama.cpp           llama-cpp-python; llama.cpp-lookup: with its prompt lookup
    transformers        with the dequantised weights in float32

Greedy, one request at a time, 128 tokens a prompt. Contenders take turns in a rotating order. The table has tokens per
second, with the prompt's forward. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from gguf.quants import quantize
from peers import LlamaCpp, gguf_file
from records import DATA, finish, machine, read_prompts
from tqdm import tqdm

from specjax import Engine, EngineConfig, SamplingParams, checkpoint
from specjax.bench.run import compare_texts, logit_gap

STORAGES = ("f32", "f16", "q8_0", "q4_1")
ENGINES = {"none": "NONE", "auto": "AUTO", "ngram": "NGRAM"}
LLAMA_CPP = ("llama.cpp", "llama.cpp-lookup")
TRANSFORMERS = "transformers-float32"


Contender = Callable[[list[int], int], tuple[list[int], float]]
"""(prompt, tokens to emit) -> tokens, seconds."""


def make_engine(model: str, algorithm: str) -> Engine:
    config = EngineConfig(max_running_requests=1, max_total_tokens=4096, prefix_cache=False, adaptive=False)
    engine = Engine.from_pretrained(model, draft=algorithm, config=config, progress=False)
    engine.warm_up(engine.buckets.first_keys())
    return engine


def engine_contender(engine: Engine) -> Contender:
    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        started = perf_counter()
        completion = engine.generate(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        return completion.output_ids, perf_counter() - started

    return run


def transformers_contender(model: Any) -> Contender:
    import torch

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        started, ids = perf_counter(), torch.tensor([prompt])
        options = {"max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return output[0, len(prompt) :].tolist(), perf_counter() - started

    return run


def llama_cpp_contender(file: Path, threads: int, *, lookup: bool) -> Contender:
    model = LlamaCpp.open(file, threads, lookup=lookup)

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        done = model.complete([prompt], [SamplingParams(max_new_tokens=count, ignore_eos=True)])
        return done.completions[0].output_ids, done.seconds

    return run


def rewrite(file: Path, to: Path, kind: GGMLQuantizationType) -> None:
    """Writes the same model with its matrices in another type."""
    reader = GGUFReader(str(file))
    writer = GGUFWriter(to, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        value, kinds = field.contents(), field.types
        writer.add_key_value(key, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def contenders_of(args: argparse.Namespace) -> Iterator[tuple[dict[str, Contender], dict[str, Engine]]]:
    """All contenders and the engines among them, by name."""
    contenders: dict[str, Contender] = {}
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = gguf_file(checkpoint.BUILT_IN_MODEL, folder)
        for storage in args.storages:
            file = folder / f"smollm2-135m-instruct.{storage}.gguf"
            if storage == "q4_1":
                file.symlink_to(source)
            else:
                rewrite(source, file, GGMLQuantizationType[storage.upper()])
            for kind in args.contenders:
                name = f"{kind}-{storage}"
                if kind in ENGINES:
                    engines[name] = make_engine(str(file), ENGINES[kind])
                    contenders[name] = engine_contender(engines[name])
                elif kind in LLAMA_CPP:
                    contenders[name] = llama_cpp_contender(file, args.threads, lookup=kind == "llama.cpp-lookup")
        if TRANSFORMERS in args.contenders:
            from transformers import AutoModelForCausalLM

            plain = folder / "float"
            plain.mkdir()
            checkpoint.save_dequantised(checkpoint.resolve(checkpoint.BUILT_IN_MODEL), plain)
            model = AutoModelForCausalLM.from_pretrained(plain, dtype="float32").eval()
            contenders[TRANSFORMERS] = transformers_contender(model)
        yield contenders, engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*ENGINES, *LLAMA_CPP, TRANSFORMERS)
    parser.add_argument("--storages", nargs="+", default=STORAGES, choices=STORAGES)
    parser.add_argument("--contenders", nargs="+", default=every, choices=every)
    parser.add_argument("--set", default="mt_bench", help="a set of specjax/data/prompts")
    parser.add_argument("--limit", type=int, default=10, help="number of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of llama.cpp")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/storage-<date>.json")
    args = parser.parse_args()
    with contenders_of(args) as (contenders, engines):
        if not engines:
            parser.error(f"--contenders must name one of {', '.join(ENGINES)}, which renders the prompts")
        engine = next(iter(engines.values()))
        prompts = {
            id: engine.encode([{"role": "user", "content": text}])
            for id, text in read_prompts(DATA / f"{args.set}.jsonl", args.limit)
        }
        runs: dict[str, dict[str, tuple[list[int], float]]] = {name: {} for name in contenders}
        for index, (id, prompt) in enumerate(tqdm(prompts.items())):
            turn = index % len(contenders)
            for name in [*contenders][turn:] + [*contenders][:turn]:
                runs[name][id] = contenders[name](prompt, args.max_new_tokens)
        rows: dict[str, Any] = {}
        for name, answers in runs.items():
            rate = sum(len(tokens) for tokens, _ in answers.values()) / sum(seconds for _, seconds in answers.values())
            samples = [{"id": id, "seconds": round(seconds, 4)} for id, (_, seconds) in answers.items()]
            rows[name] = {"tokens_per_second": round(rate, 2), "samples": samples}
            print(f"{name:24}{rate:8.1f} tokens/s")
        texts: dict[str, dict[str, int]] = {}
        if "none-f32" in engines:
            gap = partial(logit_gap, engines["none-f32"])
            turns = {
                name: [(prompts[id], tokens) for id, (tokens, _) in answers.items()] for name, answers in runs.items()
            }
            texts = {name: compare_texts(turns[name], turns["none-f32"], gap) for name in contenders}
        for name, counts in texts.items():
            print(f"{name:28}texts as none-f32: {', '.join(f'{n} {verdict}' for verdict, n in counts.items() if n)}")
    document = machine() | {"threads": args.threads, "limit": args.limit}
    finish("storage", document | {"contenders": rows, "texts": texts}, record=args.record)


if __name__ == "__main__":
    main()
