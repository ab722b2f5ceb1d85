"""The batch size of text generation: how many sequences of a known length fit this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from specjax import checkpoint
from specjax.cache import bytes_per_token, init_cache
from specjax.cli.flags import Settings
from specjax.config import ModelConfig
from specjax.engine.memory import STEP_COPIES
from specjax.models import make_target, table
from specjax.models.params import dimensions, parameter_bytes

LARGEST = {"cpu": 64, "gpu": 256}
"""Largest batch, whatever the memory. From 64 rows on a CPU's forward costs in proportion to its rows."""

CPU_FRACTION = 0.5
"""Share of the host's free memory that a run takes; other programs share the machine."""


def batch_for(settings: Settings, tokens: int, lines: int, *, progress: bool = True) -> Settings:
    """Fill in batch, pool and context for sequences of `tokens` tokens, where the settings leave them open.

    The pool holds all rows at full length, so that no request is ever retracted.

    Raises:
        CheckpointError: there is no such model.
        ValueError: its context is shorter than `tokens`.
    """
    engine = settings.engine
    files = checkpoint.resolve(settings.model.model, revision=settings.model.revision, progress=progress)
    config = checkpoint.model_config(files.config, dtype=settings.model.dtype)
    context = engine.context_length or config.max_positions
    if tokens > context:
        raise ValueError(
            f"--max-prompt-tokens and --max-new-tokens come to {tokens} tokens, and the context is {context}"
        )
    context = engine.context_length or tokens
    row = -(-tokens // engine.page_size) * engine.page_size
    rows = engine.max_running_requests
    if rows is None:
        free = free_bytes(engine.mem_fraction_static) - parameter_bytes(table(config), dimensions(config), config.dtype)
        rows = rows_that_fit(config, row, free)
        if engine.max_total_tokens is not None:
            rows = min(rows, engine.max_total_tokens // row)
        rows = max(min(rows, lines), 1)
    pool = engine.max_total_tokens or rows * row
    return replace(
        settings,
        engine=replace(engine, max_running_requests=rows, max_total_tokens=pool, context_length=context),
    )


def rows_that_fit(config: ModelConfig, tokens: int, free: int) -> int:
    """Sequences of `tokens` tokens, with cache and a step's logits, that fit `free` bytes; may be 0."""
    kept = bytes_per_token(partial(init_cache, make_target(config).pages))
    each = tokens * kept + int(STEP_COPIES * 4 * config.vocab_size)
    return max(min(free // each, LARGEST["cpu" if jax.default_backend() == "cpu" else "gpu"]), 0)


def free_bytes(mem_fraction: float) -> int:
    """Bytes of the device that a run may take."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if jax.default_backend() != "cpu" and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * mem_fraction) - stats.get("bytes_in_use", 0)
    free = available_memory()
    if free is None:  # the installed memory, then
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(free * CPU_FRACTION)


def available_memory() -> int | None:
    """Free bytes of the host's memory; None where the system does not report them (only Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
