"""One server for the tests of a module that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.harness.servers.web.web_servers import Web, web_server


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with web_server() as found:
        yield found
