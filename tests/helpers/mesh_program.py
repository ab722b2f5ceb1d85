"""Engines, models and products over several CPU devices, for tests/core/test_mesh*.py.

Runs in a separate process, because the number of devices must be set before JAX starts. Prints a line of JSON for each
argument, a list in JSON: the name of a function, and its arguments.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if not jax.distributed.is_initialized():  # else hosts_program.py sets it
    jax.config.update("jax_num_cpu_devices", 4)

from engine_helpers import NGRAM, force_drafts, text_parity, tokenizer
from integrity import check_integrity
from specjax_kernels import CAUSAL, Quantised, embed, linear, quantise
from specjax_kernels.mesh import on_axis
from specjax_kernels.quantised import shared, split_axes

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
from specjax.models import init_params, make_target, table
from specjax.models.draft_head import init_head_params, with_token_map
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import input_letters, is_product, map_leaves, output_major
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
EXPERTS = Experts(8, 2, 64, (1,))
LATENT = Latent(rank=32, query_rank=32, nope_dim=8, rope_dim=8, value_dim=16)
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "qwen3_moe": {"experts": EXPERTS},
    "deepseek_v3": {
        "experts": replace(EXPERTS, scoring="sigmoid", groups=4, top_groups=2, shared_width=64),
        "latent": LATENT,
        "query_scale": 0.2,
    },
    "qwen3_next": {"delta": DeltaNet((0,), 2, 4, 8, 12)},
    "gemma2": {"windows": (4, None), "attention_softcap": 2.0, "logit_softcap": 8.0},
    "gpt_oss": {"experts": replace(EXPERTS, per_token=4), "windows": (4, None), "output_bias": True},
}
MODELS = {
    family: replace(
        CONFIG, family=family, hidden_size=64, intermediate_size=128, num_heads=8, head_dim=8, attention_bias=False,
        **changes,
    )
    for family, changes in CHANGES.items()
}  # fmt: skip
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
    config = replace(HEAD3, hidden_size=CONFIG.hidden_size, feature_size=2 * CONFIG.hidden_size)
    return eagle_drafter(target, config, TREE), head(config), config


def token_map() -> tuple[Any, ...]:
    config, params = with_token_map(HEAD, head(HEAD), target, weights, FEW)
    return eagle_drafter(target, config, TREE), params, config


def standalone() -> tuple[Any, ...]:
    rng = np.random.default_rng(2)
    noisy = jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.02, leaf.shape).astype(np.float32), weights)
    drafter = standalone_drafter(target, target, TREE)
    return Speculation(drafter, costly_observe=True), StandaloneParams(noisy), target


def mtp() -> tuple[Any, ...]:
    experts = CONFIG.experts and replace(CONFIG.experts, layers=(0,))
    config = MtpConfig("mimo", replace(CONFIG, num_layers=1, experts=experts), CONFIG.num_layers, 2, VOCABULARY)
    sizes = mtp_sizes(config)
    shapes = map_leaves(mtp_table(config), lambda leaf: jnp.zeros(leaf.shape(sizes)))
    return mtp_drafter(target, config, CHAIN), drawn(shapes, 3), config


def mtp_map() -> tuple[Any, ...]:
    """MTP layers with a token map, whose columns of the output matrix are in 8 bits."""
    _, params, config = mtp()
    config, params = with_token_map(config, params, target, weights, FEW, "int8")
    return mtp_drafter(target, config, CHAIN), params, config


def block() -> tuple[Any, ...]:
    config = BlockConfig(
        hidden_size=32, feature_size=64, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, layers=2,
        norm_epsilon=1e-5, vocab_size=12, aux_layers=(0, 1), own_head=True, mapped=True, rope=RopeConfig(theta=100.0),
        block=4, mask_token=0, from_anchor=True, windows=(None, 8), causal=(False, True), walk="gated", rank=8,
    )  # fmt: skip
    return block_drafter(target, config, TREE), head(config), config


CASES = {f.__name__: f for f in (none, ngram, eagle, eagle3, token_map, standalone, mtp, mtp_map, block)}

PROMPTS = [list(range(60, 72)), [60, 61, 62, 63, 9, 8], [*range(60, 72), 7], [100, 101]]
BIAS = {str(token): 40.0 for token in FEW}
SAMPLING = [
    SamplingParams(max_new_tokens=16, ignore_eos=True, logit_bias=BIAS),
    SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(max_new_tokens=12, ignore_eos=True, frequency_penalty=0.3),
    SamplingParams(max_new_tokens=12, grammar=Grammar("regex", "[a-c]{4}[0-9]+x")),
]


def settings(count: int, groups: int = 1) -> EngineConfig:
    return EngineConfig(
        max_running_requests=1, page_size=4, max_total_tokens=512, context_length=64, chunked_prefill_size=16,
        tensor_parallel=count, expert_parallel=groups, adaptive=False,
    )  # fmt: skip


def collectives(program: Any) -> list[tuple[str, ...]]:
    """Dtype, shape and kind of all collectives of a program, including branches."""
    return [match.groups() for line in program.as_text().splitlines() if (match := COLLECTIVE.search(line))]


def run(engine: Engine) -> dict[str, Any]:
    """Texts of all requests, properties of a step's program, and the placement of arrays."""
    done = [engine.generate(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)]
    check_integrity(engine)
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


def use_experts() -> None:
    """Replaces the target of all cases by one with experts."""
    global CONFIG, target, weights
    CONFIG = MODELS["qwen3_moe"]
    target = make_target(CONFIG)
    weights = drawn(init_params(CONFIG, jax.random.key(0)), 0)


def in_memory(
    case: str, count: int, groups: int = 0, kind: type[Engine] = Engine, config: EngineConfig | None = None
) -> Engine:
    """`groups`: of experts; 0: the target has none."""
    if groups and CONFIG.experts is None:
        use_experts()
    drafter, draft, description = CASES[case]()
    params, config = Params(weights, draft), config or settings(count, groups or 1)
    return kind(target, params, tokenizer(), drafter, config=config, draft_model=description)


def texts(*arguments: Any) -> dict[str, Any]:
    return run(in_memory(*arguments))


def from_files(
    folder: str, count: int, algorithm: str, draft: dict[str, Any], quantization: str = "auto", groups: int = 1
) -> dict[str, Any]:
    """`draft`: fields of the algorithm's options."""
    engine = Engine.from_pretrained(
        folder, draft=options_of(algorithm, **draft), config=settings(count, groups), quantization=quantization,
        compilation_cache=False, progress=False,
    )  # fmt: skip
    experts = {name: leaf for name, leaf in engine.params.target["layers_1"].items() if name.startswith("experts")}
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(experts))
    return run(engine) | {
        "experts": local_bytes(experts) / whole if whole else None,
        "quantised draft": len(quantised_leaves(engine.params.draft)),
    }


def quantised_leaves(params: Any) -> list[Quantised]:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return [leaf for leaf in leaves if isinstance(leaf, Quantised)]


# Requests whose tree widths change.

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]})
SHARED = [*range(60, 76)]
REQUESTS = [
    (SHARED, SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=3, logprob_ids=(5, 70))),
    ([9, 8, 7, 60, 61], SamplingParams(max_new_tokens=14, ignore_eos=True, logit_bias=BIAS, prompt_logprobs=2)),
    ([*SHARED, 4], SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.9, seed=7, logprobs=0)),
    ([100, 101], SamplingParams(max_new_tokens=24, grammar=Grammar("json_schema", SCHEMA), logprobs=1)),
    ([*SHARED, 4, 5], SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=2, logprob_start_len=3)),
]  # fmt: skip


def features(case: str, count: int, adaptive: bool) -> dict[str, Any]:
    """Log-probabilities, grammars, reused pages and adaptive drafting."""
    engine = in_memory(case, count, config=replace(settings(count), max_running_requests=2, adaptive=adaptive))
    chosen = force_drafts(engine, lambda: text_parity(engine)) if adaptive else []
    prompts, sampling = zip(*REQUESTS, strict=True)
    # The other requests reuse pages of the first.
    done = [engine.generate(prompts[0], sampling[0]), *engine.generate([*prompts[1:]], [*sampling[1:]])]
    check_integrity(engine)
    return {
        "texts": [completion.output_ids for completion in done],
        "cached": [completion.cached_tokens for completion in done],
        "logprobs": [[(each.logprob, each.top, each.of_ids) for each in one.logprobs or ()] for one in done],
        "prompts": [[(each.logprob, each.top) for each in one.prompt_logprobs or ()] for one in done],
        "accepted": engine.counters.accepted,
        "chosen": sorted(set(chosen)),
    }


# Forwards and products, compared with one device.


def forward(family: str, count: int, width: int, kind: str | None = None, groups: int = 1) -> dict[str, Any]:
    """Difference of a forward's logits from one device, and its collectives. `kind`: of quantised weights."""
    config = MODELS[family]
    model, mesh = make_target(config), make_mesh(count, groups=groups)
    assert mesh is not None
    parameters = drawn(init_params(config, jax.random.key(0)), 0)
    result, placed = compared(model, mesh, parameters if kind is None else in_few_bits(parameters, config, kind), width)
    again = place_params(mesh, Params(placed), declared_models(model, None)).target
    assert jax.tree.structure(again) == jax.tree.structure(placed)
    names = ("experts_gate_up", "experts_down")
    experts = [placed["layers_1"][name] for name in names if name in placed["layers_1"]]
    arrays = [leaf.codes if isinstance(leaf, Quantised) else leaf for leaf in experts]
    return result | {
        "collectives": [kind for *_, kind in result["collectives"]],
        "quantised": len(quantised_leaves(placed)),
        "quantised experts": len(quantised_leaves(experts)),
        "parts": [np.divide(array.sharding.shard_shape(array.shape), array.shape).tolist() for array in arrays],
    }


def in_few_bits(weights: dict[str, Any], config: ModelConfig, kind: str) -> dict[str, Any]:
    """Quantises all matrices of a model, as loading does."""
    result = {name: dict(part) if isinstance(part, dict) else part for name, part in weights.items()}
    for scope in table(config):
        place = result[scope.name] if scope.name else result
        for leaf in filter(is_product, scope.leaves):
            inputs, outputs = input_letters(leaf), output_major(leaf).dims[:-1]
            axes = [leaf.dims.index(letter) for letter in (*outputs, *inputs)]
            value = np.asarray(place[leaf.name]).transpose(axes)
            place[leaf.name] = quantise(value.reshape(*value.shape[: len(outputs)], -1), kind)
    return result


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


def on_devices(mesh: Any, leaf: Quantised) -> Any:
    """The parts of a divided leaf."""

    def put(axis: int, array: Any) -> Any:
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, on_axis(axis)))

    return jax.tree.map(put, split_axes(leaf), leaf)


SPLITS = {"outputs": -4, "last outputs": -2, "inputs": -1}


def product(name: str, count: int, split: str, rows: int) -> dict[str, Any]:
    """Relative error of a product against float64, and its collectives."""
    from quantised_leaves import decoded, leaf_of

    leaf, mesh = leaf_of(name, (4, 2, 12), 512), make_mesh(count)
    assert mesh is not None
    divided = shared(leaf, SPLITS[split], count)
    if divided is None:
        return {"split": False}
    x = np.random.default_rng(1).normal(size=(1, rows, leaf.depth)).astype(np.float32)
    expected = np.einsum("bnm,kqem->bnkqe", x.astype(np.float64), decoded(leaf))
    with under(mesh):
        arguments = jax.device_put(x, everywhere(mesh)), on_devices(mesh, divided)
        program = jax.jit(linear).lower(*arguments).compile()
    result = np.asarray(program(*arguments))
    return {
        "split": True,
        "error": float(np.abs(result - expected).max() / np.abs(expected).max()),
        "collectives": [kind for *_, kind in collectives(program)],
        "share": local_bytes(arguments[1]) / divided.nbytes,
    }


def rows_of_a_table(name: str, count: int) -> dict[str, Any]:
    """Difference of embedding rows from one device, and their collectives."""
    from quantised_leaves import leaf_of

    leaf, mesh = leaf_of(name, (32,), 64), make_mesh(count)
    assert mesh is not None
    ids = np.asarray([[0, 31, 7, 8, 15, 16]], np.int32)
    divided = shared(leaf, -2, count)
    assert divided is not None
    with under(mesh):
        arguments = on_devices(mesh, divided), jax.device_put(ids, everywhere(mesh))
        program = jax.jit(embed).lower(*arguments).compile()
    result = program(*arguments)
    return {
        "error": float(np.abs(np.asarray(result) - np.asarray(embed(leaf, jnp.asarray(ids)))).max()),
        "collectives": [kind for *_, kind in collectives(program)],
    }


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


FUNCTIONS: dict[str, Any] = {f.__name__: f for f in (texts, from_files, features, forward, product, rows_of_a_table)}

if __name__ == "__main__":
    handler = Warnings()
    logging.getLogger("specjax").addHandler(handler)
    for name, *arguments in map(json.loads, sys.argv[1:]):
        handler.texts.clear()
        print(json.dumps(FUNCTIONS[name](*arguments) | {"warnings": handler.texts}), flush=True)
