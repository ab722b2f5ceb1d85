"""The command `python -m specjax.serve`: a model behind OpenAI's interface, decoded speculatively."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from functools import partial

import jax
from tqdm import tqdm

from specjax.cache import bytes_per_token, init_cache
from specjax.checkpoint import CheckpointError
from specjax.cli import flags
from specjax.engine import Engine
from specjax.engine.buckets import speculation_note
from specjax.serve.app import create_app
from specjax.serve.runner import Runner
from specjax.serve.server import SIGNALS, PortError, Server, allow_files, listen, url
from specjax.settings import HelpFormatter, Parser, add_flags, parse

logger = logging.getLogger("specjax.serve")

DESCRIPTION = "Serve a model behind OpenAI's interface, decoding speculatively. The text is the model's own."

USERS_ERRORS = (CheckpointError, ValueError, NotImplementedError, OSError)
"""While loading: what is wrong is a flag or a file, and the message says so."""

LEAVE_TIMEOUT = 2.0
"""Seconds that the engine's thread gets to end its last step."""


class _LogHandler(logging.Handler):
    """To stderr, without tearing progress bars. A reader of the log that has gone ends no request."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            tqdm.write(self.format(record), file=sys.stderr)


def _not_cancelled(record: logging.LogRecord) -> bool:
    """A request that is cut off because the server stops is no error, and uvicorn would print its stack."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def set_up_logging(level: str) -> None:
    handler = _LogHandler()
    handler.addFilter(_not_cancelled)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("jax", "asyncio", "httpx", "httpcore", "filelock"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def load(settings: flags.Settings) -> Engine:
    """The engine, with a line for each thing that a user may wonder about."""
    started = time.perf_counter()
    timed = settings.server.log_level == "debug"
    if timed:
        logger.debug("Steps run in three parts, each waited for, to be measured: slower than with --log-level info")
    engine = flags.make_engine(settings, time_phases=timed)
    seconds = time.perf_counter() - started
    config, tokens = engine.target.config, engine.intake.pool_tokens
    draft = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(engine.executables.state_shapes.draft))
    logger.info("Loaded %s on %s in %.1f s: %s", settings.model.model, engine.device_name, seconds, config.dtype)
    logger.info(
        "KV pool: %d tokens in pages of %d, %.2f GB for the target; context %d tokens, %d requests at once",
        tokens,
        engine.pool.page_size,
        tokens * bytes_per_token(partial(init_cache, engine.target.pages)) / 1e9,
        engine.context_length,
        engine.config.max_running_requests,
    )
    note = flags.in_flags(speculation_note(engine.drafter, engine.buckets))
    logger.info("Speculation: %s; %.2f GB for the draft", note, draft / 1e9)
    return engine


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m specjax.serve", description=DESCRIPTION, formatter_class=HelpFormatter)
    add_flags(parser, flags.Settings())
    _, settings = parse(parser, argv, flags.Settings())
    server = settings.server
    set_up_logging(server.log_level)
    name = server.served_model_name or settings.model.model
    try:
        sock = listen(server.host, server.port)
    except PortError as error:
        print(f"specjax.serve: {error}", file=sys.stderr)
        return 2
    allow_files(2 * server.max_connections)  # from twice as many on they are cut
    logger.info("Listening on %s; requests get a 503 until the model is loaded", url(sock))
    runner = Runner(lambda: load(settings), server)
    failure = Server(create_app(runner, server, model=name), runner, sock, server).run()
    wrong = isinstance(failure, USERS_ERRORS) and not runner.loaded
    if wrong:
        print(f"specjax.serve: {failure}", file=sys.stderr)
    elif failure is not None:
        logger.error("The engine failed", exc_info=failure)
    else:
        logger.info("Bye.")
    status = 0 if failure is None else 2 if wrong else 1
    for number in SIGNALS:  # whoever is impatient needs no traceback
        signal.signal(number, lambda *_: os._exit(status))
    runner.stop(timeout=LEAVE_TIMEOUT if runner.loaded else 0)
    if any(thread.name.startswith("specjax-") for thread in threading.enumerate()):
        # Loading, compiling and tokenising cannot be interrupted, and Python cannot end while a thread is inside XLA.
        sys.stderr.flush()
        os._exit(status)
    return status
