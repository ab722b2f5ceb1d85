"""`python -m specjax.train.vocab`: a token frequency map, the ids that a draft head may propose, the likeliest first.

    python -m specjax.train.vocab --tokenizer MODEL --input answers.jsonl --size 32768 --output freq_32768.pt

A draft head that scores only the frequent part of the vocabulary is cheaper, and no map changes the text: a token
outside it is never proposed, only accepted less often (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). What a draft has
to predict is the target's own output, so the best corpus is what the target wrote, as ids: those have its end tokens.

Text files are tokenised as running text, line ends included. A line of JSONL is an object, and without `--field` the
first of these that it has is counted: `text`; `messages`; `prompt` and `response`; `prompt_ids` and `response_ids`;
`input_ids` and `output_ids`. Text comes before ids, because ids belong to the tokenizer that made them. `--field NAME`
(repeat it for several) counts just these; `--field NAME=20` counts every token there 20 times. The value says how it
is read: text, or a list of texts, is tokenised without a template and without the tokens put around a prompt; a list
of ids is counted as it is; of a list of messages the contents are tokenised.

Ids come by falling count, ties to the lower id, and ids that never occur last. The end tokens of the model are always
in the map, as its last entries if they are not frequent. The last line of stdout is one JSON object: `lines` read and
`bad` ones among them, `tokens` counted and how many `distinct` ids, and `coverage`: the share of all counts, by
weight, that a map of each size covers. Exit status: 0 all lines counted, 1 some were bad, 2 no map was made.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from tqdm import tqdm

from specjax import settings
from specjax.checkpoint import BUILT_IN_MODEL, CheckpointError, ModelFiles, load_tokenizer, resolve, stop_token_ids
from specjax.checkpoint.files import replacing
from specjax.checkpoint.folder import read_json
from specjax.checkpoint.hub import download
from specjax.checkpoint.weights import save_tensors
from specjax.progress import progress_bar
from specjax.train.corpus import BLOCK, FIELD_GROUPS, Source, contents, parse_fields, parse_sources, pieces, read

TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
DEFAULT_SIZE = 32768
COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
SHOWN_BAD_LINES = 5

BATCH = 1 << 20
"""Characters, and ids, that are held until they are tokenised and counted together."""

Counts = Int64[np.ndarray, "V"]


# Counting.


class Tally:
    """Counts of ids. What is added waits for a batch: tokenising many texts at once uses all cores."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._core = tokenizer.backend_tokenizer
        # A tokenizer.json may hold the lengths that its model was trained with.
        self._core.no_truncation()
        self._core.no_padding()
        self._waiting: list[tuple[int, str | list[int]]] = []
        self._held = 0
        self.counts: Counts = np.zeros(vocabulary, np.int64)  # by weight
        self.tokens = 0  # without weights

    def add(self, weight: int, content: str | list[int]) -> None:
        parts = [content] if isinstance(content, list) else pieces(content)
        self._waiting += [(weight, part) for part in parts]
        self._held += len(content)
        if self._held >= BATCH or len(self._waiting) >= BATCH:
            self.flush()

    def flush(self) -> None:
        for weight in {weight for weight, _ in self._waiting}:
            mine = [part for each, part in self._waiting if each == weight]
            texts = [part for part in mine if isinstance(part, str)]
            ids = [part for part in mine if isinstance(part, list)]
            ids += [found.ids for found in self._core.encode_batch_fast(texts, add_special_tokens=False)]
            flat = np.fromiter(chain.from_iterable(ids), np.int64)
            self.counts += weight * np.bincount(flat, minlength=len(self.counts))
            self.tokens += len(flat)
        self._waiting, self._held = [], 0


class Report(NamedTuple):
    lines: int  # with the bad ones
    bad: int


def count(sources: list[Source], fields: Mapping[str, int], tally: Tally, *, progress: bool) -> Report:
    """Adds all that the sources hold to the tally; lines that hold nothing usable are named on stderr."""
    lines = bad = 0
    # What comes through a pipe has no length.
    total = None if any(source.path == "-" for source in sources) else sum(source.size for source in sources)
    with progress_bar("Counting", total, "B", shown=progress) as shown:
        for source in sources:
            block, before = "", shown.n
            for line in read(source):
                try:
                    if line.data is None:
                        raise ValueError(line.reason)
                    text = line.data.decode("utf-8-sig")
                    if source.format == "text":
                        block += text
                        if len(block) >= BLOCK:
                            tally.add(1, block)
                            block = ""
                    elif not text.strip():
                        continue
                    else:
                        for weight, content in contents(json.loads(text), fields, len(tally.counts)):
                            tally.add(weight, content)
                except (ValueError, RecursionError) as error:
                    bad += 1
                    if bad <= SHOWN_BAD_LINES:
                        name = "stdin" if source.path == "-" else source.path
                        tqdm.write(f"{name}, line {line.number}: {error}", file=sys.stderr)
                lines += 1
                shown.update(before + line.position - shown.n)
            tally.add(1, block)
        tally.flush()
    if bad > SHOWN_BAD_LINES:
        print(f"and {bad - SHOWN_BAD_LINES} more bad lines", file=sys.stderr)
    return Report(lines, bad)


# The map.


def token_map(counts: Counts, size: int, ends: Iterable[int]) -> Int64[np.ndarray, "X"]:
    """The `size` most frequent ids, ties to the lower id. The ends are always among them.

    counts 5 0 9 7, end 1    size 2: 2 1    size 3: 2 3 1    size 4: 2 3 0 1
    """
    order = np.argsort(-counts, kind="stable")
    forced = np.unique(np.fromiter(ends, np.int64))
    others = order[~np.isin(order, forced)][: size - len(forced)]
    return order[np.isin(order, np.concatenate([others, forced]))]


def coverage(counts: Counts, sizes: Iterable[int], ends: Iterable[int]) -> dict[str, float]:
    """By size of a map: the share of the counts that it covers."""
    ends, total = list(ends), int(counts.sum())
    return {str(size): round(int(counts[token_map(counts, size, ends)].sum()) / total, 6) for size in sizes}


def _write_pt(file: Path, ids: list[int], vocabulary: int) -> None:
    from specjax.checkpoint.unpickle import write_torch_zip_list

    write_torch_zip_list(file, ids)


def _write_safetensors(file: Path, ids: list[int], vocabulary: int) -> None:
    save_tensors(file, {"token_map": np.asarray(ids, np.int32)})


def _write_npy(file: Path, ids: list[int], vocabulary: int) -> None:
    with file.open("wb") as stream:  # given a name, numpy would change it
        np.save(stream, np.asarray(ids, np.uint16 if vocabulary <= 1 << 16 else np.int32))


def _write_json(file: Path, ids: list[int], vocabulary: int) -> None:
    file.write_text(json.dumps(ids) + "\n", encoding="utf-8")


WRITERS = {".pt": _write_pt, ".safetensors": _write_safetensors, ".npy": _write_npy, ".json": _write_json}


def write(outputs: list[Path], ids: list[int], vocabulary: int) -> None:
    """Every file, or, if one cannot be written, none: a reader never sees half a map."""
    with ExitStack() as stack:
        drafts = [stack.enter_context(replacing(file)) for file in outputs]
        for draft in drafts:
            WRITERS[draft.suffix](draft, ids, vocabulary)


# The command line.


def parse_outputs(given: list[str], sources: list[Source]) -> list[Path]:
    """The outputs, each of a known format and in a folder that can be written."""
    found: list[Path] = []
    taken = [Path(source.path).resolve() for source in sources]
    for text in given:
        file = Path(text)
        if file.suffix not in WRITERS:
            raise ValueError(f"--output {text} must end in {', '.join(WRITERS)}")
        if file.exists() and not file.is_file():
            raise ValueError(f"--output {text} cannot be written: it is not a file")
        if file.resolve() in taken:
            raise ValueError(f"--output {text} is also an input, or is given twice")
        try:
            with tempfile.TemporaryFile(dir=file.resolve().parent):
                pass
        except OSError as error:
            raise ValueError(f"--output {text} cannot be written: {error.strerror or error}") from None
        taken.append(file.resolve())
        found.append(file)
    return found


def tokenizer_files(name: str, *, progress: bool) -> ModelFiles:
    """A model's files, as far as its tokenizer needs them: neither weights nor config.json has to be there."""
    folder = Path(name).expanduser()
    is_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not folder.exists()
    if is_hub_id:  # `resolve` would fetch the weights too
        folder = download(
            name,
            f"no tokenizer {name!r}: there is no such folder, and the Hugging Face hub gave none",
            patterns=TOKENIZER_FILES,
            progress=progress,
            advice=f"; give {BUILT_IN_MODEL!r}, a .gguf file, a folder or a hub id",
        )
    elif name.lower() == BUILT_IN_MODEL or not folder.is_dir():
        return resolve(name, progress=progress)
    config = folder / "config.json"
    return ModelFiles(name, folder, read_json(config, name) if config.is_file() else {}, ())


def build_parser() -> argparse.ArgumentParser:
    parser = settings.Parser(
        prog="python -m specjax.train.vocab",
        description="Count the tokens of a corpus and write the most frequent ids: a map for a small draft vocabulary.",
        epilog="What is counted of a JSONL line without --field: "
        + "; or ".join(" and ".join(group) for group in FIELD_GROUPS)
        + ", whichever comes first.",
        formatter_class=settings.HelpFormatter,
    )
    parser.add_argument(
        "--tokenizer",
        default=BUILT_IN_MODEL,
        metavar="MODEL",
        help="a model as --model takes it, or a tokenizer's folder",
    )
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
    """All of the work; returns the summary."""
    started, progress = time.perf_counter(), not args.no_progress
    fields, sources = parse_fields(args.field), parse_sources(args.input, args.format)
    outputs = parse_outputs(args.output, sources)
    if fields and all(source.format == "text" for source in sources):
        raise ValueError("--field is about JSONL, and no input is")
    if args.size is not None and args.size < 1:
        raise ValueError(f"--size must be at least 1, got {args.size}")
    files = tokenizer_files(args.tokenizer, progress=progress)
    tokenizer = load_tokenizer(files)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    size = min(DEFAULT_SIZE, vocabulary) if args.size is None else args.size
    # A stop id that the tokenizer does not have is a config's of another tokenizer: nothing could read it.
    ends = sorted(token for token in stop_token_ids(files, tokenizer) if token < vocabulary)
    if size > vocabulary:
        raise ValueError(f"--size {size} is more than the {vocabulary} ids of the tokenizer {args.tokenizer}")
    if size < len(ends):
        raise ValueError(f"--size {size} leaves no room for the {len(ends)} end tokens of {args.tokenizer}")
    if not ends:
        print(f"the tokenizer {args.tokenizer} names no end token, so none is forced into the map", file=sys.stderr)
    tally = Tally(tokenizer, vocabulary)
    report = count(sources, fields, tally, progress=progress)
    if not tally.tokens:
        raise ValueError(f"nothing to count in {', '.join(args.input)}: {report.lines} lines, {report.bad} of them bad")
    write(outputs, token_map(tally.counts, size, ends).tolist(), vocabulary)
    sizes = sorted({size, *(each for each in COVERAGE_SIZES if len(ends) <= each <= vocabulary)})
    return {
        **report._asdict(),
        "tokens": tally.tokens,
        "distinct": int(np.count_nonzero(tally.counts)),
        "vocabulary": vocabulary,
        "size": size,
        "end_ids": ends,
        "coverage": coverage(tally.counts, sizes, ends),
        "outputs": args.output,
        "seconds": round(time.perf_counter() - started, 3),
    }


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        summary = run(args)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"specjax.train.vocab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specjax.train.vocab: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(json.dumps(summary))
    return 1 if summary["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
