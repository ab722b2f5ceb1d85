"""`specjax train generate`: the target answers prompts; its answers train a draft.

The input is JSONL, plain or gzipped, or a folder of such files, which are read by name. A line is a JSON object with
`prompt` (a user's message or, if the tokenizer has no chat template, the text to continue) or `messages` (without an
answer at the end), and may have a `source`, and `tools` and `chat_template_kwargs` for the chat template. An output
line holds `source, tools, chat_template_kwargs, temperature, prompt | messages, response, prompt_ids, response_ids,
finish_reason, seed`. The ids are exactly those that the model read and wrote; `specjax train` learns from them.
`response_ids` ends with the stop token where the model stopped. The last line of stdout is one JSON object about the
run. Exit status: 0 all lines done, 1 some lines were bad, 2 the run could not start.

An answer depends on the model, the prompt and the seed, not on other requests in the batch (exactly in float32, up to
near-ties). So a run may be killed at any time: the same command continues after the last whole line and completes the
same file. `OUTPUT.meta.json` holds the settings that answers depend on; a run with other settings is refused.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import jax
import psutil
from tqdm import tqdm

from specjax import checkpoint, settings
from specjax.cache import bytes_per_token, init_cache
from specjax.checkpoint.files import sha256, try_lock, write_text
from specjax.checkpoint.prompts import Chat
from specjax.cli import build, flags, run_command
from specjax.cli.generate import (
    BadLine,
    Line,
    bad_line,
    line_writer,
    parse_object,
    prompt_field,
    read_input,
    run,
)
from specjax.devices import this_memory
from specjax.engine import Completion, Engine, SamplingParams
from specjax.engine.memory import STEP_COPIES
from specjax.engine.notes import as_lines, speculation_table
from specjax.engine.sampling_params import later_seed
from specjax.models import make_target, table
from specjax.models.params import dimensions, parameter_bytes
from specjax.train import corpus, differences
from specjax.train.data import read_prompt

# Largest batch, whatever the memory. From 64 rows on a CPU's forward costs in proportion to its rows.
LARGEST = {"cpu": 64, "gpu": 256}
KEPT = ("source", "tools", "chat_template_kwargs")  # input fields that are copied to the output

DEFAULTS = flags.Settings(
    # None: what fits the memory. Drafting pays in small batches, and these are as large as they can be.
    engine=flags.EngineSettings(max_running_requests=None),
    speculative=flags.SpeculativeSettings(speculative_algorithm="NONE"),
)


def parse_mixture(given: list[str]) -> dict[float, float]:
    """Temperatures and how often each is drawn, from T or T=SHARE. Raises ValueError: a wrong number or form."""
    found: dict[float, float] = {}
    for text in " ".join(given).split():
        name, _, share = text.partition("=")
        try:
            temperature, weight = float(name), float(share) if "=" in text else 1.0
            SamplingParams(temperature=temperature)
            if not (isfinite(weight) and weight > 0):
                raise ValueError("a share must be above 0")
        except ValueError as error:
            raise ValueError(f"--temperatures takes T or T=SHARE, such as 0 0.8=2, got {text!r:.40}: {error}") from None
        if temperature in found:
            raise ValueError(f"--temperatures has {temperature:g} twice")
        found[temperature] = weight
    if not found:
        raise ValueError("--temperatures needs at least one")
    return found


def parse_shard(given: str) -> tuple[int, int]:
    """I and N of I/N. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--shard must be I/N, with I from 1 to N, got {given!r:.40}")
    return int(match[1]), int(match[2])


def resume(
    output: Path, meta: Path, wanted: Mapping[str, Any], lines: list[corpus.Line]
) -> tuple[int, list[corpus.Line]]:
    """Bytes in whole lines that an earlier run left, and the input's lines after the last answered one.

    Raises ValueError: the file was made with other settings or input, or by another program.
    """
    if not output.exists() or not output.stat().st_size:
        return 0, lines
    advice = "give another --output, or --overwrite to start anew"
    try:
        known = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output}: {meta} does not say how it was made ({error}); {advice}") from None
    if changed := differences(known, wanted):
        raise ValueError(f"--output {output} was made otherwise: {changed}. Run it as it was, {advice}")
    size, last = 0, b""
    with output.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                size, last = size + len(line), line
    if not size:
        return 0, lines
    try:
        seed = parse_object(last)["seed"]  # identifies the line
    except (ValueError, KeyError) as error:
        raise ValueError(f"--output {output} ends with a line that is not from this command ({error})") from None
    for done, line in enumerate(lines, start=1):
        if later_seed(wanted["seed"], line.place) == seed:
            return size, lines[done:]
    raise ValueError(f"--output {output} ends with an answer to a line that --input does not have")


def batch_for(chosen: flags.Settings, tokens: int, lines: int, *, progress: bool = True) -> flags.Settings:
    """Fill in batch, pool and context for sequences of `tokens` tokens, where the settings leave them open.

    The pool holds all rows at full length, so that no request is ever retracted.

    Raises ValueError: the context is shorter than `tokens`. CheckpointError: there is no such model.
    """
    engine, model = chosen.engine, chosen.model
    files = checkpoint.resolve(model.model, revision=model.revision, progress=progress)
    config = checkpoint.model_config(files.config, dtype=model.dtype)
    context = engine.context_length or config.max_positions
    if tokens > context:
        raise ValueError(
            f"--max-prompt-tokens and --max-new-tokens come to {tokens} tokens, and the context is {context}"
        )
    row = -(-tokens // engine.page_size) * engine.page_size
    rows, pool = engine.max_running_requests, engine.max_total_tokens
    if rows is None:
        free = free_bytes(engine.mem_fraction_static) - parameter_bytes(table(config), dimensions(config), config.dtype)
        each = row * bytes_per_token(partial(init_cache, make_target(config).pages))
        each += int(STEP_COPIES * 4 * config.vocab_size)  # a step's logits
        largest = LARGEST["cpu" if jax.default_backend() == "cpu" else "gpu"]
        rows = max(min(free // each, largest, lines, (pool or sys.maxsize) // row), 1)
    filled = {"max_total_tokens": pool or rows * row, "context_length": engine.context_length or tokens}
    return replace(chosen, engine=replace(engine, max_running_requests=rows, **filled))


def free_bytes(mem_fraction: float) -> int:
    """Bytes of the device that a run may take."""
    if (memory := this_memory()) is not None:
        return memory.budget(mem_fraction) - memory.used
    return psutil.virtual_memory().available // 2  # other programs share the machine


def requests(
    engine: Engine, lines: Iterable[corpus.Line], mixture: Mapping[float, float], args: argparse.Namespace,
    too_long: list[corpus.Line],
) -> Iterator[Line | BadLine | None]:  # fmt: skip
    """The requests of input lines, made one at a time; None for a prompt that is too long, which is noted."""
    for raw in lines:
        try:
            row = parse_object(raw.text())
            field = prompt_field(row, ("prompt", "messages"))
            prompt = read_prompt(row, field, engine.tokenizer)
            last = prompt[-1:] if isinstance(prompt, Chat) and not prompt.template.get("continue_final_message") else []
            if any(message["role"] == "assistant" for message in last):
                raise ValueError(f"{field} ends with an answer of the assistant: leave it out, to get the model's own")
            ids = engine.encode(prompt)
        except (ValueError, RecursionError) as error:
            yield bad_line(raw, args.input, error)
            continue
        if len(ids) > args.max_prompt_tokens:
            too_long.append(raw)
            yield None
            continue
        draw = random.Random(f"temperature {args.seed} {raw.place}")  # independent of other lines
        (temperature,) = draw.choices([*mixture], [*mixture.values()])
        seed = later_seed(args.seed, raw.place)
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=seed)
        kept = {name: row[name] for name in KEPT if name in row}
        yield Line(raw.number, raw.number, ids, sampling, kept | {"temperature": temperature, field: row[field]})


def answer(line: Line, done: Completion) -> dict[str, Any] | None:
    """A line of the output; None: the request failed."""
    if done.finish_reason["type"] == "abort":
        return None
    result = {"response": done.text, "prompt_ids": line.prompt, "response_ids": done.output_ids}
    return {**line.row, **result, "finish_reason": done.finish_reason, "seed": done.seed}


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="specjax train generate",
        description="Let a model answer prompts, for a draft to be trained on. The same command resumes a run.",
    )
    files = parser.add_argument_group("input and output")
    files.add_argument(
        "--input", required=True, metavar="FILE", help="JSONL of prompt or messages, also gzipped, or a folder of such"
    )  # fmt: skip
    files.add_argument("--output", required=True, metavar="FILE", help="JSONL; FILE.meta.json says how it was made")
    files.add_argument("--overwrite", action="store_true", help="start anew where --output is there")
    files.add_argument("--count", type=int, metavar="N", help="only the first N lines; more can be added later")
    files.add_argument(
        "--shard", default="1/1", metavar="I/N",
        help="answer only every Nth line, from the Ith: N runs, each with an --output of its own, share an input",
    )  # fmt: skip
    files.add_argument("--shuffle", action="store_true", help="take the lines in an order drawn from --seed")
    files.add_argument("--no-progress", action="store_true", help="no progress bars")
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--temperatures", nargs="+", default=["0.0", "0.8"], metavar="T[=SHARE]",
        help="each line draws one of them, by its share; a share that is not given is 1",
    )  # fmt: skip
    answers.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="most tokens of an answer")
    answers.add_argument(
        "--max-prompt-tokens", type=int, default=512, metavar="N", help="longer prompts are skipped, and counted"
    )
    answers.add_argument("--seed", type=int, default=0, metavar="N", help="line i of the input uses seed + i")
    settings.add_flags(parser, DEFAULTS, ("model", "engine", "speculative"))
    return parser


def answers_depend_on(chosen: flags.Settings, given: str) -> dict[str, Any]:
    """What the answers of a run depend on, of the model and the input. Batch and algorithm may change: they change no
    text. JAX must have its device (`specjax.cli.build.claim_gpu`). `given`: --input."""
    model, defaults = chosen.model, flags.Settings()
    places = {
        "quantization": "model", "context_length": "engine", "plain_content": "engine",
        "speculative_accept_threshold_single": "speculative", "speculative_accept_threshold_acc": "speculative",
    }  # fmt: skip
    changed = {
        name: value
        for name, table in places.items()
        if (value := getattr(getattr(chosen, table), name)) != getattr(getattr(defaults, table), name)
    }
    return {
        **{name: getattr(model, name) for name in ("model", "revision", "tokenizer_path", "chat_template")},
        "dtype": f"auto on {jax.default_backend()}" if model.dtype == "auto" else model.dtype,
        "content of the input": " ".join(sha256(Path(file)) for file in corpus.shards([given])),
        **changed,
    }


def settings_of(args: argparse.Namespace, chosen: flags.Settings, mixture: Mapping[float, float]) -> dict[str, Any]:
    """What answers and their order depend on; batch, algorithm and --count may change."""
    return {
        **answers_depend_on(chosen, args.input),
        **{name: getattr(args, name) for name in ("max_new_tokens", "max_prompt_tokens", "seed", "shuffle")},
        "temperatures": " ".join(f"{temperature:g}={share:g}" for temperature, share in mixture.items()),
    }


def generate(args: argparse.Namespace, chosen: flags.Settings) -> dict[str, Any]:
    """Answer the lines that are left; returns the summary."""
    if args.input == "-":
        raise ValueError("--input must be a file: a run that is resumed reads it again")
    lines, part = read_input(args.input), parse_shard(args.shard)
    for name in ("count", "max_new_tokens", "max_prompt_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    SamplingParams(seed=args.seed)
    mixture = parse_mixture(args.temperatures)
    build.claim_gpu(chosen)
    wanted = settings_of(args, chosen, mixture)
    if args.shuffle:
        random.Random(f"order {args.seed}").shuffle(lines)
    wanted |= {"shard": args.shard} if part[1] > 1 else {}
    return answer_file(args, chosen, lines[part[0] - 1 :: part[1]], mixture, wanted)


def load_engine(args: argparse.Namespace, chosen: flags.Settings, lines: int, note: str) -> Engine:
    """The engine for this many lines. `note`: what is said of them."""
    progress = not args.no_progress
    chosen = batch_for(chosen, args.max_prompt_tokens + args.max_new_tokens, lines, progress=progress)
    engine = build.make_engine(chosen, progress=progress)
    if progress:
        rows, table = engine.config.max_running_requests, as_lines(speculation_table(engine.drafter, engine.buckets))
        tqdm.write(f"{note}; {rows} at once; speculation:{table}", file=sys.stderr)
    return engine


def answer_file(
    args: argparse.Namespace, chosen: flags.Settings, lines: list[corpus.Line], mixture: Mapping[float, float],
    wanted: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Answer the lines that `--output` lacks."""
    output = Path(args.output)
    meta, lock_file = (output.with_name(name) for name in (f"{output.name}.meta.json", f".{output.name}.lock"))
    if output.exists() and any(output.samefile(file) for file in corpus.shards([args.input])):
        raise ValueError(f"--output {output} is the input file, or one of its folder")
    corpus.check_writable(output)
    if (lock := try_lock(lock_file)) is None:
        raise ValueError(f"--output {output} is being written by another run")
    with lock:
        size, left = (0, lines) if args.overwrite else resume(output, meta, wanted, lines)
        done = len(lines) - len(left)
        left = left[: max((args.count or len(lines)) - done, 0)]
        if not left:
            return {"resumed_after": done, "requests": 0, "failed": 0, "too_long": 0}
        place = f", after {done} that are done" if done else ""
        engine = load_engine(args, chosen, len(left), f"{len(left)} lines{place}")
        too_long: list[corpus.Line] = []
        prompts = requests(engine, left, mixture, args, too_long)
        with output.open("a", encoding="utf-8", newline="\n") as file:  # nothing of an old file is lost before here
            file.truncate(size)
            write_text(meta, json.dumps(wanted, indent=1) + "\n")
            write, shown = line_writer(file), not args.no_progress
            summary = run(engine, prompts, write, progress=shown, total=len(left), describe=answer)
    return {"resumed_after": done, "too_long": len(too_long), **summary}


def main(argv: list[str] | None = None) -> int:
    args, chosen = settings.parse(build_parser(), argv, DEFAULTS)
    work, after = partial(generate, args, chosen), "the same command goes on from here"
    return run_command("specjax train generate", work, failed="failed", interrupted=after)


if __name__ == "__main__":
    sys.exit(main())
