"""Documents: links, named files, the README's size; and no committed file names a folder of one machine."""

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
MACHINE = re.compile(rb"\.\./shared\b|(?<![\w.\-/])/(?:work|home|root|Users)/\w")

pytestmark = pytest.mark.skipif(not PAGES, reason="not a git checkout")


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{name or page.name} has no heading #{anchor}"
    if page.name == "CHANGELOG.md":
        return  # names removed files
    folders = "specjax|kernels|benchmarks|tests|configs|deploy|docs|notebooks|examples"
    for name in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]+\.\w+)", page.read_text()):
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{name} does not exist"
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M), f"make {target} does not exist"


def test_places_of_a_sampling_parameter():
    """The table of places names functions and classes of files: `name` and `name` (`file`)."""
    (row,) = re.findall(r"^\| a sampling parameter \|.*$", (ROOT / "docs" / "design.md").read_text(), flags=re.M)
    places = re.findall(r"((?:`\w+`(?: and )?)+) \(`([\w/.]+)`\)", row)
    assert len(places) >= 12
    for names, file in places:
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            assert re.search(rf"^(def|class) {name}\b|^{name}\b.* = ", (ROOT / file).read_text(), flags=re.M), (
                f"{file} has no {name}"
            )


def test_readme_size():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_no_file_names_a_folder_of_one_machine():
    named = [
        f"{file.relative_to(ROOT)}:{number}: {line[:120]!r}"
        for file in FILES
        if file.suffix != ".jsonl" and file != Path(__file__)  # data was written by others
        for number, line in enumerate(file.read_bytes().splitlines(), 1)
        if MACHINE.search(line)
    ]
    assert not named, "\n".join(named)
