"""The command `specjax serve`: a model behind OpenAI's interface, decoded speculatively.

The packages of `OPTIONAL` add to the server. Each may be missing from an installation: its routes and flags are then
absent or refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from fastapi import FastAPI
from tqdm import tqdm

from specjax.cache import bytes_per_token, init_cache
from specjax.checkpoint import CheckpointError
from specjax.cli import build, flags
from specjax.engine import Engine
from specjax.engine.plan import as_lines, speculation_table
from specjax.parallel.sharding import local_bytes
from specjax.serve.app import Extension, create_app
from specjax.serve.runner import Runner, Service
from specjax.serve.server import SIGNALS, Server, allow_files, check_certificate, listen, url
from specjax.settings import Parser, add_flags, parse

logger = logging.getLogger("specjax.serve")

OPTIONAL = {
    "specjax.serve.dialects": "",
    "specjax.fleet": ".routers",
}
"""Packages with routes, and the module in each that lists these in `EXTENSIONS`."""


def optional(package: str, module: str = "") -> Any:
    """A module of an optional package. None: the package is not installed."""
    return importlib.import_module(package + module) if importlib.util.find_spec(package) else None


def extensions() -> list[Extension]:
    """The routes of all optional packages that are installed."""
    modules = [optional(package, module) for package, module in OPTIONAL.items()]
    return [extension for module in modules if module is not None for extension in module.EXTENSIONS]


def make_app(runner: Service, settings: flags.ServerSettings, *, model: str) -> FastAPI:
    """The application with all routes."""
    return create_app(runner, settings, model=model, extensions=extensions())


class _LogHandler(logging.Handler):
    """Writes to stderr without tearing progress bars. Lines from a replica's thread name the replica."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return  # a request cut off because the server stops; uvicorn would print its stack
        _, replica, rank = (record.threadName or "").rpartition("-dp")
        record.replica = f" DP{rank}" if replica else ""
        with contextlib.suppress(OSError):  # the reader of the log has gone
            tqdm.write(self.format(record), file=sys.stderr)


def set_up_logging(level: str) -> None:
    handler = _LogHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s%(replica)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("jax", "asyncio", "httpx", "httpcore", "filelock"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def load(
    settings: flags.Settings, rank: int = 0, kind: type[Engine] = Engine, join: Callable[[], None] = lambda: None
) -> Engine:
    """Loads the engine, or the engine of the replica `rank`, and logs the model, the memory and the speculation. `join`
    connects this process to others before the engine's settings are read, so that a refused one ends all of them."""
    started = time.perf_counter()
    split = settings.engine.tensor_parallel_size
    build.claim_gpu(settings, join)
    build.check_devices(settings)
    engine = build.make_engine(settings, kind=kind, first_device=rank * split)
    seconds, dtype = time.perf_counter() - started, engine.target.config.dtype
    tokens = engine.intake.pool_tokens
    draft = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(engine.programs.state_shapes.draft))
    message = "Loaded %s on %s in %.1f s; activations in %s"  # weights may be in fewer bits
    logger.info(message, settings.model.model, engine.device_name, seconds, dtype)
    if engine.mesh is not None and engine.mesh.size > 1:
        held = engine.params, engine.programs.state_shapes
        weights, state = (local_bytes(tree) / 1e9 for tree in held)
        message = "Tensor parallel over %d devices; each holds %.3f GB of weights, and %.3f GB of KV pool and state"
        logger.info(message, engine.mesh.size, weights, state)
    target = tokens * bytes_per_token(partial(init_cache, engine.target.pages))
    pool = f"{tokens} tokens in pages of {engine.pool.page_size}"
    pool += f", {target / 1e9:.2f} GB for the target, {draft / 1e9:.2f} GB for the draft"
    requests = engine.config.max_running_requests
    logger.info("KV pool: %s; context %d tokens, %d requests at once", pool, engine.context_length, requests)
    logger.info("Speculation:%s", as_lines(speculation_table(engine.speculation, engine.buckets)))
    return engine


def make_service(settings: flags.Settings, load: Callable[[int], Engine]) -> Service:
    """Drives the engine, or its replicas; `load` makes that of a rank."""
    if (count := settings.server.data_parallel_size) == 1:
        return Runner(lambda: load(0), settings.server)
    return fleet("replicas").Replicas(load, settings.server, count)


def fleet(module: str) -> Any:
    """A module of `specjax.fleet`. Raises ValueError if that is not installed."""
    if (loaded := optional("specjax.fleet", f".{module}")) is None:
        raise ValueError("--dp and --nnodes need the package specjax.fleet, which is not installed")
    return loaded


def main(argv: list[str] | None = None) -> int:
    about = "Serve a model behind OpenAI's interface, decoding speculatively. The text is the model's own."
    parser = Parser(prog="specjax serve", description=about)
    add_flags(parser, flags.Settings())
    if (dry_run := optional("specjax.hardware", ".dry_run")) is not None:
        dry_run.add_flags(parser)
    args, settings = parse(parser, argv, flags.Settings())
    if dry_run is not None:
        dry_run.check_flags(parser, args)
    server = settings.server
    set_up_logging(server.log_level)
    group, make_engine = None, partial(load, settings)
    try:
        check_certificate(server)
        if dry_run is not None and args.dry_run:
            return dry_run.dry_run(settings, args.assume_device, as_json=args.json, config_file=args.config)
        if server.profiler_port is not None:
            jax.profiler.start_server(server.profiler_port)
        if server.nnodes > 1 or server.dist_init_addr is not None or server.node_rank:
            group, following = fleet("agreement").make_group(settings), fleet("following")
            make_engine = partial(load, settings, kind=following.shared_by(group), join=group.join)
            if server.node_rank:
                return following.run_follower(group, make_engine)
        sock = listen(server.host, server.port)
        runner = make_service(settings, make_engine)
    except ValueError as error:
        print(f"specjax serve: {error}", file=sys.stderr)
        return 2
    allow_files()
    logger.info("Listening on %s; requests get a 503 until the model is loaded", url(sock, server))
    app = make_app(runner, server, model=server.served_model_name or settings.model.model)
    serving = Server(app, runner, sock, server)
    failure = serving.run()
    status = 0 if failure is None else 1
    if failure is None:
        logger.info("Bye.")
    elif not runner.loaded and isinstance(failure, (CheckpointError, ValueError, NotImplementedError, OSError)):
        status = 2  # a flag or a file is wrong, and the message says so
        with contextlib.suppress(OSError):
            print(f"specjax serve: {failure}", file=sys.stderr)
    else:
        logger.error("The engine failed", exc_info=failure)
    for number in SIGNALS:  # another signal ends the process without a traceback
        signal.signal(number, lambda *_: os._exit(status))
    end = min(serving.deadline, time.monotonic() + 2.0) if runner.loaded else 0.0  # for the last step
    while not runner.stop(timeout=0.0) and time.monotonic() < end:  # its timeout is of each thread
        time.sleep(0.01)
    if group is not None:
        group.stop(status, "" if failure is None else str(failure))
    # Loading, compiling and tokenising cannot be interrupted, and Python cannot end while a thread is inside XLA.
    with contextlib.suppress(OSError):  # its disk is full, or its reader has gone
        sys.stderr.flush()
    os._exit(status)
