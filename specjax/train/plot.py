"""A picture of a run's curves, where matplotlib is installed."""

from __future__ import annotations

import logging
from pathlib import Path

from specjax.checkpoint.files import replacing
from specjax.train.checkpoints import read_metrics

logger = logging.getLogger(__name__)


def plot(folder: Path) -> Path | None:
    """Write curves.png into a run's folder: loss, accuracy by round and accept length over tokens seen.

    Returns None if there is nothing to draw, or no matplotlib.
    """
    rows = read_metrics(folder)
    trained = [row for row in rows if "loss" in row]
    if not trained:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no curves.png: matplotlib is not installed (pip install 'specjax[train]')")
        return None
    tokens = {row["step"]: row["tokens"] for row in trained}
    seen = list(tokens.values())
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, right, accept = figure.subplots(1, 3)
    loss.plot(seen, [row["loss"] for row in trained])
    loss.set(title="loss", xlabel="tokens seen")
    for j in range(len(trained[0]["matched"])):
        right.plot(seen, [row["matched"][j] for row in trained], label=f"round {j}")
    right.set(title="right, of the training text's tokens", xlabel="tokens seen")
    right.legend()
    measured = [row for row in rows if "accept_length" in row and row["step"] in tokens]
    accept.plot([tokens[row["step"]] for row in measured], [row["accept_length"] for row in measured], marker="o")
    accept.set(title="accept length in the engine, held back", xlabel="tokens seen")
    file = folder / "curves.png"
    with replacing(file) as draft:
        figure.savefig(draft, dpi=120)
    return file
