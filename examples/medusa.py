"""Decodes without the engine, then trains Medusa's heads and drafts with them.

The model is frozen. Sixty steps on one text make the heads memorise it. Heads for other texts need thousands of texts
(`specjax train generate`).

    python examples/medusa.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax import (
    Drafter,
    Engine,
    EngineConfig,
    Params,
    PoolShape,
    PrefillInput,
    SamplingParams,
    StepInput,
    chain,
    hidden_states,
    init_state,
    make_steps,
    new_row,
    verify_tree,
)
from specjax.drafters.base import put_rows, take_rows
from specjax.load import load
from specjax.state import RUNS

HEADS = 4

loaded = load("smollm2-135m-instruct", draft="NONE", quantization="none")
target, params, tokenizer = loaded.target, loaded.params, loaded.tokenizer
print(target.config.num_layers, target.config.hidden_size, loaded.drafter.name)

# Prefill and steps


def generate(target, params, drafter, prompt, count, stop_ids=(), verify=verify_tree):
    """Up to `count` tokens that continue a prompt, greedily, and the number of decode steps."""
    size = 16  # tokens in a page
    pool = PoolShape(pages=-(-(len(prompt) + count + drafter.depth) // size), page_size=size)
    steps = make_steps(target, drafter, verify=verify)
    state = init_state(params, target, drafter, rows=1, pool=pool)
    row = new_row(target.config.vocab_size, limit=count, prompt=prompt, stop_ids=stop_ids)
    state = steps.admit(state, 0, row)
    table = jnp.arange(pool.pages, dtype=jnp.int32)[None, :]  # the request's pages, in order
    inputs = StepInput(slots=jnp.zeros(1, jnp.int32), page_table=table, active=jnp.ones(1, bool))
    chunk = PrefillInput(
        *inputs[:3],  # slots, page table, active
        tokens=jnp.asarray([prompt], jnp.int32),  # [B, C]; longer prompts may come in several chunks
        length=jnp.asarray([len(prompt)], jnp.int32),
        next_token=jnp.full(1, -1, jnp.int32),  # draw it
    )
    state, output = steps.prefill(params, state, chunk)
    tokens, taken = [int(output.tokens[0, 0])], 0
    while int(output.finish[0]) == RUNS:
        state, output = steps.speculate(params, state, inputs)
        tokens += np.asarray(output.tokens)[0, : int(output.emitted[0])].tolist()
        taken += 1
    return tokens, taken


prompt = tokenizer("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,")["input_ids"]
tokens, taken = generate(target, params, loaded.drafter, prompt, 64, loaded.eos_ids)
print(len(tokens), "tokens in", taken, "steps:", repr(tokenizer.decode(tokens, skip_special_tokens=True)))

# Hidden states

text = jnp.asarray([prompt + tokens], jnp.int32)  # [B, N]
hidden = jax.jit(partial(hidden_states, target))(params.target, text)  # [B, N, M]
layers = hidden_states(target, params.target, text, features=(0, target.config.num_layers - 1))  # [B, N, 2 M]
predicted = jnp.argmax(target.unembed(params.target, hidden), axis=2)
print(hidden.shape, layers.shape, predicted[0, len(prompt) - 1 : -1].tolist() == tokens)

# Medusa: head d predicts the token d + 2 positions after the last committed token


def heads(target, params, hidden):
    """float32 logits [..., HEADS, V] of hidden states [..., M]; `params.draft` is [HEADS, M, M]."""
    change = jax.nn.silu(jnp.einsum("...m,dmn->...dn", hidden, params.draft))
    return target.unembed(params.target, hidden[..., None, :] + change)


def medusa(target):
    def init(params, rows, pool):
        return jnp.zeros((rows, target.config.hidden_size), target.config.dtype)  # at each row's last committed token

    def propose(params, state, context):
        scores = jax.nn.log_softmax(heads(target, params, take_rows(state, context)))  # [B, HEADS, V]
        tokens = jnp.argmax(scores, axis=2).astype(jnp.int32)
        length = jnp.where(context.active, HEADS, 0)
        return chain(context.root, tokens, length, jnp.cumsum(jnp.max(scores, axis=2), axis=1)), state

    def observe(params, state, context, observation):
        last = jnp.maximum(observation.length - 1, 0)[:, None, None]
        new = jnp.take_along_axis(observation.features, last, axis=1)[:, 0]
        return put_rows(state, new, context, observation)

    facts = {"features": "final", "width": HEADS + 1, "depth": HEADS, "topk": 1}
    return Drafter("MEDUSA", init=init, propose=propose, observe=observe, **facts)


def loss(draft, frozen, hidden, text):
    logits = heads(target, Params(frozen, draft), hidden)  # [B, N, HEADS, V]
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return sum(cross_entropy(logits[:, : -d - 2, d], text[:, d + 2 :]).mean() for d in range(HEADS)) / HEADS


optimizer = optax.adam(3e-3)


@jax.jit
def update(draft, moments, frozen, hidden, text):
    value, gradient = jax.value_and_grad(loss)(draft, frozen, hidden, text)
    change, moments = optimizer.update(gradient, moments)
    return optax.apply_updates(draft, change), moments, value


size = target.config.hidden_size
draft = 0.01 * jax.random.normal(jax.random.key(0), (HEADS, size, size), jnp.float32)
moments = optimizer.init(draft)
for _ in range(60):
    draft, moments, value = update(draft, moments, params.target, hidden, text)
print("loss", float(value))

# The heads draft in the bare steps and in an engine, with equal texts

trained = Params(params.target, draft)
drafted, taken = generate(target, trained, medusa(target), prompt, 64, loaded.eos_ids)
print(drafted == tokens, taken, "steps")

config = EngineConfig(adaptive=False)  # draft in every step
engine = Engine(target, trained, tokenizer, medusa(target), config=config, eos_ids=loaded.eos_ids)
done = engine.generate(prompt, SamplingParams(max_new_tokens=64))
print(done.output_ids == tokens, done.spec_accept_length, "tokens a step")
