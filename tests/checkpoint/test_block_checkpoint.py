"""Files of block heads: what config.json means, the slot convention, and the refusals. tests/drafters/test_block.py
compares the heads of all dialects with an oracle."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_draft_head_checkpoint import target
from tiny_blocks import BLOCK, DIALECTS, RANK, save_block

from specjax.checkpoint import CheckpointError, describe_head, load_head
from specjax.checkpoint.block_head import default_block_features
from specjax.limits import ParameterError
from specjax.models.head_spec import head_sizes, head_table
from specjax.models.params import leaves_of

NESTED = "dflash_config"
SLIDING, FULL_ATTENTION = "sliding_attention", "full_attention"
MIXED = {"layer_types": [SLIDING, FULL_ATTENTION], "sliding_window": 9}
FULL = {"layer_types": [FULL_ATTENTION] * 2}


def read(folder, **options):
    return load_head(str(folder), target(), kind="block", progress=False, **options)


def change(folder, *, nested=False, **changes):
    """Changes keys of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    part = config[NESTED] if nested else config
    part |= changes
    for key in [key for key, value in part.items() if value is None]:
        del part[key]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects(tmp_path, dialect):
    saved = save_block(tmp_path, dialect)
    config, params = read(tmp_path)
    form, spec = DIALECTS[dialect], saved.spec
    assert (config.kind, config.block, config.layers, config.aux_layers) == ("block", BLOCK, 2, (1, 3, 4))
    assert (config.from_anchor, config.windows, config.causal) == (spec.from_anchor, spec.windows, spec.causal)
    assert (
        config.mask_token == 30
        and config.rope.theta == (1e6 if "gemma4" in dialect else 100)
        and config.norm_epsilon == 1e-5
    )
    assert config.max_positions is None and config.feature_size == 48
    assert config.mapped == config.own_head == form.mapped and not config.own_embedding
    walk = "rnn" if "rnn" in dialect else "gated" if "gated" in dialect else "vanilla"
    walk = walk if "dspark" in dialect or dialect[9:] in ("rnn", "gated", "vanilla", "gemma4") else "none"
    walk = "selector" if "dflash2" in dialect else walk
    assert (config.walk, config.rank) == (walk, RANK if walk != "none" else 0)
    if form.mapped:
        assert params["ids"].tolist() == saved.ids.tolist()
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    sizes = head_sizes(config, 31)
    assert shapes == {leaf.shape(sizes) for leaf in leaves_of(head_table(config))}
    assert {leaf.dtype for leaf in jax.tree.leaves({**params, "ids": jnp.float32(0)})} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(params["layers_1"]["down"], saved.tensors["layers.1.mlp.down_proj.weight"].T)
    assert describe_head(str(tmp_path), target(), kind="block") == config
    (tmp_path / "model.safetensors").unlink()
    assert describe_head(str(tmp_path), target(), kind="block") == config


def test_slot_convention(tmp_path):
    """The file decides, the option overrides it, and without both the head is refused."""
    for dialect, stated in (("dflash", False), ("deepspec-dflash", True), ("speculators-dflash", False)):
        save_block(tmp_path / dialect, dialect)
        assert read(tmp_path / dialect)[0].from_anchor == stated
        assert read(tmp_path / dialect, sample_from_anchor=not stated)[0].from_anchor != stated
    change(tmp_path / "dflash", nested=True, sample_from_anchor=True)
    assert read(tmp_path / "dflash")[0].from_anchor
    save_block(tmp_path / "dspark", "speculators-dspark", config={"sample_from_anchor": None})
    with pytest.raises(ParameterError, match=r"Block.sample_from_anchor is needed: .* 'dspark' does not imply it"):
        read(tmp_path / "dspark")
    with pytest.raises(ParameterError, match="sample_from_anchor"):
        describe_head(str(tmp_path / "dspark"), target(), kind="block")
    assert not read(tmp_path / "dspark", sample_from_anchor=False)[0].from_anchor
    save_block(tmp_path / "unknown", "dflash", config={"architectures": None})
    with pytest.raises(ParameterError, match="no architectures does not imply it"):
        read(tmp_path / "unknown")
    save_block(tmp_path / "other", "dflash", config={"architectures": ["SomeDraftModel"]})
    with pytest.raises(ParameterError, match="'SomeDraftModel' does not imply it"):
        read(tmp_path / "other")


@pytest.mark.parametrize(
    ("keys", "nested", "windows", "causal"),
    [
        ({}, {}, (None, None), (False, False)),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, {}, (9, 9), (True, True)),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False},
            {},
            (9, 9),
            (False, False),
        ),
        ({"is_causal": True}, {"causal": False}, (None, None), (True, True)),
        ({}, {"causal": True}, (None, None), (True, True)),
        ({"sliding_window": 9}, {}, (None, None), (False, False)),
        ({}, {"use_swa": True, "swa_window_size": 5}, (5, 5), (False, False)),
        (MIXED, {}, (9, None), (True, False)),
        # Of layers with a window alone, wherever it stands.
        (MIXED | {"sliding_window_non_causal": True}, {}, (9, None), (False, False)),
        (MIXED | {"sliding_window_non_causal": False}, {}, (9, None), (True, False)),
        (MIXED, {"sliding_window_non_causal": True}, (9, None), (False, False)),
        (MIXED | {"sliding_window_non_causal": None}, {}, (9, None), (True, False)),
        ({"sliding_window_non_causal": False}, {}, (None, None), (False, False)),
        ({"sliding_window_non_causal": True}, {}, (None, None), (False, False)),
        ({"sliding_window_non_causal": False}, {"use_swa": True, "swa_window_size": 5}, (5, 5), (True, True)),
        ({"sliding_window_non_causal": True}, {"use_swa": True, "swa_window_size": 5}, (5, 5), (False, False)),
        # Keys for all layers win.
        (MIXED | {"sliding_window_non_causal": True, "is_causal": True}, {}, (9, None), (True, True)),
        (MIXED | {"sliding_window_non_causal": False}, {"causal": False}, (9, None), (False, False)),
        # Qwen3's windows without layer_types.
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, {}, (None, 9), (False, True)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, {}, (9, 9), (True, True)),
        ({"use_sliding_window": True, "sliding_window": 9}, {}, (None, None), (False, False)),
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, {}, (None, None), (False, False)),
        (FULL | {"use_sliding_window": False, "sliding_window": 9}, {}, (None, None), (False, False)),
        (MIXED | {"use_sliding_window": True}, {}, (9, None), (True, False)),
    ],
)
def test_windows(tmp_path, keys, nested, windows, causal):
    save_block(tmp_path, "dflash", config=keys)
    change(tmp_path, nested=True, **nested)
    config = read(tmp_path)[0]
    assert (config.windows, config.causal) == (windows, causal)


def test_embedding_and_output_layer(tmp_path):
    """Those of a file are used where they differ from the target's, except for DeepSpec's copies."""
    save_block(tmp_path, "deepspec-vanilla")
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    assert not {"embed", "head"} & read(tmp_path)[1].keys()
    saved = save_block(tmp_path / "own", "dflash")
    embedding, head = np.random.default_rng(0).normal(0, 1, (2, 31, 16)).astype(np.float32)
    ends = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(saved.tensors | ends, tmp_path / "own" / "model.safetensors")
    config, params = read(tmp_path / "own", target_embedding=lambda: embedding + 1)
    assert config.own_embedding and config.own_head and not config.mapped
    np.testing.assert_array_equal(params["embed"], embedding)
    np.testing.assert_array_equal(params["head"], head.T)
    config, params = read(tmp_path / "own", target_embedding=lambda: embedding)
    assert not config.own_embedding and "embed" not in params


def test_default_layers(tmp_path):
    """As in z-lab's code."""
    assert default_block_features(36, 5) == (1, 9, 17, 25, 33)
    assert default_block_features(30, 5) == (1, 8, 14, 20, 27)
    assert default_block_features(30, 2) == (1, 27) and default_block_features(24, 1) == (12,)
    save_block(tmp_path, "dflash", features=(1, 5))
    change(tmp_path, nested=True, target_layer_ids=None)
    assert read(tmp_path)[0].aux_layers == (1, 5)


LAYER = "transformer_layer_config"
READ = [
    # (place, keys, the fields that differ from those of the same file without the keys)
    ("", {"sample_from_anchor": True}, {"from_anchor": True}),
    ("", {"input_embedding_scale": 2.0}, {"input_scale": 2.0}),
    ("", {"output_multiplier": 0.5}, {"output_scale": 0.5}),
    ("", {"final_logit_softcapping": 3.0}, {"logit_softcap": 3.0}),
    ("", {"causal": True}, {"causal": (True, True)}),
    ("", {"is_causal": True}, {"causal": (True, True)}),
    ("", {"causal_head": True}, {"causal": (True, True)}),
    ("", {"use_swa": True, "swa_window_size": 5}, {"windows": (5, 5)}),
    ("", {"block_size": 4}, {"block": 4}),
    ("", {"mask_token_id": 3}, {"mask_token": 3}),
    ("", {"rms_norm_eps": 0.01}, {"norm_epsilon": 0.01}),
    (LAYER, {"rms_norm_eps": 0.01}, {"norm_epsilon": 0.01}),
    (LAYER, MIXED, {"windows": (9, None), "causal": (True, False)}),
    (LAYER, MIXED | {"sliding_window_non_causal": True}, {"windows": (9, None)}),
    ("", {"target_layer_ids": [4, 1, 3], "aux_hidden_state_layer_ids": None}, {"aux_layers": (4, 1, 3)}),
    # Values that change nothing.
    ("", {"attention_sink_bias": False, "attention_value_scale": 1.0, "projector_type": "dflash"}, {}),
    ("", {"is_neox_style": True, "input_embedding_scale": 1.0, "output_multiplier": 1}, {}),
    ("", {"final_logit_softcapping": None, "causal": False, "use_swa": False, "swa_window_size": 5}, {}),
    ("", {"final_logit_softcapping": 0}, {}),
    ("", {"num_anchors": 512, "enable_confidence_head": False, "markov_rank": 0, "markov_head_type": "rnn"}, {}),
    ("", {"shift_label": None, "draft_ffn_type": "dense", "use_aux_hidden_state": True, "target_hidden_size": 16}, {}),
    ("", {"tie_word_embeddings": False, "num_target_layers": 8, "vocab_size": 31, "pure_draft_prefix_len": 1}, {}),
    (LAYER, FULL | {"sliding_window": 9, "use_sliding_window": False}, {}),
    (LAYER, {"attention_dropout": 0.0, "hidden_act": "silu", "mlp_bias": False, "max_window_layers": 28}, {}),
]


@pytest.mark.parametrize("dialect", ["dflash", "specforge", "speculators-dflash"])
@pytest.mark.parametrize(("place", "keys", "changed"), READ)
def test_keys_that_are_read(tmp_path, dialect, place, keys, changed):
    """At the top of config.json, and in the object where z-lab and SpecForge, or speculators, write them."""
    save_block(tmp_path / "without", dialect)
    expected = replace(read(tmp_path / "without")[0], **changed)
    for inner in {False, dialect != "speculators-dflash"} if not place else (True,):
        save_block(tmp_path / "with", dialect)
        file = tmp_path / "with" / "config.json"
        config = json.loads(file.read_text())
        part = config.setdefault(place or NESTED, {}) if inner else config
        for other in (config.get(NESTED, {}), config.get(LAYER, {})):
            for key in keys:
                other.pop(key, None)
        part |= keys
        file.write_text(json.dumps(config))
        assert read(tmp_path / "with")[0] == expected


REFUSED = [
    ({"sliding_window_non_causal": "no"}, {}, "sliding_window_non_causal is 'no'; true or false is needed"),
    ({}, {"shift_label": True}, "shift_label is True; supported: false (sample_from_anchor"),
    ({"draft_ffn_type": "moe"}, {}, "draft_ffn_type is 'moe'; supported: dense"),
    ({}, {"use_aux_hidden_state": False}, "use_aux_hidden_state is False; supported: true"),
    (MIXED | {"use_sliding_window": False}, {}, "use_sliding_window is False; supported: true where layer_types has"),
    ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": -1}, {}, "max_window_layers is -1"),
    ({"attention_sink_bias": True}, {}, "attention_sink_bias is True; supported: absent"),
    ({"attention_value_scale": 0.5}, {}, "attention_value_scale is 0.5"),
    ({}, {"is_neox_style": False}, "is_neox_style is False"),
    ({"architectures": 1}, {}, "architectures is 1; a list of names is needed"),
    ({"architectures": "DFlashDraftModel"}, {}, "architectures is 'DFlashDraftModel'; a list of names is needed"),
    ({"projector_type": "domino"}, {}, "projector_type is 'domino'; supported: dflash, dflash2, dspark"),
    ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
    ({"architectures": ["Gemma4DraftModel"]}, {}, "architectures is 'Gemma4DraftModel'"),
    ({"architectures": ["Gemma4DSparkModel"], "enable_moe_block": True}, {}, "enable_moe_block is True"),
    ({"architectures": ["Gemma4DSparkModel"], "hidden_activation": "silu"}, {}, "hidden_activation is 'silu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config is"),
    ({"block_size": None}, {}, "block_size is None; an integer of at least 2 is needed"),
    ({"block_size": 1}, {}, "block_size is 1; an integer of at least 2 is needed"),
    ({"block_size": 2**40}, {}, "block_size is 1099511627776; an integer of at least 2 below 2**31 is needed"),
    ({"num_key_value_heads": 3}, {}, "num_key_value_heads is 3; a divisor of num_attention_heads (4) is needed"),
    ({}, {"mask_token_id": None}, "mask_token_id is None; a token id from 0 to 30 is needed"),
    ({}, {"mask_token_id": 31}, "mask_token_id is 31"),
    ({}, {"target_layer_ids": [-1, 3, 4]}, "the outputs of different layers from 0 to 6 .* (not its embedding"),
    ({}, {"target_layer_ids": [1, 3, 7]}, "target_layer_ids is [1, 3, 7]"),
    (
        {"aux_hidden_state_layer_ids": [3, 4, 5]},
        {"target_layer_ids": [1, 3, 4]},
        "aux_hidden_state_layer_ids is [3, 4, 5]; the inputs of the layers after target_layer_ids [1, 3, 4]",
    ),
    ({}, {"target_hidden_size": 20}, "target_hidden_size is 20, and the target's is 16"),
    ({"num_target_layers": 36}, {}, "num_target_layers is 36, and the target's is 8"),
    ({"vocab_size": 32}, {}, "vocab_size is 32, and the target's is 31"),
    ({"hidden_size": 20}, {}, "the target's width is needed: 16"),
    ({"layer_types": ["full_attention"]}, {}, "for each of 2 layers one of full_attention, sliding_attention"),
    ({"layer_types": ["sliding_attention"] * 2}, {}, "sliding_window is None; a positive integer is needed"),
    ({}, {"markov_rank": 6, "markov_head_type": "lstm"}, "markov_head_type is 'lstm'; supported: vanilla, gated, rnn"),
    ({}, {"selector_rank": 6, "conv_group_size": 5}, "conv_group_size is 5; a divisor of hidden_size (16) is needed"),
    ({}, {"selector_rank": 6, "selector_top_k": 10**6}, "selector_top_k is 1000000; at most 1024"),
    ({}, {"markov_rank": 6}, "missing tensors: markov_head.markov_w1.weight, markov_head.markov_w2.weight"),
    ({"num_hidden_layers": 1}, {}, "tensors with no place in block heads: layers.1.input_layernorm.weight"),
    ({"intermediate_size": 32}, {}, "wrong shapes: layers.0.mlp.down_proj.weight is [16, 24], not [16, 32]"),
    ({"attention_bias": True}, {}, "missing tensors: layers.0.self_attn.k_proj.bias"),
]


@pytest.mark.parametrize(("keys", "nested", "message"), REFUSED)
def test_refused(tmp_path, keys, nested, message):
    save_block(tmp_path, "dflash", config=keys)
    change(tmp_path, nested=True, **nested)
    with pytest.raises(CheckpointError, match=".*".join(map(re.escape, message.split(" .* ")))):
        read(tmp_path)


def test_quantised_and_foreign_heads_are_refused(tmp_path):
    saved = save_block(tmp_path, "dflash")
    tensors = saved.tensors | {"fc.weight": saved.tensors["fc.weight"].astype(np.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no floats \(quantised heads are not supported\): fc.weight"):
        read(tmp_path)
    save_block(tmp_path, "dflash")
    with pytest.raises(CheckpointError, match="decoder layers; heads of 1 layer are supported"):
        load_head(str(tmp_path), target(), kind="eagle3", progress=False)
    with pytest.raises(CheckpointError, match="vocab_size is 31, and the target's is 40"):
        load_head(str(tmp_path), replace(target(), vocab_size=40, hidden_size=16), kind="block", progress=False)


def test_int8(tmp_path):
    save_block(tmp_path, "dflash2", width=32, features=(1,), config={"hidden_size": 32})
    wide = target(hidden_size=32)
    params = load_head(str(tmp_path), wide, kind="block", progress=False, quantization="int8")[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(params["layers_0"]["qkv"])} == {
        jnp.dtype("int8"),
        jnp.dtype("float32"),
    }
    assert params["previous"].dtype == params["next"].dtype == jnp.dtype("float32")
