"""A tiny target on disk, tiny data, and training runs with them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from engine_helpers import END, VOCABULARY, tokenizer
from specjax_kernels.cpu import object_code
from tiny_checkpoints import save_llama

SMALL: dict[str, Any] = {
    "steps": 6, "batch-size": 2, "row-length": 64, "rounds": 2, "held-back": 4, "warmup-steps": 2,
    "learning-rate": 0.01, "checkpoint-every": 2, "log-every": 3, "measure-prompts": 0, "compute-dtype": "float32",
}  # fmt: skip
"""Options of a run that takes a second once it is compiled."""

MAIN = "import sys; from specjax.train.__main__ import main; sys.exit(main())"


def save_model(folder: Path, **changes: Any) -> Path:
    """A target of four layers, with a tokenizer."""
    save_llama(folder, vocab_size=VOCABULARY, num_hidden_layers=4, head_dim=8, eos_token_id=END, **changes)
    tokenizer().save_pretrained(folder)
    return folder


def save_data(file: Path) -> Path:
    rng = np.random.default_rng(0)
    words = ["the", "hello", "12", "cat", "end"]
    rows = [{"prompt": " ".join(rng.choice(words, 6)), "response": " ".join(rng.choice(words, 8))} for _ in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(model: Path, data: Path, output: Path, **changes: Any) -> list[str]:
    """Flags of SMALL with changes: underscores become dashes, None removes a flag, a tuple has several values."""
    flags = {"model": model, "data": data, "output": output} | SMALL
    flags |= {name.replace("_", "-"): value for name, value in changes.items()}
    command = []
    for name, value in flags.items():
        if value is not None:
            command += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return command


@functools.cache
def environment() -> dict[str, str]:
    """Environment of subprocesses: this checkout, and the suite's caches of programs and CPU kernels."""
    root = Path(__file__).parents[2]
    variables = dict(os.environ) | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")]),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if object_code._folder is not None:
        variables.setdefault("SPECJAX_CACHE", str(object_code._folder.parent))
    return variables


def with_kernels(cache: Path) -> Path:
    """Copy the suite's CPU kernels, which take seconds to compile, into a new cache folder."""
    (cache / "kernels").mkdir(parents=True)
    for file in object_code._folder.glob("*") if object_code._folder else ():
        if not file.name.startswith("new-"):  # another process is writing it
            shutil.copy(file, cache / "kernels")
    return cache


def start(command: list[str], program: str = MAIN, **options: Any) -> subprocess.Popen:
    """Run a program, `specjax train` by default, in a process."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *command], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
