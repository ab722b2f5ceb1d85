"""docs/heads.md has a row for every draft that ships or that a config names, and names existing tests."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from tiny_heads import DIALECTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
ROWS: dict[str, str] = dict(re.findall(r"^\| `([^`]+)`(.*)$", PAGE.partition("## Dialects")[0], flags=re.M))


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
    missing = drafts(file) - ROWS.keys()
    assert not missing, f"docs/heads.md has no row for {missing}"
    for name in drafts(file):
        path = file.relative_to(ROOT / "configs").as_posix()
        assert f"`{path}`" in ROWS[name] or "configs/train" in ROWS[name], f"the row of {name} does not name {path}"


def test_shipped_drafts_and_readme():
    data = ROOT / "specjax" / "data"
    shipped = {folder.name for folder in (data / "heads").iterdir() if folder.is_dir()}
    shipped |= {file.stem for file in data.glob("*.npy")}
    section = PAGE.partition("## Shipped\n")[2].partition("\n## ")[0]
    assert all(f"| `{name}`" in section for name in shipped)
    for name in shipped:
        card = data / "heads" / name / "README.md"
        if card.is_file():
            (licence,) = re.findall(r'^license: "?([\w.-]+)', card.read_text(encoding="utf-8"), flags=re.M)
            assert licence.lower() in section.lower()

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    heads = re.findall(r"--speculative-draft-model-path (\w[\w.-]+/(?!mine)[\w.-]+)(?=\s)", readme)
    assert set(heads) <= ROWS.keys()


def test_named_tests_exist():
    references = re.findall(r"`(tests/\w+/\w+\.py)(?:::(\w+))?`", PAGE)
    assert len(references) >= 4
    for path, function in references:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert not function or function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_dialects():
    rows = re.findall(r"^\| (`.+?) \|", PAGE.partition("## Dialects")[2], flags=re.M)
    assert {name for row in rows for name in re.findall(r"`(.+?)`", row)} == set(DIALECTS)
