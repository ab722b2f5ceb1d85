"""`python -m specjax.train.generate`: the target answers prompts; its answers train a draft.

A draft learns best from what its target writes, some of it greedy and some drawn at a temperature, as in use. An input
line is a JSON object with `prompt` (a user's message or, if the tokenizer has no chat template, the text to continue)
or `messages`, and may have a `source`. An output line holds `source, temperature, prompt | messages, response,
prompt_ids, response_ids, finish_reason, seed`; `response_ids` ends with the stop token where the model stopped.

An answer depends on the model, the prompt and the seed, not on other requests in the batch (exactly in float32, up to
near-ties). So a run may be killed at any time: the same command continues after the last whole line and completes the
same file. `OUTPUT.meta.json` holds the settings that answers depend on; a run with other settings is refused. The last
line of stdout is one JSON object about the run. Exit status: 0 all lines done, 1 some lines were bad, 2 the run could
not start.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from specjax import settings
from specjax.checkpoint import CheckpointError
from specjax.checkpoint.files import sha256, try_lock, write_text
from specjax.cli import flags
from specjax.cli.generate import BadLine, Line, parse_object, prompt_field, run
from specjax.engine import Completion, Engine, SamplingParams
from specjax.engine.buckets import speculation_note
from specjax.engine.sampling_params import later_seed
from specjax.train import corpus
from specjax.train.memory import batch_for

FIELDS = ("prompt", "messages")
DEFAULTS = flags.Settings(
    # None: what fits the memory. Drafting pays in small batches, and these are as large as they can be.
    engine=flags.EngineSettings(max_running_requests=None),
    speculative=flags.SpeculativeSettings(speculative_algorithm="NONE"),
)
TABLES = ("model", "engine", "speculative")


class Mixture(NamedTuple):
    """Temperatures and how often each is drawn."""

    temperatures: tuple[float, ...]
    shares: tuple[float, ...]

    def draw(self, seed: int, place: int) -> float:
        """The temperature of one line, independent of other lines."""
        return random.Random(f"temperature {seed} {place}").choices(self.temperatures, self.shares)[0]

    def __str__(self) -> str:
        return " ".join(f"{t:g}={share:g}" for t, share in zip(self.temperatures, self.shares, strict=True))


def parse_mixture(given: list[str]) -> Mixture:
    """T or T=SHARE, separated by spaces; a share that is not given is 1.

    Raises:
        ValueError: not a temperature, or a share that is not above 0.
    """
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
    return Mixture(tuple(found), tuple(found.values()))


# Earlier runs.


class Progress(NamedTuple):
    """An output file as an earlier run left it."""

    size: int  # bytes in whole lines
    seed: int | None  # of the last whole line; None: there is none


def progress_of(output: Path) -> Progress:
    """How far an earlier run came; an unfinished last line does not count.

    Raises:
        ValueError: the last whole line was not written by this command.
    """
    if not output.exists() or not output.stat().st_size:
        return Progress(0, None)
    with output.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = data.rfind(b"\n") + 1
        line = data[data.rfind(b"\n", 0, max(size - 1, 0)) + 1 : size]
    if not size:
        return Progress(0, None)
    try:
        seed = parse_object(line).get("seed")
        if type(seed) is not int:
            raise ValueError("it has no seed")
    except ValueError as error:
        raise ValueError(f"--output {output} ends with a line that is not from this command ({error})") from None
    return Progress(size, seed)


def check_resumable(output: Path, wanted: Mapping[str, Any]) -> None:
    """Raises ValueError: the file has lines made with other settings, or by another program."""
    if not output.exists() or not output.stat().st_size:
        return
    file = meta_file(output)
    advice = "give another --output, or --overwrite to start anew"
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--output {output} is there, and {file} does not say how it was made ({error}); {advice}"
        ) from None
    differing = [key for key in dict.fromkeys([*wanted, *known]) if known.get(key) != wanted.get(key)]
    if differing:
        named = "; ".join(f"{key} was {known.get(key)!r}, is {wanted.get(key)!r}" for key in differing)
        raise ValueError(f"--output {output} was made otherwise: {named}. Run it as it was, {advice}")


def meta_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.meta.json")


def remaining(order: list[corpus.Line], found: Progress, seed: int, output: Path) -> list[corpus.Line]:
    """The lines after the last answered one, which its seed identifies."""
    if found.seed is None:
        return order
    for done, line in enumerate(order, start=1):
        if later_seed(seed, line.place) == found.seed:
            return order[done:]
    raise ValueError(f"--output {output} ends with an answer to a line that --input does not have")


# The answers.


class Prompts:
    """The requests of input lines, made one at a time."""

    def __init__(self, engine: Engine, lines: list[corpus.Line], mixture: Mixture, args: argparse.Namespace) -> None:
        self._engine, self._lines, self._mixture, self._args = engine, lines, mixture, args
        self.too_long = 0

    def __iter__(self) -> Iterator[Line | BadLine | None]:
        """A request, a line that cannot be used, or None for a prompt that is too long."""
        for raw in self._lines:
            try:
                line = self._line(raw)
            except (ValueError, RecursionError) as error:
                yield BadLine(raw.number, str(error))
                continue
            self.too_long += line is None
            yield line

    def _line(self, raw: corpus.Line) -> Line | None:
        args, seed = self._args, later_seed(self._args.seed, raw.place)
        row = parse_object(raw.text())
        field = prompt_field(row, FIELDS)
        prompt = row[field]
        if field == "prompt" and self._engine.tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        ids = self._engine.encode(prompt)
        if len(ids) > args.max_prompt_tokens:
            return None
        temperature = self._mixture.draw(args.seed, raw.place)
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=seed)
        source = {"source": row["source"]} if "source" in row else {}
        return Line(raw.number, raw.number, ids, sampling, {**source, "temperature": temperature, field: row[field]})


def answer(line: Line, done: Completion) -> dict[str, Any] | None:
    """A line of the output; None: the request failed."""
    if done.finish_reason["type"] == "abort":
        return None
    result = {"response": done.text, "prompt_ids": line.prompt, "response_ids": done.output_ids}
    return {**line.row, **result, "finish_reason": done.finish_reason, "seed": done.seed}


# The command.


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="python -m specjax.train.generate",
        description="Let a model answer prompts, for a draft to be trained on. The same command resumes a run.",
        formatter_class=settings.HelpFormatter,
    )
    files = parser.add_argument_group("input and output")
    files.add_argument("--input", required=True, metavar="FILE", help="JSONL of prompt or messages; may be gzipped")
    files.add_argument("--output", required=True, metavar="FILE", help="JSONL; FILE.meta.json says how it was made")
    files.add_argument("--overwrite", action="store_true", help="start anew where --output is there")
    files.add_argument("--count", type=int, metavar="N", help="only the first N lines; more can be added later")
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
    settings.add_flags(parser, DEFAULTS, TABLES)
    return parser


def identity(args: argparse.Namespace, mixture: Mixture, chosen: flags.Settings, digest: str) -> dict[str, Any]:
    """The settings that answers and their order depend on; batch, algorithm and --count may change."""
    model = chosen.model
    dtype = f"auto on {jax.default_backend()}" if model.dtype == "auto" else model.dtype
    names = ("model", "revision", "tokenizer_path", "chat_template")
    given = ("max_new_tokens", "max_prompt_tokens", "seed", "shuffle")
    return {
        **{name: getattr(model, name) for name in names},
        **{name: getattr(args, name) for name in given},
        "dtype": dtype,
        "input_sha256": digest,
        "temperatures": str(mixture),
        **({"plain_content": True} if chosen.engine.plain_content else {}),
    }


def check_arguments(args: argparse.Namespace, output: Path) -> None:
    for name in ("count", "max_new_tokens", "max_prompt_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    SamplingParams(seed=args.seed)
    if output.exists() and output.samefile(args.input):
        raise ValueError(f"--output {output} is the input file")
    if output.is_dir() or not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise ValueError(f"--output {output} cannot be written")


def generate(args: argparse.Namespace, chosen: flags.Settings) -> dict[str, Any]:
    """Answer the lines that are left; returns the summary."""
    output, progress = Path(args.output), not args.no_progress
    if args.input == "-":
        raise ValueError("--input must be a file: a run that is resumed reads it again")
    lines, digest = list(corpus.read(corpus.Source(args.input, "jsonl"))), sha256(Path(args.input))
    check_arguments(args, output)
    mixture = parse_mixture(args.temperatures)
    if args.shuffle:
        random.Random(f"order {args.seed}").shuffle(lines)
    wanted = identity(args, mixture, chosen, digest)
    if not args.overwrite:
        check_resumable(output, wanted)
    found = Progress(0, None) if args.overwrite else progress_of(output)
    left = remaining(lines, found, args.seed, output)
    done = len(lines) - len(left)
    left = left[: max((args.count or len(lines)) - done, 0)]
    if not left:
        return {"resumed_after": done, "requests": 0, "failed": 0, "too_long": 0}
    chosen = batch_for(chosen, args.max_prompt_tokens + args.max_new_tokens, len(left), progress=progress)
    engine = flags.make_engine(chosen, progress=progress)
    if progress:
        place = f", after {done} that are done" if done else ""
        note = speculation_note(engine.drafter, engine.buckets)
        tqdm.write(
            f"{len(left)} lines{place}; {engine.config.max_running_requests} at once; speculation: {note}",
            file=sys.stderr,
        )
    prompts = Prompts(engine, left, mixture, args)
    if (lock := try_lock(output.with_name(f".{output.name}.lock"))) is None:
        raise ValueError(f"--output {output} is being written by another run")
    with lock, output.open("a", encoding="utf-8", newline="\n") as file:  # nothing of an old file is lost before here
        if not args.overwrite and progress_of(output) != found:
            raise ValueError(f"--output {output} has been written by another run meanwhile")
        file.truncate(found.size)
        write_text(meta_file(output), json.dumps(wanted, indent=1) + "\n")
        summary = run(engine, prompts, file, progress=progress, total=len(left), describe=answer)
    return {"resumed_after": done, "too_long": prompts.too_long, **summary}


def main(argv: list[str] | None = None) -> int:
    args, chosen = settings.parse(build_parser(), argv, DEFAULTS)
    try:
        summary = generate(args, chosen)
    except (CheckpointError, ValueError, NotImplementedError, OSError) as error:
        print(f"specjax.train.generate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specjax.train.generate: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(json.dumps(summary))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
