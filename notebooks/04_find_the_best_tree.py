# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which draft tree is fastest here?
#
# A draft tree has a number of steps (levels), a top-k (nodes of a level that are expanded) and a number of draft
# tokens (nodes, the root included). More of each means more accepted tokens a step, and a slower step. Which tree is
# the fastest depends on the model, its draft, the machine, the batch and the text, so it is measured.
#
# `specjax bench tune-tree` measures a grid of trees by successive halving: each round runs the remaining trees, keeps
# the faster half and doubles the number of conversations. So a slow tree costs one conversation, and the best few run
# on all of them. Every tree's score is its speed-up over no drafts, measured in the same process, taking turns.
#
# It takes several minutes on 2 cores, half of them for compiling.
#
# The first cell installs specjax if it is missing. Until specjax is on PyPI, put the wheel that `make wheel` writes to
# `dist/` in this notebook's folder, or change the first line: `".."` is the checkout around this folder, and
# `"git+https://..."` a repository. With an NVIDIA GPU write `"specjax[cuda12]"` or `"..[cuda12]"`. On Colab (File >
# Upload notebook; the wheel goes in the pane of files) pip replaces some of Colab's packages, such as JAX, Flax, Numba
# and llvmlite: afterwards choose Runtime > Restart session, and run all cells again.

# %%
SOURCE = "specjax"  # what pip installs if specjax is missing: a name, a URL, a wheel or a checkout's folder
try:
    import specjax_kernels  # noqa: F401  (any folder named specjax, such as a clone, satisfies `import specjax`)
except ImportError:
    print("specjax is missing: pip install", SOURCE)
    # %pip install --find-links . "{SOURCE}" matplotlib ipywidgets

# %%
import json
import os
import re
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from specjax.bench.__main__ import main as bench

SHORT = bool(os.environ.get("SPECJAX_NOTEBOOK_SHORT"))  # few tokens, for the tests
MODEL = os.environ.get("SPECJAX_NOTEBOOK_MODEL", "smollm2-135m-instruct")  # built in; a folder or a hub id will do, too
HEAD = os.environ.get("SPECJAX_NOTEBOOK_HEAD")  # an EAGLE-3 head's folder or hub id; None: the one that ships
plt.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)

# %% [markdown]
# ## Search
#
# The grid is every combination of these numbers that makes a tree of its own. The draft is given as to the server.

# %%
draft = ["--speculative-algorithm", "EAGLE3"]
if HEAD:
    draft += ["--speculative-draft-model-path", HEAD]
STEPS, TOPKS, NODES = ("1", "2", "3", "5"), ("1", "2", "4"), ("4", "6", "8", "16")
if SHORT:
    STEPS, TOPKS, NODES = ("1", "2"), ("1", "2"), ("2", "4")
folder = Path(tempfile.mkdtemp(prefix="specjax-tune-")) / "tune-tree"

with redirect_stderr(sys.stdout):  # messages belong into this cell
    status = bench(
        [
            *("tune-tree", "--model", MODEL, *draft, "--output", str(folder)),
            *("--steps", *STEPS, "--topks", *TOPKS, "--draft-tokens", *NODES),
            *("--limit", "2" if SHORT else "4", "--max-new-tokens", "12" if SHORT else "64"),
            *("--best", "9" if SHORT else "3"),
        ]
    )
assert status == 0, "the search failed"

# %% [markdown]
# In a shell the same command resumes after an interruption. The file it writes is what the server takes:
#
# ```sh
# specjax serve --config runs/tune-tree/best.toml
# ```

# %%
print((folder / "best.toml").read_text())
document = json.loads((folder / "results.json").read_text())
rounds = document["rounds"]
for number, each in enumerate(rounds, start=1):
    print(f"Round {number}: {len(each['rows']) - 1} trees, {each['conversations']} conversations of each set")

# %% [markdown]
# ## The map
#
# Speed-ups over no drafts in the first round, for each number of steps and of draft tokens. Frames mark the trees of
# the last round.

# %%
TREE = re.compile(r" (\d+)/(\d+)/(\d+)")


def tree_of(row: dict) -> tuple[str, str, str] | None:
    """Steps, top-k and draft tokens of a row; None without drafts."""
    numbers = TREE.search(row["method"])
    return numbers and numbers.groups()


speeds = {tree: row["speed_up"]["value"] for row in rounds[0]["rows"] if (tree := tree_of(row))}
last = {tree_of(row) for row in rounds[-1]["rows"]}
span = max(0.05, *(abs(value - 1) for value in speeds.values()))
rows = sorted({int(steps) for steps, _, _ in speeds})
columns = sorted({int(nodes) for _, _, nodes in speeds})
topks = sorted({int(topk) for _, topk, _ in speeds})
figure, panels = plt.subplots(1, len(topks), figsize=(1 + 2.6 * len(topks), 3.0), sharey=True, squeeze=False)
for ax, topk in zip(panels[0], topks, strict=True):
    shown = [[speeds.get((str(steps), str(topk), str(count)), np.nan) for count in columns] for steps in rows]
    edges = np.arange(len(columns) + 1) - 0.5, np.arange(len(rows) + 1) - 0.5
    ax.pcolormesh(*edges, np.array(shown), cmap="RdBu", vmin=1 - span, vmax=1 + span)
    for (y, x), value in np.ndenumerate(np.array(shown)):
        if np.isnan(value):
            continue
        ax.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
        if (str(rows[y]), str(topk), str(columns[x])) in last:
            ax.add_patch(plt.Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, linewidth=1.5))
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlabel="draft tokens", ylabel="steps", title=f"top-k {topk}")
plt.show()

# %% [markdown]
# ## Speed follows accept length, less what drafting costs
#
# Each dot is a tree of the first round. Along the line a step with drafts would take as long as one without; on a CPU
# each checked node costs time, since multiplying is the work; on a GPU the first some ten cost hardly more than one,
# since reading the weights is.

# %%
figure, ax = plt.subplots(figsize=(4.6, 3.8))
most = 1.0
for topk in topks:
    trees = [row for row in rounds[0]["rows"] if (tree := tree_of(row)) and tree[1] == str(topk)]
    x, y = [row["accept_length"] for row in trees], [row["speed_up"]["value"] for row in trees]
    ax.scatter(x, y, label=f"top-k {topk}")
    most = max(most, *x, *y)
ax.plot([1, most], [1, most], color="#999999", linewidth=1, zorder=0)
ax.set(xlabel="accept length", ylabel="speed-up")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## The last round
#
# Speed-ups with 95% intervals by bootstrap over conversations. Every text equals the text without drafts.

# %%
for row in rounds[-1]["rows"]:
    speed, texts = row["speed_up"], row["texts"]
    interval = "" if speed["low"] is None else f" ({speed['low']:.2f} to {speed['high']:.2f})"
    print(
        f"{row['method']}: accept length {row['accept_length']:.2f}, speed-up {speed['value']:.2f}{interval}; "
        f"{texts['equal']} of {sum(texts.values())} texts equal"
    )
