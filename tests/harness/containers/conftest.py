"""Tests of containers look at all bundles, so each test has a directory of bundles to itself."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_bundles(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Keep bundles away from those of tests that run at the same time."""
    tmp_path_factory.getbasetemp()  # pytest makes its own before the place changes
    directory = tempfile.mkdtemp(prefix="bundles-", dir="/tmp")  # short, for paths of sockets
    monkeypatch.setenv("TMPDIR", directory)
    monkeypatch.setattr(tempfile, "tempdir", directory)
    yield
    shutil.rmtree(directory, ignore_errors=True)
