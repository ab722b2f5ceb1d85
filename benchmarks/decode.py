"""One request at a time: the engine, with and without speculation, and transformers on the same weights.

    python benchmarks/decode.py [--data specjax/data/prompts] [--sets mt_bench eagle_sum] [--limit 10] [--record]

Contenders: `none`, `auto` (how the model is served by default) and `ngram` are the engine; `transformers` is its greedy
`generate`, `lookup` the same with prompt-lookup (10 tokens), each in float32 and bfloat16. `module:function` is the
engine with a drafter from outside (docs/drafters.md). Every contender completes
every prompt, one after another and in an order that rotates, so that whatever else the machine does hits all of them.
Each emits exactly `--max-new-tokens` tokens. Between sets the drafter forgets what it has seen.

The ceiling comes first: decoding reads every weight once a forward, so the bandwidth of the memory bounds forwards per
second. A contender's share is the weights it reads per second while decoding, over that bandwidth (which is measured
again after each set, as neighbours on a shared machine change it; the best counts). Then, for each set:

    end to end   tokens / second, the prompt's forward included
    decode       tokens / second after the first news (the token that the prompt's forward draws, or a little more)
    accept       tokens / forward, without the prompt's
    step         ms from news to news: median, 20th and 80th percentile

Ratios are against greedy transformers in whichever type is faster on that set, and of the drafting engines to `none`.
Texts are compared too: a matrix product's last bits depend on its shape, so texts may part where the two best logits
lie closer than `NEAR` in float32. The last line is one JSON document with every run.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from compare_transformers import NEAR
from records import DATA, finish, machine, read_prompts
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from specjax import Engine, EngineConfig, SamplingParams, checkpoint
from specjax.checkpoint.hf_config import QUANTIZATIONS
from specjax.models import table
from specjax.models.params import dimensions, read_leaves

ENGINE = {"none": "NONE", "auto": "AUTO", "ngram": "NGRAM"}
TRANSFORMERS = ("transformers-float32", "transformers-bfloat16")
LOOKUP = ("lookup-float32", "lookup-bfloat16")
CONTENDERS = (*ENGINE, *TRANSFORMERS, *LOOKUP)
LOOKUP_TOKENS = 10


def algorithm_of(name: str) -> str | None:
    """The engine's algorithm that a contender stands for; None: it is transformers."""
    return name if ":" in name else ENGINE.get(name)


def contender_name(name: str) -> str:
    if algorithm_of(name) is None and name not in CONTENDERS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CONTENDERS)}, and no module:function")
    return name


class Run(NamedTuple):
    """One prompt, one contender."""

    tokens: list[int]
    news: list[tuple[float, int]]  # seconds since the start, tokens so far; one entry for each forward that was read
    forwards: int  # without the prompt's

    @property
    def seconds(self) -> float:
        return self.news[-1][0]

    @property
    def steps(self) -> list[float]:
        """Milliseconds from news to news."""
        return [1e3 * (after[0] - before[0]) for before, after in zip(self.news, self.news[1:], strict=False)]

    @property
    def decoding(self) -> tuple[int, float]:
        """Tokens after the first news, and the seconds they took."""
        (first, before), (last, after) = self.news[0], self.news[-1]
        return after - before, last - first


class Contender(NamedTuple):
    run: Callable[[list[int], int], Run]  # (prompt, tokens to emit)
    forget: Callable[[], Any]
    weight_bytes: int  # that a forward reads


# The contenders.


def engine_contender(engine: Engine) -> Contender:
    def run(prompt: list[int], count: int) -> Run:
        started, news = time.perf_counter(), []
        sequence = engine.add(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        while sequence.finish_reason is None:
            engine.step()
            if len(sequence.output) > (news[-1][1] if news else 0):
                news.append((time.perf_counter() - started, len(sequence.output)))
        return Run(list(sequence.output), news, sequence.verify_steps)

    def forget() -> None:
        assert engine.flush_cache(), "a set must not remember the one before"

    return Contender(run, forget, weight_bytes(engine))


def weight_bytes(engine: Engine) -> int:
    """Bytes of all parameters but the embedding, of which a forward reads a row; a tied one is also the head."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params.target))
    return total if engine.target.config.tied_embeddings else total - engine.params.target["embed"].nbytes


class News:
    """A streamer that notes when tokens come. transformers hands it the prompt first."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.news: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        before = self.news[-1][1] if self.news else 0
        self.news.append((time.perf_counter() - self.started, before + value.numel()))

    def end(self) -> None:
        pass


def transformers_contender(model: Any, bytes_read: int, **how: Any) -> Contender:
    def run(prompt: list[int], count: int) -> Run:
        ids = torch.tensor([prompt])
        streamer = News()
        with torch.inference_mode():
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                streamer=streamer,
                **how,
            )
        return Run(done[0, len(prompt) :].tolist(), streamer.news, len(streamer.news) - 1)

    return Contender(run, lambda: None, bytes_read)


def load_transformers(folder: Path, dtype: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    # Every contender must emit the same number of tokens: the end of a text does not end a run.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


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
                assert len(run.tokens) == count == run.news[-1][1], (contender, id, len(run.tokens), run.news[-1])
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
                "first_seconds": round(run.news[0][0], 4),
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


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    def fastest(names: tuple[str, ...]) -> str | None:
        return max((n for n in names if n in rows), key=lambda n: rows[n]["tokens_per_second"], default=None)

    greedy, lookup = fastest(TRANSFORMERS), fastest(LOOKUP)
    pairs = (
        [(ours, greedy) for ours in (*ENGINE, lookup)]
        + [
            ("ngram", lookup),
            ("ngram", "none"),
            ("auto", "none"),
            ("auto", "ngram"),
        ]
        + [(name, "none") for name in rows if ":" in name]
    )
    return {f"{a} / {b}": ratio(rows[a], rows[b]) for a, b in pairs if a in rows and b in rows}


def same_texts(ours: Run, theirs: Run, prompt: list[int], oracle: Any) -> str:
    """ "equal", "near tie" (float32 logits where they part are closer than `NEAR`) or "different"."""
    if ours.tokens == theirs.tokens:
        return "equal"
    at = next(i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b)
    if oracle is None:
        return "different"
    with torch.inference_mode():
        best = oracle(torch.tensor([prompt + ours.tokens[:at]])).logits[0, -1].topk(2)
    near = set(best.indices.tolist()) == {ours.tokens[at], theirs.tokens[at]}
    return "near tie" if near and float(best.values[0] - best.values[1]) < NEAR else "different"


# The run.


def build(args: argparse.Namespace) -> tuple[dict[str, Contender], Engine, Any]:
    """The contenders asked for, an engine (to render prompts, and for its facts), and the float32 oracle if loaded."""
    contenders: dict[str, Contender] = {}
    models: dict[str, Any] = {}
    engine = None
    for name in args.contenders:
        if algorithm := algorithm_of(name):
            config = EngineConfig(max_running_requests=1, prefix_cache=False)
            engine = Engine.from_pretrained(
                args.model, dtype=args.dtype, quantization=args.quantization, draft=algorithm, config=config
            )
            engine.warm_up(engine.single_request_keys())
            contenders[name] = engine_contender(engine)
            continue
        dtype = name.partition("-")[2]
        if dtype not in models:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint.save_dequantised(checkpoint.resolve(args.model), Path(folder))
                models[dtype] = load_transformers(Path(folder), dtype)
        how = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name in LOOKUP else {}
        contenders[name] = transformers_contender(models[dtype], 0, **how)
    if engine is None:
        raise SystemExit(f"--contenders must hold one of {', '.join(ENGINE)}: prompts are rendered by the engine")
    declared = engine.target.config
    weights = sum(math.prod(leaf.shape(dimensions(declared))) for leaf in read_leaves(table(declared)))
    for name in contenders.keys() & {*TRANSFORMERS, *LOOKUP}:
        size = getattr(torch, name.partition("-")[2]).itemsize
        contenders[name] = contenders[name]._replace(weight_bytes=weights * size)
    return contenders, engine, models.get("float32")


def show(rows: dict[str, dict[str, Any]]) -> None:
    print(f"{'':24}{'end to end':>12}{'decode':>9}{'accept':>8}{'step':>8}{'p20':>7}{'p80':>7}{'share':>8}")
    for name, row in rows.items():
        step = row["step_ms"]
        print(
            f"{name:24}{row['tokens_per_second']:12.1f}{row['decode_tokens_per_second']:9.1f}"
            f"{row['accept_length']:8.2f}{step['median']:8.1f}{step['p20']:7.1f}{step['p80']:7.1f}"
            f"{row['share_of_ceiling']:8.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Decoding speed of the engine and of transformers, interleaved.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL, help="alias, local folder or hub id")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="the engine's")
    parser.add_argument("--quantization", default="auto", choices=QUANTIZATIONS, help="the engine's")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of SET.jsonl files")
    parser.add_argument("--sets", nargs="+", default=["mt_bench", "eagle_sum"], metavar="SET")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--contenders", nargs="+", type=contender_name, default=CONTENDERS, metavar="NAME",
                        help=f"of {', '.join(CONTENDERS)}, and module:function")  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch; XLA always uses all cores")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/decode-<date>.json")
    args = parser.parse_args()

    lines = {name: read_prompts(args.data / f"{name}.jsonl", args.limit) for name in args.sets}
    document = machine("jaxlib", "flax", "torch", "transformers")
    torch.set_num_threads(args.threads)
    contenders, engine, oracle = build(args)
    bandwidths, config = [read_bandwidth()], engine.target.config
    document |= {"model": args.model, "dtype": config.dtype, "quantization": args.quantization}
    document |= {"threads": args.threads, "limit": args.limit}
    weights, bandwidth = weight_bytes(engine), bandwidths[0]
    document |= {"max_new_tokens": args.max_new_tokens, "weight_bytes": weights}
    print(
        f"ceiling on {document['processor'] if engine.platform == 'cpu' else document['device']}: reads "
        f"{bandwidth / 1e9:.1f} GB/s; a forward reads {weights / 1e6:.0f} MB of weights: at most "
        f"{bandwidth / weights:.1f} forwards/s, at least {1e3 * weights / bandwidth:.1f} ms each"
    )

    warm = engine.encode([{"role": "user", "content": "Count to ten, then count to ten again."}])
    for contender in contenders.values():
        contender.run(warm, min(args.max_new_tokens, 16))
    document |= {"results": []}
    for name, rows in lines.items():
        prompts = {id: engine.encode([{"role": "user", "content": text}]) for id, text in rows}
        runs = measure(contenders, prompts, args.max_new_tokens, name)
        bandwidths.append(read_bandwidth())
        table = {one: summary(runs[one], contenders[one], max(bandwidths)) for one in contenders}
        result = {"set": name, "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts.values()))}
        result |= {"contenders": table, "ratios": ratios(table), "texts": {}}
        pairs = [("ngram", "none"), ("auto", "none"), *((ours, TRANSFORMERS[0]) for ours in ENGINE)]
        pairs += [(one, "none") for one in runs if ":" in one]
        for a, b in pairs:
            if a in runs and b in runs and config.dtype == "float32":
                found = [same_texts(runs[a][id], runs[b][id], prompts[id], oracle) for id in prompts]
                result["texts"][f"{a} = {b}"] = {k: found.count(k) for k in ("equal", "near tie", "different")}
        document["results"].append(result)

        print(f"\n{name}: {len(prompts)} prompts of {result['prompt_tokens'] / len(prompts):.0f} tokens on average")
        show(table)
        for pair, by in result["ratios"].items():
            print(
                f"{pair}: {by['total']:.2f} times as fast end to end ({by['median']:.2f} in the median), "
                f"{by['decode_total']:.2f} in decoding ({by['decode_median']:.2f})"
            )
        for pair, counts in result["texts"].items():
            print(f"texts of {pair}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    document |= {"read_gb_per_second": [round(each / 1e9, 2) for each in bandwidths]}
    document |= {"most_forwards_per_second": round(max(bandwidths) / weights, 1)}
    print(f"\nreads, at the start and after each set: {document['read_gb_per_second']} GB/s")
    finish("decode", document, record=args.record)


if __name__ == "__main__":
    main()
