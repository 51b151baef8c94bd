"""docs/contributing.md names files of the repository: they must exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/contributing.md").read_text()
CHANGES = [
    "method",
    "loss term",
    "augmentation",
    "data source",
    "metric",
    "flag",
    "checkpoint field",
    "export format",
    "backbone",
    "recipe",
    "optimizer",
    "logger",
]


def find_section(title: str) -> str:
    """Return the text below a heading of the page."""
    return re.split(rf"^## {title}\n", PAGE, flags=re.M)[1].split("\n## ")[0]


def find_paths(text: str) -> list[str]:
    return re.findall(r"`((?:\w+/)*[\w-]+\.(?:py|toml))`", text)


def read_table() -> dict[str, list[str]]:
    """Return the files of each change."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", find_section("Common changes"), re.M)
    return {change: find_paths(files) for change, files in rows if change != "change"}


def test_table_lists_twelve_changes():
    assert list(read_table()) == CHANGES


@pytest.mark.parametrize("change", CHANGES)
def test_change_names_up_to_three_existing_files(change):
    files = read_table()[change]
    assert 1 <= len(files) <= 3
    assert [path for path in files if not (ROOT / path).is_file()] == []


READING_PATH = find_paths(find_section("Reading path"))


def test_reading_path_has_four_files():
    assert len(READING_PATH) == 4


@pytest.mark.parametrize("path", READING_PATH)
def test_files_of_the_reading_path_are_short_and_import_few_names_of_the_package(path):
    text = (ROOT / path).read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in nodes if (node.module or "").startswith("longtail") for alias in node.names]
    assert len(text.splitlines()) < 250 and 0 < len(names) <= 10


def test_other_files_of_the_page_exist():
    paths = [path for path in find_paths(PAGE) if "/" in path]
    paths += re.findall(r"python ([\w/]+\.py)", PAGE)
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_contributing_file_links_to_the_page():
    assert "(docs/contributing.md)" in (ROOT / "CONTRIBUTING.md").read_text()
