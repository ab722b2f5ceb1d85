"""The results of a run: the accept length of its head in the engine, a model card, and a picture of the curves.

Training accuracy shows how often a head is right on given text. Accept length, measured by decoding held-back prompts,
shows its worth, and reveals a mismatch between training and serving.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checkpoint.files import replacing
from specjax.drafters import Params, TreeShape
from specjax.engine import Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.models import make_target
from specjax.train.checkpoints import read_metrics
from specjax.train.draft import Draft
from specjax.train.inputs import Inputs
from specjax.train.options import MeasureSettings
from specjax.types import Weights

logger = logging.getLogger(__name__)

SMOOTHED, MARKED = 20, 12
"""Parts of a curve that a moving average is over; most measurements whose values are written beside their points."""


class Measured(NamedTuple):
    accept_length: float  # emitted tokens / verification forwards, the bonus included
    by_depth: list[float]  # accepted share, at depth d, of drafts whose parent was accepted
    tokens: int
    steps: int


class Measure:
    """One engine for all measurements of a run; each call puts another head, in the serving dtype, into it."""

    def __init__(
        self, settings: MeasureSettings, inputs: Inputs, target_params: Weights, draft: Any,
        prompts: list[list[int]],
    ) -> None:  # fmt: skip
        shape = TreeShape(settings.measure_steps, 1, settings.measure_steps + 1)
        rows, longest = min(16, len(prompts)), max(map(len, prompts)) + settings.measure_tokens
        config = EngineConfig(
            max_running_requests=rows,
            context_length=min(longest, inputs.source.config.max_positions),
            max_total_tokens=rows * (longest + 64 + 4 * shape.nodes),
            random_seed=0,
        )
        target = make_target(inputs.source.config)
        drafter = inputs.draft.drafter(target, shape)
        self._target_params, self._prompts = target_params, prompts
        self._engine = Engine(
            target, Params(target_params, draft), inputs.source.tokenizer, drafter, config=config,
            eos_ids=inputs.source.eos_ids,
        )  # fmt: skip
        self._sampling = SamplingParams(max_new_tokens=settings.measure_tokens, temperature=0.0)

    def __call__(self, draft: Any) -> Measured:
        self._engine.params = Params(self._target_params, jax.block_until_ready(draft))
        done = self._engine.generate(self._prompts, self._sampling)
        # Steps by number of accepted drafts; and those that accepted at least so many.
        histogram = [sum(bins) for bins in zip(*(one.spec_accept_histogram for one in done), strict=True)]
        reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
        by_depth = [round(deeper / before, 4) for before, deeper in pairwise(reached) if before]
        steps, emitted = sum(histogram), sum(reached)
        return Measured(round(emitted / max(steps, 1), 4), by_depth, emitted, steps)


def model_card(
    *, target: str, draft: Draft, facts: Mapping[str, Any], command: str, step: int,
    metrics: Sequence[Mapping[str, Any]], measured: Measured | None,
) -> str:  # fmt: skip
    """Markdown, without front matter."""
    listed = {name: ", ".join(value) if isinstance(value, list) else value for name, value in facts.items()}
    sections = [
        f"# {draft.title} for {target}",
        f"Proposes tokens for {target}, which checks them: it changes the speed of decoding and never the text.\n"
        f"{draft.description}",
        "## Data",
        "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in listed.items()),
        f"## Command\n\n```sh\n{command}\n```\n\nThis is the draft after step {step}.",
    ]
    if measured is not None:
        shares = ", ".join(f"{share:.2f}" for share in measured.by_depth)
        sections += [
            "## Accept length",
            f"{measured.accept_length:.3f} tokens a verification (bonus included), greedy, a chain, on prompts "
            f"held back from the training data, in the engine: {measured.tokens} tokens in {measured.steps} steps. "
            f"Of the drafts whose parent was accepted, accepted by depth: {shares}.",
        ]
    # About 12 lines: the steps with a measurement or, without any, some of the logged ones.
    lengths = {row["step"]: row["accept_length"] for row in metrics if "accept_length" in row}
    trained = [row for row in metrics if "loss" in row]
    if steps := list(lengths) or [row["step"] for row in trained]:
        table = ["| step | tokens seen | loss | right by round | accept length |", "|---|---|---|---|---|"]
        for step in sorted({*steps[:: -(-len(steps) // 12)], steps[-1]}):
            row = next((row for row in reversed(trained) if row["step"] <= step), {})
            right = " ".join(f"{value:.2f}" for value in row.get("matched", [])[:5])
            cells = (step, row.get("tokens", ""), row.get("loss", ""), right, lengths.get(step, ""))
            table.append(f"| {' | '.join(map(str, cells))} |")
        sections += ["## Curves", "\n".join(table)]
    return "\n\n".join(sections) + "\n"


def plot(folder: Path) -> Path | None:
    """Write curves.png into a run's folder: loss, accuracy by round and accept length over tokens seen.

    Long curves are drawn faintly, with a moving average over them; points of short ones are marked, as a curve of one
    point would show nothing. Returns None if there is nothing to draw, or no matplotlib.
    """
    rows = read_metrics(folder)
    trained = [row for row in rows if "loss" in row]
    if not trained:
        return None
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        logger.warning("no curves.png: matplotlib is not installed (pip install 'specjax[train]')")
        return None
    tokens = {row["step"]: row["tokens"] for row in trained}
    seen = np.array(list(tokens.values()))
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, right, accept = figure.subplots(1, 3, sharex=True)

    def draw(axes: Any, values: Sequence[float], **style: Any) -> None:
        width = len(values) // SMOOTHED
        if width < 2:
            axes.plot(seen, values, marker="o", markersize=4, **style)
            return
        axes.plot(seen, values, alpha=0.3, linewidth=1, color=style["color"])
        mean = np.convolve(values, np.full(width, 1 / width), mode="valid")  # of the points up to each
        axes.plot(seen[width - 1 :], mean, linewidth=2, **style)

    losses = [row["loss"] for row in trained]
    draw(loss, losses, color="C0")
    if max(losses) > 3 * min(losses) > 0:
        loss.set_yscale("log")  # or the first steps would flatten the rest
    rounds = len(trained[0]["matched"])
    for j in range(rounds):
        color = colormaps["viridis"](0.85 * j / max(rounds - 1, 1))
        draw(right, [row["matched"][j] for row in trained], color=color, label=f"round {j}")
    figure.legend(loc="outside lower center", ncols=rounds)  # not over the curves
    measured = [row for row in rows if "accept_length" in row and row["step"] in tokens]
    accept.plot([tokens[row["step"]] for row in measured], [row["accept_length"] for row in measured], "o-", color="C1")
    for row in measured if len(measured) <= MARKED else ():
        accept.annotate(
            f"{row['accept_length']:.2f}", (tokens[row["step"]], row["accept_length"]), (0, 6),
            textcoords="offset points", ha="center",
        )  # fmt: skip
    if not measured:
        accept.text(0.5, 0.5, "not measured", transform=accept.transAxes, ha="center", color="gray")
    titles = ("loss", "right, of the training text's tokens", "accept length in the engine, held back")
    for axes, title in zip((loss, right, accept), titles, strict=True):
        axes.set(title=title, xlabel="tokens seen")
        axes.margins(y=0.12)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.xaxis.set_major_formatter(EngFormatter())
    file = folder / "curves.png"
    with replacing(file) as draft:
        figure.savefig(draft, dpi=120)
    return file
