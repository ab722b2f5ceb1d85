"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.limits import check, limited


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
