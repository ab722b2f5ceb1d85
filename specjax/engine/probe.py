"""Whether CUDA graphs with loops and branches run on this machine: tried once, in a process that may crash or hang.

A driver may fail on them, and not only by an error: XLA's issues have a loop in a graph that crashed when it ran the
second time (35760), and branches that hung (25769). So `main` runs a small model's step some times in a process of its
own, with rows that sample and inputs that are new each time, and compares its tokens with those of a step without
graphs. What came of it is kept in the cache, by card, driver and versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from specjax.cache import PoolShape
from specjax.checkpoint.files import default_cache_dir, write_text
from specjax.compiling import LOOPS, NVIDIA_OPTIONS
from specjax.config import ModelConfig, RopeConfig
from specjax.drafters import Ngram, make_drafter
from specjax.drafters.base import Params
from specjax.gpu import Card
from specjax.models import init_params, make_target
from specjax.state import StepInput, admit, init_state, new_row
from specjax.step import StepConfig, speculate_step

logger = logging.getLogger(__name__)

SECONDS = 180.0  # after which the process counts as hung; starting JAX and compiling twice take most of them
STEPS = 4  # a fault showed at the second
WRONG_TOKENS = 3  # exit status

COMMAND = (sys.executable, "-m", "specjax.engine.probe")


def graphs_run(card: Card, *, command: tuple[str, ...] = COMMAND, seconds: float = SECONDS) -> bool:
    """Whether steps may have loops and branches in graphs on this card. The first time, it is tried by `command`.

    A result is remembered unless the probe could not be made (an error of Python's, which says nothing of graphs).
    """
    versions = jax.__version__, jaxlib.__version__, dict(NVIDIA_OPTIONS), STEPS
    what = json.dumps([card.name, card.driver, card.capability, *versions], sort_keys=True)
    file = default_cache_dir() / "probes" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
    known = _read(file)
    if known is None:
        logger.info("Trying CUDA graphs with loops on this GPU, once: up to a minute")
        problem, lasting = _try(command, seconds)
        known = {"problem": problem}
        if lasting:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps({"of": what, **known}) + "\n")
    if known["problem"]:
        logger.warning(
            "Loops and branches stay outside of CUDA graphs, so steps are slower: with them a probe %s (%s; another "
            "driver is tried again)", known["problem"], file,
        )  # fmt: skip
    return not known["problem"]


def _read(file: Path) -> dict[str, str] | None:
    try:
        found = json.loads(file.read_text())
        return found if isinstance(found.get("problem"), str) else None
    except (OSError, ValueError, AttributeError):
        return None


def _try(command: tuple[str, ...], seconds: float) -> tuple[str, bool]:
    """What went wrong ("": nothing), and whether that is how this driver is."""
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")  # the memory is the server's
    if (shown := jax.config.values["jax_cuda_visible_devices"]) != "all":
        environment["JAX_CUDA_VISIBLE_DEVICES"] = shown
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"did not end in {seconds:g} s", True
    except OSError as error:
        return f"could not be started: {error}", False
    if done.returncode == 0:
        return "", True
    if done.returncode < 0:
        return f"was ended by signal {-done.returncode}", True
    if done.returncode == WRONG_TOKENS:
        return "drew other tokens than without graphs", True
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"ended with status {done.returncode}: {last[0][:300]}", False


def tokens_drawn(options: dict[str, str] | None) -> list[list[list[int]]]:
    """The tokens that each step of a small random model emits for four rows, one greedy, the others sampling."""
    config = ModelConfig(
        "llama", 256, 64, 128, 1, 4, 2, 16, 1e-5, RopeConfig(), 512, tied_embeddings=False, dtype="bfloat16"
    )
    target, drafter = make_target(config), make_drafter(Ngram(capacity=1024))
    draws, rows = np.random.default_rng(0), 4
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    weights = jax.tree.map(lambda leaf: np.asarray(draws.normal(size=leaf.shape, scale=0.3), leaf.dtype), shapes)
    params = jax.device_put(Params(weights))
    state = init_state(params, target, drafter, rows=rows, pool=PoolShape(8 * rows, 16))
    fixed: dict[str, Any] = {"target": target, "drafter": drafter, "config": StepConfig((drafter.width,))}
    step: Any = jax.jit(partial(speculate_step, **fixed), donate_argnums=1, compiler_options=options)
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_k": 40}, {"temperature": 1.0, "min_p": 0.05},
    ]  # fmt: skip
    for slot, way in enumerate(ways):
        row = new_row(config.vocab_size, limit=100, prompt=[slot, 7, slot], prefix_length=3, seed=slot, **way)
        state = admit(state, jnp.int32(slot), row)
    drawn = []
    for _ in range(STEPS):
        table = np.arange(8 * rows, dtype=np.int32).reshape(rows, 8)
        inputs = StepInput(jnp.arange(rows, dtype=jnp.int32), jnp.asarray(table), jnp.ones(rows, bool))
        state, output = step(params, state, inputs)
        tokens, emitted = np.asarray(output.tokens), np.asarray(output.emitted)
        drawn.append([row[:count].tolist() for row, count in zip(tokens, emitted, strict=True)])
    return drawn


def main() -> int:
    with_graphs = tokens_drawn(dict(NVIDIA_OPTIONS))
    without = tokens_drawn({LOOPS: ""})
    return 0 if with_graphs == without else WRONG_TOKENS


if __name__ == "__main__":
    sys.exit(main())
