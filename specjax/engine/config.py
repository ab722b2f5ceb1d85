"""Settings of an engine, and the number of tokens that its KV pool holds."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from specjax.cache import bytes_per_token
from specjax.drafters.base import Drafter, Params
from specjax.engine.buckets import BLOCK_TOKENS
from specjax.limits import check, limited
from specjax.models.target import Target
from specjax.state import init_state

DEFAULT_POOL_TOKENS = 32_768  # on a CPU, where memory is shared with everything else
STEP_COPIES = 2.5  # float32 arrays of [nodes, vocabulary] that a step holds at once: 2.1 to 2.3 in XLA's analysis


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of an engine.

    Raises:
        TypeError: a value has another type. ValueError: it is out of range. Both name the field.
    """

    max_running_requests: int = limited(48, 1)  # R
    page_size: int = limited(16, 1)  # S
    max_total_tokens: int | None = limited(None, 1)  # of the pool; None: fits the device
    context_length: int | None = limited(None, 1)  # None: the model's
    chunked_prefill_size: int | None = limited(None, 1)  # None: 512 on a CPU, 2048 on a GPU
    mem_fraction: float = limited(0.85, above=0, maximum=1)  # of a GPU's memory, for weights and pool
    overlap: bool = True  # dispatch a step before the last one is read
    trace: bool = False  # keep each step's tree, in `Completion.trees`
    time_phases: bool = False  # measure drafting, verifying and committing; slower, since each is waited for
    isolate_ngrams: bool = False  # no request drafts from what another has said, unless both have one `cache_salt`
    plain_content: bool = False  # text that reads as a special token is one only where the chat template wrote it
    random_seed: int | None = None  # from which requests without a seed draw theirs; None: from the system

    def __post_init__(self) -> None:
        check(self)


def check_config(config: object) -> None:
    """Raises TypeError for what is no `EngineConfig`, such as a dict of its fields."""
    if not isinstance(config, EngineConfig):
        hint = "; write EngineConfig(**config)" if isinstance(config, dict) else ""
        raise TypeError(f"config must be an EngineConfig, got {type(config).__name__}{hint}")


def pool_tokens(
    target: Target, config: EngineConfig, context_length: int, platform: str, drafter: Drafter, params: Params
) -> int:
    """Tokens that the pool should hold: `max_total_tokens`, else as many as all rows can use or as fit. Raises
    ValueError if they, or the temporaries of explicitly wide trees, do not fit the device."""
    given, rows = config.max_total_tokens, config.max_running_requests
    wanted = rows * context_length
    stats = jax.local_devices()[0].memory_stats() or {}
    if platform == "cpu" or "bytes_limit" not in stats:
        return given or min(wanted, DEFAULT_POOL_TOKENS)
    # Temporaries of trees beyond what `mem_fraction` leaves room for; `BLOCK_TOKENS` limits automatic widths.
    nodes = max(rows * drafter.width - BLOCK_TOKENS["gpu"], 0) if drafter.explicit_width else 0
    trees = int(STEP_COPIES * nodes * target.config.vocab_size * 4)
    limit, used = stats["bytes_limit"], stats.get("bytes_in_use", 0)
    fewer = f"EngineConfig.max_running_requests ({rows}) or draft.nodes ({drafter.width})"
    each = bytes_per_token(lambda pool: init_state(params, target, drafter, rows=1, pool=pool), config.page_size)
    if given is not None:
        if given * each + trees > limit - used:
            raise ValueError(
                f"EngineConfig.max_total_tokens {given} takes {given * each / 1e9:.2f} GB and a full batch's trees "
                f"{trees / 1e9:.2f} GB, but {(limit - used) / 1e9:.2f} GB are free; give fewer tokens, {fewer}"
            )
        return given
    free = int(limit * config.mem_fraction) - used - trees
    if free < each * config.page_size:
        raise ValueError(
            f"no memory is left for the KV pool: {used / 1e9:.2f} of {limit / 1e9:.2f} GB are taken, and "
            f"EngineConfig.mem_fraction {config.mem_fraction:g} of it is for weights and pool; give a higher fraction, "
            f"or fewer {fewer}"
        )
    return min(wanted, free // each)
