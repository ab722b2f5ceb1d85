"""A model's name, or a draft head's, to files on disk: the built-in model, a GGUF, a folder or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

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
    """Find, fetch and if need be convert a model.

    ``name`` is, in this order: the alias ``smollm2-135m-instruct`` (any case), a local ``.gguf`` file, a local
    folder in the Hugging Face layout, or a hub id. With the cache filled no network is touched.

    Args:
      name: the model.
      revision: branch, tag or commit of a hub id.
      cache_dir: for converted models and hub downloads; by default ``$SPECJAX_CACHE``, or ``specjax`` in the user's
        cache folder, and the hub's own cache.
      progress: show bars on stderr.

    Raises:
      CheckpointError: nothing by that name, or not a model we can read.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    name = os.fspath(name)
    is_alias = name.lower() == BUILT_IN_MODEL
    path = Path(name).expanduser()
    if revision is not None and (is_alias or path.exists()):
        raise CheckpointError(f"revision {revision!r} has no meaning for {name!r}; only hub ids have revisions")
    if is_alias:
        return read_folder(name, built_in_folder(cache, progress=progress))
    if path.is_dir():
        return read_folder(name, path)
    if path.is_file():
        return read_folder(name, _converted(path, cache, progress))
    if _is_path(name):
        raise CheckpointError(f"the model {name!r} looks like a path, and there is no such file or folder; {_CHOICES}")
    at = f" at revision {revision!r}" if revision else ""
    folder = download(
        name,
        f"no model {name!r}{at}. Tried: the alias {BUILT_IN_MODEL!r} (another name); the local path {path} (absent); "
        "the Hugging Face hub",
        patterns=HUB_PATTERNS,
        revision=revision,
        cache=cache / "hub" if cache_dir is not None else None,
        progress=progress,
        advice=f". {_CHOICES}",
    )
    return read_folder(name, folder)


def resolve_head(name: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """The folder of a draft head: a local one, or a snapshot of a hub id, torch's files only if it has no others.

    Raises:
      CheckpointError: nothing by that name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} has no meaning for the folder {name!r}; only hub ids have one"
            )
        return path
    if path.is_file() or _is_path(name):
        raise CheckpointError(
            f"{name!r} is {'a file' if path.is_file() else 'no file or folder'}; give a folder with config.json and "
            "weights, or a hub id such as 'yuhuili/EAGLE3-LLaMA3.1-Instruct-8B'"
        )

    problem = f"there is no local folder {path}, and the Hugging Face hub gave no draft head {name!r}"
    folder = download(name, problem, patterns=HEAD_PATTERNS, revision=revision, progress=progress)
    if not any(folder.glob("*.safetensors")):
        patterns = [*HEAD_PATTERNS, "*.bin"]
        folder = download(name, problem, patterns=patterns, revision=revision, progress=progress)
    return folder


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

    Raises:
      CheckpointError: on any failure; ``problem``, the reason in brackets, and ``advice``.
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
    from specjax.checkpoint import gguf_model

    if file.suffix.lower() != ".gguf":
        raise CheckpointError(f"the model {str(file)!r} is a file and not a .gguf; {_CHOICES}")
    # By content, so that a file that was replaced is converted again and one that was moved is not.
    digest = cached_sha256(file.resolve(), cache)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)[:60]
    folder = cache / "models" / f"{stem}-{digest[:16]}-{gguf_model.CONVERSION}"
    return build_once(folder, lambda target: gguf_model.convert(file, target, progress=progress))


def _is_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.lower().endswith(".gguf")
