"""For schemathesis: leaves out bodies that break a rule between two fields, which a schema cannot say.

`/docs` names these rules. Everything else that the schema allows must be accepted.
"""

from __future__ import annotations

import json
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
    most = max(whole(params.get(name), 0) for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"))
    least = max(whole(params.get(name), 0) for name in ("min_tokens", "min_new_tokens"))
    prompts = next((body[name] for name in ("messages", "prompt", "text", "input_ids") if body.get(name)), "")
    # A token has a byte at least; a message has some that are not its own.
    tokens = len(json.dumps(prompts, ensure_ascii=False).encode(errors="replace")) + 16 * str(prompts).count("{")
    many = len(prompts) if isinstance(prompts, list) and "messages" not in body else 1
    seeds = [params[name] for name in ("seed", "sampling_seed") if params.get(name) is not None]
    timeout = body.get("timeout")
    return (
        (isinstance(timeout, int | float) and timeout < LONG)  # a 408
        or tokens + max(most, least) > CONTEXT
        or least > (most or 16)
        or (least > 0 and len(params.get("stop_token_ids") or ()) > 6)
        or many * whole(params.get("n"), 1) > CAPACITY
        or (len(seeds) == 2 and seeds[0] != seeds[1])
    )


@schemathesis.hook
def filter_body(context: Any, body: Any) -> bool:
    return not (isinstance(body, dict) and conflicts(body))
