"""Processes that share an engine's devices: the leader's engine decides, and followers launch the same programs.

    leader      schedule -> send to the followers -> launch -> read, compare with their digests -> tokens of requests
    follower    receive  -> launch                -> read, report a digest

All changes of the state go through the engine's `Device`; the leader's is a `LeadingDevice`, which sends them to the
followers first. A follower's engine has the same parameters and programs, and no requests. It makes no decisions,
because these would depend on its clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from queue import SimpleQueue
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import checkpoint
from specjax.drafters.base import Params
from specjax.engine.config import EngineConfig
from specjax.engine.device import Device, Output, Program, Resident
from specjax.engine.engine import Engine
from specjax.engine.memory import MemoryPlan
from specjax.engine.plan import Key
from specjax.fleet.agreement import engine_facts, file_facts
from specjax.fleet.hosts import Follower, Group, Leader, Message
from specjax.parallel.sharding import make_mesh
from specjax.serve.server import SIGNALS

logger = logging.getLogger("specjax.serve")

COMPILERS = 2  # threads


class SharedEngine(Engine):
    """One process's engine of a model that the processes of `group` share."""

    group: ClassVar[Group]

    @classmethod
    def from_pretrained(
        cls, model: str = checkpoint.BUILT_IN_MODEL, *, revision: str | None = None, progress: bool = True, **more: Any
    ) -> Engine:  # fmt: skip
        """Ends all processes if the model files of one differ from the leader's. The group has joined."""
        cls.group.agree(file_facts(checkpoint.resolve(model, revision=revision, progress=progress)), 0)
        return super().from_pretrained(model, revision=revision, progress=progress, **more)

    @classmethod
    def make_mesh(cls, config: EngineConfig) -> Mesh | None:
        """All devices of the group's processes."""
        return make_mesh(config.tensor_parallel, groups=config.expert_parallel, hosts=True)

    @property
    def params(self) -> Params:
        """Parameters of the target and the drafter, which cannot be replaced."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        raise RuntimeError("the parameters of an engine cannot be replaced where several processes share it")

    def make_plan(self, tokens: int | None) -> MemoryPlan:
        """Plans for the smallest KV pool. Ends all processes if the engine of one differs."""
        plan = super().make_plan(tokens).checked()
        facts = engine_facts(self.target, self.speculation, self._params, self.config, plan.context_length)
        return super().make_plan(self.group.agree(facts, prod(plan.pool)))

    def new_device(self) -> Device:
        if not isinstance(leader := self.group, Leader):
            return super().new_device()
        self.programs.announce = lambda key: leader.send("compile", key=key)
        return LeadingDevice(leader, self)


def shared_by(group: Group) -> type[SharedEngine]:
    """Returns the class of this process's engine."""
    return type("SharedEngine", (SharedEngine,), {"group": group})


class LeadingDevice(Device):
    """The leader's device: sends each change of the state to the followers before it is made."""

    def __init__(self, leader: Leader, engine: SharedEngine) -> None:
        self._leader = leader
        self._unread = deque[tuple[Key, Output]]()
        super().__init__(engine.params, engine._new_state, engine.programs.launch_lock)

    def run(self, key: Key, program: Program, inputs: np.ndarray) -> Output:
        def sent(*arguments: Any) -> tuple[list[Any], Output]:
            self._leader.send("run", inputs, key=key)
            try:
                return program(*arguments)
            except Exception as error:  # the followers have launched it, and wait for this process
                self._leader.fail(f"{key} could not be launched: {error}")

        output = super().run(key, sent, inputs)
        self._unread.append((key, output))
        return output

    def read(self, output: Output) -> np.ndarray:
        """Ends all processes if this output or an earlier one differs on a follower."""
        while any(other is output for _, other in self._unread):
            key, oldest = self._unread.popleft()
            try:
                value = digest(oldest)
            except Exception as error:  # the followers may wait for this process
                self._leader.fail(f"{key} failed: {error}")
            self._leader.compare(value, str(key))
        return super().read(output)

    def update(self, change: Callable[..., Resident], *arguments: np.ndarray) -> None:
        def sent(state: Resident, *arguments: np.ndarray) -> Resident:
            if arguments:
                self._leader.send("admit", *arguments)
            else:
                self._leader.send("flush")
            return change(state, *arguments)

        super().update(sent, *arguments)

    def renew(self) -> None:
        with self._launch_lock:
            self._leader.send("renew")
            super().renew()


def digest(output: Output) -> str:
    """Hash of the drawn or drafted tokens of a program; waits for it."""
    first = np.asarray(jax.tree.leaves(output)[0])
    return hashlib.blake2b(first.tobytes(), digest_size=8).hexdigest()


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
        engine.device.update(engine.programs.admit, array)
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

    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        follow(load(), group)
    except Exception as error:
        group.end(f"Node rank {group.place.rank} could not start: {error}")
    return 1
