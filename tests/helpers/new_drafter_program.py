"""Adds a row to the table of drafters, then parses command lines and completes prompts with the new drafter.

Arguments: a folder with a model. Prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from lookup_drafter import Lookup

from specjax.drafters import DRAFTERS

DRAFTERS[Lookup.algorithm] = Lookup

from specjax.cli import build, flags, generate, serve  # noqa: E402 - commands are imported after the row is there
from specjax.settings import Parser, add_flags, parse  # noqa: E402

PROMPTS = ["to be or not to be or not", "a b a b a b a"]


def main(folder: Path) -> None:
    toml, given, written = (folder / name for name in ("lookup.toml", "in.jsonl", "out.jsonl"))
    toml.write_text('[speculative]\nspeculative-algorithm = "LOOKUP"\nspeculative-lookup-span = 3\n')
    given.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    parser, defaults = Parser(prog="program"), flags.Settings()
    add_flags(parser, defaults)

    def drafts(*argv: str) -> str:
        return repr(build.draft_options(parse(parser, argv, defaults)[1]))

    words = "--speculative-algorithm", "lookup", "--speculative-lookup-occurrence", "Earliest"
    answer = {"flags": drafts(*words, "--speculative-lookup-places", "1", "b"), "file": drafts("--config", str(toml))}
    try:
        with flags.named_as_flags(defaults):
            Lookup(span=99)
    except ValueError as error:
        answer["refused"] = str(error)
    answer |= {"help": " ".join(parser.format_help().split()), "keys": build.speculative_settings(Lookup(span=2))}
    files = ["--model", str(folder), "--input", str(given), "--output", str(written), "--no-progress"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert serve.main(["--model", str(folder), "--config", str(toml), "--dry-run", "--json"]) == 0
    answer["dry run"] = json.loads(printed.getvalue())["speculation"]
    for name, more in (("drafted", ["--config", str(toml)]), ("plain", ["--speculative-algorithm", "none"])):
        assert generate.main([*files, "--max-new-tokens", "24", "--temperature", "0", "--ignore-eos", *more]) == 0
        answer[name] = [json.loads(line) for line in written.read_text().splitlines()]
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
