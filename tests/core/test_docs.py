"""The repository's documents: links lead somewhere, and commands name files that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout.split("\n")
FILES = [ROOT / name for name in TRACKED if name and (ROOT / name).is_file()]
PAGES = [path for path in FILES if path.suffix == ".md"]

pytestmark = pytest.mark.skipif(not PAGES, reason="not a git checkout")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(found), f"{name or page.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    if page.name == "CHANGELOG.md":
        return  # names what was
    text = page.read_text()
    for name in re.findall(
        r"(?<![\w/.-])((?:specjax|kernels|benchmarks|tests|configs|docs|notebooks|examples)/[\w./-]+\.\w+)", text
    ):
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{name} does not exist"
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M), f"make {target} does not exist"


def test_readme_fits():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
