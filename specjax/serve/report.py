"""Reports on an engine: its properties, and the log lines that SGLang's users and their scripts know."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from specjax.cli.flags import in_flags
from specjax.engine import Engine
from specjax.engine.drafting import drafting_summary
from specjax.engine.outputs import Counters
from specjax.engine.phases import PhaseTimes

logger = logging.getLogger("specjax.serve")


class Report:
    """Writes log lines about an engine after its steps. Never touches the device."""

    def __init__(self, engine: Engine, *, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._last, self._decoded = replace(engine.counters), replace(engine.counters)
        self._since = time.perf_counter()
        self._retracted = 0
        self._explained = False  # why steps did not draft
        self._idle = True
        self._phases = PhaseTimes()

    def after_step(self) -> None:
        engine, now = self._engine, replace(self._engine.counters)
        if now.prefilled_tokens > self._last.prefilled_tokens:
            logger.info(
                "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: 0, token usage: %.2f, "
                "#running-req: %d, #queue-req: %d",
                now.prefilled_sequences - self._last.prefilled_sequences,
                now.prefilled_tokens - self._last.prefilled_tokens,
                self._tokens() / engine.intake.pool_tokens,
                len(engine.scheduler.running()),
                len(engine.scheduler.waiting),
            )
            if self._idle:  # time without work does not count
                self._restart(now)
        retracted = engine.scheduler.retractions - self._retracted
        if retracted:
            self._retracted += retracted
            logger.warning(
                "KV cache pool is full. Retract requests. #retracted_reqs: %d, #running-req: %d, #queue-req: %d",
                retracted,
                len(engine.scheduler.running()),
                len(engine.scheduler.waiting),
            )
        if now.steps - self._decoded.steps >= self._interval:
            self._decode_line(now)
            self._restart(now)
        self._last, self._idle = now, not engine.unfinished

    def _decode_line(self, now: Counters) -> None:
        engine, before = self._engine, self._decoded
        steps = now.verifications - before.verifications
        summary = drafting_summary(
            engine.drafter, engine.buckets, steps, now.drafted_steps - before.drafted_steps, in_flags
        )
        if summary["not_drafted"] and not self._explained:
            self._explained = True
            logger.info("%d of %d steps drafted: %s", summary["drafted_steps"], steps, summary["not_drafted"])
        seconds = max(time.perf_counter() - self._since, 1e-9)
        tokens = self._tokens()
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, accept len: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            len(engine.scheduler.running()),
            tokens,
            tokens / engine.intake.pool_tokens,
            (now.verified - before.verified) / steps if steps else 1.0,
            (now.generated - before.generated) / seconds,
            len(engine.scheduler.waiting),
        )
        times = engine.executables.phase_times
        if times is not None:
            logger.debug(
                "Decode step. draft: %(draft).2f ms, verify: %(verify).2f ms, commit: %(commit).2f ms",
                times.since(self._phases),
            )
            self._phases = replace(times)

    def _restart(self, now: Counters) -> None:
        self._decoded, self._since = now, time.perf_counter()

    def _tokens(self) -> int:
        """Committed tokens of all sequences that hold pages."""
        return sum(max(s.committed, s.prefilled) for s in self._engine.scheduler.active)


def describe(engine: Engine, model: str) -> dict[str, Any]:
    """The answer of `/get_model_info`."""
    config, counters = engine.target.config, engine.counters
    return {
        "model_path": model,
        "is_generation": True,
        "dtype": config.dtype,
        "vocab_size": engine.vocab_size,
        "context_length": engine.context_length,
        "max_total_num_tokens": engine.intake.pool_tokens,
        "max_running_requests": engine.config.max_running_requests,
        "page_size": engine.pool.page_size,
        "speculative_algorithm": engine.drafter.name,
        "speculative_num_draft_tokens": engine.drafter.width,
        "verify_steps": counters.verifications,
        **drafting_summary(engine.drafter, engine.buckets, counters.verifications, counters.drafted_steps, in_flags),
        "device": engine.device_name,
        "compiling": len(engine.executables.pending),  # buckets that still compile in the background
    }
