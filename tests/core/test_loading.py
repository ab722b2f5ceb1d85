"""Loading by blocks and in threads equals plain numpy, and needs hardly more memory than the weights."""

from __future__ import annotations

import json
import tracemalloc

import jax
import numpy as np
import pytest
from specjax_kernels import quantise

from specjax.checkpoint import load_params, model_config, resolve
from specjax.checkpoint.parameters import ahead, aligned_empty, quantise_leaf
from specjax.checkpoint.quantised import BLOCK_BYTES
from specjax.checkpoint.weights import save_shards
from specjax.models.params import Leaf, Scope, Tensor, placements

WIDTH, INNER, VOCABULARY, LAYERS = 512, 2048, 4096, 8


@pytest.mark.parametrize(("rows", "columns"), [(70, 9), (128, 4200)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposed_by_blocks(rows, columns, dtype):
    """Rows and columns that blocks do not divide, transposed and in file order."""
    tensor = np.arange(2 * rows * columns, dtype=np.float32).reshape(2 * rows, columns).astype(np.dtype(dtype))
    sizes = {"K": 2, "E": rows, "M": columns}
    for letters, wanted in (
        ("M -> K E", tensor.T.reshape(columns, 2, rows)),
        ("K E -> M", tensor.reshape(2, rows, columns)),
        ("K M -> E", tensor.reshape(2, rows, columns).swapaxes(1, 2)),
    ):
        leaf = Leaf("leaf", letters, (Tensor("tensor", "KE M"),))
        (rule,) = placements((Scope((leaf,)),), sizes)
        actual = np.zeros(leaf.shape(sizes), np.float32)
        rule.place(actual, tensor)
        np.testing.assert_array_equal(actual, wanted.astype(np.float32))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantised_by_rows(kind):
    matrix = np.random.default_rng(0).standard_normal((3 * BLOCK_BYTES // 256 + 5, 64), np.float32)
    leaf = Leaf("down", "I -> M", (Tensor("down", "M I"),))
    actual = quantise_leaf([matrix], Scope((leaf,)), leaf, {"M": len(matrix), "I": 64}, kind)
    wanted = quantise(matrix, kind)
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_copy_to_cpu():
    host = aligned_empty((3, 5000), np.dtype("bfloat16"))
    assert jax.device_put(host, jax.devices("cpu")[0]).unsafe_buffer_pointer() == host.ctypes.data


def test_ahead_order_and_errors():
    assert list(ahead(lambda x: x * x, range(50))) == [x * x for x in range(50)]
    with pytest.raises(ZeroDivisionError):
        list(ahead(lambda x: 1 // (x - 7), range(50)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in {
            "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
            "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
            "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
        }.items()
    }  # fmt: skip
    shapes |= {"model.norm.weight": (WIDTH,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCABULARY, WIDTH))
    rng = np.random.default_rng(0)
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}
    save_shards(folder, sizes, lambda name: rng.standard_normal(shapes[name], np.float32))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_peak_memory(model, quantization, monkeypatch):
    """Counts numpy arrays, which are the leaves on a CPU; files are mapped."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    files = resolve(model, progress=False)
    config = model_config(files.config, dtype="float32", platform="cpu")
    load_params(files, config, quantization=quantization, progress=False)  # imports
    tracemalloc.start()
    try:
        params = load_params(files, config, quantization=quantization, progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 1.15 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))
