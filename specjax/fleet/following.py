"""Processes that share an engine's devices: the leader's engine decides, and the others launch the same programs.

    leader      schedule -> tell the followers -> launch -> read, compare with their digests -> tokens of requests
    follower    be told  -> launch             -> read, report a digest

What changes the state goes through `specjax.engine.device.Device`, which tells it first. A follower's engine has the
same parameters and programs, and no requests. Its decisions would depend on time; so it takes none.
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
    """Does what the leader tells until that ends the process. An error ends all of them."""
    outputs = SimpleQueue[tuple[Key, Output]]()
    threading.Thread(target=_report, args=(follower, outputs), name="specjax-digests", daemon=True).start()
    compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="specjax-compile")
    exclusive = engine.platform != "cpu"
    while True:
        message = follower.receive()
        try:
            if message.kind == "compile":
                compiling = compilers.submit(_compile, engine, Key(*message.fields["key"]))
                if exclusive:  # nothing is launched before it, as in the leader
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
        raise ValueError(f"{kind!r:.100} is no message of a leader's engine")


def _report(follower: Follower, outputs: SimpleQueue[tuple[Key, Output]]) -> None:
    while True:
        key, output = outputs.get()
        try:
            found = digest(output)
        except Exception as error:
            follower.fail(f"{key} failed on node rank {follower.place.rank}: {error}")
        follower.report(found)
