"""Deadlines of requests: seconds from the request's body to the end of its answer, the time in the queue included."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from specjax.serve.errors import ApiError


@dataclass(frozen=True)
class Deadline:
    """A time of the running event loop, and how it came about."""

    at: float | None = None  # None: never
    seconds: float | None = None

    @classmethod
    def after(cls, *limits: float | None) -> Deadline:
        """So many seconds from now on, the fewest of those that are given."""
        given = [limit for limit in limits if limit is not None]
        return cls(asyncio.get_running_loop().time() + min(given), min(given)) if given else cls()

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Within the context, what is awaited ends at the deadline. Raises an ApiError, a 408, if it is over then."""
        if self.at is not None and asyncio.get_running_loop().time() >= self.at:
            raise self._over()
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise self._over() from None

    def _over(self) -> ApiError:
        problem = f"the request was not complete after {self.seconds:g} s (its timeout, or --request-timeout)"
        # OpenAI's clients would send it again after a 408.
        return ApiError(408, problem, param="timeout", code="timeout", headers={"x-should-retry": "false"})
