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
# # On a GPU: what runs here, and what falls back
#
# specjax runs on NVIDIA GPUs through XLA and, with no change, on a CPU. What a card can do follows from its *compute
# capability*. This notebook looks at the machine that it runs on, says which parts run how, and measures the built-in
# model in each type of numbers, with and without drafts. Free Colab machines have a T4, sometimes an L4:
#
# | | T4 | L4 | no GPU |
# |---|---|---|---|
# | compute capability | 7.5 | 8.9 | - |
# | attention | XLA's operations: specjax's kernels need 8.0 | specjax's kernel | XLA's operations |
# | products of quantised weights | XLA's operations, in parts | specjax's kernels | specjax's kernels for CPUs |
# | float32 | runs | runs | runs, the default |
# | float16 | runs on tensor cores: the default for models in bfloat16 | runs on tensor cores | runs, slower |
# | bfloat16 | the card cannot multiply it: float32 products of parts of the weights | tensor cores | runs, slower |
#
# The GPUs' columns are read off the code's own checks (`specjax.gpu`, `specjax_kernels.platforms`), off programs that
# XLA compiled for a T4 (`make gpu-compile`) and off NVIDIA's data. **Nothing has been measured on a T4 or an L4 yet**;
# the cells below do.
#
# It runs on a CPU, too. On Colab choose Runtime > Change runtime type > T4 GPU.
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
import logging
import os
import sys
import time

import jax
import matplotlib.pyplot as plt
import numpy as np
from specjax_kernels import default_implementation
from specjax_kernels.platforms import generation, has_kernels

from specjax import Engine, EngineConfig, SamplingParams, gpu
from specjax.progress import progress_bar

SHORT = bool(os.environ.get("SPECJAX_NOTEBOOK_SHORT"))  # few tokens, for the tests
MODEL = os.environ.get("SPECJAX_NOTEBOOK_MODEL", "smollm2-135m-instruct")  # built in; a folder or a hub id will do, too
LENGTH = 16 if SHORT else 128
plt.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)
# %% [markdown]
# ## The card, before JAX starts on it
#
# JAX reads its settings when its backend starts. `gpu.claim` prepares it for one card: it checks that the driver and
# the card are recent enough, and takes a share of the memory. The commands do so by themselves; a library leaves it to
# its user.

# %%
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
try:
    card = gpu.claim(0.85)
except gpu.GpuError as error:  # too old for the JAX that is installed: the CPU decodes
    print(error)
    jax.config.update("jax_platforms", "cpu")
    card = None
print("card:", card or "none that JAX can use; the CPU decodes")
if card is not None and (problem := gpu.problem(card)):  # JAX has started, and does not use the card
    raise SystemExit(problem)

# %% [markdown]
# ## What the code chooses on this device

# %%
device = jax.devices()[0]
print(f"JAX {jax.__version__} on {device.platform}: {device.device_kind}")
print("compute capability:", generation() or "none, no NVIDIA GPU")
print("kernels of specjax for GPUs:", "yes" if has_kernels() else "no, XLA's operations in their place")
print("attention:", default_implementation())
if memory := device.memory_stats():
    print(f"memory that JAX has: {memory['bytes_limit'] / 1e9:.1f} GB")

# %% [markdown]
# ## Each type of numbers, with and without drafts
#
# `dtype` is the type of activations and of the KV cache. The built-in model's weights are published in 4 bits (Q4_1)
# and stay so; `quantization="none"` would widen them. AUTO drafts with the EAGLE-3 head that ships. A type that the
# device cannot run is listed with its error.

# %%
QUESTIONS = ["Why do cats purr?", "How do I boil an egg?", "List five things to take on a hike."]
questions = [[{"role": "user", "content": text}] for text in QUESTIONS[: 1 if SHORT else None]]
sampling = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
types = ["float32"]
if jax.default_backend() == "gpu":  # on a CPU the others are slower, and take minutes to compile
    types += ["float16", "bfloat16"]
config = EngineConfig(
    max_running_requests=1,
    context_length=512,
    max_total_tokens=4096,
    adaptive=False,
)


def measure(dtype: str, draft: str) -> tuple[float, float, list[list[int]]]:
    """Tokens a second, one request at a time; accept length; the texts."""
    engine = Engine.from_pretrained(MODEL, draft=draft, dtype=dtype, config=config)
    engine.generate(questions[0], sampling)  # compiles
    done, seconds = [], []
    with progress_bar(f"Answering in {dtype}, draft {draft}", len(questions), "question") as bar:
        for question in questions:
            start = time.perf_counter()
            done.append(engine.generate(question, sampling))
            seconds.append(time.perf_counter() - start)
            bar.update()
    steps = sum(each.spec_verify_ct for each in done)
    emitted = sum(len(each.output_ids) - 1 for each in done)  # the prompt's forward draws the first
    return emitted / sum(seconds), emitted / steps, [each.output_ids for each in done]


results = {}
for dtype in types[: 1 if SHORT else None]:
    try:
        results[dtype] = {draft: measure(dtype, draft) for draft in ("NONE", "AUTO")}
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        print(f"{dtype}: {str(error).splitlines()[0]}")

print(f"{'':>10} {'NONE':>12} {'AUTO':>12} {'speed-up':>9} {'accepted':>9}   texts that are equal")
for dtype, found in results.items():
    (plain, _, texts), (drafted, accept, others) = found["NONE"], found["AUTO"]
    same = sum(a == b for a, b in zip(texts, others, strict=True))
    speeds = f"{plain:>8.1f} t/s {drafted:>8.1f} t/s {drafted / plain:>9.2f}"
    print(f"{dtype:>10} {speeds} {accept:>9.2f}   {same} of {len(texts)}")

# %% [markdown]
# Speculation changes no text up to near-ties. In 16 bits two logits are more often equal, and products of another shape
# round differently, so that a text may part from the other there; both are the model's own.

# %%
figure, ax = plt.subplots(figsize=(4.8, 3.2))
place = np.arange(len(results))
for offset, draft, color in ((-0.19, "NONE", "#999999"), (0.19, "AUTO", "#0072b2")):
    label = "no drafts" if draft == "NONE" else "EAGLE-3 head (AUTO)"
    bars = ax.bar(place + offset, [found[draft][0] for found in results.values()], 0.36, color=color, label=label)
    ax.bar_label(bars, fmt="%.0f", padding=2)
ax.set_xticks(place, results)
ax.set(ylabel="tokens per second, batch 1", title=device.device_kind, xlim=(-0.7, len(results) - 0.3))
ax.margins(y=0.15)
figure.legend(loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# ## For a server on this machine
#
# ```sh
# specjax serve
# specjax serve --model MODEL --dry-run              # whether a model fits, without loading it
# ```
#
# A T4 has 16 GB, an L4 24: a model of 8 billion parameters fits an L4 in 16 bits, and a T4 in 8 or 4 (GPTQ, AWQ,
# `--quantization int8` or `int4`); `--dry-run --assume-device T4` computes it. On a T4 a checkpoint in bfloat16 is
# served in float16. Families whose activations do not fit float16 (Gemma 2, Gemma 3, DeepSeek-V3) stay in bfloat16,
# which is slow there.
