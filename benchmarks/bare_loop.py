"""What the machinery costs: `speculate_step` without drafts against a bare jitted greedy loop, interleaved.

The bare loop has no pages, batch, slots, sampling parameters or state: one contiguous cache, one argmax. Both run the
same weights in the same process, a step of one, then a step of the other.

    python benchmarks/bare_loop.py [--prefix 50 200 800] [--steps 100] [--record]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from records import finish, machine
from specjax_kernels import rms_norm

from specjax import Params, PoolShape, StepInput, checkpoint, init_state, make_drafter, make_steps, make_target, new_row
from specjax.config import ModelConfig
from specjax.models.rope import rotate, rotations


def bare_step(config: ModelConfig, length: int) -> Any:
    """(params, token, n, keys, values) -> the same, one token later. Cache leaves are [K, length, E]."""
    width, heads, group, head = config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim

    def step(p: Any, token: Any, n: Any, keys: list[Any], values: list[Any]) -> Any:
        x = p["embed"][token][None]
        cos, sin = rotations(config.rope, head, jnp.full((1, 1), n, jnp.int32))
        new_keys, new_values = [], []
        for i in range(config.num_layers):
            layer = p[f"layers_{i}"]
            normed = rms_norm(x, layer["attention_norm"], config.norm_epsilon)
            qkv = (normed @ layer["qkv"].reshape(width, -1)).reshape(1, 1, heads, group + 2, head)
            turned = rotate(qkv[..., : group + 1, :], cos, sin)[0, 0]
            query, key, value = turned[:, :group], turned[:, group], qkv[0, 0, :, group + 1]
            new_keys.append(jax.lax.dynamic_update_slice(keys[i], key[:, None], (0, n, 0)))
            new_values.append(jax.lax.dynamic_update_slice(values[i], value[:, None], (0, n, 0)))
            scores = jnp.einsum("kge,kte->kgt", query, new_keys[-1]) * head**-0.5
            scores = jnp.where(jnp.arange(length)[None, None] <= n, scores, -jnp.inf)
            attended = jnp.einsum("kgt,kte->kge", jax.nn.softmax(scores, axis=-1), new_values[-1])
            x = x + attended.reshape(1, -1) @ layer["output"].reshape(-1, width)
            normed = rms_norm(x, layer["mlp_norm"], config.norm_epsilon)
            gate, up = jnp.split(normed @ layer["gate_up"].reshape(width, -1), 2, axis=1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        hidden = rms_norm(x, p["final_norm"], config.norm_epsilon)
        logits = jnp.einsum("nm,vm->nv", hidden, p["embed"]) if config.tied_embeddings else hidden @ p["head"]
        return jnp.argmax(logits[0]).astype(jnp.int32), n + 1, new_keys, new_values

    return jax.jit(step, donate_argnums=(3, 4))


def measure(prefix: int, steps: int, config: ModelConfig, weights: Any) -> dict[str, Any]:
    """Both loops from `prefix` tokens on; the cache's contents do not matter for the time."""
    length = -(-(prefix + steps + 16) // 128) * 128
    bare = bare_step(config, length)
    shape = (config.num_kv_heads, length, config.head_dim)
    keys, values = ([jnp.zeros(shape) for _ in range(config.num_layers)] for _ in range(2))
    token, n = jnp.int32(5), jnp.int32(prefix)

    target, drafter = make_target(config), make_drafter("NONE")
    pool, table_width = PoolShape(2048, 16), 512
    params = Params(weights)
    state = init_state(params, target, drafter, rows=8, pool=pool)
    jitted = make_steps(target, drafter)
    state = jitted.admit(state, np.int32(0), new_row(config.vocab_size, limit=10**6, prefix_length=prefix))
    table = np.full((1, table_width), pool.pages, np.int32)
    table[0, : length // 16] = np.arange(length // 16)
    inputs: Any = (np.array([0], np.int32), table, np.array([True]))

    bare_ms, ours_ms = [], []
    for _ in range(steps):
        start = time.perf_counter()
        token, n, keys, values = bare(weights, token, n, keys, values)
        int(token)
        middle = time.perf_counter()
        state, output = jitted.speculate(params, state, StepInput(*inputs))
        int(output.emitted[0])
        bare_ms.append((middle - start) * 1e3)
        ours_ms.append((time.perf_counter() - middle) * 1e3)
    a, b = np.array(bare_ms[10:]), np.array(ours_ms[10:])
    return {
        "prefix": prefix,
        "bare_ms": round(float(np.median(a)), 3),
        "none_ms": round(float(np.median(b)), 3),
        "ratio_of_medians": round(float(np.median(b) / np.median(a)), 4),
        "median_of_ratios": round(float(np.median(b / a)), 4),
        "samples_bare_ms": np.round(a, 2).tolist(),
        "samples_none_ms": np.round(b, 2).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL)
    parser.add_argument("--prefix", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--record", action="store_true", help="write under benchmarks/results/")
    args = parser.parse_args()
    document = machine("jaxlib", "flax") | {"model": args.model}
    files = checkpoint.resolve(args.model)
    config = checkpoint.model_config(files.config, dtype="float32")
    weights = checkpoint.load_params(files, config, quantization="none")
    rows = []
    for prefix in args.prefix:
        rows.append(measure(prefix, args.steps, config, weights))
        row = rows[-1]
        print(f"prefix {prefix:5d}: bare {row['bare_ms']:.2f} ms, none {row['none_ms']:.2f} ms, "
              f"ratio {row['ratio_of_medians']:.3f}", flush=True)  # fmt: skip
    finish("bare_loop", document | {"rows": rows}, record=args.record)


if __name__ == "__main__":
    main()
