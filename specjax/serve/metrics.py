"""Metrics for Prometheus at `/metrics`, and log lines about steps in SGLang's form.

Metrics have our own names and SGLang's; counters of acceptance have vLLM's, too. Totals and gauges are read from the
engine on request. The engine's thread records latencies after each step.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specjax.engine import Engine
from specjax.engine.runtime import Counters
from specjax.engine.sequence import Sequence, Status

OURS, SGLANG, VLLM = "specjax:", "sglang:", "vllm:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120, 240)

LATENCIES = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a request; tokens of one step share its time.",
    "e2e_request_latency_seconds": "From the arrival of a request to its end.",
}


class Latencies(Histogram):
    """Durations in seconds."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(name, about, buckets=SECONDS, registry=None)

    def observe_equal(self, seconds: float, times: int) -> None:
        """`observe` for several equal durations. One call for each would take 0.7 ms in a step of 64 requests with 4
        tokens each: every call takes locks and searches the bucket."""
        self._sum.inc(seconds * times)
        self._buckets[bisect_left(self._upper_bounds, seconds)].inc(times)


class Traffic:
    """Counts and latencies of an engine's requests. Written by the engine's thread, except `arrived`."""

    def __init__(self) -> None:
        self.latencies = {name: Latencies(name, about) for name, about in LATENCIES.items()}
        self._first, self._between, self._whole = self.latencies.values()
        self.model = ""  # the label of all metrics
        self.requests = 0
        self.aborted = 0
        self.throughput = 0.0  # tokens a second, as in the last log line about decoding
        self._times: dict[Sequence, tuple[float, float, int]] = {}  # arrival, last token, tokens so far

    def arrived(self, sequences: Iterable[Sequence]) -> None:
        now = time.perf_counter()
        for sequence in sequences:
            self.requests += 1
            self._times[sequence] = (now, now, 0)

    def changed(self, sequences: Iterable[Sequence]) -> None:
        """Called after a step that changed these sequences."""
        now = time.perf_counter()
        for sequence in sequences:
            if (times := self._times.get(sequence)) is None:
                continue
            begun, last, count = times
            new = len(sequence.output.tokens) - count
            if new and not count:
                self._first.observe(now - begun)
            elif new:
                self._between.observe_equal((now - last) / new, new)
            if sequence.status is Status.FINISHED:
                self._whole.observe(now - begun)
                self.gone(sequence)
            elif new:
                self._times[sequence] = (begun, now, count + new)

    def gone(self, sequence: Sequence) -> None:
        """Called when a sequence has ended, or its client has left."""
        if self._times.pop(sequence, None) is not None:
            reason = sequence.output.finish_reason
            self.aborted += reason is None or reason.type == "abort"


@runtime_checkable
class Replica(Protocol):
    """An engine and its traffic."""

    @property
    def engine(self) -> Engine: ...

    @property
    def traffic(self) -> Traffic: ...


COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily


class _Value(NamedTuple):
    """A metric that is read from the engine."""

    name: str
    kind: type[CounterMetricFamily | GaugeMetricFamily]
    about: str
    value: float
    prefixes: tuple[str, ...] = (OURS, SGLANG)


def _used_tokens(engine: Engine) -> int:
    total = engine.intake.pool_tokens
    return total - min(engine.scheduler.available * engine.pool.page_size, total)


def read(replicas: List[Replica]) -> list[_Value]:
    """Totals and gauges over all replicas, with SGLang's names and meanings, and counters of drafting with vLLM's.
    Prompt tokens include the contexts of resumed requests."""
    engines, traffics = [replica.engine for replica in replicas], [replica.traffic for replica in replicas]
    counters, drafter = Counters.sum(engine.counters for engine in engines), engines[0].drafter
    running = sum(len(engine.scheduler.active) for engine in engines)
    waiting = sum(len(engine.scheduler.waiting) for engine in engines)
    total, used = sum(engine.intake.pool_tokens for engine in engines), sum(map(_used_tokens, engines))
    context = counters.prefilled_tokens + counters.cached_tokens
    return [
        _Value("num_running_reqs", GAUGE, "Requests that run.", running),
        _Value("num_queue_reqs", GAUGE, "Requests that wait.", waiting),
        _Value("num_used_tokens", GAUGE, "Tokens in pages that running requests hold.", used),
        _Value("token_usage", GAUGE, "Their share of the pool, from 0 to 1.", used / total),
        _Value("gen_throughput", GAUGE, "Tokens a second, of the last steps.",
               sum(traffic.throughput for traffic in traffics)),
        _Value("cache_hit_rate", GAUGE, "Share of prompt tokens from the prefix cache, since the start.",
               counters.cached_tokens / context if context else 0.0),
        _Value("spec_accept_length", GAUGE, "Tokens a verification, since the start.", counters.accept_length),
        _Value("spec_accept_rate", GAUGE, "Share of the drafted tokens that were accepted, since the start.",
               counters.own_accepted / max(counters.own_drafts, 1)),
        _Value("spec_num_draft_tokens", GAUGE, "Nodes of the widest draft tree.", drafter.width),
        _Value("spec_num_steps", GAUGE, "Depth of the deepest draft tree.", drafter.depth),
        _Value("max_total_num_tokens", GAUGE, "Tokens that the pool holds.", total),
        _Value("num_retracted_reqs", GAUGE, "Requests sent back to the queue.",
               sum(engine.scheduler.retractions for engine in engines)),
        _Value("prompt_tokens", COUNTER, "Tokens of prompts.", context),
        _Value("generation_tokens", COUNTER, "Tokens drawn.", counters.generated),
        _Value("cached_tokens", COUNTER, "Tokens from the cache.", counters.cached_tokens),
        _Value("num_requests", COUNTER, "Requests that have arrived.",
               sum(traffic.requests for traffic in traffics)),
        _Value("num_aborted_requests", COUNTER, "Requests that ended early.",
               sum(traffic.aborted for traffic in traffics)),
        _Value("spec_decode_num_drafts", COUNTER, "Steps of a request that could draft.",
               counters.drafted_steps, (VLLM,)),
        _Value("spec_decode_num_draft_tokens", COUNTER, "Nodes of their trees, without the root.",
               counters.drafts, (VLLM,)),
        _Value("spec_decode_num_accepted_tokens", COUNTER, "Accepted drafts.", counters.accepted, (VLLM,)),
    ]  # fmt: skip


def read_depths(replicas: List[Replica]) -> Metric:
    """Accepted drafts by their depth, with vLLM's name."""
    name = f"{VLLM}spec_decode_num_accepted_tokens_per_pos"
    family = CounterMetricFamily(name, "Accepted drafts by depth.", labels=["model_name", "position"])
    counters = Counters.sum(replica.engine.counters for replica in replicas)
    for position, accepted in sorted(counters.accepted_at.items()):
        family.add_metric([replicas[0].traffic.model, str(position)], accepted)
    return family


def read_latencies(replicas: List[Replica]) -> Iterator[Metric]:
    """Histograms over all replicas, with our names and SGLang's."""
    label = {"model_name": replicas[0].traffic.model}
    for name, about in LATENCIES.items():
        ranks = [family.samples for replica in replicas for family in replica.traffic.latencies[name].collect()]
        for prefix in (OURS, SGLANG):
            family = Metric(prefix + name, about, "histogram")
            for same in zip(*ranks, strict=True):
                if not same[0].name.endswith("_created"):
                    family.add_sample(prefix + same[0].name, label | same[0].labels, sum(one.value for one in same))
            yield family


class _Everything(Collector):
    def __init__(self, replicas: List[Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        label = [self._replicas[0].traffic.model]
        for metric in read(self._replicas):
            for prefix in metric.prefixes:
                family = metric.kind(prefix + metric.name, metric.about, labels=["model_name"])
                family.add_metric(label, metric.value)
                yield family
        yield read_depths(self._replicas)
        yield from read_latencies(self._replicas)


def exposition(replicas: List[Replica], accept: str) -> tuple[bytes, str]:
    """The text of `/metrics` and its content type, in the format that an Accept header asks for."""
    registry = CollectorRegistry()
    registry.register(_Everything(replicas))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


logger = logging.getLogger("specjax.serve")

SIZES_SECONDS = 10.0  # minimum time between two lines about the draft sizes of a batch bucket


class Report:
    """Writes log lines about an engine after its steps. Never accesses the device."""

    def __init__(self, engine: Engine, *, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._last = replace(engine.counters)  # after the last step; shares its collections with the engine
        self._decoded, self._since = self._copy(), time.perf_counter()  # at the last line about decoding
        self._retracted = 0
        self._idle = True
        self.throughput = 0.0  # tokens a second in the last line about decoding
        self._ran = Counter[tuple[int, int]]()  # steps by batch bucket and N, at the last line about decoding
        self._sizes = dict[int, tuple[int, float]]()  # batch bucket -> N in its last line about sizes, and its time

    def _copy(self) -> Counters:
        return Counters.sum([self._engine.counters])

    def after_step(self) -> None:
        engine, now = self._engine, replace(self._engine.counters)
        new = now.prefilled_tokens - self._last.prefilled_tokens
        retracted = engine.scheduler.retractions - self._retracted
        if new > 0 or retracted or now.steps - self._decoded.steps >= self._interval:
            self._write(now, new, retracted)
        self._last, self._idle = now, not engine.unfinished

    def _write(self, now: Counters, new: int, retracted: int) -> None:
        engine = self._engine
        tokens = sum(slot.length for s in engine.scheduler.active if (slot := s.slot))
        usage = f"token usage: {tokens / engine.intake.pool_tokens:.2f}"
        running = f"#running-req: {len(engine.scheduler.running())}"
        queue = f"#queue-req: {len(engine.scheduler.waiting)}"
        if new > 0:
            sequences = now.prefilled_sequences - self._last.prefilled_sequences
            cached = now.cached_tokens - self._last.cached_tokens
            counts = f"#new-seq: {sequences}, #new-token: {new}, #cached-token: {cached}"
            level = logging.INFO if sequences else logging.DEBUG  # later chunks of a long prompt say nothing new
            logger.log(level, "Prefill batch. %s, %s, %s, %s", counts, usage, running, queue)
            if self._idle:  # exclude time without work
                self._decoded, self._since = self._copy(), time.perf_counter()
        if retracted:
            self._retracted += retracted
            problem = f"KV cache pool is full. Retract requests. #retracted_reqs: {retracted}"
            logger.warning("%s, %s, %s", problem, running, queue)
        before = self._decoded
        if now.steps - before.steps >= self._interval:
            steps = now.verifications - before.verifications
            length = (now.verified - before.verified) / steps if steps else 1.0
            rate = (now.generated - before.generated) / max(time.perf_counter() - self._since, 1e-9)
            self.throughput = rate
            speed = f"accept len: {length:.2f}, gen throughput (token/s): {rate:.2f}"
            if engine.drafter.width > 1:
                nodes, total = now.nodes - before.nodes, now.steps - before.steps
                shares = (f"{n} {count / total:.0%}" for n, count in sorted(nodes.items()))
                queue += f", nodes: {', '.join(shares)}"
            logger.info("Decode batch. %s, #token: %d, %s, %s, %s", running, tokens, usage, speed, queue)
            self._decoded, self._since = self._copy(), time.perf_counter()
            if engine.policy is not None:
                self._write_sizes(engine.policy.table())

    def _write_sizes(self, table: List[Mapping[str, Any]]) -> None:
        """Writes why the batch bucket that ran most since the last call uses its N, if that N has changed. `table`: of
        the policy."""
        ran = Counter({(row["batch"], row["nodes"]): row["steps"] for row in table})
        new, self._ran, now = ran - self._ran, ran, time.perf_counter()
        batch, nodes = max(new, key=new.__getitem__, default=(0, 0))
        using = {row["batch"]: row["nodes"] for row in table if row["using"]}
        last, since = self._sizes.get(batch, (0, -math.inf))
        if using.get(batch) != nodes or nodes == last or now - since < SIZES_SECONDS:
            return
        self._sizes[batch] = nodes, now
        requests = "1 request" if batch == 1 else f"up to {batch} requests"
        sizes = ", ".join(_size(row) for row in table if row["batch"] == batch)
        logger.info("Draft sizes for %s: %s", requests, sizes)


def _size(row: Mapping[str, Any]) -> str:
    """Describes a row of `DraftPolicy.table`: the seconds of a step, and its expected tokens for each request."""
    nodes, seconds, estimated = row["nodes"], row["seconds"], "" if row["measured"] else "about "
    duration = "not measured" if seconds is None else f"{estimated}{1000 * seconds:.2f} ms"
    count = "1 node" if nodes == 1 else f"{nodes} nodes"
    return f"{count} {duration} {row['tokens']:.2f} tokens" + " (in use)" * row["using"]
