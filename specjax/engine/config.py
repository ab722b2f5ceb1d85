"""What is fixed when an engine is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    max_running_requests: int = 48  # R
    page_size: int = 16  # S
    max_total_tokens: int | None = None  # of the pool; None: fits the device
    context_length: int | None = None  # None: the model's
    chunked_prefill_size: int | None = None  # None: 512 on a CPU, 2048 on a GPU
    mem_fraction: float = 0.85  # of a GPU's memory, for weights and pool
    overlap: bool = True  # dispatch a step before the last one is read
    trace: bool = False  # keep each step's tree, in `Completion.trees`
    time_phases: bool = False  # measure drafting, verifying and committing; slower, since each is waited for
    isolate_ngrams: bool = False  # no request drafts from what another has said, unless both have one `cache_salt`
    plain_content: bool = False  # text that reads as a special token is one only where the chat template wrote it
    random_seed: int | None = None  # from which requests without a seed draw theirs; None: from the system

    def __post_init__(self) -> None:
        for name in ("overlap", "trace", "time_phases", "isolate_ngrams", "plain_content"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        if isinstance(self.mem_fraction, bool) or not isinstance(self.mem_fraction, int | float):
            raise TypeError(f"mem_fraction must be a number, got {self.mem_fraction!r:.60}")
        seed = self.random_seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"random_seed must be an integer or None, got {seed!r:.60}")
        for name in ("max_running_requests", "page_size", "max_total_tokens", "context_length", "chunked_prefill_size"):
            value = getattr(self, name)
            optional = getattr(EngineConfig, name) is None
            if not (value is None and optional) and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer{' or None' * optional}, got {value!r:.60}")
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"--mem-fraction-static must be above 0 and at most 1, got {self.mem_fraction}")


def check_config(config: object) -> None:
    """Raises TypeError for what is no `EngineConfig`, such as a dict of its fields."""
    if not isinstance(config, EngineConfig):
        hint = "; write EngineConfig(**config)" if isinstance(config, dict) else ""
        raise TypeError(f"config must be an EngineConfig, got {type(config).__name__}{hint}")
