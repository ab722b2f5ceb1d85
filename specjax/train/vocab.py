"""`specjax train vocab`: a token frequency map, the draft vocabulary of a head, most frequent id first.

    specjax train vocab --model MODEL --input answers.jsonl --size 32768 --output freq_32768.pt

A draft head that ranks only the frequent part of the vocabulary is cheaper. Tokens outside of the map are never
proposed: fewer drafts are accepted, and the text stays equal (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). The best
corpus is the target's own answers, as ids, which include its end tokens.

The prompt and the answer of a JSONL row are counted as `specjax train` reads them, ids before text. `--field NAME`
(repeatable) counts these fields instead; `--field NAME=20` counts each token there 20 times. A text, or a list of
texts, is tokenised without a template and without added tokens; a list of ids is counted unchanged; the contents of a
list of messages are tokenised.

Ids are sorted by falling count, ties by id; the model's end tokens are always in the map. The last line of stdout is a
JSON object: `lines` read, `bad` lines, `tokens` counted, `distinct` ids, and `coverage`: the share of all counts, by
weight, that a map of each size covers. Exit status: 0 all lines counted, 1 some were bad, 2 no map.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from specjax import settings
from specjax.checkpoint import BUILT_IN_MODEL, load_tokenizer, resolve, stop_token_ids
from specjax.checkpoint.files import replacing
from specjax.checkpoint.torch_files import write_torch_list
from specjax.cli import run_command
from specjax.cli.lines import SkippedLine, check_writable, line_files, read_batches, report
from specjax.train.data import ANSWER_IDS, check_ids, check_written, missing_fields, read_messages, row_fields

DEFAULT_SIZE = 32768
COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
MAX_WEIGHT = 10**6

Counts = Int64[np.ndarray, "V"]


class Tally(NamedTuple):
    counts: Counts  # by weight
    tokens: int  # without weights
    lines: int  # including skipped ones
    skipped: list[SkippedLine]


def count(
    files: Sequence[str], weights: Mapping[str, int], tokenizer: Any, vocabulary: int, *, progress: bool
) -> Tally:
    """Count the ids of all files.

    Args:
        weights: by field of the rows; empty: `row_fields`, with weight 1.
        tokenizer: a fast tokenizer of transformers.
        vocabulary: ids are 0 to vocabulary - 1.
    """
    core = tokenizer.backend_tokenizer
    core.no_truncation()  # a tokenizer.json may set the lengths of the model's training
    core.no_padding()
    counts: Counts = np.zeros(vocabulary, np.int64)
    tokens = lines = 0
    skipped: list[SkippedLine] = []
    for batch in read_batches(files, label="Counting", progress=progress):
        lines += len(batch)
        parts: defaultdict[int, list[str | list[int]]] = defaultdict(list)  # by weight
        for line in batch:
            try:
                row_parts = weighted_parts(line.row(), weights, tokenizer, vocabulary)
            except (ValueError, RecursionError) as error:
                skipped.append(line.skipped(error))
                continue
            for weight, part in row_parts:
                parts[weight].append(part)
        for weight, weighted in parts.items():
            texts = [part for part in weighted if isinstance(part, str)]
            encoded = (encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False))
            flat = np.fromiter(chain(*encoded, *(part for part in weighted if isinstance(part, list))), np.int64)
            counts += weight * np.bincount(flat, minlength=vocabulary)
            tokens += len(flat)
    return Tally(counts, tokens, lines, skipped)


def weighted_parts(
    row: dict[str, Any], weights: Mapping[str, int], tokenizer: Any, vocabulary: int
) -> list[tuple[int, Any]]:
    """(weight, text or ids) of each counted part."""
    names = [name for name in weights or row_fields(row) if row.get(name) is not None]
    if not names:
        raise missing_fields(row, weights)
    parts = [(weights.get(name, 1), part) for name in names for part in _parts(name, row[name], vocabulary)]
    if not weights and names[-1] in ANSWER_IDS:
        check_written(tokenizer, row, names[-1])
    return parts


def _parts(name: str, value: Any, vocabulary: int) -> list[Any]:
    if isinstance(value, str):
        return [value]
    kinds = {type(item) for item in value} if isinstance(value, list) else {None}
    if kinds == {int}:
        check_ids(name, value, vocabulary)
        return [value]
    if kinds == {dict}:
        return [message["content"] for message in read_messages(name, value)]
    if kinds <= {str}:
        return value
    raise ValueError(f"{name} must be a text, a list of ids, of texts or of messages, got {value!r:.60}")


def token_map(counts: Counts, size: int, ends: Iterable[int]) -> Int64[np.ndarray, "X"]:
    """The `size` most frequent ids, ties by id, always with the end ids.

    counts 5 0 9 7, end 1    size 2: 2 1    size 3: 2 3 1    size 4: 2 3 0 1
    """
    order = np.argsort(-counts, kind="stable")
    forced = np.unique(np.fromiter(ends, np.int64))
    others = order[~np.isin(order, forced)][: size - len(forced)]
    return order[np.isin(order, np.concatenate([others, forced]))]


def coverage(counts: Counts, sizes: Iterable[int], ends: Iterable[int]) -> dict[str, float]:
    """The share of the counts that a map of each size covers."""
    ends, total = list(ends), int(counts.sum())
    return {str(size): round(int(counts[token_map(counts, size, ends)].sum()) / total, 6) for size in sizes}


WRITERS: dict[str, Callable[[Path, list[int]], object]] = {
    ".pt": write_torch_list,
    ".json": lambda file, ids: file.write_text(json.dumps(ids) + "\n", encoding="utf-8"),
}


def parse_weights(texts: Iterable[str]) -> dict[str, int]:
    """Weights by field, from NAME or NAME=WEIGHT. Raises ValueError for a wrong form or a repeated name."""
    weights: dict[str, int] = {}
    for text in texts:
        match = re.fullmatch(r"([^=]+)(?:=([0-9]{1,7}))?", text)
        if not match or not 1 <= (weight := int(match[2] or 1)) <= MAX_WEIGHT:
            raise ValueError(f"--field must be NAME or NAME=WEIGHT, weight from 1 to {MAX_WEIGHT}, got {text!r}")
        if match[1] in weights:
            raise ValueError(f"--field {match[1]} is given twice")
        weights[match[1]] = weight
    return weights


def check_output(output: Path, inputs: Sequence[str]) -> None:
    """Raises ValueError if the format is unknown, or the file is an input or cannot be written."""
    if output.suffix not in WRITERS:
        raise ValueError(f"--output {output} must end in {', '.join(WRITERS)}")
    check_writable(output, inputs)


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="specjax train vocab",
        description="Count the tokens of a corpus and write the most frequent ids: a map for a small draft vocabulary.",
        epilog="Without --field, the prompt and the answer of a JSONL line are counted, or its messages, text or ids.",
    )
    parser.add_argument(
        "--model", "--tokenizer", dest="tokenizer", default=BUILT_IN_MODEL, metavar="MODEL",
        help="alias, folder, .gguf or hub id; only the tokenizer is read",
    )  # fmt: skip
    parser.add_argument(
        "--input", required=True, nargs="+", action="extend", metavar="FILE",
        help="JSONL (.gz) or a folder of such files; - = stdin; the target's own answers are best",
    )  # fmt: skip
    parser.add_argument(
        "--field", action="append", default=[], metavar="NAME[=WEIGHT]",
        help="field of the lines to count, and how often; may be repeated",
    )  # fmt: skip
    parser.add_argument("--size", type=int, metavar="N", help=f"ids in the map (default: {DEFAULT_SIZE}, or all)")
    parser.add_argument(
        "--output", required=True, metavar="FILE",
        help="the map, in the format of its suffix: .pt, as FR-Spec publishes maps, or .json",
    )  # fmt: skip
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the map; returns the summary."""
    started, progress = time.perf_counter(), not args.no_progress
    weights, inputs, output = parse_weights(args.field), line_files(args.input), Path(args.output)
    check_output(output, inputs)
    if args.size is not None and args.size < 1:
        raise ValueError(f"--size must be at least 1, got {args.size}")
    is_gguf = args.tokenizer.lower().endswith(".gguf")  # the file contains the tokenizer
    files = resolve(args.tokenizer, progress=progress, outline=not is_gguf)
    tokenizer = load_tokenizer(files)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    size = min(DEFAULT_SIZE, vocabulary) if args.size is None else args.size
    # Stop ids outside of the vocabulary come from a config of another tokenizer.
    ends = sorted(token for token in stop_token_ids(files, tokenizer) if token < vocabulary)
    if size > vocabulary:
        raise ValueError(f"--size {size} is more than the {vocabulary} ids of the tokenizer {args.tokenizer}")
    if size < len(ends):
        raise ValueError(f"--size {size} leaves no room for the {len(ends)} end tokens of {args.tokenizer}")
    if not ends:
        print(f"the tokenizer {args.tokenizer} names no end token, so the map may have none", file=sys.stderr)
    tally = count(inputs, weights, tokenizer, vocabulary, progress=progress)
    report(tally.skipped)
    bad = len(tally.skipped)
    if not tally.tokens:
        raise ValueError(f"nothing to count in {', '.join(args.input)}: {tally.lines} lines, {bad} of them bad")
    with replacing(output) as draft:
        WRITERS[output.suffix](draft, token_map(tally.counts, size, ends).tolist())
    sizes = sorted({size, *(other for other in COVERAGE_SIZES if len(ends) <= other <= vocabulary)})
    return {
        "lines": tally.lines, "bad": bad, "tokens": tally.tokens, "distinct": int(np.count_nonzero(tally.counts)),
        "vocabulary": vocabulary, "size": size, "end_ids": ends, "coverage": coverage(tally.counts, sizes, ends),
        "output": args.output, "seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_command("specjax train vocab", lambda: run(args), failed="bad", interrupted="nothing was written")


if __name__ == "__main__":
    sys.exit(main())
