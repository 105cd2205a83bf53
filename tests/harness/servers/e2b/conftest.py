"""Fixtures of the tests of the E2B server."""

from collections.abc import Iterator

import pytest

from tests.harness.servers.e2b.e2b_server import Client, E2bServer, serving


@pytest.fixture(scope="package")
def e2b() -> Iterator[E2bServer]:
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def client(e2b: E2bServer) -> Client:
    return Client(e2b.url)


@pytest.fixture(scope="module")
def made(client: Client) -> Iterator[dict[str, str]]:
    made = client.make()
    yield made
    client.ask("DELETE", f"/sandboxes/{made['sandboxID']}")
