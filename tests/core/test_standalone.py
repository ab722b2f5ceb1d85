"""The repository stands alone: no committed file names a folder of somebody's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(rb"\.\./shared\b|(?<![\w.\-/])/(?:work|home|root|Users)/\w")
TEXTS = {".jsonl"}
"""Suffixes of data that others wrote."""


def test_no_file_names_a_folder_outside_the_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line[:120]!r}"
        for file in files
        if file.is_file() and file.suffix not in TEXTS and file != Path(__file__)
        for number, line in enumerate(file.read_bytes().splitlines(), 1)
        if FOREIGN.search(line)
    ]
    assert not found, "\n".join(found)
