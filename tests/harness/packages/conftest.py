"""Tests about pip resolve by pip, whether uv is installed or not."""

import pytest

from cellwright.harness.sandbox.packages import resolving


@pytest.fixture(params=["pip"])
def resolver(request: pytest.FixtureRequest) -> str:
    """The tool that resolves; a module parametrizes it indirectly to have both."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _resolves(resolver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if resolver == "pip":
        monkeypatch.setattr(resolving, "find_uv", lambda: "")
