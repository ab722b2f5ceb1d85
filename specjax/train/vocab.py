"""`specjax train vocab`: a token frequency map, the draft vocabulary of a head, most frequent id first.

    specjax train vocab --model MODEL --input answers.jsonl --size 32768 --output freq_32768.pt

A draft head that ranks only the frequent part of the vocabulary is cheaper. Tokens outside of the map are never
proposed: fewer drafts are accepted, and the text stays equal (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). The best
corpus is the target's own answers, as ids, which include its end tokens.

The prompt and the answer of a JSONL row are counted as `specjax train` reads them, ids before text. A text is tokenised
without a template and without added tokens; a list of ids is counted unchanged; the contents of a list of messages are
tokenised.

Ids are sorted by falling count, ties by id; the model's end tokens are always in the map. The last line of stdout is a
JSON object: `lines` read, `bad` lines, `tokens` counted, `distinct` ids, and `coverage`: the share of all counts
that a map of each size covers. Exit status: 0 all lines counted, 1 some were bad, 2 no map.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from specjax import settings
from specjax.checkpoint import BUILT_IN_MODEL, load_tokenizer, resolve, stop_token_ids
from specjax.checkpoint.files import replacing
from specjax.checkpoint.torch_files import write_torch_list
from specjax.cli import run_command
from specjax.cli.lines import SkippedLine, check_writable, line_files, read_batches, report
from specjax.train.data import check_written, read_ids, read_messages, read_text, row_fields

DEFAULT_SIZE = 32768
COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)

Counts = Int64[np.ndarray, "V"]


def count(
    files: Sequence[str], tokenizer: Any, vocabulary: int, *, progress: bool
) -> tuple[Counts, int, list[SkippedLine]]:
    """Count the ids of all files. Returns the counts, the number of lines, and lines that were skipped.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocabulary: ids are 0 to vocabulary - 1.
    """
    core = tokenizer.backend_tokenizer
    core.no_truncation()  # a tokenizer.json may set the lengths of the model's training
    core.no_padding()
    counts: Counts = np.zeros(vocabulary, np.int64)
    lines = 0
    skipped: list[SkippedLine] = []
    for batch in read_batches(files, label="Counting", progress=progress):
        lines += len(batch)
        parts: list[str | list[int]] = []
        for line in batch:
            try:
                parts += row_parts(line.row(), tokenizer, vocabulary)
            except (ValueError, RecursionError) as error:
                skipped.append(line.skipped(error))
        texts = [part for part in parts if isinstance(part, str)]
        encoded = (encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False))
        flat = np.fromiter(chain(*encoded, *(part for part in parts if isinstance(part, list))), np.int64)
        counts += np.bincount(flat, minlength=vocabulary)
    return counts, lines, skipped


def row_parts(row: dict[str, Any], tokenizer: Any, vocabulary: int) -> list[Any]:
    """The texts and lists of ids of a row that are counted."""
    names, parts = row_fields(row), list[Any]()
    for name in names:
        if name.endswith("_ids"):
            parts.append(read_ids(name, row[name], vocabulary))
        elif isinstance(row[name], list):
            parts += [message["content"] for message in read_messages(name, row[name])]
        else:
            parts.append(read_text(name, row[name], empty=True))
    if "response_ids" in names:
        check_written(tokenizer, row)
    return parts


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


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="specjax train vocab",
        description="Count the tokens of a corpus and write the most frequent ids: a map for a small draft vocabulary.",
        epilog="The prompt and the answer of a JSONL line are counted, or its messages or text.",
    )
    parser.add_argument(
        "--model", "--tokenizer", dest="tokenizer", default=BUILT_IN_MODEL, metavar="MODEL",
        help="alias, folder, .gguf or hub id; only the tokenizer is read",
    )  # fmt: skip
    parser.add_argument(
        "--input", required=True, nargs="+", action="extend", metavar="FILE",
        help="JSONL (.gz) or a folder of such files; - = stdin; the target's own answers are best",
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
    progress = not args.no_progress
    inputs, output = line_files(args.input), Path(args.output)
    if output.suffix not in WRITERS:
        raise ValueError(f"--output {output} must end in {', '.join(WRITERS)}")
    check_writable(output, inputs)
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
    counts, lines, skipped = count(inputs, tokenizer, vocabulary, progress=progress)
    report(skipped)
    bad, tokens = len(skipped), int(counts.sum())
    if not tokens:
        raise ValueError(f"nothing to count in {', '.join(args.input)}: {lines} lines, {bad} of them bad")
    with replacing(output) as draft:
        WRITERS[output.suffix](draft, token_map(counts, size, ends).tolist())
    sizes = sorted({size, *(other for other in COVERAGE_SIZES if len(ends) <= other <= vocabulary)})
    return {
        "lines": lines, "bad": bad, "tokens": tokens, "distinct": int(np.count_nonzero(counts)),
        "vocabulary": vocabulary, "size": size, "end_ids": ends, "coverage": coverage(counts, sizes, ends),
        "output": args.output,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_command("specjax train vocab", lambda: run(args), failed="bad", interrupted="nothing was written")
