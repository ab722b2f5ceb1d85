"""Metrics for Prometheus at `/metrics`: our own names, and SGLang's and vLLM's where they mean the same.

Totals and gauges are read of the engine when they are asked for; latencies are noted by the engine's thread after each
step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from specjax.engine import Engine
from specjax.engine.batch import Counters
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

    @classmethod
    def sum(cls, several: Iterable[Latencies]) -> Latencies:
        found = cls()
        for each in several:
            found._counts = [*map(sum, zip(found._counts, each._counts, strict=True))]
            found._sum += each._sum
        return found

    def family(self, name: str, about: str, model: str) -> Metric:
        bounds = [*map(floatToGoString, SECONDS), "+Inf"]
        found = HistogramMetricFamily(name, about, labels=["model_name"])
        found.add_metric([model], [*zip(bounds, accumulate(self._counts), strict=True)], self._sum)
        return found


class Traffic:
    """What happens to the requests of an engine. Written by its thread, apart from `arrived`.

    Attributes:
        latencies: by the names of `LATENCIES`.
        model: its name, by which all is labelled.
    """

    def __init__(self) -> None:
        self.latencies = {name: Latencies() for name in LATENCIES}
        self._first, self._between, self._whole = self.latencies.values()
        self.model = ""
        self.requests = 0
        self.aborted = 0
        self.throughput = 0.0  # tokens a second, as the last log line about decoding has it
        self._times: dict[Sequence, tuple[float, float, int]] = {}  # arrival, last token, tokens so far

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
            new = len(sequence.output.tokens) - count
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
            reason = sequence.output.finish_reason
            self.aborted += reason is None or reason.type == "abort"


@runtime_checkable
class Replica(Protocol):
    """What is counted of a replica of the engine."""

    @property
    def engine(self) -> Engine: ...

    @property
    def traffic(self) -> Traffic: ...


class _Known(NamedTuple):
    """A metric that is read of the engine."""

    name: str  # ours, and SGLang's
    vllm: str | None
    kind: Literal["counter", "gauge"]
    about: str
    value: float


def _used_tokens(engine: Engine) -> int:
    total = engine.intake.pool_tokens
    return total - min(engine.scheduler.available * engine.pool.page_size, total)


def read(replicas: List[Replica]) -> list[_Known]:
    """All totals and gauges, of several replicas together. Names and meanings are SGLang's; of tokens, those of
    contexts, of resumed requests too."""
    engines, traffics = [each.engine for each in replicas], [each.traffic for each in replicas]
    counters, drafter = Counters.sum(engine.counters for engine in engines), engines[0].drafter
    running = sum(len(engine.scheduler.active) for engine in engines)
    waiting = sum(len(engine.scheduler.waiting) for engine in engines)
    total, used = sum(engine.intake.pool_tokens for engine in engines), sum(map(_used_tokens, engines))
    context = counters.prefilled_tokens + counters.cached_tokens
    places = counters.own_steps * max(drafter.width - 1, 1)
    return [
        _Known("num_running_reqs", "num_requests_running", "gauge", "Requests that run.", running),
        _Known("num_queue_reqs", "num_requests_waiting", "gauge", "Requests that wait.", waiting),
        _Known("num_used_tokens", None, "gauge", "Tokens in pages that running requests hold.", used),
        _Known("token_usage", "kv_cache_usage_perc", "gauge", "Their share of the pool, from 0 to 1.", used / total),
        _Known("gen_throughput", None, "gauge", "Tokens a second, of the last steps.",
               sum(traffic.throughput for traffic in traffics)),
        _Known("cache_hit_rate", None, "gauge", "Share of prompt tokens from the prefix cache, since the start.",
               counters.cached_tokens / context if context else 0.0),
        _Known("spec_accept_length", None, "gauge", "Tokens a verification, since the start.", counters.accept_length),
        _Known("spec_accept_rate", None, "gauge", "Share of the drafted tokens that were accepted, since the start.",
               counters.own_accepted / places if places else 0.0),
        _Known("spec_num_draft_tokens", None, "gauge", "Nodes of the widest draft tree.", drafter.width),
        _Known("spec_num_steps", None, "gauge", "Depth of the deepest draft tree.", drafter.depth),
        _Known("max_total_num_tokens", None, "gauge", "Tokens that the pool holds.", total),
        _Known("num_retracted_reqs", None, "gauge", "Requests sent back to the queue.",
               sum(engine.scheduler.retractions for engine in engines)),
        _Known("prompt_tokens", "prompt_tokens", "counter", "Tokens of prompts.", context),
        _Known("generation_tokens", "generation_tokens", "counter", "Tokens drawn.", counters.generated),
        _Known("cached_tokens", "prefix_cache_hits", "counter", "Tokens from the cache.", counters.cached_tokens),
        _Known("num_requests", None, "counter", "Requests that have arrived.",
               sum(traffic.requests for traffic in traffics)),
        _Known("num_aborted_requests", None, "counter", "Requests that ended early.",
               sum(traffic.aborted for traffic in traffics)),
    ]  # fmt: skip


_FAMILIES: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class _Everything(Collector):
    def __init__(self, replicas: List[Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        engines, model = [each.engine for each in self._replicas], self._replicas[0].traffic.model
        label = [model]
        found = read(self._replicas)
        for each in found:
            make = _FAMILIES[each.kind]
            names = [OURS + each.name, SGLANG + each.name] + ([VLLM + each.vllm] if each.vllm else [])
            for name in names:
                family = make(name, each.about, labels=["model_name"])
                family.add_metric(label, each.value)
                yield family
        queries = CounterMetricFamily(VLLM + "prefix_cache_queries", "Tokens of prompts.", labels=["model_name"])
        queries.add_metric(label, next(each.value for each in found if each.name == "prompt_tokens"))
        yield queries
        yield from _cache_config(engines, label)
        yield from _adapters(label)
        yield from _speculation(engines, label)
        if len(engines) > 1:
            yield from _each(self._replicas, label)
        for name, about in LATENCIES.items():
            together = Latencies.sum(each.traffic.latencies[name] for each in self._replicas)
            family = together.family(OURS + name, about, model)
            for prefix in (OURS, SGLANG, VLLM):
                yield _renamed(family, prefix)


def _each(replicas: List[Replica], label: list[str]) -> Iterator[Metric]:
    """The same of each replica, under names of their own, so that a sum over a name counts nothing twice."""
    for known in zip(*(read([each]) for each in replicas), strict=True):
        make, name = _FAMILIES[known[0].kind], f"{OURS}rank_{known[0].name}"
        family = make(name, f"Of one replica. {known[0].about}", labels=["model_name", "dp_rank"])
        for rank, each in enumerate(known):
            family.add_metric([*label, str(rank)], each.value)
        yield family


def _cache_config(engines: List[Engine], label: list[str]) -> Iterator[Metric]:
    """The pools' pages under the labels of SGLang and of vLLM, as llm-d's endpoint picker reads them."""
    pages = [str(engines[0].pool.page_size), str(sum(engine.pool.pages for engine in engines))]
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


def _speculation(engines: List[Engine], label: list[str]) -> Iterator[Metric]:
    """vLLM's totals of speculation, read by its `bench serve`. None where nothing is drafted."""
    counters, drafter = Counters.sum(engine.counters for engine in engines), engines[0].drafter
    width = drafter.width
    if width == 1:
        return
    totals = {
        "num_drafts": ("Steps of a request without a grammar that could draft.", counters.own_steps),
        "num_draft_tokens": ("Places for drafts in their trees.", counters.own_steps * (width - 1)),
        "num_accepted_tokens": ("Drafts of these that became text.", counters.own_accepted),
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
    for position in range(drafter.depth):
        at = counters.accepted_at
        each.add_metric([*label, str(position)], at[position] if position < len(at) else 0)
    yield each


def _renamed(family: Metric, prefix: str) -> Metric:
    """A family of ours with another prefix."""
    copy = Metric(family.name.replace(OURS, prefix, 1), family.documentation, family.type)
    copy.samples = [Sample(each.name.replace(OURS, prefix, 1), *each[1:]) for each in family.samples]
    return copy


def exposition(replicas: List[Replica], accept: str) -> tuple[bytes, str]:
    """The text of `/metrics` and its content type, in the format that an Accept header asks for."""
    registry = CollectorRegistry()
    registry.register(_Everything(replicas))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind
