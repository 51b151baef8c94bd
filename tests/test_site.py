"""The documentation site: it has every page, is built without warnings, and can be read and searched without a network."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.report import browser

ROOT = Path(__file__).parents[1]
WIDTHS = (390, 1280)  # pixels: a phone, a laptop


def read_navigation() -> set[str]:
    """Return the pages in the navigation of mkdocs.yml."""
    text = re.sub(r"slugify: .*\n.*\n.*\n", "", (ROOT / "mkdocs.yml").read_text())  # a Python object
    found, waiting = set(), list(yaml.safe_load(text)["nav"])
    while waiting:
        item = waiting.pop()
        waiting += item if isinstance(item, list) else item.values() if isinstance(item, dict) else []
        found |= {item} if isinstance(item, str) else set()
    return found


@pytest.fixture(scope="module")
def pages():
    """Return tools/site_pages.py as a module."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools/site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_navigation_has_every_page_of_docs():
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - read_navigation() == set()


def test_results_that_are_not_named_are_added_to_the_navigation(pages):
    config = SimpleNamespace(nav=[{"Results": ["results/index.md", {"All methods": "results/methods.md"}]}])
    (section,) = pages.on_config(config).nav
    added = section["Results"][2:]
    assert "results/published.md" in added and not {"results/index.md", "results/methods.md"} & set(added)


@pytest.mark.parametrize(
    ("link", "source", "address", "expected"),
    [
        ("data.md", "docs/use.md", "use.md", "data.md"),
        ("../results/methods.md", "docs/choosing.md", "choosing.md", "results/methods.md"),
        ("../docs/log.md", "results/README.md", "results/index.md", "../log.md"),
        ("docs/start.md", "README.md", "index.md", "start.md"),
        ("../notebooks/paco.ipynb", "docs/loop.md", "loop.md", "notebook.md"),
        ("../examples/plain_loop.py", "docs/loop.md", "loop.md", "examples/plain_loop.md"),
        ("https://example.org/a", "README.md", "index.md", "https://example.org/a"),
    ],
)
def test_links_lead_to_pages_of_the_site(pages, link, source, address, expected):
    assert pages.find_address(link, source, address) == expected


def test_nested_lists_and_code_are_told_apart(pages):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results/methods.md"))
    text = "- a\n  - b\n\n```python\n  - [x](y.md)\n```\n[z](README.md)\n"
    assert pages.on_page_markdown(text, page, None, None) == text.replace("  - b", "    - b").replace("README", "index")


def test_reference_has_the_public_names(pages):
    reference = pages.format_reference()
    for name in ("longtail.training.train", "longtail.nn.PaCoLoss", "longtail.inference.loading.load"):
        assert f"::: {name}\n" in reference["api/index.md"]
    assert "::: longtail.sklearn.PaCoClassifier\n" in reference["api/sklearn.md"]
    assert "::: longtail.losses.paco.paco_loss\n" in reference["api/losses.md"]
    # under their public names, and the class of the module itself first
    assert re.findall(r"::: .*\.(\w+)\n", reference["api/nn.md"]) == ["PaCoLoss", "LabeledQueue", "MomentumNetwork"]


# The built site


class References(HTMLParser):
    """Collects what a page links to and loads, and its anchors."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(found["href"])
        elif tag in ("script", "img", "iframe") and found.get("src"):
            self.loaded.append(found["src"])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build the site as `make site` does; a warning fails."""
    pytest.importorskip("mkdocs")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return site


@pytest.mark.long
def test_site_has_all_pages_and_no_broken_link(built):
    pages = {path.resolve(): References(path) for path in built.rglob("*.html")}
    names = {str(path.relative_to(built.resolve())) for path in pages}
    assert {"index.html", "start.html", "api/index.html", "results/methods.html", "examples/plain_loop.html"} <= names
    for page, found in pages.items():
        if page.name == "404.html":
            continue
        for link in map(urlsplit, found.links):
            target = (page.parent / unquote(link.path)).resolve() if link.path else page
            assert link.scheme or target.exists(), (page, link)
            if link.fragment and target in pages and not link.scheme:
                assert unquote(link.fragment) in pages[target].ids, (page, link)


@pytest.mark.long
def test_site_loads_nothing_from_a_network(built):
    for page in built.rglob("*.html"):
        assert [url for url in References(page).loaded if urlsplit(url).scheme not in ("", "data")] == [], page
    for sheet in built.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", sheet.read_text()), sheet


@pytest.mark.long
@browser.needed
def test_site_is_searched_and_fits_without_a_server(built):
    with browser.Browser() as b:
        for width in WIDTHS:
            b.screen(width)
            for name in ("index", "commands", "results/methods", "api/index", "notebook"):
                b.open(built / f"{name}.html")
                assert b.evaluate(browser.FITS) and b.evaluate(browser.IMAGES_ARE_SHOWN), (name, width)
        b.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
        b.call("Input.insertText", text="calibration")
        b.call("Input.dispatchKeyEvent", type="keyUp", key="n")
        b.until("document.querySelectorAll('.md-search-result__link').length > 3")
        assert not b.complaints() and not [url for url in b.requests() if url.startswith("http")]
