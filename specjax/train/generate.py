"""`specjax train generate`: the target answers prompts; its answers train a draft head.

The input is JSONL, plain or gzipped, or a folder of such files, read in the order of their names. A line is a JSON
object with `prompt` (a user's message or, if the tokenizer has no chat template, the text to continue) or `messages`
(without an answer at the end), and may have a `source`, and `tools` and `chat_template_kwargs` for the chat template.
An output line has `source, tools, chat_template_kwargs, temperature, prompt | messages, response, prompt_ids,
response_ids, finish_reason, seed`. The ids are those that the model read and wrote; `specjax train` uses them
unchanged. `response_ids` ends with the stop token if the model stopped. The last line of stdout is a JSON object about
the run. Exit status: 0 all lines done, 1 some lines were bad, 2 the run could not start.

The same command resumes a killed run after the last complete line and produces the same file (exactly in float32, up to
near-ties). `OUTPUT.meta.json` has the settings that answers depend on; a run with other settings is refused.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from specjax import checkpoint, settings
from specjax.checkpoint.files import sha256, try_lock, write_text
from specjax.checkpoint.prompts import Chat
from specjax.cli import build, flags, run_command
from specjax.cli.generate import BadLine, Line, bad_line, line_writer, prompt_field, read_input, run
from specjax.cli.lines import Line as InputLine
from specjax.cli.lines import check_writable, line_files
from specjax.engine import Completion, Engine, SamplingParams
from specjax.engine.sampling_params import later_seed
from specjax.train import differences
from specjax.train.data import read_prompt

MAX_ROWS = {"cpu": 64, "gpu": 256}  # default batch; on a CPU, more rows are no faster per row
COPIED_FIELDS = ("source", "tools", "chat_template_kwargs")

DEFAULTS = flags.Settings(
    # None: `MAX_ROWS`, or the number of lines. Drafts gain nothing in such batches.
    engine=flags.EngineSettings(max_running_requests=None),
    speculative=flags.SpeculativeSettings(speculative_algorithm="NONE"),
)


def parse_temperatures(texts: list[str]) -> list[float]:
    """Raises ValueError for a wrong number."""
    given = " ".join(texts)
    try:
        temperatures = [SamplingParams(temperature=float(text)).temperature for text in given.split()]
    except ValueError as error:
        raise ValueError(f"--temperatures must be numbers such as 0 0.8, got {given!r:.40}: {error}") from None
    if not temperatures:
        raise ValueError("--temperatures needs at least one")
    return temperatures


def parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--shard must be I/N, with I from 1 to N, got {text!r:.40}")
    return int(match[1]), int(match[2])


def resume(output: Path, meta: Path, current: Mapping[str, Any], lines: list[InputLine]) -> tuple[int, list[InputLine]]:
    """Bytes of the complete lines of an earlier run, and the input's lines that it has not answered.

    Raises ValueError if the file was written with other settings or input, or by another program.
    """
    if not output.exists() or not output.stat().st_size:
        return 0, lines
    advice = "give another --output, or --overwrite to start a new run"
    try:
        earlier = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output}: {meta} does not have its settings ({error}); {advice}") from None
    if changed := differences(earlier, current):
        raise ValueError(f"--output {output} was made with other settings: {changed}. Give the same ones, {advice}")
    size, last = 0, b""
    with output.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                size, last = size + len(line), line
    if not size:
        return 0, lines
    with suppress(ValueError, KeyError, TypeError):
        seed = json.loads(last)["seed"]  # identifies the line
        for done, line in enumerate(lines, start=1):
            if later_seed(current["seed"], line.place) == seed:
                return size, lines[done:]
    raise ValueError(f"--output {output} ends with a line that is no answer of this command to a line of --input")


def with_batch(chosen: flags.Settings, tokens: int, lines: int, *, progress: bool) -> flags.Settings:
    """Set the batch and the context for sequences of `tokens` tokens, unless flags set them.

    Raises ValueError if the context is shorter than `tokens`, CheckpointError if there is no such model.
    """
    engine, model = chosen.engine, chosen.model
    files = checkpoint.resolve(model.model, revision=model.revision, progress=progress)
    context = engine.context_length or checkpoint.model_config(files.config, dtype=model.dtype).max_positions
    if tokens > context:
        raise ValueError(
            f"--max-prompt-tokens and --max-new-tokens come to {tokens} tokens, and the context is {context}"
        )
    rows = engine.max_running_requests or min(MAX_ROWS["cpu" if jax.default_backend() == "cpu" else "gpu"], lines)
    changes = {"max_running_requests": rows, "context_length": engine.context_length or tokens}
    return replace(chosen, engine=replace(engine, **changes))


def requests(
    engine: Engine, lines: Iterable[InputLine], temperatures: list[float], args: argparse.Namespace,
    too_long: list[InputLine],
) -> Iterator[Line | BadLine | None]:  # fmt: skip
    """Requests of input lines; None for a prompt that is too long, whose line is added to `too_long`."""
    for raw in lines:
        try:
            row = raw.row()
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
        (temperature,) = draw.choices(temperatures)
        seed = later_seed(args.seed, raw.place)
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=seed)
        copied = {name: row[name] for name in COPIED_FIELDS if name in row}
        yield Line(raw.number, raw.number, ids, sampling, copied | {"temperature": temperature, field: row[field]})


def answer(line: Line, done: Completion) -> dict[str, Any] | None:
    """A line of the output; None if the request failed."""
    if done.finish_reason["type"] == "abort":
        return None
    result = {"response": done.text, "prompt_ids": line.prompt, "response_ids": done.output_ids}
    return {**line.row, **result, "finish_reason": done.finish_reason, "seed": done.seed}


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="specjax train generate",
        description="Let a model answer prompts, to train a draft head on. The same command resumes a run.",
    )
    files = parser.add_argument_group("input and output")
    files.add_argument(
        "--input", required=True, metavar="FILE", help="JSONL (.gz) of prompt or messages, or a folder of such files"
    )  # fmt: skip
    files.add_argument("--output", required=True, metavar="FILE", help="JSONL; FILE.meta.json has the settings")
    files.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    files.add_argument(
        "--shard", default="1/1", metavar="I/N",
        help="answer every Nth line, from the Ith: N runs, each with its own --output, share an input",
    )  # fmt: skip
    files.add_argument("--no-progress", action="store_true", help="no progress bars")
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--temperatures", nargs="+", default=["0.0", "0.8"], metavar="T",
        help="each line draws one of these; a temperature may be repeated, to be drawn more often",
    )  # fmt: skip
    answers.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="maximum tokens of an answer")
    answers.add_argument(
        "--max-prompt-tokens", type=int, default=512, metavar="N", help="longer prompts are skipped, and counted"
    )
    answers.add_argument("--seed", type=int, default=0, metavar="N", help="line i of the input uses seed + i")
    settings.add_flags(parser, DEFAULTS, ("model", "engine", "speculative"))
    return parser


def identity(args: argparse.Namespace, chosen: flags.Settings, temperatures: list[float]) -> dict[str, Any]:
    """The settings that answers and their order depend on. Batch and algorithm change no text.

    JAX must have its device (`specjax.cli.build.claim_gpu`).
    """
    model = chosen.model
    tables = (
        (model, ("model", "revision", "tokenizer_path", "chat_template", "quantization")),
        (chosen.engine, ("context_length",)),
        (chosen.speculative, ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")),
        (args, ("max_new_tokens", "max_prompt_tokens", "seed")),
    )
    return {
        **{name: getattr(table, name) for table, names in tables for name in names},
        "dtype": f"auto on {jax.default_backend()}" if model.dtype == "auto" else model.dtype,
        "content of the input": " ".join(sha256(Path(file)) for file in line_files([args.input])),
        "temperatures": " ".join(f"{temperature:g}" for temperature in temperatures),
        **({} if parse_shard(args.shard)[1] == 1 else {"shard": args.shard}),
    }


def generate(args: argparse.Namespace, chosen: flags.Settings) -> dict[str, Any]:
    """Answer the lines that `--output` lacks; returns the summary."""
    if args.input == "-":
        raise ValueError("--input must be a file: a resumed run reads it again")
    if chosen.speculative.speculative_synthetic_acceptance:
        place = settings.place_of(chosen, "speculative_synthetic_acceptance")
        raise ValueError(f"{place} writes text that is not the model's, which is no training data: leave it out")
    lines, (shard, shards) = read_input(args.input), parse_shard(args.shard)
    for name in ("max_new_tokens", "max_prompt_tokens"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    SamplingParams(seed=args.seed)
    temperatures = parse_temperatures(args.temperatures)
    build.claim_gpu(chosen)
    current = identity(args, chosen, temperatures)
    lines = lines[shard - 1 :: shards]
    output, progress = Path(args.output), not args.no_progress
    meta, lock_file = (output.with_name(name) for name in (f"{output.name}.meta.json", f".{output.name}.lock"))
    check_writable(output, [args.input])
    if (lock := try_lock(lock_file)) is None:
        raise ValueError(f"--output {output} is being written by another run")
    with lock:
        size, left = (0, lines) if args.overwrite else resume(output, meta, current, lines)
        done = len(lines) - len(left)
        if not left:
            return {"resumed_after": done, "requests": 0, "failed": 0, "too_long": 0}
        chosen = with_batch(chosen, args.max_prompt_tokens + args.max_new_tokens, len(left), progress=progress)
        engine = build.make_engine(chosen, progress=progress)
        too_long: list[InputLine] = []
        prompts = requests(engine, left, temperatures, args, too_long)
        with output.open("a", encoding="utf-8", newline="\n") as file:  # the first change of an existing file
            file.truncate(size)
            write_text(meta, json.dumps(current, indent=1) + "\n")
            summary = run(engine, prompts, line_writer(file), progress=progress, total=len(left), describe=answer)
    return {"resumed_after": done, "too_long": len(too_long), **summary}


def main(argv: list[str] | None = None) -> int:
    args, chosen = settings.parse(build_parser(), argv, DEFAULTS)
    work, after = partial(generate, args, chosen), "the same command continues here"
    return run_command("specjax train generate", work, failed="failed", interrupted=after)
