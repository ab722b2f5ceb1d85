"""The log lines of a working engine, as SGLang's users and their scripts know them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from specjax.engine import Engine
from specjax.engine.counters import Counters
from specjax.engine.phases import PhaseTimes

logger = logging.getLogger("specjax.serve")


class Report:
    """Looks at an engine after each step. Does nothing else, and never touches the device."""

    def __init__(self, engine: Engine, *, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._last, self._decoded = replace(engine.counters), replace(engine.counters)
        self._since = time.perf_counter()
        self._retracted = 0
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
            if self._idle:  # time without work is not slowness
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
        """Committed tokens of all that hold pages."""
        return sum(max(s.committed, s.prefilled) for s in self._engine.scheduler.active)
