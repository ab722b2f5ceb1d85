"""What the engines of several processes must have in common to run the same programs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import specjax_kernels

import specjax
from specjax.checkpoint import ModelFiles
from specjax.drafters.base import Drafter, Params
from specjax.engine.config import EngineConfig
from specjax.models.target import Target

OWN = ("mem_fraction", "max_total_tokens", "random_seed")
"""Fields of `EngineConfig` that each process may have otherwise. The pool's size is agreed upon."""

SAMPLE = 4096  # most bytes of a tensor


def engine_facts(
    target: Target, drafter: Drafter, params: Params, config: EngineConfig, context_length: int
) -> dict[str, str]:  # fmt: skip
    """By the names that an error gives them."""
    source = hash_of(source_files())[:16]
    found = {"version of specjax": f"{importlib.metadata.version('specjax')} (source {source})"}
    found["version of jax"] = jax.__version__
    found["model"] = repr(target.config)
    found["drafter"] = f"{drafter.name}, {drafter.depth} levels, {drafter.width} nodes ({drafter.note})"
    found["context length"] = str(context_length)
    found |= {f"EngineConfig.{name}": repr(value) for name, value in asdict(config).items() if name not in OWN}
    leaves, tree = jax.tree.flatten(params)
    shapes = [f"{leaf.shape} {leaf.dtype}" for leaf in leaves]
    found["layout of the parameters"] = f"digest {_digest([str(tree), *shapes])}"
    return found | {"weights": f"digest {_digest(_weights(params))}"}


def source_files() -> list[Path]:
    """Source files of both packages."""
    folders = [Path(package.__file__ or "").parent for package in (specjax, specjax_kernels)]
    return sorted(file for folder in folders for kind in ("*.py", "*.json") for file in folder.rglob(kind))


def hash_of(files: Iterable[Path]) -> str:
    """Digest of the content of files."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def file_facts(files: ModelFiles) -> dict[str, str]:
    """Of a model's files, before they are read: the parts of split weights that two processes read do not overlap, so
    they cannot be compared afterwards. Of each tensor the first bytes are looked at, which another training changes."""
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(file.open("rb", buffering=0)) for file in files.weights}

        def parts() -> Iterator[str | bytes]:
            for name, entry in sorted(files.headers.items()):
                yield f"{name} {entry.dtype} {entry.shape}"
                yield os.pread(opened[entry.file].fileno(), min(entry.size, SAMPLE), entry.start)

        return {"files of the weights": f"digest {_digest(parts())} of {len(files.headers)} tensors"}


def _weights(params: Params) -> Iterator[bytes]:
    """Of the leaves that each device has as a whole, such as norms, which differ between two models of one shape."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            yield np.asarray(leaf).tobytes()


def _digest(parts: Iterable[str | bytes]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode())
    return found.hexdigest()
