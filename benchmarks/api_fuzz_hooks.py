"""For schemathesis: leaves out bodies that break a rule between two fields, which a schema cannot say.

`/docs` names these rules. Everything else that the schema allows must be accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import schemathesis  # pyright: ignore[reportMissingImports]

CONTEXT = 1024
"""Of the server that `api_fuzz.py` starts."""

CAPACITY = 528
LONG = 60.0
"""Seconds in which a request is answered."""


def whole(value: Any, default: int) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    return int(value) if number else default


def conflicts(body: dict[str, Any]) -> bool:
    inner = body.get("sampling_params")
    params = inner if isinstance(inner, dict) else body
    limits = "max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"
    most = max(whole(params.get(name), 0) for name in limits)
    least = max(whole(params.get(name), 0) for name in ("min_tokens", "min_new_tokens"))
    prompts = next((body[name] for name in ("messages", "prompt", "input", "text", "input_ids") if body.get(name)), "")
    # A token has a byte at least; a message has some that are not its own, also where it is given as a text.
    tokens = len(json.dumps(prompts, ensure_ascii=False).encode(errors="replace")) + 16 * (2 + str(prompts).count("{"))
    many = len(prompts) if isinstance(prompts, list) and "messages" not in body else 1
    several = 1 if isinstance(prompts, list) and all(isinstance(each, int) for each in prompts) else many
    seeds = [params[name] for name in ("seed", "sampling_seed") if params.get(name) is not None]
    timeout, named = body.get("timeout"), body.get("token_ids_logprob")
    each_prompts = [body.get(name) for name in ("return_logprob", "top_logprobs_num", "logprob_start_len")]
    return (
        (isinstance(timeout, int | float) and timeout < LONG)  # a 408
        or (isinstance(body.get("stream_options"), dict) and body.get("stream") is not True)
        or tokens + max(most, least) > CONTEXT
        or least > (most or 16)
        or (least > 0 and len(params.get("stop_token_ids") or ()) > 6)
        or many * whole(params.get("n"), 1) > CAPACITY
        or (len(seeds) == 2 and seeds[0] != seeds[1])
        or (isinstance(named, list) and any(isinstance(ids, list) for ids in named) and len(named) != several)
        or any(isinstance(given, list) and len(given) != several for given in each_prompts)
        or any(map(is_no_json, schemas(body)))
        or any("::=" not in grammar for grammar in texts(body, "ebnf", "guided_grammar", "grammar"))
        or any(SPECIAL & set(regex) for regex in texts(body, "regex", "guided_regex"))
    )


SPECIAL = set("[](){}*+?|\\^$.")  # some of these make no regular expression


def texts(body: dict[str, Any], *names: str) -> Iterator[str]:
    """What a body gives under these names, of which a schema can only say that it is a text."""
    for place in (body, body.get("sampling_params"), body.get("structured_outputs")):
        if isinstance(place, dict):
            yield from (place[name] for name in names if isinstance(place.get(name), str))


def schemas(body: dict[str, Any]) -> Iterator[Any]:
    """What a body gives as JSON schemas."""
    yield from (body.get(name) for name in ("json_schema", "guided_json"))
    for path in (
        ("response_format", "json_schema", "schema"),
        ("text", "format", "schema"),
        ("structured_outputs", "json"),
        ("sampling_params", "json_schema"),
    ):
        found: Any = body
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        yield found


def is_no_json(schema: Any) -> bool:
    """Whether it is a text that holds no JSON object, which a schema of the body cannot ask for."""
    try:
        return isinstance(schema, str) and not isinstance(json.loads(schema), dict)
    except ValueError:
        return True


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Takes the condition of `stream_options` from a chat, which `conflicts` knows: of a schema with five conditions
    schemathesis 4.32 cannot make a body."""
    chat = raw_schema["components"]["schemas"]["ChatRequest"]
    (condition,) = (each for each in chat["allOf"] if "stream_options" in each["if"]["properties"])
    chat["allOf"].remove(condition)


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Not `filter_body`, which the phase that tries the edges of each value does not ask."""
    return not (isinstance(case.body, dict) and conflicts(case.body))
