"""A model's name, or a draft head's, to files on disk: the built-in model, a GGUF, a folder or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from specjax.checkpoint import gguf_model
from specjax.checkpoint.builtin import BUILT_IN_MODEL, built_in_folder
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import build_once, cached_sha256, default_cache_dir
from specjax.checkpoint.folder import ModelFiles, read_folder

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
HEAD_PATTERNS = ["*.json", "*.safetensors"]
# Subfolders hold other formats of the same weights, and so do Mistral's consolidated files.
HUB_IGNORED = ["*/*", "consolidated*"]
_CHOICES = (
    f"give {BUILT_IN_MODEL!r}, a .gguf file, a folder with config.json and safetensors, or a hub id such as "
    "'HuggingFaceTB/SmolLM2-135M-Instruct'"
)


def resolve(
    name: str, *, revision: str | None = None, cache_dir: Path | None = None, progress: bool = True
) -> ModelFiles:
    """Find, fetch and if need be convert a model. With the cache filled no network is touched.

    Args:
      name: the alias ``smollm2-135m-instruct`` (any case), a local ``.gguf`` file, a local folder in the Hugging Face
        layout, or a hub id, in this order.
      revision: branch, tag or commit of a hub id.
      cache_dir: for converted models and hub downloads; by default ``$SPECJAX_CACHE``, or ``specjax`` in the user's
        cache folder, and the hub's own cache.
      progress: show bars on stderr.

    Raises:
      CheckpointError: nothing by that name, or not a model we can read.
    """
    name = os.fspath(name)
    cache = Path(cache_dir or default_cache_dir())
    path = _local(name, revision)
    if name.lower() == BUILT_IN_MODEL:
        folder = built_in_folder(cache, progress=progress)
    elif path is None:
        at = f" at revision {revision!r}" if revision else ""
        folder = download(
            name,
            f"no model {name!r}{at}. Tried: the alias {BUILT_IN_MODEL!r} (another name); the local path {name} "
            "(absent); the Hugging Face hub",
            patterns=HUB_PATTERNS,
            revision=revision,
            cache=cache / "hub" if cache_dir is not None else None,
            progress=progress,
            advice=f". {_CHOICES}",
        )
    elif path.is_dir():
        folder = path
    elif path.is_file():
        folder = _converted(path, cache, progress)
    else:
        raise CheckpointError(f"the model {name!r} looks like a path, and there is no such file or folder; {_CHOICES}")
    return read_folder(name, folder)


def resolve_head(name: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """The folder of a draft head: a local one, or a snapshot of a hub id, torch's files only if it has no others."""
    path = _local(name, revision)
    if path is None:
        problem = f"there is no local folder {name}, and the Hugging Face hub gave no draft head {name!r}"
        fetch = partial(download, name, problem, revision=revision, progress=progress)
        folder = fetch(patterns=HEAD_PATTERNS)
        return folder if any(folder.glob("*.safetensors")) else fetch(patterns=[*HEAD_PATTERNS, "*.bin"])
    if not path.is_dir():
        raise CheckpointError(
            f"{name!r} is {'a file' if path.is_file() else 'no file or folder'}; give a folder with config.json and "
            "weights, or a hub id such as 'yuhuili/EAGLE3-LLaMA3.1-Instruct-8B'"
        )
    return path


def _local(name: str, revision: str | None) -> Path | None:
    """The path that ``name`` is, which need not exist; None for a hub id."""
    path = Path(name).expanduser()
    is_local = path.exists() or name.lower() == BUILT_IN_MODEL
    if is_local and revision is not None:
        raise CheckpointError(f"revision {revision!r} has no meaning for {name!r}; only hub ids have revisions")
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.lower().endswith(".gguf")
    return path if is_local or looks_local else None


def download(
    repository: str,
    problem: str,
    *,
    file: str | None = None,
    patterns: Sequence[str] = (),
    revision: str | None = None,
    cache: Path | None = None,
    progress: bool,
    advice: str = "",
) -> Path:
    """Fetch from the hub: one ``file``, or the folder of all files that match ``patterns``.

    The message of any failure is ``problem``, the reason in brackets, and ``advice``.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, revision=revision, cache_dir=cache))
        found = snapshot_download(
            repository, revision=revision, cache_dir=cache, allow_patterns=list(patterns), ignore_patterns=HUB_IGNORED
        )
    except Exception as error:  # the client raises its own, httpx's and the system's errors: all mean "not there"
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{problem} ({type(error).__name__}: {reason}){advice}") from error
    return Path(found)


def _converted(file: Path, cache: Path, progress: bool) -> Path:
    if file.suffix.lower() != ".gguf":
        raise CheckpointError(f"the model {str(file)!r} is a file and not a .gguf; {_CHOICES}")
    # By content, so that a file that was replaced is converted again and one that was moved is not.
    digest = cached_sha256(file.resolve(), cache)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)[:60]
    folder = cache / "models" / f"{stem}-{digest[:16]}-{gguf_model.CONVERSION}"
    return build_once(folder, lambda target: gguf_model.convert(file, target, progress=progress))
