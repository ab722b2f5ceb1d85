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
# Running hundreds of trees one after another takes hours. `specjax bench tune-tree` runs few and predicts the
# others:
#
#     tokens/s = batch x accept length / (draft time + verify time + the rest of a step)
#
# Accept lengths come from one recorded text of each top-k, on which every smaller tree is replayed exactly; the times
# of a step's parts are measured once for each shape. The best points are run then, and the table says how far the
# predictions were off.
#
# It takes about six minutes on 2 cores, most of them for compiling. On Colab upload it (File > Upload
# notebook) and, in the pane of files, the wheel that `make wheel` makes in a checkout; the first cell installs it.

# %%
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Where pip finds specjax if it is not installed: a wheel (a file or a URL), git+https://..., or a checkout's folder.
# Empty: the newest wheel in this folder (`make wheel` in a checkout makes one), else the checkout around it.
SOURCE = os.environ.get("SPECJAX_SOURCE", "")
JAX = ">=0.10.2,<0.13"  # as specjax needs it; a JAX within these bounds, such as Colab's own, stays as it is


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cuda_extra() -> str:
    """The extra that brings JAX with CUDA for this machine's GPU; none: there is no GPU, or JAX has CUDA already."""
    plugins = [extra for extra in ("cuda12", "cuda13") if version_of(f"jax-{extra}-plugin")]
    if plugins:  # two of them would be in each other's way
        least, most = (numbers(bound.lstrip("<>=")) for bound in JAX.split(","))
        return "" if least <= numbers(version_of("jax")) < most else plugins[0]
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    first = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    driver, capability = (numbers(value.strip()) for value in f"{first},,".split(",")[:2])
    if driver >= numbers("580.65.06") and capability >= numbers("7.5"):
        return "cuda13"
    return "cuda12" if driver >= numbers("525.60.13") else ""


def is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a mere folder of that name has no origin


def find_source() -> str:
    here = Path.cwd()
    if wheels := sorted(here.glob("specjax-*.whl"), key=lambda wheel: wheel.stat().st_mtime):
        name = re.sub(r" ?\(\d+\)", "", wheels[-1].name)  # of a file that was uploaded again; pip refuses it
        return str(wheels[-1] if name == wheels[-1].name else shutil.copy(wheels[-1], Path(tempfile.mkdtemp()) / name))
    for folder in (here, *here.parents, here / "specjax"):
        if (folder / "pyproject.toml").is_file() and (folder / "kernels" / "specjax_kernels").is_dir():
            return str(folder)
    raise SystemExit(
        "specjax is not installed: put a wheel of it beside this notebook (`make wheel` in a checkout makes one), "
        "start Jupyter in a checkout, or set SOURCE at the top of this cell, and run the cell again."
    )


def install(*packages: str) -> None:
    print("pip install", *packages)
    quiet = ["--no-color", "--progress-bar", "off", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *quiet, *packages]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        said = []
        for line in running.stdout:  # the newest line is shown in place of the one before
            said.append(line)
            print(f"\r{line.strip()[:100]:<100}", end="", flush=True)
    print()
    if running.returncode:
        raise SystemExit("".join(["pip could not install it:\n", *said[-20:]]))
    importlib.invalidate_caches()


if not (is_installed("specjax") and is_installed("specjax_kernels")):
    what = SOURCE or find_source()
    if extra := cuda_extra():
        what = f"specjax[{extra}] @ {what}" if "://" in what else f"{what}[{extra}]"
    install(what, "matplotlib>=3.8", "ipywidgets")  # without widgets, bars of other packages print warnings

# %%
import csv
import json
from contextlib import redirect_stderr

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
STEPS, TOPKS, NODES = ("1", "2", "3", "4", "5"), ("1", "2", "4"), ("2", "3", "4", "6", "8", "16")
if SHORT:
    STEPS, TOPKS, NODES = ("1", "2"), ("1", "2"), ("2", "4")
folder = Path(tempfile.mkdtemp(prefix="specjax-tune-")) / "tune-tree"

with redirect_stderr(sys.stdout):  # messages belong into this cell
    status = bench(
        [
            *("tune-tree", "--model", MODEL, *draft, "--output", str(folder), "--plots", "none"),
            *("--steps", *STEPS, "--topks", *TOPKS, "--draft-tokens", *NODES),
            *("--limit", "2" if SHORT else "4", "--max-new-tokens", "12" if SHORT else "64"),
            *("--best", "1" if SHORT else "3"),
        ]
    )
assert status == 0, "the search failed"

# %% [markdown]
# In a shell the same command goes on after an interruption, and draws the map below by itself. The file it writes is
# what the server takes:
#
# ```sh
# specjax serve --config runs/tune-tree/best.toml
# ```

# %%
print((folder / "best.toml").read_text())
document = json.loads((folder / "results.json").read_text())
rows = list(csv.DictReader((folder / "grid.csv").open()))
print(f"{len(rows)} points were predicted, {len([row for row in rows if row['deviation']])} of them run")

# %% [markdown]
# ## What a step costs
#
# On a CPU each node that is checked costs time, since multiplying is the work; on a GPU the first some ten cost hardly
# more than one, since reading the weights is.

# %%
costs = document["costs"]["1"]
figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.2))
nodes = sorted(map(int, costs["verify"]))
left.plot(nodes, [1e3 * costs["verify"][str(count)] for count in nodes], color="#0072b2", marker="o")
left.set(xlabel="nodes that are checked", ylabel="milliseconds", ylim=(0, None), title="the target's forward")
for shade, (name, times) in zip(np.linspace(0.35, 1, len(costs["draft"])), costs["draft"].items(), strict=True):
    levels = sorted(map(int, times))
    color = plt.get_cmap("Oranges")(shade)
    right.plot(levels, [1e3 * times[str(level)] for level in levels], color=color, marker="o", label=name)
right.set(xlabel="levels of the draft", ylabel="milliseconds", ylim=(0, None), title="the draft")
right.xaxis.get_major_locator().set_params(integer=True)
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## The map
#
# Predicted speed over that without drafts, for each number of steps and of draft tokens. Frames mark what was run.

# %%
speeds = {(row["top-k"], row["steps"], row["draft tokens"]): float(row["speed_up"]) for row in rows}
ran = {(row["top-k"], row["steps"], row["draft tokens"]) for row in rows if row["deviation"]}
span = max(0.05, *(abs(value - 1) for value in speeds.values()))
figure, panels = plt.subplots(1, len(TOPKS), figsize=(1 + 2.6 * len(TOPKS), 3.0), sharey=True, squeeze=False)
for ax, topk in zip(panels[0], TOPKS, strict=True):
    shown = np.array([[speeds.get((topk, steps, count), np.nan) for count in NODES] for steps in STEPS])
    edges = np.arange(len(NODES) + 1) - 0.5, np.arange(len(STEPS) + 1) - 0.5
    ax.pcolormesh(*edges, shown, cmap="RdBu", vmin=1 - span, vmax=1 + span)
    for (y, x), value in np.ndenumerate(shown):
        if np.isnan(value):
            continue
        ax.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
        if (topk, STEPS[y], NODES[x]) in ran:
            ax.add_patch(plt.Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, linewidth=1.5))
    ax.set_xticks(range(len(NODES)), NODES)
    ax.set_yticks(range(len(STEPS)), STEPS)
    ax.set(xlabel="draft tokens", ylabel="steps", title=f"top-k {topk}")
plt.show()

# %% [markdown]
# ## Was the prediction right?
#
# A replay of greedy texts gives the accept length of a run exactly. The speed is a sum of measured parts; on a machine
# that does nothing else it should be within ten percent.

# %%
for row in rows:
    if not row["deviation"]:
        continue
    tree = f"({row['steps']}, {row['top-k']}, {row['draft tokens']})"
    same = abs(float(row["accept_length"]) - float(row["measured_accept_length"])) < 1e-3
    predicted, measured = float(row["tokens_per_second"]), float(row["measured_tokens_per_second"])
    print(
        f"{tree}: accept length {row['measured_accept_length']}, {'as' if same else 'not as'} predicted; "
        f"{predicted:.1f} tokens/s predicted, {measured:.1f} measured; texts: {row['texts']}"
    )
