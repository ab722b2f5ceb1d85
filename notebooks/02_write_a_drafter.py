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
# # Write a drafter
#
# A drafter proposes tokens, and the target checks them. Whatever it proposes, the text is the target's own: a drafter
# changes the speed and nothing else, so it is safe to try an idea. It is three pure functions of arrays that are
# traced into the step: `init` (its state), `propose` (a tree for each request) and `observe` (what was committed).
# This notebook writes one in thirty lines, shows that no text changes, and measures how much of it is accepted.
#
# The idea is the oldest there is, a table of **bigrams**: which tokens most often follow this one. It knows nothing but
# the last token. Still it is a draft, and its trees are made as EAGLE-2's are.
#
# It runs on a CPU in a few minutes.
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
from itertools import pairwise

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from specjax import Completion, Drafter, Engine, EngineConfig, Pool, SamplingParams, Speculation, rerank
from specjax.progress import progress_bar
from specjax.tree import NO_PARENT

SHORT = bool(os.environ.get("SPECJAX_NOTEBOOK_SHORT"))  # few tokens, for the tests
MODEL = os.environ.get("SPECJAX_NOTEBOOK_MODEL", "smollm2-135m-instruct")  # built in; a folder or a hub id will do, too
LENGTH = 24 if SHORT else 128
plt.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)
# A small KV pool leaves a GPU's memory to the next engine.
config = EngineConfig(max_running_requests=4, context_length=512, max_total_tokens=4096)


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


# %% [markdown]
# ## What to learn from
#
# The target's own answers, which are what the drafter has to guess. Other questions than those that it is measured on.

# %%
LESSONS = [
    "Why is the sky blue?",
    "How do I bake a loaf of bread?",
    "Write a short story about a robot who learns to paint.",
    "What is the difference between a lake and a sea?",
    "Explain how a bicycle stays upright.",
    "Give me five tips for learning a language.",
    "Describe a market in the rain.",
    "What does a compiler do?",
]
engine = Engine.from_pretrained(MODEL, draft="NONE", config=config)
lessons = engine.generate(
    [ask(text) for text in LESSONS[: 2 if SHORT else None]], SamplingParams(max_new_tokens=LENGTH)
)
print(sum(len(done.output_ids) for done in lessons), "tokens to learn from")


# %%
def count_bigrams(texts: list[list[int]], vocabulary: int, most: int) -> dict[str, jax.Array]:
    """For each token its `most` likeliest successors, [V, most], and their log-probabilities; -inf: there is none."""
    counts: dict[int, dict[int, int]] = {}
    for text in texts:
        for token, following in pairwise(text):
            found = counts.setdefault(token, {})
            found[following] = found.get(following, 0) + 1
    tokens, scores = np.zeros((vocabulary, most), np.int32), np.full((vocabulary, most), -np.inf, np.float32)
    for token, found in counts.items():
        best = sorted(found, key=found.__getitem__, reverse=True)[:most]
        tokens[token, : len(best)] = best
        scores[token, : len(best)] = np.log([found[other] / sum(found.values()) for other in best])
    return {"tokens": jnp.array(tokens), "scores": jnp.array(scores)}


MOST = 4  # successors that are kept of a token
table = count_bigrams([done.output_ids for done in lessons], engine.target.config.vocab_size, MOST)
print(f"successors of {int(jnp.isfinite(table['scores'][:, 0]).sum())} tokens are known")

# %% [markdown]
# ## The drafter
#
# Shapes are static: all `topk` successors of all candidates of a level are candidates of the next, those that are not
# there with a score of -inf, and `rerank` makes the tree of the best of them. So the whole is compiled with the
# target's forward into one program.


# %%
def bigrams(topk: int, depth: int, nodes: int):
    """A drafter of the `topk` likeliest successors, `depth` levels deep; trees of `nodes` nodes, the root included."""

    def propose(params, state, context):
        batch = context.root.shape[0]
        level, score = context.root[:, None], jnp.zeros((batch, 1), jnp.float32)  # [B, n], the candidates of a level
        above, total, levels = np.array([NO_PARENT]), 0, []  # their places in the pool
        for deep in range(1, depth + 1):
            tokens = params.draft["tokens"][level, :topk].reshape(batch, -1)  # [B, n * topk]
            score = (score[:, :, None] + params.draft["scores"][level, :topk]).reshape(batch, -1)
            parents = jnp.broadcast_to(jnp.asarray(np.repeat(above, topk), jnp.int32), tokens.shape)
            levels.append((tokens, parents, jnp.full_like(tokens, deep), score))
            above, level = total + np.arange(tokens.shape[1]), tokens
            total += tokens.shape[1]
        pool = Pool(*(jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True)))
        return rerank(context.root, pool, nodes), state

    drafter = Drafter(
        f"bigrams, {topk} x {depth}",
        features=None,  # of the target, which `observe` would read
        width=nodes,
        depth=depth,
        init=lambda params, rows, pool: (),  # no state
        propose=propose,
        observe=lambda params, state, context, observation: state,
    )
    return lambda target: Speculation(drafter, params=table)


# %% [markdown]
# `drafter=` takes it. The same four questions for each drafter, greedily, one at a time; `NONE` is the target alone.

# %%
QUESTIONS = [
    "Why do cats purr?",
    "Write a short letter to my landlord about a broken window.",
    "How do I boil an egg?",
    "List five things to take on a hike.",
]
questions = [ask(text) for text in QUESTIONS[: 2 if SHORT else None]]
drafts = {"NONE": {"draft": "NONE"}, "bigrams, chain of 3": {"drafter": bigrams(topk=1, depth=3, nodes=4)}}
drafts["bigrams, tree of 8"] = {"drafter": bigrams(topk=MOST, depth=3, nodes=8)}
if not SHORT:
    drafts |= {"NGRAM": {"draft": "NGRAM"}, "EAGLE-3 (shipped)": {"draft": "AUTO"}}


def answer(temperature: float = 0.0) -> list[Completion]:
    params = [
        SamplingParams(max_new_tokens=LENGTH, temperature=temperature, seed=i, ignore_eos=SHORT)
        for i in range(len(questions))
    ]
    found = []
    with progress_bar(f"Answering at temperature {temperature}", len(questions), "question") as bar:
        for each, sampling in zip(questions, params, strict=True):
            found.append(engine.generate(each, sampling))
            bar.update()
    return found


found, sampled = {}, {}
for name, options in drafts.items():
    print(name)
    engine = Engine.from_pretrained(MODEL, config=config, **options)
    found[name] = answer()
    sampled[name] = answer(temperature=0.8)

# %% [markdown]
# ## No text changes
#
# Neither greedily nor at temperature 0.8, where a request's noise follows from its seed and the position of a token,
# not from what was drafted. It holds up to near-ties, which in 16 bits are more frequent than in float32
# (docs/design.md, Floating point).

# %%
for name in drafts:
    same = [
        sum(a.output_ids == b.output_ids for a, b in zip(runs[name], runs["NONE"], strict=True))
        for runs in (found, sampled)
    ]
    print(f"{name:>20}: {same[0]} of {len(questions)} greedy texts equal those of NONE, {same[1]} sampled ones")

# %% [markdown]
# ## How much is accepted
#
# Accept length is emitted tokens over forwards of the target, the token that the target adds included: plain decoding
# has 1.


# %%
def accept_length(completions: list[Completion]) -> float:
    histogram = np.sum([done.spec_accept_histogram for done in completions], axis=0)  # steps by accepted drafts
    return 1 + histogram @ np.arange(len(histogram)) / histogram.sum()


names = [name for name in drafts if name != "NONE"]
figure, ax = plt.subplots(figsize=(5.6, 0.5 * len(names) + 1.2))
for runs, offset, color, label in ((found, -0.19, "#0072b2", "temperature 0"), (sampled, 0.19, "#e69f00", "0.8")):
    values = [accept_length(runs[name]) for name in names]
    bars = ax.barh(np.arange(len(names)) + offset, values, 0.36, color=color, label=label)
    ax.bar_label(bars, fmt="%.2f", padding=3)
ax.set_yticks(range(len(names)), names)
ax.set(xlabel="accept length (tokens per forward of the target)", xlim=(1, None))
ax.invert_yaxis()
ax.margins(x=0.12)
figure.legend(loc="outside upper right", ncols=2)
plt.show()

# %% [markdown]
# A table of a thousand tokens is little: more lessons make it better, and so does what knows more than the last token.
# A drafter of your own may read the text so far (`context.committed`), keep arrays as its state, or read the target's
# hidden states (`features`); docs/drafters.md has prompt lookup as an example, and a verifier. With such a function in
# a file, here `my_drafter.py`, it also has a name, for the server and the benchmarks:
#
# ```sh
# PYTHONPATH=. specjax serve --speculative-algorithm my_drafter:bigrams
# ```
