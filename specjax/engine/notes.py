"""What an engine says of its drafting, for logs and summaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from specjax.drafters.base import Drafter, Params
from specjax.engine.buckets import Buckets
from specjax.engine.keys import Key
from specjax.engine.sequence import Sequence
from specjax.parallel.sharding import group_count, local_bytes
from specjax.state import DecodeState


def speculation_table(drafter: Drafter, buckets: Buckets) -> dict[str, str]:
    """How an engine drafts, for the log: algorithm, tree, head, and the steps that draft."""
    if drafter.width == 1:
        return {"algorithm": drafter.name}
    tree = f"up to {drafter.width} tokens" + (f"; {drafter.note}" if drafter.note else "")
    if (whole := buckets.most_whole) < buckets.most_drafting:
        least = buckets.tree_widths(buckets.most_drafting)[-1]
        tree += f"; smaller for more than {whole} requests at once, down to {least} tokens"
    drafts, more = "in steps" if buckets.adaptive else "in every step", ""
    if (most := buckets.most_drafting) < buckets.batches[-1]:
        drafts = "in steps of one request" if most == 1 else f"in steps of up to {most} requests"
        more = "; larger batches are faster without drafts here, and draft only if the number of draft tokens is set"
    drafts += " where that is measured to be faster" * buckets.adaptive + more
    head = {"head": drafter.source} if drafter.source else {}
    return {"algorithm": drafter.name, "tree": tree, **head, "drafts": drafts}


def as_lines(table: Mapping[str, str]) -> str:
    """Formats `speculation_table` as indented lines below a heading."""
    return "".join(f"\n  {name:9}  {text}" for name, text in table.items())


NOT_ASKED = "requests with speculate: false or draft_limit: 0 (the page's limit of drafts) are decoded without drafts"
SLOWER = "steps without drafts are faster by measurement, or are being measured (adaptive drafting)"


def _too_many(buckets: Buckets) -> str:
    return (
        f"batches of more than {buckets.most_drafting} requests are decoded without drafts, which is faster here; set "
        "the number of draft tokens to draft in all of them"
    )


def not_drafted(buckets: Buckets, key: Key, sequence: Sequence) -> str:
    """The reason why a step of the program `key` did not draft for a request."""
    if not buckets.drafts(1):
        return "there is no drafter (the speculative algorithm is NONE)"
    if not sequence.params.drafts:
        return NOT_ASKED
    if not buckets.drafts(key.width):
        return _too_many(buckets)
    if sequence.params.always_draft:
        return "the programs that draft were being compiled"
    return SLOWER


def drafting_summary(drafter: Drafter, buckets: Buckets, verify_steps: int, drafted_steps: int) -> dict[str, Any]:
    """`drafted_steps`, the steps of single requests that could draft, and `not_drafted`, the reason why others could
    not; None: all could, or there is no drafter."""
    reason = None
    if drafter.width > 1 and drafted_steps < verify_steps:
        reason = NOT_ASKED
        if buckets.adaptive:
            reason = SLOWER
        elif buckets.most_drafting < buckets.batches[-1]:
            reason = _too_many(buckets)
    return {"drafted_steps": drafted_steps, "not_drafted": reason}


def devices_note(mesh: Mesh, params: Params, state: DecodeState) -> str:
    """What each device of a mesh holds between two programs, for the log."""
    sizes = {
        "weights": params.target,
        "draft weights": params.draft,
        "KV pool": state.cache,
        "draft's state": state.draft,
        "rows and tokens": (state.rows, state.tokens),
    }
    parts = [f"{local_bytes(tree) / 1e9:.3f} GB {name}" for name, tree in sizes.items()]
    groups = group_count(mesh)
    spread = f" in {groups} groups over which experts are spread" if groups > 1 else ""
    return (
        f"Tensor parallel over {mesh.size} devices{spread}, each device with {', '.join(parts)}; attention and "
        "matrices in few bits by the usual kernels, other products and page writes by XLA's own operations"
    )


DOUBTED = 200  # steps of a draft model without an accepted draft after which it is reported


def doubt(drafter: Drafter, drafted_steps: int, accepted: int) -> str | None:
    """A warning about a draft model of which nothing at all is accepted; None: there is no reason for one."""
    if not drafter.runs_model or accepted or drafted_steps < DOUBTED:
        return None
    return (
        f"{drafter.name}: the target has accepted no draft in {drafted_steps} steps; the draft was probably made for "
        "another model, or its checkpoint is damaged. The text is right all the same, and NONE would be faster"
    )
