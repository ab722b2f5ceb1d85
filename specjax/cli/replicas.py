"""Data parallelism: replicas of the engine in one process, each with devices of its own."""

from __future__ import annotations

from typing import Any

import jax

from specjax.cli import build, flags
from specjax.engine import Engine
from specjax.parallel import sharding
from specjax.settings import place_of


def check_devices(chosen: flags.Settings) -> None:
    """Raises ValueError, which names the flags, if JAX has too few devices for the replicas."""
    split, replicas = chosen.engine.tensor_parallel_size, chosen.server.data_parallel_size
    if replicas > 1:
        what = f"{place_of(chosen.server, 'data_parallel_size')} {replicas}"
        if split > 1:
            what += f" with {place_of(chosen.engine, 'tensor_parallel_size')} {split}"
        most = jax.local_device_count() // split
        sharding.check_devices(what, split * replicas, f"; at most {most} replicas fit" if most else "")


def make_engines(chosen: flags.Settings, *, progress: bool = True, **config: Any) -> list[Engine]:
    """The engines of all replicas, in the order of their devices. Arguments and errors are those of
    `build.make_engine` and `check_devices`."""
    check_devices(chosen)
    split, replicas = chosen.engine.tensor_parallel_size, chosen.server.data_parallel_size
    places = [rank * split for rank in range(replicas)]
    return [build.make_engine(chosen, progress=progress, first_device=place, **config) for place in places]
