"""One server in this process for the tests of a module that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.harness.servers.mcp.servers import ERAS, Inside, inside


@pytest.fixture(scope="module")
def server() -> Iterator[Inside]:
    with inside("standard") as found:
        yield found


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> str:
    """The protocol with a handshake, and the one without."""
    return str(request.param)
