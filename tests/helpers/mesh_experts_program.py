"""Experts spread over groups of CPU devices, for tests/core/test_mesh_experts.py.

Runs in a separate process. Prints a line of JSON per case.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import mesh_program as program
import numpy as np
from engine_helpers import tokenizer
from mesh_program import CASES, CHAIN, CONFIG, compared, drawn
from mesh_quantised_program import Warnings, in_few_bits
from specjax_kernels import Quantised

from specjax.config import Experts, Latent, MtpConfig
from specjax.drafters import Params, options_of
from specjax.drafters.mtp import mtp_drafter
from specjax.engine import Engine, EngineConfig
from specjax.models import init_params, make_target
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import map_leaves
from specjax.parallel.sharding import local_bytes, make_mesh

EXPERTS = Experts(8, 2, 64, (1,))
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_heads": 8, "head_dim": 8, "attention_bias": False,
}  # fmt: skip
MODELS = {
    "qwen3_moe": replace(CONFIG, family="qwen3_moe", experts=EXPERTS, **SIZES),
    "deepseek_v3": replace(
        CONFIG, family="deepseek_v3", query_scale=0.2, **SIZES,
        experts=replace(EXPERTS, scoring="sigmoid", groups=4, top_groups=2, shared_width=64),
        latent=Latent(rank=32, query_rank=32, nope_dim=8, rope_dim=8, value_dim=16),
    ),
    "gpt_oss": replace(CONFIG, family="gpt_oss", experts=EXPERTS, **SIZES),
}  # fmt: skip


def forward(family: str, count: int, groups: int, width: int, kind: str | None = None) -> dict[str, Any]:
    """Difference of a forward's logits from one device, its collectives, and the share of experts on each device."""
    model, mesh = make_target(MODELS[family]), make_mesh(count, groups=groups)
    parameters = drawn(init_params(model.config, jax.random.key(0)), 0)
    result, placed = compared(
        model, mesh, parameters if kind is None else in_few_bits(parameters, model.config, kind), width
    )
    leaves = [placed["layers_1"][name] for name in ("experts_gate_up", "experts_down")]
    arrays = [leaf.codes if isinstance(leaf, Quantised) else leaf for leaf in leaves]
    return result | {
        "collectives": [kind for *_, kind in result["collectives"]],
        "parts": [np.divide(array.sharding.shard_shape(array.shape), array.shape).tolist() for array in arrays],
        "quantised": sum(isinstance(leaf, Quantised) for leaf in leaves),
    }


def mtp() -> tuple[Any, ...]:
    """MTP layers with experts."""
    layer = replace(program.target.config, num_layers=1, experts=replace(EXPERTS, layers=(0,)))
    config = MtpConfig("mimo", layer, CONFIG.num_layers, 2, CONFIG.vocab_size)
    sizes = mtp_sizes(config)
    shapes = map_leaves(mtp_table(config), lambda leaf: jnp.zeros(leaf.shape(sizes)))
    return mtp_drafter(program.target, config, CHAIN), drawn(shapes, 3), config


def settings(count: int, groups: int) -> EngineConfig:
    return replace(program.settings(count), expert_parallel=groups)


def in_memory(case: str, count: int, groups: int) -> dict[str, Any]:
    """`mesh_program.in_memory` for a model with experts."""
    config = MODELS["qwen3_moe"]
    program.CONFIG, program.target = config, make_target(config)
    program.HEAD3 = replace(program.HEAD3, hidden_size=64, feature_size=128)
    program.weights = drawn(init_params(config, jax.random.key(0)), 0)
    drafter, draft, description = mtp() if case == "mtp" else CASES[case]()
    params = Params(program.weights, draft)
    engine = Engine(
        program.target, params, tokenizer(), drafter, config=settings(count, groups), draft_model=description
    )
    return program.run(engine)


def from_files(folder: str, count: int, groups: int, algorithm: str, quantization: str = "auto") -> dict[str, Any]:
    engine = Engine.from_pretrained(
        folder, draft=options_of(algorithm), config=settings(count, groups), quantization=quantization,
        compilation_cache=False, progress=False,
    )  # fmt: skip
    experts = {name: leaf for name, leaf in engine.params.target["layers_1"].items() if name.startswith("experts")}
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(experts))
    return program.run(engine) | {"experts": local_bytes(experts) / whole}


if __name__ == "__main__":
    handler = Warnings()
    logging.getLogger("specjax").addHandler(handler)
    for name, *arguments in map(json.loads, sys.argv[1:]):
        functions: dict[str, Any] = {f.__name__: f for f in (forward, in_memory, from_files)}
        handler.texts.clear()
        print(json.dumps(functions[name](*arguments) | {"warnings": handler.texts}), flush=True)
