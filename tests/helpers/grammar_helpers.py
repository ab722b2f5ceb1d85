"""Grammars, and an oracle: one token at a time, from all logits and the library's own mask."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
from engine_helpers import END, NEAR, VOCABULARY, decode, tokenizer, wanted
from llguidance import LLMatcher, LLTokenizer, grammar_from
from toy_models import Toy

from specjax.engine import Completion, SamplingParams
from specjax.engine.grammar import Grammar, library_source

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "color": {"enum": ["red", "green"]},
    },
    "required": ["ok", "n", "color"],
    "additionalProperties": False,
}
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))
GRAMMARS = {
    "json": OBJECT,
    "regex": Grammar("regex", "(ab|a[b-d]{2,3}e)+"),
    "ebnf": Grammar("ebnf", 'root ::= item ("," item)*\nitem ::= "x" | "(" root ")" | [0-9]{2}\n'),
    "choice": Grammar.choice(["hello", "hell", "the cat"]),
}


@functools.cache
def library() -> LLTokenizer:
    return LLTokenizer(tokenizer().backend_tokenizer.to_str(), n_vocab=VOCABULARY, eos_token=END)


def matcher(grammar: Grammar) -> LLMatcher:
    state = LLMatcher(library(), grammar_from(*library_source(grammar)), log_level=0)
    assert not state.is_error(), state.get_error()
    return state


def mask(state: LLMatcher) -> np.ndarray:
    """bool [V]."""
    bits = np.frombuffer(state.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[:VOCABULARY].astype(bool)


def follows(grammar: Grammar, tokens: Sequence[int], *, whole: bool = True) -> bool:
    """Whether the grammar allows these tokens, and may end after them. The token that ends a text is left out."""
    state, tokens = matcher(grammar), [token for token in tokens if token != END]
    return state.try_consume_tokens(tokens) == len(tokens) and (not whole or state.is_accepting())


def generate(model: Toy, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str, list[float]]:
    """Plain decoding with a mask: the output, how it ends, and the gap of each draw."""
    assert params.grammar is not None and params.max_new_tokens is not None
    state, sampling = matcher(params.grammar), wanted(params, (END,))
    output, gaps = list[int](), list[float]()
    while len(output) < params.max_new_tokens:
        draw = oracle.draw(model.logits([*prompt, *output]), sampling, list(prompt), output, mask(state))
        output.append(draw.token)
        gaps.append(draw.gap)
        if draw.token == END or draw.token in params.stop_token_ids:
            return output, "stop", gaps
        assert state.consume_token(draw.token)
    return output, "length", gaps


def check_masked(model: Toy, prompt: Sequence[int], params: SamplingParams, done: Completion) -> None:
    """The output is the oracle's, up to its first near-tie."""
    expected, finish, gaps = generate(model, prompt, params)
    close = [i for i, gap in enumerate(gaps) if gap < NEAR]
    if close:
        assert done.output_ids[: close[0]] == expected[: close[0]], gaps
        return
    assert done.output_ids == expected, (decode(done.output_ids), decode(expected))
    assert done.finish_reason["type"] == finish
