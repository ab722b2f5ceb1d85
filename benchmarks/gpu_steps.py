"""Steps of 8B models with random weights, measured by an engine: milliseconds by wall clock, host and kernels."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from model_shapes import block_head, eagle3_head, kv_bytes, least_bytes, nbytes, qwen3_8b, random_head, random_target
from timing import WARMUP, Trace

from specjax import Eagle3, Engine, EngineConfig, ModelConfig, Params, SamplingParams, make_speculation, make_target
from specjax.drafters import Speculation, options_of


class TokenIds:
    """The parts of a tokenizer that an engine needs for token ids."""

    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    unk_token_id = None

    def convert_tokens_to_ids(self, names: list[str]) -> list[int]:
        return list(range(len(names)))

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"{token} "

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(self.convert_ids_to_tokens, tokens))


class Case(NamedTuple):
    """A step: the algorithm, and the steps, top-k and draft tokens (with the root) of its tree."""

    algorithm: str
    tree: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        return {"NONE": "plain", "DFLASH": "block head"}.get(self.algorithm, str(self.tree))


PLAIN, CHAIN, WIDE_TREE = Case("NONE"), Case("EAGLE3", (7, 1, 8)), Case("EAGLE3", (5, 8, 32))
BLOCK = Case("DFLASH", (15, 1, 16))

HEAD_WEIGHTS = Eagle3().weights("the head", "bfloat16", "gpu", otherwise="none")  # the server's default on a GPU


def model_of(shape: Callable[[int], ModelConfig], *, tiny: bool, layers: int | None = None) -> ModelConfig:
    """The 8B model, or a small one of its family. `layers`: default: all, or 2."""
    if not tiny:
        return shape(layers or (36 if shape is qwen3_8b else 32))
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
    return dataclasses.replace(shape(2), **sizes, head_dim=16)


class Model:
    """An 8B shape with random weights, and the draft head of the last case."""

    def __init__(self, shape: Callable[[int], ModelConfig], *, tiny: bool) -> None:
        self.tiny, self.config = tiny, model_of(shape, tiny=tiny)
        self.target = make_target(self.config)
        self.params = jax.block_until_ready(Params(random_target(self.config), ()))
        self._head: tuple[str, Any, Any] = ("NONE", None, ())  # algorithm, config, parameters

    def head(self, algorithm: str) -> tuple[Any, Any]:
        """The config and the parameters of a head."""
        if self._head[0] != algorithm:
            config = {"NONE": lambda _: None, "EAGLE3": eagle3_head, "DFLASH": block_head}[algorithm](self.config)
            self._head = algorithm, config, ()  # frees the head before
            params = () if config is None else random_head(config, self.config, quantization=HEAD_WEIGHTS)
            self._head = algorithm, config, jax.block_until_ready(params)
        return self._head[1:]

    def speculation(self, case: Case) -> Speculation:
        if case.tree is None:
            return make_speculation(case.algorithm)
        options = options_of(case.algorithm, **dict(zip(("steps", "topk", "nodes"), case.tree, strict=True)))
        return make_speculation(options, target=self.target, head=self.head(case.algorithm)[0])

    def roofline_bytes(self, case: Case, cached_tokens: int) -> float:
        """Bytes that a step must read: weights, keys and values, once for each forward. A block head runs once."""
        head, params = self.head(case.algorithm)
        levels = 0 if head is None else 1 if case.algorithm == "DFLASH" else self.speculation(case).drafter.depth
        own = head if case.algorithm == "EAGLE3" else None
        weights = sum(least_bytes(self.config, own, levels, quantization=HEAD_WEIGHTS).values())
        if case.algorithm == "DFLASH":  # with the target's output layer
            weights += nbytes(params) + nbytes(self.params.target["head"])
        return weights + cached_tokens * (kv_bytes(self.config) + (levels and levels * kv_bytes(head)))

    def measure_steps(self, case: Case, batch: int) -> dict[str, Any]:
        """Times of an engine's steps, which do not depend on the number of accepted drafts."""
        speculation = self.speculation(case)
        context, count = (24, 4) if self.tiny else (1024, 32)
        # The first requests decode while the prompts of the others are read, 256 tokens an iteration.
        limit = 3 * (2 * count + WARMUP + batch * context // 256)
        room = context + limit + 2 * (speculation.drafter.depth + 1)
        config = EngineConfig(batch, context_length=room, max_total_tokens=batch * (room + 16), prefix_cache=False)
        params = Params(self.params.target, self.head(case.algorithm)[1])
        engine = Engine(self.target, params, TokenIds(), speculation, config=config)
        begun = time.perf_counter()
        engine.warm_up([engine.buckets.step(engine.buckets.batches[-1])], progress=False)
        compile_seconds = round(time.perf_counter() - begun, 1)
        prompts = np.random.default_rng(0).integers(0, self.config.vocab_size, (batch, context)).tolist()
        requests = [engine.add(prompt, SamplingParams(max_new_tokens=limit, ignore_eos=True)) for prompt in prompts]
        while not all(request.output.tokens for request in requests):
            engine.step()
        seconds, waits, read = [], [], engine.device.read

        def timed_read(output: Any) -> np.ndarray:
            begun = time.perf_counter()
            values = read(output)
            waits.append(time.perf_counter() - begun)
            return values

        engine.device.read = timed_read
        for _ in range(WARMUP + count):
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
        hosts = [total - wait for total, wait in zip(seconds, waits, strict=True)]
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            with jax.profiler.trace(folder):
                changed = [engine.step() for _ in range(count // 2)]
            kernels = Trace(Path(folder)).device()
        engine.reset("measured")
        if any(len(requests) < batch for requests in changed):
            raise RuntimeError("a request ended before the measurement")
        durations = Counter[str]()
        for kernel in kernels:
            durations[kernel["name"]] += kernel["dur"] / 1e3 / len(changed)
        return {
            "case": str(case), "tree": case.tree, "batch": batch, "context": context,
            "compile_seconds": compile_seconds, "milliseconds": round(1e3 * statistics.median(seconds[WARMUP:]), 4),
            "host_milliseconds": round(1e3 * statistics.median(hosts[WARMUP:]), 4),
            "kernel_milliseconds": round(sum(durations.values()), 4), "kernels": round(len(kernels) / len(changed), 1),
            "slowest_kernels": [[name, round(value, 5)] for name, value in durations.most_common(20)],
            "samples_ms": [round(1e3 * value, 4) for value in seconds[WARMUP:]],
        }  # fmt: skip
