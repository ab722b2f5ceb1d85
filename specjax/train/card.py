"""The results of a run for people: the model card of the head, and a picture of the curves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.checkpoint.files import replacing
from specjax.config import HeadConfig
from specjax.train.checkpoints import read_metrics
from specjax.train.measure import Measured

logger = logging.getLogger(__name__)

ROWS = 12
"""Approximate number of lines of the table of curves."""


def model_card(
    *, target: str, kind: str, facts: Mapping[str, Any], command: str, step: int,
    metrics: Sequence[Mapping[str, Any]], measured: Measured | None, head: HeadConfig,
) -> str:  # fmt: skip
    """Markdown, without front matter."""
    layers = f", reading the outputs of layers {', '.join(map(str, head.aux_layers))}" if head.aux_layers else ""
    listed = {name: ", ".join(value) if isinstance(value, list) else value for name, value in facts.items()}
    sections = [
        f"# {kind} draft head for {target}",
        f"Proposes tokens for {target}, which checks them: it changes the speed of decoding and never the text.\n"
        f"One decoder layer of width {head.hidden_size}, a vocabulary of {head.vocab_size} tokens{layers}.\n"
        "Trained with specjax (`python -m specjax.train`); in the layout that specjax, SGLang and vLLM read.",
        "## Data",
        "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in listed.items()),
        f"## Command\n\n```sh\n{command}\n```\n\nThis is the head after step {step}.",
    ]
    if measured is not None:
        shares = ", ".join(f"{share:.2f}" for share in measured.by_depth)
        sections += [
            "## Accept length",
            f"{measured.accept_length:.3f} tokens a verification (bonus included), greedy, a chain, on prompts "
            f"held back from the training data, in the engine: {measured.tokens} tokens in {measured.steps} steps. "
            f"Of the drafts whose parent was accepted, accepted by depth: {shares}.",
        ]
    # About ROWS lines: the steps with a measurement or, without any, some of the logged ones.
    lengths = {row["step"]: row["accept_length"] for row in metrics if "accept_length" in row}
    trained = [row for row in metrics if "loss" in row]
    if steps := list(lengths) or [row["step"] for row in trained]:
        table = ["| step | tokens seen | loss | right by round | accept length |", "|---|---|---|---|---|"]
        for step in sorted({*steps[:: -(-len(steps) // ROWS)], steps[-1]}):
            row = next((row for row in reversed(trained) if row["step"] <= step), {})
            right = " ".join(f"{value:.2f}" for value in row.get("matched", [])[:5])
            cells = (step, row.get("tokens", ""), row.get("loss", ""), right, lengths.get(step, ""))
            table.append(f"| {' | '.join(map(str, cells))} |")
        sections += ["## Curves", "\n".join(table)]
    return "\n\n".join(sections) + "\n"


def plot(folder: Path) -> Path | None:
    """Write curves.png into a run's folder: loss, accuracy by round and accept length over tokens seen.

    Returns None if there is nothing to draw, or no matplotlib.
    """
    rows = read_metrics(folder)
    trained = [row for row in rows if "loss" in row]
    if not trained:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no curves.png: matplotlib is not installed (pip install 'specjax[train]')")
        return None
    tokens = {row["step"]: row["tokens"] for row in trained}
    seen = list(tokens.values())
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, right, accept = figure.subplots(1, 3)
    loss.plot(seen, [row["loss"] for row in trained])
    for j in range(len(trained[0]["matched"])):
        right.plot(seen, [row["matched"][j] for row in trained], label=f"round {j}")
    right.legend()
    measured = [row for row in rows if "accept_length" in row and row["step"] in tokens]
    accept.plot([tokens[row["step"]] for row in measured], [row["accept_length"] for row in measured], marker="o")
    titles = ("loss", "right, of the training text's tokens", "accept length in the engine, held back")
    for axes, title in zip((loss, right, accept), titles, strict=True):
        axes.set(title=title, xlabel="tokens seen")
    file = folder / "curves.png"
    with replacing(file) as draft:
        figure.savefig(draft, dpi=120)
    return file
