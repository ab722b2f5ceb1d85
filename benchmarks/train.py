"""Measures training throughput: tokens a second of the target's forward, of the head's update and of both.

    python benchmarks/train.py [--rounds 3] [--rows 6] [--row-length 384] [--draft-vocab-size 8192] [--record]

The ceiling is the multiply-adds of a token (the target's matrices once, the head's three times a round: forward and two
derivatives) at the speed of a large product in the same run. It leaves out attention, softmax over the vocabulary,
norms, the optimiser and copies. Weights are random. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from records import finish, machine
from timing import seconds

from specjax import checkpoint
from specjax.models import init_params
from specjax.train import head as heads
from specjax.train.data import Rows
from specjax.train.features import teach, training_target
from specjax.train.options import DraftSettings, LossSettings, OptimizerSettings
from specjax.train.run import TrainState, make_optimizer, make_update, schedule


def times(call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of `count` calls, after two unmeasured calls."""
    return [seconds(call) for _ in range(count + 2)][2:]


def product_rate(dtype: str) -> float:
    """Multiply-adds a second of a large product: [4096, 1024] x [1024, 4096], float32 sums."""
    a, b = jnp.ones((4096, 1024), dtype), jnp.ones((1024, 4096), dtype)
    run = jax.jit(partial(jnp.dot, preferred_element_type=jnp.float32))
    return 4096 * 1024 * 4096 / median(times(lambda: run(a, b), 7))


def main() -> None:
    parser = argparse.ArgumentParser(description="Training throughput.")
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--row-length", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/train-<date>.json")
    args = parser.parse_args()

    files = checkpoint.resolve(args.model, progress=True)
    config = checkpoint.model_config(files.config, dtype=args.dtype)
    target = training_target(config, args.dtype)
    params = init_params(config, jax.random.key(0))
    settings = DraftSettings(draft_vocab_size=args.draft_vocab_size)
    head_config = heads.head_config(settings, config)
    ids = np.arange(head_config.vocab_size, dtype=np.int32) if head_config.mapped else None
    first = heads.new_params(head_config, target, params, ids, seed=0)
    weights, frozen = heads.split_params(first)
    chosen = OptimizerSettings(schedule="constant", warmup_steps=0)
    optimizer = make_optimizer(chosen, schedule(chosen, 100))
    with jax.numpy_dtype_promotion("standard"):
        state = TrainState(jnp.int32(0), weights, optimizer.init(weights))
    rng = np.random.default_rng(0)
    shape = (1, args.rows, args.row_length)
    positions = np.broadcast_to(np.arange(args.row_length, dtype=np.int32), shape)
    batch = Rows(
        jnp.asarray(rng.integers(0, head_config.vocab_size, shape), jnp.int32), jnp.asarray(positions),
        jnp.ones(shape, jnp.int32), jnp.ones(shape, bool),
    )  # fmt: skip
    teacher_of = teach(target, head_config.aux_layers)
    forward = jax.jit(teacher_of)
    single = jax.tree.map(lambda x: x[0], batch)
    teacher = jax.tree.map(lambda x: x[None], forward(params, single))
    objective = heads.objective("EAGLE3", LossSettings(rounds=args.rounds))
    computed = replace(head_config, dtype=args.dtype)
    cached, online = (
        make_update(heads.head_loss(computed, target, objective, frozen=frozen, teach=each), optimizer, seed=0)
        for each in (None, teacher_of)
    )

    def step(update: Any, teacher: Any) -> Any:
        nonlocal state
        state, metrics = update(state, params, batch, teacher)
        return metrics

    tokens = args.rows * args.row_length
    rate = product_rate(args.dtype)
    target_size = sum(leaf.size for leaf in jax.tree.leaves(params))  # the embedding is also the output layer
    head_size = sum(leaf.size for leaf in weights.values()) - weights["fc"].size
    needs = {
        "target forward": target_size,
        "head update, features kept": 3 * (args.rounds * head_size + weights["fc"].size),
    }
    needs["both in one step"] = sum(needs.values())
    calls = {
        "target forward": lambda: forward(params, single),
        "head update, features kept": lambda: step(cached, teacher),
        "both in one step": lambda: step(online, None),
    }
    document: dict[str, Any] = machine("jaxlib", "flax", "optax") | vars(args)
    document |= {"multiply_adds_per_second": round(rate), "results": []}
    print(f"{args.dtype}: a large product runs at {2 * rate / 1e9:.0f} GFLOP/s on {document['device']}")
    print(f"{'':28}{'tok/s':>8}{'ceiling':>9}{'share':>7}")
    for name, call in calls.items():
        samples = times(call, args.repeats)
        speed, ceiling = tokens / median(samples), rate / needs[name]
        print(f"{name:28}{speed:8.0f}{ceiling:9.0f}{speed / ceiling:7.0%}")
        row = {"what": name, "tokens_per_second": round(speed, 1), "ceiling": round(ceiling, 1), "samples": samples}
        document["results"].append(row)
    finish("train", document, record=args.record)


if __name__ == "__main__":
    main()
