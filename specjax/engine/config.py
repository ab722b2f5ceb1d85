"""Settings of an engine, and the sizes that follow from them: the context, the pool's pages, the buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specjax.cache import PoolShape
from specjax.drafters.base import Drafter
from specjax.engine.buckets import Buckets
from specjax.engine.scheduler import Policy
from specjax.limits import check, limited
from specjax.models.target import Target


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of an engine.

    Attributes:
        max_running_requests: most requests that run at once (R), at least 1.
        max_batch: largest batch that is compiled, at least 1; more requests are decoded in several batches; default
            and maximum: `max_running_requests`.
        page_size: tokens in a page of the KV pool (S), at least 1.
        max_total_tokens: tokens in the KV pool, at least 1; default: fits the device.
        context_length: most tokens of prompt and output together, at least 1; default and maximum: the model's.
        chunked_prefill_size: most tokens of one prompt in a forward, at least 1; default and maximum: 256 on a CPU,
            2048 on a GPU.
        max_prefill_tokens: most tokens of all prompts in a forward, at least 1; default and maximum: 512 on a CPU (256
            if the model can leave out padding), 2048 on a GPU.
        schedule_policy: which waiting request runs next: fcfs = the oldest; lpm = the one with the longest prefix in
            the cache.
        prefix_cache: keep the pages of earlier texts, and use them for requests that begin alike.
        retract_every: for tests: retract the youngest request after so many steps, at least 1; None: only when pages
            run out.
        mem_fraction: share of a GPU's memory for weights and KV pool, above 0 and at most 1; JAX reserves a tenth
            more for the rest, unless the environment sets its share.
        overlap: dispatch each step before the result of the last one is read.
        adaptive: draft only where it is measured to be faster; see `specjax.engine.draft_policy`.
        trace: keep each step's tree, in `Completion.trees`.
        time_phases: measure drafting, verifying and committing; slower, since the host waits for each phase.
        isolate_ngrams: share n-grams only between requests with the same `cache_salt`, since the timing of drafts can
            reveal other requests' text.
        plain_content: users' text never becomes special tokens; only the chat template's markup does. A prompt given
            as text is users' text; a prompt given as ids may hold special tokens.
        tensor_parallel: devices over which weights and KV pool are split, at least 1; see `specjax.parallel.sharding`.
        expert_parallel: groups of these devices, at least 1, over which the experts of a mixture are spread; must
            divide `tensor_parallel`. Each group has experts of its own, and its devices share the width of each.
        first_device: index of the first of these devices in the process, at least 0.
        random_seed: seed of requests that have none; default: a different one in each run.

    Raises:
        TypeError: a value has another type. ValueError: it is out of range. Both name the field.
    """

    max_running_requests: int = limited(48, 1)
    max_batch: int | None = limited(None, 1)
    page_size: int = limited(16, 1)
    max_total_tokens: int | None = limited(None, 1)
    context_length: int | None = limited(None, 1)
    chunked_prefill_size: int | None = limited(None, 1)
    max_prefill_tokens: int | None = limited(None, 1)
    schedule_policy: Policy = "fcfs"
    prefix_cache: bool = True
    retract_every: int | None = limited(None, 1)
    mem_fraction: float = limited(0.85, above=0, maximum=1)
    overlap: bool = True
    adaptive: bool = False
    trace: bool = False
    time_phases: bool = False
    isolate_ngrams: bool = False
    plain_content: bool = False
    tensor_parallel: int = limited(1, 1)
    expert_parallel: int = limited(1, 1)
    first_device: int = limited(0, 0)
    random_seed: int | None = None

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

    def chooses(self, drafter: Drafter) -> bool:
        """Whether each step is chosen to draft or not; False: each drafts as its batch bucket says. Tracing and timing
        show every step's drafts."""
        return self.adaptive and drafter.width > 1 and not (self.trace or self.time_phases)


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
        *, ragged: bool = False,
    ) -> Layout:  # fmt: skip
        """For a pool of `tokens` tokens, rounded down to pages; it has at least one. Rest: see `Buckets.build`."""
        size = config.page_size
        pool = PoolShape(max(tokens // size, 1), size)
        request_pages = min(-(-context_length // size), pool.pages)
        rows, chunk = config.largest_batch, config.chunked_prefill_size
        sizes = {"request_pages": request_pages, "chunk": chunk, "prefill": config.max_prefill_tokens}
        # `attention` splits the heads of a block over devices, and not the rows that a ragged one has only there.
        sizes |= {"adaptive": config.chooses(drafter), "ragged": ragged and config.tensor_parallel == 1}
        return cls(pool, Buckets.build(platform, drafter, rows=rows, **sizes))
