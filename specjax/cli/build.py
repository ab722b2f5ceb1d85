"""Turns settings into engines, replicas and drafter options.

Errors and warnings name flags, or the file and the key that set a value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax

from specjax import gpu
from specjax.acceptance import AcceptAbove, SyntheticAcceptance
from specjax.cli.flags import OPTIONS, Settings, SpeculativeSettings, named_as_flags
from specjax.drafters import DRAFTERS, Auto, DraftOptions, NoDraft
from specjax.engine import Engine, EngineConfig
from specjax.limits import ParameterError
from specjax.parallel.sharding import missing_devices
from specjax.settings import dashed, overrides, place_of

logger = logging.getLogger(__name__)


def claim_gpu(chosen: Settings, join: Callable[[], None] = lambda: None) -> None:
    """Prepares JAX for the GPUs of the settings, connects this process to others (`join`), and starts JAX's backend.
    Raises GpuError, which names flags, if JAX does not use these GPUs."""
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
    join()
    if gpu.plugin() is not None and (problem := gpu.problem(card)) is not None:
        raise gpu.GpuError(problem)
    if card is not None:
        logger.info("GPU %d: %s", engine.base_gpu_id, card)


def make_engine(
    chosen: Settings, *, kind: type[Engine] = Engine, progress: bool = True, **config: bool | int | float
) -> Engine:
    """Makes the engine of the settings. `config` overrides fields of `EngineConfig`; errors name flags."""
    with named_as_flags(chosen):
        return kind.from_pretrained(**engine_arguments(chosen, **config), progress=progress)


def check_devices(chosen: Settings) -> None:
    """Raises ValueError if JAX has too few devices for the replicas."""
    split, replicas = chosen.engine.tensor_parallel_size, chosen.server.data_parallel_size
    if replicas == 1:
        return  # counting devices starts the backend, which several hosts must join first
    fitting = jax.local_device_count() // split
    advice = f"; at most {fitting} replicas fit" if fitting else ""
    if problem := missing_devices(split * replicas, advice):
        tensor_parallel = f" with {place_of(chosen.engine, 'tensor_parallel_size')} {split}" if split > 1 else ""
        raise ValueError(f"{place_of(chosen.server, 'data_parallel_size')} {replicas}{tensor_parallel} {problem}")


def make_engines(chosen: Settings, *, progress: bool = True, **config: Any) -> list[Engine]:
    """Makes the engines of all replicas, in order of their devices; see `make_engine`, `check_devices`."""
    check_devices(chosen)
    split = chosen.engine.tensor_parallel_size
    firsts = range(0, split * chosen.server.data_parallel_size, split)
    return [make_engine(chosen, progress=progress, first_device=first, **config) for first in firsts]


def engine_arguments(chosen: Settings, **config: bool | int | float) -> dict[str, Any]:
    """Keyword arguments of `Engine.from_pretrained`, including the model. `config`: see `make_engine`. Raises
    ValueError for values out of range."""
    engine = chosen.engine
    values = vars(engine) | vars(chosen.speculative)
    for field in (*fields(engine), *fields(chosen.speculative)):
        if (instead := field.metadata["setting"].instead) and values[field.name] != field.default:
            logger.warning("%s has no effect: %s", place_of(chosen, field.name), instead)
    names = EngineConfig.__dataclass_fields__
    options = {option: values[setting] for option, setting in OPTIONS.items() if option in names}
    options["max_running_requests"] = engine.max_running_requests or EngineConfig.max_running_requests
    options["overlap"] = not engine.disable_overlap_schedule
    options["prefix_cache"] = not engine.disable_radix_cache
    with named_as_flags(chosen):
        return {
            **vars(chosen.model),
            "sampling_defaults": engine.sampling_defaults,
            "draft": draft_options(chosen),
            "verify": synthetic_verifier(chosen) or lossy_verifier(chosen),
            "backend": engine.attention_backend,
            "config": EngineConfig(**{**options, **config}),
        }


def synthetic_verifier(chosen: Settings) -> SyntheticAcceptance | None:
    """The verifier of --speculative-synthetic-acceptance, with a warning; None without the flag. Raises ValueError for
    wrong rates, and together with accept thresholds."""
    texts = chosen.speculative.speculative_synthetic_acceptance
    if not texts:
        return None
    place = place_of(chosen, "speculative_synthetic_acceptance")
    try:
        verifier = SyntheticAcceptance(tuple(map(float, texts)))
    except ParameterError as error:
        raise error.renamed({"rates": place}) from None
    except ValueError:
        raise ValueError(f"{place} must be numbers, got {' '.join(texts)!r:.60}") from None
    speculative = chosen.speculative
    if min(speculative.speculative_accept_threshold_single, speculative.speculative_accept_threshold_acc) < 1:
        raise ValueError(f"{place} replaces verification, so accept thresholds below 1 have no effect: leave them out")
    logger.warning(
        "SYNTHETIC ACCEPTANCE: drafts are accepted at the rates %s, whatever the model would write. The text is not "
        "the model's; use it to measure speed only", " ".join(texts),
    )  # fmt: skip
    return verifier


def lossy_verifier(chosen: Settings) -> AcceptAbove | None:
    """The verifier for accept thresholds below 1, with a warning; None: verification is lossless. Raises ValueError
    for a threshold below 1 without --allow-lossy-speculation."""
    names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    values = {name: getattr(chosen.speculative, name) for name in names}
    verifier = AcceptAbove(*values.values())
    if not verifier.lossy:
        return None
    below = " and ".join(f"{place_of(chosen, name)} {value:g}" for name, value in values.items() if value < 1)
    if not chosen.speculative.allow_lossy_speculation:
        raise ValueError(f"{below} would change the text: leave it at 1, or give --allow-lossy-speculation as well")
    logger.warning(
        "LOSSY SPECULATION: with %s the text of requests that sample is not the model's own, and depends on the "
        "drafts. Every step drafts. Greedy requests and requests with draft_limit: 0 do not change",
        below,
    )
    return verifier


def draft_options(chosen: Settings) -> DraftOptions | str:
    """The algorithm's options from its flags, or ``module:function``. A warning names flags without effect.

    An algorithm on the command line overrides a file's options of other algorithms. Raises ValueError if a value is out
    of range, or the algorithm has no draft model.
    """
    speculative = chosen.speculative
    name = speculative.speculative_algorithm
    plugin = ":" in name
    options = NoDraft if plugin else Auto if name == Auto.algorithm else DRAFTERS[name]
    values, unused, overridden = {}, [], []
    for field in fields(speculative):
        value, option = getattr(speculative, field.name), field.metadata["setting"].sets
        if value == field.default or option in ("", "draft", "isolate_ngrams", "adaptive"):
            continue
        if option in options.names():
            values[option] = value
        elif overrides(chosen, "speculative_algorithm", field.name):
            overridden.append(dashed(field.name))
        elif option in ("path", "quantization"):
            heads = " or ".join(key for key, other in DRAFTERS.items() if other.needs)
            place = place_of(chosen, field.name)
            raise ValueError(f"{place} {value} is no use to {name}: --speculative-algorithm {heads}")
        else:
            unused.append(f"--{dashed(field.name)}")
    if unused:
        logger.warning("no effect with --speculative-algorithm %s: %s", name, ", ".join(unused))
    if overridden:
        logger.info("--speculative-algorithm %s overrides the file's %s", name, ", ".join(overridden))
    return name if plugin else options(**values)


def speculative_settings(draft: DraftOptions) -> dict[str, Any]:
    """The keys of a file that gives these options, without defaults. Inverse of `draft_options`."""
    settings: dict[str, Any] = {"speculative-algorithm": draft.algorithm}
    for field in fields(SpeculativeSettings):
        option = field.metadata["setting"].sets
        if option in draft.names() and (value := getattr(draft, option)) != field.default:
            settings[dashed(field.name)] = value
    return settings
