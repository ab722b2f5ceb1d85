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
# 2. **EAGLE** is a small network that continues the target's features. We make one here, in about a minute.
#
# It runs on a CPU in a few minutes, on a GPU in less. On Colab (File > Upload notebook) say below where specjax is to
# be installed from.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("specjax") is None:
    source = os.environ.get("SPECJAX_SOURCE", "..")  # a checkout's folder, or git+https://... of the one you use
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source, "matplotlib"], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from specjax_kernels import CAUSAL

from specjax import Eagle, Engine, EngineConfig, Ngram, Params, PoolShape, SamplingParams, init_cache, make_drafter
from specjax.config import HeadConfig
from specjax.models.blocks import Past, key_value_spec
from specjax.models.draft_head import draft_head, init_head_params
from specjax.viz.drawing import draw_steps, draw_tree
from specjax.viz.trees import render

MODEL = "smollm2-135m-instruct"  # the built-in model; a folder or a hub id will do, too
HEAD = os.environ.get("SPECJAX_HEAD", "")  # the folder or hub id of an EAGLE-1 or EAGLE-2 head for it, if you have one
TINY = bool(os.environ.get("SPECJAX_NOTEBOOK_TINY"))  # random weights and few steps, for the tests
LENGTH, LESSONS, LEVELS, NODES = (40, 15, 3, 8) if TINY else (128, 60, 5, 16)

# %% [markdown]
# ## The model
#
# `EngineConfig(trace=True)` makes an engine keep the tree of every step, in `Completion.trees`.

# %%
config = EngineConfig(max_running_requests=1 if TINY else 4, context_length=512, trace=True)
ngram = Ngram(nodes=NODES // 2, max_match=6, capacity=16384)


def tiny_engine() -> Engine:
    """A random model of two layers over the letters of the alphabet."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from specjax import ModelConfig, RopeConfig, make_target
    from specjax.models import init_params

    letters = "? abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:0123456789\n"
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    core.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", chat_template=template)
    shape = {"vocab_size": len(letters), "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    shape |= {"num_kv_heads": 2, "head_dim": 16, "norm_epsilon": 1e-5, "rope": RopeConfig(), "max_positions": 512}
    target = make_target(ModelConfig("llama", **shape, tied_embeddings=False))
    weights = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, init_params(target.config, jax.random.key(0)))
    return Engine(target, Params(weights), tokenizer, make_drafter(ngram), config=config)


engine = tiny_engine() if TINY else Engine.from_pretrained(MODEL, draft=ngram, config=config)
target, tokenizer = engine.target, engine.tokenizer


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


# %% [markdown]
# ## NGRAM
#
# A text that repeats itself, such as a list, is what n-grams are good at.

# %%
prompt = ask("List ten fruits, each with its color, like this: An apple is red. A lemon is yellow.")
done = engine.generate(prompt, SamplingParams(max_new_tokens=LENGTH))
print(done.text)
print(f"\n{done.spec_verify_ct} steps, {done.spec_accept_length:.2f} tokens a step")

# %% [markdown]
# One step is a `StepTree` of numpy arrays with an entry for each node, the root first: `tokens`, `parents`, `depth`,
# `scores`, and `drawn`, what the target drew there; and `path`, the accepted nodes, and `emitted`, the tokens of the
# step. The root is the last token of the step before.


# %%
def richest(trees: list) -> int:
    """The step that shows most: where the tree branches, and much was accepted."""
    forks = [sum(len(tree.children(node)) > 1 for node in range(len(tree.tokens))) for tree in trees]
    return int(np.argmax([min(fork, 3) + min(tree.accepted, 4) for fork, tree in zip(forks, trees, strict=True)]))


number = richest(done.trees)
tree = done.trees[number]
print("tokens ", tree.tokens)
print("parents", tree.parents)
print("drawn  ", tree.drawn)
print("path   ", tree.path)
print()
print(render(tree, tokenizer.decode))

# %% [markdown]
# `python -m specjax.generate --show-trees` prints this for every step. As a picture: bold is the accepted path, dashed
# what the target drew without anyone having proposed it. An n-gram's score is not a probability but a rank (the
# longest match first, the latest first among equals), so the boxes show the order.

# %%
draw_tree(tree, tokenizer.decode, shade="order", title=f"NGRAM, step {number + 1}")
plt.show()

# %% [markdown]
# Steps in a row. The token in the dashed box, at the end of one step, is the root of the next. Where nothing matches,
# the tree is the root alone, and the step is one of plain decoding.

# %%
first = max(0, min(number - 1, len(done.trees) - 3))
draw_steps(done.trees[first : first + 3], tokenizer.decode, shade="order", first=first + 1)
plt.show()

# %% [markdown]
# ## EAGLE
#
# An EAGLE head is one decoder layer. It reads the target's last feature (the hidden state from which the target
# predicts) with the embedding of the token that was drawn from it, and guesses the *next* feature; the target's own
# output matrix turns that into probabilities. Fed with its own guesses it goes on, level by level, and **EAGLE-2**
# keeps the nodes whose cumulative probability is highest. So the tree's shape depends on how sure the head is: deep
# and narrow where it is, wide and shallow where it is not.
#
# If you have a head for the model, give its folder or hub id as `HEAD` at the top. Otherwise we make a toy: a head that
# is shown a few of the target's own stories again and again. It learns *these* by heart and little about any other
# text, which is all we want here: a look at trees that are right and at trees that are wrong. A real one is trained
# on a hundred thousand times more text.

# %%
TOPICS = ["a lighthouse keeper and a whale", "a robot who learns to paint", "a lost key", "a market in the rain"]
stories = [ask(f"Write a short story about {topic}.") for topic in TOPICS]
texts = [
    engine.encode(story) + done.output_ids
    for story, done in zip(stories, engine.generate(stories, SamplingParams(max_new_tokens=LENGTH)), strict=True)
]


# %%
def new_head() -> tuple[HeadConfig, dict]:
    """As large as one of the target's layers. It begins by repeating the feature that it is given."""
    model = target.config
    shape = HeadConfig(
        "eagle",
        hidden_size=model.hidden_size,
        feature_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        norm_epsilon=model.norm_epsilon,
        rope=model.rope,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
    )
    draft = dict(init_head_params(shape, target, jax.random.key(0)))
    zeros, ones = jnp.zeros((model.hidden_size,) * 2, model.dtype), jnp.eye(model.hidden_size, dtype=model.dtype)
    return shape, draft | {"fc": jnp.concatenate([zeros, ones])}  # the embedding comes first, then the feature


def learn_by_heart(shape: HeadConfig, draft: dict, texts: list[list[int]], steps: int) -> tuple[dict, list[float]]:
    """Trains the head to predict the target's features, and what the target makes of them, one token ahead."""
    width = max(map(len, texts))
    tokens = jnp.array([text + [0] * (width - len(text)) for text in texts], jnp.int32)
    # A text of X tokens: features 0 .. X - 1, of which all but the last are followed by one to learn.
    counts = jnp.arange(width)[None] < jnp.array([len(text) - 1 for text in texts])[:, None]
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    zero = jnp.zeros(len(texts), jnp.int32)  # nobody has any pages yet

    @jax.jit
    def features_of(params):
        cache = init_cache(target.pages, PoolShape(pages=1, page_size=1))
        x = target.embed(params, tokens)
        return target.forward(params, x, positions, CAUSAL, cache, zero[:, None], zero, features="final").features

    head = draft_head(shape, target, backend="reference")  # the implementation that can be differentiated
    cache = init_cache(key_value_spec(shape), PoolShape(pages=1, page_size=1))
    past = Past(cache, zero[:, None], zero)
    words = jnp.unique(tokens)  # enough of the vocabulary for a toy, and a hundred times faster

    def loss(draft, params, features, key):
        following = target.embed(params, jnp.roll(tokens, -1, axis=1))
        noise = jax.random.uniform(key, features.shape, features.dtype, -0.1, 0.1)  # its own guesses are not exact
        guess, _ = head.forward(draft, following, features + noise, positions, CAUSAL, past)
        truth = jnp.roll(features, -1, axis=1)
        likely = jax.nn.softmax(target.unembed(params, truth, words))
        guessed = jax.nn.log_softmax(target.unembed(params, guess, words))
        each = 10 * jnp.mean(optax.huber_loss(guess, truth), axis=-1) - jnp.sum(likely * guessed, axis=-1)
        return jnp.sum(jnp.where(counts, each, 0)) / jnp.sum(counts)

    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 10, steps))

    @jax.jit
    def update(draft, memory, params, features, key):
        value, slope = jax.value_and_grad(loss)(draft, params, features, key)
        change, memory = optimizer.update(slope, memory)
        return optax.apply_updates(draft, change), memory, value

    features, memory, losses = features_of(engine.params.target), optimizer.init(draft), []
    for key in jax.random.split(jax.random.key(1), steps):
        draft, memory, value = update(draft, memory, engine.params.target, features, key)
        losses.append(float(value))
    return draft, losses


# %%
if HEAD:
    from specjax.checkpoint import load_head

    shape, draft = load_head(HEAD, target.config, kind="eagle")
else:
    shape, draft = new_head()
    draft, losses = learn_by_heart(shape, draft, texts, LESSONS)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# %% [markdown]
# The same target with this head: 5 levels, the 4 best nodes of a level go on, and of all candidates the 15 best make
# the tree. We ask for a story that the head has seen, and for one that it has not.

# %%
drafter = make_drafter(Eagle(steps=LEVELS, topk=4, nodes=NODES), target=target, head=shape)
eagle = Engine(
    target,
    Params(engine.params.target, draft),
    tokenizer,
    drafter,
    config=EngineConfig(max_running_requests=1, context_length=512, trace=True),
    eos_ids=engine.eos_ids,
)
greedy = SamplingParams(max_new_tokens=LENGTH)
seen = eagle.generate(stories[0], greedy)
unseen = eagle.generate(ask("Write a short story about a fox who is afraid of the moon."), greedy)
for name, story in (("seen", seen), ("unseen", unseen)):
    print(f"{name:>6}: {story.spec_accept_length:.2f} tokens a step")

# %% [markdown]
# A box is the darker the likelier the head thinks the path to it is; the number below is that probability.

# %%
number = richest(seen.trees)
print(render(seen.trees[number], tokenizer.decode))
draw_tree(seen.trees[number], tokenizer.decode, title=f"a story it has seen, step {number + 1}")
plt.show()

# %% [markdown]
# Two steps in a row of the other story. Nothing of what the head has learned fits: it is less sure, so the tree is
# wide and shallow, and the target's token is mostly not in it.

# %%
draw_steps(unseen.trees[4:6], tokenizer.decode, first=5)
plt.show()

# %% [markdown]
# ## Does the head know how good it is?
#
# A node is accepted if the whole path to it is drawn. If the head's probabilities were the target's, the sum of the
# probabilities of all nodes of a tree would be the number of drafts that will be accepted, on average. A dot is a step;
# the line is where belief and outcome agree. On average they do for the stories that the head was made from; of
# others it thinks it knows more than it does.


# %%
def beliefs(trees: list) -> tuple[np.ndarray, np.ndarray]:
    """For each step: how many drafts the head expected to be accepted, and how many were."""
    return (
        np.array([np.exp(tree.scores[1:]).sum() for tree in trees]),
        np.array([tree.accepted for tree in trees]),
    )


figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
spread = np.random.default_rng(0)
for name, story, color, marker in (("seen", seen, "#0072b2", "o"), ("unseen", unseen, "#d55e00", "^")):
    expected, found = beliefs(story.trees)
    label = f"{name}: expected {expected.mean():.2f}, accepted {found.mean():.2f} a step"
    shifted = found + spread.uniform(-0.12, 0.12, len(found))  # so that equal ones do not hide one another
    ax.scatter(expected, shifted, s=22, c=color, marker=marker, alpha=0.6, linewidths=0, label=label)
most = max(ax.get_xlim()[1], ax.get_ylim()[1])
ax.plot([0, most], [0, most], color="#6b7280", lw=1, zorder=0)
ax.set(
    xlabel="drafts that the head expects to be accepted", ylabel="drafts accepted", xlim=(0, most), ylim=(-0.4, most)
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# ## The same in your own step
#
# Without the engine: jit `speculate_step` with `StepConfig(trace=True)` and look at its output.
#
# ```python
# from specjax import StepConfig, make_steps
# from specjax.viz.trees import step_trees
#
# steps = make_steps(target, drafter, config=StepConfig(trace=True))
# state, output = steps.speculate(params, state, inputs)
# for tree in step_trees(output):  # one for each entry of the batch, None for the inactive ones
#     if tree is not None:
#         print(render(tree, tokenizer.decode))
# ```
