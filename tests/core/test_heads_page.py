"""docs/heads.md has an entry for every draft that ships or that a config names, and names existing tests."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from test_configs import FILES
from tiny_heads import DIALECTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
FIELDS = ("For", "Published", "Licence", "Dialect", "Named by", "Tested by")
ENTRIES: dict[str, str] = dict(re.findall(r"^### ([^\n]+)\n\n(.*?)(?=^##|\Z)", PAGE, flags=re.M | re.S))


def drafts(file: Path) -> set[str]:
    """Drafts that a config uses, or makes if it is in configs/train/."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    keys = {key: value for table in tables.values() for key, value in table.items()}
    if file.parent.name == "train":
        return {re.sub(r"-\d$", "", Path(str(keys["output"])).name)}
    named = {str(keys["speculative-draft-model-path"])} if "speculative-draft-model-path" in keys else set()
    if "speculative-token-map" in keys:
        named.add(str(keys["speculative-token-map"]).rpartition("/")[0])
    if not named and keys.get("speculative-algorithm") in ("EAGLE", "MTP", "NEXTN"):  # MTP layers of the model
        named.add(str(keys["model"]))
    return named


CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.relative_to(ROOT / "configs").as_posix())
def test_drafts_of_a_config(file):
    missing = drafts(file) - ENTRIES.keys()
    assert not missing, f"docs/heads.md has no entry for {missing}"
    for name in drafts(file):
        path = file.relative_to(ROOT).as_posix()
        assert path in ENTRIES[name] or "configs/train" in ENTRIES[name], f"the entry of {name} does not name {path}"


def test_shipped_drafts_and_readme():
    data = ROOT / "specjax" / "data"
    shipped = {folder.name for folder in (data / "heads").iterdir() if folder.is_dir()}
    shipped |= {file.stem for file in data.glob("*.npy")}
    assert shipped <= ENTRIES.keys()
    for name in shipped:
        card = data / "heads" / name / "README.md"
        if card.is_file():
            (licence,) = re.findall(r'^license: "?([\w.-]+)', card.read_text(encoding="utf-8"), flags=re.M)
            assert licence.lower() in ENTRIES[name].lower()

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    heads = re.findall(r"--speculative-draft-model-path (\w[\w.-]+/(?!mine)[\w.-]+)(?=\s)", readme)
    assert set(heads) <= ENTRIES.keys()


@pytest.mark.parametrize("name", ENTRIES)
def test_fields_and_named_tests(name):
    fields = tuple(re.findall(r"^- \*\*(.+?)\*\*:\s+\S", ENTRIES[name], flags=re.M))
    on_the_hub = tuple(field for field in FIELDS if field not in ("Published", "Licence"))
    assert fields == FIELDS or (fields == on_the_hub and "/" in name)
    tested = ENTRIES[name].partition("**Tested by**")[2]
    references = re.findall(r"`(tests/\w+/\w+\.py)(?:::(\w+)(?:\[(.+?)\])?)?`", tested)
    assert references
    for path, function, case in references:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions
        if case:
            assert path.endswith("/test_configs.py") and name in drafts(FILES[case])


def test_dialects():
    rows = re.findall(r"^\| (`.+?) \|", PAGE.partition("## Dialects")[2], flags=re.M)
    assert {name for row in rows for name in re.findall(r"`(.+?)`", row)} == set(DIALECTS)
