"""Metrics for Prometheus at `/metrics`: our own names, and SGLang's and vLLM's where they mean the same.

Totals and gauges are read of the engine when they are asked for; latencies are noted by the engine's thread after each
step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from specjax.engine import Engine
from specjax.engine.sequence import Sequence, Status

OURS, SGLANG, VLLM = "specjax:", "sglang:", "vllm:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120, 240)

LATENCIES = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a request; tokens of one step share its time.",
    "e2e_request_latency_seconds": "From the arrival of a request to its end.",
}


class Latencies:
    """Durations, counted by bucket. A histogram of the prometheus library takes one at a time, with a lock for each
    bucket: half a millisecond for 64 requests of 4 tokens."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += times
        self._sum += seconds * times

    def family(self, name: str, about: str, model: str) -> Metric:
        bounds = [*map(floatToGoString, SECONDS), "+Inf"]
        found = HistogramMetricFamily(name, about, labels=["model_name"])
        found.add_metric([model], [*zip(bounds, accumulate(self._counts), strict=True)], self._sum)
        return found


class Traffic:
    """What happens to requests. Written by the engine's thread, apart from `arrived`.

    Attributes:
        model: its name, by which all is labelled.
    """

    def __init__(self) -> None:
        self._latencies = {name: Latencies() for name in LATENCIES}
        self._first, self._between, self._whole = self._latencies.values()
        self.model = ""
        self.requests = 0
        self.aborted = 0
        self.throughput = 0.0  # tokens a second, as the last log line about decoding has it
        self._times: dict[Sequence, tuple[float, float, int]] = {}  # arrival, last token, tokens so far

    def families(self) -> list[Metric]:
        return [self._latencies[name].family(OURS + name, about, self.model) for name, about in LATENCIES.items()]

    def arrived(self, sequences: Iterable[Sequence]) -> None:
        now = time.perf_counter()
        for sequence in sequences:
            self.requests += 1
            self._times[sequence] = (now, now, 0)

    def changed(self, sequences: Iterable[Sequence]) -> None:
        """After a step that changed these."""
        now = time.perf_counter()
        for sequence in sequences:
            if (found := self._times.get(sequence)) is None:
                continue
            begun, last, count = found
            new = len(sequence.output) - count
            if new and not count:
                self._first.observe(now - begun)
            elif new:
                self._between.observe((now - last) / new, new)
            if sequence.status is Status.FINISHED:
                self._whole.observe(now - begun)
                self.gone(sequence)
            elif new:
                self._times[sequence] = (begun, now, count + new)

    def gone(self, sequence: Sequence) -> None:
        """It has ended, or its client has left."""
        if self._times.pop(sequence, None) is not None:
            reason = sequence.finish_reason
            self.aborted += reason is None or reason.type == "abort"


class _Known(NamedTuple):
    """A metric that is read of the engine."""

    name: str  # ours, and SGLang's
    vllm: str | None
    kind: Literal["counter", "gauge"]
    about: str
    value: float


def read(engine: Engine, traffic: Traffic) -> list[_Known]:
    """All totals and gauges. Names and meanings are SGLang's; of tokens, those of contexts, of resumed requests too."""
    counters, scheduler = engine.counters, engine.scheduler
    total = engine.intake.pool_tokens
    free = scheduler.available * engine.pool.page_size
    used = total - min(free, total)
    context = counters.prefilled_tokens + counters.cached_tokens
    places = counters.drafted_steps * max(engine.drafter.width - 1, 1)
    return [
        _Known("num_running_reqs", "num_requests_running", "gauge", "Requests that run.", len(scheduler.active)),
        _Known("num_queue_reqs", "num_requests_waiting", "gauge", "Requests that wait.", len(scheduler.waiting)),
        _Known("num_used_tokens", None, "gauge", "Tokens in pages that running requests hold.", used),
        _Known("token_usage", "kv_cache_usage_perc", "gauge", "Their share of the pool, from 0 to 1.", used / total),
        _Known("gen_throughput", None, "gauge", "Tokens a second, of the last steps.", traffic.throughput),
        _Known("cache_hit_rate", None, "gauge", "Share of prompt tokens from the prefix cache, since the start.",
               counters.cached_tokens / context if context else 0.0),
        _Known("spec_accept_length", None, "gauge", "Tokens a verification, since the start.", counters.accept_length),
        _Known("spec_accept_rate", None, "gauge", "Share of the drafted tokens that were accepted, since the start.",
               counters.accepted / places if counters.drafted_steps else 0.0),
        _Known("spec_num_draft_tokens", None, "gauge", "Nodes of the widest draft tree.", engine.drafter.width),
        _Known("spec_num_steps", None, "gauge", "Depth of the deepest draft tree.", engine.drafter.depth),
        _Known("max_total_num_tokens", None, "gauge", "Tokens that the pool holds.", total),
        _Known("num_retracted_reqs", None, "gauge", "Requests sent back to the queue.", scheduler.retractions),
        _Known("prompt_tokens", "prompt_tokens", "counter", "Tokens of prompts.", context),
        _Known("generation_tokens", "generation_tokens", "counter", "Tokens drawn.", counters.generated),
        _Known("cached_tokens", "prefix_cache_hits", "counter", "Tokens from the cache.", counters.cached_tokens),
        _Known("num_requests", None, "counter", "Requests that have arrived.", traffic.requests),
        _Known("num_aborted_requests", None, "counter", "Requests that ended early.", traffic.aborted),
    ]  # fmt: skip


class _Everything(Collector):
    def __init__(self, engine: Engine, traffic: Traffic) -> None:
        self._engine, self._traffic = engine, traffic

    def collect(self) -> Iterator[Metric]:
        label = [self._traffic.model]
        found = read(self._engine, self._traffic)
        for each in found:
            make: Any = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            names = [OURS + each.name, SGLANG + each.name] + ([VLLM + each.vllm] if each.vllm else [])
            for name in names:
                family = make(name, each.about, labels=["model_name"])
                family.add_metric(label, each.value)
                yield family
        queries = CounterMetricFamily(VLLM + "prefix_cache_queries", "Tokens of prompts.", labels=["model_name"])
        queries.add_metric(label, next(each.value for each in found if each.name == "prompt_tokens"))
        yield queries
        yield from _cache_config(self._engine, label)
        yield from _adapters(label)
        yield from _speculation(self._engine, label)
        for family in self._traffic.families():
            for prefix in (OURS, SGLANG, VLLM):
                yield _renamed(family, prefix)


def _cache_config(engine: Engine, label: list[str]) -> Iterator[Metric]:
    """The pool's pages under the labels of SGLang and of vLLM, as llm-d's endpoint picker reads them."""
    pages = [str(engine.pool.page_size), str(engine.pool.pages)]
    for prefix, names in ((SGLANG, ["page_size", "num_pages"]), (VLLM, ["block_size", "num_gpu_blocks"])):
        family = GaugeMetricFamily(f"{prefix}cache_config_info", "Pages of the pool.", labels=["model_name", *names])
        family.add_metric([*label, *pages], 1)
        yield family


def _adapters(label: list[str]) -> Iterator[Metric]:
    """That there are no LoRA adapters, for endpoint pickers that balance by them. The value is when this was said."""
    names = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    family = GaugeMetricFamily(VLLM + "lora_requests_info", "LoRA adapters in use.", labels=["model_name", *names])
    family.add_metric([*label, *names.values()], time.time())
    yield family


def _speculation(engine: Engine, label: list[str]) -> Iterator[Metric]:
    """vLLM's totals of speculation, read by its `bench serve`. None where nothing is drafted."""
    counters, width = engine.counters, engine.drafter.width
    if width == 1:
        return
    totals = {
        "num_drafts": ("Steps of a request that could draft.", counters.drafted_steps),
        "num_draft_tokens": ("Places for drafts in their trees.", counters.drafted_steps * (width - 1)),
        "num_accepted_tokens": ("Drafts that became text.", counters.accepted),
    }
    for name, (about, value) in totals.items():
        family = CounterMetricFamily(f"{VLLM}spec_decode_{name}", about, labels=["model_name"])
        family.add_metric(label, value)
        yield family
    each = CounterMetricFamily(
        f"{VLLM}spec_decode_num_accepted_tokens_per_pos",
        "Drafts that became text, by depth in the tree, from 0.",
        labels=["model_name", "position"],
    )
    for position in range(engine.drafter.depth):
        at = counters.accepted_at
        each.add_metric([*label, str(position)], at[position] if position < len(at) else 0)
    yield each


def _renamed(family: Metric, prefix: str) -> Metric:
    """A family of ours with another prefix."""
    copy = Metric(family.name.replace(OURS, prefix, 1), family.documentation, family.type)
    copy.samples = [Sample(each.name.replace(OURS, prefix, 1), *each[1:]) for each in family.samples]
    return copy


def exposition(engine: Engine, traffic: Traffic, accept: str) -> tuple[bytes, str]:
    """The text of `/metrics` and its content type, in the format that an Accept header asks for."""
    registry = CollectorRegistry()
    registry.register(_Everything(engine, traffic))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind
