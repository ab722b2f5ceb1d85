"""Engines over several CPU devices whose tree widths change, for tests/core/test_mesh_features.py.

Runs in a separate process. Prints a line of JSON per case.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from engine_helpers import force_drafts, text_parity, tokenizer
from mesh_program import BIAS, CASES, settings, target, weights

from specjax.drafters import Params
from specjax.engine import Engine, SamplingParams
from specjax.engine.grammar import Grammar

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]})
SHARED = [*range(60, 76)]
REQUESTS = [
    (SHARED, SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=3, logprob_ids=(5, 70))),
    ([9, 8, 7, 60, 61], SamplingParams(max_new_tokens=14, ignore_eos=True, logit_bias=BIAS, prompt_logprobs=2)),
    ([*SHARED, 4], SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.9, seed=7, logprobs=0)),
    ([100, 101], SamplingParams(max_new_tokens=24, grammar=Grammar("json_schema", SCHEMA), logprobs=1)),
    ([*SHARED, 4, 5], SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=2, logprob_start_len=3)),
]  # fmt: skip


def run(case: str, count: int, adaptive: bool) -> dict[str, Any]:
    drafter, draft, description = CASES[case]()
    config = replace(settings(count), max_running_requests=2, adaptive=adaptive)
    params = Params(weights, draft)
    engine = Engine(target, params, tokenizer(), drafter, config=config, draft_model=description)
    chosen = force_drafts(engine, lambda: text_parity(engine)) if adaptive else []
    prompts, sampling = zip(*REQUESTS, strict=True)
    # The other requests reuse pages of the first.
    done = [engine.generate(prompts[0], sampling[0]), *engine.generate([*prompts[1:]], [*sampling[1:]])]
    engine.check_integrity()
    return {
        "texts": [completion.output_ids for completion in done],
        "cached": [completion.cached_tokens for completion in done],
        "logprobs": [[(each.logprob, each.top, each.of_ids) for each in one.logprobs or ()] for one in done],
        "prompts": [[(each.logprob, each.top) for each in one.prompt_logprobs or ()] for one in done],
        "accepted": engine.counters.accepted,
        "chosen": sorted(set(chosen)),
    }


if __name__ == "__main__":
    for argument in map(json.loads, sys.argv[1:]):
        print(json.dumps(run(*argument)), flush=True)
