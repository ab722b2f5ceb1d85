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
# # Train a draft head
#
# An EAGLE-3 head is one decoder layer that reads what three of the target's layers put out, and learns to say what the
# target will say next. The target stays as it is, and writes the training data itself. Three commands do it:
#
# ```sh
# specjax train generate --model MODEL --input prompts.jsonl --output answers.jsonl
# specjax train --model MODEL --data answers.jsonl --output runs/mine --steps 20000
# specjax serve --model MODEL --speculative-algorithm EAGLE3 --speculative-draft-model-path runs/mine/head
# ```
#
# This notebook runs the first two for the built-in model on a few questions, draws the curves, and measures the head in
# the engine, beside the one that ships, which saw a hundred times more text. It takes several minutes on two cores.
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

from specjax import Eagle3, Engine, EngineConfig, SamplingParams
from specjax.progress import progress_bar
from specjax.train.__main__ import main as train
from specjax.train.generate import main as generate

SHORT = bool(os.environ.get("SPECJAX_NOTEBOOK_SHORT"))  # few steps, for the tests
MODEL = os.environ.get("SPECJAX_NOTEBOOK_MODEL", "smollm2-135m-instruct")  # built in; a folder or a hub id will do, too
LENGTH = 16 if SHORT else 128
folder = Path(tempfile.mkdtemp(prefix="specjax-head-"))
plt.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)


def run(command, *arguments) -> None:
    """A command in this process, so that one program has the GPU; what it says, in this cell."""
    with redirect_stderr(sys.stdout):
        status = command([str(argument) for argument in arguments])
    assert status == 0, f"{command.__module__} failed"


# %% [markdown]
# ## The data: what the target says
#
# Answers to eighty prompts, each at temperature 0 or 0.8. A real run has a hundred thousand; text that the target did
# not write teaches, too (`--text-data`).

# %%
SUBJECTS = ["a bicycle", "rain", "a garden", "a letter", "bread", "the sea", "a train", "music", "a library", "coffee"]
ASKED = [
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Give me five facts about {}.",
    "What should I know before I buy or use {}?",
]
prompts = [form.format(subject) for subject in SUBJECTS for form in ASKED][: 4 if SHORT else None]
questions = folder / "questions.jsonl"
questions.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts * 2))
answers = folder / "answers.jsonl"
run(
    generate, "--model", MODEL, "--input", questions, "--output", answers, "--temperatures", "0", "0.8",
    "--max-prompt-tokens", 256, "--max-new-tokens", LENGTH, "--max-running-requests", 4,
    "--max-total-tokens", 4096, "--speculative-algorithm", "NGRAM",
)  # fmt: skip
rows = [json.loads(line) for line in answers.read_text().splitlines()]
print(f"{sum(len(row['response_ids']) for row in rows)} tokens, for example: {rows[0]['response'][:200]!r}")

# %% [markdown]
# ## Training
#
# `--draft-vocab-size`: the tokens that the head may propose, the most frequent in the data. `--rounds 3`: the head is
# trained on its own output, too, as it will read it when it drafts (training-time test). `--features disk`: the
# target's outputs are computed once. `--measure-every`: the engine decodes held-back prompts with the head as it is,
# and counts what is accepted. The same command goes on with a run that was stopped.

# %%
output = folder / "run"
settings = {
    "steps": 100, "batch-size": 4, "row-length": 256, "rounds": 3, "learning-rate": 1e-3, "warmup-steps": 10,
    "draft-vocab-size": 2048, "features": "disk", "held-back": 8, "log-every": 5, "checkpoint-every": 100,
    "measure-every": 25, "measure-prompts": 4, "measure-tokens": 64, "measure-steps": 3, "license": "other",
}  # fmt: skip
if SHORT:
    settings |= {
        "steps": 4, "batch-size": 2, "row-length": 64, "rounds": 2, "draft-vocab-size": 16, "held-back": 1,
        "log-every": 1, "measure-every": 2, "measure-prompts": 1, "measure-tokens": 8, "warmup-steps": 1,
    }  # fmt: skip
flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
run(train, "--model", MODEL, "--data", answers, "--output", output, "--draft", "EAGLE3", *flags)
for file in sorted(path.relative_to(output) for path in output.glob("*")):
    print(file)

# %% [markdown]
# ## The curves
#
# Left the loss; right how many tokens a forward of the target emits with the head as it was then, drafting chains of
# three. One is plain decoding.

# %%
metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
trained = [row for row in metrics if "loss" in row]
measured = [row for row in metrics if "accept_length" in row]
figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.9))
left.plot([row["tokens"] for row in trained], [row["loss"] for row in trained], color="#0072b2")
left.set(xlabel="tokens seen", ylabel="loss (sum over rounds)")
tokens = {row["step"]: row["tokens"] for row in trained}
right.plot(
    [tokens[row["step"]] for row in measured], [row["accept_length"] for row in measured], color="#d55e00", marker="o"
)
right.axhline(1, color="#6b7280", lw=1, ls="--")
right.set(xlabel="tokens seen", ylabel="accept length", xlim=(0, None))
plt.show()

# %% [markdown]
# ## In the engine
#
# Questions that neither head has seen: how much is accepted, by depth, of the new head and of the one that ships. The
# text is the target's in every case.

# %%
QUESTIONS = ["Why do cats purr?", "How do I boil an egg?", "List five things to take on a hike.", "Who was Newton?"]
asked = [[{"role": "user", "content": text}] for text in QUESTIONS[: 1 if SHORT else None]]
sampling = SamplingParams(max_new_tokens=LENGTH if SHORT else 96, ignore_eos=SHORT)
chain = {"steps": 3, "topk": 1, "nodes": 4}
heads = {"none": "NONE", "this head": Eagle3(str(output / "head"), **chain)}
if not SHORT and MODEL == "smollm2-135m-instruct":
    heads["the head that ships"] = Eagle3(**chain)
found = {}
for name, draft in heads.items():
    config = EngineConfig(max_running_requests=1, context_length=512, max_total_tokens=4096)
    engine = Engine.from_pretrained(MODEL, draft=draft, config=config)
    found[name] = []
    with progress_bar(f"Answering with the draft: {name}", len(asked), "question") as bar:
        for question in asked:
            found[name].append(engine.generate(question, sampling))
            bar.update()

texts = [done.output_ids for done in found.pop("none")]
figure, ax = plt.subplots(figsize=(4.8, 3.0))
for (name, runs), color, marker in zip(found.items(), ("#d55e00", "#0072b2"), ("o", "s"), strict=False):
    histogram = np.sum([done.spec_accept_histogram for done in runs], axis=0)  # steps by accepted drafts
    reached = np.cumsum(histogram[::-1])[::-1]  # that accepted at least so many
    accept = reached.sum() / reached[0]
    shares = np.divide(reached[1:], reached[:-1], out=np.full(len(reached) - 1, np.nan), where=reached[:-1] > 0)
    label = f"{name}: accept length {accept:.2f}"
    ax.plot(range(1, len(reached)), 100 * shares, color=color, marker=marker, label=label)
    same = sum(done.output_ids == text for done, text in zip(runs, texts, strict=True))
    print(f"{label}; {same} of {len(texts)} texts equal those without drafts")
ax.set(xlabel="depth of a draft", ylabel="accepted, of those whose\nparent was (%)", ylim=(0, 100))
ax.xaxis.get_major_locator().set_params(integer=True)
ax.legend()
plt.show()

# %% [markdown]
# ## Further
#
# The head that ships came of 9.5 million tokens in seven hours on two cores (`make head` in a checkout);
# The head's card logs what was tried. `runs/.../head` holds the head in the layout that SGLang and vLLM read,
# with a model card.

# %%
print(sorted(path.name for path in (output / "head").iterdir()))
