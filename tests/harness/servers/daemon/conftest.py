"""One daemon for all tests of a module that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox
from tests.harness.servers.daemon.daemons import Daemon, serving


@pytest.fixture(scope="module")  # the tests of what is left count the processes of ours
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(Path(tmp_path_factory.mktemp("daemon"), "s")) as daemon:
        yield daemon


@pytest.fixture
def connected(daemon: Daemon) -> Iterator[Sandbox]:
    with daemon.sandbox() as sandbox:
        yield sandbox
