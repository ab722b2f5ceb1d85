"""Compares structured output with free output: prompts with a JSON schema and without, one or several at a time.

    python benchmarks/structured.py [--algorithms AUTO NGRAM NONE] [--batch 1 4] [--rounds 3] [--record [LABEL]]

Each prompt is completed with the schema, then without it for the same number of tokens, both with an empty cache. A
first, unmeasured round compiles programs and the grammar.

    tokens / s   of all requests, with their prompts
    accept       tokens / forward
    ratio        of the rate with the schema to the rate without; above 1, forced tokens save more than masks cost

The last line is one JSON document with every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jsonschema
from records import finish, machine

from specjax import Engine, EngineConfig, SamplingParams
from specjax.engine.grammar import Grammar

TEXT = {"type": "string", "maxLength": 48}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": TEXT,
        "languages": {"type": "array", "items": {"enum": ["English", "French", "German", "Spanish"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": TEXT, "city": TEXT, "country": TEXT},
            "required": ["street", "city", "country"],
            "additionalProperties": False,
        },
        "employed": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 160},
    },
    "required": ["name", "age", "occupation", "languages", "address", "employed", "summary"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
PEOPLE = (
    "Maria Keller is a 34 year old nurse who lives at 12 Lindenweg in Zurich, Switzerland. She speaks German, French.",
    "John Smith, 58, drives a taxi in London. His flat is at 3 Baker Street. He speaks English, and learns Spanish.",
    "Ana Garcia is 22. She studies medicine in Madrid, Spain, and lives with her parents at 7 Calle Mayor.",
    "Pierre Martin retired at 66 from his bakery in Lyon, France. He still lives above it, at 5 Rue de la Paix.",
    "Emily Jones writes novels. She is 41 and lives in Boston, USA, at 200 Elm Street. She speaks English and German.",
    "Lukas Weber, 29, is looking for work as an engineer. He lives at 9 Hauptstrasse in Berlin, Germany.",
    "Sofia Rossi, 37, teaches French and Spanish at a school in Dublin, Ireland. Her house is at 15 Green Road.",
    "David Brown is a 50 year old carpenter from Sydney, Australia, who lives at 88 Ocean Drive and speaks English.",
)
MOST = 192  # tokens of an answer


def complete(engine: Engine, prompts: list[Any], params: list[SamplingParams]) -> tuple[dict[str, Any], list[Any]]:
    """Times and counts of concurrent requests, and their completions."""
    assert engine.flush_cache()
    started = time.perf_counter()
    completions = engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    forwards = sum(done.spec_verify_ct for done in completions)
    drafted = sum(count * (i + 1) for done in completions for i, count in enumerate(done.spec_accept_histogram))
    tokens = sum(done.completion_tokens for done in completions)
    return {"seconds": seconds, "tokens": tokens, "forwards": forwards, "drafted": drafted}, completions


def rate(runs: list[dict[str, Any]]) -> float:
    return sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)


def accept_length(runs: list[dict[str, Any]]) -> float:
    return sum(run["drafted"] for run in runs) / sum(run["forwards"] for run in runs)


def measure(engine: Engine, batch: int, rounds: int) -> dict[str, Any]:
    prompts = [[{"role": "user", "content": f"Describe this person as JSON.\n\n{text}"}] for text in PEOPLE]
    runs: dict[str, list[dict[str, Any]]] = {"schema": [], "free": []}
    ratios, valid, count = [], 0, 0
    for turn in range(rounds + 1):
        both: dict[str, list[dict[str, Any]]] = {"schema": [], "free": []}
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            with_schema, completions = complete(
                engine, part, [SamplingParams(max_new_tokens=MOST, grammar=GRAMMAR)] * len(part)
            )
            free = [SamplingParams(max_new_tokens=done.completion_tokens, ignore_eos=True) for done in completions]
            both["schema"].append(with_schema)
            both["free"].append(complete(engine, part, free)[0])
            for done in completions if turn else ():
                ended = done.finish_reason["type"] == "stop"
                count, valid = count + 1, valid + ended
                if ended:
                    jsonschema.validate(json.loads(done.text), SCHEMA)
        if turn:
            ratios.append(rate(both["schema"]) / rate(both["free"]))
            for name in runs:
                runs[name] += both[name]
    summary: dict[str, Any] = {
        name: {"rate": rate(rows), "accept_length": accept_length(rows)} for name, rows in runs.items()
    }
    return {
        **summary,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "complete": valid,
        "answers": count,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["AUTO", "NGRAM", "NONE"], metavar="NAME")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--record", nargs="?", const=True, metavar="LABEL", help="write the document to results/")
    args = parser.parse_args()

    document: dict[str, Any] = machine("llguidance") | {"schema": SCHEMA, "results": []}
    for algorithm in args.algorithms:
        config = EngineConfig(max_running_requests=max(args.batch), adaptive=True)
        engine = Engine.from_pretrained(args.model, draft=algorithm, config=config, progress=False)
        for batch in args.batch:
            row = measure(engine, batch, args.rounds)
            figures = (
                f"{name} {row[kind]['rate']:6.1f} tokens/s, accept {row[kind]['accept_length']:.2f}"
                for name, kind in (("with", "schema"), ("without", "free"))
            )
            ends = f"ratio {row['ratio']:.2f}   {row['complete']} of {row['answers']} answers complete"
            print(f"{algorithm:6} batch {batch:2}", *figures, ends, sep="   ", flush=True)
            document["results"].append({"algorithm": algorithm, "batch": batch} | row)
        del engine
    finish("structured", document, record=args.record)


if __name__ == "__main__":
    main()
