"""What the processes that share a model must have in common: settings, files, engines. Compared in this order."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import jax
import numpy as np
import specjax_kernels

import specjax
from specjax.checkpoint import ModelFiles
from specjax.cli.flags import Settings
from specjax.drafters.base import Params, Speculation
from specjax.engine.config import EngineConfig
from specjax.fleet.hosts import Address, Follower, Leader, Place
from specjax.models.target import Target
from specjax.settings import dashed, place_of

PER_PROCESS = {
    "model", "revision", "tokenizer_path", "chat_template", "max_total_tokens", "mem_fraction", "mem_fraction_static",
    "base_gpu_id", "sampling_defaults", "random_seed", "speculative_draft_model_path",
    "speculative_draft_model_revision", "speculative_token_map",
}  # fmt: skip
"""Settings and fields of `EngineConfig` that may differ between the processes of a group. The contents of files are
compared when they are read, and the processes agree on the size of the pool."""
SAMPLE = 4096  # maximum number of compared bytes of a tensor


def make_group(chosen: Settings) -> Leader | Follower | None:
    """Joins the group of processes that share the model; None for a single process. Raises ValueError if settings
    contradict each other, or the leader cannot listen."""
    server, devices = chosen.server, chosen.engine.tensor_parallel_size
    address, count, rank = server.dist_init_addr, server.nnodes, server.node_rank

    def place(name: str) -> str:
        return place_of(server, name)

    if count == 1:
        if address is not None or rank:
            name = "dist_init_addr" if address is not None else "node_rank"
            raise ValueError(f"{place(name)} {address or rank} needs --nnodes of at least 2")
        return None
    if address is None:
        raise ValueError(f"{place('nnodes')} {count} needs --dist-init-addr HOST:PORT, the same for all processes")
    if rank >= count:
        raise ValueError(f"{place('node_rank')} {rank} must be from 0 to {count - 1}, with --nnodes {count}")
    if server.data_parallel_size > 1:
        raise ValueError(
            f"{place('data_parallel_size')} {server.data_parallel_size} makes replicas within one process: with "
            f"{place('nnodes')} {count} it must be 1"
        )
    if devices % count:
        raise ValueError(
            f"{place_of(chosen.engine, 'tensor_parallel_size')} {devices} must be the number of devices of all "
            f"{count} processes together (--nnodes {count}), each of which has as many"
        )
    try:
        member = Place(Address.parse(address), count, rank)
    except ValueError as error:
        raise ValueError(f"{place('dist_init_addr')} {error}") from None
    try:
        return (Follower if rank else Leader)(member, _shared(chosen))
    except OSError as error:
        raise ValueError(
            f"{place('dist_init_addr')} {address}: the leader cannot listen at {member.address.next}: "
            f"{error.strerror or error}"
        ) from None


def _shared(chosen: Settings) -> dict[str, str]:
    """Maps flags to the settings that all processes of a group must share."""
    words = {None: "not set", True: "on", False: "off"}
    return {
        f"--{dashed(field.name)}": words[value] if value is None or isinstance(value, bool) else str(value)
        for table in (chosen.model, chosen.engine, chosen.speculative)
        for field in fields(table)
        if field.name not in PER_PROCESS and not field.metadata["setting"].instead
        for value in (getattr(table, field.name),)
    }


def engine_facts(
    target: Target, speculation: Speculation, params: Params, config: EngineConfig, context_length: int
) -> dict[str, str]:  # fmt: skip
    """Maps names of properties, for errors, to their values."""
    folders = [Path(package.__file__ or "").parent for package in (specjax, specjax_kernels)]
    sources = sorted(file for folder in folders for kind in ("*.py", "*.json") for file in folder.rglob(kind))
    source = _digest(file.read_bytes() for file in sources)
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
