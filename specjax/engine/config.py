"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from specjax.limits import ParameterError, check, documented, setting

DEFAULT_SNAPSHOTS = 16  # a row of Qwen3.5-27B has 157 MB

Policy: TypeAlias = Literal["fcfs", "lpm"]


@documented
@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of an engine.

    Raises:
        TypeError: a value has another type.
        ParameterError: a value is out of range.
    """

    max_running_requests: int = setting(48, "most requests that run at once (R)", minimum=1)
    max_batch: int | None = setting(
        None,
        "largest batch that is compiled; more requests are decoded in several batches; default and maximum: "
        "`max_running_requests`",
        minimum=1,
    )
    page_size: int = setting(16, "tokens in a page of the KV pool (S)", minimum=1)
    max_total_tokens: int | None = setting(None, "tokens in the KV pool; default: fits the device", minimum=1)
    context_length: int | None = setting(
        None, "most tokens of prompt and output together; default and maximum: the model's", minimum=1
    )
    chunked_prefill_size: int | None = setting(
        None,
        "most tokens of one prompt in a forward; default and maximum: 256 on a CPU, 2048 on a GPU",
        minimum=1,
    )
    max_prefill_tokens: int | None = setting(
        None,
        "most tokens of all prompts in a forward; default and maximum: 512 on a CPU (256 if the model can leave out "
        "padding), 2048 on a GPU",
        minimum=1,
    )
    schedule_policy: Policy = setting(
        "fcfs",
        "which waiting request runs next: fcfs = the oldest; lpm = the one with the longest prefix in the cache",
    )
    prefix_cache: bool = setting(True, "keep the pages of earlier texts, for requests that begin with the same tokens")
    state_snapshots: int | None = setting(
        None,
        "rows that keep the state of a recurrent model (gated delta nets) at the ends of cached prefixes; default: 16; "
        "0: no prefix cache for such models",
        minimum=0,
    )
    mem_fraction: float = setting(
        0.85,
        "share of a GPU's memory for weights and KV pool; JAX reserves a tenth more for the rest, unless the "
        "environment sets its share",
        above=0,
        maximum=1,
    )
    overlap: bool = setting(True, "dispatch each step before the result of the last one is read")
    adaptive: bool | None = setting(
        None,
        "draft only where it is measured to be faster (`specjax.engine.draft_policy`); default: on, unless the "
        "tree of a head or model is set, or the drafter or verifier is the caller's; off with a verifier that changes "
        "the text",
    )
    trace: bool = setting(False, "keep each step's tree, in `Completion.trees`")
    isolate_ngrams: bool = setting(
        False,
        "share n-grams only between requests with the same `cache_salt`, since the timing of drafts can reveal other "
        "requests' text",
    )
    tensor_parallel: int = setting(
        1,
        "devices over which weights and KV pool are split; see `specjax.parallel.sharding`",
        minimum=1,
    )
    expert_parallel: int = setting(
        1,
        "groups of these devices over which the experts of a mixture are spread; must divide `tensor_parallel`. Each "
        "group has its own experts, and its devices share the width of each",
        minimum=1,
    )
    first_device: int = setting(0, "index of the first of these devices in the process", minimum=0)
    random_seed: int | None = setting(
        None, "seed of the random seeds of requests; default: a different one in each run"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.tensor_parallel % self.expert_parallel:
            divisors = [n for n in range(1, self.tensor_parallel + 1) if self.tensor_parallel % n == 0]
            problem = (
                f"{self.expert_parallel} must divide tensor_parallel {self.tensor_parallel}, over whose devices "
                f"experts are spread: {', '.join(map(str, divisors))}"
            )
            raise ParameterError("expert_parallel", problem, "EngineConfig")

    @property
    def largest_batch(self) -> int:
        return min(self.max_running_requests, self.max_batch or self.max_running_requests)

    @property
    def snapshot_rows(self) -> int:
        """Rows for snapshots, if the model is recurrent."""
        rows = DEFAULT_SNAPSHOTS if self.state_snapshots is None else self.state_snapshots
        return rows if self.prefix_cache else 0
