"""`specjax train --dry-run`: estimates memory and hours of a training run from config.json.

The functions of the run are traced without arrays. A step keeps the residuals of `jax.vjp`; XLA needs fewer of them
and adds temporaries: tiny EAGLE-3 steps on a CPU took 0.7 to 0.8 times this estimate. Products are counted in the
trace.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from specjax import checkpoint
from specjax.cache import bytes_per_token, init_cache
from specjax.config import BlockConfig, HeadConfig, ModelConfig
from specjax.gpu import DEVICES, SHARE_VARIABLES, XLA_SHARE, Device, given_share, named
from specjax.models.declared import declared
from specjax.models.draft_head import init_head_params
from specjax.models.head_spec import ALGORITHMS
from specjax.train.data import Rows
from specjax.train.features import teach, training_target
from specjax.train.head import HeadDraft, TargetSource, split_params
from specjax.train.losses import BLOCKS, with_dtype
from specjax.train.options import TrainOptions
from specjax.train.run import make_optimizer, read_config, schedule

PEAK_SHARE = 0.4  # of a device's peak rate, assumed; no head for a target of 8B parameters has been timed
WALK = ("walk", "rank", "conv_taps", "conv_groups")  # fields of a block head


def dry_run(options: TrainOptions, device: str | None) -> dict[str, Any]:
    """Prints the plan of a run on one device and returns it. Raises ValueError or OSError for a wrong setting."""
    if device is not None:
        jax.config.update("jax_platforms", "cpu")  # leaves this machine's GPU free
    plan = make_plan(options, DEVICES[device] if device else named(jax.local_devices()[0].device_kind))
    print(report(plan))
    return plan


def make_plan(options: TrainOptions, device: Device | None) -> dict[str, Any]:
    """The document that the command prints as JSON. `device`: None if the table of GPUs lacks it."""
    files, config = read_config(options.model, platform="gpu" if device else None, outline=True)
    draft, run = draft_of(options, TargetSource(files, None, config, ())), options.run
    rows, products = trace(options, config, draft)
    rows["measuring"] = measuring_bytes(options, config, draft.config), "KV pool, and the head as served"
    total = sum(size for size, _ in rows.values())
    plan: dict[str, Any] = {
        "model": options.model.model, "draft": options.draft.draft, "device": device and device.name, "total": total,
        "memory": [{"name": name, "bytes": size, "note": note} for name, (size, note) in rows.items()],
        "tokens": run.steps * run.accumulate * run.batch_size * options.data.row_length,
        "products": run.steps * run.accumulate * products,
    }  # fmt: skip
    if device is not None:
        limit = int(device.memory * (given_share() or XLA_SHARE))
        hours = plan["products"] / (device.speed(run.compute_dtype) * PEAK_SHARE) / 3600
        plan |= {"limit": limit, "missing": max(total - limit, 0), "hours": round(hours, 2)}
    return plan


def draft_of(options: TrainOptions, source: TargetSource) -> HeadDraft:
    """The head without weights. The id of a mask token does not change any size."""
    settings, blocks = options.draft, options.draft.draft in BLOCKS
    block = replace(options.block, mask_token=options.block.mask_token or 0) if blocks else options.block
    draft = HeadDraft(replace(options, draft=replace(settings, init_from=None), block=block), source)
    if (name := settings.init_from) is not None:
        kind, new = BlockConfig.kind if blocks else ALGORITHMS[settings.draft].kind, draft.config
        draft.config = cast(HeadConfig, checkpoint.describe_head(name, source.config, kind=kind))
        if isinstance(new, BlockConfig):  # training adds a walk to a head without one
            draft.config = replace(draft.config, **{field: getattr(new, field) for field in WALK})
    return draft


def trace(options: TrainOptions, config: ModelConfig, draft: HeadDraft) -> tuple[dict[str, tuple[int, str]], float]:
    """Bytes and notes of a step, and the products of a forward and backward pass, on one device."""
    run, dtype, target = options.run, options.run.compute_dtype, training_target(config, options.run.compute_dtype)
    served, key = declared(config, config.vocab_size).params(), jax.eval_shape(jax.random.key, run.train_seed)
    params = jax.eval_shape(partial(with_dtype, dtype=dtype), served)
    weights, frozen = jax.eval_shape(lambda key: split_params(init_head_params(draft.config, target, key)), key)
    optimizer = make_optimizer(options.optimizer, schedule(options.optimizer, run.steps))
    ids, is_learnt = (jax.ShapeDtypeStruct((run.batch_size, options.data.row_length), x) for x in (jnp.int32, bool))
    batch, run_target = Rows(*[ids] * len(Rows._fields))._replace(loss=is_learnt), teach(target, draft.config.features)

    def backward(weights: Any, frozen: Any, params: Any, batch: Rows, key: Any) -> Any:
        loss = draft.loss(target, frozen, teach=run_target)
        total, pull, _ = jax.vjp(lambda w: loss(w, params, batch, None, key), weights, has_aux=True)
        return pull, pull(jnp.ones_like(total))

    with jax.numpy_dtype_promotion("standard"):
        moments = jax.eval_shape(optimizer.init, weights)
        traced, (pull, _) = jax.make_jaxpr(backward, return_shape=True)(weights, frozen, params, batch, key)
    residuals = traced.jaxpr.outvars[: len(jax.tree.leaves(pull))]
    kept = {var for var in residuals if not isinstance(var, Literal)} - {*traced.jaxpr.invars}
    features = tree_bytes(jax.eval_shape(run_target, params, batch))
    rows = {
        "target weights": (tree_bytes(params), dtype),
        "serving weights": (tree_bytes(served) if config.dtype != dtype else 0, config.dtype),
        "head weights": (tree_bytes(weights), "float32"),
        "gradients": (tree_bytes(weights) * min(run.accumulate, 2), "float32; with --accumulate also their sum"),
        "optimizer state": (tree_bytes(moments), "Adam, float32"),
        "features": (features * (run.accumulate if run.features == "disk" else 1), "the target's outputs"),
        "activations": (tree_bytes([var.aval for var in kept]), "the head's rounds or blocks, logits included"),
    }
    return rows, count_products(traced.jaxpr)


def measuring_bytes(options: TrainOptions, config: ModelConfig, head: HeadConfig) -> int:
    """At most, with prompts as long as a row. See `specjax.train.run.Measure`."""
    chosen, prompts = options.measure, min(16, options.measure.measure_prompts)
    tokens = options.data.row_length + chosen.measure_tokens + 64 + 4 * (chosen.measure_steps + 1)
    parts = declared(config, config.vocab_size), declared(replace(head, dtype=config.dtype), config.vocab_size)
    pages = sum(bytes_per_token(partial(init_cache, part.pages)) for part in parts)
    return prompts * tokens * pages + (tree_bytes(parts[1].params()) if prompts else 0)


def count_products(jaxpr: Any) -> float:
    """Operations of matrix products. A loop of unknown length counts once, a condition as its largest branch."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * prod(equation.outvars[0].aval.shape) * summed
        parts = [getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(equation.params)]
        if inner := [count_products(part) for part in parts if hasattr(part, "eqns")]:
            total += (max if equation.primitive.name == "cond" else sum)(inner) * equation.params.get("length", 1)
    return total


def tree_bytes(tree: Any) -> int:
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def report(plan: dict[str, Any]) -> str:
    """Formats the plan; the last line is the verdict."""
    rows = [*plan["memory"], {"name": "total", "bytes": plan["total"], "note": ""}]
    lines = [f"{row['name']:16}{row['bytes'] / 1e9:9.3f} GB  {row['note']}".rstrip() for row in rows if row["bytes"]]
    lines = [f"estimates for {plan['draft']} and {plan['model']} on one device", "", *lines]
    if plan["device"] is None:
        return "\n".join([*lines, f"--assume-device with one of {', '.join(DEVICES)} adds hours and a verdict"])
    share = f"JAX's share of the {plan['device']}'s memory; {SHARE_VARIABLES[0]} sets another"
    work = f"{plan['tokens'] / 1e6:,.1f} million tokens at {PEAK_SHARE:.0%} of the peak rate, without measurements"
    left = (plan["limit"] - plan["total"]) / 1e9
    lines += [f"{'limit':16}{plan['limit'] / 1e9:9.3f} GB  {share}", "", f"{plan['hours']:,.1f} hours: {work}"]
    advice = f"does not fit: {-left:.1f} GB too much; give a smaller --batch-size with --accumulate, or --row-length"
    return "\n".join([*lines, f"fits: {left:.1f} GB are left" if left >= 0 else advice])
