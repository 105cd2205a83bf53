"""Escapes are tried from cells that were prepared ahead: what was done to prepare them, and what was
done in their neighbours, must not show."""

from collections.abc import Iterator

import pytest

from cellwright import Sandbox
from tests.conftest import policy_named


@pytest.fixture(scope="session")
def strict() -> Iterator[Sandbox]:
    """A pool of cells under the default profile."""
    with Sandbox(policy=policy_named("strict"), pool=4) as sandbox:
        sandbox.settle()
        yield sandbox


@pytest.fixture(scope="session")
def standard() -> Iterator[Sandbox]:
    """A pool of cells in which programs may start others."""
    with Sandbox(policy=policy_named("standard"), pool=4) as sandbox:
        sandbox.settle()
        yield sandbox
