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
# It takes about eight minutes on 2 cores, half of them for compiling. On Colab upload it (File > Upload
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
import venv
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


# On Colab, packages are installed beside Colab's own, none of which is replaced; elsewhere into the environment.
BESIDE = Path(tempfile.gettempdir()) / "specjax-packages" if version_of("google-colab") else None


def use_packages_beside() -> None:
    """Finds the packages of `BESIDE` before others, in this process and those that it starts."""
    folder = next(map(str, BESIDE.glob("lib/python*/site-packages")), "") if BESIDE else ""
    if not folder or folder in sys.path:
        return
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    if "jax" in sys.modules and sys.modules["jax"].__version__ != version_of("jax"):
        raise SystemExit(
            f"JAX {sys.modules['jax'].__version__} was imported before JAX {version_of('jax')} was installed: restart "
            "the session (Runtime > Restart session) and run this cell first."
        )


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
    if BESIDE is not None:
        venv.create(BESIDE, system_site_packages=True)
        command[3:3] = ["--python", str(BESIDE / "bin" / "python")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        said = []
        for line in running.stdout:  # the newest line is shown in place of the one before
            said.append(line)
            print(f"\r{line.strip()[:100]:<100}", end="", flush=True)
    print()
    if running.returncode:
        raise SystemExit("".join(["pip could not install it:\n", *said[-20:]]))
    importlib.invalidate_caches()
    use_packages_beside()


use_packages_beside()
if not (is_installed("specjax") and is_installed("specjax_kernels")):
    what = SOURCE or find_source()
    if extra := cuda_extra():
        what = f"specjax[{extra}] @ {what}" if "://" in what else f"{what}[{extra}]"
    install(what, "matplotlib>=3.8", "ipywidgets")  # without widgets, bars of other packages print warnings

# %%
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
