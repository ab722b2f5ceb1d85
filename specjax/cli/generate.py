"""`specjax generate`: reads prompts from a JSONL file and writes completions to another, decoding speculatively.

The input is JSONL, plain or gzipped, or a folder of JSONL files, read in order of their names. A line is a JSON
object with `prompt`, `messages` or `input_ids`. It may also hold an `id`, sampling fields, and one grammar field:
`response_format`, `json_schema`, `regex` or `ebnf`. Output lines are in input order and hold `id`, `RESULT_FIELDS`, and
`logprobs`, `prompt_logprobs` or `origins` if the input line asks for them. The last line of stdout is one JSON object
about the run. Exit status: 0 all lines done, 1 some lines failed, 2 the run could not start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sized
from collections.abc import Sequence as List
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TextIO

from tqdm import tqdm

from specjax import settings
from specjax.acceptance import SyntheticAcceptance
from specjax.cli import build, flags, run_command
from specjax.cli.lines import Line as InputLine
from specjax.cli.lines import check_writable, line_files, read_lines
from specjax.engine import Completion, Engine, SamplingParams
from specjax.engine.plan import as_lines, speculation_table
from specjax.engine.runtime import Counters
from specjax.engine.sampling_params import later_seed
from specjax.engine.sequence import Sequence, Status, completion
from specjax.limits import setting_of
from specjax.progress import progress_bar

PROMPT_FIELDS: dict[str, tuple[type, type, str]] = {
    "prompt": (str, str, "a string"),
    "messages": (list, dict, "a list of objects"),
    "input_ids": (list, int, "a list of token ids, which are integers"),
}
"""Prompt field -> type of its value, type of the items, description."""
RESULT_FIELDS = (
    "text", "output_ids", "prompt_tokens", "completion_tokens", "finish_reason", "spec_verify_ct",
    "spec_accept_length", "spec_accept_histogram", "seed",
)  # fmt: skip


Row = Mapping[str, Any]  # a line of the output

MIN_AHEAD = 256  # lines tokenised ahead of the results
BAD_LINE = (ValueError, TypeError, OverflowError, RecursionError)  # errors of a line and its values

logger = logging.getLogger(__name__)


class Line(NamedTuple):
    number: int  # 1-based, in the file
    id: Any
    prompt: Any
    sampling: SamplingParams
    row: Mapping[str, Any] = MappingProxyType({})  # further fields for the result


class BadLine(NamedTuple):
    number: int
    reason: str


def prompt_field(row: Mapping[str, Any], allowed: tuple[str, ...] = tuple(PROMPT_FIELDS)) -> str:
    """The name of the field with the prompt; null counts as absent. Raises ValueError unless there is one prompt of the
    right type."""
    present = [name for name in allowed if row.get(name) is not None]
    if len(present) != 1:
        raise ValueError(f"a line needs exactly one of {', '.join(allowed)}; it has {' and '.join(present) or 'none'}")
    (name,) = present
    prompt, (kind, inner, words) = row[name], PROMPT_FIELDS[name]
    if not isinstance(prompt, kind) or not prompt or not all(type(item) is inner for item in prompt):
        raise ValueError(f"{name} must be {words} that is not empty, got {prompt!r:.60}")
    return name


def make_line(number: int, row: Mapping[str, Any], defaults: Mapping[str, Any], count: int) -> Line:
    """A request from line number `count` of the run, counted from 0; it uses seed + `count`. Raises ValueError,
    TypeError or OverflowError."""
    prompt = row[prompt_field(row)]
    sampling = {name: value for name, value in row.items() if name not in (*PROMPT_FIELDS, "id")}
    merged = dict(defaults) | sampling
    if "seed" not in sampling and merged.get("seed") is not None:
        merged["seed"] = later_seed(merged["seed"], count)
    return Line(number, row.get("id", count), prompt, SamplingParams.from_mapping(merged))


def read_input(path: str) -> list[InputLine]:
    """Reads the lines of a file, of a folder's files or, for "-", of stdin, without blank lines. `place` counts through
    all files, so each line has its own seed. Errors: see `line_files`."""
    lines = (line for file in line_files([path]) for line in read_lines(file))
    return [line._replace(place=place) for place, line in enumerate(lines)]


def bad_line(raw: InputLine, path: str, error: Exception) -> BadLine:
    """Describes a bad line, with the name of its file if the input `path` is a folder."""
    return BadLine(raw.number, str(error) if raw.path in (path, "stdin") else f"{raw.path}: {error}")


def line_writer(file: TextIO) -> Callable[[Row | None], None]:
    """A function that writes a row as a line of JSON and flushes; it ignores None."""

    def write(row: Row | None) -> None:
        if row is not None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

    return write


def result(line: Line, done: Completion) -> dict[str, Any]:
    row = {"id": line.id, **{name: getattr(done, name) for name in RESULT_FIELDS}}
    row["spec_accept_length"] = round(done.spec_accept_length, 4)
    lists = {"logprobs": done.logprobs, "prompt_logprobs": done.prompt_logprobs, "origins": done.origins}
    return row | {name: [item._asdict() for item in items] for name, items in lists.items() if items is not None}


def run(
    engine: Engine,
    lines: Iterable[Line | BadLine | None],
    write: Callable[[Row | None], None],
    *,
    others: List[Engine] = (),
    progress: bool = True,
    total: int | None = None,
    describe: Callable[[Line, Completion], dict[str, Any] | None] = result,
) -> dict[str, Any]:
    """Completes lines and returns the summary. Lines are read shortly before the engine needs them.

    Args:
        lines: requests; bad lines are reported on stderr, None is skipped.
        others: replicas of the engine. One thread steps all engines in turn, which launch a step before they read the
            previous result.
        write: called for each line in input order, as soon as all earlier results exist; None: no result.
        total: number of lines for the progress bar; None: the length of `lines`, if it has one.
        describe: makes the result of a completed line; None counts as failed.
    """
    source = enumerate(lines)
    results: dict[int, dict[str, Any] | None] = {}  # index of a line -> its result, until all earlier ones exist
    unfinished: dict[Sequence, tuple[int, Line, int]] = {}  # index of the line, line, index of the engine
    count: Counter[str] = Counter()
    engines = [engine, *others]
    loads = [0] * len(engines)  # unfinished requests of each engine
    marks = {"synthetic_acceptance": True} if isinstance(engine.verify, SyntheticAcceptance) else {}
    ahead = max(MIN_AHEAD, 2 * engine.config.max_running_requests * len(engines))

    def fail(number: int, reason: object) -> None:
        count["failed"] += 1
        tqdm.write(f"line {number}: {reason}", file=sys.stderr)

    def put(index: int, row: dict[str, Any] | None) -> None:
        results[index] = row
        while count["written"] in results:
            write(results.pop(count["written"]))
            count["written"] += 1

    def feed() -> list[list[Sequence]]:
        """Fills the queues of the engines; returns the new requests of each engine."""
        added: list[list[Sequence]] = [[] for _ in engines]
        while len(unfinished) < ahead and (item := next(source, None)) is not None:
            index, line = item
            if isinstance(line, Line):
                rank = loads.index(min(loads))
                try:
                    sequence = engines[rank].add(line.prompt, line.sampling)
                except ValueError as error:
                    line = BadLine(line.number, str(error))
                else:
                    added[rank].append(sequence)
                    unfinished[sequence] = (index, line, rank)
                    loads[rank] += 1
                    continue
            if line is not None:
                fail(line.number, line.reason)
            put(index, None)
            count["settled"] += 1
        count["requests"] += sum(map(len, added))
        return added

    def accept_length() -> float:
        return count["drafted"] / count["steps"] if count["steps"] else 1.0

    for replica, added in zip(engines, feed(), strict=True):
        contexts = [len(sequence.context) for sequence in added]
        if contexts:
            replica.warm_up(replica.buckets.first_keys(len(contexts), max(contexts)), progress=progress)
    drafted_before = sum(replica.counters.drafted_steps for replica in engines)
    total = len(lines) if total is None and isinstance(lines, Sized) else total
    started = time.perf_counter()
    shown_bar = progress and bool(count["requests"])
    with progress_bar("Generating", total, "request", shown=shown_bar) as bar:
        while any(replica.unfinished for replica in engines):
            for sequence in itertools.chain.from_iterable(replica.step() for replica in engines if replica.unfinished):
                if sequence.status is not Status.FINISHED:
                    continue
                index, line, rank = unfinished.pop(sequence)
                loads[rank] -= 1
                done = completion(sequence)
                count.update(settled=1, tokens=done.completion_tokens, steps=done.spec_verify_ct)
                count["drafted"] += sequence.output.verified_tokens
                row = describe(line, done)
                put(index, None if row is None else {**row, **marks})
                if row is None:
                    fail(line.number, f"the request failed: {done.finish_reason}")
                elif done.finish_reason["type"] == "abort":
                    fail(line.number, done.finish_reason.get("message"))
                speed = count["tokens"] / (time.perf_counter() - started)
                bar.set_postfix_str(f"accept {accept_length():.2f}, {speed:.1f} tok/s")
            feed()
            bar.update(count["settled"] - bar.n)
    seconds = time.perf_counter() - started
    counters = Counters.sum(replica.counters for replica in engines)
    drafted_steps = counters.drafted_steps - drafted_before
    return {
        "requests": count["requests"],
        "failed": count["failed"],
        "completion_tokens": count["tokens"],
        "seconds": round(seconds, 3),
        "tokens_per_second": round(count["tokens"] / seconds, 2) if count["tokens"] else 0.0,
        "accept_length": round(accept_length(), 4),
        "verify_steps": count["steps"],
        "drafted_steps": drafted_steps,
        "algorithm": engine.drafter.name,
        "draft": "; ".join(filter(None, (engine.speculation.note, engine.speculation.source))),
        "device": engine.device_name,
        **({"replicas": len(engines)} if others else {}),
        **marks,
    }


DEFAULTS = flags.Settings(engine=flags.EngineSettings(max_running_requests=8))
TABLES = ("model", "engine", "speculative")

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling fields whose defaults come from the model's generation_config.json."""
SAMPLING = (*MODEL_DEFAULTS, "frequency_penalty", "presence_penalty", "max_new_tokens", "min_new_tokens", "seed")
"""Sampling fields that have a flag."""


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="specjax generate",
        description="Complete the prompts of a JSONL file, decoding speculatively. The text is the model's own.",
    )
    files = parser.add_argument_group("input and output")
    add = files.add_argument
    add(
        "--input",
        required=True,
        metavar="FILE",
        help="JSONL with prompt, messages or input_ids, plain or gzipped, or a folder of JSONL files; - = stdin",
    )
    add("--output", required=True, metavar="FILE", help="JSONL with the completions")
    add(
        "--dp", "--data-parallel-size", "--dp-size", type=int, default=1, metavar="N",
        help="replicas of the engine in this process, each on its own --tp devices, that share the lines",
    )  # fmt: skip
    add("--no-progress", action="store_true", help="no progress bars")
    settings.add_flags(parser, DEFAULTS, TABLES)
    add = parser.add_argument_group(
        "sampling", "a line of the input may override these values, with the same names"
    ).add_argument
    defaults = {field.name: field.default for field in fields(SamplingParams)} | {"seed": 0}
    for name in SAMPLING:
        default, text = defaults[name], setting_of(SamplingParams, name).help.replace("`", "")
        if name == "seed":
            text = "line i of the input uses seed + i, unless it has its own"
        kind = float if isinstance(default, float) else int
        if name in MODEL_DEFAULTS:
            default, text = None, f"{text}; default: the model's (--sampling-defaults), else {default}"
        add(f"--{settings.dashed(name)}", type=kind, default=default, help=text)
    add("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    add("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="further tokens that end a completion")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    return parser


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags, without unset flags whose default comes from the model."""
    names = (*SAMPLING, "stop", "stop_token_ids", "ignore_eos")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def main(argv: list[str] | None = None) -> int:
    args, chosen = settings.parse(build_parser(), argv, DEFAULTS)
    chosen = replace(chosen, server=replace(chosen.server, data_parallel_size=args.dp))  # not the file's [server]
    progress = not args.no_progress

    def work() -> dict[str, Any]:
        sampling = sampling_given(args)
        SamplingParams.from_mapping(sampling)
        if args.dp < 1:
            raise ValueError(f"--data-parallel-size must be at least 1, got {args.dp}")
        lines = read_input(args.input)
        check_writable(Path(args.output), [args.input], in_place=True)
        build.claim_gpu(chosen)
        engine, *others = build.make_engines(chosen, progress=progress)
        if progress:
            print(f"Speculation:{as_lines(speculation_table(engine.speculation, engine.buckets))}", file=sys.stderr)
        defaults = {**engine.sampling_defaults, **sampling}
        requests: list[Line | BadLine] = []
        for raw in lines:
            try:
                requests.append(make_line(raw.number, raw.row(), defaults, raw.place))
            except BAD_LINE as error:
                requests.append(bad_line(raw, args.input, error))
        # Opened last: a run that cannot start keeps the old file.
        with Path(args.output).open("w", encoding="utf-8") as file:
            return run(engine, requests, line_writer(file), others=others, progress=progress)

    left = "the completions written so far are in the output file"
    return run_command("specjax generate", work, failed="failed", interrupted=left)


def run_as_program(argv: list[str] | None = None) -> NoReturn:
    """Runs `main` and exits. A closed pipe (`| head`) prints no traceback."""
    try:
        status = main(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
