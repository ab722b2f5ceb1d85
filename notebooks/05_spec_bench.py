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
# # Spec-Bench: which way of drafting is fastest on which kind of text?
#
# [Spec-Bench](https://github.com/hemingkx/Spec-Bench) asks 480 questions of six kinds: conversations of several turns
# (MT-bench), translation, summarization, questions and answers, mathematical reasoning, and retrieval-augmented
# generation. Half of them come with specjax; the other half is left for training. `specjax bench` runs
# methods on them, one after another on each conversation, and writes the tables and pictures of a paper. This notebook
# runs it on a few conversations of four of the kinds, reads what it wrote, and draws it.
#
# Every text is the target's own, so methods differ in speed alone: the last column of the table counts the texts that
# equal those of decoding without drafts.
#
# It takes several minutes on 2 cores, one or two of them for compiling.
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
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from specjax.bench.__main__ import main as bench
from specjax.bench.results import titles

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
# ## What is compared
#
# A method is an algorithm, with options after a colon; `name=` is what tables call it. A chain is what a CPU likes, a
# tree what a GPU likes: there checking 16 nodes costs hardly more than checking one. A set is a whole one (`mt_bench`,
# `gsm8k`, `humaneval`, ...), a part of Spec-Bench, or a JSONL file of your own with `turns` or `prompt` in each line.
# [docs/bench.md](../docs/bench.md) has the rest.

# %%
head = f"path={HEAD}," if HEAD else ""
METHODS = [
    "none",
    "NGRAM",
    f"EAGLE3:{head}steps=3,topk=1,nodes=4,name=EAGLE-3 chain",
    f"EAGLE3:{head}steps=5,topk=4,nodes=16,name=EAGLE-3 tree",
][: 3 if SHORT else None]
SETS = ["spec_bench/mt_bench", "spec_bench/translation", "spec_bench/qa", "spec_bench/math_reasoning"]
TEMPERATURES = ["0", "1"]
folder = Path(tempfile.mkdtemp(prefix="specjax-bench-")) / "spec-bench"

with redirect_stderr(sys.stdout):  # messages belong into this cell
    status = bench(
        [
            *("--model", MODEL, "--methods", *METHODS, "--temperatures", *TEMPERATURES),
            *("--sets", *SETS[: 2 if SHORT else None], "--limit", "2" if SHORT else "4"),
            *("--max-new-tokens", "8" if SHORT else "64", "--plots", "none"),
            *("--output", str(folder)),
        ]
    )
assert status == 0, "the comparison failed"

# %% [markdown]
# The same command in a shell resumes after an interruption, and draws its own pictures. For reliable figures take all
# conversations and several repeats:
#
# ```sh
# specjax bench --sets spec_bench --temperatures 0 1 --repeats 3 --methods none NGRAM EAGLE3 --plots pdf
# ```
#
# ## What it wrote
#
# `results.json` has all figures, with commit, machine and versions; `table.md` the table above with all columns;
# `runs.jsonl` every measured part.

# %%
print(*sorted(file.name for file in folder.iterdir()))

# %%
rows = json.loads((folder / "results.json").read_text())["results"]
methods = list(dict.fromkeys(row["method"] for row in rows))
sets = list(dict.fromkeys(row["set"] for row in rows))
COLORS = dict(zip(methods, ["#999999", "#d55e00", "#56b4e9", "#0072b2"], strict=False))


def row_of(name: str, temperature: str, method: str) -> dict:
    wanted = name, float(temperature), method
    return next(row for row in rows if (row["set"], row["temperature"], row["method"]) == wanted)


# %% [markdown]
# ## Speed-up by kind of text
#
# Tokens a second, prompts included, over those without drafts. Bars are 95% intervals by bootstrap over conversations;
# of four conversations they say little.

# %%
figure, panels = plt.subplots(len(TEMPERATURES), 1, figsize=(6.4, 5.6), sharey=True)
place, width = np.arange(len(sets)), 0.8 / (len(methods) - 1)
for ax, temperature in zip(panels, TEMPERATURES, strict=True):
    for index, method in enumerate(methods[1:]):
        found = [row_of(name, temperature, method)["speed_up"] for name in sets]
        value, low, high = (np.array([one[key] for one in found]) for key in ("value", "low", "high"))
        at = place + (index - (len(methods) - 2) / 2) * width
        errors = np.maximum([value - low, high - value], 0)
        style = {"color": COLORS[method], "yerr": errors, "capsize": 2, "error_kw": {"linewidth": 0.8}}
        ax.bar(at, value, 0.9 * width, label=method if ax is panels[0] else None, **style)
    ax.axhline(1, color=COLORS["NONE"], linewidth=1, zorder=0)
    ax.set(ylabel="speed-up", title=f"temperature {temperature}")
    ax.set_xticks(place, titles(sets))
figure.legend(loc="outside lower center", ncols=len(methods) - 1)
plt.show()

# %% [markdown]
# ## Acceptance by depth
#
# Of the steps that accepted the draft at depth d - 1, the share that accepted one at depth d. A draft at T = 1 is made
# with the noise with which the target will draw (`--speculative-coupling noise`), which is why it is accepted nearly as
# often as at T = 0.

# %%
figure, panels = plt.subplots(1, len(TEMPERATURES), figsize=(7.2, 3.2))
for ax, temperature in zip(panels, TEMPERATURES, strict=True):
    for method in methods[1:]:
        found = row_of("all", temperature, method)
        share = 100 * np.array(found["acceptance_by_depth"])
        label = f"{method} ({found['accept_length']:.2f})"
        ax.plot(np.arange(1, len(share) + 1), share, color=COLORS[method], marker="o", markersize=4, label=label)
    labels = {"xlabel": "depth of the draft", "ylabel": "accepted, if its parent was (%)"}
    ax.set(**labels, ylim=(0, 105), title=f"temperature {temperature}")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(title="accept length", fontsize=8, title_fontsize=8)
plt.show()

# %% [markdown]
# ## Speed follows accept length, less what drafting costs
#
# Each dot is a kind of text. Along the line a step with drafts would take as long as one without; how far below it a
# dot lies is what drafting and checking more than one token cost, and the share of a prompt's time, which drafts do not
# shorten.

# %%
figure, ax = plt.subplots(figsize=(4.6, 3.8))
most = 1.0
for method in methods[1:]:
    for temperature, marker in zip(TEMPERATURES, ("o", "^"), strict=True):
        found = [row_of(name, temperature, method) for name in sets if name != "all"]
        x, y = [row["accept_length"] for row in found], [row["speed_up"]["value"] for row in found]
        ax.scatter(x, y, color=COLORS[method], marker=marker, label=f"{method}, T = {temperature}")
        most = max(most, *x, *y)
ax.plot([1, most], [1, most], color=COLORS["NONE"], linewidth=1, zorder=0)
ax.set(xlabel="accept length", ylabel="speed-up")
ax.legend(fontsize=8)
plt.show()

# %%
for temperature in TEMPERATURES:
    for method in methods[1:]:
        texts = row_of("all", temperature, method)["texts"]
        same, compared = texts["equal"], sum(texts.values()) - texts["other prompt"]
        print(f"T = {temperature}, {method}: {same} of {compared} texts equal those without drafts")
