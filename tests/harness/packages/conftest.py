"""Tests about pip resolve by pip, whether uv is installed or not."""

from pathlib import Path

import pytest

from cellwright import PackageStore
from cellwright.harness.sandbox.packages import resolution
from tests.harness.packages.wheels import store_at


@pytest.fixture(params=["pip"])
def resolver(request: pytest.FixtureRequest) -> str:
    """The tool that resolves; a module parametrizes it indirectly to have both."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _resolves(resolver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if resolver == "pip":
        monkeypatch.setattr(resolution, "find_uv", lambda: "")


@pytest.fixture
def store(tmp_path: Path, wheels: Path) -> PackageStore:
    """A store of the wheels that the module makes."""
    return store_at(tmp_path / "store", wheels)
