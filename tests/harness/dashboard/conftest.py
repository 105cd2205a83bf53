"""A place for pages."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A place for the page."""
    return tmp_path / "page.html"
