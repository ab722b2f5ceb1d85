"""`--dry-run`: computes a model's memory on a device, a bound of its speed, and settings that would fit.

Reads configs and tensor headers only. The engine's own functions compute the memory; temporaries are estimated. A step
without drafts takes at least the time to read its bytes.

In reading order: `outline` describes a model, `make_plan` computes, `changes` tries single settings that fit, `best`
several together.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import ceil, log2, prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from specjax_kernels.platforms import before_ampere

from specjax import checkpoint
from specjax.cache import PoolShape, row_states
from specjax.cli import build, flags
from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.drafters import Auto, DraftOptions, NoDraft, Params, Speculation, StandaloneParams, make_speculation
from specjax.drafters.options import ModelOptions
from specjax.engine.config import EngineConfig
from specjax.engine.memory import Devices, Held, MemoryPlan, held_by, plan_memory
from specjax.engine.plan import BATCHES, LARGE_CHUNK, SMALL_CHUNK, speculation_table
from specjax.gpu import DEVICES, Device, Memory, given_share, share_of, this_memory
from specjax.load import choose, head_quantization, model_quantization, naming, requested
from specjax.models import make_target
from specjax.models.declared import Declared, declared
from specjax.models.draft_head import with_vocabulary
from specjax.models.params import LAYER_EMBEDDINGS, Bits, Leaf, leaves_of, read_leaves
from specjax.models.target import Target
from specjax.parallel.sharding import check_experts, fitted, held_bytes, page_bytes, row_bytes
from specjax.settings import Parser, command_line, dashed
from specjax.state import init_state

CONTEXT = 1024  # maximum number of cached tokens of each request, in the bound of the speed
HIGH_FRACTION = 0.9  # largest proposed share of a GPU's memory for weights and pool
POWERS = (1, 2, 4, 8, 16, 32, 64)  # proposed numbers of devices
GOAL_CONTEXT, MIN_CONTEXT = 32_768, 2_048
"""Tokens of a request that a command aims at, and that it must allow, if the model and the settings do."""

QUANTISED = {"auto": 0.0, "int8": 4.0, "int4": 6.0}
WITHOUT_DRAFT, WITHOUT_SNAPSHOTS, LONGER, SMALLER, FRACTION = 6.0, 2.0, 2.0, 0.25, 0.1
"""Costs of proposed settings. Half as many requests cost 1, half as long a text `LONGER`. Half as large a chunk and
half as many snapshots cost `SMALLER` each: prompts take longer. Quantised weights change the text."""


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


def dry_run(
    settings: flags.Settings, device: str | None, *, as_json: bool = False, config_file: str | None = None
) -> int:  # fmt: skip
    """Prints the plan; returns 0 if the model fits, 1 if not, 2 for a wrong setting. `device`: see `DEVICES`.
    `config_file`: the settings' file, for the proposed command."""
    if device is not None:
        jax.config.update("jax_platforms", "cpu")  # leaves this machine's GPU free
    try:
        arguments = build.engine_arguments(settings)
        if device is None:
            build.claim_gpu(settings)
        platform = "gpu" if device or jax.default_backend() != "cpu" else "cpu"
        names = ("model", "revision", "quantization", "draft", "dtype")
        with flags.named_as_flags(settings):
            bounds = DEVICES[device] if device else this_device()
            given = {name: arguments[name] for name in names}
            given |= {"platform": platform, "before_ampere": bounds.before_ampere}
            model = outline(**given)
            checkpoint.check_tokenizer_paths(arguments["tokenizer_path"], arguments["chat_template"])
            replicas = settings.server.data_parallel_size
            case = Case(model, arguments["config"], bounds, platform, replicas, partial(outline, **given))
            plan = {"model": settings.model.model, **make_plan(case)}
            plan["changes"] = [shlex.join(_flags(change)) for change in changes(case)] if plan["problems"] else []
            found = best(case) if plan["problems"] or plan["pool_tokens"] < _needed(case) else None
            start = ["specjax", "serve", *(["--config", config_file] if config_file else [])]
            plan["command"] = found and {
                "line": shlex.join([*start, *_flags(found.options, settings)]),
                "devices": found.config.tensor_parallel,
                "requests": found.config.max_running_requests,
                "pool_tokens": found.tokens,
            }
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
    revision: str | None = None, platform: str | None = None, before_ampere: bool | None = None,
) -> Outline:  # fmt: skip
    """Describes target and drafter for a platform ("cpu", "gpu"; None: this process's), as `load` would load them."""
    platform = platform or jax.default_backend()
    described = partial(checkpoint.model_config, dtype=dtype, platform=platform, before_ampere=before_ampere)
    options, plugin = requested(model, draft)
    files = checkpoint.resolve(model, revision=revision, progress=True, outline=True)
    config = described(files.config)
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
            drafts = described(others.config)
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


def _head(options: ModelOptions, config: ModelConfig) -> HeadConfig | MtpConfig:
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
    describe: Callable[..., Outline] | None = None  # `outline` with other arguments; None: no other is tried

    @property
    def limit(self) -> int:
        """Bytes of a device that may be used. Replicas on CPU devices share one memory."""
        if self.platform == "cpu":
            return int(self.device.memory * self.config.mem_fraction) // self.replicas
        return int(self.device.memory * (given_share() or share_of(self.config.mem_fraction, self.device.memory)))


class Planned(NamedTuple):
    memory: MemoryPlan
    held: Held
    parts: tuple[Part, ...]
    target: Target
    problems: list[ValueError]


def planned(case: Case) -> Planned:
    """Plans the memory. Raises ValueError if the context exceeds the model's positions."""
    model, config, n = case.outline, case.config, case.config.tensor_parallel
    parts, problem = _split(model, n, config.expert_parallel)
    held = _held(case, parts)
    memory = Memory(case.device.memory, case.limit, 0, case.device.before_ampere)
    served = cast(ModelConfig, parts[0].declared.config)
    target = model.target if served == model.target.config else make_target(served)
    plan = plan_memory(config, target, model.speculation, Devices(case.platform, n, memory), held)
    problems = [error for error in (problem, plan.problem) if error is not None]
    tokens, context = prod(plan.pool), plan.context_length
    if not problems and config.context_length and tokens < context:
        problems.append(ValueError(f"the KV pool holds {tokens} tokens, and --context-length is {context}"))
    return Planned(plan, held, parts, target, problems)


def make_plan(case: Case) -> dict[str, Any]:
    """Makes the document of `--json`. Raises ValueError if the context exceeds the model's positions."""
    config, n, groups = case.config, case.config.tensor_parallel, case.config.expert_parallel
    plan, held, parts, target, errors = planned(case)
    problems, drafter = [str(flags.with_flag(error)) for error in errors], case.outline.speculation.drafter
    served, tokens, context, buckets = target.config, prod(plan.pool), plan.context_length, plan.buckets
    in_windows = [served.window(i) is not None for i in range(served.num_layers)]
    window_pages = [spec for spec, has_window in zip(target.pages, in_windows, strict=True) if has_window]
    own_rows = [leaf for leaf in leaves_of(parts[0].declared.table) if leaf.name == LAYER_EMBEDDINGS]
    cached = min(CONTEXT, context, tokens)
    read = {
        batch: _read_bytes(parts[0], n, groups, batch)
        for batch in buckets.batches
        if not problems and batch * cached <= tokens
    }
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
        "speculation": speculation_table(case.outline.speculation, buckets),
        "reads": {
            "weights": held.weights, "draft_weights": held.draft_weights, "forward": _read_bytes(parts[0], n, groups),
            "context": cached,
        },
        "experts": {batch: round(experts_read(served, batch) * served.experts.count, 1) for batch in read}
        if served.experts
        else {},
        "speeds": {
            batch: batch * case.device.bandwidth / (size + batch * cached * held.token) for batch, size in read.items()
        },
    }  # fmt: skip


@lru_cache(256)
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
    one, a_row = _held_by_one(model, config.page_size)
    weights, *drafts = _weights(model, n, config.expert_parallel)
    pages, *draft_pages = (page_bytes(part.declared.pages, n) for part in parts)
    others = sum(draft_pages) - sum(page_bytes(part.declared.pages) for part in model.parts[1:])
    state = row_bytes(model.target.pages)
    return Held(
        weights=weights,
        draft_weights=sum(drafts) if drafts else one.draft_weights,  # of a user-defined drafter
        token=pages,
        draft_token=one.draft_token + others,
        rows=one.rows + (rows - 1) * (a_row - state) + (rows + snapshots) * row_bytes(model.target.pages, n) - state,
    )


@lru_cache(256)
def _weights(model: Outline, devices: int, groups: int) -> list[int]:
    """Bytes of each part's weights on each device."""
    return [part.bytes(leaves_of(part.declared.table), devices, groups) for part in _split(model, devices, groups)[0]]


@lru_cache(16)
def _held_by_one(model: Outline, page_size: int) -> tuple[Held, int]:
    """What one device holds with one request, and the bytes of another request's row."""

    def state(rows: int, pool: PoolShape) -> Any:
        arguments = model.params, model.target, model.speculation.drafter
        return jax.eval_shape(lambda: init_state(*arguments, rows=rows, pool=pool))

    def held(rows: int) -> Held:
        return held_by(model.params, partial(state, rows), page_size)

    one = held(1)
    return one, held(2).rows - one.rows


def _read_bytes(target: Part, devices: int, groups: int, tokens: int = 1) -> int:
    """Computes the bytes of parameters that a forward of some tokens reads on each device."""
    chosen = experts_read(cast(ModelConfig, target.declared.config), tokens)

    def read(leaf: Leaf) -> int:
        stacked = leaf.dims[0] == "X" and len(leaf.dims) > 1
        return int(target.bytes([leaf], devices, groups) * (chosen if stacked else 1.0))

    return sum(map(read, read_leaves(target.declared.table)))


def experts_read(config: ModelConfig, tokens: int) -> float:
    """Returns the expected share of a layer's experts that some tokens choose, if they choose evenly: each token leaves
    out an expert with probability 1 - K/E. The formula is that of MoESD (arXiv 2505.19645). Uneven choices read less.
    """
    experts = config.experts
    return 1 - (1 - experts.per_token / experts.count) ** tokens if experts else 1.0


# Settings that fit.

Options = dict[str, Any]  # options of the library -> values


class Proposal(NamedTuple):
    cost: float
    options: Options
    config: EngineConfig
    tokens: int  # of the pool


def _flags(options: Options, settings: flags.Settings | None = None) -> list[str]:
    """The flags of options, together with those of settings."""
    names = flags.OPTIONS | {"quantization": "quantization", "assume_device": "assume_device"}
    changed = {names[name]: value for name, value in options.items()}
    if "draft" in options:  # the draft's options have no use
        changed = dict.fromkeys(vars(flags.SpeculativeSettings())) | changed
    return command_line(settings or flags.Settings(), **changed)


def _reductions(case: Case) -> dict[str, list[tuple[float, Options]]]:
    """Settings of the engine that need less memory: cost and values, cheapest first."""
    config, platform = case.config, case.platform
    requests, largest = config.max_running_requests, LARGE_CHUNK[platform]
    chunk = min(config.chunked_prefill_size or largest, config.max_prefill_tokens or largest, largest)
    rows = config.snapshot_rows if row_states(case.outline.target.pages) else 0
    chunks = (c for c in (1024, 512, 256, 128, 64) if SMALL_CHUNK[platform] <= c < chunk)
    return {
        "max_running_requests": [
            (log2(requests / n), {"max_running_requests": n}) for n in reversed(BATCHES[platform]) if n < requests
        ],
        "chunked_prefill_size": [
            (SMALLER * log2(chunk / c), {"chunked_prefill_size": c, "max_prefill_tokens": c}) for c in chunks
        ],
        "state_snapshots": [
            *((SMALLER * log2(rows / n), {"state_snapshots": n}) for n in (8, 4, 2) if n < rows),
            *([(SMALLER * log2(rows) + WITHOUT_SNAPSHOTS, {"state_snapshots": 0})] if rows else []),
        ],
        "mem_fraction": [(FRACTION, {"mem_fraction": HIGH_FRACTION})] * (config.mem_fraction < HIGH_FRACTION),
    }


def _variants(case: Case) -> Iterator[tuple[float, Options, Outline]]:
    """The model as it is and with smaller weights, cheapest first."""
    size, describe = sum(_weights(case.outline, 1, 1)), case.describe
    yield 0.0, {}, case.outline
    if describe is None:
        return
    for kind, cost in QUANTISED.items():
        with suppress(ValueError):  # not for these weights
            model = describe(quantization=kind)
            if (smaller := sum(_weights(model, 1, 1))) < size:
                size = smaller
                yield cost, {"quantization": kind}, model


def _without_draft(model: Outline) -> Outline:
    none = make_speculation(NoDraft())
    return replace(model, speculation=none, params=Params(model.params.target, None), parts=model.parts[:1])


def _goal(case: Case) -> int:
    """Tokens that the pool should hold: a text of the context that is set, else of at most `GOAL_CONTEXT` tokens."""
    config, most = case.config, case.outline.target.config.max_positions
    return min(config.context_length or GOAL_CONTEXT, most, config.max_total_tokens or most)


def _needed(case: Case) -> int:
    """Tokens that the pool must hold to be of use."""
    return min(_goal(case), MIN_CONTEXT)


def _fill(case: Case) -> tuple[float, Options, int] | None:
    """Fits the pool, and a context that is set, to the memory: cost, options and the pool's tokens. None: it cannot."""
    config, asked, goal = case.config, case.config.max_total_tokens, _goal(case)
    plan, held, *_ = planned(case._replace(config=replace(config, max_total_tokens=None)))
    pool = prod(plan.pool)
    if case.platform == "cpu":  # whose pool has a fixed size
        excess = max(plan.total - case.limit, 0)
        pool -= ceil(excess / (held.token + held.draft_token) / config.page_size) * config.page_size
    tokens, options = min(pool, asked or pool), Options()
    if tokens < _needed(case):
        return None
    if tokens < (asked or prod(plan.pool)):
        options["max_total_tokens"] = tokens
    if config.context_length and tokens < config.context_length:
        options["context_length"] = tokens
    return LONGER * log2(goal / min(tokens, goal)), options, tokens


def _counts(case: Case, counts: Iterable[int]) -> Iterator[int]:
    """The numbers of devices that can split the model."""
    groups = case.config.expert_parallel
    return (n for n in counts if n % groups == 0 and _split(case.outline, n, groups)[1] is None)


def best(case: Case) -> Proposal | None:
    """Searches for settings that fit together and cost least (see `QUANTISED`), on as few more devices as possible."""
    asked, groups = case.config.tensor_parallel, case.config.expert_parallel
    splits = _split(case.outline, asked, groups)[1] is None
    # Fewer devices hold less, and are tried only if so many cannot split the model.
    counts = [asked] if splits else [*_counts(case, range(asked - groups, 0, -groups))]
    counts += _counts(case, (n for n in POWERS if n > asked))
    variants = [*_variants(case)]
    if case.outline.speculation.drafter.width > 1:
        without = {"draft": NoDraft.algorithm}
        variants += [(cost + WITHOUT_DRAFT, o | without, _without_draft(model)) for cost, o, model in variants]
    for n in counts:
        found, split = None, case._replace(config=replace(case.config, tensor_parallel=n))
        for cost, options, model in variants:
            more = options | ({"tensor_parallel": n} if n != asked else {})
            found = _search(split._replace(outline=model), cost, more, found)
        if found is not None:
            return found
    return None


def _search(case: Case, cost: float, options: Options, found: Proposal | None) -> Proposal | None:
    """Searches for settings of the engine, together with options that are in the case already. Returns `found` if
    nothing costs less."""
    reductions = [[(0.0, Options()), *choices] for choices in _reductions(case).values()]

    def reduced(engine: Options) -> Case:
        return case._replace(config=replace(case.config, **engine))

    def together(chosen: Iterable[tuple[float, Options]]) -> Options:
        return {name: value for _, one in chosen for name, value in one.items()}

    smallest = reduced(together(choices[-1] for choices in reductions))
    weights = sum(_weights(case.outline, case.config.tensor_parallel, case.config.expert_parallel))
    if weights > smallest.limit or (most := _fill(smallest)) is None:
        return found
    cost += most[0]  # no settings leave room for a longer text
    for chosen in sorted(product(*reductions), key=lambda chosen: sum(price for price, _ in chosen)):
        price, engine = cost + sum(price for price, _ in chosen), together(chosen)
        if found is not None and price >= found.cost:
            break
        if (filled := _fill(reduced(engine))) is not None:
            context, sizes, tokens = filled
            total = price + context - most[0]
            if found is None or total < found.cost:
                found = Proposal(total, options | engine | sizes, reduced(engine | sizes).config, tokens)
    return found


def changes(case: Case) -> Iterator[Options]:
    """Yields changes of single settings that make the model fit."""
    config = case.config
    room = prod(planned(case._replace(config=replace(config, max_total_tokens=None, context_length=None))).memory.pool)

    def engine(choices: Iterable[Options]) -> Iterator[tuple[Options, Case]]:
        return ((options, case._replace(config=replace(config, **options))) for options in choices)

    counts = _counts(case, (n for n in POWERS if n > config.tensor_parallel))
    devices = sorted(DEVICES.values(), key=lambda device: device.memory) if case.device.name in DEVICES else []
    none: list[tuple[Options, Case]] = []
    if case.outline.speculation.drafter.width > 1:
        none.append((Options(draft=NoDraft.algorithm), case._replace(outline=_without_draft(case.outline))))
    candidates: list[Any] = [  # of iterables of options and the changed case
        *(
            engine([{name: room}] if getattr(config, name) and room else [])
            for name in ("max_total_tokens", "context_length")
        ),
        ((options, case._replace(outline=model)) for _, options, model in _variants(case) if options),
        *(engine(options for _, options in choices) for choices in _reductions(case).values()),
        engine({"tensor_parallel": n} for n in counts),
        ((Options(assume_device=device.name), case._replace(device=device)) for device in devices),
        none,
    ]
    for choices in candidates:
        fitting = (options for options, changed in choices if not planned(changed).problems)
        yield from ([options] if (options := next(fitting, None)) is not None else [])


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
    ]
    if plan["fits"]:
        cached, experts = plan["reads"]["context"], plan["experts"]
        lines.append(f"at most, without drafts, with {cached} tokens of context (the memory's bandwidth)")
        for batch, rate in plan["speeds"].items():
            read = f"  reading {experts[batch]:g} experts of a layer, if chosen evenly" if experts else ""
            lines.append(f"{batch:8} requests {rate:12,.1f} tokens/s{read}")
        lines.append("")
    lines += [*(f"why: {problem}" for problem in plan["problems"]), *(f"change: {text}" for text in plan["changes"])]
    if (command := plan["command"]) is not None:
        several = f"{command['devices']} devices, " * (command["devices"] > plan["devices"])
        held = f"requests: {command['requests']}, tokens in the pool: {command['pool_tokens']}"
        lines += ["", f"fits best ({several}{held}):", command["line"], ""]
    elif not (plan["fits"] or plan["changes"]):
        lines.append("change: a smaller model; no settings and no listed device are enough")
    return "\n".join([*lines, f"fits: {left:.2f} GB are left" if plan["fits"] else "does not fit"])
