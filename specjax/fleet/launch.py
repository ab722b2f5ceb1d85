"""The group of processes of `specjax serve` that share one model: made from flags, and the command of a follower."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from specjax.cli.flags import Settings
from specjax.engine import Engine
from specjax.fleet.following import follow
from specjax.fleet.hosts import Address, Follower, Leader, Place
from specjax.settings import dashed, place_of

logger = logging.getLogger("specjax.serve")

PER_PROCESS = {
    "model", "revision", "tokenizer_path", "chat_template", "max_total_tokens", "mem_fraction_static", "base_gpu_id",
    "sampling_defaults", "random_seed", "speculative_draft_model_path",
    "speculative_draft_model_revision", "speculative_token_map",
}  # fmt: skip
"""Settings that may differ between the processes of a group. The contents of files are compared when they are read
(`specjax.fleet.agreement`)."""


def make_group(chosen: Settings) -> Leader | Follower | None:
    """Joins the group of processes that share the model; None for a single process. Raises ValueError if settings
    contradict each other, or the leader cannot listen."""
    server, devices = chosen.server, chosen.engine.tensor_parallel_size
    address, count, rank = server.dist_init_addr, server.nnodes, server.node_rank

    def place(name: str) -> str:
        return place_of(server, name)

    if count == 1:
        if address is not None or rank:
            name = "dist_init_addr" if address is not None else "node_rank"
            raise ValueError(f"{place(name)} {address or rank} needs --nnodes of at least 2")
        return None
    if address is None:
        raise ValueError(f"{place('nnodes')} {count} needs --dist-init-addr HOST:PORT, the same for all processes")
    if rank >= count:
        raise ValueError(f"{place('node_rank')} {rank} must be from 0 to {count - 1}, with --nnodes {count}")
    if server.data_parallel_size > 1:
        raise ValueError(
            f"{place('data_parallel_size')} {server.data_parallel_size} makes replicas within one process: with "
            f"{place('nnodes')} {count} it must be 1"
        )
    if devices % count:
        raise ValueError(
            f"{place_of(chosen.engine, 'tensor_parallel_size')} {devices} must be the number of devices of all "
            f"{count} processes together (--nnodes {count}), each of which has as many"
        )
    try:
        member = Place(Address.parse(address), count, rank)
    except ValueError as error:
        raise ValueError(f"{place('dist_init_addr')} {error}") from None
    try:
        return (Follower if rank else Leader)(member, _shared(chosen))
    except OSError as error:
        raise ValueError(
            f"{place('dist_init_addr')} {address}: the leader cannot listen at {member.address.next}: "
            f"{error.strerror or error}"
        ) from None


def _shared(chosen: Settings) -> dict[str, str]:
    """Maps flags to the settings that all processes of a group must share."""
    words = {None: "not set", True: "on", False: "off"}
    return {
        f"--{dashed(field.name)}": words[value] if value is None or isinstance(value, bool) else str(value)
        for table in (chosen.model, chosen.engine, chosen.speculative)
        for field in fields(table)
        if field.name not in PER_PROCESS and not field.metadata["setting"].instead
        for value in (getattr(table, field.name),)
    }


def run_follower(group: Follower, load: Callable[[], Engine]) -> int:
    """Loads this process's part of the model, and launches the leader's programs until the leader ends this process.
    Returns the exit status if this process cannot start. The first signal asks the leader to stop."""
    signalled = False

    def stop(*_: Any) -> None:
        nonlocal signalled
        if signalled:
            os._exit(1)
        signalled = True
        logger.info("Asking the leader to stop; once more: exit at once")
        group.ask_to_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        follow(load(), group)
    except Exception as error:
        group.end(f"Node rank {group.place.rank} could not start: {error}")
    return 1
