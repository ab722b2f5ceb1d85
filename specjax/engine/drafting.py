"""How many steps of a run drafted, and the reason why others did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax.drafters.base import Drafter
from specjax.engine.buckets import Buckets


def drafting_summary(
    drafter: Drafter,
    buckets: Buckets,
    verify_steps: int,
    drafted_steps: int,
    name_options: Callable[[str], str] = str,
) -> dict[str, Any]:
    """`drafted_steps`, the steps of single requests that could draft, and `not_drafted`, the reason why others could
    not; None: all could, or there is no drafter. `name_options` puts an interface's names of options into the reason.
    """
    reason = None
    if drafter.width > 1 and drafted_steps < verify_steps:
        reason = "requests with speculate: false are decoded without drafts"
        if (most := buckets.most_drafting) < buckets.batches[-1]:
            reason = (
                f"batches of more than {most} requests are decoded without drafts, which is faster here; give "
                "TreeShape.nodes to draft in all of them"
            )
    return {"drafted_steps": drafted_steps, "not_drafted": reason and name_options(reason)}
