"""`specjax train vocab`: a token frequency map, the ids that a draft head may propose, most frequent first.

    specjax train vocab --model MODEL --input answers.jsonl --size 32768 --output freq_32768.pt

A draft head that scores only the frequent part of the vocabulary is cheaper. No map changes the text: a token outside
it is never proposed, so drafts are accepted less often (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). A draft predicts
the target's own output, so the best corpus is text written by the target, as ids: those include its end tokens.

Text files are tokenised as running text, line ends included. The prompt and the answer of a JSONL row are counted as
`specjax train` reads them, ids before text. `--field NAME` (repeatable) counts just these fields; `--field NAME=20`
counts every token there 20 times. A text, or a list of texts, is tokenised without a template and without the tokens
put around a prompt; a list of ids is counted as it is; of a list of messages the contents are tokenised.

Ids are sorted by falling count, ties by id; the end tokens of the model are always in the map. The last line of stdout
is one JSON object: `lines` read, `bad` ones among them, `tokens` counted, `distinct` ids, and `coverage`: the share of
all counts, by weight, that a map of each size covers. Exit status: 0 all lines counted, 1 some were bad, 2 no map.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from specjax import settings
from specjax.checkpoint import BUILT_IN_MODEL, ModelFiles, load_tokenizer, resolve, stop_token_ids
from specjax.checkpoint.files import read_json, replacing
from specjax.checkpoint.hub import download
from specjax.checkpoint.torch_files import write_torch_list
from specjax.checkpoint.weights import save_tensors
from specjax.cli import run_command
from specjax.train import corpus
from specjax.train.data import ANSWER_IDS, check_written, row_fields

TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
DEFAULT_SIZE = 32768
COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
MAX_WEIGHT = 10**6
BLOCK = 1 << 14  # characters tokenised as one text: a file of one line must not become one encoding in memory

Counts = Int64[np.ndarray, "V"]


class Tally(NamedTuple):
    counts: Counts  # by weight
    tokens: int  # without weights
    lines: int  # skipped ones included
    skipped: list[corpus.SkippedLine]


def count(
    sources: Sequence[corpus.Source], weights: Mapping[str, int], tokenizer: Any, vocabulary: int, *, progress: bool
) -> Tally:
    """Count the ids of all sources.

    Args:
        weights: fields of JSONL rows and how often each counts; empty: `row_fields`, once.
        tokenizer: a fast one of transformers.
        vocabulary: ids are 0 to vocabulary - 1.
    """
    core = tokenizer.backend_tokenizer
    # A tokenizer.json may hold the lengths that its model was trained with.
    core.no_truncation()
    core.no_padding()
    counts: Counts = np.zeros(vocabulary, np.int64)
    tokens = lines = 0
    skipped: list[corpus.SkippedLine] = []
    for source, batch in corpus.read_batches(sources, label="Counting", progress=progress):
        lines += len(batch)
        parts: defaultdict[int, list[str | list[int]]] = defaultdict(list)  # by weight
        for line in batch:
            try:
                is_text = source.format == "text"
                found = [(1, line.text())] if is_text else weighted_parts(line.row(), weights, tokenizer, vocabulary)
            except (ValueError, RecursionError) as error:
                skipped.append(line.skipped(error))
                continue
            for weight, part in found:
                parts[weight].append(part)
        for weight, mine in parts.items():
            texts = [part for part in mine if isinstance(part, str)]
            if source.format == "text":
                texts = ["".join(texts)]  # running text: tokens may cross line ends
            cut = [piece for text in texts for piece in pieces(text)]
            ids = [encoding.ids for encoding in core.encode_batch_fast(cut, add_special_tokens=False)]
            flat = np.fromiter(chain(*ids, *(part for part in mine if isinstance(part, list))), np.int64)
            counts += weight * np.bincount(flat, minlength=vocabulary)
            tokens += len(flat)
    return Tally(counts, tokens, lines, skipped)


def pieces(text: str) -> Iterator[str]:
    """The text in parts of at most BLOCK characters, cut before spaces where it has any."""
    start = 0
    while len(text) - start > BLOCK:
        cut = text.rfind(" ", start + 1, start + BLOCK)
        cut = start + BLOCK if cut < 0 else cut
        yield text[start:cut]
        start = cut
    yield text[start:]


def weighted_parts(
    row: dict[str, Any], weights: Mapping[str, int], tokenizer: Any, vocabulary: int
) -> list[tuple[int, Any]]:
    """What counts in a row of JSONL: (weight, a text or ids)."""
    used = [name for name in weights or row_fields(row) if row.get(name) is not None]
    if not used:
        raise corpus.missing_fields(row, weights)
    found = [(weights.get(name, 1), part) for name in used for part in _parts(name, row[name], vocabulary)]
    if not weights and used[-1] in ANSWER_IDS:
        check_written(tokenizer, row, used[-1])
    return found


def _parts(name: str, value: Any, vocabulary: int) -> list[Any]:
    """The texts or lists of ids of a field."""
    items: Any = [value] if isinstance(value, str) else value
    kinds = {type(item) for item in items} if isinstance(items, list) else {None}
    if kinds == {int}:
        corpus.check_ids(name, items, vocabulary)
        return [items]
    if kinds == {dict} and all("content" in message for message in items):
        items = [text for message in items for text in _message_texts(name, message["content"])]
    elif not kinds <= {str}:
        raise ValueError(f"{name} must be a text, a list of ids, of texts or of messages, got {value!r:.60}")
    return [corpus.read_text(name, text, empty=True) for text in items]


def _message_texts(name: str, content: Any) -> list[str]:
    """A message's content is a text, a list of parts (only text counts), or null (a tool call)."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [part["text"] for part in content if isinstance(part.get("text"), str)]
    raise ValueError(f"{name} holds a message whose content is {content!r:.60}")


def token_map(counts: Counts, size: int, ends: Iterable[int]) -> Int64[np.ndarray, "X"]:
    """The `size` most frequent ids, ties to the lower id, always with the end ids.

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
    ".safetensors": lambda file, ids: save_tensors(file, {"token_map": np.asarray(ids, np.int32)}),
    ".npy": lambda file, ids: np.save(file, np.asarray(ids, np.uint16 if max(ids) < 1 << 16 else np.int32)),
    ".json": lambda file, ids: file.write_text(json.dumps(ids) + "\n", encoding="utf-8"),
}


def write(outputs: list[Path], ids: list[int]) -> None:
    """Write all outputs or, if one fails, none: no reader sees half a map."""
    with ExitStack() as stack:
        drafts = [stack.enter_context(replacing(file)) for file in outputs]
        for draft in drafts:
            WRITERS[draft.suffix](draft, ids)


def parse_weights(given: Iterable[str]) -> dict[str, int]:
    """NAME or NAME=WEIGHT of `--field` to weights by name. Raises ValueError: a wrong form, or a name given twice."""
    found: dict[str, int] = {}
    for text in given:
        match = re.fullmatch(r"([^=]+)(?:=([0-9]{1,7}))?", text)
        if not match or not 1 <= (weight := int(match[2] or 1)) <= MAX_WEIGHT:
            raise ValueError(f"--field must be NAME or NAME=WEIGHT, weight from 1 to {MAX_WEIGHT}, got {text!r}")
        if match[1] in found:
            raise ValueError(f"--field {match[1]} is given twice")
        found[match[1]] = weight
    return found


def parse_outputs(given: list[str], sources: list[corpus.Source]) -> list[Path]:
    """The output files. Raises ValueError: unknown format, given twice, also an input, or it cannot be written."""
    taken = [Path(source.path).resolve() for source in sources]
    for file in map(Path, given):
        if file.suffix not in WRITERS:
            raise ValueError(f"--output {file} must end in {', '.join(WRITERS)}")
        if file.resolve() in taken:
            raise ValueError(f"--output {file} is also an input, or is given twice")
        corpus.check_writable(file)
        taken.append(file.resolve())
    return [Path(text) for text in given]


def tokenizer_files(name: str, *, progress: bool) -> ModelFiles:
    """The files that a tokenizer needs; the folder may lack weights and config.json."""
    folder = Path(name).expanduser()
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not folder.exists():  # `resolve` would fetch the weights too
        problem = (
            f"no tokenizer {name!r}; give {BUILT_IN_MODEL!r}, a .gguf file, a folder or a hub id: the Hugging Face hub "
            "gave none"
        )
        folder = download(name, problem, patterns=TOKENIZER_FILES, progress=progress)
    elif name.lower() == BUILT_IN_MODEL or not folder.is_dir():
        return resolve(name, progress=progress)
    config = folder / "config.json"
    return ModelFiles(name, folder, read_json(config, name) if config.is_file() else {}, ())


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="specjax train vocab",
        description="Count the tokens of a corpus and write the most frequent ids: a map for a small draft vocabulary.",
        epilog="Without --field, the prompt (ids, messages or text) and the answer (ids or text) of a JSONL line are "
        "counted, or its messages, text or tokens alone.",
    )
    parser.add_argument(
        "--model", "--tokenizer", dest="tokenizer", default=BUILT_IN_MODEL, metavar="MODEL",
        help="alias, folder, .gguf or hub id; only the tokenizer of a folder is read",
    )  # fmt: skip
    parser.add_argument(
        "--input", required=True, nargs="+", action="extend", metavar="FILE",
        help="text or JSONL, also gzipped; - = stdin; what the target itself wrote is best",
    )  # fmt: skip
    parser.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto", help="auto: .txt and .jsonl")
    parser.add_argument(
        "--field", action="append", default=[], metavar="NAME[=WEIGHT]",
        help="field of JSONL lines to count, and how often; may be repeated",
    )  # fmt: skip
    parser.add_argument("--size", type=int, metavar="N", help=f"ids in the map (default: {DEFAULT_SIZE}, or all)")
    parser.add_argument(
        "--output", required=True, nargs="+", action="extend", metavar="FILE",
        help="the map, in the format of its suffix: .pt as FR-Spec publishes them, .safetensors, .npy or .json",
    )  # fmt: skip
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the map; returns the summary."""
    started, progress = time.perf_counter(), not args.no_progress
    weights, sources = parse_weights(args.field), corpus.parse_sources(args.input, args.format)
    outputs = parse_outputs(args.output, sources)
    if weights and all(source.format == "text" for source in sources):
        raise ValueError("--field is about JSONL, and no input is")
    if args.size is not None and args.size < 1:
        raise ValueError(f"--size must be at least 1, got {args.size}")
    files = tokenizer_files(args.tokenizer, progress=progress)
    tokenizer = load_tokenizer(files)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    size = min(DEFAULT_SIZE, vocabulary) if args.size is None else args.size
    # A stop id outside of the vocabulary comes from a config of another tokenizer.
    ends = sorted(token for token in stop_token_ids(files, tokenizer) if token < vocabulary)
    if size > vocabulary:
        raise ValueError(f"--size {size} is more than the {vocabulary} ids of the tokenizer {args.tokenizer}")
    if size < len(ends):
        raise ValueError(f"--size {size} leaves no room for the {len(ends)} end tokens of {args.tokenizer}")
    if not ends:
        print(f"the tokenizer {args.tokenizer} names no end token, so none is forced into the map", file=sys.stderr)
    tally = count(sources, weights, tokenizer, vocabulary, progress=progress)
    corpus.report(tally.skipped)
    bad = len(tally.skipped)
    if not tally.tokens:
        raise ValueError(f"nothing to count in {', '.join(args.input)}: {tally.lines} lines, {bad} of them bad")
    write(outputs, token_map(tally.counts, size, ends).tolist())
    sizes = sorted({size, *(each for each in COVERAGE_SIZES if len(ends) <= each <= vocabulary)})
    return {
        "lines": tally.lines, "bad": bad, "tokens": tally.tokens, "distinct": int(np.count_nonzero(tally.counts)),
        "vocabulary": vocabulary, "size": size, "end_ids": ends, "coverage": coverage(tally.counts, sizes, ends),
        "outputs": args.output, "seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run_command("specjax train vocab", lambda: run(args), failed="bad", interrupted="nothing was written")


if __name__ == "__main__":
    sys.exit(main())
