"""Settings of an engine, and the sizes that follow from them: the context, the pool's pages, the buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specjax.cache import PoolShape
from specjax.drafters.base import Drafter
from specjax.drafters.deferred import Deferred, defer
from specjax.engine.buckets import Buckets
from specjax.engine.scheduler import Policy
from specjax.limits import check, limited
from specjax.models.target import Target


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of an engine.

    Raises:
        TypeError: a value has another type. ValueError: it is out of range. Both name the field.
    """

    max_running_requests: int = limited(48, 1)  # R
    max_batch: int | None = limited(None, 1)  # of one step's program; more requests take several; None: R
    page_size: int = limited(16, 1)  # S
    max_total_tokens: int | None = limited(None, 1)  # of the pool; None: fits the device
    context_length: int | None = limited(None, 1)  # None: the model's
    chunked_prefill_size: int | None = limited(None, 1)  # None: 512 on a CPU, 2048 on a GPU
    max_prefill_tokens: int | None = limited(None, 1)  # of all prompts in a forward; None: 512, on a GPU 2048
    schedule_policy: Policy = "fcfs"  # or lpm: first those whose prompt is in the prefix cache; see `Scheduler`
    prefix_cache: bool = True  # keep the pages of earlier texts, and use them for requests that start alike
    retract_every: int | None = limited(None, 1)  # for tests: retract the youngest request after so many steps
    mem_fraction: float = limited(0.85, above=0, maximum=1)  # of a GPU's memory, for weights and KV pool
    overlap: bool = True  # dispatch a step before the last one is read
    adaptive: bool = False  # draft only where it is measured to be faster; see `specjax.engine.adaptive`
    trace: bool = False  # keep each step's tree, in `Completion.trees`
    time_phases: bool = False  # measure drafting, verifying and committing; slower, since each is waited for
    isolate_ngrams: bool = False  # no request drafts from what another has said, unless both have one `cache_salt`
    plain_content: bool = False  # text that reads as a special token is one only where the chat template wrote it
    autotune_seconds: float = limited(60.0, 0)  # for measuring at a GPU's first start; 0: nothing measured is used
    tensor_parallel: int = limited(1, 1)  # devices over which the model is split; see `specjax.sharding`
    expert_parallel: int = limited(1, 1)  # groups of these, over which the experts of a mixture are spread
    first_device: int = limited(0, 0)  # of `tensor_parallel` ones: its number among this process's devices
    random_seed: int | None = None  # from which requests without a seed draw theirs; None: from the system

    def __post_init__(self) -> None:
        check(self)
        if self.tensor_parallel % self.expert_parallel:
            divisors = [n for n in range(1, self.tensor_parallel + 1) if self.tensor_parallel % n == 0]
            raise ValueError(
                f"EngineConfig.expert_parallel {self.expert_parallel} must divide EngineConfig.tensor_parallel "
                f"{self.tensor_parallel}, over whose devices experts are spread: {', '.join(map(str, divisors))}"
            )
        if self.time_phases and (self.tensor_parallel > 1 or self.first_device):
            raise ValueError(
                "EngineConfig.time_phases works on JAX's first device alone, not with tensor_parallel "
                f"{self.tensor_parallel} and first_device {self.first_device}"
            )

    @property
    def largest_batch(self) -> int:
        return min(self.max_running_requests, self.max_batch or self.max_running_requests)

    def deferred(self, drafter: Drafter, target: Target) -> Deferred | None:
        """The forms of a drafter that the engine chooses between; None: each step drafts as its batch bucket says. It
        is so, too, where each step is to be seen or timed in parts."""
        chooses = self.adaptive and drafter.width > 1 and not (self.trace or self.time_phases)
        return defer(drafter, target) if chooses else None


def check_config(config: object) -> None:
    """Raises TypeError for what is no `EngineConfig`, such as a dict of its fields."""
    if not isinstance(config, EngineConfig):
        hint = "; write EngineConfig(**config)" if isinstance(config, dict) else ""
        raise TypeError(f"config must be an EngineConfig, got {type(config).__name__}{hint}")


def context_length(target: Target, config: EngineConfig) -> int:
    """Tokens that a request may have. Raises ValueError if the model has fewer positions."""
    length, most = config.context_length or target.config.max_positions, target.config.max_positions
    if length > most:
        raise ValueError(f"EngineConfig.context_length {length} exceeds the model's {most} positions")
    return length


class Layout(NamedTuple):
    """What is compiled for."""

    pool: PoolShape
    buckets: Buckets

    @classmethod
    def of(
        cls, config: EngineConfig, context_length: int, tokens: int, platform: str, drafter: Drafter,
        *, adaptive: bool = False, ragged: bool = False,
    ) -> Layout:  # fmt: skip
        """For a pool of `tokens` tokens, rounded down to pages; it has at least one. Rest: see `Buckets.build`."""
        size = config.page_size
        pool = PoolShape(max(tokens // size, 1), size)
        request_pages = min(-(-context_length // size), pool.pages)
        rows, chunk = config.largest_batch, config.chunked_prefill_size
        sizes = {"request_pages": request_pages, "chunk": chunk, "prefill": config.max_prefill_tokens}
        # `attention` splits the heads of a block over devices, and not the rows that a ragged one has only there.
        sizes |= {"adaptive": adaptive, "ragged": ragged and config.tensor_parallel == 1}
        return cls(pool, Buckets.build(platform, drafter, rows=rows, **sizes))
