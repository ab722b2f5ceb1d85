"""Processes that share an engine's devices: the leader's engine decides, and followers launch the same programs.

    leader      schedule -> send to the followers -> launch -> read, compare with their digests -> tokens of requests
    follower    receive  -> launch                -> read, report a digest

All changes of the state go through `specjax.engine.device.Device`, which sends them to the followers first. A
follower's engine has the same parameters and programs, and no requests. It makes no decisions, because these would
depend on its clock.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from specjax.engine.buckets import Key
from specjax.engine.device import Output, digest
from specjax.engine.engine import Engine
from specjax.fleet.hosts import Follower, Message

COMPILERS = 2  # threads


def follow(engine: Engine, follower: Follower) -> None:
    """Runs the leader's messages until the leader ends this process. An error ends all processes."""
    outputs = SimpleQueue[tuple[Key, Output]]()
    threading.Thread(target=_report, args=(follower, outputs), name="specjax-digests", daemon=True).start()
    compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="specjax-compile")
    exclusive = engine.platform != "cpu"
    while True:
        message = follower.receive()
        try:
            if message.kind == "compile":
                compiling = compilers.submit(_compile, engine, Key(*message.fields["key"]))
                if exclusive:  # as in the leader, no program is launched during compilation
                    compiling.result()
            else:
                _launch(engine, message, outputs)
        except Exception as error:
            follower.fail(f"Node rank {follower.place.rank} could not follow ({message.kind}): {error}")


def _compile(engine: Engine, key: Key) -> None:
    with contextlib.suppress(Exception):  # logged; it may never be launched
        engine.programs.get(key)


def _launch(engine: Engine, message: Message, outputs: SimpleQueue[tuple[Key, Output]]) -> None:
    kind, fields, array = message
    if kind == "run":
        assert array is not None
        key = Key(*fields["key"])
        outputs.put((key, engine.device.run(key, engine.programs.get(key), array)))
    elif kind == "admit":
        assert array is not None
        engine.device.update(engine.programs.admit(resumed=fields["resumed"]), array)
    elif kind == "flush":
        engine.device.update(engine.without_drafts)
    elif kind == "renew":
        engine.device.renew()
    else:
        raise ValueError(f"{kind!r:.100} is not a message of a leader's engine")


def _report(follower: Follower, outputs: SimpleQueue[tuple[Key, Output]]) -> None:
    while True:
        key, output = outputs.get()
        try:
            value = digest(output)
        except Exception as error:
            follower.fail(f"{key} failed on node rank {follower.place.rank}: {error}")
        follower.report(value)
