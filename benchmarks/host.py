"""Times the engine's own work: a step without the device's computation.

The compiled programs have the arguments of real ones (the leaves of Llama-3.1-8B and an EAGLE-3 head, with tiny
matrices), return the donated state, and emit `--accepted` tokens of a real text for each request. The rest is the time
of the scheduler, the inputs, the launch, the copies and the text.

    python benchmarks/host.py [--batch 1 16 48 64] [--accepted 4] [--steps 100] [--rounds 3] [--adaptive]
        [--record LABEL]

For each batch: median milliseconds of `Engine.step`, and, in further rounds, of its parts:

    inputs    arrays of the step                       launch    call of the compiled program
    output    copy of its results to the host          text      tokens and ends
    rest      scheduler and everything else            server    work of a server's engine thread after a step: metrics,
                                                                 stream deltas, log lines (not part of the step)

A CPU runs the small program within its launch. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from model_shapes import eagle3_head, llama_8b
from records import DATA, finish, machine

from specjax import Engine, EngineConfig, Params, SamplingParams, checkpoint, make_speculation, make_target
from specjax.cli.flags import ServerSettings
from specjax.drafters import Eagle3
from specjax.engine import programs, runtime
from specjax.engine.sequence import Sequence
from specjax.logprobs import LOGPROB_IDS, TOP_LOGPROBS, Logprobs
from specjax.models import init_params
from specjax.models.draft_head import init_head_params
from specjax.serve.delivery import Listener
from specjax.serve.metrics import Report
from specjax.serve.runner import Runner
from specjax.state import FULL, RUNS, DecodeState, PrefillInput, StepInput, StepOutput

PROMPT = 200  # tokens of each request's prompt
CONTEXT = 8192


def corpus(tokenizer: Any) -> np.ndarray:
    """Token ids of all questions of MT-bench."""
    rows = map(json.loads, (DATA / "mt_bench.jsonl").read_text().splitlines())
    return np.array(tokenizer("\n".join(turn for row in rows for turn in row["turns"]))["input_ids"], np.int32)


def fake_step(
    params: Params, state: DecodeState, inputs: Any, *, text: np.ndarray, accepted: int, depth: int, **_: Any
) -> tuple[DecodeState, StepOutput]:
    """A step or a prefill without computation: row r continues at `text[root[r]]`. XLA must keep all arguments."""
    *_, slots = jax.lax.optimization_barrier((*jax.tree.leaves(params), inputs[0]))
    width = depth + 1 if isinstance(inputs, StepInput) else 1
    rows = state.root.shape[0]
    index = jnp.minimum(slots, rows - 1)
    active = inputs.active & (slots < rows)
    at = state.root[index] + 37 * index
    tokens = jnp.asarray(text)[(at[:, None] + jnp.arange(width)) % len(text)]
    left = state.rows.limit[index] - state.rows.generated[index]
    emitted = jnp.where(active, jnp.minimum(min(accepted, width), left), 0)
    if isinstance(inputs, PrefillInput):
        emitted = jnp.where(inputs.next_token < 0, emitted, 0)
    top = min(TOP_LOGPROBS, state.rows.history.counts.shape[1])
    shape = (*tokens.shape, top)
    of_ids = jnp.zeros((*tokens.shape, LOGPROB_IDS))
    logprobs = Logprobs(jnp.zeros(tokens.shape), jnp.zeros(shape), jnp.zeros(shape, jnp.int32), of_ids)
    finish = jnp.where(emitted >= left, FULL, RUNS)
    generated = state.rows.generated.at[slots].add(emitted, mode="drop")
    state = state._replace(
        root=state.root.at[slots].add(emitted, mode="drop"), rows=state.rows._replace(generated=generated)
    )
    ranks = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return state, StepOutput(tokens, emitted, jnp.maximum(emitted - 1, 0), ranks, finish, logprobs, None)


def build(tokenizer: Any, text: np.ndarray, rows: int, accepted: int, *, adaptive: bool) -> Engine:
    """An engine with fake programs."""
    config = replace(
        llama_8b(32), hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4, dtype="float32"
    )
    target, head = make_target(config), eagle3_head(config, 64)
    shapes = jax.eval_shape(
        lambda key: Params(init_params(config, key), init_head_params(head, target, key)), jax.random.key(0)
    )
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    speculation = make_speculation(Eagle3(steps=7, topk=1, nodes=8), target=target, head=head)
    fake = partial(fake_step, text=text, accepted=accepted, depth=speculation.drafter.depth)
    programs.speculate_step = programs.prefill_step = fake
    sizes = {"max_total_tokens": 2048 * rows, "context_length": CONTEXT, "chunked_prefill_size": 256}
    options = EngineConfig(rows, **sizes, adaptive=adaptive)
    engine = Engine(target, params, tokenizer, speculation, config=options)
    if engine.policy is not None:
        engine.policy._cost = lambda batch, nodes: 1.0  # drafts cost nothing here
    return engine


class Clock(ExitStack):
    """Sums the seconds spent in functions, by the name of their part, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds[part] += time.perf_counter() - started

        self.seconds.setdefault(part, 0.0)
        self.enter_context(mock.patch.object(owner, name, timed))


def parts(engine: Engine) -> Clock:
    clock = Clock()
    clock.around(runtime, "step_input", "inputs")
    clock.around(engine.device, "run", "launch")
    clock.around(runtime, "read_output", "output")
    clock.around(Sequence, "accept", "text")
    return clock


class Server:
    """A server's engine thread without its loop, and an event loop that reads the streams."""

    def __init__(self, engine: Engine) -> None:
        settings = ServerSettings()
        self._runner, self._report = Runner(lambda: engine, settings), Report(engine, interval=40)
        self._runner._engine = engine
        self._runner._delivery.start()
        self._loop = asyncio.new_event_loop()

    def add(self, sequence: Sequence) -> None:
        async def listener() -> Listener:
            return Listener([sequence])

        self._runner.submit(self._loop.run_until_complete(listener()))
        while self._runner._commands:
            self._runner._commands.pop()()

    def after_step(self, changed: list[Sequence]) -> None:
        self._runner.traffic.changed(changed)
        self._runner._deliver(changed)
        self._report.after_step()

    def read(self) -> None:
        self._loop.run_until_complete(asyncio.sleep(0))

    def stop(self) -> None:
        self._runner._delivery.stop()
        self._loop.close()


def fill(engine: Engine, text: np.ndarray, batch: int, most: int, server: Any = None) -> None:
    """Starts `batch` requests and runs the steps of their prompts."""
    for i in range(batch):
        params = SamplingParams(max_new_tokens=most, ignore_eos=True)
        sequence = engine.intake.sequence(text[13 * i :][:PROMPT].tolist(), params)
        (engine.enqueue if server is None else server.add)(sequence)
    for _ in range(batch + 20):
        engine.step()


def measure(engine: Engine, text: np.ndarray, batch: int, steps: int, accepted: int, *, clock: bool) -> Any:
    """Milliseconds of each step of a round; with `clock` mean milliseconds of each part and of the server."""
    server = Server(engine) if clock else None
    fill(engine, text, batch, (steps + batch + 30) * accepted, server)
    watch = parts(engine) if clock else Clock()
    samples, served = [], 0.0
    for _ in range(steps):
        started = time.perf_counter()
        changed = engine.step()
        ended = time.perf_counter()
        samples.append(1e3 * (ended - started))
        assert len(changed) == batch
        if server is not None:
            server.after_step(changed)
            served += time.perf_counter() - ended
            server.read()
    watch.close()
    engine.reset("the round has ended")
    if server is None:
        return samples
    server.stop()
    shares = {part: 1e3 * seconds / steps for part, seconds in watch.seconds.items()}
    return shares | {"rest": sum(samples) / steps - sum(shares.values()), "server": 1e3 * served / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 48, 64])
    parser.add_argument("--accepted", type=int, default=4, help="tokens of each request in a step, 1 to 8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adaptive", action="store_true", help="choose for each step whether it drafts")
    parser.add_argument("--record", metavar="LABEL", help="write benchmarks/results/host-<date>-LABEL.json")
    args = parser.parse_args()
    if not 1 <= args.accepted <= 8 or (args.steps + 100) * args.accepted > 1500:
        parser.error("--accepted must be 1 to 8, and (--steps + 100) * --accepted at most 1500")
    tokenizer = checkpoint.load_tokenizer(checkpoint.resolve(checkpoint.BUILT_IN_MODEL))
    text = corpus(tokenizer)
    engine = build(tokenizer, text, max(args.batch), args.accepted, adaptive=args.adaptive)
    run = partial(measure, engine, text, steps=args.steps, accepted=args.accepted)
    settings = {name: getattr(args, name) for name in ("accepted", "steps", "adaptive")}
    document = machine("jaxlib", "tokenizers") | settings
    samples: dict[int, list[float]] = {batch: [] for batch in args.batch}
    clocked: dict[int, list[dict[str, float]]] = {batch: [] for batch in args.batch}
    for turn in range(args.rounds + 1):
        for batch in args.batch:
            plain, shares = run(batch=batch, clock=False), run(batch=batch, clock=True)
            if turn:  # the first compiles
                samples[batch] += plain
                clocked[batch].append(shares)
    rows = []
    for batch in args.batch:
        shares = {part: round(median(row[part] for row in clocked[batch]), 4) for part in clocked[batch][0]}
        rows.append({"batch": batch, "ms": round(median(samples[batch]), 4), "parts_ms": shares})
        figures = "  ".join(f"{part} {value:.3f}" for part, value in shares.items())
        print(f"B = {batch:3d}: {rows[-1]['ms']:.3f} ms a step  {figures}")
        rows[-1]["samples_ms"] = np.round(samples[batch], 3).tolist()
    document["rows"] = rows
    finish("host", document, record=args.record)


if __name__ == "__main__":
    main()
