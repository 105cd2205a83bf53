"""A browser, and overviews to show in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A place for the page."""
    return tmp_path / "page.html"
