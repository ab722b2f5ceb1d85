"""The model card of a trained head: what it is for, what made it, and what it reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.config import HeadConfig
from specjax.train.measure import Measured

ROWS = 12
"""Lines of the curve's table."""


def model_card(
    *,
    target: str,
    kind: str,
    facts: Mapping[str, Any],
    command: str,
    step: int,
    metrics: Sequence[Mapping[str, Any]],
    measured: Measured | None,
    head: HeadConfig,
) -> str:
    """Markdown, without front matter."""
    lines = [
        f"# {kind} draft head for {target}",
        "",
        f"Proposes tokens for {target}, which checks them: it changes the speed of decoding and never the text.",
        f"One decoder layer of width {head.hidden_size}, a vocabulary of {head.vocab_size} tokens"
        + (f", reading the outputs of layers {', '.join(map(str, head.aux_layers))}." if head.aux_layers else "."),
        "Trained with specjax (`python -m specjax.train`); in the layout that specjax, SGLang and vLLM read.",
        "",
        "## Data",
        "",
        *[f"- {name.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}"
          for name, value in facts.items()],
        "",
        "## Command",
        "",
        "```sh",
        command,
        "```",
        "",
        f"This is the head after step {step}.",
        "",
    ]  # fmt: skip
    if measured is not None:
        shares = ", ".join(f"{share:.2f}" for share in measured.by_depth)
        lines += [
            "## Accept length",
            "",
            f"{measured.accept_length:.3f} tokens a verification (bonus included), greedy, a chain, on prompts "
            f"held back from the training data, in the engine: {measured.tokens} tokens in {measured.steps} steps. "
            f"Of the drafts whose parent was accepted, accepted by depth: {shares}.",
            "",
        ]
    curve = [row for row in metrics if "accept_length" in row]
    trained = [row for row in metrics if "loss" in row]
    if curve or trained:
        lines += [
            "## Curves",
            "",
            "| step | tokens seen | loss | right by round | accept length |",
            "|---|---|---|---|---|",
        ]
        lines += _table(curve, trained)
        lines.append("")
    return "\n".join(lines)


def _table(curve: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """About ROWS lines: where it was measured, else every so often."""
    steps = [row["step"] for row in curve] or [row["step"] for row in trained]
    chosen = steps[:: max(1, -(-len(steps) // ROWS))]
    chosen = [*chosen, steps[-1]] if chosen[-1] != steps[-1] else chosen
    measured = {row["step"]: row for row in curve}
    found = []
    for step in chosen:
        before = [row for row in trained if row["step"] <= step]
        row = before[-1] if before else {}
        right = " ".join(f"{value:.2f}" for value in row.get("matched", [])[:5])
        length = measured.get(step, {}).get("accept_length", "")
        found.append(f"| {step} | {row.get('tokens', '')} | {row.get('loss', '')} | {right} | {length} |")
    return found
