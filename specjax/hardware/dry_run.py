"""`--dry-run`: computes a model's memory on a device, a bound of its speed, and settings that would fit.

Reads configs and tensor headers only. The engine's own functions compute the memory; temporaries are estimated. A step
without drafts takes at least the time to read its bytes.

In reading order: `outline` describes a model, `make_plan` computes, `changes` tries settings that fit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from specjax_kernels.platforms import before_ampere

from specjax import checkpoint
from specjax.cache import PoolShape, row_states
from specjax.cli import build, flags
from specjax.config import HeadConfig, ModelConfig
from specjax.drafters import Auto, DraftOptions, NoDraft, Params, Speculation, StandaloneParams, make_speculation
from specjax.drafters.options import ModelOptions
from specjax.engine.config import EngineConfig
from specjax.engine.memory import Devices, Held, held_by, plan_memory
from specjax.engine.plan import BATCHES, speculation_table
from specjax.gpu import DEVICES, Device, Memory, given_share, share_of, this_memory
from specjax.load import choose, head_quantization, model_quantization, naming, requested
from specjax.models import make_target
from specjax.models.declared import Declared, declared
from specjax.models.draft_head import with_vocabulary
from specjax.models.params import LAYER_EMBEDDINGS, Bits, Leaf, leaves_of, read_leaves
from specjax.models.target import Target
from specjax.parallel.sharding import check_experts, fitted, held_bytes, page_bytes, row_bytes
from specjax.settings import Parser, dashed
from specjax.state import init_state

CONTEXT = 1024  # cached tokens of each request, in the bound of the speed
HIGH_FRACTION = 0.9  # largest proposed share of a GPU's memory for weights and pool
MAX_DEVICES = 64  # largest proposed --tensor-parallel-size


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a dry run, which have no keys in a configuration file."""
    group = parser.add_argument_group(
        "dry run", "Reads configs and tensor headers; status 1 if the model does not fit."
    )
    group.add_argument("--dry-run", action="store_true", help="print memory, buckets and a bound of the speed, and end")
    group.add_argument("--json", action="store_true", help="print the plan as one line of JSON, and no report")
    text = f"compute for one of {', '.join(DEVICES)}; default: this machine's device"
    group.add_argument("--assume-device", type=str.upper, choices=tuple(DEVICES), metavar="NAME", help=text)


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Exits if --dry-run is missing beside its flags."""
    for name in ("json", "assume_device"):
        if getattr(args, name) and not args.dry_run:
            parser.error(f"--{dashed(name)} needs --dry-run")


def this_device() -> Device:
    """This process's device. Its bandwidth is measured, by copies of 256 MB; its speed is not."""
    memory = this_memory()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if memory is None else memory.total
    for file in map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if memory is None and file.is_file() and (text := file.read_text().strip()).isdecimal():
            total = min(total, int(text))  # of a control group
    array, seconds = jnp.zeros(2**26, jnp.float32), []
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(6):
        start = time.perf_counter()
        array = jax.block_until_ready(copy(array))
        seconds.append(time.perf_counter() - start)
    kind, bandwidth = jax.local_devices()[0].device_kind, 2 * array.nbytes / min(seconds)
    return Device(kind, total, bandwidth, 0.0, 0.0, "measured: a copy of 256 MB", before_ampere())


def dry_run(settings: flags.Settings, device: str | None, *, as_json: bool = False) -> int:
    """Prints the plan; returns 0 if the model fits, 1 if not, 2 for a wrong setting. `device`: see `DEVICES`."""
    if device is not None:
        jax.config.update("jax_platforms", "cpu")  # leaves this machine's GPU free
    try:
        arguments = build.engine_arguments(settings)
        if device is None:
            build.claim_gpu(settings)
        platform = "gpu" if device or jax.default_backend() != "cpu" else "cpu"
        names = ("model", "revision", "quantization", "draft", "dtype")
        with flags.named_as_flags(settings):
            model = outline(**{name: arguments[name] for name in names}, platform=platform)
            checkpoint.check_tokenizer_paths(arguments["tokenizer_path"], arguments["chat_template"])
            bounds = DEVICES[device] if device else this_device()
            case = Case(model, arguments["config"], bounds, platform, settings.server.data_parallel_size)
            plan = {"model": settings.model.model, **make_plan(case)}
            plan["changes"] = [*changes(case)] if plan["problems"] else []
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"specjax serve: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan) if as_json else report(plan))
    return 0 if plan["fits"] else 1


class Part(NamedTuple):
    """Declared weights of the target, or of the draft head or model."""

    declared: Declared
    bits: Bits | None  # sizes of quantised weights
    name: str  # in messages

    def bytes(self, leaves: Iterable[Leaf], devices: int, groups: int) -> int:
        config, sizes = self.declared.config, self.declared.sizes
        return held_bytes(leaves, sizes, config.dtype, devices, self.bits, groups)

    def on(self, devices: int, groups: int, vocab_size: int) -> Part:
        """Describes the part as loading fits it to devices. Raises ParameterError if they cannot split it."""
        config = fitted(self.declared.config, devices, self.name, groups)
        same = config == self.declared.config
        return self if same else self._replace(declared=declared(config, vocab_size))


@dataclass(frozen=True, eq=False)  # hashed by identity
class Outline:
    target: Target
    params: Params  # `jax.ShapeDtypeStruct` leaves, or the parameters of a user-defined drafter
    speculation: Speculation
    parts: tuple[Part, ...]  # target, and draft head or model if any


def outline(
    model: str, *, draft: DraftOptions | str = Auto.algorithm, dtype: str = "auto", quantization: str = "auto",
    revision: str | None = None, platform: str | None = None,
) -> Outline:  # fmt: skip
    """Describes target and drafter for a platform ("cpu", "gpu"; None: this process's), as `load` would load them."""
    platform = platform or jax.default_backend()
    options, plugin = requested(model, draft)
    files = checkpoint.resolve(model, revision=revision, progress=True, outline=True)
    config = checkpoint.model_config(files.config, dtype=dtype, platform=platform)
    quantization = checkpoint.effective_quantization(files.name, files.config, config, quantization)
    chosen = choose(options, files, config, platform)
    target = make_target(config)

    def part(config: Any, kind: str, hf_config: dict[str, Any], tied: bool) -> None:
        half = platform == "cpu" and config.dtype == "float32"
        bits = checkpoint.bits_per_weight(hf_config, kind, keeps_half=half)
        # Loading does not quantise an embedding that is only read by rows.
        bits = bits and bits._replace(embed=kind == "auto" or tied)
        name = "the draft" if parts else "the model"
        parts.append(Part(declared(config, target.config.vocab_size), bits, name))

    parts = list[Part]()
    part(config, quantization, {**files.config}, config.tied_embeddings)
    kind, head, small = "none", None, None
    options = cast(ModelOptions, chosen.options)
    if options.needs is not None and options.kind is None:
        with naming(options, "path"):
            others = checkpoint.resolve(str(options.path), revision=options.revision, progress=True, outline=True)
            drafts = checkpoint.model_config(others.config, dtype=dtype, platform=platform)
            kind, small = model_quantization(options, others, drafts, platform), make_target(drafts)
        part(drafts, kind, {**others.config}, drafts.tied_embeddings)
    elif options.needs is not None:
        head = chosen.mtp or _head(options, config)
        kind, inside = head_quantization(chosen, files, config, quantization, platform), chosen.mtp is not None
        stored = {**files.config} if inside else {}
        if inside and checkpoint.mtp_method(files, config) is None:
            stored.pop("quantization_config", None)
        part(head, kind, stored, inside and config.tied_embeddings)
    weights, *draft_weights = (part.declared.params() for part in parts)
    if plugin is None:
        speculation = chosen.speculation(target, head, model=small, platform=platform, quantization=kind)
        params: Any = draft_weights[0] if draft_weights else None
        params = params if small is None else StandaloneParams(params)
    else:
        speculation = make_speculation(plugin, target=target)
        params = speculation.params
    return Outline(target, Params(weights, params), speculation, tuple(parts))


def _head(options: ModelOptions, config: ModelConfig) -> HeadConfig:
    with naming(options, "path"):
        named: Any = {"kind": str(options.kind), "revision": options.revision}
        named |= {key: getattr(options, key) for key in options.head_options}
        head = checkpoint.describe_head(str(options.path), config, **named, progress=True)
    if (token_map := getattr(options, "token_map", None)) is None:
        return head
    if str(token_map).isdecimal():  # the first tokens of the map that comes with specjax
        return with_vocabulary(head, int(token_map))
    with naming(options, "token_map"):
        return with_vocabulary(head, len(checkpoint.read_token_map(str(token_map), vocab_size=config.vocab_size)))


class Case(NamedTuple):
    outline: Outline
    config: EngineConfig
    device: Device
    platform: str  # "cpu" or "gpu"
    replicas: int = 1  # engines of one process, each on separate devices

    @property
    def limit(self) -> int:
        """Bytes of a device that may be used. Replicas on CPU devices share one memory."""
        if self.platform == "cpu":
            return int(self.device.memory * self.config.mem_fraction) // self.replicas
        return int(self.device.memory * (given_share() or share_of(self.config.mem_fraction, self.device.memory)))


def make_plan(case: Case) -> dict[str, Any]:
    """Makes the document of `--json`. Raises ValueError if the context exceeds the model's positions."""
    model, config, n, groups = case.outline, case.config, case.config.tensor_parallel, case.config.expert_parallel
    parts, problem = _split(model, n, groups)
    held, forward = _held(case, parts), _read_bytes(parts[0], n, groups)
    memory = Memory(case.device.memory, case.limit, 0, case.device.before_ampere)
    served, drafter = cast(ModelConfig, parts[0].declared.config), model.speculation.drafter
    target = model.target if served == model.target.config else make_target(served)
    plan = plan_memory(config, target, model.speculation, Devices(case.platform, n, memory), held)
    problems = [str(flags.with_flag(error)) for error in (problem, plan.problem) if error is not None]
    tokens, context, buckets = prod(plan.pool), plan.context_length, plan.buckets
    in_windows = [served.window(i) is not None for i in range(served.num_layers)]
    window_pages = [spec for spec, has_window in zip(target.pages, in_windows, strict=True) if has_window]
    own_rows = [leaf for leaf in leaves_of(parts[0].declared.table) if leaf.name == LAYER_EMBEDDINGS]
    if not problems and config.context_length and tokens < context:
        problems.append(f"the KV pool holds {tokens} tokens, and --context-length is {context}")
    return {
        "dtype": target.config.dtype,
        "device": case.device._asdict(),
        "devices": n,
        "replicas": case.replicas,
        "fits": not problems,
        "problems": problems,
        "memory": plan.always | {"temporaries": plan.temporaries, "total": plan.total, "limit": case.limit},
        "terms": [term._asdict() for term in plan.terms],
        "token_bytes": held.token,
        "window_token_bytes": page_bytes(window_pages, n),
        "largest_window": max(filter(None, served.windows), default=None),
        "layer_embeddings": parts[0].bytes(own_rows, n, groups),
        "draft_token_bytes": held.draft_token,
        "pool_tokens": tokens,
        "page_size": config.page_size,
        "context_length": context,
        "buckets": {"batches": buckets.batches, "chunks": buckets.chunks, "tables": buckets.tables},
        "drafter": {"name": drafter.name, "nodes": drafter.width, "levels": drafter.depth},
        "speculation": speculation_table(model.speculation, buckets),
        "reads": {"weights": held.weights, "draft_weights": held.draft_weights, "forward": forward},
        "speeds": {
            batch: batch * case.device.bandwidth / (forward + batch * min(CONTEXT, context) * held.token)
            for batch in buckets.batches
        },
    }


@lru_cache(16)
def _split(model: Outline, devices: int, groups: int) -> tuple[tuple[Part, ...], ValueError | None]:
    """Returns the parts as loading fits them to devices, or unchanged and the reason why that is impossible."""
    target = model.target.config
    try:
        check_experts(target, groups)
        return tuple(part.on(devices, groups, target.vocab_size) for part in model.parts), None
    except ValueError as error:
        return model.parts, error


def _held(case: Case, parts: tuple[Part, ...]) -> Held:
    """Computes the bytes on each device: those of one device, less what the others hold of pages and rows."""
    model, config, n = case.outline, case.config, case.config.tensor_parallel
    rows, snapshots = config.max_running_requests, config.snapshot_rows if row_states(model.target.pages) else 0
    one = _held_by_one(model, config.page_size, rows, snapshots)
    weights, *drafts = (part.bytes(leaves_of(part.declared.table), n, config.expert_parallel) for part in parts)
    pages, *draft_pages = (page_bytes(part.declared.pages, n) for part in parts)
    others = sum(draft_pages) - sum(page_bytes(part.declared.pages) for part in model.parts[1:])
    row = row_bytes(model.target.pages, n) - row_bytes(model.target.pages)
    return Held(
        weights=weights,
        draft_weights=sum(drafts) if drafts else one.draft_weights,  # of a user-defined drafter
        token=pages,
        draft_token=one.draft_token + others,
        rows=one.rows + (rows + snapshots) * row,
    )


@lru_cache(16)
def _held_by_one(model: Outline, page_size: int, rows: int, snapshots: int) -> Held:
    def state(pool: PoolShape) -> Any:
        arguments = model.params, model.target, model.speculation.drafter
        return jax.eval_shape(lambda: init_state(*arguments, rows=rows, pool=pool, snapshots=snapshots))

    return held_by(model.params, state, page_size)


def _read_bytes(target: Part, devices: int, groups: int) -> int:
    """Computes the bytes of parameters that a forward of one token reads on each device."""
    experts = getattr(target.declared.config, "experts", None)
    chosen = experts.per_token / experts.count if experts else 1.0

    def read(leaf: Leaf) -> int:
        stacked = leaf.dims[0] == "X" and len(leaf.dims) > 1
        return int(target.bytes([leaf], devices, groups) * (chosen if stacked else 1.0))

    return sum(map(read, read_leaves(target.declared.table)))


def changes(case: Case) -> Iterator[str]:
    """Yields changes of single flags that make the model fit."""
    config, model, groups = case.config, case.outline, case.config.expert_parallel
    room = make_plan(case._replace(config=replace(config, max_total_tokens=None, context_length=None)))["pool_tokens"]

    def settings(field: str, values: Iterable[Any]) -> Iterator[tuple[object, Case]]:
        return ((value, case._replace(config=replace(config, **{field: value}))) for value in values)

    batches = [size for size in reversed(BATCHES[case.platform]) if size < config.max_running_requests]
    devices = sorted(DEVICES.values(), key=lambda device: device.memory) if case.device.name in DEVICES else []
    none = make_speculation(NoDraft())
    plain = replace(model, speculation=none, params=Params(model.params.target, None), parts=model.parts[:1])
    candidates: dict[str, Iterable[tuple[object, Case]]] = {
        "--max-total-tokens": settings("max_total_tokens", [room] if config.max_total_tokens and room else []),
        "--context-length": settings("context_length", [room] if config.context_length and room else []),
        "--max-running-requests": settings("max_running_requests", batches),
        "--mem-fraction-static": settings("mem_fraction", [HIGH_FRACTION] * (config.mem_fraction < HIGH_FRACTION)),
        "--tensor-parallel-size": settings(
            "tensor_parallel", range(config.tensor_parallel + groups, MAX_DEVICES + 1, groups)
        ),
        "--assume-device": ((device.name, case._replace(device=device)) for device in devices),
        "--speculative-algorithm": [("NONE", case._replace(outline=plain))] * (model.speculation.drafter.width > 1),
    }
    for flag, cases in candidates.items():
        for value, changed in cases:
            splits = _split(changed.outline, changed.config.tensor_parallel, changed.config.expert_parallel)[1] is None
            if splits and make_plan(changed)["fits"]:
                yield f"{flag} {value}"
                break


def report(plan: dict[str, Any]) -> str:
    """Formats the plan; the last line is the verdict."""
    device, memory = plan["device"], plan["memory"]
    left = (memory["limit"] - memory["total"]) / 1e9
    token, in_windows, rows = plan["token_bytes"], plan["window_token_bytes"], plan["layer_embeddings"]
    windows = (
        f"{in_windows / token:.0%} in layers that see at most {plan['largest_window']} tokens, all of which are kept"
    )
    lines = [
        f"model     {plan['model']}, {plan['dtype']}, {plan['context_length']} tokens of context",
        *(f"{name:9} {text}" for name, text in plan["speculation"].items()),
        f"devices   {plan['devices']} for each of {plan['replicas']} replicas; figures are for one device",
        f"device    {device['name']}, {device['memory'] / 1e9:.0f} GB, {device['bandwidth'] / 1e9:,.0f} GB/s, "
        f"{device['note']}",
        "",
        *(f"{term['name']:15}{term['bytes'] / 1e9:9.3f} GB  {term['when']}" for term in plan["terms"] if term["bytes"]),
        *(f"{name:15}{memory[name] / 1e9:9.3f} GB" for name in ("temporaries", "total", "limit")),
        f"pool of {plan['pool_tokens']} tokens in pages of {plan['page_size']}",
        f"token     {token} bytes in pages" + (f", {windows}" if in_windows else ""),
        *(
            [f"weights   {rows / 1e9:.3f} GB are the layers' own embeddings, of which a token reads a row"]
            if rows
            else []
        ),
        *(f"{name:9} {', '.join(map(str, sizes))}" for name, sizes in plan["buckets"].items()),
        "",
        f"at most, without drafts, with {CONTEXT} tokens of context (the memory's bandwidth)",
        *(f"{batch:8} requests {rate:12,.1f} tokens/s" for batch, rate in plan["speeds"].items()),
        "",
        *(f"why: {problem}" for problem in plan["problems"]),
        *(f"change: {change}" for change in plan["changes"]),
    ]
    if not (plan["fits"] or plan["changes"]):
        lines.append("change: a smaller model; no single flag and no listed device is enough")
    return "\n".join([*lines, f"fits: {left:.2f} GB are left" if plan["fits"] else "does not fit"])
