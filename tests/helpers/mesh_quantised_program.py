"""Quantised weights over several CPU devices, for tests/core/test_mesh_quantised.py.

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
import numpy as np
from mesh_program import CONFIG, collectives, compared, drawn, run, settings
from quantised_leaves import decoded, leaf_of
from specjax_kernels import Quantised, embed, linear, quantise
from specjax_kernels.quantised import shared, split_axes

from specjax.config import Experts, Latent, ModelConfig
from specjax.drafters import Params, options_of
from specjax.engine import Engine
from specjax.load import declared_models
from specjax.models import init_params, make_target, table
from specjax.models.params import input_letters, is_product, output_major
from specjax.parallel.sharding import everywhere, local_bytes, make_mesh, place_params, under

SPLITS = {"outputs": -4, "last outputs": -2, "inputs": -1}


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def product(name: str, count: int, split: str, rows: int) -> dict[str, Any]:
    """Relative error of a product against float64, and its collectives."""
    leaf, mesh = leaf_of(name, (4, 2, 12), 512), make_mesh(count)
    assert mesh is not None
    divided = shared(leaf, SPLITS[split], count)
    if divided is None:
        return {"split": False}
    x = np.random.default_rng(1).normal(size=(1, rows, leaf.depth)).astype(np.float32)
    expected = np.einsum("bnm,kqem->bnkqe", x.astype(np.float64), decoded(leaf))
    with under(mesh):
        placed = jax.tree.map(lambda axis, array: jax.device_put(array, _on(mesh, axis)), split_axes(divided), divided)
        program = jax.jit(linear).lower(jax.device_put(x, everywhere(mesh)), placed).compile()
    result = np.asarray(program(jax.device_put(x, everywhere(mesh)), placed))
    return {
        "split": True,
        "error": float(np.abs(result - expected).max() / np.abs(expected).max()),
        "collectives": [kind for *_, kind in collectives(program)],
        "share": local_bytes(placed) / divided.nbytes,
    }


def _on(mesh: Any, axis: int) -> Any:
    from specjax_kernels.mesh import on_axis

    return jax.sharding.NamedSharding(mesh, on_axis(axis))


def rows_of_a_table(name: str, count: int) -> dict[str, Any]:
    """Difference of embedding rows from one device, and their collectives."""
    leaf, mesh = leaf_of(name, (32,), 64), make_mesh(count)
    assert mesh is not None
    ids = np.asarray([[0, 31, 7, 8, 15, 16]], np.int32)
    divided = shared(leaf, -2, count)
    assert divided is not None
    with under(mesh):
        placed = jax.tree.map(lambda axis, array: jax.device_put(array, _on(mesh, axis)), split_axes(divided), divided)
        program = jax.jit(embed).lower(placed, jax.device_put(ids, everywhere(mesh))).compile()
    result = program(placed, jax.device_put(ids, everywhere(mesh)))
    return {
        "error": float(np.abs(np.asarray(result) - np.asarray(embed(leaf, jnp.asarray(ids)))).max()),
        "collectives": [kind for *_, kind in collectives(program)],
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


def forward(family: str, count: int, kind: str, width: int) -> dict[str, Any]:
    """Difference of a forward's logits from one device, and its collectives."""
    experts = Experts(8, 2, 64, (1,))
    latent = Latent(rank=32, query_rank=32, nope_dim=8, rope_dim=8, value_dim=16)
    changes: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"experts": experts},
        "deepseek_v3": {
            "experts": replace(experts, scoring="sigmoid", shared_width=64), "latent": latent, "query_scale": 0.2
        },
    }  # fmt: skip
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 8, "head_dim": 8}
    config = replace(CONFIG, family=family, attention_bias=False, **shape, **changes.get(family, {}))
    model, mesh = make_target(config), make_mesh(count)
    assert mesh is not None
    parameters = in_few_bits(drawn(init_params(config, jax.random.key(0)), 0), config, kind)
    result, placed = compared(model, mesh, parameters, width)
    again = place_params(mesh, Params(placed), declared_models(model, None)).target
    assert jax.tree.structure(again) == jax.tree.structure(placed)
    leaves = jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return result | {
        "collectives": [kind for *_, kind in result["collectives"]],
        "quantised": sum(isinstance(leaf, Quantised) for leaf in leaves),
        "weights": local_bytes(placed),
    }


def engine(folder: str, count: int, quantization: str, algorithm: str, draft: dict[str, Any]) -> dict[str, Any]:
    loaded = Engine.from_pretrained(
        folder, draft=options_of(algorithm, **draft), config=settings(count), quantization=quantization,
        compilation_cache=False, progress=False,
    )  # fmt: skip
    drafts = jax.tree.leaves(loaded.params.draft, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return run(loaded) | {"quantised draft": sum(isinstance(leaf, Quantised) for leaf in drafts)}


if __name__ == "__main__":
    handler = Warnings()
    logging.getLogger("specjax").addHandler(handler)
    for name, *arguments in map(json.loads, sys.argv[1:]):
        functions: dict[str, Any] = {f.__name__: f for f in (product, rows_of_a_table, forward, engine)}
        handler.texts.clear()
        print(json.dumps(functions[name](*arguments) | {"warnings": handler.texts}), flush=True)
