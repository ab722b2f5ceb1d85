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
# It takes about five minutes on 2 cores, one or two of them for compiling. On Colab upload it (File > Upload
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
