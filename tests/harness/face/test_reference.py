"""The reference that `scripts/reference` builds has every public name, and every command."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellwright
from cellwright.harness.cli.commands import complete_parser
from cellwright.harness.cli.parsing import commands_of
from tests.conftest import ROOT

pytestmark = pytest.mark.needs("pdoc")
ROOMS = sorted(
    path.stem for path in (ROOT / "cellwright").glob("[a-z]*.py") if path.is_file()
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, by the Python part of the script: the rest makes the environment."""
    _, _, code = (ROOT / "scripts" / "reference").read_text().partition("<<'PYTHON'\n")
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-", target], input=code.removesuffix("PYTHON\n"), cwd=ROOT, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{target / 'index.html'}\n"), done.stderr
    return target


def ids_of(page: Path) -> set[str]:
    return set(re.findall(r'id="([^"]+)"', page.read_text()))


def test_every_public_name_is_in_it(site: Path) -> None:
    assert set(cellwright.__all__) <= ids_of(site / "cellwright.html")
    for room in ROOMS:
        names = set(__import__(f"cellwright.{room}", fromlist=["*"]).__all__)
        assert names <= ids_of(site / "cellwright" / f"{room}.html"), room


def test_methods_have_their_signature_and_their_text(site: Path) -> None:
    page = site / "cellwright.html"
    assert {"Sandbox.execute", "Sandbox.create", "Session.branch", "HostSettings.python"} <= ids_of(
        page
    )
    text = re.sub(r"<[^>]+>", "", page.read_text())
    assert re.search(r"Sandbox\(\s*config: .{,200}\*,\s*policy: ", text, re.DOTALL)
    assert "standard input of the program" in text


def parsers() -> Iterator[tuple[str, set[str]]]:
    waiting = [complete_parser()]
    while waiting:
        for _, each in commands_of(waiting.pop()):
            waiting.append(each)
            yield each.prog, {word for action in each._actions for word in action.option_strings}


def test_every_command_and_option_is_in_it(site: Path) -> None:
    text = (site / "commands.html").read_text()
    headings = set(re.findall(r"<h\d[^>]*>([^<]+)</h\d>", text))
    shown = set(re.findall(r"--[a-z-]+", re.sub(r"<[^>]+>", "", text)))
    found = list(parsers())
    assert len(found) > 50
    for name, options in found:
        assert name in headings
        assert {word for word in options if word[:2] == "--"} <= shown, name


def test_links_lead_somewhere_and_all_can_be_searched(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'href="([^"#]+\.html)', page.read_text()):
            assert (page.parent / link).is_file(), (page, link)
    index = (site / "search.js").read_text()
    assert all(
        f'"{name}"' in index
        for name in ("cellwright.Sandbox.execute", "cellwright.errors.ToolDenied")
    )
