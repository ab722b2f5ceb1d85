"""Engines over several CPU devices, for tests/core/test_mesh.py.

Runs in a separate process, because the number of devices must be set before JAX starts. Prints a line of JSON per case.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if not jax.distributed.is_initialized():  # else hosts_program.py sets it
    jax.config.update("jax_num_cpu_devices", 4)

from engine_helpers import NGRAM, tokenizer
from specjax_kernels import CAUSAL

from specjax.cache import PoolShape, init_cache
from specjax.config import BlockConfig, DeltaNet, Experts, HeadConfig, Latent, ModelConfig, MtpConfig, RopeConfig
from specjax.drafters import (
    Params,
    Speculation,
    StandaloneParams,
    TreeShape,
    block_drafter,
    eagle_drafter,
    make_speculation,
    options_of,
)
from specjax.drafters.mtp import mtp_drafter
from specjax.drafters.standalone import standalone_drafter
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.engine.grammar import Grammar
from specjax.load import declared_models
from specjax.models import init_params, make_target
from specjax.models.draft_head import init_head_params, with_token_map
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import map_leaves
from specjax.parallel.sharding import empty_state, everywhere, local_bytes, make_mesh, place_params, under

VOCABULARY = 268
CONFIG = ModelConfig(
    family="llama", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=8, norm_epsilon=1e-5, max_positions=256, tied_embeddings=False,
    rope=RopeConfig(theta=100.0), attention_bias=True,
)  # fmt: skip
HEAD = HeadConfig(
    kind="eagle", hidden_size=32, feature_size=32, intermediate_size=48, num_heads=4, num_kv_heads=4, head_dim=8,
    norm_epsilon=1e-5, vocab_size=VOCABULARY, fc_bias=True, rope=RopeConfig(theta=100.0),
)  # fmt: skip
HEAD3 = HeadConfig(
    kind="eagle3", hidden_size=32, feature_size=64, intermediate_size=48, num_heads=4, num_kv_heads=4, head_dim=8,
    norm_epsilon=1e-5, vocab_size=12, aux_layers=(0, 1), own_embedding=True, own_head=True, mapped=True,
    rope=RopeConfig(theta=100.0),
)  # fmt: skip
FEW = np.arange(70, 82, dtype=np.int32)
"""Tokens to which requests are biased, so that heads that propose nothing else are right now and then."""
TREE, CHAIN = TreeShape(2, 3, 6), TreeShape(2, 1, 3)
KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
COLLECTIVE = re.compile(rf" = \(?(\w+)\[([\d,]*)\].* ({'|'.join(KINDS)})(?:-start)?\(")


def drawn(weights: Any, seed: int) -> dict[str, Any]:
    """Random parameters with distinct logits."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        if path[-1].key == "ids":
            return jnp.asarray(FEW)
        center = 1.0 if path[-1].key.endswith("norm") else 0.0
        return jnp.asarray(rng.normal(center, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, dict(weights))


target = make_target(CONFIG)
weights = drawn(init_params(CONFIG, jax.random.key(0)), 0)


def head(config: HeadConfig) -> dict[str, Any]:
    return drawn(init_head_params(config, target, jax.random.key(1)), 1)


def none() -> tuple[Any, ...]:
    return make_speculation("NONE"), None, None


def ngram() -> tuple[Any, ...]:
    return make_speculation(NGRAM), None, None


def eagle() -> tuple[Any, ...]:
    return eagle_drafter(target, HEAD, CHAIN), head(HEAD), HEAD


def eagle3() -> tuple[Any, ...]:
    return eagle_drafter(target, HEAD3, TREE), head(HEAD3), HEAD3


def token_map() -> tuple[Any, ...]:
    config, params = with_token_map(HEAD, head(HEAD), target, weights, FEW)
    return eagle_drafter(target, config, TREE), params, config


def standalone() -> tuple[Any, ...]:
    rng = np.random.default_rng(2)
    noisy = jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.02, leaf.shape).astype(np.float32), weights)
    drafter = standalone_drafter(target, target, TREE)
    return Speculation(drafter, costly_observe=True), StandaloneParams(noisy), target


def mtp() -> tuple[Any, ...]:
    config = MtpConfig("mimo", replace(CONFIG, num_layers=1), CONFIG.num_layers, 2, VOCABULARY)
    sizes = mtp_sizes(config)
    shapes = map_leaves(mtp_table(config), lambda leaf: jnp.zeros(leaf.shape(sizes)))
    return mtp_drafter(target, config, CHAIN), drawn(shapes, 3), config


def block() -> tuple[Any, ...]:
    config = BlockConfig(
        hidden_size=32, feature_size=64, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, layers=2,
        norm_epsilon=1e-5, vocab_size=12, aux_layers=(0, 1), own_head=True, mapped=True, rope=RopeConfig(theta=100.0),
        block=4, mask_token=0, from_anchor=True, windows=(None, 8), causal=(False, True), walk="gated", rank=8,
    )  # fmt: skip
    return block_drafter(target, config, TREE), head(config), config


CASES = {f.__name__: f for f in (none, ngram, eagle, eagle3, token_map, standalone, mtp, block)}

PROMPTS = [list(range(60, 72)), [60, 61, 62, 63, 9, 8], [*range(60, 72), 7], [100, 101]]
BIAS = {str(token): 40.0 for token in FEW}
SAMPLING = [
    SamplingParams(max_new_tokens=16, ignore_eos=True, logit_bias=BIAS),
    SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(max_new_tokens=12, ignore_eos=True, frequency_penalty=0.3),
    SamplingParams(max_new_tokens=12, grammar=Grammar("regex", "[a-c]{4}[0-9]+x")),
]


def settings(count: int) -> EngineConfig:
    return EngineConfig(
        max_running_requests=1, page_size=4, max_total_tokens=512, context_length=64, chunked_prefill_size=16,
        tensor_parallel=count, adaptive=False,
    )  # fmt: skip


def collectives(program: Any) -> list[tuple[str, ...]]:
    """Dtype, shape and kind of all collectives of a program, including branches."""
    return [match.groups() for line in program.as_text().splitlines() if (match := COLLECTIVE.search(line))]


def run(engine: Engine) -> dict[str, Any]:
    """Texts of all requests, properties of a step's program, and the placement of arrays."""
    done = [engine.generate(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)]
    engine.check_integrity()
    state = engine.device.state
    leaves = jax.tree.leaves((state.decode.cache, state.decode.draft))
    pools = [leaf for leaf in leaves if leaf.shape[:2] == engine.pool and leaf.ndim > 2]
    (program,) = [engine.programs.get(key) for key in engine.programs.compiled() if key.kind == "step"]
    return {
        "algorithm": engine.drafter.name,
        "texts": [completion.output_ids for completion in done],
        "accepted": engine.counters.accepted,
        "cached": engine.counters.cached_tokens,
        "collectives": collectives(program),
        "aliased": program.memory_analysis().alias_size_in_bytes,
        "state": local_bytes(state),
        "pool shares": sorted({leaf.addressable_shards[0].data.nbytes / leaf.nbytes for leaf in pools}),
        "weights": local_bytes(engine.params.target),
    }


def in_memory(case: str, count: int, kind: type[Engine] = Engine) -> Engine:
    drafter, draft, description = CASES[case]()
    params, config = Params(weights, draft), settings(count)
    return kind(target, params, tokenizer(), drafter, config=config, draft_model=description)


def from_files(folder: str, count: int, algorithm: str, path: str | None) -> Engine:
    draft = options_of(algorithm, **({"path": path} if path else {}))
    config = settings(count)
    return Engine.from_pretrained(folder, draft=draft, config=config, compilation_cache=False, progress=False)


def forward(family: str, count: int, width: int) -> dict[str, Any]:
    """Difference of a forward's logits from one device, and its collectives."""
    experts = Experts(8, 2, 24, (1,))
    latent = Latent(rank=16, query_rank=24, nope_dim=12, rope_dim=8, value_dim=10)
    changes: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"experts": experts},
        "deepseek_v3": {
            "experts": replace(experts, scoring="sigmoid", shared_width=24),
            "latent": latent,
            "query_scale": 0.2,
        },
        "qwen3_next": {"delta": DeltaNet((0,), 2, 4, 8, 12)},
        "gemma2": {"windows": (4, None), "attention_softcap": 2.0, "logit_softcap": 8.0},
        "gpt_oss": {"experts": replace(experts, per_token=4), "windows": (4, None), "output_bias": True},
    }
    config = replace(CONFIG, family=family, num_heads=4, attention_bias=False, **changes.get(family, {}))
    model, mesh = make_target(config), make_mesh(count)
    parameters = drawn(init_params(config, jax.random.key(0)), 0)
    assert mesh is not None
    return compared(model, mesh, parameters, width)[0]


def compared(model: Any, mesh: Any, parameters: Any, width: int) -> tuple[dict[str, Any], Any]:
    """Compares logits of `width` tokens with one device. Also returns the weights on the mesh."""
    tokens = np.arange(width, dtype=np.int32)[None] * 7 % model.config.vocab_size

    def logits(parameters: Any, cache: Any, tokens: Any) -> Any:
        positions = jnp.arange(width, dtype=jnp.int32)[None]
        past = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        output = model.forward(
            parameters, model.embed(parameters, tokens), positions, CAUSAL, cache, *past, features=None
        )
        return model.unembed(parameters, output.hidden)

    expected = jax.jit(logits)(parameters, init_cache(model.pages, PoolShape(1, 4), rows=1), tokens)
    placed = place_params(mesh, Params(parameters), declared_models(model, None)).target
    cache = empty_state(mesh, lambda: init_cache(model.pages, PoolShape(1, 4), rows=1))
    with under(mesh):
        program = jax.jit(logits).lower(placed, cache, tokens).compile()
    result = program(placed, cache, jax.device_put(tokens, everywhere(mesh)))
    return {
        "difference": float(np.max(np.abs(np.asarray(result) - np.asarray(expected)))),
        "largest": float(np.max(np.abs(expected))),
        "collectives": collectives(program),
    }, placed


if __name__ == "__main__":
    for argument in map(json.loads, sys.argv[1:]):  # arguments of `in_memory`, `forward` or `from_files`
        if len(argument) == 3:
            print(json.dumps(forward(*argument)), flush=True)
            continue
        engine = in_memory(*argument) if len(argument) == 2 else from_files(*argument)
        print(json.dumps(run(engine)), flush=True)
