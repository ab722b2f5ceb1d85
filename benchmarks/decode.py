"""Parts of the benchmarks that decode one request at a time, such as `storage.py`.

Every contender completes every prompt, one after another and in an order that rotates, so that whatever else the
machine does hits all of them. Each emits exactly the same number of tokens. Between sets the drafter forgets what it
has seen.

Decoding reads every weight once a forward, so the bandwidth of the memory bounds forwards per second. A contender's
share of that ceiling is the weights it reads per second while decoding, over the bandwidth. A row of the table:

    end to end   tokens / second, the prompt's forward included
    decode       tokens / second after the first arrival (the token that the prompt's forward draws, or a little more)
    accept       tokens / forward, without the prompt's
    step         ms from arrival to arrival: median, 20th and 80th percentile

`specjax bench` compares methods; what it does not measure is this share, and storages of one model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from specjax import Engine, SamplingParams
from specjax.bench.methods import Answer, EngineContender, TransformersContender
from specjax.bench.methods import Contender as Measured
from specjax.bench.run import NEAR

ENGINE = {"none": "NONE", "auto": "AUTO", "ngram": "NGRAM"}


class Run(NamedTuple):
    """One prompt, one contender."""

    tokens: list[int]
    arrivals: list[
        tuple[float, int]
    ]  # seconds since the start, tokens so far; one entry for each forward that was read
    forwards: int  # without the prompt's

    @property
    def seconds(self) -> float:
        return self.arrivals[-1][0]

    @property
    def steps(self) -> list[float]:
        """Milliseconds from arrival to arrival."""
        return [1e3 * (after[0] - before[0]) for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def decoding(self) -> tuple[int, float]:
        """Tokens after the first arrival, and the seconds they took."""
        (first, before), (last, after) = self.arrivals[0], self.arrivals[-1]
        return after - before, last - first


class Contender(NamedTuple):
    run: Callable[[list[int], int], Run]  # (prompt, tokens to emit)
    forget: Callable[[], Any]
    weight_bytes: int  # that a forward reads


# The contenders.


def _contender(measured: Measured, weight_bytes: int) -> Contender:
    def run(prompt: list[int], count: int) -> Run:
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        answer: Answer = measured.run([prompt], [sampling]).answers[0]
        return Run(answer.tokens, answer.arrivals, sum(answer.histogram))

    return Contender(run, measured.forget, weight_bytes)


def engine_contender(engine: Engine) -> Contender:
    return _contender(EngineContender(engine), weight_bytes(engine))


def weight_bytes(engine: Engine) -> int:
    """Bytes of all parameters but the embedding, of which a forward reads a row; a tied one is also the head."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params.target))
    return total if engine.target.config.tied_embeddings else total - engine.params.target["embed"].nbytes


def transformers_contender(model: Any, bytes_read: int, **how: Any) -> Contender:
    return _contender(TransformersContender(model, how, ()), bytes_read)


def load_transformers(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


# What is measured.


def read_bandwidth() -> float:
    """Bytes per second at which the device reduces an array that fits no cache: the best of many times."""
    array = jnp.ones(2**27, jnp.float32)
    seconds = []
    for reduce in (jnp.sum, jnp.max):
        run = jax.jit(reduce)
        run(array).block_until_ready()
        for _ in range(10):
            started = time.perf_counter()
            run(array).block_until_ready()
            seconds.append(time.perf_counter() - started)
    return array.nbytes / min(seconds)


def measure(
    contenders: dict[str, Contender], prompts: dict[str, list[int]], count: int, name: str
) -> dict[str, dict[str, Run]]:
    """Every contender on every prompt: {contender: {prompt id: run}}."""
    runs: dict[str, dict[str, Run]] = {contender: {} for contender in contenders}
    for contender in contenders.values():
        contender.forget()
    with tqdm(total=len(prompts) * len(contenders), desc=name, unit="run") as bar:
        for index, (id, prompt) in enumerate(prompts.items()):
            turn = index % len(contenders)
            for contender in [*contenders][turn:] + [*contenders][:turn]:
                run = contenders[contender].run(prompt, count)
                arrived = run.arrivals[-1][1]
                assert len(run.tokens) == count == arrived, (contender, id, len(run.tokens), arrived)
                runs[contender][id] = run
                bar.update()
    return runs


def summary(runs: dict[str, Run], contender: Contender, bandwidth: float) -> dict[str, Any]:
    """One row of the table, and its samples."""
    each = list(runs.values())
    steps = [step for run in each for step in run.steps]
    tokens, seconds = map(sum, zip(*(run.decoding for run in each), strict=True))
    forwards = sum(run.forwards for run in each)
    low, median, high = np.percentile(steps, (20, 50, 80))
    return {
        "tokens_per_second": round(sum(len(run.tokens) for run in each) / sum(run.seconds for run in each), 2),
        "decode_tokens_per_second": round(tokens / seconds, 2),
        "accept_length": round(sum(len(run.tokens) - 1 for run in each) / forwards, 4),
        "step_ms": {"p20": round(low, 2), "median": round(median, 2), "p80": round(high, 2)},
        "share_of_ceiling": round(len(steps) * contender.weight_bytes / seconds / bandwidth, 3),
        "samples": [
            {
                "id": id,
                "seconds": round(run.seconds, 4),
                "first_seconds": round(run.arrivals[0][0], 4),
                "decode_tokens": run.decoding[0],
                "forwards": run.forwards,
                "step_ms": round(statistics.median(run.steps), 3),
            }
            for id, run in runs.items()
        ],
    }


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """How many times as fast, end to end and while decoding: over all prompts, and the median over them."""
    pairs = list(zip(ours["samples"], theirs["samples"], strict=True))

    def decode_rate(sample: dict[str, Any]) -> float:
        return sample["decode_tokens"] / (sample["seconds"] - sample["first_seconds"])

    return {
        "total": round(ours["tokens_per_second"] / theirs["tokens_per_second"], 3),
        "median": round(statistics.median(b["seconds"] / a["seconds"] for a, b in pairs), 3),
        "decode_total": round(ours["decode_tokens_per_second"] / theirs["decode_tokens_per_second"], 3),
        "decode_median": round(statistics.median(decode_rate(a) / decode_rate(b) for a, b in pairs), 3),
    }


def same_texts(ours: Run, theirs: Run, prompt: list[int], oracle: Any) -> str:
    """ "equal", "near tie" (float32 logits where they part are closer than `NEAR`) or "different"."""
    if ours.tokens == theirs.tokens:
        return "equal"
    at = next(i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b)
    if oracle is None:
        return "different"
    import torch

    with torch.inference_mode():
        best = oracle(torch.tensor([prompt + ours.tokens[:at]])).logits[0, -1].topk(2)
    near = set(best.indices.tolist()) == {ours.tokens[at], theirs.tokens[at]}
    return "near tie" if near and float(best.values[0] - best.values[1]) < NEAR else "different"


def show(rows: dict[str, dict[str, Any]]) -> None:
    print(f"{'':24}{'end to end':>12}{'decode':>9}{'accept':>8}{'step':>8}{'p20':>7}{'p80':>7}{'share':>8}")
    for name, row in rows.items():
        step = row["step_ms"]
        print(
            f"{name:24}{row['tokens_per_second']:12.1f}{row['decode_tokens_per_second']:9.1f}"
            f"{row['accept_length']:8.2f}{step['median']:8.1f}{step['p20']:7.1f}{step['p80']:7.1f}"
            f"{row['share_of_ceiling']:8.0%}"
        )
