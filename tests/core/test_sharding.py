"""Tensor parallelism: the same steps on two CPU devices, weights and pages split as the family's table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from specjax import ModelConfig, RopeConfig
from specjax.config import HeadConfig
from specjax.models import table
from specjax.models.head_spec import head_table

pytestmark = pytest.mark.process

CONFIG = {
    "family": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "norm_epsilon": 1e-5,
    "max_positions": 256,
    "attention_bias": True,
    "mlp_bias": True,
}

# Every leaf that a head can have. Its four tokens hold the three that the greedy request can draw.
HEAD = {
    "kind": "eagle3", "hidden_size": 32, "feature_size": 64, "intermediate_size": 48, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 8, "norm_epsilon": 1e-5, "vocab_size": 4, "aux_layers": (0, 1),
    "own_embedding": True,
    "own_head": True, "mapped": True, "fc_bias": True, "attention_bias": True, "output_bias": True, "mlp_bias": True,
}  # fmt: skip
TREE = {"steps": 2, "topk": 4, "nodes": 21}
"""Holds every text of two of them."""

# Devices must be asked for before jax starts, so this part is a program of its own.
PROGRAM = '''
import json, sys
import jax

jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import (
    ModelConfig, Params, PoolShape, PrefillInput, RopeConfig, StepInput, init_state, make_drafter, make_target, new_row,
    prefill_step, speculate_step,
)
from specjax.config import HeadConfig
from specjax.drafters.options import options_of
from specjax.models import init_params, table
from specjax.models.blocks import key_value_spec
from specjax.models.draft_head import init_head_params
from specjax.models.head_spec import head_table
from specjax.models.params import map_leaves
from specjax.step import StepConfig, admit, tree_widths

ROWS, PAGES, SIZE, TABLE, CHUNK, STEPS = 2, 512, 8, 8, 16, 12
tied, algorithm, flags, head = json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), json.loads(sys.argv[5])
config = ModelConfig(**json.loads(sys.argv[1]), tied_embeddings=tied, rope=RopeConfig(theta=100.0))
if head is not None:
    head = HeadConfig(**head | {"aux_layers": tuple(head["aux_layers"])}, rope=RopeConfig(theta=100.0))
mesh = Mesh(np.array(jax.devices()), ("tensor",))


def split(axes):
    """A leaf's sharding: every logical axis goes to the one axis of the mesh."""
    return NamedSharding(mesh, PartitionSpec(*("tensor" if axis else None for axis in axes)))


def spread(weights, declared):
    return jax.device_put(weights, map_leaves(declared, lambda leaf: split(leaf.axes)))


def pages(specs):
    return jax.tree.map(lambda spec: split(spec.page_axes), specs)


def run(sharded):
    target = make_target(config)
    drafter = make_drafter(options_of(algorithm, **flags), target=target, head=head)
    weights = init_params(config, jax.random.key(0))
    # Wide enough for logits that differ; neither norms are one nor biases zero.
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        center = 1.0 if path[-1].key.endswith("norm") else 0.0
        return jnp.asarray(rng.normal(center, 0.4, leaf.shape), leaf.dtype)

    weights = jax.tree_util.tree_map_with_path(draw, dict(weights))
    draft = None
    if head is not None:
        draft = dict(init_head_params(head, target, jax.random.key(0)))
        draft = jax.tree_util.tree_map_with_path(draw, draft) | {"ids": jnp.arange(1, 5, dtype=jnp.int32)}
    if sharded:
        weights = spread(weights, table(config))
        draft = draft and spread(draft, head_table(head))
    params = Params(weights, draft)
    state = init_state(params, target, drafter, rows=ROWS, pool=PoolShape(PAGES, SIZE))
    kept = {}
    if sharded:
        everywhere = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda leaf: everywhere, state)
        shardings = shardings._replace(cache=pages(target.pages))
        if head is not None:
            shardings = shardings._replace(draft=shardings.draft._replace(cache=pages(key_value_spec(head))))
        state = jax.device_put(state, shardings)
        kept = {"out_shardings": (shardings, None)}
    fixed = {"target": target, "drafter": drafter, "config": StepConfig(tree_widths(drafter))}
    prefill = jax.jit(lambda p, s, i: prefill_step(p, s, i, **fixed), donate_argnums=1, **kept)
    speculate = jax.jit(lambda p, s, i: speculate_step(p, s, i, **fixed), donate_argnums=1, **kept)
    place = {"out_shardings": shardings} if sharded else {}
    take_in = jax.jit(admit, donate_argnums=0, **place)

    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [9, 8]]
    tokens = np.zeros((ROWS, CHUNK), np.int32)
    for slot, prompt in enumerate(prompts):
        tokens[slot, : len(prompt)] = prompt
        # Greedy over three tokens, so that drafts are accepted; and sampled over all.
        request = {"temperature": 1.5, "seed": 5} if slot else {"logit_bias": {1: 50.0, 2: 50.0, 3: 50.0}}
        row = new_row(config.vocab_size, limit=60, prompt=prompt, **request)
        state = take_in(state, jnp.int32(slot), jax.tree.map(jnp.asarray, row))
    page_table = np.random.default_rng(1).permutation(PAGES)[: ROWS * TABLE].reshape(ROWS, TABLE).astype(np.int32)
    step = StepInput(jnp.arange(ROWS), jnp.asarray(page_table), jnp.ones(ROWS, bool))
    length = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    chunk = PrefillInput(*step[:3], jnp.asarray(tokens), length, jnp.full(ROWS, -1, jnp.int32))

    compiled = {"prefill": prefill.lower(params, state, chunk).compile()}
    compiled["step"] = speculate.lower(params, state, step).compile()
    pools = {"pages": state.cache} | ({} if head is None else {"draft pages": state.draft.cache})
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(pools))
    memory = {}
    for name, program in compiled.items():
        found = program.memory_analysis()
        memory[name] = [local, found.alias_size_in_bytes, found.temp_size_in_bytes]
    texts, emitted = [[], []], []
    state, output = compiled["prefill"](params, state, chunk)
    for turn in range(STEPS + 1):
        emitted.append(output.emitted.tolist())
        for text, row, count in zip(texts, output.tokens.tolist(), emitted[-1], strict=True):
            text.extend(row[:count])
        state, output = compiled["step"](params, state, step)
    shares = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path((weights, state.cache)):
        name = path[-1].key if hasattr(path[-1], "key") else "pages"
        shares[name] = leaf.addressable_shards[0].data.nbytes / leaf.nbytes
    drafts = {} if head is None else {**draft, "pages": state.draft.cache.key}
    for name, leaf in drafts.items():
        shares[f"draft {name}"] = leaf.addressable_shards[0].data.nbytes / leaf.nbytes
    return {"texts": texts, "emitted": emitted, "memory": memory, "shares": shares}


print(json.dumps([run(False), run(True)]))
'''


@pytest.mark.parametrize(
    ("algorithm", "flags", "tied"),
    [
        pytest.param("NONE", {}, True, marks=pytest.mark.slow),
        # A head splits all that there is to split; n-grams are on each device as a whole.
        pytest.param("NGRAM", {"nodes": 6, "max_match": 3, "capacity": 1024}, False, marks=pytest.mark.slow),
        ("EAGLE3", TREE, False),
    ],
    ids=["NONE", "NGRAM", "EAGLE3"],
)
def test_two_devices_draw_the_same_tokens(algorithm, flags, tied, tmp_path):
    head = HEAD if algorithm == "EAGLE3" else None
    arguments = [json.dumps(CONFIG), json.dumps(tied), algorithm, json.dumps(flags), json.dumps(head)]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")]),
    }
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"])}
    done = subprocess.run(
        [sys.executable, "-W", "error:Some donated buffers", "-c", PROGRAM, *arguments],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone, split = json.loads(done.stdout.splitlines()[-1])
    assert split["texts"] == alone["texts"]
    assert split["emitted"] == alone["emitted"]
    assert len(set(alone["texts"][1])) > 5, alone["texts"]
    assert (max(map(max, alone["emitted"])) > 1) == (algorithm != "NONE")
    if head is not None:
        assert {row[0] for row in alone["emitted"][1:]} == {3}, "the tree holds all that it can draw"

    config = ModelConfig(**CONFIG, tied_embeddings=tied, rope=RopeConfig())
    axes = {leaf.name: leaf.axes for scope in table(config) for leaf in scope.leaves}
    if head is not None:
        described = HeadConfig(**HEAD, rope=RopeConfig())
        axes |= {f"draft {leaf.name}": leaf.axes for scope in head_table(described) for leaf in scope.leaves}
    assert alone["shares"] == dict.fromkeys(alone["shares"], 1.0)
    axes |= dict.fromkeys(("pages", "draft pages"), ("kv_heads",))
    assert split["shares"] == {name: 0.5 if any(axes[name]) else 1.0 for name in alone["shares"]}
    for pool, aliased, temporary in split["memory"].values():
        assert aliased >= pool
        assert temporary < pool / 4, "a layer of the pool is gathered on one device"
