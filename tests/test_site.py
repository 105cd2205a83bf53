"""The site that `scripts/site` builds: it works from a folder, and loads nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.needs("mkdocs"), pytest.mark.slow]
_LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"([^\"]*)\"")
_LINKED = re.compile(r"<a\b[^>]*\bhref=\"([^\"]*)\"")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, by the Python part of the script; the reference has a test of its own."""
    _, _, code = (ROOT / "scripts" / "site").read_text().partition("<<'PYTHON'\n")
    place = tmp_path_factory.mktemp("documents")
    reference = place / "pages" / "reference" / "index.html"
    reference.parent.mkdir(parents=True)
    reference.write_text("<title>reference</title>")
    done = subprocess.run(
        [sys.executable, "-", place, place / "site"], input=code.removesuffix("PYTHON\n"), cwd=ROOT,
        text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return place / "site"


def test_every_page_is_a_document_with_a_heading(site: Path) -> None:
    assert list(site.rglob("instruction.html")) == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        for loaded in _LOADED.findall(page.read_text()):
            assert not loaded.startswith(("http:", "https:", "//")), (page, loaded)
            if not loaded.startswith(
                ("data:", "/")
            ):  # the page for errors of servers has absolute ones
                assert (page.parent / loaded.partition("?")[0]).exists(), (page, loaded)
    styles = "".join(each.read_text() for each in site.rglob("*.css"))
    assert not re.search(r"url\(['\"]?https?:", styles)


def test_every_link_leads_to_a_page(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for linked in _LINKED.findall(page.read_text()):
            path = unquote(linked.partition("#")[0])
            if path and ":" not in path:
                assert (page.parent / path).is_file(), (page, linked)


def test_the_first_page_shows_a_refusal_and_the_search_knows_every_page(site: Path) -> None:
    assert "refusal.svg" in (site / "index.html").read_text()
    index = (site / "search" / "search_index.js").read_text()
    for words in ("/etc/shadow", "Landlock", "cellwright exec"):
        assert words in index
