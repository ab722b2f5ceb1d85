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
    random_seed: int | None = None  # from which requests without a seed draw theirs; None: from the system

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "page_size", "max_total_tokens", "context_length", "chunked_prefill_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"--mem-fraction-static must be above 0 and at most 1, got {self.mem_fraction}")
