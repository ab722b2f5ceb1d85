"""Reports on an engine: its properties, and log lines in SGLang's form."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import jax
from specjax_kernels import Quantised

from specjax.engine import Engine
from specjax.engine.batch import Counters
from specjax.engine.draft_policy import doubt, drafting_summary
from specjax.engine.programs import PhaseTimes
from specjax.thresholds import AcceptAbove

logger = logging.getLogger("specjax.serve")


class Report:
    """Writes log lines about an engine after its steps. Never accesses the device."""

    def __init__(self, engine: Engine, *, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._last = replace(engine.counters)  # after the last step
        self._decoded, self._since = self._last, time.perf_counter()  # at the last line about decoding
        self._retracted = 0
        self._explained = False  # True after the line about why steps did not draft
        self._doubted = False
        self._idle = True
        self.throughput = 0.0  # tokens a second in the last line about decoding
        self._phases = PhaseTimes()

    def after_step(self) -> None:
        engine, now = self._engine, replace(self._engine.counters)
        new = now.prefilled_tokens - self._last.prefilled_tokens
        retracted = engine.scheduler.retractions - self._retracted
        if new > 0 or retracted or now.steps - self._decoded.steps >= self._interval:
            self._write(now, new, retracted)
        if not self._doubted and (problem := doubt(engine.drafter, now.own_steps, now.own_accepted)):
            self._doubted = True
            logger.warning("%s", problem)
        self._last, self._idle = now, not engine.unfinished

    def _write(self, now: Counters, new: int, retracted: int) -> None:
        engine = self._engine
        tokens = sum(max(slot.committed, slot.prefilled) for s in engine.scheduler.active if (slot := s.slot))
        usage = f"token usage: {tokens / engine.intake.pool_tokens:.2f}"
        running = f"#running-req: {len(engine.scheduler.running())}"
        queue = f"#queue-req: {len(engine.scheduler.waiting)}"
        if new > 0:
            sequences = now.prefilled_sequences - self._last.prefilled_sequences
            cached = now.cached_tokens - self._last.cached_tokens
            counts = f"#new-seq: {sequences}, #new-token: {new}, #cached-token: {cached}"
            logger.info("Prefill batch. %s, %s, %s, %s", counts, usage, running, queue)
            if self._idle:  # exclude time without work
                self._decoded, self._since = now, time.perf_counter()
        if retracted:
            self._retracted += retracted
            problem = f"KV cache pool is full. Retract requests. #retracted_reqs: {retracted}"
            logger.warning("%s, %s, %s", problem, running, queue)
        before = self._decoded
        if now.steps - before.steps >= self._interval:
            steps = now.verifications - before.verifications
            drafted = now.drafted_steps - before.drafted_steps
            why = drafting_summary(engine.drafter, engine.buckets, steps, drafted)["not_drafted"]
            if why and not self._explained:
                self._explained = True
                logger.info("%d of %d steps drafted: %s", drafted, steps, why)
            length = (now.verified - before.verified) / steps if steps else 1.0
            rate = (now.generated - before.generated) / max(time.perf_counter() - self._since, 1e-9)
            self.throughput = rate
            speed = f"accept len: {length:.2f}, gen throughput (token/s): {rate:.2f}"
            logger.info("Decode batch. %s, #token: %d, %s, %s, %s", running, tokens, usage, speed, queue)
            if (times := engine.programs.phase_times) is not None:
                parts = ", ".join(
                    f"{phase}: {duration:.2f} ms" for phase, duration in times.since(self._phases).items()
                )
                logger.debug("Decode step. %s", parts)
                self._phases = replace(times)
            self._decoded, self._since = now, time.perf_counter()


def stored_in(params: Any) -> str:
    """The formats of quantised matrices: int8, fp8, int4, several of these, or none."""
    names = {"int8": "int8", "float8_e4m3fn": "fp8", "uint8": "int4"}
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return ", ".join(sorted({names[str(x.codes.dtype)] for x in leaves if isinstance(x, Quantised)})) or "none"


def lossy_thresholds(engine: Engine) -> dict[str, float] | None:
    """The thresholds for accepting drafts that the target did not draw; None: verification is lossless."""
    verify = engine.verify
    if not isinstance(verify, AcceptAbove) or not verify.lossy:
        return None
    return {"accept_threshold_single": verify.single, "accept_threshold_acc": verify.cumulative}


def describe(engine: Engine, model: str, *others: Engine) -> dict[str, Any]:
    """The answer of `/get_model_info`. Counts include those of `others`, further replicas of the engine."""
    config, engines = engine.target.config, (engine, *others)
    counters = Counters.sum(replica.counters for replica in engines)
    return {
        "model_path": model,
        "served_model_name": model,
        "tokenizer_path": engine.tokenizer.name_or_path,
        "is_generation": True,
        "dtype": config.dtype,
        "vocab_size": engine.vocab_size,
        "context_length": engine.context_length,
        "max_total_num_tokens": engine.intake.pool_tokens,
        "max_running_requests": engine.config.max_running_requests,
        "page_size": engine.pool.page_size,
        "speculative_algorithm": engine.drafter.name,
        "speculative_num_draft_tokens": engine.drafter.width,
        "speculative_coupling": engine.drafter.coupling,
        "speculative_lossy": lossy_thresholds(engine),
        "speculative_draft_quantization": stored_in(engine.params.draft),
        "verify_steps": counters.verifications,
        **drafting_summary(engine.drafter, engine.buckets, counters.verifications, counters.drafted_steps),
        "device": engine.device_name,
        "compiling": sum(len(replica.programs.pending) for replica in engines),  # in the background
    }
