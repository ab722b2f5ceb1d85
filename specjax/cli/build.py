"""What the flags describe, made: the GPU, the engine and its arguments, the group of processes, the draft's options.

Errors and warnings name flags, or the file and the key that set a value.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from specjax import gpu
from specjax.cli.flags import OPTIONS, Settings, SpeculativeSettings, named_as_flags
from specjax.drafters import DRAFTERS, Auto, DraftOptions, NoDraft
from specjax.engine import Engine, EngineConfig
from specjax.fleet.hosts import Address, Follower, Group, Leader, Place
from specjax.settings import dashed, overrides, place_of
from specjax.thresholds import AcceptAbove

logger = logging.getLogger(__name__)


def claim_gpu(chosen: Settings) -> None:
    """Prepares JAX, before its backend starts, for the GPU that the settings name; without one, nothing happens.

    Raises:
        GpuError: there is no such GPU, or JAX cannot use it.
    """
    engine = chosen.engine
    try:
        count = engine.tensor_parallel_size * chosen.server.data_parallel_size // chosen.server.nnodes
        card = gpu.claim(engine.mem_fraction_static, engine.base_gpu_id, count)
    except gpu.GpuError as error:
        sizes = {"tensor_parallel_size": engine.tensor_parallel_size}
        sizes["data_parallel_size"] = chosen.server.data_parallel_size
        named = [f"{place_of(chosen, name)} {size}" for name, size in sizes.items() if size > 1]
        places = ", ".join([place_of(chosen, "base_gpu_id")] * (engine.base_gpu_id > 0) + named)
        raise gpu.GpuError(f"{places}: {error}" if places else str(error)) from None
    if card is not None:
        logger.info("GPU %d: %s", engine.base_gpu_id, card)


def make_engine(
    chosen: Settings, *, group: Group | None = None, progress: bool = True, **config: bool | int | float
) -> Engine:  # fmt: skip
    """The engine that the settings describe. `config`: fields of its `EngineConfig`, in place of theirs; `group`: as in
    `Engine.from_pretrained`. Raises a ValueError as that does, but the message names flags."""
    with named_as_flags(chosen):
        return Engine.from_pretrained(**engine_arguments(chosen, **config), group=group, progress=progress)


def make_group(chosen: Settings) -> Leader | Follower | None:
    """This process's part of those that share the model; None: it has the model alone. Raises ValueError, which names
    flags, also where the leader cannot listen."""
    server, devices = chosen.server, chosen.engine.tensor_parallel_size
    address, count, rank = server.dist_init_addr, server.nnodes, server.node_rank

    def place(name: str) -> str:
        return place_of(server, name)

    if count == 1:
        if address is not None or rank:
            given = "dist_init_addr" if address is not None else "node_rank"
            raise ValueError(f"{place(given)} {address or rank} is for several processes: give --nnodes, from 2 on")
        return None
    if address is None:
        raise ValueError(f"{place('nnodes')} {count} needs --dist-init-addr HOST:PORT, the same for all processes")
    if rank >= count:
        raise ValueError(f"{place('node_rank')} {rank} must be from 0 to {count - 1}, with --nnodes {count}")
    if server.data_parallel_size > 1:
        raise ValueError(
            f"{place('data_parallel_size')} {server.data_parallel_size} makes replicas within one process: with "
            f"{place('nnodes')} {count} it must be 1"
        )
    if devices % count:
        raise ValueError(
            f"{place_of(chosen.engine, 'tensor_parallel_size')} {devices} must be the number of devices of all "
            f"{count} processes together (--nnodes {count}), each of which has as many"
        )
    try:
        own = Place(Address.parse(address), count, rank)
    except ValueError as error:
        raise ValueError(f"{place('dist_init_addr')} {error}") from None
    try:
        return (Follower if rank else Leader)(own, _shared(chosen))
    except OSError as error:
        raise ValueError(
            f"{place('dist_init_addr')} {address}: the leader cannot listen at {own.address.next}: "
            f"{error.strerror or error}"
        ) from None


_OWN = {
    "model", "revision", "tokenizer_path", "chat_template", "max_total_tokens", "mem_fraction_static", "base_gpu_id",
    "sampling_defaults", "random_seed", "speculative_draft_model_path",
    "speculative_draft_model_revision", "speculative_token_map",
}  # fmt: skip
"""Settings that each process of a group may have otherwise. Files may lie elsewhere; what is in them is compared when
they are read (`specjax.fleet.agreement`)."""


def _shared(chosen: Settings) -> dict[str, str]:
    """The settings that all processes of a group must have, by their flags."""
    words = {None: "not set", True: "on", False: "off"}
    return {
        f"--{dashed(each.name)}": words[value] if value is None or isinstance(value, bool) else str(value)
        for table in (chosen.model, chosen.engine, chosen.speculative)
        for each in fields(table)
        if each.name not in _OWN and not each.metadata["setting"].instead
        for value in (getattr(table, each.name),)
    }


def engine_arguments(chosen: Settings, **config: bool | int | float) -> dict[str, Any]:
    """`Engine.from_pretrained`'s keyword arguments, the model included. `config`: as `make_engine`. Raises a ValueError
    that names the flag if a value is out of range."""
    engine = chosen.engine
    values = vars(engine) | vars(chosen.speculative)
    known = EngineConfig.__dataclass_fields__
    for each in (*fields(engine), *fields(chosen.speculative)):
        if (instead := each.metadata["setting"].instead) and values[each.name] != each.default:
            logger.warning("%s has no effect: %s", place_of(chosen, each.name), instead)
    given = {option: values[setting] for option, setting in OPTIONS.items() if option in known}
    given["max_running_requests"] = engine.max_running_requests or EngineConfig.max_running_requests
    if given["adaptive"] is None:
        tree = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        given["adaptive"] = all(values[name] is None for name in tree)
    with named_as_flags(chosen):
        return {
            **vars(chosen.model),
            "sampling_defaults": engine.sampling_defaults,
            "draft": draft_options(chosen),
            "verify": lossy_verifier(chosen),
            "backend": engine.attention_backend,
            "config": EngineConfig(
                **{
                    **given,
                    "overlap": not engine.disable_overlap_schedule,
                    "prefix_cache": not engine.disable_radix_cache,
                    **config,
                }
            ),
        }


def lossy_verifier(chosen: Settings) -> AcceptAbove | None:
    """The verifier of thresholds below 1, of which a warning tells; None: drafts are verified without loss. Raises
    ValueError for such thresholds without --allow-lossy-speculation."""
    speculative = chosen.speculative
    names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    values = {name: getattr(speculative, name) for name in names}
    found = AcceptAbove(*values.values())
    if not found.lossy:
        return None
    below = " and ".join(f"{place_of(chosen, name)} {value:g}" for name, value in values.items() if value < 1)
    if not speculative.allow_lossy_speculation:
        raise ValueError(f"{below} would change the text: leave it at 1, or give --allow-lossy-speculation as well")
    logger.warning(
        "LOSSY SPECULATION: with %s the text of requests that sample is not the model's own, and the same seed may "
        "give another one. Greedy requests, and those with draft_limit: 0, are as without it",
        below,
    )
    return found


def draft_options(chosen: Settings) -> DraftOptions | str:
    """The options of the algorithm, made of the flags that are its own, or ``module:function``. A warning names other
    flags that were given; an algorithm on the command line overrides a file's options that it does not have. Raises
    ValueError if a value is out of range, or if an algorithm without a draft model or head is given one.
    """
    speculative = chosen.speculative
    name = speculative.speculative_algorithm
    plugin = ":" in name
    options = NoDraft if plugin else Auto if name == Auto.algorithm else DRAFTERS[name]
    given, unused, overridden = {}, [], []
    for each in fields(speculative):
        value, option = getattr(speculative, each.name), each.metadata["setting"].sets
        if value == each.default or option in ("", "draft", "isolate_ngrams", "adaptive"):
            continue
        if option in options.names():
            given[option] = value
        elif overrides(chosen, "speculative_algorithm", each.name):
            overridden.append(dashed(each.name))
        elif option in ("path", "quantization"):
            heads = " or ".join(key for key, other in DRAFTERS.items() if other.needs)
            raise ValueError(f"draft.{option} {value} is no use to {name}: --speculative-algorithm {heads}")
        else:
            unused.append(f"--{dashed(each.name)}")
    if unused:
        logger.warning("no effect with --speculative-algorithm %s: %s", name, ", ".join(unused))
    if overridden:
        logger.info("--speculative-algorithm %s overrides the file's %s", name, ", ".join(overridden))
    return name if plugin else options(**given)


def speculative_settings(draft: DraftOptions) -> dict[str, Any]:
    """The settings that mean these options, by flag without the leading dashes: what `draft_options` reads back. Those
    with their default values are left out."""
    found: dict[str, Any] = {"speculative-algorithm": draft.algorithm}
    for each in fields(SpeculativeSettings):
        option = each.metadata["setting"].sets
        if option in draft.names() and (value := getattr(draft, option)) != each.default:
            found[dashed(each.name)] = value
    return found
