"""One process of a group that shares its engines, for tests/wings/test_hosts.py.

The leader prints one line of JSON an engine of mesh_program.py, then generates without end.

    hosts_program.py RANK HOST:PORT PROCESSES DEVICES diverges|agrees CASE...

DEVICES is the number of devices of each process.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import jax

from specjax.engine import Engine
from specjax.fleet import following
from specjax.fleet.hosts import Address, Follower, Leader, Message, Place

logging.basicConfig(level=logging.INFO, format="%(message)s")
rank, address, processes, devices, mode, *cases = sys.argv[1:]
place = Place(Address.parse(address), int(processes), int(rank))
jax.config.update("jax_num_cpu_devices", int(devices))


class NextEngine(Exception):
    """The leader goes on to another engine."""


class Following(Follower):
    def receive(self) -> Message:
        message = super().receive()
        if message.kind == "next":
            raise NextEngine
        return message


group = Following(place) if place.rank else Leader(place)
group.join()

import mesh_program  # noqa: E402  (which starts JAX's backend)


def shortened(engine: Engine) -> None:
    """Lets requests of this process's part of the state end three tokens too early."""
    admit = engine.programs.admit

    def wrong(state: Any, packed: Any) -> Any:
        state = admit(state, packed)
        rows = state.decode.rows
        return state._replace(decode=state.decode._replace(rows=rows._replace(limit=rows.limit - 3)))

    engine.programs.admit = wrong


engine: Engine | None = None
for case in cases:
    engine = mesh_program.in_memory(case, int(processes) * int(devices), kind=following.shared_by(group))
    if isinstance(group, Leader):
        print(json.dumps(mesh_program.run(engine)), flush=True)
        assert engine.flush_cache()
        if case != cases[-1]:
            group.send("next")
    else:
        if mode == "diverges":
            shortened(engine)
        try:
            following.follow(engine, group)
        except NextEngine:
            continue
while engine is not None:
    engine.generate(mesh_program.PROMPTS[0], mesh_program.SAMPLING[0])
