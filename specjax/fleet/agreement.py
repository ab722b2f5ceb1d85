"""Properties that the engines of several processes must have in common to run the same programs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import specjax_kernels

import specjax
from specjax.checkpoint import ModelFiles
from specjax.drafters.base import Params, Speculation
from specjax.engine.config import EngineConfig
from specjax.models.target import Target

PER_PROCESS = ("mem_fraction", "max_total_tokens", "random_seed")
"""Fields of `EngineConfig` that may differ. The processes agree on the size of the pool."""

SAMPLE = 4096  # maximum number of compared bytes of a tensor


def engine_facts(
    target: Target, speculation: Speculation, params: Params, config: EngineConfig, context_length: int
) -> dict[str, str]:  # fmt: skip
    """Maps names of properties, for errors, to their values."""
    source = hash_of(source_files())[:16]
    facts = {"version of specjax": f"{specjax.__version__} (source {source})"}
    facts["version of jax"] = jax.__version__
    facts["model"] = repr(target.config)
    drafter = speculation.drafter
    facts["drafter"] = f"{drafter.name}, {drafter.depth} levels, {drafter.width} nodes ({speculation.note})"
    facts["context length"] = str(context_length)
    facts |= {f"EngineConfig.{name}": repr(value) for name, value in asdict(config).items() if name not in PER_PROCESS}
    leaves, tree = jax.tree.flatten(params)
    shapes = [f"{leaf.shape} {leaf.dtype}" for leaf in leaves]
    facts["layout of the parameters"] = f"digest {_digest([str(tree), *shapes])}"
    return facts | {"weights": f"digest {_digest(_weights(params))}"}


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
    """A digest of a model's files before they are read: the first bytes of each tensor, which further training changes.
    Parts of split weights that two processes have read do not overlap, so they cannot be compared afterwards."""
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(file.open("rb", buffering=0)) for file in files.weights}

        def parts() -> Iterator[str | bytes]:
            for name, entry in sorted(files.headers.items()):
                yield f"{name} {entry.dtype} {entry.shape}"
                yield os.pread(opened[entry.file].fileno(), min(entry.size, SAMPLE), entry.start)

        return {"files of the weights": f"digest {_digest(parts())} of {len(files.headers)} tensors"}


def _weights(params: Params) -> Iterator[bytes]:
    """Leaves that each device holds in full, such as norms, which differ between two models of one shape."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            yield np.asarray(leaf).tobytes()


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
    return digest.hexdigest()
