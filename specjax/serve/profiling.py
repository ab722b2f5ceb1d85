"""Traces of the engine's steps by jax's profiler, for Perfetto and `benchmarks/idle.py`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

logger = logging.getLogger("specjax.serve")


def make_folder(folder: str) -> None:
    """Makes the folder of the traces if it is missing. Raises ValueError if it cannot be made or written to."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--profile {folder} cannot hold traces: {error.strerror or error}") from error


class Profiler:
    """Writes traces of a number of steps into a folder. Used only in the engine's thread.

    Args:
        folder: None: no traces are written.
        steps: length of the first trace, which begins with the first step, and default length of later traces.
    """

    def __init__(self, folder: str | None, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._waiting = folder is not None  # for the first step
        self._left = 0  # steps of the trace that runs

    def begin(self, steps: int | None = None) -> str:
        """Begins a trace; returns the folder. Raises ValueError if there is no folder, or a trace runs already."""
        if self._folder is None:
            raise ValueError("the server writes no traces: start it with --profile FOLDER")
        if self._left:
            raise ValueError(f"a trace runs already, with {self._left} steps left")
        make_folder(self._folder)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would trace every Python call, and take longer than the steps
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
        self._waiting, self._left = False, steps or self._steps
        logger.info("Profile: tracing %d steps into %s", self._left, self._folder)
        return self._folder

    def end(self) -> bool:
        """Ends the trace and writes it. Returns False if none runs."""
        running, self._waiting, self._left = self._left > 0, False, 0
        if running:
            jax.profiler.stop_trace()
            logger.info("Profile: written to %s; https://ui.perfetto.dev opens perfetto_trace.json.gz", self._folder)
        return running

    def before_step(self) -> None:
        if self._waiting:
            self._waiting = False
            self._logged(self.begin)

    def after_step(self) -> None:
        if self._left > 1:
            self._left -= 1
        elif self._left:
            self._logged(self.end)

    def _logged(self, change: Callable[[], object]) -> None:
        """Calls a function. Requests continue if no trace can be written."""
        try:
            change()
        except Exception:
            logger.exception("Profile: no trace")
