"""Declarations of parameters, and what follows from them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.models import init_params, make_target, table
from specjax.models.draft_head import init_head_params
from specjax.models.head_spec import HEAD_SPECS, head_sizes, head_table
from specjax.models.params import (
    GATE,
    KEY,
    QUERIES,
    UP,
    VALUE,
    Leaf,
    Part,
    Scope,
    Table,
    Tensor,
    dimensions,
    leaves_of,
    map_leaves,
    placements,
    tensors_of,
)
from specjax.parallel.sharding import held_bytes

ROPE = RopeConfig()
MODEL = ModelConfig("llama", 31, 16, 24, 3, 4, 2, 8, 1e-5, ROPE, 64, False, True, True, True)
BIASES = {"fc_bias": True, "attention_bias": True, "output_bias": True, "mlp_bias": True}


def head(kind: str) -> HeadConfig:
    layers = (0, 1) if HEAD_SPECS[kind].reads_layers else ()
    ends = dict.fromkeys(("own_embedding", "own_head", "mapped"), HEAD_SPECS[kind].own_ends)
    size = 11 if HEAD_SPECS[kind].own_ends else 31
    return HeadConfig(kind, 16, 16 * (len(layers) or 1), 24, 4, 2, 8, 1e-5, ROPE, size, layers, **ends, **BIASES)


def check_inverse(declared: Table, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Every number of a leaf comes from one place of one tensor, and returns there. Returns the tensors."""
    rng = np.random.default_rng(0)
    params = map_leaves(declared, lambda leaf: rng.normal(size=leaf.shape(sizes)))

    def at(tree, path):
        return at(tree[path[0]], path[1:]) if path else tree

    rules = list(placements(declared, sizes))
    tensors = tensors_of(rules, lambda path: at(params, path))
    assert {rule.tensor: rule.shape for rule in rules} == {name: tensor.shape for name, tensor in tensors.items()}
    loaded = map_leaves(declared, lambda leaf: np.full(leaf.shape(sizes), np.nan))
    for rule in rules:
        rule.place(at(loaded, rule.leaf), tensors[rule.tensor])
    for scope in declared:
        for leaf in scope.leaves:
            if leaf.tensors:
                path = (scope.name, leaf.name) if scope.name else (leaf.name,)
                np.testing.assert_array_equal(at(loaded, path), at(params, path))
    return tensors


def test_export_is_the_inverse_of_loading():
    assert len(check_inverse(table(MODEL), dimensions(MODEL))) == 3 + 3 * (9 + 4 + 3)
    for kind in HEAD_SPECS:
        check_inverse(head_table(head(kind)), head_sizes(head(kind), 31))


def test_fused_tensors_and_stacked_experts():
    axes = ("KGE", "KE", "KE")
    parts = enumerate((QUERIES, KEY, VALUE))
    fused = tuple(Tensor("qkv.weight", f"{axes[i]} M", (part,), fused=(axes, i)) for i, part in parts)
    stacked = tuple(
        Tensor(f"experts.{x}.{name}.weight", "I M", (Part("X", offset=x), part))
        for x in range(3)
        for name, part in (("gate", GATE), ("up", UP))
    )
    qkv, experts = Leaf("qkv", "M -> K Q E", fused), Leaf("gate_up", "X M -> 2 I", stacked)
    router = Leaf("router", "M -> X", (Tensor("router.weight", "X M"),), dtype="float32")
    declared = (Scope((qkv,), "layers_0", "0."), Scope((qkv, experts, router), "layers_1", "1."))
    sizes = dimensions(MODEL) | {"X": 3}
    tensors = check_inverse(declared, sizes)
    assert tensors["0.qkv.weight"].shape == (32 + 16 + 16, 16)
    assert tensors["1.experts.2.up.weight"].shape == (24, 16)
    assert len(tensors) == 2 + 6 + 1
    numbers = 2 * 16 * 2 * 4 * 8 + 3 * 16 * 2 * 24
    assert held_bytes(leaves_of(declared), sizes, "bfloat16") == 2 * numbers + 4 * 16 * 3


def test_models_have_the_declared_shapes():
    sizes = dimensions(MODEL)
    shapes = jax.tree.map(lambda leaf: leaf.shape, dict(jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))))
    assert shapes == map_leaves(table(MODEL), lambda leaf: leaf.shape(sizes))
    for kind in HEAD_SPECS:
        config = head(kind)
        params = init_head_params(config, make_target(MODEL), jax.random.key(0))
        sizes = head_sizes(config, 31)
        assert {name: leaf.shape for name, leaf in params.items()} == map_leaves(
            head_table(config), lambda leaf, sizes=sizes: leaf.shape(sizes)
        )
        bytes_ = sum(leaf.nbytes for leaf in params.values())
        assert held_bytes(leaves_of(head_table(config)), sizes, "float32") == bytes_


def test_declaration_properties():
    leaf = Leaf("qkv", "M -> K Q E")
    assert leaf.axes == (None, "kv_heads", None, None) and leaf.matrix == ((0,), (1, 2, 3))
    assert Leaf("embed", "V M").matrix is None and Leaf("ids", "W", replicated=True).axes == (None,)


def test_unknown_family():
    with pytest.raises(
        ValueError, match="no model family 'other'; supported: deepseek_v3, gemma2, gemma3, gemma4, gpt_oss, llama"
    ):
        make_target(ModelConfig("other", 31, 16, 24, 3, 4, 2, 8, 1e-5, ROPE, 64, False))
