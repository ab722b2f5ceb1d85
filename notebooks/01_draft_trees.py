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
# # Draft trees: what was proposed, what was drawn, what was accepted
#
# In each step of speculative decoding a cheap **draft** proposes a tree of tokens. The **target** model looks at the
# whole tree in one forward and, at every node, draws the token that it would write there itself. A proposed token is
# accepted when it is the one that was drawn at its parent. The step emits the accepted path and one token more: the
# one drawn where the path ends. So the text is the target's own, whatever the draft proposes; a better draft only
# needs fewer steps for it.
#
# This notebook shows such trees, as arrays, as text and as pictures, for two kinds of draft:
#
# 1. **NGRAM** looks for the last few tokens in what it has seen before and proposes what followed there;
# 2. **EAGLE-3** is a small network, a *head*, that reads what three of the target's layers put out. One ships with
#    specjax for the built-in model.
#
# It runs on a CPU in two minutes.
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
import os

import matplotlib.pyplot as plt
import numpy as np

from specjax import Completion, Eagle3, Engine, EngineConfig, Ngram, SamplingParams
from specjax.progress import progress_bar
from specjax.state import StepTree
from specjax.viz.drawing import draw_steps, draw_tree

SHORT = bool(os.environ.get("SPECJAX_NOTEBOOK_SHORT"))  # few tokens, for the tests
MODEL = os.environ.get("SPECJAX_NOTEBOOK_MODEL", "smollm2-135m-instruct")  # built in; a folder or a hub id will do, too
HEAD = os.environ.get("SPECJAX_NOTEBOOK_HEAD")  # an EAGLE-3 head's folder or hub id; None: the one that ships
LENGTH = 40 if SHORT else 128
plt.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)
# `trace=True` makes an engine keep the tree of every step, in `Completion.trees`. A small KV pool leaves a GPU's memory
# to the next engine.
config = EngineConfig(max_running_requests=1, context_length=512, max_total_tokens=4096, trace=True)
greedy = SamplingParams(max_new_tokens=LENGTH, ignore_eos=SHORT)


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def answer(engine: Engine) -> dict[str, Completion]:
    found = {}
    with progress_bar("Answering", len(prompts), "prompt") as bar:
        for name, prompt in prompts.items():
            found[name] = engine.generate(prompt, greedy)
            bar.update()
    return found


# %% [markdown]
# ## NGRAM
#
# A text that repeats itself, such as a list, is what n-grams are good at.

# %%
prompts = {
    "a list": ask("List ten fruits, each with its color, like this: An apple is red. A lemon is yellow."),
    "prose": ask("Write a short story about a lighthouse keeper and a whale."),
    "code": ask("Write a Python function that says whether a word is a palindrome, with an example."),
}
engine = Engine.from_pretrained(MODEL, draft=Ngram(nodes=8, max_match=6), config=config)
decode = engine.tokenizer.decode
ngram = answer(engine)
done = ngram["a list"]
print(done.text)
print(f"\n{done.spec_verify_ct} steps, {done.spec_accept_length:.2f} tokens a step")

# %% [markdown]
# One step is a `StepTree` of numpy arrays with an entry for each node, the root first: `tokens`, `parents`, `depth`,
# `scores`, and `drawn`, what the target drew there; and `path`, the accepted nodes, and `emitted`, the tokens of the
# step. The root is the last token of the step before.


# %%
def richest(trees: list[StepTree]) -> int:
    """The step that shows most: where the tree branches, and much was accepted."""
    forks = [sum(len(tree.children(node)) > 1 for node in range(len(tree.tokens))) for tree in trees]
    return int(np.argmax([min(fork, 3) + min(tree.accepted, 4) for fork, tree in zip(forks, trees, strict=True)]))


number = richest(done.trees)
tree = done.trees[number]
print("tokens ", tree.tokens)
print("parents", tree.parents)
print("drawn  ", tree.drawn)
print("path   ", tree.path)

# %% [markdown]
# As a picture: bold is the accepted path, dashed
# what the target drew without anyone having proposed it. An n-gram's score is not a probability but a rank (the
# longest match first, the latest first among equals), so the boxes show the order.

# %%
draw_tree(tree, decode, title=f"NGRAM, step {number + 1}")

# %% [markdown]
# Steps in a row. The token in the dashed box, at the end of one step, is the root of the next. Where nothing matches,
# the tree is the root alone, and the step is one of plain decoding. `draw_tree(...).save("tree.svg")` writes a file.

# %%
first = max(0, min(number - 1, len(done.trees) - 3))
draw_steps(done.trees[first : first + 3], decode, first=first + 1)

# %% [markdown]
# ## EAGLE-3
#
# An EAGLE-3 head is one decoder layer. It reads what three of the target's layers put out (an early, a middle and a
# late one) with the embedding of the token that was drawn after it, and proposes the next token. Fed with its own
# output it goes on, level by level; the nodes with the highest cumulative probability are kept. So the tree's shape
# depends on how sure the head is: deep and narrow where it is, wide and shallow where it is not.
#
# Here: 5 levels, the 4 best nodes of a level go on, and of all candidates the 15 best make the tree, with the root 16
# nodes. (On a CPU trees of 4 nodes are the fastest. These are for looking at.)

# %%
draft = Eagle3(HEAD, steps=5, topk=4, nodes=16)
engine = Engine.from_pretrained(MODEL, draft=draft, config=config)
eagle = answer(engine)
for name in prompts:
    same = "the same text" if eagle[name].output_ids == ngram[name].output_ids else "another text"
    print(
        f"{name:>7}: {ngram[name].spec_accept_length:.2f} tokens a step with NGRAM, "
        f"{eagle[name].spec_accept_length:.2f} with EAGLE-3; {same}"
    )

# %% [markdown]
# A box is the darker the likelier the head thinks the path to it is; the number below is that probability.

# %%
trees = eagle["prose"].trees
number = richest(trees)
draw_tree(trees[number], decode, title=f"EAGLE-3, step {number + 1}")

# %% [markdown]
# Two steps in a row of the code.

# %%
draw_steps(eagle["code"].trees[4:6], decode, first=5)

# %% [markdown]
# ## How many drafts are accepted
#
# For each number of drafts, the share of the steps that accepted at least so many. Accept length is one, the token that
# the target adds, plus the sum of these shares.


# %%
def shares(completions: list) -> np.ndarray:
    """For d = 1, 2, ...: the share of all steps that accepted at least d drafts."""
    histogram = np.sum([done.spec_accept_histogram for done in completions], axis=0)
    return np.cumsum(histogram[::-1])[::-1][1:] / histogram.sum()


figure, ax = plt.subplots(figsize=(5.2, 3.2))
for name, found, color, marker in (
    ("EAGLE-3, 16 nodes", eagle, "#0072b2", "o"),
    ("NGRAM, 8 nodes", ngram, "#d55e00", "^"),
):
    share = shares([*found.values()])
    label = f"{name}: accept length {1 + share.sum():.2f}"
    ax.plot(np.arange(1, len(share) + 1), 100 * share, color=color, marker=marker, label=label)
ax.set(xlabel="drafts accepted, at least", ylabel="share of steps (%)", ylim=(0, 100))
ax.xaxis.get_major_locator().set_params(integer=True)
ax.legend()
plt.show()

# %% [markdown]
# ## Does the head know how good it is?
#
# A node is accepted if the whole path to it is drawn. If the head's probabilities were right, of the nodes with 30%
# three in ten would be accepted, and the dots would lie on the line. Bars are 95% intervals (Wilson's).


# %%
def beliefs(completions: list) -> tuple[np.ndarray, np.ndarray]:
    """Of all nodes but the roots: the head's probability of the path, and whether it was accepted."""
    trees = [tree for done in completions for tree in done.trees]
    believed = [np.exp(tree.scores[1:]) for tree in trees]
    accepted = [np.isin(np.arange(1, len(tree.tokens)), tree.path) for tree in trees]
    return np.concatenate(believed), np.concatenate(accepted)


believed, accepted = beliefs([*eagle.values()])
place = np.minimum((10 * believed).astype(int), 9)  # ten bins
bins = [(believed[place == i], accepted[place == i]) for i in range(10) if (place == i).sum() > 5]
x, y = (np.array([part[i].mean() for part in bins]) for i in (0, 1))
count, z = np.array([len(part[0]) for part in bins]), 1.96
middle = (y + z**2 / (2 * count)) / (1 + z**2 / count)
half = z * np.sqrt(y * (1 - y) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
below, above = np.maximum(y - middle + half, 0), np.maximum(middle + half - y, 0)

figure, ax = plt.subplots(figsize=(4.2, 3.8))
ax.plot([0, 100], [0, 100], color="#6b7280", lw=1, zorder=0)
ax.errorbar(100 * x, 100 * y, 100 * np.stack([below, above]), fmt="o", color="#0072b2", capsize=2)
ax.set(
    xlabel="the head's probability of a node (%)",
    ylabel="nodes accepted (%)",
    xlim=(0, 100),
    ylim=(0, 102),
    aspect="equal",
)
plt.show()
print(f"{len(believed)} nodes in {sum(len(done.trees) for done in eagle.values())} steps")

# %% [markdown]
# ## The same in your own step
#
# Without the engine: jit `speculate_step` with `StepConfig(trace=True)` and look at its output.
#
# ```python
# from specjax import StepConfig, make_steps, step_trees
#
# steps = make_steps(target, drafter, config=StepConfig(trace=True))
# state, output = steps.speculate(params, state, inputs)
# for tree in step_trees(output):  # one for each entry of the batch, None for the inactive ones
#     if tree is not None:
#         draw_tree(tree, tokenizer.decode).save("tree.svg")
# ```
